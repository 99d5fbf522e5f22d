"""A worker: one process that trains the stages of one device and reports to its parent.

It sends its reports through a pipe: warnings, the loss of each step, the costs of each save, then its trace,
or the failure. The number of its present action is in shared memory (`Heartbeat`), so that the parent can
read it even when the worker hangs. A worker ends when its parent ends.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pathlib
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from math import isfinite
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from pipefit.capture import Task
from pipefit.checkpoints import Candidates, Checkpoint, Owner, keep, load_weights
from pipefit.errors import (
    FileError,
    LimitMet,
    LossNotFinite,
    OutOfMemory,
    PeerLost,
    PipefitError,
    PipefitWarning,
    SaveFailed,
    UsageError,
    WorkerFailed,
    all_lines,
    in_one_line,
)
from pipefit.processes import met
from pipefit.runtime.checkpoint.restoring import check_task
from pipefit.runtime.comm.transport import TOKEN, check_members
from pipefit.runtime.engine.tensor_groups import lost
from pipefit.runtime.hardware import Hardware, ran_out
from pipefit.runtime.launch.forks import Inherited, Passed
from pipefit.runtime.options import Saving, StepReport, Supervision, TrainOptions
from pipefit.runtime.trainer import Trainer
from pipefit.schema.plan import Plan
from pipefit.schema.trace import DeviceTrace
from pipefit.schema.validation import whole
from pipefit.texts import counted, printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Train steps `first` to `steps - 1`, with random draws by `seed`, by the `options` of `train`.

    `resume` is the folder of the checkpoint after `first` steps, `weights` a safetensors file or sharded
    model from which the training starts. `owner` is the run that trains.
    """

    steps: int
    seed: int
    options: TrainOptions = TrainOptions()
    first: int = 0
    resume: str | None = None
    weights: str | None = None
    owner: Owner | None = None

    @property
    def absolute(self) -> Orders:
        """These orders with absolute paths, for workers whose task may change their working directory.

        Raises:
            OSError: the working directory has been removed.
        """
        saving, resume, weights = self.options.saving, self.resume, self.weights
        saving = saving and replace(saving, directory=_absolute(saving.directory))
        return replace(
            self,
            options=replace(self.options, saving=saving),
            resume=resume and _absolute(resume),
            weights=weights and _absolute(weights),
        )

    def after(self, checkpoint: Checkpoint) -> Orders:
        """Return these orders, continued from a checkpoint."""
        return replace(self, first=checkpoint.manifest.step, resume=str(checkpoint.folder), weights=None)


def _absolute(path: str) -> str:
    return os.fspath(pathlib.Path(path).absolute())


def orders(
    plan: Plan, options: TrainOptions, *, steps: int, resume: Candidates | None, owner: Owner
) -> Orders:
    """Return the orders of a training by `plan`, which continues from `resume`.

    `owner` is the run of a new training; one that continues from a checkpoint gets that checkpoint's
    training.

    Raises:
        FileError: the checkpoint is missing or of another task, or the weights are missing.
        UsageError: a number is out of range, or differs from that of the checkpoint.
    """
    whole("steps", steps, 1)
    weights = options.weights
    if weights is not None:
        load_weights(weights, ())  # reads no tensor, but reports a missing file before a worker starts
    checkpoint = None if resume is None else _resumed(resume, plan, steps, options.seed)
    seed = (options.seed or 0) if checkpoint is None else checkpoint.manifest.seed
    owner = owner if checkpoint is None else replace(owner, training=checkpoint.manifest.owner.training)
    ordered = Orders(
        steps=steps,
        seed=seed,
        options=replace(options, resume=None, weights=None),
        weights=None if weights is None else os.fspath(weights),
        owner=owner,
    )
    return ordered if checkpoint is None else ordered.after(checkpoint)


def _resumed(candidates: Candidates, plan: Plan, steps: int, seed: int | None) -> Checkpoint:
    """Return the newest checkpoint of `candidates`, from which training continues to `steps` steps."""
    checkpoint = candidates.take()
    check_task(checkpoint, plan.profile)
    checkpoint.check_headers()  # before anything starts; workers read the bytes and check their hashes
    manifest, named = checkpoint.manifest, printable(checkpoint.folder)
    if manifest.step >= steps:
        raise UsageError(
            f"{named} already has {counted(manifest.step, 'step')}, but the training should end after "
            f"{steps}: give a larger number of steps (--steps)"
        )
    if seed is not None and seed != manifest.seed:
        raise UsageError(
            f"{named} was trained with seed {manifest.seed}, which determines all further random draws, by "
            f"training {manifest.owner}: omit seed {seed}"
        )
    return checkpoint


