"""Runs programs on batches with the devices of one process.

It serves trainers and comparisons with plain training.

A batch is cut into microbatches, each weighted by its part of the batch, and every device executes its part
of the program. If one process has all devices of a plan, each runs until it would wait for another; devices
of a tensor group also wait for each other within actions, and therefore run on separate threads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from pipefit.capture import Chain, Task, is_callers_fake
from pipefit.errors import OutOfMemory, UsageError, WorkerFailed
from pipefit.lowering import Entered, as_early, lower, lower_drain, lower_evaluation, updates_alone
from pipefit.runtime.engine.replicas import Retracing, Specializations
from pipefit.runtime.engine.runner import DeviceRunner, Microbatch
from pipefit.runtime.engine.tensor_groups import TensorGroups, Together, lost
from pipefit.schema.layer_costs import Value
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program
from pipefit.tensor_parallel import Turn, pause
from pipefit.texts import counted, dtype_name

# ---- All devices in turn


def run_in_turn(
    runners: Sequence[DeviceRunner],
    inputs: Sequence[Microbatch],
    targets: Sequence[Microbatch],
    *,
    groups: TensorGroups | None = None,
    around: Callable[[], AbstractContextManager[object]] | None = None,
    **options: Any,
) -> None:
    """Run one step of all devices in this process, each until it would wait for another.

    `groups` are tensor groups, whose ranks wait for each other if all are in this process. `around` makes a
    context for everything that runs, here and on each of their threads; `options` are passed on to `step`.
    """
    together = groups if isinstance(groups, Together) else None
    threads: list[Turn] = []
    running: dict[int, Callable[[], bool]] = {}
    for runner in runners:
        step = runner.step(inputs, targets, **options)
        if together is not None and runner.number in together.devices:
            threads.append(Turn(partial(_run, step, around or nullcontext)))
            running[runner.number] = threads[-1].advance
        else:
            running[runner.number] = partial(_has_ended, step)
    try:
        while running:
            before = _progress(runners, together)
            with (around or nullcontext)():
                running = {number: advance for number, advance in running.items() if not advance()}
            assert before != _progress(runners, together) or not running, (
                "message_order refuses programs that would hang"
            )
    except BaseException:
        for thread in threads:
            thread.abandon()
        if together is not None:
            together.abandon()
        for runner in runners:
            runner.abandon()
        raise


def _has_ended(step: Iterator[None]) -> bool:
    """Run a device until it waits; return whether its step has ended."""
    return next(step, StopIteration) is StopIteration


def _run(step: Iterator[None], around: Callable[[], AbstractContextManager[object]]) -> None:
    """Run the whole step of a device on a thread with turns."""
    with around():
        for _ in step:
            pause()


def _progress(runners: Sequence[DeviceRunner], together: Together | None) -> tuple[int, ...]:
    """Return counters that grow as long as a device makes progress."""
    return *(len(runner.record.events) for runner in runners), 0 if together is None else together.arrivals


# ---- Results of a step
# All workers exchange the loss and the peaks in one message. An asynchronous schedule does not wait for it:
# the first stages would wait for the losses of the last stage, and that would drain the pipeline.


@dataclass(slots=True, kw_only=True)
class Result:
    """The result of one step during its exchange between workers; `work` is None once it is complete."""

    devices: tuple[int, ...]
    told: Tensor  # the loss, and the peak of every device
    work: Any

    def join(self) -> None:
        """Wait until all workers have contributed.

        Raises:
            PeerLost: another worker did not.
        """
        if self.work is not None:
            try:
                self.work.wait()
            except RuntimeError as error:
                raise _lost(error, self.devices) from error
        self.told, self.work = self.told.cpu(), None  # on a GPU, this waits for the step

    def joined(self) -> tuple[float, dict[int, int]]:
        """Wait for all workers; return the loss, and the peak bytes by device.

        Raises:
            PeerLost: another worker did not contribute.
        """
        self.join()
        loss, *peaks = self.told.tolist()
        return float(loss), {device: int(peak) for device, peak in zip(self.devices, peaks, strict=True)}


def tell(
    plan: Plan, runners: Sequence[DeviceRunner], weights: Sequence[float], *, distributed: bool
) -> Result:
    """Begin to exchange loss and peaks of the step that has just ended with all workers.

    The last stage computes the losses: each replica those of its local batches, reported by the first tensor
    shard. `weights` are the weights of the microbatches in the mean loss.

    Raises:
        PeerLost: another worker is gone.
    """
    workers, exchanged = plan.workers, distributed and len(plan.workers) > 1
    direct = exchanged and dist.get_backend() == "nccl"  # gloo takes tensors on the host
    device = next(iter(runners[0].stages.values())).device if direct else torch.device("cpu")
    tensor = torch.zeros(1 + len(workers), dtype=torch.float64, device=device)
    for runner in runners:
        tensor[1 + workers.index(runner.number)] = runner.record.step_peak_bytes
        for number, stage in runner.stages.items():
            grid = plan.stages[number].grid
            if stage.losses is not None and not grid.shard_of(runner.number):
                losses = stage.losses[: len(weights)]
                tensor[0] += (
                    losses @ torch.tensor(weights, dtype=losses.dtype, device=losses.device) / grid.data
                )
    try:
        work = dist.all_reduce(tensor, async_op=True) if exchanged else None
    except RuntimeError as error:
        raise _lost(error, workers) from error
    return Result(devices=workers, told=tensor, work=work)


def _lost(error: RuntimeError, workers: tuple[int, ...]) -> WorkerFailed | OutOfMemory:
    return lost("a worker did not report its loss and peaks", error, workers[dist.get_rank()])


# ---- Execution

Around = Callable[[], AbstractContextManager[object]]


class Execution:
    """The devices of one process; `distributed` if other processes run devices too.

    `chain` flattens batches; it is kept without layers, so that stages can free theirs.
    """

    def __init__(
        self,
        task: Task,
        plan: Plan,
        chain: Chain,
        runners: Sequence[DeviceRunner],
        *,
        groups: TensorGroups,
        distributed: bool,
    ) -> None:
        self.plan, self.runners, self.distributed = plan, runners, distributed
        self.chain, self._groups = replace(chain, layers=()), groups
        retracing = Retracing(task, plan)
        self._specializations: Mapping[int, Specializations] = {
            runner.number: Specializations(retracing, runner.usual, traced=chain.traced) for runner in runners
        }

    def cut(self, batch: tuple[Any, Any]) -> Cut:
        """Cut `batch`, a pair of inputs and targets, into microbatches."""
        given, wanted = batch
        return cut_batch(self.plan, self.chain.flatten(given), self.chain.flatten_targets(wanted))

    def drop_gradients(self) -> None:
        """Drop gradients from before the step, such as the caller's, which must not enter its update."""
        for runner in self.runners:
            for stage in runner.stages.values():
                for layer in stage.layers:
                    layer.module.zero_grad(set_to_none=True)

    def run(
        self, cut: Cut, program: Program, batches: int, *, training: bool, around: Around | None = None
    ) -> Result:
        """Run `program` on one of the `batches` of an update.

        Return its mean loss, still on its way to all workers. `around` makes a context for everything that
        runs, on other threads too.
        """
        samples = sum(cut.sizes)
        shares = [size / samples for size in cut.sizes]
        alone = updates_alone(self.plan)
        self.run_program(
            program,
            inputs=cut.inputs,
            targets=cut.targets,
            weights=[1.0 if alone else share / batches for share in shares],
            specializations={
                n: known.of_all(cut.sizes, training) for n, known in self._specializations.items()
            },
            training=training,
            around=around,
        )
        return tell(self.plan, self.runners, shares, distributed=self.distributed)

    def run_program(self, program: Program, *, training: bool = True, **options: Any) -> None:
        """Run all devices of this process; restore torch's random generators."""
        stages = [stage for runner in self.runners for stage in runner.stages.values()]
        devices = [stage.device for stage in stages if stage.device.type == "cuda"]
        with torch.random.fork_rng(devices, device_type="cuda"):
            run_in_turn(self.runners, program=program, groups=self._groups, training=training, **options)


