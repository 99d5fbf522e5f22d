"""Under which name a checkpoint stores each tensor of a model, and which stage stores it.

A tied parameter has several names and, on several stages, several copies, which are equal. It is stored once, under the
first name, by the first stage that has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipefit.capture.chain import ChainLayer
from pipefit.capture.constants import named_constants


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """`stored` has for every original name the one under which its tensor is stored; `first`, for each of these, the
    number of the first layer that holds it.
    """

    stored: Mapping[str, str]
    first: Mapping[str, int]

    @staticmethod
    def of(layers: Sequence[ChainLayer]) -> Names:
        """Those of a whole chain, before stages have copies of their own."""
        stored: dict[str, str] = {}
        first: dict[str, int] = {}
        met: dict[int, str] = {}
        for number, layer in enumerate(layers):
            for local, tensor in layer.module.state_dict(keep_vars=True).items():
                name = layer.originals[local]
                stored.setdefault(name, met.setdefault(id(tensor), name) if isinstance(tensor, nn.Parameter) else name)
                first.setdefault(stored[name], number)
        return Names(stored=stored, first=first)

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        """Names under which nothing is stored, each with the one under which its tensor is."""
        return tuple((name, stored) for name, stored in self.stored.items() if name != stored)

    def are_of(self, name: str, start: int, stop: int) -> bool:
        """Whether the stage of layers `start` to `stop - 1` stores the tensor of that name, and under it."""
        return self.stored[name] == name and start <= self.first[name] < stop


def held_tensors(layer: ChainLayer) -> Iterator[tuple[str, Tensor]]:
    """What a layer holds and no state dict has, such as buffers that are not persistent, each with a name."""
    known = layer.module.state_dict(keep_vars=True).keys()
    others = ((name, buffer) for name, buffer in layer.module.named_buffers() if name not in known)
    for local, tensor in (*others, *named_constants(layer.module)):
        if tensor.layout is torch.strided:  # no forward changes another in place
            yield f"{layer.name}.{local}", tensor
