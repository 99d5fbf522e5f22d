"""Forms in which the ranks of a tensor-parallel group hold a value: whole, or each a part of one dimension.

A value has one of three forms. R, replicated: every rank has the whole value, and its whole gradient. C,
replicated with a partial gradient: every rank has the whole value, but the gradients that the ranks compute
must be summed. `DimSplit`: every rank has a part of one dimension, and of the gradient too. Partial sums do
not have a form: the operation that makes them ends with their sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from pipefit.errors import UsageError

R: Final = "R"
C: Final = "C"


class DimSplit(NamedTuple):
    """Division of dimension `dim`: `repeats` rows of blocks, with each block divided between the ranks.

    `blocks` are the sizes of unequal blocks, such as the queries, keys and values of a fused projection;
    without them a row is one block. A `padded` dimension is shared although its size is not a multiple of the
    ranks: the last parts end in zeros.
    """

    dim: int
    repeats: int = 1
    blocks: tuple[int, ...] = ()
    padded: bool = False

    @staticmethod
    def of(dim: int, blocks: Sequence[int]) -> DimSplit:
        """Return the split of a dimension that is a row of these blocks; equal blocks become repeats."""
        sizes = tuple(size for size in blocks if size)
        return DimSplit(dim, len(sizes)) if len(set(sizes)) <= 1 else DimSplit(dim, 1, sizes)

    def at(self, dim: int) -> DimSplit:
        """Return the same split of another dimension."""
        return self._replace(dim=dim)


Form = DimSplit | Literal["R", "C"]


def divides(shape: Sequence[int], form: DimSplit, ranks: int) -> bool:
    """Return whether `ranks` ranks can share a value of this shape in this form."""
    if not 0 <= form.dim < len(shape) or shape[form.dim] % form.repeats:
        return False
    row = shape[form.dim] // form.repeats
    if form.padded:
        return form.repeats == 1 and not form.blocks and row >= ranks
    return (
        row > 0 and sum(form.blocks or (row,)) == row and all(b % ranks == 0 for b in form.blocks or (row,))
    )


def local_shape(shape: Sequence[int], form: Form, ranks: int) -> list[int]:
    """Return the shape of one rank's part."""
    return [
        math.ceil(size / ranks) if isinstance(form, DimSplit) and dim == form.dim else size
        for dim, size in enumerate(shape)
    ]


