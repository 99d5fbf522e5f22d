"""Launching the workers of a plan on this machine, and watching over them.

One process a stage, each with a pipe to the parent. Every wait has a timeout, in the workers and here. When something
goes wrong the parent decides who is to blame: a worker that died without a word, else one that reported an error of its
own, else one that fell silent while the others waited for it. The rest are victims and are stopped.

The workers meet through a file in a fresh directory, so that no port can be taken by somebody else. For several
machines use `torchrun` with a script of your own around `pipefit.Trainer`.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from pipefit.capture.task import Task
from pipefit.errors import PeerLost, PipefitError, WorkerFailed
from pipefit.plan import Plan
from pipefit.schedule import lower
from pipefit.trace import DeviceTrace, Trace

OnStep = Callable[[int, float], None]
_GRACE_SECONDS = 3.0  # for the other workers to report, once one has failed
_START_SECONDS = 120.0  # for a worker to import torch and build its layers


def train(
    task: Callable[[], Task],
    plan: Plan,
    *,
    steps: int,
    seed: int = 0,
    timeout_seconds: float = 60.0,
    on_step: OnStep | None = None,
) -> tuple[list[float], Trace]:
    """Train for `steps` steps with one worker process per stage; the losses and the measured trace of all devices.

    Args:
        task: builds the task in each worker; must be picklable (a function of a module, or a `functools.partial` of
        one). on_step: called with (step, mean loss) as each step ends.

    Raises:
        OutOfMemory: a device passed its cap; the message says where.
        WorkerFailed: a worker died, hung or raised; the message names it.
    """
    watch = _Watch(plan, steps, timeout_seconds, on_step)
    meeting = tempfile.mkdtemp(prefix="pipefit-")
    try:
        watch.start(task, seed, os.path.join(meeting, "store"))
        watch.until_done()
    finally:
        watch.stop()
        shutil.rmtree(meeting, ignore_errors=True)
    return watch.losses, watch.trace()


@dataclass(slots=True)
class _Worker:
    """One worker as the parent sees it."""

    process: Any
    pipe: Connection
    action: Any  # shared: number of the action it is at, -1 before the first
    started: bool = False
    result: tuple[DeviceTrace, tuple[float, ...]] | None = None
    error: PipefitError | None = None
    detail: str = ""


@dataclass(slots=True)
class _Watch:
    """The parent's side: starts workers, collects what they say, decides who is to blame."""

    plan: Plan
    steps: int
    timeout_seconds: float
    on_step: OnStep | None
    workers: list[_Worker] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def start(self, task: Callable[[], Task], seed: int, store: str) -> None:
        context = mp.get_context("spawn")
        for rank in range(len(self.plan.stages)):
            ours, theirs = context.Pipe(duplex=False)
            action = context.RawValue("i", -1)
            order = _Order(task, self.plan, rank, self.steps, seed, self.timeout_seconds, store)
            process = context.Process(
                target=_work, args=(order, theirs, action), daemon=True, name=f"pipefit-worker-{rank}"
            )
            process.start()
            theirs.close()
            self.workers.append(_Worker(process, ours, action))

    def until_done(self) -> None:
        """Listen until every worker has delivered its trace.

        Raises:
            PipefitError: the culprit's error.
        """
        last_word = time.monotonic()
        while any(worker.result is None for worker in self.workers):
            pending = [worker.pipe for worker in self.workers if worker.result is None and worker.error is None]
            heard = wait(pending, timeout=0.5)
            for worker in self.workers:
                if worker.pipe in heard:
                    self._hear(worker)
            if any(worker.error for worker in self.workers):
                self._settle()
            if heard:
                last_word = time.monotonic()
            patience = self.timeout_seconds if all(worker.started for worker in self.workers) else _START_SECONDS
            if time.monotonic() - last_word > patience + 2 * _GRACE_SECONDS:
                self._settle()

    def stop(self) -> None:
        """No worker outlives the call."""
        for worker in self.workers:
            if worker.result is None and worker.process.is_alive():
                worker.process.kill()
        for worker in self.workers:
            worker.process.join(timeout=5)
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
            worker.error = _death(worker.process.exitcode)
            return
        worker.started = True
        if kind == "step":
            step, loss = words
            self.losses.append(loss)
            if self.on_step is not None:
                self.on_step(step, loss)
        elif kind == "done":
            worker.result = tuple(words)
        elif kind == "error":
            worker.error, worker.detail = words

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
        stage, names = self.plan.stages[rank], self.plan.profile.layers
        who = f"worker {rank} (device {stage.device}, layers {names[stage.start]} to {names[stage.stop - 1]})"
        number = worker.action.value
        at = f"at {lower(self.plan).actions[stage.device][number]}" if number >= 0 else "before its first action"
        if error is None:
            return WorkerFailed(
                f"{who} hangs {at}: no sign of life for {self.timeout_seconds:g} s; all workers were stopped"
            )
        verdict = WorkerFailed(f"{who} failed {at}: {error}; all workers were stopped")
        verdict.add_note(worker.detail)
        return verdict


def _blame(worker: _Worker) -> int:
    """Smaller is guiltier: died without a word, reported an error of its own, fell silent, waited for another."""
    if isinstance(worker.error, _Death):
        return 0
    if worker.error is not None and not isinstance(worker.error, PeerLost):
        return 1
    return 2 if worker.error is None and worker.result is None else 3


class _Death(WorkerFailed):
    """A process that ended without a word."""


def _death(code: int | None) -> _Death:
    return _Death(
        f"killed by signal {-code}" if code is not None and code < 0 else f"its process exited with code {code}"
    )


# -------------------------------------------------------------------- the worker's side


@dataclass(frozen=True, slots=True)
class _Order:
    """What a worker is told."""

    task: Callable[[], Task]
    plan: Plan
    rank: int
    steps: int
    seed: int
    timeout_seconds: float
    store: str


def _work(order: _Order, pipe: Connection, action: Any) -> None:
    """The whole life of a worker process."""
    try:
        _train(order, pipe, action)
    except PipefitError as error:
        pipe.send(("error", error, traceback.format_exc()))
    except Exception as error:  # noqa: BLE001 - a worker reports whatever happens to it: the parent must not have to guess
        failure = WorkerFailed(f"{type(error).__name__}: {_first_line(error)}")
        pipe.send(("error", failure, traceback.format_exc()))
    finally:
        pipe.close()


def _train(order: _Order, pipe: Connection, action: Any) -> None:
    import torch
    import torch.distributed as dist

    from pipefit.runtime.trainer import Trainer

    def at(number: int) -> None:
        action.value = number

    torch.set_num_threads(order.plan.profile.assumptions.threads)
    world, timeout = len(order.plan.stages), timedelta(seconds=order.timeout_seconds)
    if world > 1:
        backend = "nccl" if order.plan.cluster.backend == "cuda" else "gloo"
        os.environ["LOCAL_RANK"] = str(order.rank)
        dist.init_process_group(
            backend, init_method=f"file://{order.store}", rank=order.rank, world_size=world, timeout=timeout
        )
    task = order.task()
    trainer = Trainer(task, order.plan, seed=order.seed, timeout_seconds=order.timeout_seconds, on_action=at)
    for step in range(order.steps):
        torch.manual_seed(order.seed + step)
        loss = trainer.step(task.batch(order.plan.training.batch_size))
        if order.rank == world - 1:
            pipe.send(("step", step, loss))
    trace = trainer.trace
    pipe.send(("done", trace.devices[order.plan.stages[order.rank].device], trace.step_seconds))
    if world > 1:
        dist.destroy_process_group()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:300]
