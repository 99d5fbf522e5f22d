"""`pipeline`: a plan trained by `torch.distributed.pipelining`, in each of its workers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.optim import Optimizer

from pipefit.capture import Task, Values, pair, recording, refuse_gradients
from pipefit.capture.sample import sample
from pipefit.checkpoints import Owner
from pipefit.errors import OutOfMemory, UsageError, causes
from pipefit.lowering import check_for_torch, step_programs
from pipefit.measure import Kernels, MemoryMeter, Meter
from pipefit.own_loop import HostTensors, counted_states
from pipefit.runtime import (
    IN_A_STEP,
    Callback,
    Checkpointing,
    Comparisons,
    Hardware,
    MasterWeights,
    Names,
    SaveReport,
    Supervision,
    TrainerArguments,
    TrainerOptions,
    check_backwards,
    check_casts,
    check_model,
    cut_batch,
    joins_workers,
    lost,
    moment,
    named,
    ran_out,
    report_of,
    start_of,
    train,
    trained_sources,
)
from pipefit.schema.plan import Plan
from pipefit.schema.post_mortem import PostMortem
from pipefit.schema.trace import Category, DeviceTrace, Event, MemorySample, Stream, Trace
from pipefit.schema.validation import instance
from pipefit.texts import counted
from pipefit.torch_engine.rank import EnginePart, EngineRank, Groups
from pipefit.torch_internals.data_parallel import shards_counted
from pipefit.torch_internals.pipelining import is_of_message, join_alone


@dataclass(frozen=True, slots=True)
class _Device:
    """This worker's device, for its checkpoints."""

    plan: Plan
    number: int
    meter: MemoryMeter | None
    stages: Mapping[int, EnginePart]


