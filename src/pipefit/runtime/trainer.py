"""The trainer: executes a plan in the user's own training loop.

    trainer = Trainer(task, plan)
    for batch in data:
        loss = trainer.step(batch)

The same script runs in one process (`python train.py`: all devices in turn) and in several (`torchrun
--nproc-per-node 4 train.py`: one worker per device).

Under an asynchronous schedule a step ends with microbatches in flight: `step` returns the loss of an earlier
batch, and `finish` completes the microbatches in flight.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer

from pipefit.capture import (
    Chain,
    Task,
    on_a_copy,
    pair,
    recording,
    refuse_elsewhere,
    refuse_gradients,
    undisturbed,
)
from pipefit.capture.sample import sample
from pipefit.checkpoints import Owner
from pipefit.errors import OutOfMemory, UsageError
from pipefit.lowering import Entered, loss_delay, step_programs
from pipefit.measure import Kernels
from pipefit.runtime.checkpoint.background_saver import SaveReport
from pipefit.runtime.checkpoint.checkpointing import Checkpointing
from pipefit.runtime.checks.comparison import Comparisons, check_left_out
from pipefit.runtime.checks.plan_check import (
    TRAINED,
    check_casts,
    check_frozen,
    check_model,
    frozen_in,
    warn_elsewhere,
    warn_of_accumulation,
)
from pipefit.runtime.comm.agreement import Agreement
from pipefit.runtime.comm.transport import connected, groups_of, joins_workers
from pipefit.runtime.engine.assembly import assemble
from pipefit.runtime.engine.execution import Cut, Execution, Programs, Result
from pipefit.runtime.engine.replicas import trained_sources
from pipefit.runtime.engine.runner import DeviceRunner
from pipefit.runtime.engine.stage import Site, StageRunner
from pipefit.runtime.hardware import Hardware, check_backwards
from pipefit.runtime.initial_weights import OnWeights, start_of
from pipefit.runtime.offload.lending import lending_trace
from pipefit.runtime.optim.half_precision import MasterWeights
from pipefit.runtime.options import Callback, StepReport, Supervision, TrainerArguments, TrainerOptions
from pipefit.runtime.state import Names, StageState
from pipefit.runtime.task_module import (
    PartialModule,
    TaskModule,
    WholeModule,
    frees_parameters,
    is_partial,
    needs_copy,
    same_tensors,
    without_numbers,
)
from pipefit.schema.file_access import path_of
from pipefit.schema.plan import Plan
from pipefit.schema.post_mortem import PostMortem
from pipefit.schema.program import Program
from pipefit.schema.trace import Trace
from pipefit.schema.validation import instance
from pipefit.texts import counted

# ---- Reports for callbacks


class Untold(NamedTuple):
    """A step whose loss has not been returned yet, with a report that lacks loss and peaks."""

    result: Result
    report: StepReport

    def tell(self, callbacks: Sequence[Callback]) -> float:
        """Wait for the loss of all workers, pass the completed report to the callbacks, and return the
        loss.
        """
        loss, peaks = self.result.joined()
        for callback in callbacks:
            callback(replace(self.report, loss=loss, peak_bytes=peaks))
        return loss


def report_of(
    optimizer: Optimizer | MasterWeights | None,
    agreement: Agreement | None,
    step: int,
    seconds: float,
    samples: int,
) -> StepReport:
    """Return the report of a step that a stage with this optimizer has just ended, without loss and peaks."""
    scale = None if agreement is None else agreement.scale
    rate = optimizer.param_groups[0]["lr"] if optimizer is not None else None
    return StepReport(
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


# ---- The post-mortem of a training that ran out of memory


def add_post_mortem(
    error: BaseException, plan: Plan, runners: Sequence[DeviceRunner], step_seconds: Sequence[float]
) -> None:
    """Attach a post-mortem to an out-of-memory error of a device of this process.

    The post-mortem holds the traces of the devices of this process only.
    """
    if not isinstance(error, OutOfMemory):
        return
    for runner in runners:
        if (moment := runner.record.ran_out) is None:
            continue
        runner.record.ran_out = None
        sizes = plan.cluster.devices
        error.post_mortem = PostMortem(
            plan=plan,
            trace=Trace(
                source="measured",
                steps=len(step_seconds),
                devices=tuple(
                    device_runner.trace(sizes[device_runner.number].memory_bytes) for device_runner in runners
                ),
                step_seconds=tuple(step_seconds),
            ),
            device=runner.number,
            moment=moment.sample,
            asked_bytes=moment.asked_bytes,
            sentence=str(error),
        )


# ---- The trainer


class Trainer:
    """Trains `task` by `plan`: the stages of this worker, or all stages in a single process.

    Args:
        task: the task to train. An existing module is trained in place; if a single process trains
            replicas, or stages without whole parameters, a copy is trained and the module is updated after
            every step; on several workers, tensors that a worker lacks raise an error
            (`runtime.task_module`). A factory is called after `torch.manual_seed(seed)`. With several
            workers, the first one sends its weights to the others.
        plan: a plan for this task, or for a task with the same fingerprint.
        callbacks: called with a `StepReport` after every step.
        supervision: hooks of a supervisor.
        options: the fields of `TrainerOptions`: seed, accumulation, checks and devices.

    Warns (`PipefitWarning`) if the profile is of another processor, torch release or number of threads, if
    the numbers could not be compared, and, on emulated devices, about operations whose kernels could not be
    measured.

    Raises:
        FileError: the plan was made for another model.
        UsageError: the number of workers is not the number of devices in use, or the machine lacks a GPU; or
            the model computes other numbers as a chain than as a module, or other numbers by the plan than in
            plain training.
    """

    def __init__(
        self,
        task: Task,
        plan: Plan,
        *,
        callbacks: Sequence[Callback] = (),
        supervision: Supervision = Supervision(),
        **options: Unpack[TrainerArguments],
    ) -> None:
        asked = TrainerOptions.named(options)
        self.task, self.plan = (
            instance("task", task, Task),
            instance("plan", plan, Plan, "pipefit.load reads one"),
        )
        called: Iterable[Callback] = instance("callbacks", callbacks, Iterable)
        self.accumulate, self.callbacks = asked.accumulate, tuple(called)
        self._accumulated, self._programs, self._began = (
            0,
            Programs(plan),
            0.0,
        )  # batches since the last update
        self._entered, self._untold = Entered(), deque[Untold]()  # since the pipeline was empty; pending
        self._kernels = Kernels(torch.get_num_threads())
        hardware = Hardware(plan, asked.share_device)
        self.distributed = joins_workers(hardware, asked.timeout_seconds)
        self.rank = dist.get_rank() if self.distributed else 0
        if self.rank == 0:
            warn_elsewhere(plan.profile.assumptions, TRAINED, threads=torch.get_num_threads())
            if self.accumulate > 1:
                warn_of_accumulation(plan, self.accumulate)
        program = step_programs(plan)[-1]
        worker = self.rank if self.distributed else None
        transport, self._lending = connected(hardware, program, worker, asked.timeout_seconds)
        self._groups, self._comparisons = groups_of(plan, transport), Comparisons(plan, asked.numbers)
        module = task.module
        self._must_load = self.distributed and isinstance(module, nn.Module) and is_partial(module)
        trained, chain = self._captured(asked.seed, supervision.on_weights)
        self.chain, names = chain, Names.of(chain.layers)
        site = Site(
            task=task,
            sources=trained_sources(
                plan,
                trained,
                chain,
                self._groups,
                copies=not self.distributed,
                held=self._comparisons.of_ranks,
            ),
            plan=plan,
            program=program,
            transport=transport,
            clock=self._clock,
            seed=asked.seed,
            on_action=supervision.on_action,
            lending=self._lending,  # tensors that other devices have borrowed stay on this one
        )
        self.runners = []
        for one in [plan.workers[self.rank]] if self.distributed else plan.workers:
            device, allowed = hardware.device(one), hardware.cap_bytes(program, one) if asked.cap else None
            meter = hardware.meter(one, device, self._kernels, gpu_bytes=allowed)
            self.runners.append(assemble(site, one, device=device, meter=meter))
        count = len(plan.workers) if self.distributed else 1
        self._checkpoints = Checkpointing(
            plan, self.runners, names, workers=count, rank=self.rank, supervision=supervision
        )
        stages, retraced = list(self.stages), task
        self._task_module = TaskModule()
        if self._on_a_copy and isinstance(module, nn.Module):
            self._task_module = WholeModule(module, stages, self._checkpoints)
        elif isinstance(module, nn.Module) and isinstance(trained.module, nn.Module):
            partial = PartialModule(module, trained.module, chain.layers, stages, self._checkpoints)
            self._task_module = partial
            if not partial.is_whole():
                retraced = replace(task, module=without_numbers(trained.module, task.name))
        self._execution = Execution(
            retraced, plan, chain, self.runners, groups=self._groups, distributed=self.distributed
        )
        self._frozen = frozen_in([layer for stage in stages for layer in stage.layers])
        self.chain = self._execution.chain  # so that layers of other workers' stages are freed
        self._task_module.follow()
        self._began, self._step_seconds = time.perf_counter(), list[float]()
        self._steps_before = 0  # steps of the checkpoint that was loaded

    def __repr__(self) -> str:
        """Return one line: the plan, the number of steps done and, with several workers, the rank."""
        worker = f", worker {self.rank}" if self.distributed else ""
        return f"<Trainer: {self.plan.headline}, after {counted(self.steps_done, 'step')}{worker}>"

    def step(self, batch: tuple[Any, Any]) -> float:
        """Train one step on a pair (inputs, targets) on the host, or a dictionary of inputs.

        Return the mean loss. Every worker returns the same loss. Under an asynchronous schedule it is the
        loss of the batch `late` calls ago, and nan in the first `late` calls.

        A batch may be smaller than the plan's, as the last batch of an epoch often is. With `accumulate`,
        only the last of that number of batches makes an update. Older gradients are dropped before the first
        batch, as in a loop that calls `zero_grad`; after a failed step, the next batch is the first again.
        The step trains under `torch.no_grad()` too. It restores torch's random generators, so that workers
        that draw their batches at random all draw the same batches.

        Raises:
            UsageError: the batch is larger than the plan's, unlike those the model was captured with, or
                requires gradients; or the call is in inference mode or under autocast.
            OutOfMemory: a device passed its cap.
            WorkerFailed: another worker died or hangs.
        """
        began = self._clock()
        with recording("training"):
            both = pair(batch, "a step takes")
            refuse_gradients(both, self.task.name)
            check_frozen(self._frozen)
            given = self._cut(both)
            update = self._accumulated + 1 == self.accumulate
            program = self._programs.training(
                len(given.sizes), self._entered, update=update, last=given.sizes[-1]
            )
            if self._accumulated == 0 and not self._entered.steps:
                self._execution.drop_gradients()
            result = self._run(given, program, self.accumulate, training=True)
            if not self.late:
                result.join()  # so that the step's time covers all devices
            self._accumulated = 0 if update else self._accumulated + 1
            self._entered = self._programs.then(self._entered, given.sizes) if program.endless else Entered()
        seconds = self._clock() - began
        self._step_seconds.append(seconds)
        stage, last = next(self.stages), self.steps_done - 1
        report = report_of(stage.optimizer, stage.agreement, last, seconds, sum(given.sizes))
        self._untold.append(Untold(result, report))
        self._checkpoints.tell_failures()
        return self._tell() if len(self._untold) > self.late else float("nan")

    @property
    def not_compared(self) -> str:
        """Reason why numbers of the model, or of its tensor-parallel layers, were not compared at the
        start.
        """
        return self._comparisons.not_compared

    @property
    def late(self) -> int:
        """Number of `step` calls by which the returned loss lags; 0 for synchronous schedules."""
        return loss_delay(self.plan)

    def finish(self) -> list[float]:
        """Complete the microbatches in flight and return the losses of batches that `step` has not returned.

        `evaluate`, `save`, `load`, `state` and `state_dict` complete them too, so all of these must be called
        on every worker. Returns when the last checkpoint is on the disk; other trainings may save to its
        folder from then on.
        """
        self._drain()
        self._checkpoints.wait()
        self._checkpoints.tell_failures()
        self._checkpoints.release()
        return [self._tell() for _ in range(len(self._untold))]

    def evaluate(self, batch: tuple[Any, Any]) -> float:
        """Return the mean loss on `batch` without training.

        Dropout is off, and batch norm uses its running statistics.
        """
        refuse_elsewhere("evaluating")
        self._drain()
        given = self._cut(pair(batch, "an evaluation takes"))
        with ExitStack() as stack:
            for stage in self.stages:
                stack.enter_context(stage.evaluating())
            program = self._programs.evaluation(len(given.sizes), last=given.sizes[-1])
            return self._run(given, program, 1, training=False).joined()[0]

    @property
    def trace(self) -> Trace:
        """Trace of this process so far; devices of other workers are empty in it."""
        mine = {runner.number: runner for runner in self.runners}
        devices = tuple(
            mine[n].trace(device.memory_bytes)
            if n in mine
            else lending_trace(self.plan, n, self._lending.arenas)
            for n, device in enumerate(self.plan.cluster.devices)
        )
        seconds = tuple(self._step_seconds)
        return Trace(source="measured", steps=len(seconds), devices=devices, step_seconds=seconds)

    @property
    def stages(self) -> Iterator[StageRunner]:
        """Stages of this process, each once for every replica that the process runs."""
        for runner in self.runners:
            yield from runner.stages.values()

    @property
    def state(self) -> StageState:
        """Everything that training has changed in this process's layers, by names in the original module."""
        self._check_loaded()
        self._drain()
        return self._checkpoints.state()

    def state_dict(self, *, optimizer: bool = False) -> dict[str, Tensor]:
        """Return parameters and buffers of this process's layers, under their names in the original module.

        With `optimizer`, also optimizer tensors and master weights, as `optimizer/fc.weight/exp_avg` and
        `master/fc.weight`.
        """
        state = self.state
        return dict(state.tensors) | (self._checkpoints.tensors() if optimizer else {})

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load tensors by the names of `state_dict`.

        Without optimizer tensors, the optimizer's state stays as it is.

        Raises:
            UsageError: a parameter or buffer of this process is missing, or has another shape.
        """
        self._drain()
        self._checkpoints.take_up(instance("tensors", tensors, Mapping))
        self._loaded()

    def load_weights(self, path: str | os.PathLike[str]) -> None:
        """Load this process's parameters and buffers from a safetensors file or a sharded model.

        Raises:
            FileError: the file cannot be used, or its tensors do not fit the model.
        """
        self._drain()
        self._checkpoints.load_weights(path)
        self._loaded()

    @property
    def steps_done(self) -> int:
        """Number of trained batches, including those before the checkpoint that was loaded."""
        return self._steps_before + len(self._step_seconds)

    def save(
        self, directory: str | os.PathLike[str], *, keep: int | None = None, background: bool = True
    ) -> None:
        """Save a checkpoint: a folder in `directory`, such as `step-00000800`, named after `steps_done`.

        All workers call it together. It copies the trained state to host memory, and a thread writes the copy
        while training goes on; the next save and `finish` wait for the thread. Without `background`, or if
        the plan's hosts or this host lack the memory (which raises a warning), the checkpoint is written
        before the call returns. With `keep`, only the newest `keep` checkpoints in `directory` stay; default:
        all stay. See `saved`.

        From its first save on, the folder belongs to this training, until `finish` or the end of the process.

        Raises:
            UsageError: batches wait for an update, or part of the trained state cannot be written; names it.
            FileError: the folder cannot be made, or already has this checkpoint or a later one; or another
                training saves there, or has done so.
        """
        if self._accumulated:
            raise UsageError(
                f"only {self._accumulated} of the {self.accumulate} batches of an update are done, and "
                f"checkpoints do not hold partial gradients: save after a multiple of {self.accumulate} "
                "batches"
            )
        self._check_loaded()
        self._drain()
        self._checkpoints.save(directory, self.steps_done, keep=keep, background=background)

    @property
    def owner(self) -> Owner:
        """The training, and its run, that own the checkpoints of this trainer."""
        return self._checkpoints.owner

    @property
    def saved(self) -> SaveReport | None:
        """Costs of the last save; None before the first save."""
        return self._checkpoints.saved

    def load(self, path: str | os.PathLike[str]) -> int:
        """Continue from a checkpoint, or from the newest whole one in a folder of them.

        Return the number of batches trained. The plan may differ from the plan that saved the checkpoint.
        Training continues as if it had never stopped: everything that decides the next step comes from the
        checkpoint, including the optimizer's options and the seed. In a folder of checkpoints, a damaged one
        is skipped with a warning, and the one before it is loaded; all workers load the same one.

        Raises:
            FileError: there is no checkpoint, it is damaged, or it is of another task; or torchrun has
                restarted this training, and the checkpoint is of another one.
            OutOfMemory: the optimizer's state does not fit a device.
        """
        self._drain()
        return self._goes_on(self._checkpoints.load(path))

    def resume(self, directory: str | os.PathLike[str]) -> int:
        """Hold `directory` for this training and continue from its newest checkpoint, if any.

        Return the number of batches trained. A script that may be restarted begins with this call: another
        training that saves there is refused from then on, until `finish` or the end of the process. All
        workers call it together.

        Raises:
            FileError: another training saves there; or as `load`.
            OutOfMemory: the optimizer's state does not fit a device.
            UsageError: the checkpoint was trained with another seed than this trainer's.
        """
        self._drain()
        return self._goes_on(self._checkpoints.resume(path_of(directory)))

    # ---------------------------------------------------------------- private

    def _captured(self, seed: int, on_weights: OnWeights) -> tuple[Task, Chain]:
        """Return the task with its module built, and its chain, compared with the module if traced."""
        task, plan = self.task, self.plan
        check_casts(plan, task)
        with recording("training"):
            first = sample(task, plan.training.microbatch_size)
            of = on_a_copy(replace(task, module=task.build())) if self._on_a_copy else task
            divides = frees_parameters(plan) or any(stage.grid.tensor > 1 for stage in plan.stages)
            lacks = self._must_load or (self.distributed and divides)
            if lacks and isinstance(task.module, nn.Module):  # trained tensors will be absent from the module
                of = replace(task, module=same_tensors(task.module, task.name))
            trained, chain = start_of(of, plan, seed, first, on_weights)
        check_model(plan, task, chain)
        self._comparisons.of_chain(trained, chain, first, rank=self.rank)
        return trained, chain

    def _goes_on(self, steps: int | None) -> int:
        """Set the number of trained batches if a checkpoint was loaded, and return it."""
        if steps is not None:
            self._accumulated, self._steps_before = 0, steps - len(self._step_seconds)
            self._loaded()
        return self.steps_done

    @property
    def _on_a_copy(self) -> bool:
        """True if a copy of the task's module is trained, because stages hold parts of its parameters or
        several copies of them.
        """
        return not self.distributed and isinstance(self.task.module, nn.Module) and needs_copy(self.plan)

    def _clock(self) -> float:
        return time.perf_counter() - self._began

    def _cut(self, batch: tuple[Any, Any]) -> Cut:
        """Cut `batch` into microbatches."""
        cut = self._execution.cut(batch)
        if self._comparisons.wanted:
            check_left_out(self.plan, cut)
        return cut

    def _drain(self) -> None:
        """Complete the microbatches in flight, if any, and update the trained copy from the module."""
        if self._entered.steps:
            with undisturbed():  # the caller may be evaluating
                self._run_program(
                    self._programs.training(0, self._entered, update=True), inputs=[], targets=[]
                )
            self._lending.settle()
            self._entered = Entered()
        self._task_module.lead()

    def _check_loaded(self) -> None:
        """Check that the weights are known.

        Raises:
            UsageError: the task's module lacked tensors when the trainer was made, and no state was loaded.
        """
        if self._must_load:
            raise UsageError(
                f"{self.task.name} lacked tensors when this trainer was made, because an earlier trainer "
                "left them to other workers: load a checkpoint (load, resume) or weights (load_weights, "
                "load_state_dict) first"
            )

    def _loaded(self) -> None:
        """Follow a loaded state."""
        self._must_load = False
        self._task_module.follow()

    def _run(self, cut: Cut, program: Program, batches: int, *, training: bool) -> Result:
        """Run `program` on one of the `batches` of an update.

        Return its mean loss, still on its way to all workers.
        """
        self._check_loaded()
        with self._running(training=training):
            return self._execution.run(cut, program, batches, training=training)

    def _run_program(self, program: Program, **options: Any) -> None:
        """Run all devices of this process."""
        with self._running():
            self._execution.run_program(program, **options)

    @contextmanager
    def _running(self, *, training: bool = True) -> Iterator[None]:
        """Run the devices of this process in the context; after a failed step nothing is in flight."""
        self._task_module.begin()
        if training:
            check_backwards([stage.device for stage in self.stages if stage.device.type == "cuda"])
        try:
            yield
        except BaseException as error:
            self._accumulated, self._entered = 0, Entered()  # gradients and microbatches in flight are lost
            self._untold.clear()
            add_post_mortem(error, self.plan, self.runners, self._step_seconds)
            self._task_module.fail()
            raise
        self._task_module.follow()
        self._kernels.keep()
        self._kernels.tell_unknown()

    def _tell(self) -> float:
        """Return the earliest loss that has not been returned; pass its report to the callbacks."""
        return self._untold.popleft().tell(self.callbacks)
