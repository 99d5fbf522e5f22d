"""The units of a traced model: which module, of the size of a block or of half a block, each operation belongs to.

A block is a part of a container whose parts are of one class, such as transformer.h.3, or a module without blocks
inside. A module that does most of the model is split into its parts. Linear in the number of operations and modules.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
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
        self._holds = with_blocks(self.modules)
        self._of_blocks = frozenset(path for path, part in self.modules.items() if self._parts_are_blocks(path, part))

    @cached_property
    def of_all(self) -> list[str]:
        """The unit of each operation; "" for those of no unit."""
        found, lone = self._found(frozenset()), frozenset[str]()
        while more := self._too_large(found) - lone:  # a module that is most of the model is split into its parts
            lone |= more
            found = self._found(lone)
        return found

    def _found(self, lone: frozenset[str]) -> list[str]:
        units = {path: self._of(path, lone) for path in self._paths}
        return [units[stack(node)] for node in self.flow.order]

    @cached_property
    def _paths(self) -> frozenset[tuple[str, ...]]:
        """The modules that operations ran in: one path for all operations of one innermost module."""
        return frozenset(stack(node) for node in self.flow.order)

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
        module = self.modules.get(path)
        if module is None or _parent(path) in self._of_blocks:
            return True
        return path not in self._holds and not isinstance(module, _CONTAINERS)

    def _parts_are_blocks(self, path: str, module: nn.Module) -> bool:
        """Whether it is a container whose parts are blocks: all of one class, or without blocks inside."""
        if not isinstance(module, _CONTAINERS):
            return False
        classes = [type(part) for part in module.children()]
        inside = (f"{path}.{name}" if path else name for name, _ in module.named_children())
        return (len(set(classes)) == 1 and len(classes) > 1) or self._holds.isdisjoint(inside)

    def _too_large(self, units: Sequence[str]) -> frozenset[str]:
        """Units with parts of their own that hold more than half of all operations."""
        return frozenset(
            unit
            for unit, count in Counter(units).items()
            if unit
            and count > len(units) / 2
            and any(True for _ in self.modules[plain(unit)].children())
            and not isinstance(self.modules.get(_parent(unit)), _CONTAINERS)
        )

    @cached_property
    def _rows(self) -> frozenset[str]:
        """The containers inside units whose parts are blocks in a row: between them no more crosses than around.

        So the stages of a vision model are divided; the experts of a block are not, nor is what a shortcut leaps over.
        """
        around, spans, found = self._around_containers(), self._spans(), set[str]()
        calls = defaultdict[str, list[tuple[int, int]]](list)
        for part, span in spans.items():
            calls[_parent(part)].append(span)
        for container in sorted(around, key=lambda path: path.count(".")):
            units = {self._innermost(path, found) for path in around[container]} - {""}
            if len(units) == 1 and self._is_row(container, spans[units.pop()], sorted(calls[container])):
                found.add(container)
        return frozenset(found)

    def _around_containers(self) -> Mapping[str, set[tuple[str, ...]]]:
        """For every module with parts that ran, the modules around its parts, outermost first, in each of its calls."""
        found = defaultdict[str, set[tuple[str, ...]]](set)
        for path in {tuple(filter(None, path)) for path in self._paths}:
            first: dict[str, int] = {}
            for n, part in enumerate(path):
                first.setdefault(_parent(part), n)
            for container, n in first.items():
                if container:
                    found[container].add(path[:n])
        return found

    def _innermost(self, path: tuple[str, ...], rows: set[str]) -> str:
        """The innermost unit, or block in a row, of a path; empty where there is none."""
        return next((part for part in reversed(path) if _parent(part) in rows or self._is_unit(part)), "")

    def _spans(self) -> dict[str, tuple[int, int]]:
        """The first and last operation of every call of a module."""
        found: dict[str, tuple[int, int]] = {}
        for number, node in enumerate(self.flow.order):
            for part in filter(None, stack(node)):
                found[part] = found.get(part, (number, number))[0], number
        return found

    def _is_row(self, container: str, around: tuple[int, int], calls: Sequence[tuple[int, int]]) -> bool:
        """Whether nothing more crosses between these calls of a container's parts than around the unit they are in."""
        module = self.modules.get(container)
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


def with_blocks(modules: Mapping[str, nn.Module]) -> frozenset[str]:
    """The modules with blocks inside, or that hold some: a container of modules that have parts themselves."""
    found = set[str]()
    for path, module in modules.items():
        if isinstance(module, _CONTAINERS) and any(True for part in module.children() for _ in part.children()):
            around = path
            while around not in found:
                found.add(around)
                around = around.rpartition(".")[0]
    return frozenset(found)
