"""What recomputation costs for every range of blocks at once: seconds, and the bytes that they free.

Tables over ranges have row i and column j for the blocks from i to j - 1, made of sums over the blocks before each
edge. The loss counts with the last block. Layers are in a few classes by the seconds that a byte costs, each with the
price of its cheapest layer, so that what is made of them never exceeds the true cost. Bytes are those of storages that
a block makes and saves, which any stage that holds the block keeps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.time import Seconds, layer_seconds
from pipefit.planner.closed_forms.lifetimes import NEVER, lifetimes
from pipefit.planner.question import Question

Floats = NDArray[np.float64]

_CLASSES = 6


class Within(NamedTuple):
    """A part of the tables: ranges that begin at these edges and end at those."""

    starts: slice
    stops: slice


EVERYWHERE = Within(slice(0, -1), slice(None))


class Prices:
    """Seconds of blocks on the kinds of device that are fastest at them, and what their bytes cost."""

    def __init__(self, question: Question) -> None:
        self.question = question
        forward, backward, update = zip(*_fastest(question), strict=True)
        update = (*update[:-1], 0.0)  # the loss has no parameters
        self.layers: tuple[float, ...] = forward  # forward seconds of every layer and of the loss
        self.forward, self.backward, self.update = map(self._by_block, (forward, backward, update))
        self._classes = self._classified(np.array(forward))

    def kept(self, within: Within = EVERYWHERE) -> Floats:
        """Bytes that ranges keep of a microbatch."""
        return sum((ranges(sums, within) for _, sums in self._classes), np.zeros_like(ranges(self.forward, within)))

    def freed(self, seconds: Floats, microbatches: float, within: Within = EVERYWHERE) -> Floats:
        """Bytes of so many microbatches that ranges free in `seconds` of recomputation, the cheapest first."""
        found, left = np.zeros_like(seconds), seconds
        for price, sums in self._classes:
            most = microbatches * ranges(sums, within)
            taken = np.minimum(most, left / price) if price else most
            found, left = found + taken, np.maximum(left - price * taken, 0.0)
        return found

    def seconds(self, need: Floats, microbatches: float) -> Floats:
        """Seconds in which ranges free `need` bytes of so many microbatches, the cheapest first; all if need be."""
        found = np.zeros_like(need)
        for price, sums in self._classes:
            taken = np.clip(need, 0.0, microbatches * ranges(sums))
            found += price * taken
            need = need - taken
        return found

    def _by_block(self, of_layers: Iterable[float]) -> Floats:
        """Sums over the blocks before each edge."""
        sums: Floats = np.concatenate([[0.0], np.cumsum(np.array(list(of_layers), float))])
        edges = np.array(self.question.edges)
        edges[-1] = len(sums) - 1
        return np.take(sums, edges)

    def _classified(self, forward: Floats) -> list[tuple[float, Floats]]:
        """Classes of layers, the cheapest first: the price of a byte, and sums of their bytes."""
        kept = self._kept()
        price = forward / np.maximum(kept, 1)
        known = np.unique(price[kept > 0])
        parts = np.array_split(known, min(_CLASSES, len(known))) if len(known) else []
        return [
            (float(part[0]), self._by_block(np.where((price >= part[0]) & (price <= part[-1]), kept, 0.0)))
            for part in parts
        ]

    def _kept(self) -> Floats:
        """Of every layer and the loss, the bytes of its own storages that a layer of the same block saves."""
        edges = np.array(self.question.edges)
        edges[-1] += 1
        model = lifetimes(self.question.measurement)
        ends = edges[np.searchsorted(edges, np.arange(len(model.own)), side="right")]
        pairs = zip(model.own, ends, strict=True)
        return np.array([sum(s.nbytes for s in own if s.saver != NEVER and s.saver < end) for own, end in pairs], float)


def ranges(sums: Floats, within: Within = EVERYWHERE) -> Floats:
    """Of sums over the blocks before each edge, the sums over ranges of blocks."""
    found: Floats = sums[None, within.stops] - sums[within.starts, None]
    return found


def _fastest(question: Question) -> list[Seconds]:
    """The seconds of every layer and of the loss, each on the kind of device of the cluster that is fastest at it."""
    kinds = {device.kind.key: device.kind for device in question.cluster.devices}
    times = [layer_seconds(question.measurement, kind, question.training.dtype) for kind in kinds.values()]
    return [Seconds(*map(min, zip(*of_kinds, strict=True))) for of_kinds in zip(*times, strict=True)]
