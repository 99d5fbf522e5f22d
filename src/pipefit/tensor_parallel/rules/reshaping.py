"""Operations that rearrange elements: views, transposed and repeated dimensions, pieces of dimensions.

A reshape consists of groups of neighboring dimensions whose products agree. A split of one dimension divides
its group into rows, so it is a split of the dimension of the other shape in which those rows begin; if there
is no such dimension, the split is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from pipefit.capture import operator_name, value
from pipefit.tensor_parallel.forms import C, DimSplit
from pipefit.tensor_parallel.operations import Call, Operation, Strategy, Wishes, shape

# ---- Pieces of a dimension: split, chunk, slice, select, unbind, cat, stack, pad, index
#
# Along the dimension that is cut, every rank has its share of each piece. So a fused projection of queries,
# keys and values, or of gate and input, is divided by blocks, equal or not, and cutting it needs no
# communication.

_END = 1 << 60  # torch writes an open end as the largest number


def item(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide one tensor of a list; the list has the form of the tensor that was cut."""
    source = op.node.args[0]
    if not isinstance(source, fx.Node) or operator_name(source) not in CUTS:
        return
    dim, every = _cut_dim(source), [list(piece.shape) for piece in value(source)]
    for s in wishes:
        if operator_name(source) == "unbind":
            yield op.way(s, (source, s.at(s.dim + (s.dim >= dim))))
        elif s.dim != dim:
            yield op.way(s, (source, s))
        elif s == DimSplit(dim):
            yield op.way(s, (source, DimSplit.of(dim, [piece[dim] for piece in every])))
        elif not (s.blocks or s.padded) and every.count(every[0]) == len(every):
            yield op.way(s, (source, DimSplit(dim, s.repeats * len(every))))


