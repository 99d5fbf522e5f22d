"""The shape of what goes into a model and comes out of it: tuples, dictionaries, a library's own output classes.

Between layers there are only tuples of tensors; a `Tree` turns what the user has into that and back. Leaves that are no
tensors (numbers, flags, None) are settings of the model: remembered, and checked to be the same ever after.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipefit.capture.storages import Orders, laid_out, sample_order
from pipefit.errors import UsageError
from pipefit.texts import dtype_name

# ----------------------------------------------------------------------------------------------------
# Dataclasses and mappings as torch's trees see them: what a batch or a model's outputs may be made of.
#
# torch's trees know tuples, lists, dictionaries and the classes that were registered with them, as Hugging
# Face registers its outputs. Any other dataclass is opened to a `Record` of its fields, and closed to an
# equal one for whoever is to be given it; any other mapping, as a tokenizer returns, becomes a dictionary.


class Record:
    """A dataclass, opened: its class and its fields."""

    def __init__(self, kind: type, items: Mapping[str, Any]) -> None:
        self.kind, self.items = kind, dict(items)


def opened(tree: Any) -> Any:
    """`tree` without dataclasses and mappings that torch's trees do not know."""
    return pytree.tree_map(_opened, tree)


def closed(tree: Any) -> Any:
    """`tree` with dataclasses in the place of records. Their `__post_init__` is not called: it has been."""
    return pytree.tree_map(_closed, tree, is_leaf=lambda part: isinstance(part, Record))


def _opened(leaf: Any) -> Any:
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return Record(type(leaf), {field.name: opened(getattr(leaf, field.name)) for field in fields(leaf)})
    return {key: opened(item) for key, item in leaf.items()} if isinstance(leaf, Mapping) else leaf


def _closed(leaf: Any) -> Any:
    if not isinstance(leaf, Record):
        return leaf
    made: Any = object.__new__(leaf.kind)
    for name, item in leaf.items.items():
        object.__setattr__(made, name, closed(item))
    return made


def _flatten(record: Record) -> tuple[list[Any], tuple[type, tuple[str, ...]]]:
    return list(record.items.values()), (record.kind, tuple(record.items))


def _flatten_with_keys(record: Record) -> tuple[list[tuple[Any, Any]], tuple[type, tuple[str, ...]]]:
    return [(pytree.GetAttrKey(name), item) for name, item in record.items.items()], _flatten(record)[1]


def _unflatten(items: Iterable[Any], context: tuple[type, tuple[str, ...]]) -> Record:
    return Record(context[0], dict(zip(context[1], items, strict=True)))


pytree.register_pytree_node(
    Record,
    _flatten,
    _unflatten,
    serialized_type_name="pipefit.capture.structure.Record",
    flatten_with_keys_fn=_flatten_with_keys,
)


# ----------------------------------------------------------------------------------------------------

Values = tuple[Tensor, ...]
_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