# ---- Programs of a trainer's steps, of any number of microbatches
# Each program is lowered once, because runners cache the instructions of programs they have run.


class Programs:
    """The programs of a plan for steps of any number of microbatches."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._training: dict[Hashable, Program] = {}
        self._evaluations: dict[tuple[int, int | None], Program] = {}

    def training(
        self, microbatches: int, entered: Entered, *, update: bool, last: int | None = None
    ) -> Program:
        """Return the program that trains `microbatches` microbatches, or drains the pipeline for 0.

        `last` is the number of samples of the last microbatch; default: the plan's. `entered` describes the
        microbatches that have entered under an asynchronous schedule.
        """
        count, steps = as_early(self._plan, entered.microbatches), min(entered.steps, 2)
        last = self._rows(last)
        key = microbatches, update, count, steps, last, entered.smaller
        if key not in self._training:
            before: dict[str, Any] = {"entered": count, "steps": steps, "smaller": entered.smaller}
            self._training[key] = (
                lower(self._plan, microbatches=microbatches, last=last, update=update, **before)
                if microbatches
                else lower_drain(self._plan, **before)
            )
        return self._training[key]

    def then(self, entered: Entered, sizes: Sequence[int]) -> Entered:
        """Return `entered` after another step, of microbatches with `sizes` samples."""
        count, last, stages = len(sizes), self._rows(sizes[-1]), len(self._plan.stages)
        before = [(number - count, samples) for number, samples in entered.smaller]
        own = [] if last is None else [(-1, last)]
        smaller = [one for one in (*before, *own) if one[0] >= -stages]  # at most that number are in flight
        return Entered(entered.microbatches + count, entered.steps + 1, tuple(smaller))

    def evaluation(self, microbatches: int, *, last: int | None = None) -> Program:
        """Return the program that evaluates `microbatches` microbatches, the last of `last` samples."""
        key = microbatches, self._rows(last)
        if key not in self._evaluations:
            self._evaluations[key] = lower_evaluation(self._plan, microbatches=microbatches, last=key[1])
        return self._evaluations[key]

    def _rows(self, last: int | None) -> int | None:
        """Return `last` if it differs from the plan's microbatch size and the program depends on it.

        Return None otherwise.
        """
        plan = self._plan
        return last if plan.names_rows and last != plan.training.microbatch_size else None


# ---- Cutting batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A batch cut into microbatches of `sizes` samples, which are views of the batch's tensors."""

    inputs: Sequence[Microbatch]
    targets: Sequence[Microbatch]
    sizes: tuple[int, ...]