class Pipeline:
    """The stages of this worker on torch's engine. Made by `pipeline`.

    Args:
        task: the task.
        plan: the plan.
        callbacks: called with a `StepReport` after every step.
        supervision: hooks of a supervisor.
        options: the fields of `TrainerOptions`.
    """

    late = 0  # `step` returns the loss of its own batch

    def __init__(
        self,
        task: Task,
        plan: Plan,
        *,
        callbacks: Sequence[Callback] = (),
        supervision: Supervision = Supervision(),  # noqa: B008 - it is frozen
        **options: Unpack[TrainerArguments],
    ) -> None:
        self.task, self.plan = instance("task", task, Task), instance("plan", plan, Plan)
        self.callbacks, asked = tuple(callbacks), TrainerOptions.named(options)
        if asked.accumulate != 1:
            raise UsageError("torch's engine updates after every batch: plan a larger batch (batch_size)")
        check_for_torch(plan)
        hardware = Hardware(plan, asked.share_device)
        _join(hardware, asked.timeout_seconds)
        number = plan.workers[dist.get_rank()]
        self.device = hardware.device(number)
        check_casts(plan, task)
        self._comparisons = Comparisons(plan, asked.numbers)
        with recording("training"):
            first = sample(task, plan.training.microbatch_size)
            trained, chain = start_of(task, whole_replicas(plan), asked.seed, first, supervision.on_weights)
        check_model(plan, task, chain)
        self._comparisons.of_chain(trained, chain, first, rank=dist.get_rank())
        # NCCL's timeout would end the process that waits, not the one that hangs
        timeout = None if self.device.type == "cuda" else timedelta(seconds=asked.timeout_seconds)
        try:
            groups = Groups.of(plan, timeout)
        except RuntimeError as error:
            raise lost("the workers could not connect to each other", error, number) from error
        self._rank = EngineRank(
            task,
            plan,
            trained_sources(
                plan, trained, chain, groups.collectives, copies=False, held=self._comparisons.of_ranks
            ),
            number,
            device=self.device,
            groups=groups,
            host=HostTensors.of(self.device),
            seed=asked.seed,
        )
        self._kernels = Kernels(torch.get_num_threads())
        allowed = hardware.cap_bytes(step_programs(plan)[-1], number) if asked.cap else None
        meter = hardware.meter(number, self.device, self._kernels, gpu_bytes=allowed)
        self._began, self._step_seconds, self._steps_before = time.perf_counter(), list[float](), 0
        on_action = supervision.on_action or (lambda action: None)
        timed = self._clock if self.device.type == "cpu" else None  # a GPU is behind the host's clock
        self._record = Record(meter, timed, lambda: on_action(IN_A_STEP))
        for stage in self._rank.stages:
            self._record.follow(stage)
        self._here = _Device(plan, number, meter, self._rank.parts)
        self._checkpoints = Checkpointing(
            plan,
            [self._here],
            Names.of(chain.layers),
            workers=len(plan.workers),
            rank=dist.get_rank(),
            supervision=supervision,
        )
        self._chain = replace(chain, layers=())  # without layers, so that other workers' layers can be freed
        if meter is not None:
            meter.tag(self._rank.held, Category.PARAMETERS)

    def __repr__(self) -> str:
        """Return one line: the plan and the worker."""
        return f"<Pipeline: {self.plan.headline}, worker {dist.get_rank()}>"

    @property
    def schedule(self) -> Any:
        """torch's schedule object."""
        return self._rank.schedule

    @property
    def stages(self) -> list[Any]:
        """The `PipelineStage`s of this worker."""
        return list(self._rank.stages)

    @property
    def optimizers(self) -> list[Optimizer | MasterWeights]:
        """The optimizers of this worker, one for each stage with trained parameters."""
        return [updates.optimizer for updates in self._rank.updates.values() if updates.optimizer is not None]

    @property
    def not_compared(self) -> str:
        """Reason why numbers of the model were not compared at the start."""
        return self._comparisons.not_compared

    # ---------------------------------------------------------------- training

    def step(self, inputs: Any, *, target: Any = None) -> float:
        """Train one step; return the mean loss, on every worker.

        All workers pass the same batch, as large as the plan's. The task's optimizer and scheduler step after
        the schedule. torch's random generators are restored.

        Raises:
            UsageError: the batch has another number of samples than the plan's, or is unlike those that the
                model was captured with.
            OutOfMemory: an emulated device passed its cap.
        """
        return self._train((inputs, target))

    def _train(self, given: Any) -> float:
        """Train one step on a pair (inputs, targets), or on a dictionary of inputs; return the mean loss."""
        began = self._clock()
        with recording("training"):
            batch = pair(given, "a step takes")
            refuse_gradients(batch, self.task.name)
            devices = [self.device] if self.device.type == "cuda" else []
            if devices:
                check_backwards(devices)
            with torch.random.fork_rng(devices, device_type="cuda"), self._running():
                self._rank.step(
                    lambda: self._local_batches(batch),
                    before_update=lambda: self._record.begin("update", Category.OPTIMIZER),
                )
            with self._naming_lost_peers():
                loss, peaks = self._rank.exchanged(self._record.peak_bytes(self._record.step))
        seconds = self._clock() - began
        self._step_seconds.append(seconds)
        self._checkpoints.tell_failures()
        updates, done = next(iter(self._rank.updates.values())), self.steps_done - 1
        report = report_of(
            updates.optimizer, self._rank.agreement, done, seconds, self.plan.training.batch_size
        )
        for callback in self.callbacks:
            callback(replace(report, loss=loss, peak_bytes=peaks))
        return loss

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Record the actions of a step; name the device and the action that failed.

        Raises:
            OutOfMemory: the device lacks memory; has the post-mortem.
            PeerLost: a message of another worker does not arrive.
        """
        record = self._record
        record.begin_step(len(self._step_seconds))
        try:
            with (
                self._here.meter or nullcontext(),
                self._states_counted(),
                self._shards_counted(),
                self._naming_lost_peers(),
            ):
                yield
        except Exception as error:
            if (cause := next(filter(ran_out, causes(error)), None)) is None:
                raise
            raise self._died(cause) from error
        record.end()
        self._kernels.keep()
        self._kernels.tell_unknown()

    @contextmanager
    def _naming_lost_peers(self) -> Iterator[None]:
        """Raise errors of messages between workers as the loss of a worker."""
        try:
            yield
        except RuntimeError as error:
            if not is_of_message(error):
                raise
            number, action = self._here.number, self._record.action
            what = f"after {action}, device {number} waited for a worker that has ended or hangs"
            raise lost(what, error, number) from error

    def _states_counted(self) -> AbstractContextManager[None]:
        """Let an emulated device's meter count the states of torch's generator, as its dry run does."""
        meter = self._here.meter
        return counted_states(meter) if isinstance(meter, Meter) else nullcontext()

    def _shards_counted(self) -> AbstractContextManager[None]:
        """Let an emulated device's meter count the memory of parameters that replicas divide."""
        meter = self._here.meter
        return shards_counted(meter.resized) if isinstance(meter, Meter) else nullcontext()

    def _died(self, cause: BaseException) -> OutOfMemory:
        """Return the error for an action that ran out of memory, with its post-mortem."""
        number, record = self._here.number, self._record
        error = OutOfMemory(named(cause, number, record.action))
        ended = moment(cause, self._here.meter, record.step, self._clock())
        if ended is not None:
            error.post_mortem = PostMortem(
                plan=self.plan,
                trace=self.trace,
                device=number,
                moment=ended.sample,
                asked_bytes=ended.asked_bytes,
                sentence=str(error),
            )
        return error

    def _clock(self) -> float:
        return time.perf_counter() - self._began

    @property
    def steps_done(self) -> int:
        """Number of trained batches, including those before the checkpoint that was loaded."""
        return self._steps_before + len(self._step_seconds)

    @property
    def trace(self) -> Trace:
        """Trace of this worker so far; devices of other workers are empty in it."""
        devices = tuple(
            DeviceTrace(
                device=number,
                budget_bytes=device.memory_bytes,
                events=self._record.events if number == self._here.number else (),
                memory=tuple(self._record.samples) if number == self._here.number else (),
            )
            for number, device in enumerate(self.plan.cluster.devices)
        )
        seconds = tuple(self._step_seconds)
        return Trace(source="measured", steps=len(seconds), devices=devices, step_seconds=seconds)

    # ---------------------------------------------------------------- state

    def state_dict(self, *, optimizer: bool = False) -> dict[str, Tensor]:
        """Return parameters and buffers of this worker's stages under their names in the original module.

        With `optimizer`, also optimizer tensors and master weights, as `optimizer/fc.weight/exp_avg` and
        `master/fc.weight`. The tensors are those that are trained, so `torch.distributed.checkpoint.load`
        restores them in place. Of tensors that tensor-parallel ranks divide, these are whole copies, which
        `load_state_dict` takes; all workers call this function then.
        """
        state = dict(self._checkpoints.state().tensors)
        return state | (self._checkpoints.tensors() if optimizer else {})

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load tensors by the names of `state_dict`; other names are ignored.

        Without optimizer tensors, the optimizer's state stays as it is.

        Raises:
            UsageError: one of this worker's tensors is missing, or has another shape.
        """
        self._checkpoints.take_up(instance("tensors", tensors, Mapping))

    def load_weights(self, path: str | os.PathLike[str]) -> None:
        """Load this worker's parameters and buffers from a safetensors file or a sharded model.

        Raises:
            FileError: the file cannot be used, or its tensors do not fit the model.
        """
        self._checkpoints.load_weights(path)

    def save(
        self, directory: str | os.PathLike[str], *, keep: int | None = None, background: bool = True
    ) -> None:
        """Save a checkpoint, from which `pipefit.Trainer` continues too; see `Trainer.save`.

        Raises:
            UsageError: part of the trained state cannot be written; names it.
            FileError: the folder cannot be made, or belongs to another training.
        """
        self._checkpoints.save(directory, self.steps_done, keep=keep, background=background)

    def load(self, path: str | os.PathLike[str]) -> int:
        """Continue from a checkpoint of any plan and either engine; return the number of batches trained.

        Raises:
            FileError: there is no checkpoint, it is damaged, or it is of another task.
            OutOfMemory: the optimizer's state does not fit a device.
        """
        self._steps_before = self._checkpoints.load(path) - len(self._step_seconds)
        return self.steps_done

    def finish(self) -> list[float]:
        """Return when the last checkpoint is on the disk; the result, losses yet to come, is empty."""
        self._checkpoints.wait()
        self._checkpoints.tell_failures()
        self._checkpoints.release()
        return []

    @property
    def owner(self) -> Owner:
        """The training, and its run, that own the checkpoints."""
        return self._checkpoints.owner

    @property
    def saved(self) -> SaveReport | None:
        """Costs of the last save; None before the first save."""
        return self._checkpoints.saved

    def _local_batches(self, batch: tuple[Any, Any]) -> tuple[Sequence[Values], Sequence[Values]]:
        """Return inputs and targets of this worker's local batches, on its device if a stage needs them."""
        given, wanted = batch
        cut = cut_batch(self.plan, self._chain.flatten(given), self._chain.flatten_targets(wanted))
        training = self.plan.training
        if sum(cut.sizes) != training.batch_size:
            raise UsageError(
                f"the batch holds {counted(sum(cut.sizes), 'sample')}, but torch's engine runs batches of "
                f"exactly {training.batch_size}: drop the last batch of an epoch (drop_last=True)"
            )
        return local_batches(self.plan, self._rank, cut.inputs, cut.targets, self.device)


