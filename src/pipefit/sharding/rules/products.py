"""Products with a weight or of two values: linear, addmm, mm, matmul, bmm, baddbmm and grouped products of experts.

By columns each rank has some of the results and needs all of the input, whose gradient is then a partial sum; by rows
it has some of the input, and the results are summed. (Shoeybi et al., "Megatron-LM", 2019.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pipefit.sharding.collectives import Collectives
from pipefit.sharding.forms import C, Split
from pipefit.sharding.operations import GROUP, Call, Operation, Strategy, Wishes, shape, wished
from pipefit.sharding.seams import reduced, scattered


def linear(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Rows of the weight are results."""
    x, weight, bias = op.given["input"], op.given["weight"], op.given["bias"]
    for s in wished(wishes, op.last):
        yield op.way(s, (x, C), (weight, s.at(0)), (bias, s.at(0)))
    yield from _by_rows(op, wishes, row_linear, (x, weight, bias), (Split(len(shape(x)) - 1), Split(1)))


def addmm(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Columns of the weight are results."""
    if op.given.get("beta", 1) == 1 and op.given.get("alpha", 1) == 1:
        yield from _mm(op, wishes, op.given["mat1"], op.given["mat2"], op.given["self"])


def mm(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Columns of the weight are results."""
    yield from _mm(op, wishes, op.given["self"], op.given["mat2"], None)


def _mm(op: Operation, wishes: Wishes, x: Any, weight: Any, bias: Any) -> Iterator[Strategy | None]:
    for s in wished(wishes, op.last):
        yield op.way(s, (x, C), (weight, s), (bias, None if bias is None else op.broadcast(s, bias)))
    yield from _by_rows(op, wishes, row_mm, (x, weight, bias), (Split(1), Split(0)))


def _by_rows(
    op: Operation, wishes: Wishes, target: Any, operands: tuple[Any, Any, Any], forms: tuple[Split, Split]
) -> Iterator[Strategy | None]:
    """By rows of the weight: every rank gets the whole sum, or by `sequences` its part, such as some positions."""
    x, weight, bias = operands
    divided = (x, forms[0]), (weight, forms[1])
    yield op.way("R", *divided, summed=True, call=Call(target=target, args=(*operands, None, GROUP)))
    for s in wishes if op.sequences else ():
        if s.dim < op.last and not s.padded:
            call = Call(target=target, args=(*operands, s, GROUP))
            yield op.way(s, *divided, (bias, bias and op.broadcast(s, bias)), summed=True, call=call)


def matmul(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Two values, with dimensions of a batch before the last two."""
    x, y = op.node.args[:2]
    dims = [len(shape(x)), len(shape(y))]
    if min(dims) < 2:
        return
    for s in {**wishes, Split(op.last): None}:
        if s.dim == op.last:
            yield op.way(s, (x, C), (y, s.at(dims[1] - 1)))
        elif s.dim == op.last - 1:
            yield op.way(s, (x, s.at(dims[0] - 2)), (y, C))
        else:
            yield op.way(s, (x, op.broadcast(s, x)), (y, op.broadcast(s, y)))  # type: ignore[arg-type]
    call = Call(target=row_mm, args=(x, y, None, None, GROUP))
    yield op.way("R", (x, Split(dims[0] - 1)), (y, Split(dims[1] - 2)), summed=True, call=call)


def baddbmm(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """A batch of products, added to something."""
    for s in wishes:
        if s.dim == 0:
            bias = op.given["self"]
            yield op.way(s, (bias, op.broadcast(s, bias)), (op.given["batch1"], s), (op.given["batch2"], s))


def grouped_mm(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Rows (tokens, inner) by the weights (experts, inner, outer) of their experts: every expert is divided."""
    x, weights = op.node.args[:2]
    if (len(shape(x)), len(shape(weights))) != (2, 3):
        return
    for s in wished(wishes, op.last):
        yield op.way(s, (x, C), (weights, s.at(2)))
    whole = op.replicated().call
    call = Call(target=row_grouped, args=(op.node.target, whole.args, dict(whole.kwargs), GROUP))
    yield op.way("R", (x, Split(1)), (weights, Split(1)), summed=True, call=call)


# ------------------------------------------------------------------ what ranks call


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, form: Split | None, group: Collectives) -> Tensor:
    """A linear layer of which this rank has some of the inputs; its part of the result in a `form`, or all of it."""
    return with_bias(summed(F.linear(x, weight), form, group), bias)


def row_mm(x: Tensor, weight: Tensor, bias: Tensor | None, form: Split | None, group: Collectives) -> Tensor:
    """A product of which this rank has some of the terms, and what is added to it; its part in a `form`, or all."""
    return with_bias(summed(torch.matmul(x, weight), form, group), bias)


def summed(partial: Tensor, form: Split | None, group: Collectives) -> Tensor:
    """The sum of what the ranks have, or this rank's part of it."""
    return reduced(partial, group) if form is None else scattered(partial, form, group)


def row_grouped(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], group: Collectives) -> Tensor:
    """A grouped product of which this rank has some of the terms."""
    return reduced(target(*args, **kwargs), group)


def with_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    """`product` and what is added to it, in the type of the product, which autocast may have chosen."""
    return product if bias is None else product + bias.to(product.dtype)
