"""Which storages an operation is given, and which it changes in place, by its schema: whatever alias they came by,
`x.data` too.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from pipefit.capture.refusals import Refusal
from pipefit.capture.storages import storage_key


def changed_arguments(func: Any) -> set[str]:
    """Their names; none for an operation that changes nothing."""
    return {one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write}


def written_storages(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """The storages of tensors that a call of `func` changes in place."""
    if not func._schema.is_mutable:
        return set()
    given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    leaves = pytree.tree_leaves([given.get(name) for name in changed_arguments(func)])
    return {storage_key(leaf) for leaf in leaves if isinstance(leaf, Tensor)}


def given_storages(args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """The storages of all tensors among the arguments of an operation."""
    return {storage_key(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}


def changed_inputs(inputs: Sequence[Tensor], versions: Sequence[int], written: Set[int]) -> frozenset[int]:
    """The numbers of the inputs that a forward has changed, by their versions before it.

    Raises:
        Refusal: it changed one, as the storages say that it has `written` to, and no version tells.
    """
    changed = frozenset(number for number, value in enumerate(inputs) if value._version != versions[number])
    if any(storage_key(value) in written for number, value in enumerate(inputs) if number not in changed):
        raise Refusal(
            "its forward changes what it is given where autograd does not see it (x.data), and what the layer before "
            "has saved of that would stay as it was where a stage ends between them",
            "change it under torch.no_grad(), or compute with a clone",
        )
    return changed
