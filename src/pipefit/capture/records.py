"""Dataclasses and mappings as torch's trees see them: what a batch or a model's outputs may be made of.

torch's trees know tuples, lists, dictionaries and the classes that were registered with them, as Hugging Face registers
its outputs. Any other dataclass is opened to a `Record` of its fields, and closed to an equal one for whoever is to be
given it; any other mapping, as a tokenizer returns, becomes a dictionary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch.utils import _pytree as pytree


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
    serialized_type_name="pipefit.capture.records.Record",
    flatten_with_keys_fn=_flatten_with_keys,
)
