"""Comparison of a model's chain with the model, for a certificate and at the start of a trainer.

Training by the plan is compared with plain training (`runtime.checks.plan_comparison`), and layers that
tensor-parallel ranks divide with whole layers, block by block (`tensor_parallel.comparison`).

A traced chain might lose effects of code other than operations (`capture.comparison` defines the comparison);
layers that are modules, as of an `nn.Sequential`, have little to lose. So a trainer compares traced models
automatically if that is cheap: the host has the memory to spare, and it takes at most `LONGEST_SECONDS`,
estimated from the profile. A larger model is compared by a copy with fewer of its equal blocks
(`capture.comparison`). If that is not possible either, the trainer gives the reason.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

import torch
from torch import Tensor, nn

from pipefit.capture import (
    Chain,
    EqualBlocks,
    NotComparable,
    Numbers,
    Sample,
    Task,
    built,
    capture,
    compare,
    evaluated,
    joined,
    on_a_copy,
    recording,
    refuse_meta,
    rows,
    rows_of,
    samples_of,
    values_before,
    with_fewer_blocks,
)
from pipefit.capture.sample import sample
from pipefit.errors import PipefitWarning, UsageError, in_one_line
from pipefit.runtime.checks import plan_comparison
from pipefit.runtime.checks.plan_check import check_model
from pipefit.runtime.checks.plan_comparison import (
    PlanNumbers,
    compare_plan,
    enough_microbatches,
    nothing_held,
    passes,
)
from pipefit.runtime.engine.execution import Cut
from pipefit.runtime.engine.replicas import Held
from pipefit.runtime.hardware import free_bytes
from pipefit.schema.cluster import Cluster
from pipefit.schema.layer_costs import LayerCost
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Measurement
from pipefit.schema.training import Precision
from pipefit.schema.validation import instance, seed_number
from pipefit.tensor_parallel import LONGEST_SECONDS as LONGEST_DIVIDED
from pipefit.tensor_parallel import ShardedChain, compare_blocks, shard_chain
from pipefit.texts import counted
from pipefit.timing import seconds
from pipefit.units import format_bytes

# ---- Losses of microbatches
#
# A step's loss is the mean of the losses of its microbatches, as in a plain loop that accumulates gradients.
# It equals the loss of the whole batch if that is a mean over independent samples. It differs if samples are
# each other's negatives (CLIP; Radford et al., 2021), if the loss is a sum, or a mean over other things, such
# as words that count. The check computes the loss of two microbatches in evaluation mode and without
# gradients: separately, and together.


ROUNDED, ROUNDED_HALF = 1e-4, 0.03  # relative; models of float64 use float32 too
LEFT_OUT = -100  # the default target that losses ignore
SMALLEST = 1e-3  # smaller losses may be rounding alone


def rounding(precision: Precision) -> float:
    """Return the relative difference, to the largest number, that rounding allows between two results."""
    return ROUNDED if precision in ("float32", "float64") else ROUNDED_HALF


def tolerance(plan: Plan) -> float:
    """Return the rounding tolerance for a plan's precision."""
    return rounding(plan.training.precision)


def what_microbatches_change(whole: Task, plan: Plan, chain: Chain, batches: Sequence[Sample]) -> str:
    """Return a sentence if the loss of two microbatches is not that of all their samples together.

    Empty if an update takes one microbatch, and if the comparison is impossible: the module fails in
    evaluation, its loss is not finite there, or it draws random numbers.
    """
    if plan.training.microbatches == 1 or plan.training.schedule == "pipedream":
        return ""
    first, second = batches
    asked = [first, second, joined(first, second), first]
    try:
        one, other, together, again = evaluated(whole, asked, traced=chain.traced, target=plan.cluster.target)
    except NotComparable:
        return ""
    mean, largest = (one + other) / 2, max(abs(one), abs(other), abs(together), SMALLEST)
    if one != again or not isfinite(largest) or abs(mean - together) <= tolerance(plan) * largest:
        return ""
    size = plan.training.microbatch_size
    return (
        f"the loss of {whole.name} depends on the microbatch size: two microbatches of {size} have "
        f"{mean:.6g} on average, but their {2 * size} samples together have {together:.6g}, for example "
        "because samples are each other's negatives, or because the loss is a sum or a mean over something "
        "other than samples. An update uses the mean of the losses of all microbatches, like a plain loop "
        "with gradient accumulation. For the loss of a whole batch, plan with one microbatch "
        "(microbatches=1)"
    )


