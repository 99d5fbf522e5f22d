"""The graph that autograd has recorded behind some tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def nodes(values: Sequence[Tensor]) -> set[Any]:
    """Every node of the graph of `values`."""
    found: set[Any] = {value.grad_fn for value in values if value.grad_fn is not None}
    pending = list(found)
    while pending:
        later = {node for node, _ in pending.pop().next_functions if node is not None} - found
        found |= later
        pending += later
    return found
