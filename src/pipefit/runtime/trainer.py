"""The trainer: executes a plan in the user's own training loop.

    trainer = Trainer(task, plan)
    for batch in data:
        loss = trainer.step(batch)

The same script runs in one process (`python train.py`: all devices in turn) and in many (`torchrun --nproc-per-node 4
train.py`: one worker a device).

Under an endless schedule a step ends with microbatches in flight, and nobody waits for them: `step` returns the loss of
an earlier batch, and `finish` ends what is in flight.
"""

from __future__ import annotations

import atexit
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.capture.caller import recording, refuse_gradients, undisturbed
from pipefit.capture.chain import Chain
from pipefit.capture.model import built, capture
from pipefit.capture.sample import pair, sample
from pipefit.capture.task import Task
from pipefit.errors import PipefitWarning, UsageError
from pipefit.meter.kernels import Kernels
from pipefit.plans import Plan
from pipefit.program import Program
from pipefit.runtime.assembly import Site, assemble
from pipefit.runtime.batches import Cut, cut_batch
from pipefit.runtime.callbacks import Callback, StepReport
from pipefit.runtime.comparison import compare_at_start
from pipefit.runtime.elsewhere import TRAINED, warn_elsewhere
from pipefit.runtime.hardware import backend_of, check_streams, local_device, meter_of
from pipefit.runtime.in_turn import run_in_turn
from pipefit.runtime.lending import Lending, lending_trace
from pipefit.runtime.plan_check import check_casts, check_model, target_of
from pipefit.runtime.results import Result, tell
from pipefit.runtime.specializations import Specializations
from pipefit.runtime.stage import StageRunner
from pipefit.runtime.state import StageState
from pipefit.runtime.transport import InProcess, Transport, connect
from pipefit.schedule import (
    as_early,
    loss_delay,
    lower,
    lower_drain,
    lower_evaluation,
    step_programs,
    updates_alone,
    whole_run,
)
from pipefit.trace import Trace
from pipefit.validation import LONGEST_SECONDS, number, seed_number, whole


