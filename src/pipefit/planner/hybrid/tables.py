"""Costs of stages of every degree, for all ranges of blocks: peaks of a device to the byte, and seconds.

A device of a stage with d replicas holds the memory of a stage with microbatches of the local batch's size,
so its peak is the closed form (`planner.closed_forms`) of the measurement at that size. Tables have row i and
column j for blocks i to j - 1; infinity if a stage of this degree cannot hold them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.errors import UsageError
from pipefit.lowering import Recompute
from pipefit.planner.closed_forms.bands import Band, Ints, stage_peak
from pipefit.planner.closed_forms.ranges import Ranges, ranges_of
from pipefit.planner.closed_forms.surroundings import Surroundings, surroundings
from pipefit.planner.hybrid.divided_state import least
from pipefit.planner.hybrid.programme import WHOLE, Allowed, Floats, Way, banded
from pipefit.planner.memory_choices import ranges
from pipefit.planner.problem import Degree, Question
from pipefit.schema.devices import DeviceKind
from pipefit.schema.grids import Sharding, dimensions
from pipefit.schema.layer_costs import SharedParameter, Value
from pipefit.schema.profile import Measurement
from pipefit.timing import Group, Line, layer_seconds


class StageSeconds(NamedTuple):
    """Seconds of a stage: forward and backward of a microbatch, and the update of a step."""

    forward: Floats
    backward: Floats
    update: Floats


class DividedSeconds(NamedTuple):
    """Seconds of a stage whose replicas may divide state: a microbatch, the end of a step, and idle ones.

    Idle are those of a backward that waits for collectives; recomputation in them takes no time.
    """

    each: Floats
    end: Floats
    idle: Floats


_MANY_RANGES = 200_000  # ranges of a band, above which it is made only for the starts that are needed


class DegreeTables:
    """Tables of one degree."""

    def __init__(self, question: Question, degree: Degree) -> None:
        self.question, self.degree = question, degree
        self.measurement = question.measured(degree)
        self._peaks: dict[tuple[tuple[Surroundings, ...], Way], Floats] = {}
        self._read: dict[tuple[tuple[Surroundings, ...], Way], dict[tuple[int, int], float]] = {}
        self._least: dict[tuple[Way, int], tuple[Band, ...]] = {}
        self._bars: dict[Way, Floats] = {}
        self._bars_of_rows: dict[tuple[Way, int], Floats] = {}
        self._expected: dict[Way, float] = {}  # factor by which peaks are expected to exceed their bounds

    def peaks(self, stages_left: int, way: Way = WHOLE) -> Floats:
        """Return the peak of a device as a stage with `stages_left` stages from itself to the last one.

        If replicas divide state or blocks are recomputed separately, the peak read from the program, or else
        a bound.
        """
        met = self._met(stages_left, way)
        if self._is_bound(way):
            return self._bounds_and_read(met, way)
        if (met, way) not in self._peaks:
            band = self._ranges(way).band(self.question.blocks)
            self._peaks[met, way] = self._barred(way) + self._square(stage_peak(band, met).astype(float))
        return self._peaks[met, way]

    def _recompute(self, way: Way) -> Recompute:
        """Return the recomputation of a stage."""
        return self.question.options.recompute if way.recompute == "never" else way.recompute

    def _is_bound(self, way: Way) -> bool:
        """Return whether peaks are lower bounds until they are read."""
        return way.shard != "none" or self._recompute(way) == "always"

    def _bounds_and_read(self, met: tuple[Surroundings, ...], way: Way) -> Floats:
        """Return peaks as bounds, or as read; not cached, since all of them would be large."""
        bands = self._bands(way, self.question.blocks, range(self.question.blocks))
        rows = np.maximum.reduce([stage_peak(band, met) for band in bands]).astype(float)
        result = self._expected.get(way, 1.0) * self._square(rows) + self._barred(way)
        for (start, stop), nbytes in self._read.get((met, way), {}).items():
            result[start, stop] = nbytes
        return result

    def rows(self, stages_left: int, way: Way, width: int, starts: range | None = None) -> Floats:
        """Return peaks up to `width` blocks: row i and column w are the w + 1 blocks from `starts[i]` on.

        By default there is a row for every block.
        """
        starts = starts or range(self.question.blocks)
        met, bands = self._met(stages_left, way), self._bands(way, width, starts)
        if (way, width) not in self._bars_of_rows:
            self._bars_of_rows[way, width] = banded(self._barred(way), width)
        columns = slice(starts.start - bands[0].first, starts.stop - bands[0].first)
        peaks = [stage_peak(band, met, (slice(width), columns)) for band in bands]
        rows = np.full((len(starts), width), np.inf)
        rows[:, : len(peaks[0])] = np.maximum.reduce(peaks).T * self._expected.get(way, 1.0)
        for (start, stop), read in self._read.get((met, way), {}).items():
            if stop - start <= width and start in starts:
                rows[start - starts.start, stop - start - 1] = read
        result: Floats = rows + self._bars_of_rows[way, width][starts.start : starts.stop]
        return result

    def widest(self, stages_left: int, way: Way, nbytes: float) -> int:
        """Return a number of blocks, at least one, that no stage with a peak up to `nbytes` exceeds."""
        if way.shard != "none":
            return self.question.blocks
        owned, gradients = self._ranges(way).owned()
        if any(met.gradients for met in self._met(stages_left, way)):
            owned += gradients
        stops = np.searchsorted(owned, owned + nbytes, side="right") - 1
        return max(1, int((stops - np.arange(len(owned))).max()))

    def _bands(self, way: Way, width: int, starts: range) -> tuple[Band, ...]:
        """Return bands of ranges of at least `width` blocks whose peaks do not exceed those of this way.

        They have the ranges that begin at `starts`, or at all blocks if these bands cost little.
        """
        blocks = self.question.blocks
        width = min(blocks, 1 << (width - 1).bit_length())
        if way.shard == "none" and len(starts) < blocks and width * blocks > _MANY_RANGES:
            return (self._ranges(way).band(width, first=starts.start, last=starts.stop - 1),)
        band = self._ranges(way).band(width)
        if way.shard == "none":
            return (band,)
        if (way, width) not in self._least:
            data = self.degree.data
            self._least[way, width] = least(band, self.measurement, self.question.edges, data, way.shard)
        return self._least[way, width]

    def room(self, counts: Sequence[int], way: Way, width: int, nbytes: float) -> Ints:
        """Return the most stages from this one to the last with which a stage needs at most `nbytes` bytes.

        `counts` are the rising numbers to test. Row i and column w are the w + 1 blocks from i on; 0 for
        none.
        """
        result, known = np.zeros((self.question.blocks, width), np.int64), 0
        for left in counts:
            result, known = (
                np.where((nbytes >= self.rows(left, way, width)) & (result == known), left, result),
                left,
            )
        return result

    def read(self, stages_left: int, way: Way, start: int, stop: int) -> float | None:
        """Return the known peak of the fullest replica of these blocks; None if only a bound is known."""
        if not self._is_bound(way):
            return self._bound(stages_left, way, start, stop)
        return self._read.get((self._met(stages_left, way), way), {}).get((start, stop))

    def peak(self, stages_left: int, way: Way, start: int, stop: int) -> float:
        """Return the peak of a stage of these blocks, as in `peaks`."""
        read = self.read(stages_left, way, start, stop)
        peak = self._bound(stages_left, way, start, stop) if read is None else read
        return peak + float(self._barred(way)[start, stop])

    def take(
        self, stages_left: int, way: Way, start: int, stop: int, nbytes: float, *, expects: bool = False
    ) -> None:
        """Record the read peak of the fullest replica of a stage of these blocks.

        With `expects`, all other peaks are expected to exceed their bounds by the same factor.
        """
        bound = self._bound(stages_left, way, start, stop)
        self._read.setdefault((self._met(stages_left, way), way), {})[start, stop] = nbytes
        if expects and bound < nbytes < np.inf:
            self._expected[way] = self._expected.get(way, 1.0) * nbytes / bound

    def _bound(self, stages_left: int, way: Way, start: int, stop: int) -> float:
        """Return the peak of a stage of these blocks, or its bound times the expected factor."""
        met, bands = self._met(stages_left, way), self._bands(way, stop - start, range(start, start + 1))
        row, column = slice(stop - start - 1, stop - start), start - bands[0].first
        peaks = [stage_peak(band, met, (row, slice(column, column + 1))) for band in bands]
        return float(max(peak.item() for peak in peaks)) * self._expected.get(way, 1.0)

    def least(self, stages_left: int, way: Way, start: int, stop: int) -> float:
        """Return a lower bound of the peak of a stage of these blocks, without tables of other ranges."""
        band = self._ranges(way).band(stop - start, first=start, last=start)
        data, edges = self.degree.data, self.question.edges
        divides = way.shard != "none"
        bands = least(band, self.measurement, edges, data, way.shard) if divides else (band,)
        met = self._met(stages_left, way)
        return max(float(stage_peak(one, met)[-1, 0]) for one in bands) + float(
            self._barred(way)[start, stop]
        )

    def _met(self, stages_left: int, way: Way) -> tuple[Surroundings, ...]:
        how, recompute = self.question.training, self._recompute(way)
        return surroundings(how.schedule, 0, stages_left, how.microbatches, recompute, versions=how.versions)

    def seconds(self, kind: DeviceKind, group: Group | None = None, *, again: bool = False) -> StageSeconds:
        """Return the seconds of all ranges for a microbatch on a device of this kind.

        `group` adds tensor-parallel communication, and `again` a second forward before the backward.
        """
        forward, backward, update = map(ranges, self.before(kind, group))
        again = again or self.question.options.recompute != "never"
        return StageSeconds(forward, backward + forward * again, update)

    def before(self, kind: DeviceKind, group: Group | None = None) -> StageSeconds:
        """Return the seconds of the blocks before each edge, the loss with the last block."""
        of_layers = layer_seconds(self.measurement, kind, self.question.training, group)
        edges = np.array(self.question.edges)
        edges[-1] += 1
        return StageSeconds(
            *(np.concatenate(([0.0], np.cumsum(times)))[edges] for times in zip(*of_layers, strict=True))
        )

    def divided_seconds(self, of: StageSeconds, group: Group, shard: Sharding) -> DividedSeconds:
        """Return the seconds of a microbatch and of the end of a step, for a `group` of replicas.

        If replicas divide gradients or parameters, every block has its own collectives. A gather runs beside
        the pass of the block before, a reduction beside the next pass. Parameters of the first block stay
        from a backward to the next forward, and those of the last block from a forward to its backward.
        """
        whole = of.forward + of.backward
        if shard == "none":
            end = of.update + together_seconds(group.sums, self.gradients)
            return DividedSeconds(whole, end, np.zeros_like(end))
        brought_bytes = self.gathered if shard == "parameters" else self.trained
        sums, brought = (together_seconds(group.halves, nbytes) for nbytes in (self.gradients, brought_bytes))
        end = of.update / self.degree.data + brought * (shard != "parameters")
        if shard == "optimizer":
            return DividedSeconds(whole, end + sums, np.zeros_like(end))
        forward, backward, reduced, gathered = (
            np.diagonal(of_ranges, 1) for of_ranges in (of.forward, of.backward, sums, brought)
        )
        gathered = gathered * (shard == "parameters")
        gathers_next, reduced_next = np.append(gathered[1:], 0.0), np.append(reduced[1:], 0.0)
        gathers_before = np.append(0.0, gathered[:-1])
        inner = np.maximum(backward, gathers_before + reduced_next)
        last = np.maximum(backward, gathers_before)
        backwards = _summed(np.maximum(backward, reduced_next), inner, last, backward)
        first, inner = np.maximum(forward, gathers_next + reduced), np.maximum(forward, gathers_next)
        forwards = _summed(first, inner, forward, np.maximum(forward, reduced))
        return DividedSeconds(forwards + backwards, end, backwards - of.backward)

    @cached_property
    def gradients(self) -> Floats:
        """Bytes of gradients that replicas all-reduce."""
        return self._once(
            "gradient_bytes", {shared: shared.gradient_bytes for shared in self.measurement.shared}
        )

    @cached_property
    def trained(self) -> Floats:
        """Bytes of trained parameters, which owners send to the other replicas after an update."""
        return self._once(
            "trained_bytes",
            {shared: shared.nbytes for shared in self.measurement.shared if shared.gradient_bytes},
        )

    @cached_property
    def gathered(self) -> Floats:
        """Bytes that owners send to the other replicas for a pass if only owners keep parameters.

        The half-precision copies of parameters that layers read only through these copies, and all other
        parameters.
        """
        sizes = [
            sum(
                parameter.copy_bytes if parameter.cast_only else parameter.nbytes
                for parameter in cost.parameters
            )
            for cost in self.measurement.costs
        ]
        result = self._in_ranges(sizes)
        for shared in self.measurement.shared:
            users, casting = self._users(shared.users), self._users(shared.cast_only)
            counted = casting * shared.copy_bytes + (users - casting) * shared.nbytes
            once = np.where(users == casting, shared.copy_bytes, shared.nbytes)
            result += np.where(users > 0, once - counted, 0)
        return result

    def _once(self, name: str, of_shared: Mapping[SharedParameter, int]) -> Floats:
        """Return the bytes of all layers of a range, with a shared parameter counted once."""
        result = self._in_ranges(getattr(cost, name) for cost in self.measurement.costs)
        for shared, nbytes in of_shared.items():
            result -= np.maximum(self._users(shared.users) - 1, 0) * nbytes
        return result

    def _users(self, users: Sequence[int]) -> Floats:
        """Return the number of these layers in each range of blocks."""
        return self._in_ranges(layer in users for layer in range(len(self.measurement.costs)))

    def _in_ranges(self, of_layers: Iterable[int]) -> Floats:
        """Return the sums over the layers of every range of blocks."""
        sums = [0.0, *accumulate(map(float, of_layers))]
        return ranges(np.array(sums)[np.array(self.question.edges)])

    def _ranges(self, way: Way) -> Ranges:
        question = self.question
        return ranges_of(
            self.measurement, question.edges, question.training.microbatches, self._recompute(way)
        )

    def _square(self, rows: Floats) -> Floats:
        """Return a table over ranges from rows by width."""
        result = np.full((self.question.blocks, self.question.blocks + 1), np.inf)
        starts, stops = self._ends
        result[starts, stops] = rows[stops - starts - 1, starts]
        return result

    @cached_property
    def _ends(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """First block of every range, and the block after its last."""
        starts, last = np.triu_indices(self.question.blocks)
        return starts, last + 1

    @cached_property
    def barred(self) -> Floats:
        """Infinity for ranges with a layer that cannot have replicas (`LayerCost.alone`), else zero."""
        edges, costs = self.question.edges, self.measurement.costs
        alone = [float(any(cost.alone for cost in costs[a:b])) for a, b in pairwise(edges)]
        alone[-1] += float(bool(self.measurement.loss.alone))
        held = ranges(np.concatenate(([0.0], np.cumsum(alone))))
        result: Floats = np.where((held > 0) & (self.degree.data > 1), np.inf, 0.0)
        return result

    def _barred(self, way: Way) -> Floats:
        """Return infinity for ranges that stages cannot hold in this way, else zero.

        Gradients of a parameter that other stages share stay on all replicas, and some layers cannot be
        recomputed.
        """
        if way not in self._bars:
            self._bars[way] = self._bars_of(way)
        return self._bars[way]

    def _bars_of(self, way: Way) -> Floats:
        result, edges = self.barred.copy(), np.array(self.question.edges)
        starts, stops = edges[:-1, None], edges[None, :]
        if way.recompute != "never":
            once = [float(bool(cost.unrepeatable)) for cost in self.measurement.costs]
            once[-1] += float(bool(self.measurement.loss.unrepeatable))
            result[ranges(np.array([0.0, *accumulate(once)])[edges]) > 0] = np.inf
        for shared in self.measurement.shared if way.shard in ("gradients", "parameters") else ():
            users = np.array(shared.users)[:, None, None]
            inside = (starts <= users) & (users < stops)
            if shared.gradient_bytes:
                result[inside.any(axis=0) & ~inside.all(axis=0)] = np.inf
        return result


def _summed(first: Floats, inner: Floats, last: Floats, alone: Floats) -> Floats:
    """Return sums over every range's blocks by the place of a block in it; `alone` is for single blocks."""
    result: Floats = ranges(np.concatenate(([0.0], np.cumsum(inner))))
    result += (first - inner)[:, None] + np.append(0.0, last - inner)
    np.fill_diagonal(result[:, 1:], alone)
    return result


