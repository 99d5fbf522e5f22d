"""Random draws. Every rank draws what one worker would draw for the whole value, and uses its part of it.

So the ranks' generators stay equal, and a plan changes no numbers. Costs the whole mask while a part of it is taken.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from pipefit.capture.flat import value
from pipefit.sharding.collectives import Collectives
from pipefit.sharding.forms import Split, take
from pipefit.sharding.operations import GROUP, Call, Operation, Strategy, Wishes


def dropout(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Of any part; without an effect it is pointwise."""
    x, p = op.given["input"], op.given["p"]
    for s in wishes:
        if s.padded:
            continue
        if op.given["train"] and p > 0:
            args = (x, p, op.shape, list(value(op.node).stride()), s, GROUP)
            yield op.way(s, (x, s), call=Call(target=part_dropout, args=args))
        else:
            yield op.way(s, (x, s))


def part_dropout(x: Tensor, p: float, shape: list[int], strides: list[int], s: Split, group: Collectives) -> Tensor:
    """A part of a dropout; the whole has `shape` and lies in memory with `strides`, in which order it is drawn."""
    with torch.no_grad():
        ones = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device).fill_(1)
        kept = take(F.dropout(ones, p, training=True), s, group.rank, group.size)
    return x * kept