def left_out(tensors: Sequence[Tensor], parts: int) -> list[int]:
    """Count the targets that losses ignore in each of `parts` equal parts of a batch.

    The list is empty if the counts are equal. The first integer tensor with unequal counts decides. Losses of
    torch and of Hugging Face's models ignore -100.
    """
    for tensor in tensors:
        if tensor.dtype in (torch.int64, torch.int32) and tensor.ndim:
            counts = [int((part == LEFT_OUT).sum()) for part in tensor.chunk(parts)]
            if len(set(counts)) > 1:
                return counts
    return []


def check_left_out(plan: Plan, cut: Cut) -> None:
    """Check that automatically chosen replicas have equal numbers of targets in every microbatch.

    Raises:
        UsageError: they differ, so the mean of the replicas' means is not that of the microbatch.
    """
    data = plan.stages[-1].grid.data
    if data == 1 or plan.asks_for_replicas:
        return
    for number, (inputs, targets) in enumerate(zip(cut.inputs, cut.targets, strict=True)):
        if counts := left_out((*inputs, *targets), data):
            raise UsageError(
                f"{data} replicas would train another loss: in microbatch {number} of this batch their "
                f"local batches ignore {', '.join(map(str, counts))} targets ({LEFT_OUT}), so the mean of "
                "their losses differs from the loss of the microbatch. Plan with data=1 (--data 1), or "
                f"with data={data} if the mean of each local batch is intended"
            )


LONGEST_SECONDS = 10.0
_FOR_SLICES = (
    "Return the mean over independent samples, use one device for each stage, or, if the loss of each "
    "local batch is intended, skip this comparison (numbers=False, train --no-numbers)"
)
_SMALLER = "compare a smaller model of the same code, such as one with fewer layers"
_MICROBATCHES, _RUNS = 2, 2
_COPIES = 3  # of the module's bytes: a copy, its gradients, and the previous copy's
_CORE = Cluster.emulated((1, 1)).devices[0].kind


def certify_numbers(task: Task, plan: Plan, *, seed: int = 0) -> Numbers:
    """Compare two real microbatches of `plan` in the task's module and in its chain; return the differences.

    An existing module, its gradients, buffers and random generators stay unchanged; a factory builds after
    `torch.manual_seed(seed)`. Runs on the CPU, and takes about as long as training four microbatches there.

    Raises:
        FileError: the plan was made for another task; says what differs.
        UsageError: the module cannot be captured, or run on the CPU; or the host has too little memory.
    """
    seed_number(seed)
    instance("task", task, Task, "a plan is the second argument")
    instance("plan", plan, Plan, "pipefit.load reads one")
    if (needed := module_bytes(plan.measurement)) > (free := free_bytes()):
        raise UsageError(
            f"comparing the numbers of {task.name} needs {format_bytes(needed)} on the host, which has "
            f"{format_bytes(free)} free: {_SMALLER}"
        )
    with recording("comparing numbers"):
        whole = built(task if task.dtype is None else on_a_copy(task), seed=seed)
        assert isinstance(whole.module, nn.Module)
        refuse_meta(whole.module, task.name)
        batches = [
            sample(task, plan.training.microbatch_size, seed=number) for number in range(_MICROBATCHES)
        ]
        target = plan.profile.assumptions.target
        chain = capture(whole, *batches[0], target=target)
    check_model(plan, task, chain)
    try:
        compared, own = comparable(whole, plan, chain, batches[0], _lack_of_memory)
    except NotComparable as reason:
        raise UsageError(f"the numbers of {task.name} cannot be compared: {reason}; {_SMALLER}") from None
    result = compare(compared, _measured(own, plan, plan.measurement), batches, target=target)
    divided = tuple(_certified(whole, plan))
    said = [_slices_apart(compared, plan, own, batches[0], data) for data in _degrees(plan)]
    said.append(what_microbatches_change(compared, plan, own, batches))
    trained = ""
    if result.agrees:
        numbers, why = _compared_plan(whole, plan, chain, batches, [enough_microbatches(plan)])
        trained = f"; {numbers or f'training by the plan was not compared: {why}'}"
    return replace(result, besides=(*divided, trained, *(f"; but {one}" for one in said if one)))


