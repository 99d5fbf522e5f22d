"""Memory of every range of layers at once, for planners: closed forms of stages that run their layers in one piece.

`Ranges(measurement).band(width)` holds, for every start i and every stop j up to i + width, the same bytes that the
ledger finds for a stage of layers i to j - 1, as integer arrays of shape (width, starts): row w is the ranges of w + 1
layers, column c those that start at layer `first + c`. `stage_peak(band, surroundings)` is then the peak of a stage
that holds the range at one position of a schedule, to the byte what the simulator finds.

    static        parameters and buffers, and the losses on the last stage
    gradients     parameter gradients; state: optimizer state
    retained      what a forward leaves for its backward, saved inputs included
    inputs        what a forward needs: received or loaded inputs, and targets on the last stage

A band of 1,000 layers and width 100 takes about 20 ms and 100 bytes per range.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import as_strided, sliding_window_view
from numpy.typing import NDArray

from pipefit.cost.rest import StageRest
from pipefit.cost.stage import WholeStage
from pipefit.cost.storages import StageStorages, gradient_bytes
from pipefit.planner.closed_forms.bands import Band, Ints
from pipefit.planner.closed_forms.lives import NEVER, Life, Lives, lives, released_bytes
from pipefit.profiles import Measurement, Span

Events = tuple[Ints, Ints, Ints]  # boundary or layer, birth or depth, bytes
_NOTHING = -(1 << 60)  # the peak of a backward without a span


class Ranges:
    """The sums over layers and the lives of storages from which bands are made. The loss is the layer behind the
    last.
    """

    def __init__(self, measurement: Measurement, *, microbatches: int = 1) -> None:
        self.measurement, self.microbatches = measurement, microbatches
        model = lives(measurement)
        costs = model.layers
        self.count = len(costs) - 1
        self.loss_bytes = 4 * microbatches
        self.static = _cumulated(cost.parameter_bytes + cost.buffer_bytes for cost in costs)
        self.gradients = _cumulated(cost.gradient_bytes for cost in costs)
        self.state = _cumulated(cost.state_bytes for cost in costs)
        self.forward_peak = _array(cost.forward_peak_bytes for cost in costs)
        self.checkpoint_peak = _array(cost.checkpoint_peak_bytes for cost in costs)
        self.copied = _array(cost.mutates_inputs * sum(v.nbytes for v in cost.inputs) for cost in costs)
        self.buffers = _cumulated(cost.buffer_bytes for cost in costs)
        self.early = _cumulated(cost.early_state_bytes for cost in costs)
        self.growth = self.state - self.early
        self.update_first = self.growth[:-1] + _array(cost.update_first_peak_bytes for cost in costs)
        self.update = _array(cost.update_peak_bytes for cost in costs)
        self.input_bytes = _array(sum(v.nbytes for v in cost.inputs) for cost in costs)
        whole = StageStorages(measurement, 0, self.count)
        self.inner_gradients = _array(map(whole.gradients, range(self.count + 2)))
        self.unlike = whole.unlike_gradients()
        self.arriving_gradients = _array([0, *(gradient_bytes(cost.outputs) for cost in costs[:-2]), 0, 0])
        targets = model.fresh[-1][len(costs[-2].outputs) :]
        self.target_bytes = sum(life.nbytes for life in targets)
        self.kept_targets = sum(life.nbytes for life in targets if life.saver != NEVER)
        self.born = _array(
            [0, *(sum(s.nbytes for s in own if s.saver != NEVER or s.end > n) for n, own in enumerate(model.own))]
        )
        own = [life for layer in model.own for life in layer]
        fresh = [life for layer in model.fresh[:-1] for life in layer]
        self.own_saved, self.own_gone = _saved(own), _gone(own)
        self.handed_on = _array([0, *(sum(s.nbytes for s in o if s.end > n) for n, o in enumerate(model.own))])
        self.own_ended = _events((s.end + 1, s.birth, s.nbytes) for s in own if s.end > s.birth)
        copies = (life for cost, layer in zip(costs, model.fresh, strict=True) if cost.mutates_inputs for life in layer)
        self.copies_ended = _events((s.end + 1, s.birth, s.nbytes) for s in copies)
        self.fresh_saved, self.fresh_gone = _saved(fresh), _gone(fresh)
        self.spans_first = _span_table(model, [cost.backward_first for cost in costs])
        self.spans_later = _span_table(model, [cost.backward_later for cost in costs])

    def band(self, width: int, *, first: int = 0, last: int | None = None) -> Band:
        """Every range of up to `width` layers that starts at layer `first` to `last` (by default every layer)."""
        last = self.count - 1 if last is None else last
        return _BandMaker(self, min(width, self.count - first), first, last - first + 1).make()

    def owned(self) -> tuple[Ints, Ints]:
        """Two rising sums: what the layers of a range own at least, without gradients, and the gradients.

        A parameter that several layers share is counted with the first of them alone.
        """
        owned, gradients = self.static + self.state, self.gradients.copy()
        for shared in self.measurement.shared:
            for user in shared.users[1:]:
                owned[user + 1 :] -= shared.nbytes + shared.state_bytes
                gradients[user + 1 :] -= shared.gradient_bytes
        return owned, gradients

    def floor(self) -> tuple[Ints, Ints]:
        """Two rising sums; `retained` of [i, j) is at least saved[j] - born[i], whatever the cuts do to the storages
        there.
        """
        stop, birth, nbytes = self.own_saved
        saved, born = np.zeros(self.count + 2, np.int64), np.zeros(self.count + 2, np.int64)
        np.add.at(saved, stop, nbytes)
        np.add.at(born, birth + 1, nbytes)
        return np.cumsum(saved)[:-1], np.cumsum(born)[:-1]


class _BandMaker:
    """Row w, column c of a boundary table is boundary i + w of a range that starts at i = first + c; of a layer
    table, layer i + w.

    Rows reach one further than the widest range: where a range ends the model, the loss is in it.
    """

    def __init__(self, ranges: Ranges, width: int, first: int, starts: int) -> None:
        self.ranges, self.width, self.first, self.starts = ranges, width, first, starts
        self.rows = width + 2
        self.columns = starts + self.rows - 1  # boundaries in reach
        ends = ranges.count - 1 - np.arange(first, first + starts)  # the row of the range that ends the model
        inside = ends < width
        self.ends = ends[inside], np.arange(starts)[inside]

    def make(self) -> Band:
        """All arrays."""
        r, at, ended = self.ranges, self._at, self._ended
        held, live, born = self._held(), self._live(), at(r.gradients)
        travelling = self._travelling()
        arriving = at(r.arriving_gradients)
        entry = held + arriving
        inner = held + at(r.inner_gradients)
        first, later = self._spans(r.spans_first) - born[1:], self._spans(r.spans_later)
        early = ended(at(r.early)) - self._start(r.early)
        return self._put_right(
            Band(
                first=self.first,
                valid=np.arange(1, self.width + 1)[:, None] + np.arange(self.first, self.first + self.starts)
                <= r.count,
                static=self._plus_loss(ended(at(r.static)) - self._start(r.static), r.loss_bytes),
                gradients=ended(born) - self._start(r.gradients),
                state=ended(at(r.state)) - self._start(r.state),
                retained=ended(held),
                inputs=self._plus_loss(self._start(r.input_bytes).repeat(self.width, axis=0), r.target_bytes),
                received=self._behind_first(r.input_bytes),
                output_gradients=ended(arriving),
                input_gradients=self._behind_first(r.inner_gradients),
                sent=self._but_last((live - held)[1:-1]),
                forward_peak=self._highest(live[:-1] + at(r.forward_peak)[:-1]) - self._start(r.input_bytes),
                backward_first_peak=np.maximum(self._backward(inner, entry, first) + ended(born) - ended(entry), 0),
                backward_later_peak=np.maximum(self._backward(inner, entry, later) - ended(entry), 0),
                update_first_peak=np.maximum(self._highest(at(r.update_first)[:-1]) - self._start(r.growth), 0) + early,
                update_peak=self._highest(at(r.update)[:-1]),
                buffers=ended(at(r.buffers)) - self._start(r.buffers),
                checkpoint_sent=self._but_last(travelling[1:-1].copy()),
                checkpoint_peak=self._highest(travelling[:-1] + at(r.checkpoint_peak)[:-1]),
            )
        )

    def _put_right(self, band: Band) -> Band:
        """The band, with ranges put right that hold a shared parameter twice, cut a gradient's slice from its whole, or
        end before a value without a gradient is dropped.

        One by one: they are few.
        """
        starts, rows = np.arange(self.first, self.first + self.starts), np.arange(1, self.width + 1)[:, None]
        repeats = np.zeros(band.valid.shape, np.bool_)
        for shared in self.ranges.measurement.shared:
            for user, later in pairwise(shared.users):
                repeats |= (starts <= user) & (starts + rows > later)
        for boundary, born in self.ranges.unlike:
            stops = starts + rows
            repeats |= ((starts <= boundary) & (stops > boundary) & (stops <= born)) | (starts == boundary)
        for row, column in zip(*np.nonzero(repeats & band.valid), strict=True):
            start = self.first + int(column)
            stage = WholeStage(self.ranges.measurement, start, start + int(row) + 1)
            rest = StageRest(stage.storages, self.ranges.microbatches)
            band.static[row, column] = rest.parameter_bytes + rest.loss_bytes
            band.gradients[row, column] = rest.gradient_bytes
            band.state[row, column] = rest.state_bytes
            band.update_first_peak[row, column] = rest.early_state_bytes + rest.first_update.peak_bytes
            band.backward_first_peak[row, column] = stage.backward(is_first=True).peak_bytes
            band.backward_later_peak[row, column] = stage.backward(is_first=False).peak_bytes
            band.input_gradients[row, column] = stage.storages.sent_gradient_bytes
        return band

    # ---------------------------------------------------------------- tables

    def _at(self, vector: Ints) -> Ints:
        """`vector[i + w]`; 0 behind the vector's end."""
        padded = np.zeros(self.columns, np.int64)
        there = vector[self.first : self.first + self.columns]
        padded[: len(there)] = there
        return sliding_window_view(padded, self.starts)

    def _held(self) -> Ints:
        """Bytes saved by the layers before the boundary."""
        held: Ints = np.cumsum(self._summed(self.ranges.own_saved, self.ranges.fresh_saved), axis=0)
        self._plus_loss(held[2:], self.ranges.kept_targets)
        return held

    def _live(self) -> Ints:
        """Bytes that exist when the layers before the boundary have run forward: saved by one of them, or values
        there.
        """
        change = self._at(self.ranges.born) - self._summed(self.ranges.own_gone, self.ranges.fresh_gone)
        change[0] = self._start(self.ranges.input_bytes)
        return np.cumsum(change, axis=0)

    def _travelling(self) -> Ints:
        """Bytes of the values at the boundary besides a microbatch's inputs, which are held to recompute from.

        Copies of those that the first layer works in place on travel until they end.
        """
        change = self._at(self.ranges.handed_on) - self._summed(self.ranges.own_ended, self.ranges.copies_ended)
        change[0] = self._start(self.ranges.copied)
        return np.cumsum(change, axis=0)

    def _summed(self, own: Events, fresh: Events) -> Ints:
        """Bytes of the events at the boundary: of own storages born in the range, of fresh ones received at its
        start.
        """
        boundary, birth, nbytes = _where(own, (own[0] - own[1] < self.rows) & self._reached(own[0]))
        table = np.zeros((self.rows, self.columns), np.int64)
        np.add.at(table, (boundary - birth, boundary - self.first), nbytes)
        total = _diagonal(np.cumsum(table, axis=0), self.starts).copy()
        boundary, birth, nbytes = _where(fresh, (fresh[0] - fresh[1] < self.rows) & self._started(fresh[1]))
        np.add.at(total, (boundary - birth, birth - self.first), nbytes)
        return total

    def _spans(self, spans: tuple[Ints, Events]) -> Ints:
        """Highest bytes above entry of the layer's backward, in a range that starts w layers before it."""
        usual, (layer, depth, value) = spans[0], spans[1]
        row = np.full(self.columns, _NOTHING, np.int64)
        there = usual[self.first : self.first + self.columns]
        row[: len(there)] = there
        table = row[None].repeat(self.rows - 1, axis=0)
        layer, depth, value = _where((layer, depth, value), (depth < self.rows - 1) & self._reached(layer))
        table[depth, layer - self.first] = value
        return _diagonal(table, self.starts)

    def _reached(self, boundary: Ints) -> NDArray[np.bool_]:
        return (boundary >= self.first) & (boundary < self.first + self.columns)

    def _started(self, start: Ints) -> NDArray[np.bool_]:
        return (start >= self.first) & (start < self.first + self.starts)

    # ---------------------------------------------------------------- from tables to ranges

    def _start(self, vector: Ints) -> Ints:
        """The vector at the start of every range, as one row."""
        return vector[None, self.first : self.first + self.starts]

    def _ended(self, table: Ints) -> Ints:
        """A boundary table at the end of every range: behind the loss where a range ends the model."""
        rows, columns = self.ends
        out = table[1:-1].copy()
        out[self.ends] = table[rows + 2, columns]
        return out

    def _highest(self, table: Ints) -> Ints:
        """The highest of a layer table over the layers of every range, and the loss where a range ends the model."""
        rows, columns = self.ends
        highest = np.maximum.accumulate(table, axis=0)
        out = highest[:-1].copy()
        out[self.ends] = highest[rows + 1, columns]
        return out

    def _backward(self, inner: Ints, entry: Ints, spans: Ints) -> Ints:
        """The highest over the layers of every range, each above what there is behind it: `entry` behind the last
        layer.
        """
        highest = np.maximum.accumulate(inner[1:] + spans, axis=0)
        out = entry[1:-1] + spans[:-1]
        np.maximum(out[1:], highest[:-2], out=out[1:])
        rows, columns = self.ends
        out[self.ends] = highest[rows + 1, columns]
        return out

    def _plus_loss(self, array: Ints, nbytes: int) -> Ints:
        array[self.ends] += nbytes
        return array

    def _but_last(self, array: Ints) -> Ints:
        array[self.ends] = 0
        return array

    def _behind_first(self, vector: Ints) -> Ints:
        """The vector at the start of every range, 0 for ranges that begin the model, which receive and send back
        nothing.
        """
        row = self._start(vector).copy()
        if self.first == 0:
            row[0, 0] = 0
        return np.broadcast_to(row, (self.width, self.starts)).copy()


