"""Attention, divided by heads. A single head of keys for all queries is replicated, with a partial gradient.

With dropout of weights, ranks draw the mask of all heads as one worker would, and use their part: such
attention is written as plain operations, which save the weights of every pair of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from pipefit.capture import value
from pipefit.tensor_parallel.collectives import Collectives
from pipefit.tensor_parallel.forms import C, DimSplit, Form, take
from pipefit.tensor_parallel.operations import GROUP, Call, Operation, Strategy, Wishes, shape

# ---- Random draws: every rank draws the whole value as one worker would, and uses its part
#
# So the ranks' generators stay equal, and a plan does not change the numbers. The whole mask exists while a
# part is taken.


def dropout(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide dropout along any dimension; without training or with p = 0 it is pointwise."""
    x, p = op.given["input"], op.given["p"]
    for s in wishes:
        if s.padded:
            continue
        if op.given["train"] and p > 0:
            args = (x, p, op.shape, list(value(op.node).stride()), s, GROUP)
            yield op.way(s, (x, s), call=Call(target=part_dropout, args=args))
        else:
            yield op.way(s, (x, s))


def part_dropout(
    x: Tensor, p: float, shape: list[int], strides: list[int], s: DimSplit, group: Collectives
) -> Tensor:
    """Return a part of a dropout; the whole has `shape`, and memory order by `strides`, in which it is
    drawn.
    """
    with torch.no_grad():
        ones = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device).fill_(1)
        kept = take(F.dropout(ones, p, training=True), s, group.rank, group.size)
    return x * kept


# ---- Attention


def attention(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide attention over (..., heads, tokens, head size) along any dimension before the last two."""
    query, mask = op.given["query"], op.given["attn_mask"]
    for s in {DimSplit(op.last - 2): None, **wishes}:
        if s.dim > op.last - 2 or s.padded or (s.repeats > 1 and op.given["enable_gqa"]):
            continue
        forms: list[tuple[Any, Form]] = [(query, s)]
        forms += [(op.given[name], _of_keys(s, op.given[name])) for name in ("key", "value")]
        if isinstance(mask, fx.Node):
            forms.append((mask, op.broadcast(s, mask)))
        dropped = op.given["dropout_p"] > 0
        if not dropped or (s == DimSplit(1) and op.last == 3):
            yield op.way(s, *forms, call=_dropping(op, s) if dropped else None)


def _of_keys(s: DimSplit, node: fx.Node) -> Form:
    return C if shape(node)[s.dim] == 1 else s


def _dropping(op: Operation, s: DimSplit) -> Call:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
    pairs = [*op.shape[:3], shape(op.given["key"])[2]]
    return Call(target=part_attention, args=(*(op.given[name] for name in names), pairs, s, GROUP))


def part_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
    pairs: list[int],
    s: DimSplit,
    group: Collectives,
) -> Tensor:
    """Return a rank's heads of attention with dropout; `pairs` is the shape of all heads' weights."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    root = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = (query * root) @ (key * root).transpose(-2, -1)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    strides = torch.empty(pairs, device="meta").stride()
    return part_dropout(weights, p, pairs, list(strides), s, group) @ value
