"""Buffers of layers in other storages: on another device, or copied for a second forward.

Several buffers may share a storage, and several layers of a stage may hold it: it is moved and copied as one,
so that a stage takes exactly the bytes that its plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipefit.capture.chain import ChainLayer
from pipefit.capture.storages import flat, placed, storage_key, without_memory
from pipefit.schema.layer_costs import LayerCost

Place = tuple[nn.Module, str, Tensor]  # the module that holds a buffer, its name there, and the buffer


def buffer_places(modules: Sequence[nn.Module]) -> Iterator[Place]:
    """Yield every place of every buffer of `modules`."""
    for module in modules:
        for part in module.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    yield part, name, buffer


def held_buffers(layers: Sequence[ChainLayer]) -> list[Tensor]:
    """Return the present buffers of `layers`; a forward may have replaced earlier ones."""
    return [buffer for _, _, buffer in buffer_places([layer.module for layer in layers])]


def in_other_storages(
    buffers: Sequence[Tensor], convert: Callable[[Tensor], Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Convert each storage once, as one flat tensor.

    Return the new storages, and tensors like `buffers` in them.
    """
    made: dict[int, Tensor] = {}
    for buffer in buffers:
        if storage_key(buffer) not in made:
            made[storage_key(buffer)] = convert(flat(buffer))
    return list(made.values()), [placed(buffer, made[storage_key(buffer)]) for buffer in buffers]


def move(modules: Sequence[nn.Module], device: torch.device, *, absent: Container[int] = ()) -> None:
    """Move `modules` to `device`. Unlike `Module.to`, keep shared buffers shared.

    Modules already on the device stay untouched, because `Module.to` drops gradient hooks of fake parameters.
    Parameters with ids in `absent` get no memory on the device, so that together they may exceed its memory.
    """
    places = [place for place in buffer_places(modules) if place[2].device != device]
    _, moved = in_other_storages([buffer for _, _, buffer in places], lambda storage: storage.to(device))
    for (part, name, _), buffer in zip(places, moved, strict=True):
        part._buffers[name] = buffer
    for parameter in (one for module in modules for one in module.parameters()):
        if id(parameter) in absent and parameter.device != device:
            like = parameter.shape, parameter.stride()
            parameter.data = without_memory(torch.empty_strided(*like, dtype=parameter.dtype, device=device))
    for module in modules:
        if any(parameter.device != device for parameter in module.parameters()):
            module.to(device)


# ---- Copies of buffers for second forwards
# Each microbatch changes a buffer once, in its first forward. If a layer computes with a buffer that it
# changes, its second forward must see the values of the first. So such a buffer is copied before the first
# forward, once for each microbatch in flight. All other buffers, such as batch norm statistics, are copied
# when the second forward begins. The copies stay until the backward, because the graph may refer to them.
# `memory` predicts their bytes.

Buffers = dict[tuple[nn.Module, str], Tensor | None]  # by module and name in it


def fed_back_copies(layers: Sequence[ChainLayer], costs: Sequence[LayerCost]) -> Buffers:
    """Return copies of the present buffers that `layers` both read and change."""
    found: Buffers = {}
    for layer, cost in zip(layers, costs, strict=True):
        for name in cost.fed_back:
            path, _, attribute = name.rpartition(".")
            part = layer.module.get_submodule(path)
            found[part, attribute] = part._buffers.get(attribute)
    return _copied(found)


@contextmanager
def working_copies(layers: Sequence[ChainLayer], copies: Buffers) -> Iterator[None]:
    """Use copies of the buffers of `layers` in the context: the `copies` of their first forward, or new ones.

    Afterwards the layers have the originals, and `copies` holds the buffers of the second forward: the
    copies, or their replacements by the forward.
    """
    parts = (part for layer in layers for part in layer.module.modules())
    originals = {(part, name): buffer for part in parts for name, buffer in part._buffers.items()}
    copies |= _copied({place: buffer for place, buffer in originals.items() if place not in copies})
    try:
        _put(copies)
        copies.clear()  # so that replaced buffers are freed
        yield
        copies |= {(part, name): part._buffers[name] for part, name in originals}
    finally:
        _put(originals)


def _put(buffers: Buffers) -> None:
    for (part, name), buffer in buffers.items():
        part._buffers[name] = buffer


def _copied(buffers: Buffers) -> Buffers:
    """Copy buffers; buffers that share a storage share one in the copies."""
    present = {place: buffer for place, buffer in buffers.items() if buffer is not None}
    _, copies = in_other_storages(list(present.values()), Tensor.clone)
    return dict.fromkeys(buffers) | dict(zip(present, copies, strict=True))