def local_batches(
    plan: Plan,
    rank: EngineRank,
    inputs: Sequence[Sequence[Tensor]],
    targets: Sequence[Sequence[Tensor]],
    device: torch.device,
) -> tuple[Sequence[Values], Sequence[Values]]:
    """Return the rank's rows of every microbatch as copies on the device; none for stages that need none."""
    first, last = plan.measured(0), plan.measured(len(plan.stages) - 1)
    samples = first.microbatch_size
    rows = slice(rank.replica * samples, (rank.replica + 1) * samples)
    values = first.costs[0].inputs
    wanted = last.loss.inputs[len(last.costs[-1].outputs) :]

    def copies(tensors: Sequence[Tensor], dtypes: Sequence[str]) -> Values:
        return tuple(
            tensor[rows].to(device, getattr(torch, dtype), non_blocking=True, copy=True)
            for tensor, dtype in zip(tensors, dtypes, strict=True)
        )

    return (
        [copies(own, [v.dtype for v in values]) if 0 in rank.modules else () for own in inputs],
        [copies(own, [v.dtype for v in wanted]) if rank.loss is not None else () for own in targets],
    )


def whole_replicas(plan: Plan) -> Plan:
    """Return the plan with replicas that begin with all parameters of their stage."""
    grids = [replace(stage.grid, shard="none") for stage in plan.stages]
    return replace(
        plan, stages=tuple(replace(s, grid=grid) for s, grid in zip(plan.stages, grids, strict=True))
    )


