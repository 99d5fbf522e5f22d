"""Structure of a model's inputs and outputs: tuples, dictionaries, output classes of libraries.

Between layers there are only tuples of tensors; a `Tree` converts the user's structures to tuples and back.
Leaves that are not tensors (numbers, flags, None) are settings of the model: they are recorded, and checked
to stay equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from pipefit.capture.storages import Orders, laid_out, sample_order
from pipefit.errors import UsageError
from pipefit.texts import dtype_name
from pipefit.torch_internals import pytree

# ---- Dataclasses and mappings in batches and outputs
#
# torch's trees know tuples, lists, dictionaries and registered classes, such as Hugging Face's outputs. Other
# dataclasses are opened to a `OpenedDataclass` of their fields, and closed to an equal dataclass for the
# user's code; other mappings, such as a tokenizer's, become dictionaries.


class OpenedDataclass:
    """An opened dataclass: its class and its fields."""

    def __init__(self, kind: type, items: Mapping[str, Any]) -> None:
        self.kind, self.items = kind, dict(items)


def opened(tree: Any) -> Any:
    """Return `tree` with dataclasses as records and mappings as dictionaries."""
    return pytree.tree_map(_opened, tree)


def closed(tree: Any) -> Any:
    """Return `tree` with records as dataclasses, without another call of `__post_init__`."""
    return pytree.tree_map(_closed, tree, is_leaf=lambda part: isinstance(part, OpenedDataclass))


def _opened(leaf: Any) -> Any:
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return OpenedDataclass(
            type(leaf), {field.name: opened(getattr(leaf, field.name)) for field in fields(leaf)}
        )
    return {key: opened(item) for key, item in leaf.items()} if isinstance(leaf, Mapping) else leaf


def _closed(leaf: Any) -> Any:
    if not isinstance(leaf, OpenedDataclass):
        return leaf
    made: Any = object.__new__(leaf.kind)
    for name, item in leaf.items.items():
        object.__setattr__(made, name, closed(item))
    return made


def _flatten(record: OpenedDataclass) -> tuple[list[Any], tuple[type, tuple[str, ...]]]:
    return list(record.items.values()), (record.kind, tuple(record.items))


def _flatten_with_keys(record: OpenedDataclass) -> tuple[list[tuple[Any, Any]], tuple[type, tuple[str, ...]]]:
    return [(pytree.GetAttrKey(name), item) for name, item in record.items.items()], _flatten(record)[1]


def _unflatten(items: Iterable[Any], context: tuple[type, tuple[str, ...]]) -> OpenedDataclass:
    return OpenedDataclass(context[0], dict(zip(context[1], items, strict=True)))


pytree.register_pytree_node(
    OpenedDataclass,
    _flatten,
    _unflatten,
    serialized_type_name="pipefit.capture.structure.Record",
    flatten_with_keys_fn=_flatten_with_keys,
)


# ---- Trees


def named_tensors(batch: tuple[Any, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a batch with their names, such as `inputs['x']`."""
    for what, tree in zip(("inputs", "targets"), batch, strict=True):
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
            if isinstance(leaf, Tensor):
                yield f"{what}{pytree.keystr(path)}", leaf


Values = tuple[Tensor, ...]
_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


@dataclass(frozen=True, slots=True)
class Tree:
    """The structure of `what` (the inputs, the outputs).

    - `taken` numbers the leaves that are passed as tensors, in the flat tuple's order; `leaves` holds the
      others.
    - `plain` says that the tree is a tensor, or a tuple or list of tensors, which may replace each other.
    - `texts` describes every leaf in words, a tensor with `n` for the number of samples.
    - `lengths` are the distinct lengths of integer sequences, such as tokens.
    - `orders` are the memory orders of the tensors' dimensions.
    """

    what: str
    spec: pytree.TreeSpec
    taken: tuple[int, ...]
    leaves: tuple[Any, ...]
    plain: bool = False  # a tensor, or a tuple or list of tensors
    texts: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    orders: Orders = ()

    @staticmethod
    def of(what: str, tree: Any) -> Tree:
        """Return the structure of `tree`, all of whose tensors are taken.

        Raises:
            UsageError: the tree has no tensor, or a leaf is neither tensor, number, string, flag nor None.
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
        """Return the tensors of `tree`.

        Raises:
            UsageError: `tree` has another structure. The message says what differs.
        """
        leaves, spec = pytree.tree_flatten(self._ordered(tree))
        if self.plain and len(leaves) == len(self.taken) and _is_flat(tree):
            return tuple(leaves)
        if spec != self.spec:
            raise UsageError(
                f"{self.what} changed: the model was captured with {_described(self.spec)}, not "
                f"{_described(spec)}. Give all batches the same structure"
            )
        for number, (leaf, constant) in enumerate(zip(leaves, self.leaves, strict=True)):
            if isinstance(leaf, Tensor):
                continue
            if number in self.taken or type(leaf) is not type(constant) or leaf != constant:
                raise UsageError(
                    f"{self.what} changed: {leaf!r}, but the model was captured with "
                    f"{'a tensor' if number in self.taken else repr(constant)}. Give all batches the same "
                    "structure"
                )
        return tuple(leaves[number] for number in self.taken)

    def laid_out(self, tree: Any) -> Values:
        """Return the tensors of `tree`, laid out in memory as at capture, so that the same kernels run.

        Raises:
            UsageError: `tree` has another structure. The message says what differs.
        """
        pairs = zip(self.flatten(tree), self.orders, strict=True)
        # Other dimensions, and sparse or nested tensors, are refused in the comparison with the plan
        return tuple(
            laid_out(tensor, order if tensor.ndim == len(order) else ()) if _is_plain(tensor) else tensor
            for tensor, order in pairs
        )

    def rebuild(self, values: Sequence[Tensor]) -> Any:
        """Return a tree of this structure that holds the tensors `values`."""
        leaves = list(self.leaves)
        for number, tensor in zip(self.taken, values, strict=True):
            leaves[number] = tensor
        return closed(pytree.tree_unflatten(leaves, self.spec))

    def _ordered(self, tree: Any) -> Any:
        """Return a dictionary with its keys in the order of the capture."""
        if self.spec.type is dict and isinstance(tree, Mapping) and set(tree) == set(self.spec.context):
            return {key: tree[key] for key in self.spec.context}
        return tree


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _is_flat(tree: Any) -> bool:
    """Return whether `tree` is a tensor, or a tuple or list of tensors."""
    return isinstance(tree, Tensor) or (
        isinstance(tree, tuple | list) and all(isinstance(t, Tensor) for t in tree)
    )


def tensors(tree: Any, what: str) -> Values:
    """Return the tensors of `tree`; empty for None, the targets of a model that computes its loss."""
    return () if tree is None else Tree.of(what, tree).flatten(tree)


def _texts(tree: Any) -> tuple[str, ...]:
    """Return every leaf in words, after its path in the tree; a tensor alone does not have a path."""
    named, _ = pytree.tree_flatten_with_path(tree)
    return tuple(f"{pytree.keystr(place)} {_text(leaf)}".strip() for place, leaf in named)


def _lengths(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Return the distinct lengths of integer tensors of shape (samples, length)."""
    rows = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim == 2)
    return tuple(sorted({row.shape[1] for row in rows if row.dtype in _WHOLE}))


def _text(leaf: Any) -> str:
    """Return a tensor's dtype and shape, with `n` for the number of samples; the repr of other values."""
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
