"""Operations on each element by itself, with operands that are broadcast; copies and casts are such too."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from pipefit.capture.flat import draws, operator_name
from pipefit.tensor_parallel.forms import C, Split
from pipefit.tensor_parallel.operations import Operation, Strategy, Wishes, shape, wished

# ----------------------------------------------------------------------------------------------------
# Norms: those over features need the whole of them, those over channels are divided by channels.


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


# ----------------------------------------------------------------------------------------------------
# Operations along one dimension or several, such as softmax, means and running sums: the others can be
# divided.

ALONG = frozenset(
    {
        "softmax", "_softmax", "log_softmax", "_log_softmax", "mean", "sum", "amax", "amin", "var", "std", "logsumexp",
        "cumsum", "cumprod", "norm", "linalg_vector_norm", "all", "any", "prod", "argmax", "argmin", "flip",
    }
)  # fmt: skip


def along(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """The dimensions that it works along stay whole; they may be gone from the result."""
    x, dims = op.node.args[0], op.given.get("dims", op.given.get("dim"))
    if dims is None or dims == []:
        return
    ndim = len(shape(x))
    worked = {dim % ndim for dim in (dims if isinstance(dims, list | tuple) else [dims])}
    kept = [d for d in range(ndim) if op.last + 1 == ndim or d not in worked]
    for s in wishes:
        if kept[s.dim] not in worked and not s.padded:
            yield op.way(s, (x, s.at(kept[s.dim])))


# ----------------------------------------------------------------------------------------------------

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