# Values of a heartbeat outside of actions. Actions are numbered from 0; their count stands for the end of a
# step, when losses are exchanged.
IN_A_STEP, SAVES_TOGETHER, SAVING, STARTING, RENDEZVOUS, BUILDING, BETWEEN_STEPS = -7, -6, -5, -4, -3, -2, -1
PHASES = {
    IN_A_STEP: "in a step of torch's engine",
    STARTING: "while it started",
    RENDEZVOUS: "while it waited for the other workers to start",
    BUILDING: "while it built its layers",
    BETWEEN_STEPS: "while it made its batch",
    SAVING: "while it saved a checkpoint",
    SAVES_TOGETHER: "while it waited for the other workers to save",
}

_FOREVER = timedelta(days=1000)  # no timeout between workers: the parent knows which one hangs


MakeTrainer = Callable[..., Any]  # makes a `Trainer`, or that of another engine with the same methods


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Work of a worker, on the plan's device of its rank.

    The task is pickled separately, so that a worker that cannot load it can still report the error.
    """

    task: bytes
    plan: Plan
    rank: int
    orders: Orders
    meeting: Passed  # an empty file, through which the workers meet
    token: str  # authenticates the workers to each other
    trainer: MakeTrainer
    hold: Passed | None = None  # the lock on the checkpoint folder, for the first worker, which saves


class Heartbeat:
    """A worker's sign of life, in shared memory.

    It holds the number of actions begun, the number of the present action, the number of steps since the
    pipeline was empty, and whether the pipeline is being drained.
    """

    def __init__(self, context: Any) -> None:
        self._words = context.RawArray("q", [0, STARTING, 0, 0])
        self._process, self._in_a_fork = 0, _nothing

    def watch(self, in_a_fork: Callable[[], None]) -> None:
        """Register this process as the worker; in a fork of it, `in_a_fork` is called at the next action."""
        self._process, self._in_a_fork = os.getpid(), in_a_fork

    @property
    def beats(self) -> int:
        """Number of actions that the worker has begun; it grows unless the worker hangs."""
        return int(self._words[0])

    @property
    def action(self) -> int:
        """Number of the worker's present action, or a negative constant outside of actions."""
        return int(self._words[1])

    @property
    def step(self) -> int:
        """Number of steps since the pipeline was empty, before the present one."""
        return int(self._words[2])

    @property
    def empties(self) -> bool:
        """True if the worker completes microbatches in flight, outside of a step."""
        return bool(self._words[3])

    def enter(self, step: int, *, empties: bool = False) -> None:
        """Begin another step, or with `empties`, after a step, the completion of microbatches in flight."""
        self._words[2], self._words[3] = step, empties
        self.at(BETWEEN_STEPS)

    def at(self, action: int) -> None:
        """Begin `action`."""
        if os.getpid() != self._process:
            self._in_a_fork()
        self._words[1] = action
        self._words[0] += 1


