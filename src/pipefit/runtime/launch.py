"""Launches the workers of a plan on this machine and supervises them.

There is one process for each device in use. Each has a pipe to the parent and a heartbeat that the parent can read.
Every wait has a timeout, in the workers and here. When training fails, the other workers soon fail too, because their
messages do not arrive. The parent reports only the root cause: a worker whose process died; else one that reported an
error of its own; else one that hangs; among several of a kind, the earliest. All other workers are stopped.

The workers find each other through a file in a new directory, so that no port is needed that another program may use.
For several machines, use `torchrun` with a script of your own around `pipefit.Trainer`.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.resource_tracker import ensure_running
from typing import Any

from pipefit.capture.task import Task
from pipefit.errors import PeerLost, PipefitError, UsageError, WorkerFailed
from pipefit.plans import Plan
from pipefit.runtime.elsewhere import TRAINED, warn_elsewhere
from pipefit.runtime.processes import Surroundings, forks
from pipefit.runtime.worker import BETWEEN_STEPS, BUILDING, MEETING, STARTING, Assignment, Heartbeat, work
from pipefit.schedule import lower
from pipefit.trace import DeviceTrace, Trace
from pipefit.validation import LONGEST_SECONDS, number, seed_number, whole

OnStep = Callable[[int, float], None]
_POLL_SECONDS = 0.5  # between two readings of the heartbeats
_GRACE_SECONDS = 3.0  # for the other workers to report, once one has failed
_PHASES = {
    STARTING: "while it started",
    MEETING: "while it waited for the others to start",
    BUILDING: "while it built its layers",
    BETWEEN_STEPS: "while it made its batch",
}


def train(
    task: Callable[[], Task],
    plan: Plan,
    *,
    steps: int,
    seed: int = 0,
    timeout_seconds: float = 60.0,
    start_seconds: float = 120.0,
    on_step: OnStep | None = None,
) -> tuple[list[float], Trace]:
    """Train for `steps` steps with one worker process per device; the losses and the measured trace of all devices.

    Args:
        task: builds the task in each worker; must be picklable (a function of a module, or a `functools.partial` of
            one).
        timeout_seconds: the longest that an action, or making a batch, may take.
        start_seconds: the longest that a worker may take to start and to build its layers.
        on_step: called with (step, mean loss) as each step ends.

    Raises:
        OutOfMemory: a device passed its cap; the message says where.
        WorkerFailed: a worker died, hung or raised; the message names it.
        FileError: the plan was made for another model.
        UsageError: the task cannot be sent to the workers, or a number is out of range.
    """
    whole("steps", steps, 1)
    seed_number(seed)
    for what, seconds in (("timeout_seconds", timeout_seconds), ("start_seconds", start_seconds)):
        number(what, seconds, below=LONGEST_SECONDS)
    warn_elsewhere(plan.profile.assumptions, TRAINED)
    supervisor = _Supervisor(plan, steps, timeout_seconds, start_seconds, on_step)
    pickled, meeting = _pickled(task), tempfile.mkdtemp(prefix="pipefit-")
    try:
        supervisor.start(pickled, seed, os.path.join(meeting, "store"))
        supervisor.until_done()
    finally:
        supervisor.stop()
        shutil.rmtree(meeting, ignore_errors=True)
    return supervisor.losses, supervisor.trace()


def _pickled(task: Callable[[], Task]) -> bytes:
    if not callable(task):
        raise UsageError(
            f"every worker builds its own task: pass a function that returns it, not a {type(task).__name__}"
        )
    try:
        return pickle.dumps(task)
    except Exception as error:
        raise UsageError(
            f"the task cannot be sent to the workers ({error}): pass a function of a module, or a functools.partial "
            "of one"
        ) from error


@dataclass(slots=True)
class _Worker:
    """One worker as the parent sees it."""

    process: Any
    pipe: Connection
    heartbeat: Heartbeat
    beats: int = 0
    last_sign: float = field(default_factory=time.monotonic)
    result: tuple[DeviceTrace, tuple[float, ...]] | None = None
    error: PipefitError | None = None

    def look(self) -> None:
        """Read the heartbeat: note the time if the worker has begun another action."""
        if self.heartbeat.beats != self.beats:
            self.beats, self.last_sign = self.heartbeat.beats, time.monotonic()


@dataclass(slots=True)
class _Supervisor:
    """The parent's side: starts the workers, collects their reports, and finds the root cause of a failure."""

    plan: Plan
    steps: int
    timeout_seconds: float
    start_seconds: float
    on_step: OnStep | None
    workers: list[_Worker] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def start(self, task: bytes, seed: int, store: str) -> None:
        context, surroundings = forks(), Surroundings.here()
        for rank in range(len(self.plan.ranks)):
            ours, theirs = context.Pipe(duplex=False)
            heartbeat = Heartbeat(context)
            assignment = Assignment(
                task=task, plan=self.plan, rank=rank, steps=self.steps, seed=seed, store=store,
                timeout_seconds=self.timeout_seconds, start_seconds=self.start_seconds,
            )  # fmt: skip
            process = context.Process(
                target=work,
                args=(assignment, surroundings, theirs, heartbeat),
                daemon=True,
                name=f"pipefit-worker-{rank}",
            )
            with _interrupts_held():
                process.start()
                self.workers.append(_Worker(process, ours, heartbeat))
            theirs.close()

    def until_done(self) -> None:
        """Wait until every worker has delivered its trace.

        Raises:
            PipefitError: the root cause, if a worker failed.
        """
        while waiting := [worker for worker in self.workers if worker.result is None]:
            heard = wait([worker.pipe for worker in waiting], timeout=_POLL_SECONDS)
            for worker in waiting:
                worker.look()
                if worker.pipe in heard:
                    self._hear(worker)
            now = time.monotonic()
            if any(w.error or now - w.last_sign > self._patience(w) + 2 * _GRACE_SECONDS for w in waiting):
                self._raise_cause()

    def stop(self) -> None:
        """No worker outlives the call."""
        for worker in self.workers:
            if worker.result is None:
                worker.process.kill()
        for worker in self.workers:
            worker.process.join(timeout=5)
            worker.process.kill()  # in case it has delivered its trace but does not end
            worker.process.join()
            worker.pipe.close()

    def trace(self) -> Trace:
        results = {worker.result[0].device: worker.result[0] for worker in self.workers if worker.result}
        seconds = [worker.result[1] for worker in self.workers if worker.result]
        devices = tuple(
            results.get(n) or DeviceTrace(device=n, budget_bytes=device.memory_bytes, events=(), memory=())
            for n, device in enumerate(self.plan.cluster.devices)
        )
        return Trace(
            source="measured",
            steps=self.steps,
            devices=devices,
            step_seconds=tuple(map(max, zip(*seconds, strict=True))),
        )

    # ---------------------------------------------------------------- reports of workers

    def _hear(self, worker: _Worker) -> None:
        try:
            kind, *words = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join(timeout=1)
            worker.error = _death(worker.process.exitcode, worker.heartbeat.action)
            return
        finally:
            worker.last_sign = time.monotonic()
        if kind == "step":
            step, loss = words
            self.losses.append(loss)
            if self.on_step is not None:
                self.on_step(step, loss)
        elif kind == "done":
            worker.result = tuple(words)
        elif kind == "error":
            error, message, traceback = words
            worker.error = error(message)
            worker.error.add_note(traceback)

    def _raise_cause(self) -> None:
        """Give the other workers a moment to report, then raise the root cause."""
        until = time.monotonic() + _GRACE_SECONDS
        while (rest := until - time.monotonic()) > 0:
            pending = [w for w in self.workers if w.error is None and w.result is None]
            heard = wait([w.pipe for w in pending], timeout=rest) if pending else []
            if not heard:
                break
            for worker in pending:
                if worker.pipe in heard:
                    self._hear(worker)
        rank, worker = min(enumerate(self.workers), key=lambda item: _cause_rank(item[1]))
        raise self._error_of(rank, worker)

    def _error_of(self, rank: int, worker: _Worker) -> PipefitError:
        """The error to raise: the worker's own, with its name and what it was doing."""
        error = worker.error
        if error is not None and not isinstance(error, WorkerFailed):
            return error  # its message says where
        number, names = worker.heartbeat.action, self.plan.profile.layers
        stages = [self.plan.stages[stage] for stage in self.plan.ranks[rank]]
        layers = ", ".join(f"{names[stage.start]} to {names[stage.stop - 1]}" for stage in stages)
        who = f"worker {rank} (device {stages[0].device}, layers {layers})"
        at = _PHASES.get(number) or f"at {lower(self.plan).actions[stages[0].device][number]}"
        if error is None:
            return WorkerFailed(
                f"{who} hangs {at}: no sign of life for {self._patience(worker):g} s; all workers were stopped"
            )
        failure = WorkerFailed(f"{who} failed {at}: {error}; all workers were stopped")
        for note in getattr(error, "__notes__", ()):
            failure.add_note(note)
        return failure

    def _patience(self, worker: _Worker) -> float:
        return self.start_seconds if worker.heartbeat.action < BETWEEN_STEPS else self.timeout_seconds


def _cause_rank(worker: _Worker) -> tuple[int, float]:
    """A key for the likeliest root cause: the worker with the smallest key.

    A process that died comes first, then a worker's own error, then a worker that hangs, and last one that only lost
    its peer or has ended; within each of these, the one that was heard of least recently.
    """
    if isinstance(worker.error, _Death):
        return 0, worker.last_sign
    if worker.error is not None and not isinstance(worker.error, PeerLost):
        return 1, worker.last_sign
    return (2 if worker.error is None and worker.result is None else 3), worker.last_sign


class _Death(WorkerFailed):
    """A process that ended without a report."""


def _death(code: int | None, action: int) -> _Death:
    if code == -signal.SIGKILL:
        return _Death("killed by signal 9, as the system does when memory runs out")
    if code is not None and code < 0:
        return _Death(f"killed by signal {-code} ({signal.strsignal(-code)})")
    if code == 1 and action == STARTING:
        return _Death('it could not be started; a script must call train under `if __name__ == "__main__":`')
    return _Death(f"its process exited with code {code}")


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes started inside, and their forks, ignore the Ctrl-C of a terminal; the parent stops them instead."""
    ensure_running()  # otherwise multiprocessing starts it inside, and removes the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
