"""Operations on each element by itself, with operands that are broadcast; copies and casts are such too."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from pipefit.capture.flat import draws, operator_name
from pipefit.sharding.operations import Operation, Strategy, Wishes

COPIES = frozenset({"contiguous", "clone", "alias", "to", "_to_copy", "detach", "type_as"})
UNTAGGED = COPIES | {"masked_fill", "softplus", "rsub", "where"}  # elementwise, though torch may not say so
# What keeps zeros and their gradients finite, so that the zeros at the end of a padded part stay without effect
_FINITE = COPIES | {"add", "sub", "mul", "neg", "tanh"}


def pointwise(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Every operand is divided as the result, or has one element along that dimension."""
    for s in wishes:
        if not s.padded or op.name in _FINITE or _by_number(op):
            yield op.way(s, *((node, op.broadcast(s, node)) for node in op.node.all_input_nodes))


def is_pointwise(node: fx.Node) -> bool:
    """Whether the operator is such, by torch's own tag or by our list."""
    if not isinstance(node.target, torch._ops.OpOverload) or draws(node):
        return False
    return torch.Tag.pointwise in node.target.tags or operator_name(node) in UNTAGGED


def _by_number(op: Operation) -> bool:
    return op.name == "div" and not isinstance(op.given.get("other"), fx.Node)
