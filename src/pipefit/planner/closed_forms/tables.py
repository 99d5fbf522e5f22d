"""Arrays made of a model's layers and of the lifetimes of its storages, from which bands are made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from pipefit.layer_costs import Span
from pipefit.planner.closed_forms.bands import Ints
from pipefit.planner.closed_forms.lifetimes import NEVER, Lifetime, Lifetimes, released_bytes
from pipefit.sharing import SharedBuffer

Events = tuple[Ints, Ints, Ints]  # boundary or layer, birth or depth, bytes
NOTHING = -(1 << 60)  # the peak of a backward without a span


def saved(storages: Sequence[Lifetime]) -> Events:
    """Storages, each at the boundary after the first layer that saves it."""
    return as_events((s.saver + 1, s.birth, s.nbytes) for s in storages if s.saver != NEVER)


def repeated(shared: Iterable[SharedBuffer]) -> Iterator[tuple[int, int, int]]:
    """Two consecutive users of a buffer: ranges that hold both count it once more than it exists."""
    return ((later + 1, user, one.nbytes) for one in shared for user, later in one.pairs)


def gone(storages: Sequence[Lifetime]) -> Events:
    """Storages that no layer saves, each at the first boundary where it holds no value any more."""
    fresh_or_output = (s for s in storages if s.saver == NEVER and (s.fresh or s.end > s.birth))
    return as_events((s.end + 1, s.birth, s.nbytes) for s in fresh_or_output)


def span_table(model: Lifetimes, spans: Sequence[tuple[Span, ...]]) -> tuple[Ints, Events]:
    """Backward peaks of all layers in ranges that start far before them, and those in ranges that start nearer.

    The latter are events of (layer, layers between, bytes), for as many layers between as make a difference.
    """
    peaks = [_span_peaks(model, number, of_layer) for number, of_layer in enumerate(spans)]
    nearer = ((n, depth, value) for n, by_depth in enumerate(peaks) for depth, value in enumerate(by_depth[:-1]))
    return integers(by_depth[-1] for by_depth in peaks), as_events(nearer)


def _span_peaks(model: Lifetimes, number: int, spans: tuple[Span, ...]) -> list[int]:
    """Backward peaks of a layer in ranges that start 0, 1, ... layers before it; the last one holds for all earlier."""
    freed = {span.released: list(released_bytes(model, number, span.released)) for span in spans}
    depths = range(max(map(len, freed.values()), default=1))
    return [
        max((s.peak_bytes - freed[s.released][min(d, len(freed[s.released]) - 1)] for s in spans), default=NOTHING)
        for d in depths
    ]


def as_events(rows: Iterable[tuple[int, int, int]]) -> Events:
    """Rows of three numbers as three columns."""
    table = np.array(list(rows), np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def chosen(events: Events, mask: NDArray[np.bool_]) -> Events:
    """The events for which `mask` is true."""
    return events[0][mask], events[1][mask], events[2][mask]


def diagonal(table: Ints, starts: int) -> Ints:
    """Element (w, c) of the result is element (w, c + w) of `table`."""
    down, across = table.strides
    return as_strided(table, (table.shape[0], starts), (down + across, across), writeable=False)


def integers(values: Iterable[int]) -> Ints:
    """An array of 64 bits an element, which sums of sizes do not exceed (`layer_costs.LARGEST_BYTES`)."""
    return np.fromiter(values, np.int64)


def cumulated(values: Iterable[int]) -> Ints:
    """Sums of the first 0, 1, 2, ... values."""
    return np.concatenate(([0], np.cumsum(integers(values))))
