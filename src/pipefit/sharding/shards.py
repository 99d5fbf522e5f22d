"""Which part of a parameter or buffer a rank has, and the way there and back, exact to the bit.

A `Shard` is plain data: ranges of one dimension of the whole tensor, in the order in which the rank has them. Gradients
and what an optimizer keeps for a parameter are shared as the parameter is, so the same functions serve them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipefit.sharding.forms import Form, Split, local_shape, ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank has of the tensor `name`: of dimension `dim` the `ranges`, then `padding` zeros.

    A replicated tensor has no `dim` and no ranges: the rank has all of it.
    """

    name: str
    dim: int | None
    ranges: tuple[tuple[int, int], ...]
    global_shape: tuple[int, ...]
    padding: int = 0

    @staticmethod
    def of(name: str, shape: Sequence[int], form: Form, rank: int, ranks: int) -> Shard:
        """What `rank` of `ranks` has of a tensor of this shape in this form."""
        if not isinstance(form, Split):
            return Shard(name=name, dim=None, ranges=(), global_shape=tuple(shape))
        mine = tuple(ranges(shape[form.dim], form, rank, ranks))
        kept = sum(stop - start for start, stop in mine)
        missing = local_shape(shape, form, ranks)[form.dim] - kept
        return Shard(name=name, dim=form.dim, ranges=mine, global_shape=tuple(shape), padding=missing)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what the rank has."""
        mine = sum(stop - start for start, stop in self.ranges) + self.padding
        return tuple(mine if dim == self.dim else size for dim, size in enumerate(self.global_shape))

    def local(self, whole: Tensor) -> Tensor:
        """The rank's part of `whole`, in memory of its own."""
        if self.dim is None:
            return whole.detach().clone()
        parts = [whole.detach().narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        if self.padding:
            parts.append(whole.new_zeros([self.padding if d == self.dim else n for d, n in enumerate(whole.shape)]))
        return torch.cat(parts, self.dim).contiguous()

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Writes the rank's part to its place in `whole`."""
        if self.dim is None:
            whole.copy_(part)
            return
        place = 0
        for start, stop in self.ranges:
            whole.narrow(self.dim, start, stop - start).copy_(part.narrow(self.dim, place, stop - start))
            place += stop - start

    def local_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The rank's part of what an optimizer keeps for the whole tensor; counts and the like stay as they are."""
        return {
            key: self.local(item) if isinstance(item, Tensor) and tuple(item.shape) == self.global_shape else item
            for key, item in state.items()
        }


def assembled(shards: Sequence[Shard], parts: Sequence[Tensor]) -> Tensor:
    """The whole tensor, or gradient, of all ranks' parts."""
    whole = parts[0].new_empty(shards[0].global_shape)
    for shard, part in zip(shards, parts, strict=True):
        shard.put(part.detach(), whole)
    return whole


def assembled_state(shards: Sequence[Shard], states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What an optimizer would keep for the whole tensor, of what the ranks' optimizers keep for its parts."""
    return {
        key: assembled(shards, [state[key] for state in states])
        if isinstance(item, Tensor) and tuple(item.shape) == shards[0].local_shape and item.ndim
        else item
        for key, item in states[0].items()
    }
