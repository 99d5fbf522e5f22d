"""Products with a weight or of two values: linear, (add)mm, matmul, (badd)bmm, grouped products.

By columns, each rank has some of the results and needs the whole input, whose gradient is then a partial sum;
by rows, it has some of the input, and the results are summed. (Shoeybi et al., "Megatron-LM", 2019.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from pipefit.capture import value
from pipefit.tensor_parallel.collectives import Collectives, reduced, scattered
from pipefit.tensor_parallel.forms import C, DimSplit, Form, R, take
from pipefit.tensor_parallel.operations import (
    GROUP,
    Call,
    Equation,
    Operation,
    Strategy,
    Wishes,
    shape,
    wished,
)

# ---- Einstein sums: any letter can be divided
#
# Operands with the letter are divided along it, others are needed whole. If the result has the letter, it is
# divided too, otherwise the results are summed. (The same holds for all products; the most common ones have
# separate rules.)


def einsum(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide an Einstein sum along any letter."""
    equation, tensors = Equation.of(op.given["equation"]), op.given["tensors"]
    if equation is None:
        return
    for s in wishes:
        if not s.padded:
            yield op.way(s, *_along(equation, tensors, equation.result[s.dim], s))
    for letter in dict.fromkeys("".join(equation.operands)):
        if letter in equation.result:
            dim = equation.result.index(letter)
            yield op.way(DimSplit(dim), *_along(equation, tensors, letter, DimSplit(dim)))
        else:
            call = Call(target=part_einsum, args=(op.given["equation"], tensors, GROUP))
            yield op.way(R, *_along(equation, tensors, letter, DimSplit(0)), summed=True, call=call)


def _along(
    equation: Equation, tensors: Sequence[fx.Node], letter: str, s: DimSplit
) -> Iterator[tuple[fx.Node, Form]]:
    """Yield the form of every operand if a letter is divided."""
    for tensor, letters in zip(tensors, equation.operands, strict=True):
        yield tensor, s.at(letters.index(letter)) if letter in letters else C


def part_einsum(equation: str, tensors: Sequence[Tensor], group: Collectives) -> Tensor:
    """Return an Einstein sum whose terms are divided between the ranks."""
    return reduced(torch.einsum(equation, *tensors), group)


# ---- Convolutions, divided by output channels, input channels or groups, and channelwise operations

# Number of dimensions after the channels that the operation combines
CHANNELWISE = {
    "max_pool1d": 1, "max_pool2d": 2, "max_pool3d": 3, "avg_pool1d": 1, "avg_pool2d": 2, "avg_pool3d": 3,
    "adaptive_avg_pool1d": 1, "adaptive_avg_pool2d": 2, "adaptive_avg_pool3d": 3, "upsample_nearest1d": 1,
    "upsample_nearest2d": 2, "upsample_bilinear2d": 2, "upsample_bicubic2d": 2, "tril": 2, "triu": 2,
}  # fmt: skip


