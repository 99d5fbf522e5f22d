"""The units of a traced model: which module, of the size of a block or of half a block, each operation belongs to.

A block is a part of a container whose parts are of one class, such as transformer.h.3, or a module without blocks
inside. A module that does most of the model is split into its parts. Linear in the number of operations and modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

from torch import nn

from pipefit.capture.flat import plain, stack
from pipefit.capture.flow import Flow

_WAIST = 1.25  # times the bytes around a unit may cross between the blocks inside it
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class Units:
    """For every operation the unit it belongs to: one of the modules that it ran in."""

    def __init__(self, flow: Flow, module: nn.Module, *, deeper: bool) -> None:
        self.flow, self.deeper = flow, deeper
        self.modules = dict(module.named_modules(remove_duplicate=False))
        self._holds = {path: _has_blocks(part) for path, part in self.modules.items()}

    @cached_property
    def of_all(self) -> list[str]:
        """The unit of each operation; "" for those of no unit."""
        found, lone = self._found(frozenset()), frozenset[str]()
        while more := self._too_large(found) - lone:  # a module that is most of the model is split into its parts
            lone |= more
            found = self._found(lone)
        return found

    def _found(self, lone: frozenset[str]) -> list[str]:
        return [self._of(stack(node), lone) for node in self.flow.order]

    def _of(self, path: Sequence[str], lone: frozenset[str]) -> str:
        """The unit of an operation that ran in the modules of `path`."""
        inside = [part for part in path if part]
        depth = next((n for n, part in enumerate(inside) if part not in lone and self._is_unit(part)), None)
        if depth is None:
            return ""
        depth = max((n for n, part in enumerate(inside) if _parent(part) in self._rows), default=depth)
        return inside[depth + 1] if self.deeper and depth + 1 < len(inside) else inside[depth]

    def _is_unit(self, path: str) -> bool:
        path = plain(path)
        module, parent = self.modules.get(path), self.modules.get(_parent(path))
        if module is None:
            return True
        if isinstance(parent, _CONTAINERS) and _alike(parent):
            return True
        return not self._holds[path] and not isinstance(module, _CONTAINERS)

    def _too_large(self, units: Sequence[str]) -> frozenset[str]:
        """Units with parts of their own that hold more than half of all operations."""
        return frozenset(
            unit
            for unit in set(units) - {""}
            if units.count(unit) > len(units) / 2
            and any(True for _ in self.modules[plain(unit)].children())
            and not isinstance(self.modules.get(_parent(unit)), _CONTAINERS)
        )

    @cached_property
    def _rows(self) -> frozenset[str]:
        """The containers inside units whose parts are blocks in a row: between them no more crosses than around.

        So the stages of a vision model are divided; the experts of a block are not, nor is what a shortcut leaps over.
        """
        paths = {tuple(part for part in stack(node) if part) for node in self.flow.order}
        spans, found = self._spans(), set[str]()
        inside = {_parent(part) for path in paths for part in path} - {""}
        for container in sorted(inside, key=lambda path: path.count(".")):
            around = {self._around(path, container, found) for path in paths} - {""}
            if len(around) == 1 and self._is_row(container, spans[around.pop()], spans):
                found.add(container)
        return frozenset(found)

    def _around(self, path: tuple[str, ...], container: str, rows: set[str]) -> str:
        """The innermost unit, or block in a row, that a container in it is part of; empty where there is none."""
        here = next((n for n, part in enumerate(path) if _parent(part) == container), 0)
        return next((p for p in reversed(path[:here]) if _parent(p) in rows or self._is_unit(p)), "")

    def _spans(self) -> dict[str, tuple[int, int]]:
        """The first and last operation of every call of a module."""
        found: dict[str, tuple[int, int]] = {}
        for number, node in enumerate(self.flow.order):
            for part in stack(node):
                found[part] = found.get(part, (number, number))[0], number
        return found

    def _is_row(self, container: str, around: tuple[int, int], spans: dict[str, tuple[int, int]]) -> bool:
        module = self.modules.get(container)
        calls = sorted(span for part, span in spans.items() if part and _parent(part) == container)
        if len(calls) < 2 or not isinstance(module, _CONTAINERS) or not _are_blocks(list(module.children())):
            return False
        cost, count, ends = self.flow.cost, self.flow.count, [end for end in (around[0] - 1, around[1]) if end >= 0]
        bytes_around, count_around = max(cost[end] for end in ends), max(count[end] for end in ends)
        return all(
            any(
                self.flow.legal[cut] and cost[cut] <= _WAIST * bytes_around and count[cut] <= count_around
                for cut in range(before, after)
            )
            for (_, before), (after, _) in pairwise(calls)
        )


def _are_blocks(parts: Sequence[nn.Module]) -> bool:
    """Whether they are of one class, and have parts of their own."""
    return len({type(part) for part in parts}) == 1 and any(True for _ in parts[0].children())


def _parent(path: str) -> str:
    return plain(path).rpartition(".")[0]


def _has_blocks(module: nn.Module) -> bool:
    """Whether there are blocks inside: a container of modules that have parts themselves."""
    return any(
        isinstance(part, _CONTAINERS) and any(True for child in part.children() for _ in child.children())
        for part in module.modules()
    )


def _alike(container: nn.Module) -> bool:
    """Whether the parts of a container are blocks: all of one class, or without blocks inside."""
    children = list(container.children())
    return (len({type(child) for child in children}) == 1 and len(children) > 1) or not any(map(_has_blocks, children))
