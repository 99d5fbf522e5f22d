"""A worker: one process that trains the stages of one device and reports to its parent.

It sends its reports through a pipe: a warning if there is one, the loss of each step, then its trace, or what failed.
The number of the action that it is at stands in shared memory (`Heartbeat`), so that the parent can read it even when
the worker hangs. A worker ends when its parent ends.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from pipefit.capture.task import Task
from pipefit.errors import PeerLost, PipefitError, PipefitWarning, UsageError, WorkerFailed, in_one_line
from pipefit.plans import Plan
from pipefit.runtime.hardware import backend_of
from pipefit.runtime.processes import Passed, Surroundings
from pipefit.runtime.trainer import Trainer
from pipefit.trace import DeviceTrace

# What a heartbeat says while the worker is at no action. Actions are numbered from 0; their count stands for the end of
# a step, where losses are exchanged.
STARTING, RENDEZVOUS, BUILDING, BETWEEN_STEPS = -4, -3, -2, -1

_FOREVER = timedelta(days=1000)  # a worker waits for others as long as its parent lets it: the parent knows who hangs


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a worker is to do, on the plan's device of its rank.

    The task is pickled by itself, so that a worker which cannot load it can still report that.
    """

    task: bytes
    plan: Plan
    rank: int
    steps: int
    seed: int
    numbers: bool
    meeting: Passed  # an empty file, through which the workers find each other


class Heartbeat:
    """A worker's sign of life, in shared memory: how many actions it has begun, the number of the one it is at, and of
    its step.
    """

    def __init__(self, context: Any) -> None:
        self._words = context.RawArray("q", [0, STARTING, 0])

    @property
    def beats(self) -> int:
        """How many actions the worker has begun: it grows as long as the worker does not hang."""
        return int(self._words[0])

    @property
    def action(self) -> int:
        """The number of the action that the worker is at, or, at none, one of the negative constants of this module."""
        return int(self._words[1])

    @property
    def step(self) -> int:
        """The number of the step that the worker is in; behind the last one, what it left in flight is ended."""
        return int(self._words[2])

    def enter(self, step: int) -> None:
        """The worker goes on to another step."""
        self._words[2] = step
        self.at(BETWEEN_STEPS)

    def at(self, action: int) -> None:
        """The worker begins `action`."""
        self._words[1] = action
        self._words[0] += 1


def work(assignment: Assignment, surroundings: Surroundings, pipe: Connection, heartbeat: Heartbeat) -> None:
    """The whole life of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all, and the parent stops the others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    surroundings.take_over()
    with suppress(OSError):
        os.dup2(2, 1)  # what a model prints goes to stderr: stdout belongs to the parent's result
    try:
        word: tuple[Any, ...] = ("done", *_train(assignment, pipe, heartbeat))
    except Exception as error:  # noqa: BLE001 - whatever happens is reported to the parent
        word = ("error", *_report(error), traceback.format_exc())
    with suppress(OSError):  # the parent may be gone
        pipe.send(word)
    pipe.close()
    if word[0] == "error":
        sys.stdout.flush()
        # The others learn of it at once. Destroying a process group in the middle of its work may hang or abort.
        os._exit(1)


def _end_with_parent() -> None:
    """End when the parent has ended."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _train(assignment: Assignment, pipe: Connection, heartbeat: Heartbeat) -> tuple[DeviceTrace, tuple[float, ...]]:
    """This worker's part of the training; its device's trace and the seconds of every step."""
    ranks = assignment.plan.ranks
    reports_losses = len(assignment.plan.stages) - 1 in ranks[assignment.rank]
    torch.set_num_threads(assignment.plan.profile.assumptions.threads)
    task = _task(assignment.task)
    heartbeat.at(RENDEZVOUS)
    rendezvous = _Rendezvous(assignment) if len(ranks) > 1 else None
    heartbeat.at(BUILDING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PipefitWarning)  # the parent warns
        trainer = Trainer(
            task,
            assignment.plan,
            seed=assignment.seed,
            timeout_seconds=_FOREVER.total_seconds(),
            numbers=assignment.numbers,
            on_action=heartbeat.at,
        )
    if trainer.not_compared:
        pipe.send(("warning", trainer.not_compared))
    if rendezvous is not None:
        heartbeat.at(RENDEZVOUS)
        rendezvous.wait("ready")
    for step in range(assignment.steps):
        heartbeat.enter(step)
        torch.manual_seed(assignment.seed + step)
        loss = trainer.step(task.batch(assignment.plan.training.batch_size))
        if reports_losses and step >= trainer.late:
            pipe.send(("step", step - trainer.late, loss))
    heartbeat.enter(assignment.steps)
    rest = trainer.finish()
    for step, loss in enumerate(rest, start=assignment.steps - len(rest)):
        if reports_losses:
            pipe.send(("step", step, loss))
    if rendezvous is not None:
        dist.destroy_process_group()
    trace = trainer.trace
    return trace.devices[assignment.plan.stages[ranks[assignment.rank][0]].device], trace.step_seconds


def _task(pickled: bytes) -> Task:
    try:
        factory = pickle.loads(pickled)  # noqa: S301 - our own parent's
    except Exception as error:
        raise UsageError(
            f"a worker cannot load the task ({in_one_line(error)}): its function must be in a module that can be "
            "imported"
        ) from error
    task = factory()
    if not isinstance(task, Task):
        raise UsageError(f"the task's function returned a {type(task).__name__}: it must return a pipefit.Task")
    return task


class _Rendezvous:
    """Where the workers find each other, and wait for the slowest to start."""

    def __init__(self, assignment: Assignment) -> None:
        self.rank, self.world = assignment.rank, len(assignment.plan.ranks)
        path = f"/proc/self/fd/{assignment.meeting.number}"
        self.store = dist.FileStore(path, self.world)  # type: ignore[attr-defined]  # exported without its name
        plan = assignment.plan
        os.environ["LOCAL_RANK"] = str(plan.stages[plan.ranks[self.rank][0]].device)  # whatever we have inherited
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all on this machine
        backend = backend_of(plan)
        self.wait("here")
        try:
            dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.world, timeout=_FOREVER)
        except RuntimeError as error:
            raise PeerLost(f"the workers did not find each other ({in_one_line(error)})") from error

    def wait(self, name: str) -> None:
        """Return when every worker has come to this point."""
        self.store.set(f"{name} {self.rank}", "")
        try:
            self.store.wait([f"{name} {rank}" for rank in range(self.world)], _FOREVER)
        except RuntimeError as error:
            raise PeerLost(f"another worker did not start ({in_one_line(error)})") from error


def _report(error: Exception) -> tuple[type[PipefitError], str]:
    """A failure as a type and a text that the parent can always unpickle: one of pipefit's own exception types."""
    if isinstance(error, PipefitError):
        return next(kind for kind in type(error).__mro__ if kind.__module__ == PipefitError.__module__), str(error)
    return WorkerFailed, in_one_line(error)