def convolution(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide a convolution with weights (out, in / groups, ...)."""
    x, weight, bias, groups = (op.given[name] for name in ("input", "weight", "bias", "groups"))
    if len(shape(x)) != len(shape(weight)):
        return  # without a batch: channels come first
    if groups == 1:
        for s in wished(wishes, 1):
            if not s.padded:
                yield op.way(s, (x, C), (weight, s.at(0)), (bias, s.at(0)))
        yield op.way("R", (x, DimSplit(1)), (weight, DimSplit(1)), summed=True, call=_by_rows(op))
    elif groups % op.ranks == 0:
        s, call = DimSplit(1), op.changed(groups=groups // op.ranks)
        yield op.way(s, (x, s), (weight, DimSplit(0)), (bias, DimSplit(0)), call=call)


def transposed(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide a transposed convolution with weights (in, out / groups, ...)."""
    x, weight, bias, groups = (op.given[name] for name in ("input", "weight", "bias", "groups"))
    if groups != 1 or len(shape(x)) != len(shape(weight)):
        return
    for s in wished(wishes, 1):
        if not s.padded:
            yield op.way(s, (x, C), (weight, s), (bias, s.at(0)))
    yield op.way("R", (x, DimSplit(1)), (weight, DimSplit(0)), summed=True, call=_by_rows(op))


def _by_rows(op: Operation) -> Call:
    whole = op.changed(bias=None)
    return Call(target=row_convolution, args=(whole.target, whole.args, op.given["bias"], GROUP))


def channelwise(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide pooling, resizing and triangles along any dimension before those that they combine."""
    for s in wishes:
        if s.dim <= op.last - CHANNELWISE[op.name] and not s.padded:
            yield op.way(s, (op.node.args[0], s))


def row_convolution(target: Any, args: tuple[Any, ...], bias: Tensor | None, group: Collectives) -> Tensor:
    """Return a convolution whose input channels are divided between the ranks."""
    whole = reduced(target(*args), group)
    return whole if bias is None else whole + bias.to(whole.dtype).reshape(-1, *[1] * (whole.ndim - 2))


# ---- Products


def linear(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide a linear layer, whose weight has a row for each output."""
    x, weight, bias = op.given["input"], op.given["weight"], op.given["bias"]
    for s in wished(wishes, op.last):
        yield op.way(s, (x, C), (weight, s.at(0)), (bias, s.at(0)))
    yield from _products_by_rows(
        op, wishes, row_linear, (x, weight, bias), (DimSplit(len(shape(x)) - 1), DimSplit(1))
    )


def addmm(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide a product whose second factor has a column for each output."""
    if op.given.get("beta", 1) == 1 and op.given.get("alpha", 1) == 1:
        yield from _mm(op, wishes, op.given["mat1"], op.given["mat2"], op.given["self"])


def mm(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide a product whose second factor has a column for each output."""
    yield from _mm(op, wishes, op.given["self"], op.given["mat2"], None)


def _mm(op: Operation, wishes: Wishes, x: Any, weight: Any, bias: Any) -> Iterator[Strategy | None]:
    for s in wished(wishes, op.last):
        yield op.way(s, (x, C), (weight, s), (bias, None if bias is None else op.broadcast(s, bias)))
    yield from _products_by_rows(op, wishes, row_mm, (x, weight, bias), (DimSplit(1), DimSplit(0)))


def _products_by_rows(
    op: Operation,
    wishes: Wishes,
    target: Any,
    operands: tuple[Any, Any, Any],
    forms: tuple[DimSplit, DimSplit],
) -> Iterator[Strategy | None]:
    """Divide by rows of the weight: every rank gets the whole sum, or with `sequences` its part."""
    x, weight, bias = operands
    divided = (x, forms[0]), (weight, forms[1])
    yield op.way("R", *divided, summed=True, call=Call(target=target, args=(*operands, None, GROUP)))
    for s in wishes if op.sequences else ():
        if s.dim < op.last and not s.padded:
            call = Call(target=target, args=(*operands, s, GROUP))
            yield op.way(s, *divided, (bias, bias and op.broadcast(s, bias)), summed=True, call=call)


def matmul(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide a product of two values, with batch dimensions before the last two."""
    x, y = op.node.args[:2]
    dims = [len(shape(x)), len(shape(y))]
    if min(dims) < 2:
        return
    for s in {**wishes, DimSplit(op.last): None}:
        if s.dim == op.last:
            yield op.way(s, (x, C), (y, s.at(dims[1] - 1)))
        elif s.dim == op.last - 1:
            yield op.way(s, (x, s.at(dims[0] - 2)), (y, C))
        else:
            yield op.way(s, (x, op.broadcast(s, x)), (y, op.broadcast(s, y)))  # type: ignore[arg-type]
    call = Call(target=row_mm, args=(x, y, None, None, GROUP))
    yield op.way("R", (x, DimSplit(dims[0] - 1)), (y, DimSplit(dims[1] - 2)), summed=True, call=call)


def baddbmm(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide a batch of products that is added to a value."""
    for s in wishes:
        if s.dim == 0:
            bias = op.given["self"]
            yield op.way(s, (bias, op.broadcast(s, bias)), (op.given["batch1"], s), (op.given["batch2"], s))


def grouped_mm(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide every expert in a product of rows (tokens, inner) by weights (experts, inner, outer)."""
    x, weights = op.node.args[:2]
    if (len(shape(x)), len(shape(weights))) != (2, 3):
        return
    for s in wished(wishes, op.last):
        yield op.way(s, (x, C), (weights, s.at(2)))
    whole = op.replicated().call
    call = Call(target=row_grouped, args=(op.node.target, whole.args, dict(whole.kwargs), GROUP))
    yield op.way("R", (x, DimSplit(1)), (weights, DimSplit(1)), summed=True, call=call)


# ------------------------------------------------------------------ what ranks call


def row_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, form: DimSplit | None, group: Collectives
) -> Tensor:
    """Return a linear layer whose inputs are divided: this rank's part in a `form`, or the whole."""
    return with_bias(summed(F.linear(x, weight), form, group), bias)


def row_mm(
    x: Tensor, weight: Tensor, bias: Tensor | None, form: DimSplit | None, group: Collectives
) -> Tensor:
    """Return a product whose terms are divided, plus a bias: this rank's part in a `form`, or the whole."""
    return with_bias(summed(torch.matmul(x, weight), form, group), bias)


def summed(partial: Tensor, form: DimSplit | None, group: Collectives) -> Tensor:
    """Return the sum of the ranks' tensors, or this rank's part of it."""
    return reduced(partial, group) if form is None else scattered(partial, form, group)


def row_grouped(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], group: Collectives) -> Tensor:
    """Return a grouped product whose terms are divided between the ranks."""
    return reduced(target(*args, **kwargs), group)


def with_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    """Return `product` plus `bias`, in the dtype of the product, which autocast may have chosen."""
    return product if bias is None else product + bias.to(product.dtype)


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
    drawn. Its backward keeps a boolean mask, as dropout of one worker does.
    """
    with torch.no_grad():
        ones = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device).fill_(1)
        drawn = take(F.dropout(ones, p, training=True), s, group.rank, group.size)
        kept, scale = drawn != 0, drawn.amax()
    return x.where(kept, 0) * scale


# ---- Attention
#
# With dropout of weights, ranks draw the mask of all heads as one worker would, and use their part: such
# attention is written as plain operations, which save the weights of every pair of tokens.


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
