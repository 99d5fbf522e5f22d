"""Memory of stages whose replicas divide state (ZeRO): exact peaks, and lower bounds for all ranges.

The sizes of a stage's layers decide which replica owns each layer (`memory.model_state`), and under ZeRO-2
and 3 a stage's passes are cut into buckets, so an exact peak needs the stage's program (`Reader`). The tables
of lower bounds (`least`) are made from those of whole replicas. Of the divided bytes, the replica that owns
the most has

    at least a d-th, and (k + 1) times the bytes of the (k d + 1)-th largest layer, for every k

since k d + 1 layers among d replicas give one of them k + 1. For equal layers that is exact. One kind of an
owner's state, such as gradients, is at least its divided bytes times the smallest fraction that this kind has
of any layer's divided bytes.

Cost: L^2 numbers for every different size of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pipefit.errors import UsageError
from pipefit.memory import Costs
from pipefit.planner.closed_forms.bands import Band, Ints, Recomputed
from pipefit.planner.problem import Question, Split, plan_of, shortened
from pipefit.schema.decisions import Decision
from pipefit.schema.grids import Sharding
from pipefit.schema.layer_costs import LayerCost
from pipefit.schema.profile import Measurement
from pipefit.schema.training import Training
from pipefit.simulator import Parts

# ---- Exact peaks, read from programs


class Reader:
    """Reader of stages' programs for one question, exact to the byte like the simulator.

    Only the ranks of the read stages are lowered, for a few microbatches (`planner.evaluation`).

    Cost: some twenty microseconds for every action of a stage's devices.
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self.actions = 0  # in the programs read
        self._parts: dict[Training, Parts] = {}

    def peaks(self, split: Split, numbers: Sequence[int], decisions: Sequence[Decision] = ()) -> list[float]:
        """Return the peak of the fullest device of some stages; infinity if a stage cannot be carried out.

        The stages follow `decisions`, or the recomputation that the question requests.
        """
        how, result = shortened(self.question, len(split.devices)), list[float]()
        plan = plan_of(replace(self.question, training=how), split, decisions=tuple(decisions) or None)
        if how not in self._parts:
            self._parts[how] = Parts(Costs.of(plan))
        parts = self._parts[how]
        left_out = plan.measurement.loss_bytes * (self.question.training.microbatches - how.microbatches)
        for number in numbers:
            before = parts.actions
            try:
                highest = parts.peak_of_rank(plan, number)
                result.append(float(highest + left_out * (number == len(plan.stages) - 1)))
            except UsageError:
                result.append(float("inf"))
            self.actions += parts.actions - before
        return result


# ---- Lower bounds

_ROUNDING = 1 - 1e-9
_UPDATES = "update_first_peak_bytes", "update_peak_bytes"

Floats = NDArray[np.float64]


def buckets_of(shard: Sharding, blocks: int) -> int:
    """Return the number of buckets of a stage: one for each block if gradients or parameters are divided."""
    return blocks if shard in ("gradients", "parameters") else 1


class DivisibleBytes:
    """Divisible bytes of every layer; a shared parameter counts with its first layer."""

    def __init__(self, measurement: Measurement) -> None:
        costs = measurement.costs
        self.costs = costs
        self.parameters, self.gradients, self.state, self.early = (
            np.array([getattr(cost, name) for cost in costs], np.int64)
            for name in ("parameter_bytes", "gradient_bytes", "state_bytes", "early_state_bytes")
        )
        self.all_gathered = np.array([cost.parameter_bytes + cost.copy_bytes for cost in costs], np.int64)
        for shared in measurement.shared:
            for user in shared.users[1:]:
                self.parameters[user] -= shared.nbytes
                self.gradients[user] -= shared.gradient_bytes
                self.state[user] -= shared.state_bytes
                self.early[user] -= shared.early_state_bytes

    def divided(self, shard: Sharding) -> Ints:
        """Return the bytes of every layer that `shard` divides."""
        result = self.state + self.gradients * (shard != "optimizer")
        return result + self.parameters * (shard == "parameters")