def _join(hardware: Hardware, timeout_seconds: float) -> None:
    """Join the plan's workers, or become the only one of a plan for one device.

    Raises:
        UsageError: the plan has several devices, and no launcher has started workers.
    """
    if joins_workers(hardware, timeout_seconds):
        return
    count = len(hardware.plan.workers)
    if count > 1:
        raise UsageError(
            f"the plan uses {counted(count, 'device')}, and torch's engine runs one worker for each: start "
            f"this script with torchrun --nproc-per-node {count}"
        )
    join_alone(hardware.backend)


class PipelineTrainer(Pipeline):
    """A `Pipeline` whose `step` takes a batch, like `pipefit.Trainer`: the trainer of `pipefit train`."""

    def step(self, batch: tuple[Any, Any]) -> float:  # type: ignore[override]
        """Train one step on a pair (inputs, targets), or on a dictionary of inputs; return the mean loss."""
        return self._train(batch)


def train_pipeline(
    task: Callable[[], Task], plan: Plan, *, steps: int, **options: Any
) -> tuple[list[float], Trace]:
    """Train on torch's engine with one worker process per device; return losses and measured trace.

    Arguments and errors are those of `pipefit.train`.

    Raises:
        UsageError: torch's engine lacks what the plan needs.
    """
    check_for_torch(plan)
    return train(task, plan, steps=steps, trainer=PipelineTrainer, **options)


