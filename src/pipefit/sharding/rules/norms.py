"""Norms: those over features need the whole of them, those over channels are divided by channels."""

from __future__ import annotations

from collections.abc import Iterator

from pipefit.sharding.forms import C, Split
from pipefit.sharding.operations import Operation, Strategy, Wishes, wished


def over_features(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Layer and RMS norm: divided along a dimension before the features, such as heads or positions."""
    x, last = op.given["input"], op.last - len(op.given["normalized_shape"])
    positions = {Split(last): None} if op.sequences and last > 0 else {}
    for s in {**wishes, **positions}:
        if s.dim <= last and not s.padded:
            yield op.way(s, (x, s), *((op.given.get(name), C) for name in ("weight", "bias")))


def over_channels(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Batch and instance norm: statistics, weights and buffers are those of a rank's channels."""
    for s in wished(wishes, 1):
        if not s.padded:
            names = ("weight", "bias", "running_mean", "running_var")
            yield op.way(s, (op.given["input"], s), *((op.given.get(name), s.at(0)) for name in names))


def over_groups(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Group norm: every rank has some of the groups."""
    groups, s = op.given["num_groups"], Split(1)
    if groups % op.ranks == 0:
        call = op.changed(num_groups=groups // op.ranks)
        yield op.way(s, (op.given["input"], s), (op.given["weight"], Split(0)), (op.given["bias"], Split(0)), call=call)