# -------------------------------------------------------------------- arrays from lives


def _saved(storages: Sequence[Life]) -> Events:
    """Storages at the boundary behind their first saver."""
    return _events((s.saver + 1, s.birth, s.nbytes) for s in storages if s.saver != NEVER)


def _gone(storages: Sequence[Life]) -> Events:
    """Storages that nobody saves, at the first boundary where they are no value any more."""
    fresh_or_output = (s for s in storages if s.saver == NEVER and (s.fresh or s.end > s.birth))
    return _events((s.end + 1, s.birth, s.nbytes) for s in fresh_or_output)


def _span_table(model: Lives, spans: Sequence[tuple[Span, ...]]) -> tuple[Ints, Events]:
    """Each layer's highest backward bytes in a range that starts far before it; and (layer, depth, bytes) where
    nearer ones differ.
    """
    peaks = [_span_peaks(model, number, of_layer) for number, of_layer in enumerate(spans)]
    nearer = ((n, depth, value) for n, by_depth in enumerate(peaks) for depth, value in enumerate(by_depth[:-1]))
    return _array(by_depth[-1] for by_depth in peaks), _events(nearer)


def _span_peaks(model: Lives, number: int, spans: tuple[Span, ...]) -> list[int]:
    """Highest backward bytes of a layer in a range that starts 0, 1, ... layers before it; the last holds for all
    earlier.
    """
    freed = {span.released: list(released_bytes(model, number, span.released)) for span in spans}
    depths = range(max(map(len, freed.values()), default=1))
    return [
        max((s.peak_bytes - freed[s.released][min(d, len(freed[s.released]) - 1)] for s in spans), default=_NOTHING)
        for d in depths
    ]


def _events(rows: Iterable[tuple[int, int, int]]) -> Events:
    table = np.array(list(rows), np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _where(events: Events, mask: NDArray[np.bool_]) -> Events:
    return events[0][mask], events[1][mask], events[2][mask]


def _diagonal(table: Ints, starts: int) -> Ints:
    """Cell (w, c) of the result is cell (w, c + w) of `table`."""
    down, across = table.strides
    return as_strided(table, (table.shape[0], starts), (down + across, across), writeable=False)


def _array(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int64)


def _cumulated(values: Iterable[int]) -> Ints:
    """Sums of the first 0, 1, 2, ... values."""
    return np.concatenate(([0], np.cumsum(_array(values))))
