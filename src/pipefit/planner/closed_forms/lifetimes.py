"""Lifetimes of a model's storages, for all ranges of layers at once. `closed_forms.ranges` adds them up.

A layer makes a storage, and later layers may save it or pass it on. At a cut between stages, the next stage
receives every value in a separate storage. So a range of layers has two kinds of storages, whose lifetimes do
not depend on the end of the range:

    own     made by layer b; it exists in every range that starts at or before b
    fresh   an input received at the start of a range; it exists only in the ranges that start there

The loss counts as a layer after the last. One pass from the last layer to the first, microseconds per
storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from pipefit.planner.closed_forms.bands import Ints
from pipefit.schema.layer_costs import LayerCost, Origin, SharedBuffer, Span
from pipefit.schema.profile import Measurement

NEVER = 1 << 40


class Lifetime(NamedTuple):
    """One storage: made (own) or received (fresh) at layer `birth`, first saved by layer `saver`.

    It holds a value at the boundaries up to `end`.
    """

    birth: int
    nbytes: int
    saver: int  # NEVER if no layer saves it
    end: int
    fresh: bool


class Lifetimes(NamedTuple):
    """All storages of a model.

    `fresh[n]` and `own[n]` are in the order of layer n's inputs and own storages.
    """

    layers: tuple[LayerCost, ...]  # the loss is the last
    fresh: tuple[tuple[Lifetime, ...], ...]
    own: tuple[tuple[Lifetime, ...], ...]


@lru_cache(maxsize=32)
def lifetimes(measurement: Measurement) -> Lifetimes:
    """Return the lifetime of every storage of the model; cached."""
    layers = (*measurement.costs, measurement.loss)
    fresh: list[tuple[Lifetime, ...]] = []
    own: list[tuple[Lifetime, ...]] = []
    values: tuple[Lifetime, ...] = ()
    saved = {id(cost): cost.saved_storages for cost in {id(cost): cost for cost in layers}.values()}
    for number in range(len(layers) - 1, -1, -1):
        here = _lifetimes_of(layers[number], number, values, saved[id(layers[number])])
        own.append(here[1])
        fresh.append(here[0])
        values = here[0]
    return Lifetimes(layers, tuple(reversed(fresh)), tuple(reversed(own)))


def _lifetimes_of(
    cost: LayerCost, number: int, values: Sequence[Lifetime], saved: Sequence[Origin]
) -> tuple[tuple[Lifetime, ...], tuple[Lifetime, ...]]:
    """Return the lifetimes of a layer's inputs as fresh storages, and of its own storages.

    `values` are the lifetimes of its outputs, and `saved` are its saved storages.
    """
    savers = {("own", o): NEVER for o in range(len(cost.storages))} | {
        ("input", k): NEVER for k in range(len(cost.inputs))
    }
    ends = dict.fromkeys(savers, number)
    for origin, value in zip(cost.output_origins, values, strict=False):
        key = (origin.kind, origin.index)
        if key in savers:
            savers[key] = min(savers[key], value.saver)
            ends[key] = max(ends[key], value.end)
    for origin in saved:
        savers[origin.kind, origin.index] = number
    fresh = (
        Lifetime(number, v.nbytes, savers["input", k], ends["input", k], True)
        for k, v in enumerate(cost.inputs)
    )
    own = (
        Lifetime(number, nbytes, savers["own", o], ends["own", o], False)
        for o, nbytes in enumerate(cost.storages)
    )
    return tuple(fresh), tuple(own)


def released_bytes(model: Lifetimes, number: int, released: Sequence[int]) -> Iterator[int]:
    """Yield the bytes that layer `number` frees by releasing these inputs.

    One number for ranges that start 0, 1, ... layers before it; the last holds for all earlier starts. An
    input is freed only if layer `number` is the first to save it: an earlier layer would still hold it, and
    later ones have had their backward. It is not freed if, in such a range, it shares its storage with
    another saved input that is not released.
    """
    if not released:
        yield 0
        return
    layers, born, traced = model.layers, 0, set(released)
    needed = set(layers[number].saved_inputs) - traced
    if number == len(layers) - 1:  # targets are loaded wherever the last stage starts
        targets = set(range(len(layers[number - 1].outputs), len(layers[number].inputs)))
        born = _first_saved_by(number, (model.fresh[number][k] for k in targets & traced))
        traced, needed = traced - targets, needed - targets
    yield born + _first_saved_by(number, (model.fresh[number][k] for k in traced))
    for start in range(number - 1, -1, -1):
        still = {layers[start].output_origins[k] for k in needed}
        origins = {layers[start].output_origins[k] for k in traced} - still
        born += _first_saved_by(number, (model.own[start][o.index] for o in origins if o.kind == "own"))
        traced = {
            o.index for o in origins if o.kind == "input" and model.fresh[start][o.index].saver >= number
        }
        needed = {o.index for o in still if o.kind == "input"}
        yield born + _first_saved_by(number, (model.fresh[start][k] for k in traced))
        if not traced:
            return


def _first_saved_by(number: int, storages: Iterable[Lifetime]) -> int:
    return sum(storage.nbytes for storage in storages if storage.saver == number)


# ---- Arrays for bands

Events = tuple[Ints, Ints, Ints]  # boundary or layer, birth or depth, bytes
NOTHING = -(1 << 60)  # the peak of a backward without a span


def saved(storages: Sequence[Lifetime]) -> Events:
    """Return storages, each at the boundary after the first layer that saves it."""
    return as_events((s.saver + 1, s.birth, s.nbytes) for s in storages if s.saver != NEVER)


def repeated(shared: Iterable[SharedBuffer]) -> Iterator[tuple[int, int, int]]:
    """Yield consecutive users of a shared buffer: ranges with both would count the buffer twice."""
    return ((later + 1, user, one.nbytes) for one in shared for user, later in one.pairs)


def gone(storages: Sequence[Lifetime]) -> Events:
    """Return storages that no layer saves, each at the first boundary at which it no longer holds a value."""
    fresh_or_output = (s for s in storages if s.saver == NEVER and (s.fresh or s.end > s.birth))
    return as_events((s.end + 1, s.birth, s.nbytes) for s in fresh_or_output)


def span_table(model: Lifetimes, spans: Sequence[tuple[Span, ...]]) -> tuple[Ints, Events]:
    """Return the backward peaks of all layers in ranges that start far before them, and in nearer ones.

    The latter are events of (layer, layers between, bytes), as far as the number of layers between matters.
    """
    peaks = [_span_peaks(model, number, of_layer) for number, of_layer in enumerate(spans)]
    nearer = (
        (n, depth, value) for n, by_depth in enumerate(peaks) for depth, value in enumerate(by_depth[:-1])
    )
    return integers(by_depth[-1] for by_depth in peaks), as_events(nearer)


def _span_peaks(model: Lifetimes, number: int, spans: tuple[Span, ...]) -> list[int]:
    """Return a layer's backward peaks in ranges that start 0, 1, ... layers before it.

    The last number holds for all earlier starts.
    """
    freed = {span.released: list(released_bytes(model, number, span.released)) for span in spans}
    depths = range(max(map(len, freed.values()), default=1))
    return [
        max(
            (s.peak_bytes - freed[s.released][min(d, len(freed[s.released]) - 1)] for s in spans),
            default=NOTHING,
        )
        for d in depths
    ]


def as_events(rows: Iterable[tuple[int, int, int]]) -> Events:
    """Return rows of three numbers as three columns."""
    table = np.array(list(rows), np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def chosen(events: Events, mask: NDArray[np.bool_]) -> Events:
    """Return the events for which `mask` is true."""
    return events[0][mask], events[1][mask], events[2][mask]


def diagonal(table: Ints, starts: int) -> Ints:
    """Return the view whose element (w, c) is element (w, c + w) of `table`."""
    down, across = table.strides
    return as_strided(table, (table.shape[0], starts), (down + across, across), writeable=False)


def integers(values: Iterable[int]) -> Ints:
    """Return an array of 64-bit integers, which hold all sums of sizes (`layer_costs.LARGEST_BYTES`)."""
    return np.fromiter(values, np.int64)


def cumulated(values: Iterable[int]) -> Ints:
    """Return the sums of the first 0, 1, 2, ... values."""
    return np.concatenate(([0], np.cumsum(integers(values))))
