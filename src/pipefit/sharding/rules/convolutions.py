"""Convolutions by channels, out or in or in groups, and what works on each channel by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from pipefit.sharding.collectives import Collectives
from pipefit.sharding.forms import C, Split
from pipefit.sharding.operations import GROUP, Call, Operation, Strategy, Wishes, shape, wished
from pipefit.sharding.seams import reduced

# Dimensions behind the channels that the operation looks across
CHANNELWISE = {
    "max_pool1d": 1, "max_pool2d": 2, "max_pool3d": 3, "avg_pool1d": 1, "avg_pool2d": 2, "avg_pool3d": 3,
    "adaptive_avg_pool1d": 1, "adaptive_avg_pool2d": 2, "adaptive_avg_pool3d": 3, "upsample_nearest1d": 1,
    "upsample_nearest2d": 2, "upsample_bilinear2d": 2, "upsample_bicubic2d": 2, "tril": 2, "triu": 2,
}  # fmt: skip


def convolution(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Weights are (out, in / groups, ...)."""
    x, weight, bias, groups = (op.given[name] for name in ("input", "weight", "bias", "groups"))
    if len(shape(x)) != len(shape(weight)):
        return  # without a batch: channels come first
    if groups == 1:
        for s in wished(wishes, 1):
            if not s.padded:
                yield op.way(s, (x, C), (weight, s.at(0)), (bias, s.at(0)))
        yield op.way("R", (x, Split(1)), (weight, Split(1)), summed=True, call=_by_rows(op))
    elif groups % op.ranks == 0:
        s, call = Split(1), op.changed(groups=groups // op.ranks)
        yield op.way(s, (x, s), (weight, Split(0)), (bias, Split(0)), call=call)


def transposed(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Weights are (in, out / groups, ...)."""
    x, weight, bias, groups = (op.given[name] for name in ("input", "weight", "bias", "groups"))
    if groups != 1 or len(shape(x)) != len(shape(weight)):
        return
    for s in wished(wishes, 1):
        if not s.padded:
            yield op.way(s, (x, C), (weight, s), (bias, s.at(0)))
    yield op.way("R", (x, Split(1)), (weight, Split(0)), summed=True, call=_by_rows(op))


def _by_rows(op: Operation) -> Call:
    whole = op.changed(bias=None)
    return Call(target=row_convolution, args=(whole.target, whole.args, op.given["bias"], GROUP))


def channelwise(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Pooling, resizing and triangles: any dimension before those that it looks across."""
    for s in wishes:
        if s.dim <= op.last - CHANNELWISE[op.name] and not s.padded:
            yield op.way(s, (op.node.args[0], s))


def row_convolution(target: Any, args: tuple[Any, ...], bias: Tensor | None, group: Collectives) -> Tensor:
    """A convolution of which this rank has some of the channels that come in."""
    whole = reduced(target(*args), group)
    return whole if bias is None else whole + bias.to(whole.dtype).reshape(-1, *[1] * (whole.ndim - 2))
