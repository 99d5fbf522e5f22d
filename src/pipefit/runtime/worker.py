"""A worker: one process that trains one stage and tells its parent how it goes.

What it says goes through a pipe: each step's loss, then its trace, or what failed. Where it is stands in shared memory
(`Heartbeat`), so that the parent knows it even of a worker that says nothing any more. A worker ends when its parent does.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
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
from pipefit.errors import PeerLost, PipefitError, PipefitWarning, UsageError, WorkerFailed
from pipefit.plans import Plan
from pipefit.runtime.trainer import Trainer, backend_of
from pipefit.trace import DeviceTrace

STARTING, MEETING, BUILDING, BETWEEN_STEPS = (
    -4,
    -3,
    -2,
    -1,
)  # what a heartbeat says outside the actions, which count from 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a worker is told. The task is pickled apart: if it cannot be loaded, the worker says so."""

    task: bytes
    plan: Plan
    rank: int
    steps: int
    seed: int
    timeout_seconds: float
    start_seconds: float
    store: str


class Heartbeat:
    """A worker's sign of life, in shared memory: how often it moved on, and the number of the action it is at."""

    def __init__(self, context: Any) -> None:
        self._words = context.RawArray("q", [0, STARTING])

    @property
    def beats(self) -> int:
        """Grows whenever the worker moves on."""
        return int(self._words[0])

    @property
    def action(self) -> int:
        """Number of the action the worker is at, or one of the negative names."""
        return int(self._words[1])

    def at(self, action: int) -> None:
        """The worker begins `action`."""
        self._words[1] = action
        self._words[0] += 1


def work(order: Order, pipe: Connection, heartbeat: Heartbeat) -> None:
    """The whole life of a worker process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(OSError):
        os.dup2(2, 1)  # what a model prints is for people: stdout belongs to the parent's result
    try:
        word: tuple[Any, ...] = ("done", *_train(order, pipe, heartbeat))
    except Exception as error:  # noqa: BLE001 - a worker reports whatever happens to it: the parent must not have to guess
        word = ("error", *_report(error), traceback.format_exc())
    with suppress(OSError):  # nobody listens any more
        pipe.send(word)
    pipe.close()
    if word[0] == "error":
        sys.stdout.flush()
        os._exit(1)  # the others hear of it at once; taking apart a group in the middle of its work may hang or abort


def _end_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _train(order: Order, pipe: Connection, heartbeat: Heartbeat) -> tuple[DeviceTrace, tuple[float, ...]]:
    """This worker's part of the training; its device's trace and the seconds of every step."""
    ranks = order.plan.ranks
    tells = len(order.plan.stages) - 1 in ranks[order.rank]  # the losses, which are the last stage's
    torch.set_num_threads(order.plan.profile.assumptions.threads)
    task = _task(order.task)
    heartbeat.at(MEETING)
    meeting = _Meeting(order) if len(ranks) > 1 else None
    heartbeat.at(BUILDING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PipefitWarning)  # of another machine the parent has warned
        trainer = Trainer(task, order.plan, seed=order.seed, timeout_seconds=order.timeout_seconds, on_action=heartbeat.at)
    if meeting is not None:
        heartbeat.at(MEETING)
        meeting.wait("ready")
    for step in range(order.steps):
        heartbeat.at(BETWEEN_STEPS)
        torch.manual_seed(order.seed + step)
        loss = trainer.step(task.batch(order.plan.training.batch_size))
        if tells:
            pipe.send(("step", step, loss))
    if meeting is not None:
        dist.destroy_process_group()
    trace = trainer.trace
    return trace.devices[order.plan.stages[ranks[order.rank][0]].device], trace.step_seconds


def _task(pickled: bytes) -> Task:
    try:
        factory = pickle.loads(pickled)  # noqa: S301 - our own parent's
    except Exception as error:
        raise UsageError(
            f"a worker cannot load the task ({_told(error)}): its function must be in a module that can be imported"
        ) from error
    task = factory()
    if not isinstance(task, Task):
        raise UsageError(f"the task's function returned a {type(task).__name__}: it must return a pipefit.Task")
    return task


class _Meeting:
    """Where the workers find each other. They wait here, so that unequal starts do not count as silence later."""

    def __init__(self, order: Order) -> None:
        self.rank, self.world = order.rank, len(order.plan.ranks)
        self.patience = timedelta(seconds=order.start_seconds)
        self.store = dist.FileStore(order.store, self.world)  # type: ignore[attr-defined]  # exported without its name
        os.environ["LOCAL_RANK"] = str(order.rank)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all on this machine
        backend, timeout = backend_of(order.plan), timedelta(seconds=order.timeout_seconds)
        self.wait("here")
        try:
            dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.world, timeout=timeout)
        except RuntimeError as error:
            raise PeerLost(f"the workers did not find each other ({_told(error)})") from error

    def wait(self, name: str) -> None:
        """Return when every worker has come to this point."""
        self.store.set(f"{name} {self.rank}", "")
        try:
            self.store.wait([f"{name} {rank}" for rank in range(self.world)], self.patience)
        except RuntimeError as error:
            raise PeerLost("another worker did not start in time") from error


def _report(error: Exception) -> tuple[type[PipefitError], str]:
    """A failure as the parent can always read it: one of our own types, and a text."""
    if isinstance(error, PipefitError):
        return next(kind for kind in type(error).__mro__ if kind.__module__ == PipefitError.__module__), str(error)
    return WorkerFailed, _told(error)


def _told(error: Exception) -> str:
    """Type and first line, of an exception that may not even know how to print itself."""
    text = str(traceback.TracebackException.from_exception(error)).strip().partition("\n")[0][:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
