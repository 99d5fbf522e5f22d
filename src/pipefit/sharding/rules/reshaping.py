"""Operations that look at the same elements in another shape: views, transposed and repeated dimensions.

A reshape falls into groups of neighbouring dimensions whose products agree. A split of one dimension divides its group
into so many rows, whatever the dimensions are called, and so it is a split of the dimension of the other shape in which
those rows begin; if none begins there, it is given up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pipefit.sharding.forms import C, Split
from pipefit.sharding.operations import Call, Operation, Strategy, Wishes, shape

VIEWS = frozenset({"view", "reshape", "_unsafe_view", "_reshape_alias", "flatten", "unflatten", "unsqueeze", "squeeze"})


def view(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Any reshape: written with the sizes of the rank's part."""
    x = op.node.args[0]
    if op.given.get("dtype") is not None:
        return  # the same bytes as another type
    for s in wishes:
        source = through_reshape(op.shape, shape(x), s, op.ranks)
        call = Call(target=torch.ops.aten.reshape.default, args=(x, op.local(s)))
        yield op.way(s, (x, source), call=call)


def through_reshape(before: Sequence[int], after: Sequence[int], s: Split, ranks: int) -> Split | None:
    """What a split of shape `before` is in shape `after`; None where it is no split of one dimension."""
    for (first, second), (third, fourth) in _groups(before, after):
        if first <= s.dim < second:
            return _in_group(before[first:second], after[third:fourth], s.at(s.dim - first), third, ranks)
    return None


def _in_group(before: Sequence[int], after: Sequence[int], s: Split, offset: int, ranks: int) -> Split | None:
    """The same within one group of dimensions, which begins at `offset` in the shape after."""
    if s.blocks or s.padded:
        kept = next((d for d, size in enumerate(after) if size == math.prod(before) == before[s.dim]), None)
        return None if kept is None else s.at(offset + kept)
    rows, prefix = math.prod(before[: s.dim]) * s.repeats, 1
    for dim, size in enumerate(after):
        if rows % prefix == 0 and prefix * size % (rows * ranks) == 0:
            return Split(offset + dim, rows // prefix)
        prefix *= size
    return None


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Pairs of ranges of dimensions, as short as can be, that hold the same number of elements."""
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
    """Dimensions in another order."""
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
    """Dimensions of one element, repeated without a copy."""
    x = op.node.args[0]
    for s in wishes:
        yield op.way(s, (x, op.broadcast(s, x)), call=op.changed(size=op.local(s)))  # type: ignore[arg-type]


def repeat(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Dimensions that are not repeated, and those of one element."""
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
    """Every element so many times in a row: heads of keys for several queries."""
    x, times, dim = op.node.args[0], op.given["repeats"], op.given["dim"]
    if not isinstance(times, int) or dim is None:
        return
    for s in wishes:
        if s.dim == dim % (op.last + 1) and shape(x)[s.dim] == 1 and times % op.ranks == 0:
            changes: dict[str, Any] = {"repeats": times // op.ranks, "output_size": None}
            yield op.way(s, (x, C), call=op.changed(**changes))
        elif not s.blocks and not s.padded:
            yield op.way(s, (x, s), call=op.changed(output_size=None))
