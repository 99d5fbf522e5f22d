"""Which part of a parameter or buffer a rank has, and the way there and back, exact to the bit.

A `Shard` is plain data: ranges of one dimension of the whole tensor, in the order in which the rank has them. Gradients
and what an optimizer keeps for a parameter are shared as the parameter is, so the same functions serve them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipefit.errors import UsageError
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
        """The rank's part of what an optimizer keeps for the whole tensor; counts and the like stay as they are.

        Raises:
            UsageError: it keeps a tensor of another shape, of which nobody knows the part.
        """
        return {key: self._part(key, item, self.global_shape, self.local) for key, item in state.items()}

    def _part(self, key: str, item: Any, shape: tuple[int, ...], change: Callable[[Tensor], Tensor]) -> Any:
        """`item`, changed if it is a tensor of `shape`."""
        if not isinstance(item, Tensor) or tuple(item.shape) != shape:
            if isinstance(item, Tensor) and item.numel() > 1 and self.dim is not None:
                raise UsageError(
                    f"the optimizer keeps {key} of {self.name} in the shape {tuple(item.shape)}, and the parameter has "
                    f"{shape}: ranks that share the parameter cannot share that; take an optimizer that keeps tensors "
                    "of the parameter's shape, such as AdamW, or no tensor parallelism"
                )
            return item
        return change(item)


def assembled(shards: Sequence[Shard], parts: Sequence[Tensor]) -> Tensor:
    """The whole tensor, or gradient, of all ranks' parts."""
    whole = parts[0].new_empty(shards[0].global_shape)
    for shard, part in zip(shards, parts, strict=True):
        shard.put(part.detach(), whole)
    return whole


def assembled_state(shards: Sequence[Shard], states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What an optimizer would keep for the whole tensor, of what the ranks' optimizers keep for its parts.

    Raises:
        UsageError: they keep a tensor of another shape than the part's.
    """
    first = shards[0]
    return {
        key: first._part(key, item, first.local_shape, lambda _, key=key: assembled(shards, [s[key] for s in states]))  # type: ignore[misc]
        for key, item in states[0].items()
    }