def ranges(size: int, form: DimSplit, rank: int, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of a rank's ranges in a dimension of `size`, in order, without the padding."""
    if form.padded:
        share = math.ceil(size / ranks)
        yield min(rank * share, size), min((rank + 1) * share, size)
        return
    start = 0
    for _ in range(form.repeats):
        for block in form.blocks or (size // form.repeats,):
            share = block // ranks
            yield start + rank * share, start + (rank + 1) * share
            start += block


def take(whole: Tensor, form: DimSplit, rank: int, ranks: int) -> Tensor:
    """Return a rank's part of `whole`, contiguous, in separate memory."""
    dim, size = form.dim, whole.shape[form.dim]
    if form.padded:
        (start, stop), share = next(ranges(size, form, rank, ranks)), math.ceil(size / ranks)
        zeros = whole.new_zeros(
            [share - (stop - start) if d == dim else n for d, n in enumerate(whole.shape)]
        )
        return torch.cat([whole.narrow(dim, start, stop - start), zeros], dim).contiguous()
    row = size // form.repeats
    rows, dim_split = _rows(whole, dim, form.repeats), form._replace(repeats=1)
    parts = [rows.narrow(dim + 1, start, stop - start) for start, stop in ranges(row, dim_split, rank, ranks)]
    return torch.cat(parts, dim + 1).contiguous().flatten(dim, dim + 1)


def dealt(whole: Tensor, form: DimSplit, ranks: int) -> Tensor:
    """Return the parts of all ranks along a new first dimension."""
    tensor = whole.new_empty([ranks, *local_shape(whole.shape, form, ranks)])
    for rank, part in enumerate(tensor):
        part.copy_(take(whole, form, rank, ranks))
    return tensor


def join(parts: Sequence[Tensor], form: DimSplit, size: int) -> Tensor:
    """Return the whole, of `size` along the divided dimension, from the parts of all ranks in order."""
    dim = form.dim
    if form.padded:
        return torch.cat(list(parts), dim).narrow(dim, 0, size).contiguous()
    row = size // form.repeats
    shares = [block // len(parts) for block in form.blocks or (row,)]
    divided = [torch.split(_rows(part, dim, form.repeats), shares, dim + 1) for part in parts]
    blocks = [part[number] for number in range(len(shares)) for part in divided]
    return torch.cat(blocks, dim + 1).contiguous().flatten(dim, dim + 1)


def _rows(tensor: Tensor, dim: int, count: int) -> Tensor:
    """View dimension `dim` of `tensor` as two: `count` rows, and the contents of a row."""
    return tensor.reshape([*tensor.shape[:dim], count, tensor.shape[dim] // count, *tensor.shape[dim + 1 :]])


# ---- Shards of parameters and buffers, and conversions to and from whole tensors, exact to the bit
#
# A `TensorShard` is plain data: ranges of one dimension of the whole tensor, in the rank's order. Gradients
# and optimizer states of a parameter are divided like the parameter, so the same functions serve them.


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShard:
    """One rank's part of the tensor `name`: the `ranges` of dimension `dim`, then `padding` zeros.

    A replicated tensor has `dim` None and no ranges: the rank has the whole tensor.
    """

    name: str
    dim: int | None
    ranges: tuple[tuple[int, int], ...]
    global_shape: tuple[int, ...]
    padding: int = 0

    @staticmethod
    def of(name: str, shape: Sequence[int], form: Form, rank: int, ranks: int) -> TensorShard:
        """Return the shard of `rank` of `ranks` for a tensor of this shape in this form."""
        if not isinstance(form, DimSplit):
            return TensorShard(name=name, dim=None, ranges=(), global_shape=tuple(shape))
        mine = tuple(ranges(shape[form.dim], form, rank, ranks))
        kept = sum(stop - start for start, stop in mine)
        missing = local_shape(shape, form, ranks)[form.dim] - kept
        return TensorShard(name=name, dim=form.dim, ranges=mine, global_shape=tuple(shape), padding=missing)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the rank's part."""
        mine = sum(stop - start for start, stop in self.ranges) + self.padding
        return tuple(mine if dim == self.dim else size for dim, size in enumerate(self.global_shape))

    def local(self, whole: Tensor) -> Tensor:
        """Return the rank's part of `whole`, in separate memory."""
        if self.dim is None:
            return whole.detach().clone()
        parts = [whole.detach().narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        if self.padding:
            parts.append(
                whole.new_zeros([self.padding if d == self.dim else n for d, n in enumerate(whole.shape)])
            )
        return torch.cat(parts, self.dim).contiguous()

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Write the rank's part to its place in `whole`."""
        if self.dim is None:
            whole.copy_(part)
            return
        place = 0
        for start, stop in self.ranges:
            whole.narrow(self.dim, start, stop - start).copy_(part.narrow(self.dim, place, stop - start))
            place += stop - start

    def local_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rank's part of an optimizer's state for the whole tensor; counts etc. are unchanged.

        Raises:
            UsageError: the state has a tensor of another shape, whose part is unknown.
        """
        return {key: self._part(key, item, self.global_shape, self.local) for key, item in state.items()}

    def _part(self, key: str, item: Any, shape: tuple[int, ...], change: Callable[[Tensor], Tensor]) -> Any:
        """Return `change(item)` if `item` is a tensor of `shape`, otherwise `item`.

        Raises:
            UsageError: `item` is a larger tensor of another shape, of a divided parameter.
        """
        if not isinstance(item, Tensor) or tuple(item.shape) != shape:
            if isinstance(item, Tensor) and item.numel() > 1 and self.dim is not None:
                raise UsageError(
                    f"the optimizer keeps {key} of {self.name} in shape {tuple(item.shape)}, but the "
                    f"parameter has {shape}, so ranks that shard the parameter cannot shard {key}: use an "
                    "optimizer that keeps tensors of the parameter's shape, such as AdamW, or no tensor "
                    "parallelism"
                )
            return item
        return change(item)


def assembled(shards: Sequence[TensorShard], parts: Sequence[Tensor]) -> Tensor:
    """Return the whole tensor, or gradient, from all ranks' parts."""
    whole = parts[0].new_empty(shards[0].global_shape)
    for shard, part in zip(shards, parts, strict=True):
        shard.put(part.detach(), whole)
    return whole
