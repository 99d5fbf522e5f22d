"""Which values share memory, and which operations write into it.

Views of one tensor that cross a cut become separate tensors, which makes no difference until an operation writes into
one of them: the other would no longer change with it. A cut must therefore not lie between a change in place and a
value that shares its memory. Found from the operators' schemas and the storages of the traced values, in one pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from pipefit.capture.storages import storage_key
from pipefit.capture.whole_modules import call_whole

_NORMS = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)  # arguments 3 and 4: statistics


def mutated_arguments(node: fx.Node) -> list[fx.Node]:
    """The values `node` writes into; for batch and instance norm in training their running statistics."""
    if node.target is call_whole:
        return list(node.args[2])  # type: ignore[arg-type]
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    if node.target in _NORMS and node.args[5]:  # in training
        return [item for item in node.args[3:5] if isinstance(item, fx.Node)]
    arguments = zip(node.target._schema.arguments, node.args, strict=False)
    named = ((a, node.kwargs[a.name]) for a in node.target._schema.arguments if a.name in node.kwargs)
    return [
        item
        for argument, item in (*arguments, *named)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(item, fx.Node)
    ]


def groups(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node the first one whose memory it may share (itself when none)."""
    first: dict[fx.Node, fx.Node] = {}
    storages: dict[int, fx.Node] = {}
    for node in graph.nodes:
        candidates = [first[source] for source in sources(node)]
        for storage in _storages(node.meta.get("val")):
            candidates.append(storages.setdefault(storage, candidates[0] if candidates else node))
        root = candidates[0] if candidates else node
        for other in {candidate for candidate in candidates if candidate is not root and candidate is not node}:
            for known in [n for n, r in first.items() if r is other]:
                first[known] = root
            for storage in [s for s, r in storages.items() if r is other]:
                storages[storage] = root
        first[node] = root
    return first


def sources(node: fx.Node) -> Iterable[fx.Node]:
    """The arguments that the result may be a view of."""
    if node.op != "call_function":
        return
    if node.target is call_whole:  # one of its arguments, but nothing of the module
        yield from (leaf for leaf in pytree.tree_leaves(node.args[3:5]) if isinstance(leaf, fx.Node))
        return
    if not isinstance(node.target, torch._ops.OpOverload):
        yield from node.all_input_nodes  # getitem
        return
    if not any(result.alias_info is not None for result in node.target._schema.returns):
        return
    for argument, item in zip(node.target._schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and isinstance(item, fx.Node):
            yield item


def _storages(item: Any) -> list[int]:
    if isinstance(item, Tensor):
        return [storage_key(item)]
    if isinstance(item, tuple | list):
        return [storage for part in item for storage in _storages(part)]
    return []
