"""Hugging Face models traced as they run eagerly: without attention masks that mask nothing.

When it is traced, transformers builds an attention mask of sequence x sequence even where every token may see all, or
all before it; when it runs eagerly it leaves the mask out and attention takes its fast path. A captured model should
compute, and hold, what the eager one does. Where no padding mask is given, that is known without looking at any values.
So it is where positions depend on no input, as those that a model counts by itself: whether they restart, as in packed
sequences, is then the same for every batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

from pipefit.capture.aliases import mutated_arguments
from pipefit.capture.flat import draws

_MASKS = "transformers.masking_utils"


@contextmanager
def eager_masks() -> Iterator[None]:
    """A context in which a transformers model that is traced builds the masks it would build eagerly."""
    masks = sys.modules.get(_MASKS)
    with ExitStack() as patches:
        if masks is not None and hasattr(masks, "is_torchdynamo_exporting"):
            patches.enter_context(mock.patch.object(masks, "is_torchdynamo_exporting", return_value=False))
        if masks is not None and hasattr(masks, "find_packed_sequence_indices"):
            find = _unless_known(masks.find_packed_sequence_indices)
            patches.enter_context(mock.patch.object(masks, "find_packed_sequence_indices", find))
        yield


def _unless_known(find: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    """`find`, which returns None for positions that are known to count up by one."""

    def found(position_ids: Tensor) -> Tensor | None:
        known = _constant(position_ids)
        with _disable_current_modes():
            counts_up = known is not None and bool((known.diff(dim=-1) == 1).all())
        return None if counts_up else find(position_ids)

    return found


def _constant(tensor: Tensor) -> Tensor | None:
    """The values of a tensor that is being traced, if they depend on no input, parameter, buffer or random draw."""
    end = _node_of(tensor)
    if end is None:
        return None
    needed = _needed_by(end)
    changed = {
        source for node in end.graph.nodes for target in mutated_arguments(node) for source in _needed_by(target)
    }
    if changed & needed or not all(node.op == "call_function" and not draws(node) for node in needed):
        return None
    values: dict[fx.Node, Any] = {}
    with _disable_current_modes():
        for node in end.graph.nodes:
            if node in needed:
                args, keywords = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **keywords)
    found: Tensor = values[end]
    return found


def _node_of(tensor: Tensor) -> fx.Node | None:
    """The operation of the trace that is going on that made `tensor`."""
    mode: Any = get_proxy_mode()
    slot: Any = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def _needed_by(node: fx.Node) -> set[fx.Node]:
    """A node, and all that it is computed from."""
    found, pending = set[fx.Node](), [node]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found
