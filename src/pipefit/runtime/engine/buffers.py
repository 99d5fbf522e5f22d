"""Buffers of layers in other storages: on another device, or copied for a second forward.

Several buffers may lie in one storage, which several layers of a stage may hold: it is moved and copied as one, so that
a stage takes as many bytes as its plan says.
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
    """Every place of every buffer of `modules`."""
    for module in modules:
        for part in module.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    yield part, name, buffer


def held_buffers(layers: Sequence[ChainLayer]) -> list[Tensor]:
    """The buffers that `layers` have now; a forward may have put others in the places of those from before."""
    return [buffer for _, _, buffer in buffer_places([layer.module for layer in layers])]


def in_other_storages(
    buffers: Sequence[Tensor], convert: Callable[[Tensor], Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """What `convert` makes of each storage, as one flat tensor, and tensors like `buffers` that lie in these."""
    made: dict[int, Tensor] = {}
    for buffer in buffers:
        if storage_key(buffer) not in made:
            made[storage_key(buffer)] = convert(flat(buffer))
    return list(made.values()), [placed(buffer, made[storage_key(buffer)]) for buffer in buffers]


def move(modules: Sequence[nn.Module], device: torch.device, *, absent: Container[int] = ()) -> None:
    """Move `modules` to `device`. `Module.to` would give each place of a shared buffer a copy of its own.

    Those that are there stay untouched: of fake parameters `Module.to` would drop the hooks on their gradients.
    Parameters whose ids are among the `absent` keep no memory there: they need not fit, all together.
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


# ----------------------------------------------------------------------------------------------------
# Copies of buffers, on which second forwards work: each microbatch changes a buffer once, in its first
# forward.
#
# Where a layer computes with a buffer that it changes, its second forward has to see what its first one saw.
# So a copy of such a buffer is made before the first forward, one for each microbatch that is in flight. Of
# all other buffers, such as the statistics of batch norm, copies are made when the second forward begins.
# Those stay until the backward, because the graph may refer to them. `pipefit.memory` predicts the bytes.

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