def work(assignment: Assignment, inherited: Inherited, pipe: Connection, heartbeat: Heartbeat) -> None:
    """Run the whole life of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # terminals send Ctrl-C to all; the parent stops all
    inherited.take_over()
    if assignment.hold is not None:
        keep(assignment.hold.number)
    heartbeat.watch(partial(_end_fork, assignment.plan.workers[assignment.rank], pipe))
    with suppress(OSError):
        os.dup2(2, 1)  # the model's prints go to stderr: stdout belongs to the parent's result
    try:
        threading.Thread(target=_end_with_parent, daemon=True).start()
        word: tuple[Any, ...] = ("done", *_train(assignment, pipe, heartbeat))
    except BaseException as error:  # noqa: BLE001 - every error is reported to the parent
        result = error.post_mortem if isinstance(error, OutOfMemory) else None
        word = ("error", *_report(error, assignment, heartbeat), traceback.format_exc(), result)
    with suppress(OSError):  # the parent may be gone
        pipe.send(word)
    pipe.close()
    if word[0] == "error":
        sys.stdout.flush()
        # The others notice at once. Destroying a process group in the middle of its work may hang or abort.
        os._exit(1)


def _nothing() -> None:
    """Do nothing: the heartbeat is not watched yet."""


def _end_fork(device: int, pipe: Connection) -> None:
    """End this process, a fork of a worker made by a model, because reports of both would collide."""
    with suppress(OSError):
        pipe.send(
            (
                "error",
                UsageError,
                f"device {device} was forked by a module (os.fork, multiprocessing), {_FORKED}",
                "",
                None,
            )
        )
    os._exit(1)


_FORKED = (
    "and the fork continues training like the worker: end the fork where it was made (os._exit), or fork "
    "in the function that makes batches"
)


def _end_with_parent() -> None:
    """Exit when the parent has ended."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _train(
    assignment: Assignment, pipe: Connection, heartbeat: Heartbeat
) -> tuple[DeviceTrace, tuple[float, ...]]:
    """Train this worker's part; return its device's trace and the seconds of every step."""
    orders, workers = assignment.orders, assignment.plan.workers
    options, saving = orders.options, orders.options.saving
    torch.set_num_threads(assignment.plan.profile.assumptions.threads)
    torch.manual_seed(orders.seed)  # for a task factory that builds the module itself
    task = _task(assignment.task)
    heartbeat.at(RENDEZVOUS)
    rendezvous = _Rendezvous(assignment) if len(workers) > 1 else None
    heartbeat.at(BUILDING)
    reports = _WorkerReports(assignment, pipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PipefitWarning)  # the parent warns
        trainer: Trainer = assignment.trainer(
            task,
            assignment.plan,
            callbacks=[reports.hear],
            supervision=Supervision(
                on_action=heartbeat.at,
                on_save=lambda waits: heartbeat.at(SAVES_TOGETHER if waits else SAVING),
                on_weights=lambda waits: heartbeat.at(RENDEZVOUS if waits else BUILDING),
                on_failed_save=reports.failed_save,
                owner=orders.owner,
                held=None if saving is None else saving.directory,
            ),
            seed=orders.seed,
            timeout_seconds=_FOREVER.total_seconds(),
            numbers=options.numbers,
            share_device=options.share_device,
            cap=options.cap,
        )
    if trainer.not_compared:
        pipe.send(("warning", trainer.not_compared))
    if orders.resume is not None:
        _load(trainer, orders.resume, orders)
    if orders.weights is not None:
        trainer.load_weights(orders.weights)
    if rendezvous is not None:
        heartbeat.at(RENDEZVOUS)
        rendezvous.wait("ready")
    _steps(assignment, task, trainer, reports, heartbeat)
    if rendezvous is not None:
        dist.destroy_process_group()
    trace = trainer.trace
    return trace.devices[workers[assignment.rank]], trace.step_seconds


def _load(trainer: Trainer, folder: str, orders: Orders) -> None:
    """Load the checkpoint in `folder`.

    Raises:
        FileError: it has changed since the orders were made.
    """
    steps = trainer.load(folder)
    if steps != orders.first or (
        orders.owner is not None and trainer.owner.training != orders.owner.training
    ):
        raise FileError(
            f"{printable(folder)} has been replaced: it holds step {steps} of training {trainer.owner}, but "
            f"should hold step {orders.first} of {orders.owner}"
        )


def _steps(
    assignment: Assignment, task: Task, trainer: Trainer, reports: _WorkerReports, heartbeat: Heartbeat
) -> None:
    """Run all steps and saves of this worker."""
    orders, since = assignment.orders, 0
    steps, saving = orders.steps, orders.options.saving
    if saving is not None:
        trainer.state_dict(optimizer=True)  # refuses state that checkpoints cannot hold before the first step
    for step in range(orders.first, steps):
        heartbeat.enter(since)
        torch.manual_seed(orders.seed + step)
        loss = trainer.step(task.batch(assignment.plan.training.batch_size))
        if step >= orders.first + trainer.late:
            reports.step(step - trainer.late, loss)
        since += 1
        reports.over = step + 1 == steps
        if saving is not None and saving.after(step + 1, steps):
            heartbeat.enter(since, empties=True)
            reports.save(trainer, saving)
            since = 0
    heartbeat.enter(since, empties=True)
    rest = trainer.finish()
    for step, loss in enumerate(rest, start=steps - len(rest)):
        reports.step(step, loss)


