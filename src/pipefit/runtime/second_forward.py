"""Copies of buffers, on which second forwards work: each microbatch changes a buffer once, in its first forward.

Where a layer computes with a buffer that it changes, its second forward has to see what its first one saw. So a copy of
such a buffer is made before the first forward, one for each microbatch that is in flight. Of all other buffers, such as
the statistics of batch norm, copies are made when the second forward begins. Those stay until the backward, because the
graph may refer to them. `pipefit.cost` predicts the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from pipefit.capture.chain import ChainLayer
from pipefit.layer_costs import LayerCost
from pipefit.runtime.buffers import in_other_storages

Buffers = dict[tuple[nn.Module, str], Tensor | None]  # by the module that has it, and its name there


def fed_back_copies(layers: Sequence[ChainLayer], costs: Sequence[LayerCost]) -> Buffers:
    """Copies of the buffers of `layers` that feed back, as they are now."""
    found: Buffers = {}
    for layer, cost in zip(layers, costs, strict=True):
        for name in cost.fed_back:
            path, _, attribute = name.rpartition(".")
            part = layer.module.get_submodule(path)
            found[part, attribute] = part._buffers.get(attribute)
    return _copied(found)


@contextmanager
def working_copies(layers: Sequence[ChainLayer], copies: Buffers) -> Iterator[None]:
    """Inside, layers have the `copies` made before their first forward and copies of their other buffers.

    Afterwards they have the originals, and `copies` holds what took their places: the copies, or what the forward has
    replaced them by.
    """
    parts = (part for layer in layers for part in layer.module.modules())
    originals = {(part, name): buffer for part in parts for name, buffer in part._buffers.items()}
    copies |= _copied({place: buffer for place, buffer in originals.items() if place not in copies})
    try:
        _put(copies)
        copies.clear()  # so that what the forward replaces is freed
        yield
        copies |= {(part, name): part._buffers[name] for part, name in originals}
    finally:
        _put(originals)


def _put(buffers: Buffers) -> None:
    for (part, name), buffer in buffers.items():
        part._buffers[name] = buffer


def _copied(buffers: Buffers) -> Buffers:
    """Copies of these buffers, in one storage where the buffers are."""
    present = {place: buffer for place, buffer in buffers.items() if buffer is not None}
    _, copies = in_other_storages(list(present.values()), Tensor.clone)
    return dict.fromkeys(buffers) | dict(zip(present, copies, strict=True))