def _compared_plan(
    whole: Task,
    plan: Plan,
    chain: Chain,
    batches: Sequence[Sample],
    counts: Sequence[int],
    *,
    longest: float = inf,
    held: Held = nothing_held,
) -> tuple[PlanNumbers | None, str]:
    """Compare training by `plan` with plain training, with the first feasible number of microbatches.

    Return the result, or None and the reason why it was not compared. Feasible `counts` fit the host and take
    at most `longest` seconds; `held` is called for chains that ranks divide.

    Raises:
        UsageError: training by the plan computes other numbers; says which.
    """
    each, reason = host_seconds(plan.measurement) / (_MICROBATCHES * _RUNS), ""
    for count in counts:
        taken = passes(count) * each
        reason = _lacking(plan_comparison.host_bytes(plan, count)) or (
            f"it takes about {taken:.0f} s" if taken > longest else ""
        )
        if not reason:
            break
    if reason:
        return None, reason
    try:
        result = compare_plan(whole, plan, chain.measured(plan.measurement), batches, count, held=held)
    except NotComparable as error:
        return None, str(error)
    result.check()
    return result, ""


def _certified(whole: Task, plan: Plan) -> Iterator[str]:
    """Compare layers that the plan's tensor-parallel ranks divide with whole layers.

    Yield a sentence for each division. All blocks are compared, however long it takes.

    Raises:
        UsageError: ranks compute other numbers; names the block.
    """
    measured = map(plan.measured, range(len(plan.stages)))
    for samples, ranks, sequences in dict.fromkeys(
        measurement.way for measurement in measured if measurement.tensor > 1
    ):
        batch = sample(whole, samples)
        chain = capture(whole, *batch, target=plan.profile.assumptions.target)
        given, wanted = chain.flatten(batch[0]), chain.flatten_targets(batch[1])
        divided = shard_chain(chain, ranks, given, wanted, sequences=sequences)
        compared = compare_blocks(divided, given, wanted, free_bytes=free_bytes(), longest=inf)
        if compared.left_out:
            yield (
                f"; layers sharded over {ranks} tensor-parallel ranks were not compared: {compared.left_out}"
            )
        else:
            yield (
                f"; layers sharded over {ranks} tensor-parallel ranks agree with "
                f"{counted(compared.blocks, 'distinct block')}"
            )


Obstacle = Callable[[Sequence[LayerCost], LayerCost], str]  # why a comparison is impossible, or ""


def comparable(
    whole: Task, plan: Plan, chain: Chain, batch: Sample, obstacle: Obstacle
) -> tuple[Task, Chain]:
    """Return the task `whole` and its chain, or a copy with fewer equal blocks if there is an `obstacle`.

    Blocks are left out of the lists that take the longest.

    Raises:
        NotComparable: the obstacle remains for a copy, or a copy is impossible; says why.
    """
    measurement, names = plan.measurement, plan.profile.layers
    reason = obstacle(measurement.costs, measurement.loss)
    if not reason:
        return whole, chain
    assert isinstance(whole.module, nn.Module)
    cost_of, chosen = dict(zip(names, measurement.costs, strict=True)), list[EqualBlocks]()
    costs = cost_of
    layers_of = {row: [name for name in names if row.leaves_out(name)] for row in rows_of(whole.module)}
    for row, left_out in sorted(
        layers_of.items(), key=lambda item: -_seconds([cost_of[name] for name in item[1]])
    ):
        if left_out and obstacle(list(costs.values()), measurement.loss):
            chosen.append(row)
            costs = {name: cost for name, cost in costs.items() if name not in left_out}
    if not chosen:
        raise NotComparable(f"{reason}, and it does not have a list of more than two equal blocks")
    try:
        fewer = with_fewer_blocks(whole, chosen)
        with recording("comparing numbers"):
            own = capture(fewer, *batch, target=plan.cluster.target)
        left = _costs(own, plan, measurement)
    except Exception as error:
        kept = " and ".join(map(str, chosen))
        raise NotComparable(
            f"{reason}, and a copy with {kept} cannot be traced ({in_one_line(error)})"
        ) from error
    if still := obstacle(left, measurement.loss):
        raise NotComparable(f"{reason}, and for {fewer.name} {still}")
    return fewer, own