class Trainer:
    """Trains `task` by `plan`: the stages of this worker, or in a single process all stages.

    Args:
        task: what to train. A module that exists is trained in place; a factory is called after
            `torch.manual_seed(seed)`, so that every worker builds the same.
        plan: made for this task, or for one with the same fingerprint.
        seed: of the factory's initialisation, and of all random layers.
        timeout_seconds: how long a worker waits for another before it gives up. On GPUs NCCL's own limit of ten minutes
            holds instead.
        accumulate: number of batches whose gradients are added up before an update.
        callbacks: called with a `StepReport` after every step.
        numbers: whether a traced model is compared with its chain at the start, if the host has the memory to spare and
            it takes no longer than ten seconds (`pipefit.runtime.comparison`). Of several workers the first compares,
            and `not_compared` says there why it did not.
        on_action: called with the number of each action as it begins, and with their count when all are done; for
            supervision.

    Warns (`PipefitWarning`) where the profile was made on another processor, torch release or number of threads than
    this process has; where the numbers could not be compared; and, on emulated devices, of operations whose kernels
    could not be measured.

    Raises:
        FileError: the plan was made for another model.
        UsageError: the number of workers is not the number of devices in use, or there is no such GPU; or the model
            computes other numbers as a chain than as a module.
    """

    def __init__(
        self,
        task: Task,
        plan: Plan,
        *,
        seed: int = 0,
        timeout_seconds: float = 60.0,
        accumulate: int = 1,
        callbacks: Sequence[Callback] = (),
        numbers: bool = True,
        on_action: Callable[[int], None] | None = None,
    ) -> None:
        seed_number(seed)
        whole("accumulate", accumulate, 1)
        number("timeout_seconds", timeout_seconds, below=LONGEST_SECONDS)
        self.task, self.plan, self.accumulate, self.callbacks = task, plan, accumulate, tuple(callbacks)
        self._accumulated = 0  # batches since the last update
        self._programs: dict[tuple[int, bool, int], Program] = {}
        self._entered = 0  # microbatches since the pipeline was empty, under an endless schedule
        self._untold: deque[_Untold] = deque()
        self._evaluations: dict[int, Program] = {}
        self._kernels = Kernels(torch.get_num_threads())
        self.distributed = _distributed(plan, timeout_seconds)
        self.rank = dist.get_rank() if self.distributed else 0
        if self.rank == 0:
            warn_elsewhere(plan.profile.assumptions, TRAINED, threads=torch.get_num_threads())
        program = step_programs(plan)[-1]
        transport: Transport = InProcess()
        if self.distributed:  # before building, which may take longer on one worker than on another
            here = _device(plan, self.rank, distributed=True)
            transport = connect(plan, program, here, timedelta(seconds=timeout_seconds))
            lending = Lending.between(plan, whole_run(plan), plan.stages[plan.ranks[self.rank][0]].device, here)
        else:
            lending = Lending.within(plan, whole_run(plan))
        self._lending = lending  # what others have borrowed stays ours
        self.not_compared = ""
        self.chain = chain = self._captured(seed, numbers)
        ranks = plan.ranks
        site = Site(
            task=task,
            chain=chain,
            plan=plan,
            program=program,
            shared=chain.shared,
            transport=transport,
            clock=self._clock,
            seed=seed,
            on_action=on_action,
            lending=lending,
        )
        self.runners = [
            assemble(
                site,
                ranks[number],
                device=(device := _device(plan, number, distributed=self.distributed)),
                meter=meter_of(plan.cluster, plan.stages[ranks[number][0]].device, device, self._kernels),
            )
            for number in ([self.rank] if self.distributed else range(len(ranks)))
        ]
        own = {number: stage.layers for runner in self.runners for number, stage in runner.stages.items()}
        self.specializations = Specializations(task, plan, own, traced=chain.traced)
        self.chain = replace(chain, layers=())  # so that layers of other workers' stages are freed
        self._began = time.perf_counter()
        self._step_seconds: list[float] = []

    def step(self, batch: tuple[Any, Any]) -> float:
        """One training step on `batch`, a pair (inputs, targets) on the host; the mean loss, on every worker.

        Under an endless schedule it is the loss of the batch `late` calls ago, and nan in the first `late` calls.

        A batch may be smaller than the plan's, as the last one of an epoch often is. With `accumulate`, only the last
        of so many batches makes an update. Gradients from before the first of them are dropped, as in a loop that calls
        `zero_grad`; after a step that failed, the next batch is the first again. The step trains under
        `torch.no_grad()` too. It leaves torch's random generators as they were, so that workers which draw their
        batches at random all draw the same.

        Raises:
            UsageError: the batch is larger than the plan's, unlike those the model was captured with, or waits for
                gradients; or the call is in inference mode or under autocast.
            OutOfMemory: a device passed its cap.
            WorkerFailed: another worker died or hangs.
        """
        began = self._clock()
        with recording("training"):
            both = pair(batch, "a step takes")
            refuse_gradients(both, self.task.name)
            given = self._cut(both)
            update = self._accumulated + 1 == self.accumulate
            program = self._program(len(given.sizes), update=update)
            if self._accumulated == 0 and not self._entered:
                self._drop_gradients()
            result = self._run(given, program, self.accumulate, training=True)
            if not self.late:
                result.join()  # so that the step's time is that of all devices
            self._accumulated = 0 if update else self._accumulated + 1
            self._entered += len(given.sizes) if program.endless else 0
        seconds = self._clock() - began
        self._step_seconds.append(seconds)
        self._untold.append(self._told_later(result, seconds, sum(given.sizes)))
        return self._tell() if len(self._untold) > self.late else float("nan")

    @property
    def late(self) -> int:
        """By how many calls the loss that `step` returns is late; 0 but under an endless schedule."""
        return loss_delay(self.plan)

    def finish(self) -> list[float]:
        """End what is in flight under an endless schedule; the losses of batches that `step` has not returned.

        `evaluate`, `state` and `state_dict` end it too, so that all of these have to be called on every worker.
        """
        self._drain()
        return [self._tell() for _ in range(len(self._untold))]

    def evaluate(self, batch: tuple[Any, Any]) -> float:
        """The mean loss on `batch` without training: dropout is off, and batch norm uses its running statistics."""
        self._drain()
        given = self._cut(pair(batch, "an evaluation takes"))
        with ExitStack() as stack:
            for stage in self.stages:
                stack.enter_context(stage.evaluating())
            return self._run(given, self._evaluation(len(given.sizes)), 1, training=False).joined()[0]

    @property
    def trace(self) -> Trace:
        """The trace of this process so far; devices of other workers are empty in it."""
        mine = {runner.number: runner for runner in self.runners}
        devices = tuple(
            mine[n].trace(device.memory_bytes) if n in mine else lending_trace(self.plan, n, self._lending.arenas)
            for n, device in enumerate(self.plan.cluster.devices)
        )
        seconds = tuple(self._step_seconds)
        return Trace(source="measured", steps=len(seconds), devices=devices, step_seconds=seconds)

    @property
    def stages(self) -> Iterator[StageRunner]:
        """The stages that this process runs."""
        for runner in self.runners:
            yield from runner.stages.values()

    @property
    def state(self) -> StageState:
        """All that training has changed in this process's layers, by names in the original module."""
        self._drain()
        return StageState.of(list(self.stages))

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers of this process's layers, under their names in the original module."""
        return dict(self.state.tensors)

    # ---------------------------------------------------------------- inside

    def _captured(self, seed: int, numbers: bool) -> Chain:
        """The chain of the task's module, as the plan has it; a traced one has been compared with the module."""
        task, plan = self.task, self.plan
        check_casts(plan, task)
        with recording("training"):
            target = target_of(plan.cluster)
            whole = built(task, seed=seed, target=target)
            first = sample(task, plan.training.microbatch_size)
            chain = capture(whole, *first, target=target)
        check_model(plan, task, chain)
        if numbers and chain.traced:
            second = sample(task, plan.training.microbatch_size, seed=1)  # in every worker, so that all draw alike
            if self.rank == 0:
                self.not_compared = compare_at_start(whole, plan, chain, (first, second))
        if self.not_compared:
            warnings.warn(self.not_compared, PipefitWarning, stacklevel=3)
        return chain

    def _clock(self) -> float:
        return time.perf_counter() - getattr(self, "_began", 0.0)

    def _cut(self, batch: tuple[Any, Any]) -> Cut:
        """`batch` in microbatches."""
        given, wanted = batch
        return cut_batch(self.plan, self.chain.flatten(given), self.chain.flatten_targets(wanted))

    def _drop_gradients(self) -> None:
        """Drop gradients from before the step, such as the caller's own, which must not enter its update."""
        for stage in self.stages:
            for layer in stage.layers:
                layer.module.zero_grad(set_to_none=True)

    def _program(self, microbatches: int, *, update: bool) -> Program:
        """The program for so many microbatches, or the drain for none; each is made once, as runners keep what they
        ran.
        """
        entered = as_early(self.plan, self._entered)
        key = microbatches, update, entered
        if key not in self._programs:
            self._programs[key] = (
                lower(self.plan, microbatches=microbatches, update=update, entered=entered)
                if microbatches
                else lower_drain(self.plan, entered=entered)
            )
        return self._programs[key]

    def _drain(self) -> None:
        """End what is in flight, if anything is."""
        if self._entered:
            with undisturbed():  # the caller may be evaluating
                self._run_program(self._program(0, update=True), inputs=[], targets=[])
            self._lending.settle()
            self._entered = 0

    def _evaluation(self, microbatches: int) -> Program:
        """The program that evaluates so many microbatches; each is made once, because runners keep what they ran."""
        if microbatches not in self._evaluations:
            self._evaluations[microbatches] = lower_evaluation(self.plan, microbatches=microbatches)
        return self._evaluations[microbatches]

    def _run(self, cut: Cut, program: Program, batches: int, *, training: bool) -> Result:
        """Run `program` on a batch that is one of `batches` in an update; its mean loss, on its way to all workers."""
        samples = sum(cut.sizes)
        shares = [size / samples for size in cut.sizes]
        alone = updates_alone(self.plan)
        self._run_program(
            program,
            inputs=cut.inputs,
            targets=cut.targets,
            weights=[1.0 if alone else share / batches for share in shares],
            specializations=[self.specializations.of(size, training=training) for size in cut.sizes],
            training=training,
        )
        return tell(self.plan, self.runners, shares, distributed=self.distributed)

    def _run_program(self, program: Program, **options: Any) -> None:
        """Run all devices of this process."""
        devices = [stage.device for stage in self.stages if stage.device.type == "cuda"]
        check_streams(devices)
        with torch.random.fork_rng(devices, device_type="cuda"):
            try:
                run_in_turn(self.runners, program=program, **options)
            except BaseException:
                self._accumulated = self._entered = 0  # the gradients are lost, and what was in flight
                self._untold.clear()
                raise
        self._kernels.keep()
        self._kernels.tell_unknown()

    def _tell(self) -> float:
        """The loss of the earliest batch that has not been told; callbacks learn of it too."""
        untold = self._untold.popleft()
        loss, peaks = untold.result.joined()
        for callback in self.callbacks:
            callback(replace(untold.report, loss=loss, peak_bytes=peaks))
        return loss

    def _told_later(self, result: Result, seconds: float, samples: int) -> _Untold:
        """A step whose loss is on its way, with a report for callbacks that lacks loss and peaks."""
        stage = next(self.stages)
        agreement = stage.agreement
        scale = None if agreement is None else agreement.scale
        rate = stage.optimizer.param_groups[0]["lr"] if stage.optimizer is not None else None
        step = len(self._step_seconds) - 1
        report = StepReport(
            step=step,
            loss=float("nan"),
            seconds=seconds,
            samples_per_second=samples / seconds,
            learning_rate=None if rate is None else float(rate),
            peak_bytes={},
            gradient_norm=None if agreement is None else agreement.norm,
            loss_scale=None if scale is None else scale.value,
            skipped=agreement is not None and agreement.overflow,
        )
        return _Untold(result, report)