def cut(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide a list of pieces; wishes for the pieces are given as forms of the tensor that is cut."""
    x, dim = op.node.args[0], _cut_dim(op.node)
    for s in wishes:
        if s.dim != dim:
            yield op.way(s, (x, s))
        elif op.name != "unbind" and not s.padded and _cuts_parts(op, dim):
            yield op.way(s, (x, s), call=op.changed(**_fewer(op)))


def _cuts_parts(op: Operation, dim: int) -> bool:
    """Return whether the same operation cuts a rank's part into its shares of the pieces."""
    sizes = [piece.shape[dim] for piece in value(op.node)]
    return all(size % op.ranks == 0 for size in sizes) and (op.name != "chunk" or len(set(sizes)) == 1)


def _cut_dim(node: fx.Node) -> int:
    dim = Operation(node, 1, frozenset()).given["dim"]
    assert isinstance(dim, int)
    return dim % len(shape(node.args[0]))


def _fewer(op: Operation) -> dict[str, object]:
    """Return the sizes of a rank's pieces, if the operation takes sizes."""
    for name in ("split_size", "split_sizes"):
        if name in op.given:
            sizes = op.given[name]
            return {
                name: [n // op.ranks for n in sizes] if isinstance(sizes, list | tuple) else sizes // op.ranks
            }
    return {}


def select(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide a selection of one element of a dimension, which the result lacks."""
    x = op.node.args[0]
    dim = op.given["dim"] % len(shape(x))
    for s in wishes:
        yield op.way(s, (x, s.at(s.dim + (s.dim >= dim))))


def slice_(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide a range of a dimension, which may be one of several ranges of the same value."""
    x = op.node.args[0]
    dim = op.given["dim"] % (op.last + 1)
    start, stop = _range(op)
    for s in wishes:
        if s.dim != dim or op.shape == shape(x):
            yield op.way(s, (x, s))
        elif op.given["step"] == 1 and s == DimSplit(dim) and start % op.ranks == stop % op.ranks == 0:
            call = op.changed(start=start // op.ranks, end=stop // op.ranks)
            yield op.way(s, (x, DimSplit.of(dim, _blocks(op, dim))), call=call)


def _range(op: Operation) -> tuple[int, int]:
    """Return start and stop, within the dimension."""
    size = shape(op.node.args[0])[op.given["dim"] % (op.last + 1)]
    start, stop = op.given["start"] or 0, op.given["end"]
    stop = size if stop is None or stop > _END else stop
    start, stop = (min(max(n + size if n < 0 else n, 0), size) for n in (start, stop))
    return start, stop


def _blocks(op: Operation, dim: int) -> list[int]:
    """Return the blocks between all positions at which a slice of the same value begins or ends."""
    source = op.node.args[0]
    assert isinstance(source, fx.Node)
    places = {0, shape(source)[dim]}
    for user in source.users:
        if operator_name(user) == "slice":
            other = Operation(user, op.ranks, op.trained)
            if other.given["dim"] % (op.last + 1) == dim:
                places.update(_range(other))
    return [stop - start for start, stop in pairwise(sorted(places))]


def cat(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide a concatenation; along its dimension, each tensor is a block."""
    tensors, dim = op.node.args[0], op.given["dim"] % (op.last + 1)
    if not isinstance(tensors, list | tuple) or any(len(shape(x)) != op.last + 1 for x in tensors):
        return
    together = DimSplit.of(dim, [shape(x)[dim] for x in tensors])
    for s in wishes:
        if s.dim != dim:
            yield op.way(s, *((x, s) for x in tensors))
        elif s == together:
            yield op.way(s, *((x, DimSplit(dim)) for x in tensors))


def stack(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide a stack along its old dimensions."""
    tensors, dim = op.node.args[0], op.given["dim"] % (op.last + 1)
    if not isinstance(tensors, list | tuple):
        return
    for s in wishes:
        if s.dim != dim:
            yield op.way(s, *((x, s.at(s.dim - (s.dim > dim))) for x in tensors))


def pad(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide padding along dimensions that are not padded."""
    x, sides = op.node.args[0], op.given["pad"]  # before and after, the last dimension first
    longer = {op.last - place // 2 for place, count in enumerate(sides) if count}
    for s in wishes:
        if s.dim not in longer and not s.padded:
            yield op.way(s, (x, s))


def index(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide a lookup of rows by number along the dimensions after the indexed one."""
    x, indices = op.node.args[0], op.given["indices"]
    if len(indices) != 1 or not isinstance(indices[0], fx.Node) or not _numbers(indices[0]):
        return
    for s in wishes:
        dim = s.dim - len(shape(indices[0])) + 1
        if dim >= 1 and not s.padded:
            yield op.way(s, (x, s.at(dim)))


def _numbers(node: fx.Node) -> bool:
    result = value(node)
    return isinstance(result, Tensor) and not result.dtype.is_floating_point and result.dtype.itemsize > 1


def glu(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide a gated linear unit: the first half, weighted by the second."""
    x, dim = op.node.args[0], op.given["dim"] % (op.last + 1)
    for s in wishes:
        if s.dim != dim:
            yield op.way(s, (x, s))
        elif s == DimSplit(dim):
            yield op.way(s, (x, DimSplit(dim, 2)))


def roll(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide a roll along dimensions that are not rolled."""
    moved = {dim % (op.last + 1) for dim in op.given["dims"]}
    for s in wishes:
        if moved and s.dim not in moved:
            yield op.way(s, (op.node.args[0], s))


CUTS = frozenset({"split", "chunk", "split_with_sizes", "unbind"})


# ---- Views

VIEWS = frozenset(
    {"view", "reshape", "_unsafe_view", "_reshape_alias", "flatten", "unflatten", "unsqueeze", "squeeze"}
)


def view(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide any reshape, written with the sizes of the rank's part."""
    x = op.node.args[0]
    if op.given.get("dtype") is not None:
        return  # the same bytes as another dtype
    for s in wishes:
        source = through_reshape(op.shape, shape(x), s, op.ranks)
        call = Call(target=torch.ops.aten.reshape.default, args=(x, op.local(s)))
        yield op.way(s, (x, source), call=call)


def through_reshape(before: Sequence[int], after: Sequence[int], s: DimSplit, ranks: int) -> DimSplit | None:
    """Convert a split of shape `before` to shape `after`; None if it is not a split of one dimension
    there.
    """
    for (first, second), (third, fourth) in _groups(before, after):
        if first <= s.dim < second:
            return _in_group(before[first:second], after[third:fourth], s.at(s.dim - first), third, ranks)
    return None


def _in_group(
    before: Sequence[int], after: Sequence[int], s: DimSplit, offset: int, ranks: int
) -> DimSplit | None:
    """Convert a split within one group of dimensions, which begins at `offset` in the shape after."""
    if s.blocks or s.padded:
        kept = next((d for d, size in enumerate(after) if size == math.prod(before) == before[s.dim]), None)
        return None if kept is None else s.at(offset + kept)
    rows, prefix = math.prod(before[: s.dim]) * s.repeats, 1
    for dim, size in enumerate(after):
        if rows % prefix == 0 and prefix * size % (rows * ranks) == 0:
            return DimSplit(offset + dim, rows // prefix)
        prefix *= size
    return None


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield pairs of ranges of dimensions, as short as possible, with equal numbers of elements."""
    i = j = 0
    while i < len(before) or j < len(after):
        first, second, m, n = i, j, 1, 1
        while True:
            if m <= n and i < len(before):
                m, i = m * before[i], i + 1
            elif j < len(after):
                n, j = n * after[j], j + 1
            else:
                m, i = m * before[i], i + 1
            if m == n and (m > 1 or (i == len(before) and j == len(after))):
                break
        yield (first, i), (second, j)


def transpose(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide a permutation of dimensions."""
    x, order = op.node.args[0], list(range(op.last + 1))
    if op.name == "permute":
        order = [dim % len(order) for dim in op.given["dims"]]
    elif order:
        one, other = _exchanged(op)
        order[one], order[other] = order[other], order[one]
    for s in wishes:
        yield op.way(s, (x, s.at(order[s.dim])))


def _exchanged(op: Operation) -> tuple[int, int]:
    if op.name == "transpose":
        return op.given["dim0"] % (op.last + 1), op.given["dim1"] % (op.last + 1)
    return (0, op.last) if op.name in ("t", "numpy_T") else (op.last - 1, op.last)


def expand(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide dimensions of one element that are repeated without a copy."""
    x = op.node.args[0]
    for s in wishes:
        yield op.way(s, (x, op.broadcast(s, x)), call=op.changed(size=op.local(s)))  # type: ignore[arg-type]


def repeat(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide dimensions that are not repeated, and repeated ones of one element."""
    x, times = op.node.args[0], op.given["repeats"]
    ahead = len(times) - len(shape(x))
    for s in wishes:
        dim = s.dim - ahead
        if times[s.dim] == 1 and dim >= 0:
            yield op.way(s, (x, s.at(dim)))
        elif (dim < 0 or shape(x)[dim] == 1) and times[s.dim] % op.ranks == 0:
            fewer = [n // op.ranks if d == s.dim else n for d, n in enumerate(times)]
            yield op.way(s, (x, C), call=op.changed(repeats=fewer))


def repeat_interleave(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide a repetition of every element in a row, such as heads of keys for several queries."""
    x, times, dim = op.node.args[0], op.given["repeats"], op.given["dim"]
    if not isinstance(times, int) or dim is None:
        return
    for s in wishes:
        if s.dim == dim % (op.last + 1) and shape(x)[s.dim] == 1 and times % op.ranks == 0:
            changes: dict[str, Any] = {"repeats": times // op.ranks, "output_size": None}
            yield op.way(s, (x, C), call=op.changed(**changes))
        elif not s.blocks and not s.padded:
            yield op.way(s, (x, s), call=op.changed(output_size=None))