def cut_batch(plan: Plan, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Cut:
    """Cut `inputs` and `targets` along dimension 0.

    Raises:
        UsageError: they hold no samples, different numbers of samples, or more than the plan trains; or
            samples of another shape or dtype.
    """
    training, measurement = plan.training, plan.measurement
    for what, tensors in (("inputs", inputs), ("targets", targets)):
        _check_plain(what, tensors)
    counts = {value.shape[0] if value.ndim else 0 for value in (*inputs, *targets)}
    if len(counts) != 1:
        raise UsageError(f"all tensors of a batch must hold the same number of samples, not {sorted(counts)}")
    samples = counts.pop()
    if not 0 < samples <= training.batch_size:
        raise UsageError(
            f"the batch holds {counted(samples, 'sample')}, but the plan trains batches of "
            f"{training.batch_size}: plan for this batch size"
        )
    _check_like("inputs", inputs, measurement.costs[0].inputs)
    _check_like("targets", targets, measurement.loss.inputs[len(measurement.costs[-1].outputs) :])
    size = training.microbatch_size
    sizes = [size] * (samples // size) + ([samples % size] if samples % size else [])
    return Cut(inputs=_pieces(inputs, sizes), targets=_pieces(targets, sizes), sizes=tuple(sizes))


def _check_plain(what: str, tensors: Sequence[Tensor]) -> None:
    """Check that tensors are dense rows of numbers, which can be cut and copied.

    Raises:
        UsageError: one is not; names it.
    """
    for number, tensor in enumerate(tensors):
        strange = (
            tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta
        )
        if strange or is_callers_fake(tensor):
            raise UsageError(
                f"tensor {number} of the {what} of this batch is sparse, nested, quantised, fake or on the "
                "meta device: pass a plain tensor, such as its to_dense() or dequantize()"
            )


def _check_like(what: str, tensors: Sequence[Tensor], planned: Sequence[Value]) -> None:
    """Check that the samples in `tensors` have the plan's shapes and kinds of numbers.

    Floating-point numbers of another precision pass: they are cast to the task's precision.

    Raises:
        UsageError: a tensor has another shape or kind; names it.
    """
    for number, (tensor, value) in enumerate(zip(tensors, planned, strict=True)):
        if _kind(tensor.dtype) != _kind(getattr(torch, value.dtype)):
            raise UsageError(
                f"tensor {number} of the {what} of this batch has {dtype_name(tensor.dtype)}, but the plan "
                f"expects {value.dtype}: cast the tensor if rounding is acceptable, or plan for such "
                "batches"
            )
        if tensor.shape[1:] != value.shape[1:]:
            own, wanted = (
                f"({', '.join(('n', *map(str, shape[1:])))})" for shape in (tensor.shape, value.shape)
            )
            raise UsageError(
                f"tensor {number} of the {what} of this batch has shape {own}, but the plan expects "
                f"{wanted}, because memory depends on it: pad or cut the samples, or profile and plan the "
                "task with such batches"
            )


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    """Return whether numbers are floating-point, complex, or boolean; otherwise they are integers."""
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool


def _pieces(values: Sequence[Tensor], sizes: list[int]) -> list[Microbatch]:
    if not values:
        return [[] for _ in sizes]
    return [
        list(microbatch)
        for microbatch in zip(*(value.split_with_sizes(sizes) for value in values), strict=True)
    ]