class _Untold(NamedTuple):
    """A step whose loss has not been returned yet."""

    result: Result
    report: StepReport


def _distributed(plan: Plan, timeout_seconds: float) -> bool:
    """Whether this process is one of several workers; joins their process group if a launcher has set one up."""
    if not dist.is_initialized() and "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        backend = backend_of(plan)
        # NCCL's timeout would end the process that waits, not the one that hangs (see `transport.connect`).
        dist.init_process_group(backend, timeout=None if backend == "nccl" else timedelta(seconds=timeout_seconds))
        atexit.register(_part)
    if not dist.is_initialized():
        return False
    if dist.get_world_size() != len(plan.ranks):
        raise UsageError(
            f"the plan uses {len(plan.ranks)} devices, but {dist.get_world_size()} workers were started: "
            f"start one for each device, as torchrun --nproc-per-node {len(plan.ranks)} does"
        )
    return True


def _part() -> None:
    """Leave the process group that the trainer joined, whose threads may otherwise abort the process at its exit."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _device(plan: Plan, rank: int, *, distributed: bool) -> torch.device:
    """Where this process runs a rank's stages: on the plan's device, unless a launcher has given the worker another."""
    planned = plan.stages[plan.ranks[rank][0]].device
    return local_device(plan.cluster, int(os.environ.get("LOCAL_RANK", planned)) if distributed else planned)
