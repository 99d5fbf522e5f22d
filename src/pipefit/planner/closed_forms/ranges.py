"""Memory of every range of blocks at once: closed forms for stages whose forward is one action.

`Ranges(measurement, edges).band(width)` holds the bytes of every stage of blocks i to j - 1 with j up to i +
width, equal to those of the simulator's ledger. Block b is layers `edges[b]` to `edges[b + 1] - 1`. They are
integer arrays of shape (width, starts): row w has the ranges of w + 1 blocks, column c those that start at
block `first + c`. `stage_peak(band, surroundings)` is the peak of a stage at one position of a schedule,
equal to the simulator's to the byte.

    static          parameters and buffers, and the losses on the last stage
    gradients       parameter gradients
    state, early    optimizer state, and the part of it that exists before the first update
    retained        tensors that a forward saves for its backward, saved inputs included
    inputs          inputs of a forward: received or loaded inputs, and targets on the last stage
    kept            tensors kept by a forward that is recomputed: inputs, and copies of buffers that feed back
    weights         trained parameters, of which there may be several versions

A band of 1,000 blocks of a layer each and width 100 takes about 20 ms and 100 bytes per range. Ranges for
which sums over layers are not exact are computed one by one, some 60 microseconds for each of their layers;
an `estimated` band uses the sums for them too. `ranges_of` caches ranges and their bands for equal
measurements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from pipefit.lowering import Recompute
from pipefit.memory import Flights, StageRest, StageStorages, WholeStage, gradient_bytes
from pipefit.planner.closed_forms.bands import Band, Ints, Recomputed
from pipefit.planner.closed_forms.lifetimes import (
    NEVER,
    NOTHING,
    Events,
    as_events,
    chosen,
    cumulated,
    diagonal,
    gone,
    integers,
    lifetimes,
    repeated,
    saved,
    span_table,
)
from pipefit.schema.actions import Action, Kind
from pipefit.schema.layer_costs import LayerCost
from pipefit.schema.profile import Measurement

# ---- Ranges computed one by one


class OneByOne:
    """Ranges of one measurement, by first layer and the layer after the last, each computed as a stage."""

    def __init__(self, measurement: Measurement) -> None:
        self._measurement = measurement
        self._known: dict[tuple[int, int], dict[str, int]] = {}

    def of(self, start: int, stop: int) -> dict[str, int]:
        """Return the bytes of a band for this range, without the losses that a step keeps."""
        if (start, stop) not in self._known:
            self._known[start, stop] = _computed(self._measurement, start, stop)
        return self._known[start, stop]


@lru_cache(maxsize=64)
def one_by_one(measurement: Measurement) -> OneByOne:
    """Return the ranges of a measurement; cached for equal measurements."""
    return OneByOne(measurement)


def _computed(measurement: Measurement, start: int, stop: int) -> dict[str, int]:
    stage = WholeStage(measurement, start, stop)
    rest = StageRest(stage.storages, microbatches=0)
    return {
        "static": rest.parameter_bytes,
        "gradients": rest.gradient_bytes,
        "state": rest.state_bytes,
        "weights": rest.weight_bytes,
        "early": rest.early_state_bytes,
        "update_first_peak": rest.early_state_bytes + rest.first_update.peak_bytes,
        "update_peak": rest.update(start, stop, first=False).peak_bytes,
        "backward_first_peak": stage.backward(is_first=True).peak_bytes,
        "backward_later_peak": stage.backward(is_first=False).peak_bytes,
        "input_gradients": stage.storages.sent_gradient_bytes,
    }


# ---- Stages recomputed block by block
#
# The forward of a block keeps only the block's inputs. In the backward the blocks of a stage are recomputed
# one by one, the last first. During the work on block k of blocks i to j - 1, the device holds
#
#     the inputs of blocks i to k - 1, and copies of the buffers that feed back
#     what block k adds: inputs made by the block before it, saved tensors, temporaries, gradients of its
# outputs
#     the gradients of all parameters, or in a step's first backward those of blocks k to j - 1
#
# so every peak is the maximum over k of a number of block k plus sums over the edges before it: running
# maxima. A block's number depends only on the block, and on whether it begins or ends its stage. The ledger
# computes it for the block as a separate stage: inputs that the block before also received are kept by that
# block, and count as zero. A block that changes its inputs in place hands on copies of them.
#
# The peaks are lower bounds of the ledger's, and mostly equal to them. They are lower if blocks share a
# parameter, if the gradient of a value is part of another gradient, or if outputs of a block share a storage.
# Cost: the ledger's time for each kind of block, and as many numbers as four arrays of a band.

_NOTHING = -(1 << 60)


class Peaks(NamedTuple):
    """The highest bytes of the passes of every block, with its counted inputs and the gradients that it
    receives, and in a step's first backward with its parameter gradients.
    """

    forward: Ints
    recompute: Ints
    backward_first: Ints
    backward_later: Ints


OfBlock = tuple[int, int, int, int]  # the same of one block


class BlockBytes(NamedTuple):
    """Bytes of every block of a model.

    `inputs` are all inputs of a block, `new` those made by the block before it, and `sent` the outputs that
    only the send holds after its forward. `copies` and `born` are sums over the blocks before each edge: of
    buffers that feed back, and of gradients. `begin` and `alone` are the peaks of a block that begins its
    stage, with and without a block after it; `inside` and `end` those of a block that does not.
    """

    inputs: Ints
    new: Ints
    copies: Ints
    born: Ints
    sent: Ints
    begin: Peaks
    alone: Peaks
    inside: Peaks
    end: Peaks

    @staticmethod
    def of(
        measurement: Measurement, edges: Sequence[int], copies: Ints, born: Ints, sent: Ints
    ) -> BlockBytes:
        """Return the bytes of the blocks between these edges; `copies`, `born` and `sent` are known."""
        maker, costs = _Maker(measurement), measurement.costs
        new = [*_new_inputs(measurement, edges)]
        inputs = [sum(value.nbytes for value in costs[edge].inputs) for edge in edges[:-1]]
        every = [
            maker.blocks(start, stop, own) for (start, stop), own in zip(pairwise(edges), new, strict=True)
        ]
        begin, alone, inside, end = (
            Peaks(*(np.array(column, np.int64) for column in zip(*variant, strict=True)))
            for variant in zip(*every, strict=True)
        )
        return BlockBytes(
            inputs=np.array(inputs, np.int64),
            new=np.array([sum(own) for own in new], np.int64),
            copies=copies,
            born=born,
            sent=sent,
            begin=begin,
            alone=alone,
            inside=inside,
            end=end,
        )


def _new_inputs(measurement: Measurement, edges: Sequence[int]) -> Iterator[list[int]]:
    """Yield, for every block, the bytes of each input whose storage the block before it has made, else 0.

    Of several inputs in one storage, the first counts all of it.
    """
    costs, sizes = measurement.costs, list[int]()

    def made(nbytes: Sequence[int]) -> list[int]:
        sizes.extend(nbytes)
        return [*range(len(sizes) - len(nbytes), len(sizes))]

    values = made([value.nbytes for value in costs[0].inputs])
    yield [0] * len(values)
    for start, stop in pairwise(edges[:-1]):
        known, new = set(values), list[int]()
        if costs[start].mutates_inputs:
            values = made([value.nbytes for value in costs[start].inputs])
        for cost in costs[start:stop]:
            own, none = made(cost.storages), made([0])
            places = {"own": own, "input": values}
            values = [places[o.kind][o.index] if o.kind in places else none[0] for o in cost.output_origins]
        for storage in values:
            new.append(0 if storage in known else sizes[storage])
            known.add(storage)
        yield new


class _Maker:
    """Computes the peaks of single blocks, once for equal blocks."""

    def __init__(self, measurement: Measurement) -> None:
        self.measurement, self.count = measurement, len(measurement.layers)
        self._unlike = {
            boundary for boundary, _ in StageStorages(measurement, 0, self.count).unlike_gradients()
        }
        self._later_users = {
            user for shared in measurement.shared if shared.gradient_bytes for user in shared.users[1:]
        }
        self._known: dict[object, tuple[OfBlock, ...]] = {}

    def blocks(self, start: int, stop: int, new: Sequence[int]) -> tuple[OfBlock, ...]:
        """Return the peaks of layers `start` to `stop - 1` as a block that begins its stage, is alone in it,
        is inside it, and ends it.
        """
        lends = not self._later_users.isdisjoint(range(start, stop))
        unlike = not self._unlike.isdisjoint(range(start, stop + 1))
        kinds = self.measurement.layers[start:stop]
        key = (
            kinds,
            not start,
            stop == self.count,
            tuple(new),
            lends,
            unlike,
            tuple(self._repeated(start, stop)),
        )
        if key not in self._known:
            self._known[key] = tuple(
                self._peaks(
                    start, stop, None if begins else new, ends=ends, lends=lends, unlike=unlike and not ends
                )
                for begins in (True, False)
                for ends in (False, True)
            )
        return self._known[key]

    def _repeated(self, start: int, stop: int) -> Iterator[object]:
        """Yield the tensors that layers of a block share, with these layers."""
        for shared_tensor in (*self.measurement.shared, *self.measurement.shared_buffers):
            yield from (
                (user - start, later - start, shared_tensor)
                for user, later in shared_tensor.pairs
                if start <= user < later < stop
            )

    def _peaks(
        self, start: int, stop: int, inputs: Sequence[int] | None, *, ends: bool, lends: bool, unlike: bool
    ) -> OfBlock:
        """Return the peaks of a block whose inputs count as `inputs`, or as those of a stage.

        The sizes of `unlike` gradients depend on the rest of the stage. A block that `lends` a gradient to an
        earlier user of a parameter may need less in its backward than alone.
        """
        measurement = self.measurement if ends else self._followed(stop)
        storages = StageStorages(measurement, start, stop)
        if inputs is not None:
            for storage, nbytes in zip(storages.input_storages, inputs, strict=True):
                storages.sizes[storage] = nbytes
            storages.made_gradient_bytes = 0  # only the first block of a stage sends gradients
        passes = _Passes(storages)
        forward, recompute, kept, arriving = (
            passes.forward(),
            passes.recompute(),
            passes.level,
            passes.arriving,
        )
        first, later = (passes.backward(is_first=is_first) for is_first in (True, False))
        if unlike:
            recompute, kept = recompute - arriving, kept - arriving
        return (forward, recompute, kept if unlike else first, kept if unlike or lends else later)

    def _followed(self, stop: int) -> Measurement:
        """Return the measurement, in which the layer before `stop` receives gradients from a layer of its
        stage.
        """
        number = self.measurement.layers[stop - 1]
        cost = self.measurement.kinds[number]
        if stop == self.count or not (cost.inner_first or cost.inner_later):
            return self.measurement
        inner = [cost.spans(is_first=is_first, inner=True) for is_first in (True, False)]
        kinds: list[LayerCost] = [
            *self.measurement.kinds,
            replace(cost, backward_first=inner[0], backward_later=inner[1]),
        ]
        layers = [*self.measurement.layers]
        layers[stop - 1] = len(kinds) - 1
        return replace(self.measurement, kinds=tuple(kinds), layers=tuple(layers))


class _Passes:
    """A microbatch in a stage that is recomputed as a whole; `level` are the bytes that it holds."""

    def __init__(self, storages: StageStorages) -> None:
        self._flights = Flights(storages)
        self._residency, self.level, self.arriving = self._flights.start, 0, 0
        self._is_first, self._is_last = not storages.start, storages.last

    def forward(self) -> int:
        """Return the peak of the forward, inputs included."""
        if not self._is_first:
            self._do(Kind.RECV_FORWARD)
            self._do(Kind.RECV_FORWARD, wait=True)
        if self._is_first or self._is_last:
            self._do(Kind.LOAD)
        return self._do(Kind.FORWARD_ONLY)

    def recompute(self) -> int:
        """Return the peak of the second forward."""
        if not self._is_last:
            self._do(Kind.SEND_FORWARD)
            self._do(Kind.SEND_FORWARD, wait=True)
            before = self.level
            self._do(Kind.RECV_BACKWARD)
            self._do(Kind.RECV_BACKWARD, wait=True)
            self.arriving = self.level - before
        return self._do(Kind.RECOMPUTE)

    def backward(self, *, is_first: bool) -> int:
        """Return the peak of the backward, without doing it."""
        _, effect = self._flights.apply(self._residency, Action(Kind.BACKWARD, 0, 0), is_first=is_first)
        assert effect is not None
        return self.level + effect.peak_bytes

    def _do(self, kind: Kind, *, wait: bool = False) -> int:
        self._residency, effect = self._flights.apply(self._residency, Action(kind, 0, 0, wait=wait))
        peak = self.level + (0 if effect is None else effect.peak_bytes)
        self.level += 0 if effect is None else effect.after_bytes
        return peak


def recomputed_by_block(band: Band, blocks: BlockBytes) -> Band:
    """Return the band of stages recomputed block by block, from the band of the same stages."""
    width, starts = band.valid.shape
    i = band.first + np.arange(starts)
    end = np.minimum(i + np.arange(1, width + 1)[:, None], len(blocks.new))
    last = end - 1
    taken = np.cumsum(blocks.new)
    before = taken - blocks.new + blocks.copies[:-1]  # of the blocks before each, from the model's start
    base = blocks.inputs[i] - taken[i] - blocks.copies[i]

    def highest(name: str, beside: Ints | int = 0, *, followed: Ints | int = 0) -> Ints:
        """Return the highest peak plus `beside` over the blocks of every range; all but the last add
        `followed`.
        """
        begin, alone, inside, end_ = (
            getattr(peaks, name) + beside for peaks in (blocks.begin, blocks.alone, blocks.inside, blocks.end)
        )
        result = np.full((width, starts), _NOTHING, np.int64)
        result[1:] = begin[i]
        for row in range(2, width):
            np.maximum(result[row - 1], base + (before + inside)[last[row - 1]], out=result[row])
        at_end = np.where(last == i, alone[last], base + (before + end_)[last])
        highest_of_all: Ints = np.maximum(result + followed, at_end)
        return highest_of_all

    of_range = blocks.born[end]
    earlier = -blocks.born[1:]  # before a block's first backward, blocks up to it have no gradients
    return replace(
        band,
        kept=band.inputs + taken[last] - taken[i] + blocks.copies[end] - blocks.copies[i],
        checkpoint_peak=highest("forward", followed=band.inputs - blocks.inputs[i]) - band.inputs,
        checkpoint_sent=blocks.sent[last],
        recomputed=Recomputed(
            forward_first=highest("recompute", earlier) + of_range - band.output_gradients,
            forward_later=highest("recompute") - band.output_gradients,
            backward_first=highest("backward_first", earlier) + of_range,
            backward_later=highest("backward_later"),
        ),
        _sums={},
    )


# ---- Bands of ranges


class Ranges:
    """Sums over layers, and lifetimes of storages, from which bands are made.

    The model has `layers` layers without the loss, which counts as a last layer, in `count` blocks; without
    `edges`, each layer is a block. Arrays have an element for each layer, for each boundary (boundary n lies
    before layer n), or for each event: a storage that is saved, or that is freed, at some boundary.
    """

    def __init__(
        self, measurement: Measurement, edges: Sequence[int] | None = None, *, microbatches: int = 1
    ) -> None:
        self.measurement = measurement
        self.one_by_one = one_by_one(measurement)
        self._known: dict[tuple[int, ...], Band] = {}
        self._blocks: BlockBytes | None = None  # of stages recomputed block by block
        model = lifetimes(measurement)
        costs = model.layers
        self.layers = len(costs) - 1
        self.edges = np.arange(self.layers + 1) if edges is None else np.array(edges)
        self.count = len(self.edges) - 1
        self.loss_bytes = measurement.loss_bytes * microbatches
        # By boundary: sums over the layers before it
        self.static = cumulated(cost.static_bytes for cost in costs)
        self.gradients = cumulated(cost.gradient_bytes for cost in costs)
        self.weights = cumulated(cost.version_bytes for cost in costs)
        self.state = cumulated(cost.state_bytes for cost in costs)
        self.buffers = cumulated(cost.buffer_bytes for cost in costs)
        self.fed_back = cumulated(cost.fed_back_bytes for cost in costs)
        self.early = cumulated(cost.early_state_bytes for cost in costs)
        self.growth = self.state - self.early  # state that the first update creates
        # By layer
        self.forward_peak = integers(cost.forward_peak_bytes for cost in costs)
        self.checkpoint_peak = integers(cost.checkpoint_peak_bytes for cost in costs)
        self.copied = integers(cost.mutates_inputs * sum(v.nbytes for v in cost.inputs) for cost in costs)
        self.update_first = self.growth[:-1] + integers(cost.update_first_peak_bytes for cost in costs)
        self.update = integers(cost.update_peak_bytes for cost in costs)
        self.input_bytes = integers(sum(v.nbytes for v in cost.inputs) for cost in costs)
        # By boundary: gradients of the values there, inside a stage and at the start of a stage
        whole = StageStorages(measurement, 0, self.layers)
        self.inner_gradients = integers(map(whole.gradients, range(self.layers + 2)))
        self.arriving_gradients = integers([0, *(gradient_bytes(cost.outputs) for cost in costs[:-2]), 0, 0])
        self.unlike = whole.unlike_gradients()  # boundaries at which sums over layers are not exact
        self.lasting = [number for number, cost in enumerate(costs) if cost.lasting_storages]
        targets = model.fresh[-1][len(costs[-2].outputs) :]
        self.target_bytes = sum(lifetime.nbytes for lifetime in targets)
        self.kept_targets = sum(lifetime.nbytes for lifetime in targets if lifetime.saver != NEVER)
        # By boundary: storages of the layer before it that outlive it, as saved or as values; then as values
        # only
        self.born = integers(
            [
                0,
                *(
                    sum(s.nbytes for s in own if s.saver != NEVER or s.end > n)
                    for n, own in enumerate(model.own)
                ),
            ]
        )
        self.handed_on = integers(
            [0, *(sum(s.nbytes for s in o if s.end > n) for n, o in enumerate(model.own))]
        )
        # Events: storages made inside a range (own), those received at its start (fresh), and copies of its
        # inputs
        own = [one for layer in model.own for one in layer]
        fresh = [one for layer in model.fresh[:-1] for one in layer]
        self.own_saved, self.own_gone = saved(own), gone(own)
        self.fresh_saved, self.fresh_gone = saved(fresh), gone(fresh)
        self.own_ended = as_events((s.end + 1, s.birth, s.nbytes) for s in own if s.end > s.birth)
        copies = (
            one
            for cost, layer in zip(costs, model.fresh, strict=True)
            if cost.mutates_inputs
            for one in layer
        )
        self.copies_ended = as_events((s.end + 1, s.birth, s.nbytes) for s in copies)
        # Events: buffers that a layer shares with an earlier one, all of them and those copied by
        # recomputation
        self.repeated = as_events(repeated(measurement.shared_buffers))
        self.copied_once = as_events(
            repeated(shared for shared in measurement.shared_buffers if shared.copied)
        )
        # By layer: backward peaks
        first, later = (
            [c.spans(is_first=f, inner=n < self.layers) for n, c in enumerate(costs)] for f in (True, False)
        )
        self.spans_first, self.spans_later = span_table(model, first), span_table(model, later)
        # The same if the range ends with the layer
        self.ends_first = span_table(model, [cost.spans(is_first=True, inner=False) for cost in costs])
        self.ends_later = span_table(model, [cost.spans(is_first=False, inner=False) for cost in costs])

    def of_step(self, microbatches: int) -> Ranges:
        """Return the same ranges, with shared bands, in a step of this number of microbatches."""
        result = copy(self)
        result.loss_bytes = self.measurement.loss_bytes * microbatches
        return result

    def by_block(self) -> Ranges:
        """Return the same ranges as stages recomputed block by block."""
        result = copy(self)
        result._known, result._blocks = {}, self._of_blocks()
        return result

    def _of_blocks(self) -> BlockBytes:
        """Return the bytes of every single block."""
        sent = self._maker(1, 0, self.count - 1).make(estimated=True).checkpoint_sent[0]
        edges = [*map(int, self.edges)]
        return BlockBytes.of(self.measurement, edges, self.fed_back[self.edges], self.owned()[1], sent)

    def band(self, width: int, *, first: int = 0, last: int | None = None, estimated: bool = False) -> Band:
        """Return the band of ranges up to `width` blocks that start at blocks `first` to `last` (or all)."""
        last = self.count - 1 if last is None else last
        alike = width, first, last, estimated
        key = *alike, self.loss_bytes
        if alike not in self._known:
            band = self._maker(width, first, last).make(estimated=estimated)
            self._known[alike] = band if self._blocks is None else recomputed_by_block(band, self._blocks)
        if key not in self._known:
            self._known[key] = self._known[alike].with_losses(self.loss_bytes, self.count)
        return self._known[key]

    def layers_one_by_one(self, width: int) -> int:
        """Return the layers of all ranges up to `width` blocks that a band computes one by one: its cost."""
        return self._maker(width, 0, self.count - 1).layers_one_by_one()

    def _maker(self, width: int, first: int, last: int) -> _BandMaker:
        return _BandMaker(self, min(width, self.count - first), first, last - first + 1)

    def owned(self) -> tuple[Ints, Ints]:
        """Return two rising sums: lower bounds of a range's bytes during a whole step, and of its gradients.

        A range of blocks i to j - 1 holds at least owned[j] - owned[i] bytes without gradients. A parameter
        or buffer that several layers share counts with the first of them.
        """
        owned, gradients = self.static + self.state, self.gradients.copy()
        for buffer in self.measurement.shared_buffers:
            for user in buffer.users[1:]:
                owned[user + 1 :] -= buffer.nbytes
        for shared in self.measurement.shared:
            for user in shared.users[1:]:
                owned[user + 1 :] -= shared.nbytes + shared.state_bytes
                gradients[user + 1 :] -= shared.gradient_bytes
            for user in shared.copying[1:]:
                owned[user + 1 :] -= shared.copy_bytes
        return owned[self.edges], gradients[self.edges]

    def floor(self) -> tuple[Ints, Ints]:
        """Return two rising sums, saved and born: lower bounds of `retained` bytes.

        Blocks i to j - 1 retain at least saved[j] - born[i] bytes. The sums count only own storages, which no
        cut changes.
        """
        stop, birth, nbytes = self.own_saved
        saved, born = np.zeros(self.layers + 2, np.int64), np.zeros(self.layers + 2, np.int64)
        np.add.at(saved, stop, nbytes)
        np.add.at(born, birth + 1, nbytes)
        return np.cumsum(saved)[self.edges], np.cumsum(born)[self.edges]


def ranges_of(
    measurement: Measurement, edges: Sequence[int], microbatches: int, recompute: Recompute = "never"
) -> Ranges:
    """Return the ranges of a measurement in a step of `microbatches`, with this recomputation; cached."""
    return _ranges_of(measurement, tuple(edges), recompute == "always").of_step(microbatches)


@lru_cache(maxsize=32)
def _ranges_of(measurement: Measurement, edges: tuple[int, ...], by_block: bool) -> Ranges:
    return _ranges_of(measurement, edges, False).by_block() if by_block else Ranges(measurement, edges)


class _BandMaker:
    """Maker of a band without losses, from tables of boundaries and of layers.

    Row w, column c of a table is boundary i + w, or layer i + w, of a range that starts at layer i =
    starts[c]. Tables have one row more than the longest range needs, because a range that ends the model
    contains the loss too. Finally the rows at the ends of blocks are taken.
    """

    def __init__(self, ranges: Ranges, width: int, first: int, starts: int) -> None:
        self.ranges, self.width, self.first = ranges, width, first
        begins = ranges.edges[first : first + starts]
        stops = np.minimum(np.arange(1, width + 1)[:, None] + np.arange(first, first + starts), ranges.count)
        self.starts, self.stops = begins, ranges.edges[stops]
        self.longest = int((self.stops[-1] - begins).max())
        self.base, self.reach = (
            int(begins[0]),
            int(begins[-1] - begins[0]) + 1,
        )  # layers at which ranges may start
        self.rows, self.columns = self.longest + 2, self.reach + self.longest + 1  # boundaries within reach
        self.is_fine = (
            int(np.diff(ranges.edges[first : first + starts + width]).max()) == 1
        )  # each block is a layer
        self._chosen: slice | Ints = slice(None) if self.is_fine else begins - self.base
        ends = ranges.layers - 1 - begins  # the row of the range that ends the model
        inside = ends < self.longest
        self.ends = ends[inside], np.arange(starts)[inside]

    def make(self, *, estimated: bool) -> Band:
        """Return the band with all its arrays."""
        rows = self.stops - self.starts - 1
        arrays: dict[str, Any] = {
            name: array if self.is_fine else np.take_along_axis(array, rows, axis=0)
            for name, array in self._arrays().items()
        }
        band = Band(first=self.first, valid=self._valid, **arrays)
        return band if estimated else self._corrected(band)

    @property
    def _valid(self) -> NDArray[np.bool_]:
        blocks = self.first + np.arange(len(self.starts)) + np.arange(1, self.width + 1)[:, None]
        return blocks <= self.ranges.count

    def _arrays(self) -> dict[str, Ints]:
        """Return the arrays of a band, with a row for every number of layers."""
        r, at, ended = self.ranges, self._at, self._ended
        held, live, born = self._held(), self._live(), at(r.gradients)
        travelling = self._travelling()
        arriving = at(r.arriving_gradients)
        entry = held + arriving
        inner = held + at(r.inner_gradients)
        first, later = self._spans(r.spans_first) - born[1:], self._spans(r.spans_later)
        end_first, end_later = self._spans(r.ends_first) - born[1:], self._spans(r.ends_later)
        early = ended(at(r.early)) - self._start(r.early)
        fed_back = ended(at(r.fed_back)) - self._start(r.fed_back)
        inputs = self._plus_loss(self._start(r.input_bytes).repeat(self.longest, axis=0), r.target_bytes)
        return {
            "static": self._sums(r.static, r.repeated),
            "gradients": ended(born) - self._start(r.gradients),
            "state": ended(at(r.state)) - self._start(r.state),
            "retained": ended(held),
            "inputs": inputs,
            "received": self._behind_first(r.input_bytes),
            "output_gradients": ended(arriving),
            "input_gradients": self._behind_first(r.inner_gradients),
            "sent": self._but_last((live - held)[1:-1]),
            "forward_peak": self._highest(live[:-1] + at(r.forward_peak)[:-1]) - self._start(r.input_bytes),
            "backward_first_peak": np.maximum(
                self._backward(inner, entry, first, end_first) + ended(born) - ended(entry), 0
            ),
            "backward_later_peak": np.maximum(
                self._backward(inner, entry, later, end_later) - ended(entry), 0
            ),
            "update_first_peak": np.maximum(self._highest(at(r.update_first)[:-1]) - self._start(r.growth), 0)
            + early,
            "update_peak": self._highest(at(r.update)[:-1]),
            "buffers": self._sums(r.buffers, r.copied_once),
            "kept": inputs + fed_back,
            "weights": ended(at(r.weights)) - self._start(r.weights),
            "early": early,
            "checkpoint_sent": self._but_last(travelling[1:-1].copy()),
            "checkpoint_peak": self._highest(travelling[:-1] + at(r.checkpoint_peak)[:-1]) + fed_back,
        }

    def _corrected(self, band: Band) -> Band:
        """Return the band with the ranges for which sums are not exact computed one by one."""
        for row, column in zip(*np.nonzero(self._one_by_one()), strict=True):
            result = self.ranges.one_by_one.of(int(self.starts[column]), int(self.stops[row, column]))
            for name, nbytes in result.items():
                getattr(band, name)[row, column] = nbytes
        return band

    def layers_one_by_one(self) -> int:
        """Return the number of layers of all ranges for which sums are not exact."""
        return int((self.stops - self.starts)[self._one_by_one()].sum())

    def _one_by_one(self) -> NDArray[np.bool_]:
        """Return a mask of the ranges for which sums over layers are not exact.

        These hold two users of a shared parameter, or a layer after the first that keeps a tensor until the
        whole backward has ended, or meet one of `StageStorages.unlike_gradients`.
        """
        starts, stops = self.starts, self.stops
        repeats = np.zeros(stops.shape, np.bool_)
        for shared in self.ranges.measurement.shared:
            for user, later in shared.pairs:
                repeats |= (starts <= user) & (stops > later)
        ends = stops + (stops == self.ranges.layers)  # the loss counts as a last layer
        for layer in self.ranges.lasting:
            repeats |= (starts < layer) & (ends > layer)
        for boundary, last in self.ranges.unlike:
            repeats |= ((starts <= boundary) & (stops > boundary) & (stops <= last)) | (starts == boundary)
        return repeats & self._valid

    # ---- Tables

    def _at(self, vector: Ints) -> Ints:
        """Return the table of `vector[i + w]`, 0 after the vector's end."""
        padded = np.zeros(self.columns, np.int64)
        there = vector[self.base : self.base + self.columns]
        padded[: len(there)] = there
        return sliding_window_view(padded, self.reach)[:, self._chosen]

    def _sums(self, cumulated: Ints, repeated: Events) -> Ints:
        """Return the sums over the layers of every range, without repeated bytes."""
        total = self._ended(self._at(cumulated)) - self._start(cumulated)
        if not len(repeated[0]):
            return total
        return total - self._ended(np.cumsum(self._summed(repeated, as_events(())), axis=0))

    def _held(self) -> Ints:
        """Return the bytes that the layers before each boundary have saved."""
        held: Ints = np.cumsum(self._summed(self.ranges.own_saved, self.ranges.fresh_saved), axis=0)
        self._plus_loss(held[2:], self.ranges.kept_targets)
        return held

    def _live(self) -> Ints:
        """Return the bytes at each boundary: those saved by the layers before it, and the values there."""
        change = self._at(self.ranges.born) - self._summed(self.ranges.own_gone, self.ranges.fresh_gone)
        change[0] = self._start(self.ranges.input_bytes)
        return np.cumsum(change, axis=0)

    def _travelling(self) -> Ints:
        """Return the bytes of the values at each boundary in a forward that saves nothing.

        Without the inputs, which are kept to recompute from. If the first layer changes them in place, it
        gets copies, which count here as long as they are values.
        """
        change = self._at(self.ranges.handed_on) - self._summed(
            self.ranges.own_ended, self.ranges.copies_ended
        )
        change[0] = self._start(self.ranges.copied)
        return np.cumsum(change, axis=0)

    def _summed(self, own: Events, fresh: Events) -> Ints:
        """Return the bytes of the events up to each boundary.

        `own` are events of storages made in the range, `fresh` those of storages received at its start.
        """
        boundary, birth, nbytes = chosen(own, (own[0] - own[1] < self.rows) & self._reached(own[0]))
        table = np.zeros((self.rows, self.columns), np.int64)
        np.add.at(table, (boundary - birth, boundary - self.base), nbytes)
        total = diagonal(np.cumsum(table, axis=0), self.reach)[:, self._chosen].copy()
        boundary, birth, nbytes = chosen(
            fresh, (fresh[0] - fresh[1] < self.rows) & np.isin(fresh[1], self.starts)
        )
        np.add.at(total, (boundary - birth, np.searchsorted(self.starts, birth)), nbytes)
        return total

    def _spans(self, spans: tuple[Ints, Events]) -> Ints:
        """Return a layer's backward peak above its start, in a range that starts w layers before it."""
        usual, (layer, depth, value) = spans[0], spans[1]
        row = np.full(self.columns, NOTHING, np.int64)
        there = usual[self.base : self.base + self.columns]
        row[: len(there)] = there
        table = row[None].repeat(self.rows - 1, axis=0)
        layer, depth, value = chosen((layer, depth, value), (depth < self.rows - 1) & self._reached(layer))
        table[depth, layer - self.base] = value
        return diagonal(table, self.reach)[:, self._chosen]

    def _reached(self, boundary: Ints) -> NDArray[np.bool_]:
        return (boundary >= self.base) & (boundary < self.base + self.columns)

    # ---- From tables to ranges

    def _start(self, vector: Ints) -> Ints:
        """Return the vector's value at the start of every range, as one row."""
        return vector[None, self.starts]

    def _ended(self, table: Ints) -> Ints:
        """Return a boundary table's value at the end of every range (at the model's end, after the loss)."""
        rows, columns = self.ends
        out = table[1:-1].copy()
        out[self.ends] = table[rows + 2, columns]
        return out

    def _highest(self, table: Ints) -> Ints:
        """Return the highest value of a layer table over every range (at the model's end, with the loss)."""
        rows, columns = self.ends
        highest = np.maximum.accumulate(table, axis=0)
        out = highest[:-1].copy()
        out[self.ends] = highest[rows + 1, columns]
        return out

    def _backward(self, inner: Ints, entry: Ints, spans: Ints, end_spans: Ints) -> Ints:
        """Return the highest backward peak over the layers of every range.

        A layer's own peak is added to the bytes at the boundary after it: `spans` to `inner`, or, at the
        range's end, `end_spans` to `entry`.
        """
        highest = np.maximum.accumulate(inner[1:] + spans, axis=0)
        out = entry[1:-1] + end_spans[:-1]
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
        """Return the vector's value at the start of every range; 0 at the start of the model."""
        row = self._start(vector).copy()
        row[0, self.starts == 0] = 0
        return row.repeat(self.longest, axis=0)