def together_seconds(ways: Sequence[Line], nbytes: Floats) -> Floats:
    """Return the seconds of a collective of `nbytes` in the fastest of these ways, on idle wires."""
    every = np.minimum.reduce([way.delay_seconds + way.seconds_per_byte * nbytes for way in ways])
    result: Floats = np.where(nbytes > 0, every, 0.0)
    return result


def barred_cuts(question: Question, tables: dict[Degree, DegreeTables]) -> dict[int, Allowed]:
    """Return the cuts at which some degrees may not meet, and the test of degrees.

    Values at such a cut cannot be divided by samples.
    """
    judges = _Judges({degree.data: degree_tables.measurement for degree, degree_tables in tables.items()})
    pairs = [(a.data, b.data) for a in tables for b in tables if a.data != b.data]
    result: dict[int, Allowed] = {}
    for cut in range(1, question.blocks):
        layer = question.edges[cut]
        if not all(judges.meet(layer, *pair) for pair in pairs):
            result[cut] = lambda cut, front, behind: judges.meet(question.edges[cut], front.data, behind.data)
    return result


class _Judges:
    """Test of the degrees that may meet before a layer."""

    def __init__(self, measured: dict[int, Measurement]) -> None:
        self._sizes = {data: measurement.microbatch_size for data, measurement in measured.items()}
        self._inputs = {data: [cost.inputs for cost in one.costs] for data, one in measured.items()}
        self._known: dict[tuple[tuple[Value, ...], tuple[Value, ...], bool], bool] = {}

    def meet(self, layer: int, front: int, behind: int) -> bool:
        """Return whether `front` replicas can send this layer's inputs to `behind` replicas."""
        if front == behind:
            return True
        key = self._inputs[front][layer], self._inputs[behind][layer], front < behind
        if key not in self._known:
            self._known[key] = self._divisible(*key[:2], (self._sizes[front], self._sizes[behind]), key[2])
        return self._known[key]

    @staticmethod
    def _divisible(
        sent: tuple[Value, ...], received: tuple[Value, ...], sizes: tuple[int, int], gathers: bool
    ) -> bool:
        try:
            dimensions(sent, received, sizes, gathers=gathers)
        except UsageError:
            return False
        return True