def least(
    band: Band, measurement: Measurement, edges: Sequence[int], data: int, shard: Sharding
) -> tuple[Band, Band]:
    """Return two bands whose peaks bound the fullest of `data` replicas that divide state from below.

    The first band has the average bytes of a replica, the second those of the replica that owns the most.
    """
    sizes, blocks = DivisibleBytes(measurement), DividedBytes(edges, band)
    dealt = sizes.divided(shard)
    largest = blocks.largest_share(dealt, data)

    def mean(of: Ints) -> Ints:
        return blocks.sums(of) // data

    def of_owner(of: Ints) -> Ints:
        part = np.divide(of, dealt, out=np.full(len(of), np.inf), where=dealt > 0)
        result: Ints = np.floor(blocks.lowest(part) * largest * _ROUNDING).astype(np.int64)
        return result

    def update(peaks: Iterable[int]) -> Ints:
        return blocks.lowest(np.where(dealt > 0, np.fromiter(peaks, float), np.inf)).astype(np.int64)

    nothing = np.zeros_like(band.update_peak)
    first, later = (update(getattr(cost, name) for cost in sizes.costs) for name in _UPDATES)
    return (
        _with(band, sizes, blocks, shard, mean, nothing, nothing),
        _with(band, sizes, blocks, shard, of_owner, first, later),
    )


def _with(
    band: Band,
    sizes: DivisibleBytes,
    blocks: DividedBytes,
    shard: Sharding,
    owned: Callable[[Ints], Ints],
    first: Ints,
    later: Ints,
) -> Band:
    """Return the band of a replica with these owned bytes and these peaks of first and later updates."""
    early = owned(sizes.early)
    made = replace(
        band,
        state=owned(sizes.state),
        early=early,
        update_peak=later,
        update_first_peak=early + first,
        _sums={},
    )
    if shard == "optimizer":
        return made
    made = replace(
        made,
        gradients=owned(sizes.gradients),
        backward_first_peak=np.maximum(band.backward_first_peak - band.gradients, 0),
        backward_later_peak=band.backward_later_peak if _grows(sizes.costs) else np.zeros_like(first),
        recomputed=band.recomputed and _of_owners(band.recomputed, band.gradients, grows=_grows(sizes.costs)),
        _sums={},
    )
    if shard == "gradients":
        return made
    static = np.maximum(band.static - blocks.sums(sizes.all_gathered), 0)
    return replace(made, static=static + owned(sizes.parameters), _sums={})


def _of_owners(recomputed: Recomputed, gradients: Ints, *, grows: bool) -> Recomputed:
    """Return the recomputation peaks for replicas that keep a part of the gradients."""
    forward, forward_later, backward, backward_later = recomputed
    return Recomputed(
        np.maximum(forward - gradients, 0),
        forward_later,
        np.maximum(backward - gradients, 0),
        backward_later if grows else forward_later,
    )


def _grows(costs: Sequence[LayerCost]) -> bool:
    """Return whether no layer needs more in a backward that adds to gradients than in one that makes them."""
    return all(
        max((span.peak_bytes for span in later), default=0)
        <= max((span.peak_bytes for span in first), default=0)
        for cost in costs
        for later, first in ((cost.backward_later, cost.backward_first), (cost.inner_later, cost.inner_first))
    )


class DividedBytes:
    """Tables over the ranges of blocks of a band, with its rows and columns, from numbers of layers."""

    def __init__(self, edges: Sequence[int], band: Band) -> None:
        self.edges, self.count = np.array(edges), len(edges) - 1
        width, columns = band.valid.shape
        self.starts = np.arange(band.first, band.first + columns)
        self.stops = np.minimum(self.starts + np.arange(1, width + 1)[:, None], self.count)

    def sums(self, of: Ints) -> Ints:
        """Return the sums over the layers of every range."""
        before = np.concatenate(([0], np.cumsum(of)))[self.edges]
        result: Ints = before[self.stops] - before[self.starts]
        return result

    def lowest(self, of: Floats) -> Floats:
        """Return the lowest number of the layers of every range; zero if none is finite."""
        of_blocks, (width, columns) = np.minimum.reduceat(of, self.edges[:-1]), self.stops.shape
        end = min(self.count, int(self.starts[0]) + columns + width - 1)
        padded = np.full(columns + width - 1, np.inf)
        padded[: end - self.starts[0]] = of_blocks[self.starts[0] : end]
        result = np.empty((width, columns))
        if columns < width:
            for column in range(columns):
                np.minimum.accumulate(padded[column : column + width], out=result[:, column])
        else:
            result[0] = padded[:columns]
            for row in range(1, width):
                np.minimum(result[row - 1], padded[row : row + columns], out=result[row])
        return np.where(np.isfinite(result), result, 0.0)

    def largest_share(self, of: Ints, data: int) -> Ints:
        """Return the least bytes of the fullest of `data` replicas that share a range's whole layers."""
        result, larger = -(-self.sums(of) // data), np.zeros(self.stops.shape, np.int64)
        for size in np.unique(of[of > 0])[::-1]:
            upto = larger + self.sums((of == size).astype(np.int64))
            several = (upto - 1) // data
            result = np.where(
                (upto > larger) & (several * data >= larger), np.maximum(result, (several + 1) * size), result
            )
            larger = upto
        return result