@dataclass(frozen=True, slots=True)
class Tree:
    """What `what` (the inputs, the outputs) look like.

    `taken` numbers the leaves that are handed over as tensors, in the flat tuple's order; `leaves` holds the others.
    `texts` has every leaf in words, a tensor with the shape of `n` samples; `lengths` the lengths of sequences of whole
    numbers, such as tokens, each once; `orders` those in which dimensions of the tensors lie in memory.
    """

    what: str
    spec: pytree.TreeSpec
    taken: tuple[int, ...]
    leaves: tuple[Any, ...]
    plain: bool = False  # a tensor, or a tuple or list of tensors: either will do for the other
    texts: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    orders: Orders = ()

    @staticmethod
    def of(what: str, tree: Any) -> Tree:
        """The shape of `tree`, all of whose tensors are taken.

        Raises:
            UsageError: there is no tensor, or a leaf is neither tensor, number, text, flag nor None.
        """
        leaves, spec = pytree.tree_flatten(tree)
        taken = tuple(number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        constants = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        strange = next((leaf for leaf in constants if not isinstance(leaf, int | float | str | None)), None)
        empty = isinstance(tree, tuple | list | dict) and not tree
        if strange is not None or (not taken and not empty):
            raise UsageError(
                f"{what} of a batch must be a tensor, or a tuple or dictionary of tensors, not a "
                f"{type(tree if strange is None else strange).__name__}"
                f"{'; convert it with torch.as_tensor' if hasattr(strange, '__array__') else ''}"
            )
        orders = tuple(sample_order(leaves[number]) for number in taken)
        return Tree(what, spec, taken, constants, _is_flat(tree), _texts(tree), _lengths(leaves), orders)

    def flatten(self, tree: Any) -> Values:
        """The tensors of `tree`.

        Raises:
            UsageError: it is not of this shape; says what differs.
        """
        leaves, spec = pytree.tree_flatten(self._ordered(tree))
        if self.plain and len(leaves) == len(self.taken) and _is_flat(tree):
            return tuple(leaves)
        if spec != self.spec:
            raise UsageError(
                f"{self.what} changed: the model was captured with {_described(self.spec)}, not {_described(spec)}; "
                "give all batches one form"
            )
        for number, (leaf, constant) in enumerate(zip(leaves, self.leaves, strict=True)):
            if isinstance(leaf, Tensor):
                continue
            if number in self.taken or type(leaf) is not type(constant) or leaf != constant:
                raise UsageError(
                    f"{self.what} changed: {leaf!r} where the model was captured with "
                    f"{'a tensor' if number in self.taken else repr(constant)}; give all batches one form"
                )
        return tuple(leaves[number] for number in self.taken)

    def laid_out(self, tree: Any) -> Values:
        """The tensors of `tree`, which lie in memory as they did at capture, so that kernels take the same ways.

        Raises:
            UsageError: it is not of this shape; says what differs.
        """
        pairs = zip(self.flatten(tree), self.orders, strict=True)
        # What has other dimensions, or is sparse or nested, is refused where it is held to the plan's
        return tuple(
            laid_out(tensor, order if tensor.ndim == len(order) else ()) if _is_plain(tensor) else tensor
            for tensor, order in pairs
        )

    def rebuild(self, values: Sequence[Tensor]) -> Any:
        """A tree of this shape with the tensors `values` in it."""
        leaves = list(self.leaves)
        for number, tensor in zip(self.taken, values, strict=True):
            leaves[number] = tensor
        return closed(pytree.tree_unflatten(leaves, self.spec))

    def _ordered(self, tree: Any) -> Any:
        """A dictionary in the order of its keys at capture."""
        if self.spec.type is dict and isinstance(tree, Mapping) and set(tree) == set(self.spec.context):
            return {key: tree[key] for key in self.spec.context}
        return tree


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _is_flat(tree: Any) -> bool:
    """Whether it is a tensor, or a tuple or list of tensors."""
    return isinstance(tree, Tensor) or (isinstance(tree, tuple | list) and all(isinstance(t, Tensor) for t in tree))


def tensors(tree: Any, what: str) -> Values:
    """The tensors of `tree`; none of None, as targets are where the model computes its own loss."""
    return () if tree is None else Tree.of(what, tree).flatten(tree)


def _texts(tree: Any) -> tuple[str, ...]:
    """Every leaf in words, behind its place in the tree; a tensor alone has none."""
    named, _ = pytree.tree_flatten_with_path(tree)
    return tuple(f"{pytree.keystr(place)} {_text(leaf)}".strip() for place, leaf in named)


def _lengths(leaves: Sequence[Any]) -> tuple[int, ...]:
    """The different lengths of tensors of whole numbers, (samples, length)."""
    rows = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim == 2)
    return tuple(sorted({row.shape[1] for row in rows if row.dtype in _WHOLE}))


def _text(leaf: Any) -> str:
    """A tensor's dtype and shape, with `n` for the number of samples; other values as they are."""
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    strides = leaf.stride()
    order = sorted(range(leaf.ndim), key=lambda dimension: -strides[dimension])
    lying = "" if leaf.is_contiguous() else f", dimensions in memory in the order {tuple(order)}"
    shape = ", ".join(("n", *map(str, leaf.shape[1:])))
    return f"{dtype_name(leaf.dtype)} ({shape}{',' * (leaf.ndim < 2)}){lying}"


def _described(spec: pytree.TreeSpec) -> str:
    kind = "a tensor" if spec.type is None else f"a {getattr(spec.type, '__name__', spec.type)}"
    if spec.type is dict:
        return f"{kind} with {', '.join(map(str, spec.context))}"
    return f"{kind} of {spec.num_leaves}" if spec.num_leaves > 1 else kind