def pipeline(
    task: Task, plan: Plan, *, seed: int = 0, timeout_seconds: float = 60.0, numbers: bool = True
) -> Pipeline:
    """Return this worker's part of a plan on `torch.distributed.pipelining`. All workers must call it.

    Start one worker for each device of the plan, such as with torchrun. A script then trains as with
    `pipefit.Trainer`:

        pipeline = pipefit.pipeline(task, plan)
        for inputs, targets in data:
            loss = pipeline.step(inputs, target=targets)

    Args:
        task: the task to train. A factory is called after `torch.manual_seed(seed)`; all workers train the
            weights of the first one.
        plan: a plan for this task.
        seed: seed of weights and dropout.
        timeout_seconds: limit for messages between workers.
        numbers: first compare a traced model with its chain, and two steps of the plan with plain training,
            as `pipefit.Trainer` does.

    Raises:
        FileError: the plan was made for another model.
        UsageError: torch's engine lacks what the plan needs, or the number of workers is not the plan's.
    """
    return Pipeline(task, plan, seed=seed, timeout_seconds=timeout_seconds, numbers=numbers)


class Record:
    """Peaks of a rank, by the action that the engine begins last, and times of forwards and backwards.

    Memory that an action leaves behind gets a category: activations after a forward, gradients after a
    backward.

    Args:
        meter: counts the device's bytes; None counts nothing.
        clock: seconds since the start of the first step; None records no times.
        on_action: called as each action begins.
    """

    def __init__(
        self,
        meter: MemoryMeter | None,
        clock: Callable[[], float] | None = None,
        on_action: Callable[[], None] = lambda: None,
    ) -> None:
        self.samples: list[MemorySample] = []
        self._passes: list[tuple[int, str, float, float]] = []  # step, action, start and end
        self.action, self.step = "setting up", 0
        self._meter, self._clock, self._on_action = meter, clock, on_action
        self._leaves, self._is_open = Category.TEMPORARY, False

    @property
    def events(self) -> tuple[Event, ...]:
        """The forwards and backwards so far."""
        return tuple(
            Event(step=step, action=action, stream=Stream.COMPUTE, start_seconds=start, end_seconds=end)
            for step, action, start, end in self._passes
        )

    def begin_step(self, step: int) -> None:
        """End the step before; begin one with the copies of its batch."""
        self.end()
        self.step = step
        self.begin("receive buffers and batch", Category.BOUNDARY)

    def begin(self, action: str, leaves: Category) -> None:
        """End the action before, and begin another one."""
        self.end()
        self._on_action()
        self.action, self._leaves, self._is_open = action, leaves, True
        if self._meter is not None:
            self._meter.begin(action)

    def end(self) -> None:
        """End the action."""
        if self._is_open and self._meter is not None:
            seconds = float(len(self.samples)) if self._clock is None else self._clock()
            self.samples.append(self._meter.end(self.step, seconds, self._leaves))
        self._is_open = False

    def peak_bytes(self, step: int) -> int:
        """Return the highest peak of a step; 0 without a meter."""
        return max((sample.total_bytes for sample in self.samples if sample.step == step), default=0)

    def follow(self, stage: PipelineStage) -> None:
        """Record the forwards and backwards of a stage."""
        forward, backward, number = stage.forward_one_chunk, stage.backward_one_chunk, stage.stage_index
        clock, meter, passes, begin = self._clock, self._meter, self._passes, self.begin

        def recorded_forward(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            begin(f"{number}F{microbatch}", Category.ACTIVATIONS)
            began = clock() if clock is not None else 0.0
            result = forward(microbatch, *args, **kwargs)
            if clock is not None:
                passes.append((self.step, self.action, began, clock()))
            return result

        def recorded_backward(microbatch: int, *args: Any, **kwargs: Any) -> None:
            begin(f"{number}B{microbatch}", Category.GRADIENTS)
            began = clock() if clock is not None else 0.0
            backward(microbatch, *args, **kwargs)
            if clock is not None:
                passes.append((self.step, self.action, began, clock()))
            if meter is not None:
                meter.tag(stage.bwd_cache.get(microbatch, ()), Category.BOUNDARY)

        stage.forward_one_chunk = recorded_forward  # type: ignore[method-assign, assignment]
        stage.backward_one_chunk = recorded_backward  # type: ignore[method-assign, assignment]