def _costs(chain: Chain, plan: Plan, measurement: Measurement) -> list[LayerCost]:
    """Return the costs of the layers of `chain`, which are some of the plan's by their names.

    Raises:
        NotComparable: a layer is not in the plan.
    """
    costs = dict(zip(plan.profile.layers, measurement.costs, strict=True))
    strange = next((layer.name for layer in chain.layers if layer.name not in costs), None)
    if strange is not None:
        raise NotComparable(f"its layer {strange} is not in the plan")
    return [costs[layer.name] for layer in chain.layers]


def _measured(chain: Chain, plan: Plan, measurement: Measurement) -> Chain:
    """Return the chain with the results of profiling, although it may have fewer blocks than the plan.

    For a traced chain these are only memory layouts of values; layers of a copy may pass on other values.
    """
    if len(chain.layers) == len(measurement.layers):
        return chain.measured(measurement)
    if chain.traced:
        return chain
    kinds = dict(zip(plan.profile.layers, measurement.layers, strict=True))
    layers = tuple(kinds[layer.name] for layer in chain.layers)
    return chain.measured(replace(measurement, layers=layers, shared=(), shared_buffers=()))


def compare_at_start(whole: Task, plan: Plan, chain: Chain, batches: Sequence[Sample]) -> str:
    """Compare the module of `whole` with its chain, if it was traced, before the training.

    `whole` and `chain` may have fewer blocks than the plan. If replicas divide microbatches, also compare the
    loss of a microbatch with those of its local batches; the module with the chain that is traced for local
    batches; and, if the layers are modules, values that stages of different degree exchange. Return why they
    were not compared, or an empty text.

    Raises:
        UsageError: the chain computes other numbers than the module, or local batches have another loss or
            other values; says which.
    """
    target = plan.cluster.target
    try:
        if chain.traced:
            compare(whole, _measured(chain, plan, plan.measurement), batches, target=target).check()
        for data in _degrees(plan):
            apart = _slices_apart(whole, plan, chain, batches[0], data)
            if apart and not plan.asks_for_replicas:
                raise UsageError(f"{apart}. {_FOR_SLICES}")
            _warn(apart)
            if chain.traced:
                _compare_trace(whole, plan, batches, data)
            else:
                _compare_rows(whole, plan, chain, batches[0], data)
    except NotComparable as error:
        return _not_compared(whole, error)
    return ""


def _not_compared(whole: Task, reason: NotComparable) -> str:
    return (
        f"{whole.name} as a chain was not compared with its module: {reason}. To compare anyway, run "
        "pipefit certify --numbers; to skip this check, pass numbers=False (train --no-numbers)"
    )


def compare_plan_at_start(
    whole: Task, plan: Plan, chain: Chain, batches: Sequence[Sample], held: Held
) -> str:
    """Compare training by `plan` with plain training, for the largest cheap number of microbatches.

    Return why it was not compared, or an empty text. Chains that ranks divide are first compared with whole
    ones by `held`.

    Raises:
        UsageError: training by the plan computes other numbers; says which.
    """
    counts = range(enough_microbatches(plan), 0, -1)
    _, reason = _compared_plan(whole, plan, chain, batches, counts, longest=LONGEST_SECONDS, held=held)
    if not reason:
        return ""
    return (
        f"training of {whole.name} by the plan was not compared with plain training: {reason}. To compare "
        "anyway, run pipefit certify --numbers; to skip this check, pass numbers=False (train "
        "--no-numbers)"
    )


PLANS = "PIPEFIT_COMPARE_PLANS"  # environment variable: with 0, trainers do not compare plans


