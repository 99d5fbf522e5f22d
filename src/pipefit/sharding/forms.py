"""In which form the ranks of a tensor-parallel group hold a value: whole, or each a part of one dimension.

A value has one of three forms. R, replicated: every rank has all of it, and all of its gradient. C, replicated, with a
partial gradient: every rank has all of it, but the gradients that the ranks compute have to be summed. `Split`: every
rank has a part of one dimension, and of the gradient too. Partial sums of values have no form: the operation that makes
them ends with their sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

R: Final = "R"
C: Final = "C"


class Split(NamedTuple):
    """Dimension `dim` is divided: it is `repeats` times a row of blocks, and every rank has its share of each block.

    `blocks` are the sizes of unequal blocks, such as the queries, keys and values of a fused projection; without them
    a row is one block. A `padded` dimension is shared although the ranks do not divide it: the last parts end in zeros.
    """

    dim: int
    repeats: int = 1
    blocks: tuple[int, ...] = ()
    padded: bool = False

    @staticmethod
    def of(dim: int, blocks: Sequence[int]) -> Split:
        """The split of a dimension that is a row of these blocks; equal ones are repeats."""
        sizes = tuple(size for size in blocks if size)
        return Split(dim, len(sizes)) if len(set(sizes)) <= 1 else Split(dim, 1, sizes)

    def at(self, dim: int) -> Split:
        """The same split of another dimension."""
        return self._replace(dim=dim)


Form = Split | Literal["R", "C"]


def divides(shape: Sequence[int], form: Split, ranks: int) -> bool:
    """Whether so many ranks can share a value of this shape in this form."""
    if not 0 <= form.dim < len(shape) or shape[form.dim] % form.repeats:
        return False
    row = shape[form.dim] // form.repeats
    if form.padded:
        return form.repeats == 1 and not form.blocks and row >= ranks
    return row > 0 and sum(form.blocks or (row,)) == row and all(b % ranks == 0 for b in form.blocks or (row,))


def local_shape(shape: Sequence[int], form: Form, ranks: int) -> list[int]:
    """The shape of what one rank has."""
    return [
        math.ceil(size / ranks) if isinstance(form, Split) and dim == form.dim else size
        for dim, size in enumerate(shape)
    ]


def ranges(size: int, form: Split, rank: int, ranks: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of what a rank has of a dimension of `size`, in order; without the padding."""
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


def take(whole: Tensor, form: Split, rank: int, ranks: int) -> Tensor:
    """A rank's part of `whole`, contiguous, in memory of its own."""
    dim, size = form.dim, whole.shape[form.dim]
    if form.padded:
        (start, stop), share = next(ranges(size, form, rank, ranks)), math.ceil(size / ranks)
        zeros = whole.new_zeros([share - (stop - start) if d == dim else n for d, n in enumerate(whole.shape)])
        return torch.cat([whole.narrow(dim, start, stop - start), zeros], dim).contiguous()
    row = size // form.repeats
    rows, one = _rows(whole, dim, form.repeats), form._replace(repeats=1)
    parts = [rows.narrow(dim + 1, start, stop - start) for start, stop in ranges(row, one, rank, ranks)]
    return torch.cat(parts, dim + 1).contiguous().flatten(dim, dim + 1)


def dealt(whole: Tensor, form: Split, ranks: int) -> Tensor:
    """The parts of all ranks along a new first dimension."""
    made = whole.new_empty([ranks, *local_shape(whole.shape, form, ranks)])
    for rank, part in enumerate(made):
        part.copy_(take(whole, form, rank, ranks))
    return made


def join(parts: Sequence[Tensor], form: Split, size: int) -> Tensor:
    """The whole, of `size` along the divided dimension, of the parts of all ranks in order."""
    dim = form.dim
    if form.padded:
        return torch.cat(list(parts), dim).narrow(dim, 0, size).contiguous()
    row = size // form.repeats
    shares = [block // len(parts) for block in form.blocks or (row,)]
    divided = [torch.split(_rows(part, dim, form.repeats), shares, dim + 1) for part in parts]
    blocks = [part[number] for number in range(len(shares)) for part in divided]
    return torch.cat(blocks, dim + 1).contiguous().flatten(dim, dim + 1)


def _rows(tensor: Tensor, dim: int, count: int) -> Tensor:
    """A view of `tensor` with `dim` as two dimensions: so many rows, and what is in a row."""
    return tensor.reshape([*tensor.shape[:dim], count, tensor.shape[dim] // count, *tensor.shape[dim + 1 :]])
