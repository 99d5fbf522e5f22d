"""The lifetimes of a model's storages, for all ranges of layers at once. `closed_forms.ranges` adds them up.

A layer makes a storage, and later layers may save it or pass it on. Where the model is cut into stages, the stage after
the cut receives every value in a storage of its own. So a range of layers has two kinds of storages, and their
lifetimes do not depend on where the range stops:

    own     made by layer b; it exists in every range that starts at or before b
    fresh   an input received at the start of a range; it exists only in the ranges that start there

The loss counts as a layer after the last. One pass from the last layer to the first, microseconds per storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from pipefit.layer_costs import LayerCost
from pipefit.profiles import Measurement

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
    """All storages of a model. `fresh[n]` and `own[n]` are in the order of layer n's inputs and own storages."""

    layers: tuple[LayerCost, ...]  # the loss is the last
    fresh: tuple[tuple[Lifetime, ...], ...]
    own: tuple[tuple[Lifetime, ...], ...]


@lru_cache(maxsize=32)
def lifetimes(measurement: Measurement) -> Lifetimes:
    """The lifetime of every storage of the model; remembered, as each of many questions asks for it."""
    layers = (*measurement.costs, measurement.loss)
    fresh: list[tuple[Lifetime, ...]] = []
    own: list[tuple[Lifetime, ...]] = []
    values: tuple[Lifetime, ...] = ()
    for number in range(len(layers) - 1, -1, -1):
        here = _lifetimes_of(layers[number], number, values)
        own.append(here[1])
        fresh.append(here[0])
        values = here[0]
    return Lifetimes(layers, tuple(reversed(fresh)), tuple(reversed(own)))


def _lifetimes_of(
    cost: LayerCost, number: int, values: Sequence[Lifetime]
) -> tuple[tuple[Lifetime, ...], tuple[Lifetime, ...]]:
    """The lifetimes of a layer's inputs as fresh storages, and of its own storages; `values`: those of its outputs."""
    savers = {("own", o): NEVER for o in range(len(cost.storages))} | {
        ("input", k): NEVER for k in range(len(cost.inputs))
    }
    ends = dict.fromkeys(savers, number)
    for origin, value in zip(cost.output_origins, values, strict=False):
        key = (origin.kind, origin.index)
        if key in savers:
            savers[key] = min(savers[key], value.saver)
            ends[key] = max(ends[key], value.end)
    for origin in cost.saved_storages:
        savers[origin.kind, origin.index] = number
    fresh = (Lifetime(number, v.nbytes, savers["input", k], ends["input", k], True) for k, v in enumerate(cost.inputs))
    own = (Lifetime(number, nbytes, savers["own", o], ends["own", o], False) for o, nbytes in enumerate(cost.storages))
    return tuple(fresh), tuple(own)


def released_bytes(model: Lifetimes, number: int, released: Sequence[int]) -> Iterator[int]:
    """The bytes that layer `number` frees by releasing these inputs, in ranges that start 0, 1, ... layers before it.

    Only an input that layer `number` is the first to save is freed then: an earlier layer would still hold it, and
    later ones have had their backward. Nor is one freed that shares its storage, in such a range, with another saved
    input that is not released. The last number holds for all ranges that start earlier.
    """
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
        traced = {o.index for o in origins if o.kind == "input" and model.fresh[start][o.index].saver >= number}
        needed = {o.index for o in still if o.kind == "input"}
        yield born + _first_saved_by(number, (model.fresh[start][k] for k in traced))
        if not traced:
            return


def _first_saved_by(number: int, storages: Iterable[Lifetime]) -> int:
    return sum(storage.nbytes for storage in storages if storage.saver == number)