@dataclass(slots=True)
class Comparisons:
    """Comparisons at the start of a trainer, and the reasons for skipped ones.

    `not_compared` has these reasons, which are also given as warnings.
    """

    plan: Plan
    wanted: bool
    not_compared: str = ""
    _plan_compared: bool = False

    def of_chain(self, whole: Task, chain: Chain, first: Sample, *, rank: int) -> None:
        """Compare the module with its chain, and losses of microbatches with that of their samples together.

        Only the first of several workers compares; see `compare_at_start` and `what_microbatches_change`.
        """
        if not self.wanted:
            return
        second = sample(whole, self.plan.training.microbatch_size, seed=1)  # on every rank: all draw the same
        if rank != 0:
            return
        if chain.traced or self.plan.is_sliced:
            try:
                compared, own = comparable(whole, self.plan, chain, first, _too_much)
            except NotComparable as reason:
                self._tell(_not_compared(whole, reason))
            else:
                self._tell(compare_at_start(compared, self.plan, own, (first, second)))
                _warn(what_microbatches_change(compared, self.plan, own, (first, second)))
        if os.environ.get(PLANS, "1") != "0":
            left_out = compare_plan_at_start(whole, self.plan, chain, (first, second), self.of_ranks)
            self._plan_compared = not left_out
            self._tell(left_out)

    def of_ranks(self, divided: ShardedChain, batch: Sample) -> None:
        """Compare layers that ranks divide with whole ones, once; see `compare_divided`."""
        if self.wanted and not self._plan_compared:
            self._tell(compare_divided(divided, batch))

    def _tell(self, reason: str) -> None:
        if reason:
            self.not_compared = "; ".join(filter(None, (self.not_compared, reason)))
        _warn(reason)


def _warn(sentence: str) -> None:
    """Warn, unless the sentence is empty."""
    if sentence:
        warnings.warn(sentence, PipefitWarning, stacklevel=5)


def compare_divided(divided: ShardedChain, batch: Sample) -> str:
    """Compare blocks that ranks divide with whole ones; return why not all were compared, or an empty text.

    Raises:
        UsageError: ranks compute other numbers; names the block.
    """
    chain = divided.chain
    given, wanted = chain.flatten(batch[0]), chain.flatten_targets(batch[1])
    result = compare_blocks(divided, given, wanted, free_bytes=free_bytes(), longest=LONGEST_DIVIDED)
    if not result.left_out:
        return ""
    return (
        f"layers of {chain.name} on {divided.ranks} tensor-parallel ranks were not compared with whole "
        f"layers: {result.left_out}. To compare anyway, run pipefit certify --numbers; to skip this check, "
        "pass numbers=False (train --no-numbers)"
    )


def _degrees(plan: Plan) -> list[int]:
    """Return the distinct numbers of replicas of stages, without 1."""
    return sorted({stage.grid.data for stage in plan.stages} - {1})


def _slices_apart(whole: Task, plan: Plan, chain: Chain, batch: Sample, data: int) -> str:
    """Return a sentence if a microbatch's loss is not the mean of its `data` local batches' losses.

    Losses are computed in evaluation mode.

    Raises:
        NotComparable: the model draws random numbers in evaluation too.
    """
    count = samples_of(batch) // data
    slices = [rows(batch, first, first + count) for first in range(0, count * data, count)]
    one, again, *parts = evaluated(
        whole, [batch, batch, *slices], traced=chain.traced, target=plan.cluster.target
    )
    if one != again and isfinite(one):
        raise NotComparable(f"{whole.name} also draws random numbers in evaluation")
    mean = sum(parts) / data
    if abs(mean - one) <= tolerance(plan) * max(abs(one), abs(mean)):
        return ""
    return (
        f"{data} replicas would train another loss of {whole.name}: the loss of a microbatch is {one:.6g}, "
        f"but its {data} local batches have {mean:.6g} on average"
    )


def _compare_trace(whole: Task, plan: Plan, batches: Sequence[Sample], data: int) -> None:
    """Compare the module with the chain traced for local batches of `data` replicas, on one of each batch.

    Raises:
        UsageError: they compute other numbers.
    """
    size, target = plan.training.microbatch_size // data, plan.cluster.target
    slices = [rows(batch, 0, size) for batch in batches]
    chain = capture(whole, *slices[0], target=target)
    compare(whole, _measured(chain, plan, plan.profile.at(size)), slices, target=target).check()


