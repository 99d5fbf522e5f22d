"""Embeddings, by columns or by words. By words each rank looks up those it has, and the rows are summed.

Where the ranks do not divide the vocabulary it is padded.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pipefit.sharding.collectives import Collectives
from pipefit.sharding.forms import R, Split, divides
from pipefit.sharding.operations import GROUP, Call, Operation, Strategy, Wishes, shape, wished
from pipefit.sharding.seams import reduced


def embedding(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Of weights (words, columns)."""
    weight, tokens = op.given["weight"], op.given["indices"]
    if op.given["scale_grad_by_freq"] or op.given["sparse"]:
        return
    for s in wished(wishes, op.last):
        if not s.padded:
            yield op.way(s, (weight, s.at(1)))
    call = Call(target=part_embedding, args=(weight, tokens, op.given["padding_idx"], GROUP))
    yield op.way(R, (weight, vocabulary(shape(weight)[0], 0, op.ranks)), summed=True, call=call)


def vocabulary(words: int, dim: int, ranks: int) -> Split:
    """The split of a dimension of so many words; padded if need be."""
    return Split(dim) if divides([words], Split(0), ranks) else Split(dim, padded=True)


def part_embedding(weight: Tensor, tokens: Tensor, padding: int, group: Collectives) -> Tensor:
    """Rows for tokens, of which this rank has some; `padding` is a token whose row gets no gradient."""
    first = group.rank * len(weight)
    is_mine = (tokens >= first) & (tokens < first + len(weight))
    padding = padding - first if first <= padding < first + len(weight) else -1
    rows = torch.ops.aten.embedding.default(weight, (tokens - first).where(is_mine, 0), padding)
    return reduced(rows * is_mine[..., None], group)
