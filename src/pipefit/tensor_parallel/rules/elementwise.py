"""Elementwise operations with broadcast operands, copies and casts; norms; reductions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from pipefit.capture import operator_name
from pipefit.capture.flat_graph import draws
from pipefit.tensor_parallel.forms import C, DimSplit
from pipefit.tensor_parallel.operations import Operation, Strategy, Wishes, shape, wished
from pipefit.torch_internals import OpOverload

# ---- Norms: over features undivided features are needed; over channels, channels are divided


def over_features(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide layer and RMS norm along a dimension before the features, such as heads or positions."""
    x, last = op.given["input"], op.last - len(op.given["normalized_shape"])
    positions = {DimSplit(last): None} if op.sequences and last > 0 else {}
    for s in {**wishes, **positions}:
        if s.dim <= last and not s.padded:
            yield op.way(s, (x, s), *((op.given.get(name), C) for name in ("weight", "bias")))


def over_channels(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide batch and instance norm by channels, with their statistics, weights and buffers."""
    for s in wished(wishes, 1):
        if not s.padded:
            names = ("weight", "bias", "running_mean", "running_var")
            yield op.way(s, (op.given["input"], s), *((op.given.get(name), s.at(0)) for name in names))


def over_groups(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide group norm: every rank has some of the groups."""
    groups, s = op.given["num_groups"], DimSplit(1)
    if groups % op.ranks == 0:
        call = op.changed(num_groups=groups // op.ranks)
        yield op.way(
            s,
            (op.given["input"], s),
            (op.given["weight"], DimSplit(0)),
            (op.given["bias"], DimSplit(0)),
            call=call,
        )


# ---- Operations along dimensions, such as softmax, means and running sums: other dimensions can be divided

ALONG = frozenset(
    {
        "softmax", "_softmax", "log_softmax", "_log_softmax", "mean", "sum", "amax", "amin", "var", "std",
        "logsumexp", "cumsum", "cumprod", "norm", "linalg_vector_norm", "all", "any", "prod", "argmax",
        "argmin", "flip",
    }
)  # fmt: skip


def along(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide along the dimensions that the operation does not work along, which the result may lack."""
    x, dims = op.node.args[0], op.given.get("dims", op.given.get("dim"))
    if dims is None or dims == []:
        return
    ndim = len(shape(x))
    worked = {dim % ndim for dim in (dims if isinstance(dims, list | tuple) else [dims])}
    kept = [d for d in range(ndim) if op.last + 1 == ndim or d not in worked]
    for s in wishes:
        if kept[s.dim] not in worked and not s.padded:
            yield op.way(s, (x, s.at(kept[s.dim])))


# ---- Elementwise operations

COPIES = frozenset({"contiguous", "clone", "alias", "to", "_to_copy", "detach", "type_as"})
UNTAGGED = COPIES | {"masked_fill", "softplus", "rsub", "where"}  # elementwise, though torch may not tag them
# Operations that keep zeros and their gradients finite, so zeros at the end of a padded part do not matter
_FINITE = COPIES | {"add", "sub", "mul", "neg", "tanh"}


def pointwise(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide every operand like the result, or replicate it if it has one element along that dimension."""
    for s in wishes:
        if not s.padded or op.name in _FINITE or _by_number(op):
            yield op.way(s, *((node, op.broadcast(s, node)) for node in op.node.all_input_nodes))


def is_pointwise(node: fx.Node) -> bool:
    """Return whether the operator is elementwise, by torch's tag or by our list."""
    if not isinstance(node.target, OpOverload) or draws(node):
        return False
    return torch.Tag.pointwise in node.target.tags or operator_name(node) in UNTAGGED


def _by_number(op: Operation) -> bool:
    return op.name == "div" and not isinstance(op.given.get("other"), fx.Node)