def _compare_rows(whole: Task, plan: Plan, chain: Chain, batch: Sample, data: int) -> None:
    """Compare values that local batches for `data` replicas send with the rows of the whole microbatch.

    Only values between stages of different degrees are compared.

    Raises:
        NotComparable: the chain has fewer layers than the plan.
        UsageError: they differ, as after a layer that reorders samples.
    """
    degrees = [stage.grid.data for stage in plan.stages]
    changing = [number for number in range(1, len(degrees)) if degrees[number - 1] != degrees[number]]
    if changing and len(chain.layers) < len(plan.profile.layers):
        raise NotComparable(
            "stages with different numbers of replicas exchange values between layers, "
            "which this comparison does not support"
        )
    first, target = [plan.stages[number].start for number in changing], plan.cluster.target
    size = plan.training.microbatch_size // data
    sliced = chain.measured(plan.profile.at(size))
    entire = values_before(first, whole, chain.measured(plan.measurement), batch, target=target)
    slices = (rows(batch, start, start + size) for start in range(0, size * data, size))
    parts = zip(*(values_before(first, whole, sliced, one, target=target) for one in slices), strict=True)
    for number, own, others in zip(changing, entire, parts, strict=True):
        for value, dimension in enumerate(plan.division(number).dimensions):
            if dimension is not None and not _close(
                own[value], torch.cat([o[value] for o in others], dimension), plan
            ):
                raise UsageError(
                    f"stages {number - 1} and {number} with {counted(degrees[number - 1], 'replica')} and "
                    f"{degrees[number]} would exchange wrong rows: value {value} between them has other "
                    f"numbers in {data} local batches than in a whole microbatch, for example because a "
                    "layer reorders samples. Use the same number of replicas for both stages, or end the "
                    "stage at another layer"
                )


def _close(tensor: Tensor, other: Tensor, plan: Plan) -> bool:
    """Return whether two values are equal up to rounding."""
    tensor, other = tensor.double(), other.double()
    return torch.allclose(
        tensor, other, rtol=0, atol=tolerance(plan) * float(tensor.abs().max()), equal_nan=True
    )


def _too_much(costs: Sequence[LayerCost], loss: LayerCost) -> str:
    """Return why a comparison exceeds the limits at a trainer's start; empty if it does not."""
    taken = _seconds(costs)
    return _lack_of_memory(costs, loss) or (
        f"it takes about {taken:.0f} s" if taken > LONGEST_SECONDS else ""
    )


def _lack_of_memory(costs: Sequence[LayerCost], loss: LayerCost) -> str:
    """Return that a comparison needs more memory than the host has, or an empty text."""
    return _lacking(_bytes(costs, loss))


def _lacking(needed: int) -> str:
    """Return that the host has less memory than needed, or an empty text."""
    free = free_bytes()
    return f"it needs {format_bytes(needed)} on the host, which has {format_bytes(free)} free" * (
        needed > free
    )


def host_bytes(measurement: Measurement) -> int:
    """Return host bytes of a comparison.

    It has copies of the module, gradients, and activations of two microbatches.
    """
    return _bytes(measurement.costs, measurement.loss)


def module_bytes(measurement: Measurement) -> int:
    """Return the bytes of the module; shared tensors count for each layer."""
    return sum(cost.static_bytes for cost in measurement.costs)


def host_seconds(measurement: Measurement) -> float:
    """Estimate the seconds of a comparison on one core by operations and bytes, without timings."""
    return _seconds(measurement.costs)


def _bytes(layers: Sequence[LayerCost], loss: LayerCost) -> int:
    costs = (*layers, loss)
    activations = _MICROBATCHES * sum(sum(cost.storages) for cost in costs) + max(
        c.forward_peak_bytes for c in costs
    )
    return _COPIES * sum(cost.static_bytes for cost in layers) + activations


def _seconds(layers: Sequence[LayerCost]) -> float:
    work = [replace(work, seconds=None) for cost in layers for work in (cost.forward, cost.backward)]
    return _MICROBATCHES * _RUNS * sum(seconds(each, _CORE) for each in work)