class _WorkerReports:
    """Reports of a worker to its parent during training."""

    def __init__(self, assignment: Assignment, pipe: Connection) -> None:
        orders, plan = assignment.orders, assignment.plan
        self._pipe, self._saving, self._stops = pipe, orders.options.saving, orders.options.on_nan == "stop"
        self._reports_steps = plan.workers[assignment.rank] == plan.stages[-1].devices[0]
        self._heard = deque[StepReport]()
        self.over = False  # whether all steps are done, so that a failed save cannot stop any

    def hear(self, report: StepReport) -> None:
        """Keep the trainer's report of a step."""
        self._heard.append(report)

    def step(self, step: int, loss: float) -> None:
        """Report a step, which one worker does for all; every worker knows its loss and its peaks.

        Raises:
            LossNotFinite: the loss is infinite or nan, and `on_nan` is `stop`.
        """
        report = self._heard.popleft()
        if self._reports_steps:
            self._pipe.send(("step", replace(report, step=step)))
        if self._stops and not isfinite(loss):
            raise LossNotFinite(not_finite(step, loss))

    def save(self, trainer: Trainer, saving: Saving) -> None:
        """Save a checkpoint, and report its costs."""
        try:
            trainer.save(saving.directory, keep=saving.keep, background=not saving.in_foreground)
        except FileError as failure:
            self.failed_save(SaveFailed(str(failure), trainer.steps_done))
        else:
            if (
                trainer.saved is not None and trainer.saved.step == trainer.steps_done
            ):  # all workers have begun it
                self._pipe.send(("saved", trainer.saved))

    def failed_save(self, failure: SaveFailed) -> None:
        """Report a checkpoint that could not be written; raise it if it must end the training."""
        stops = self._saving is not None and self._saving.on_failure == "stop"
        if stops and not self.over:
            raise failure
        self._pipe.send(("unsaved", failure.step, str(failure)))


def not_finite(step: int, loss: float) -> str:
    """Return the message about an infinite or nan loss."""
    return (
        f"the loss of step {step} is {loss}: lower the learning rate, clip gradients (clip_norm), or check "
        "the data; later checkpoints are affected"
    )


def _task(pickled: bytes) -> Task:
    try:
        factory = pickle.loads(pickled)  # noqa: S301 - pickled by the parent
    except Exception as error:
        raise UsageError(
            f"a worker cannot load the task ({in_one_line(error)}): its function must be in a module that "
            "can be imported"
        ) from error
    task = factory()
    if not isinstance(task, Task):
        raise UsageError(
            f"the task's function returned a {type(task).__name__}: it must return a pipefit.Task"
        )
    return task


class _Rendezvous:
    """Meeting of the workers, which waits for the slowest to start."""

    def __init__(self, assignment: Assignment) -> None:
        self.rank, self.world = assignment.rank, len(assignment.plan.workers)
        path = f"/proc/self/fd/{assignment.meeting.number}"
        self.store = dist.FileStore(path, self.world)  # type: ignore[attr-defined]  # exported unnamed
        plan = assignment.plan
        count = str(self.world)  # whatever the environment says
        os.environ |= {"RANK": str(self.rank), "LOCAL_RANK": str(plan.workers[self.rank])}
        os.environ |= {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, TOKEN: assignment.token}
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all workers are on this machine
        backend = Hardware(plan, assignment.orders.options.share_device).backend
        self.wait("here")
        try:
            dist.init_process_group(
                backend, store=self.store, rank=self.rank, world_size=self.world, timeout=_FOREVER
            )
        except RuntimeError as error:
            raise lost(
                "the workers could not connect to each other", error, plan.workers[self.rank]
            ) from error
        check_members(None, "all")

    def wait(self, name: str) -> None:
        """Wait until every worker has reached this point."""
        self.store.set(f"{name} {self.rank}", "")
        try:
            self.store.wait([f"{name} {rank}" for rank in range(self.world)], _FOREVER)
        except RuntimeError as error:
            raise PeerLost(f"another worker did not start ({in_one_line(error)})") from error


def _report(
    error: BaseException, assignment: Assignment, heartbeat: Heartbeat
) -> tuple[type[PipefitError], str]:
    """Return a failure as a type and a text that the parent can always unpickle.

    The type is one of pipefit's exception types. An out-of-memory error in the model's code is reported as
    such, although a check of the code raised a `UsageError`.
    """
    behind = error.__cause__ if isinstance(error, UsageError) and error.__cause__ is not None else error
    if ran_out(behind):  # outside of actions, which would have named themselves
        device, where = (
            assignment.plan.workers[assignment.rank],
            PHASES.get(heartbeat.action, "before or between steps"),
        )
        return OutOfMemory, f"device {device} ran out of memory {where}: {all_lines(behind)}"
    if isinstance(error, PipefitError):
        return next(kind for kind in type(error).__mro__ if kind.__module__ == PipefitError.__module__), str(
            error
        )
    if limit := met(error):
        return LimitMet, f"{in_one_line(error)}; {limit}"
    return WorkerFailed, in_one_line(error)
