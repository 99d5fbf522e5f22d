"""Launching the workers of a plan on this machine, and watching over them.

One process a stage, each with a pipe to the parent and a heartbeat that it can read. Every wait has a timeout, in the
workers and here. When something goes wrong the parent decides who is to blame: a worker that died without a word, else
one that reported an error of its own, else one that fell silent while the others waited for it; among equals the
first. The rest are victims and are stopped.

The workers meet through a file in a fresh directory, so that no port can be taken by somebody else. For several
machines use `torchrun` with a script of your own around `pipefit.Trainer`.
"""

from __future__ import annotations

import multiprocessing as mp
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
from pipefit.runtime.worker import BETWEEN_STEPS, BUILDING, MEETING, STARTING, Assignment, Heartbeat, work
from pipefit.schedule import lower
from pipefit.trace import DeviceTrace, Trace
from pipefit.validation import LONGEST_SECONDS, number, seed_number, whole

OnStep = Callable[[int, float], None]
_POLL_SECONDS = 0.5  # between two looks at the heartbeats
_GRACE_SECONDS = 3.0  # for the other workers to report, once one has failed
_SITUATIONS = {
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
        start_seconds: the longest that a worker may take to import torch and build its layers.
        on_step: called with (step, mean loss) as each step ends.

    Raises:
        OutOfMemory: a device passed its cap; the message says where.
        WorkerFailed: a worker died, hung or raised; the message names it.
        FileError: the plan was made for another model.
        UsageError: the task cannot be sent to the workers, or a number makes no sense.
    """
    whole("steps", steps, 1)
    seed_number(seed)
    for what, seconds in (("timeout_seconds", timeout_seconds), ("start_seconds", start_seconds)):
        number(what, seconds, below=LONGEST_SECONDS)
    warn_elsewhere(plan.profile.assumptions, TRAINED)
    watch = _Watch(plan, steps, timeout_seconds, start_seconds, on_step)
    pickled, meeting = _pickled(task), tempfile.mkdtemp(prefix="pipefit-")
    try:
        watch.start(pickled, seed, os.path.join(meeting, "store"))
        watch.until_done()
    finally:
        watch.stop()
        shutil.rmtree(meeting, ignore_errors=True)
    return watch.losses, watch.trace()


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
        """Has it moved on since the last look?"""
        if self.heartbeat.beats != self.beats:
            self.beats, self.last_sign = self.heartbeat.beats, time.monotonic()


@dataclass(slots=True)
class _Watch:
    """The parent's side: starts workers, collects what they say, decides who is to blame."""

    plan: Plan
    steps: int
    timeout_seconds: float
    start_seconds: float
    on_step: OnStep | None
    workers: list[_Worker] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def start(self, task: bytes, seed: int, store: str) -> None:
        context = mp.get_context("spawn")
        for rank in range(len(self.plan.ranks)):
            ours, theirs = context.Pipe(duplex=False)
            heartbeat = Heartbeat(context)
            assignment = Assignment(
                task=task, plan=self.plan, rank=rank, steps=self.steps, seed=seed, store=store,
                timeout_seconds=self.timeout_seconds, start_seconds=self.start_seconds,
            )  # fmt: skip
            process = context.Process(
                target=work, args=(assignment, theirs, heartbeat), daemon=True, name=f"pipefit-worker-{rank}"
            )
            with _interrupts_held():
                process.start()
                self.workers.append(_Worker(process, ours, heartbeat))
            theirs.close()

    def until_done(self) -> None:
        """Listen until every worker has delivered its trace.

        Raises:
            PipefitError: the culprit's error.
        """
        while waiting := [worker for worker in self.workers if worker.result is None]:
            heard = wait([worker.pipe for worker in waiting], timeout=_POLL_SECONDS)
            for worker in waiting:
                worker.look()
                if worker.pipe in heard:
                    self._hear(worker)
            now = time.monotonic()
            if any(w.error or now - w.last_sign > self._patience(w) + 2 * _GRACE_SECONDS for w in waiting):
                self._settle()

    def stop(self) -> None:
        """No worker outlives the call."""
        for worker in self.workers:
            if worker.result is None:
                worker.process.kill()
        for worker in self.workers:
            worker.process.join(timeout=5)
            worker.process.kill()  # one that delivered and then did not end
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

    # ---------------------------------------------------------------- what workers say

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

    def _settle(self) -> None:
        """Give the others a moment to report, then raise the culprit's error."""
        until = time.monotonic() + _GRACE_SECONDS
        while (rest := until - time.monotonic()) > 0:
            pending = [w for w in self.workers if w.error is None and w.result is None]
            heard = wait([w.pipe for w in pending], timeout=rest) if pending else []
            if not heard:
                break
            for worker in pending:
                if worker.pipe in heard:
                    self._hear(worker)
        rank, worker = min(enumerate(self.workers), key=lambda item: _blame(item[1]))
        raise self._verdict(rank, worker)

    def _verdict(self, rank: int, worker: _Worker) -> PipefitError:
        """The error to raise: the culprit's own, with its name and what it was doing."""
        error = worker.error
        if error is not None and not isinstance(error, WorkerFailed):
            return error  # it says where by itself
        number, names = worker.heartbeat.action, self.plan.profile.layers
        stages = [self.plan.stages[stage] for stage in self.plan.ranks[rank]]
        layers = ", ".join(f"{names[stage.start]} to {names[stage.stop - 1]}" for stage in stages)
        who = f"worker {rank} (device {stages[0].device}, layers {layers})"
        at = _SITUATIONS.get(number) or f"at {lower(self.plan).actions[stages[0].device][number]}"
        if error is None:
            return WorkerFailed(
                f"{who} hangs {at}: no sign of life for {self._patience(worker):g} s; all workers were stopped"
            )
        verdict = WorkerFailed(f"{who} failed {at}: {error}; all workers were stopped")
        for note in getattr(error, "__notes__", ()):
            verdict.add_note(note)
        return verdict

    def _patience(self, worker: _Worker) -> float:
        return self.start_seconds if worker.heartbeat.action < BETWEEN_STEPS else self.timeout_seconds


def _blame(worker: _Worker) -> tuple[int, float]:
    """Smaller is guiltier: died without a word, reported an error of its own, fell silent, waited for another; the
    earlier the worse.
    """
    if isinstance(worker.error, _Death):
        return 0, worker.last_sign
    if worker.error is not None and not isinstance(worker.error, PeerLost):
        return 1, worker.last_sign
    return (2 if worker.error is None and worker.result is None else 3), worker.last_sign


class _Death(WorkerFailed):
    """A process that ended without a word."""


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
    """Processes started meanwhile never hear of Ctrl-C: the terminal sends it to all, and the parent stops the rest."""
    ensure_running()  # else multiprocessing starts it within, and lifts our block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
