"""The life of every storage of a model, wherever the model is cut: what `closed_forms.ranges` sums over.

A storage is born in one layer and may be saved by a later one, or travel through several. A cut ends that: behind it,
every value has a fresh storage of its own. So there are two kinds of life, and neither depends on where a range stops:

    own     born in layer b; it exists in every range that starts at or before b
    fresh   an input received at the start of a range; it exists only in ranges that start there

The loss is the layer behind the last. One pass from the last layer to the first; it costs microseconds per storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pipefit.profiles import LayerCost, Measurement

NEVER = 1 << 40


class Life(NamedTuple):
    """One storage: born (own) or received (fresh) at layer `birth`, first saved by layer `saver`, a value up to
    boundary `end`.
    """

    birth: int
    nbytes: int
    saver: int  # NEVER: nobody saves it
    end: int
    fresh: bool


class Lives(NamedTuple):
    """All storages of a model. `fresh[n]` and `own[n]` are in the order of layer n's inputs and own storages."""

    layers: tuple[LayerCost, ...]  # the loss is the last
    fresh: tuple[tuple[Life, ...], ...]
    own: tuple[tuple[Life, ...], ...]


def lives(measurement: Measurement) -> Lives:
    """The life of every storage of the model."""
    layers = (*measurement.costs, measurement.loss)
    fresh: list[tuple[Life, ...]] = []
    own: list[tuple[Life, ...]] = []
    values: tuple[Life, ...] = ()
    for number in range(len(layers) - 1, -1, -1):
        here = _lives_of(layers[number], number, values)
        own.append(here[1])
        fresh.append(here[0])
        values = here[0]
    return Lives(layers, tuple(reversed(fresh)), tuple(reversed(own)))


def _lives_of(cost: LayerCost, number: int, values: Sequence[Life]) -> tuple[tuple[Life, ...], tuple[Life, ...]]:
    """The fresh lives of a layer's inputs and the lives of its own storages, from those of the values behind it."""
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
    fresh = (Life(number, v.nbytes, savers["input", k], ends["input", k], True) for k, v in enumerate(cost.inputs))
    own = (Life(number, nbytes, savers["own", o], ends["own", o], False) for o, nbytes in enumerate(cost.storages))
    return tuple(fresh), tuple(own)


def released_bytes(model: Lives, number: int, released: Sequence[int]) -> Iterator[int]:
    """What releasing these inputs of layer `number` frees in a range that starts 0, 1, 2, ... layers before it.

    An input counts where layer `number` is the first that saves it: later savers are done, earlier ones still hold it.
    Nor does one count that shares its storage, in such a range, with another saved input that is not released.
    Ends where starting still earlier makes no difference.
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


def _first_saved_by(number: int, storages: Iterable[Life]) -> int:
    return sum(storage.nbytes for storage in storages if storage.saver == number)
