"""Where to cut a traced model: into fine layers, and into blocks of them, between which a stage may end.

Every operation belongs to a unit: a module of the size that the granularity asks for. Between two units that hold
parameters a block ends in one place, where the fewest bytes cross; of several such places the last, so that equal units
become equal blocks. Operations without parameters (reshapes, masks, dropout, the loss) join a neighbouring block. A
place where many times more bytes cross than at the next one is given up.

Layers are finer. One ends wherever the innermost module changes, and where one module goes on to a further parameter;
but two uses of a parameter in one block stay in one layer. They are the same for every granularity, and so are the
random numbers that they draw. Linear in the number of operations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

from torch import fx, nn

from pipefit.capture.flat import nbytes, plain, role, stack
from pipefit.capture.flow import Flow, sums
from pipefit.capture.task import Granularity
from pipefit.profiles import Block

_FAR_MORE = 4  # times the bytes of the next cut
_LITTLE = 1000  # only a cut next to a piece with less than one in so many of all parameters is given up for that
_SMALL = 100  # what has less than one in so many of the largest unit's parameters joins a neighbour
_WAIST = 1.25  # times the bytes around a unit may cross between the blocks inside it
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class Piece(NamedTuple):
    """Operations `start` to `stop - 1`, to become the layer `name`."""

    start: int
    stop: int
    name: str


class Pieces(NamedTuple):
    """The layers to be, in order, and the blocks that they form."""

    layers: tuple[Piece, ...]
    blocks: tuple[Block, ...]


def pieces(flow: Flow, module: nn.Module, granularity: Granularity) -> Pieces:
    """The layers of a model, and the blocks that a granularity makes of them."""
    blocks, halves = (_Runs(flow, _Units(flow, module, deeper=deeper)) for deeper in (False, True))
    is_free = _free(flow, blocks.cuts)
    finer = sorted({*blocks.cuts, *(cut for cut in halves.cuts if is_free[cut])})
    cuts = sorted({*finer, *(cut for cut in _changes(flow) if is_free[cut])})
    layers = tuple(_named(flow, cuts, partial(_innermost, flow)))
    if granularity == "layers":
        return Pieces(layers, tuple(Block(name=layer.name, layers=1) for layer in layers))
    runs, ends = (blocks, blocks.cuts) if granularity == "blocks" else (halves, finer)
    starts = [layer.start for layer in layers]
    found = [
        Block(
            name=name,
            layers=bisect_left(starts, stop) - bisect_left(starts, start),
            undivided="; ".join(reason for place, reason in runs.undivided if start < place < stop),
        )
        for start, stop, name in _named(flow, ends, runs.name)
    ]
    return Pieces(layers, tuple(found))


def _named(flow: Flow, cuts: Sequence[int], name: Callable[[int, int], str]) -> Iterator[Piece]:
    """The pieces between cuts, each by the name of its operations, and a number where the name was there before."""
    met: dict[str, int] = {}
    for start, stop in pairwise([0, *(cut + 1 for cut in cuts), len(flow.order)]):
        own = plain(name(start, stop)) or "model"
        count = met[own] = met.get(own, -1) + 1
        yield Piece(start, stop, f"{own}@{count}" if count else own)


def _changes(flow: Flow) -> Iterator[int]:
    """The cuts at which the innermost module changes, or goes on to a further parameter."""
    met: set[fx.Node] = set()
    for cut, (before, after) in enumerate(pairwise(flow.order)):
        met |= _parameters(flow, before)
        goes_on = bool(met) and not _parameters(flow, after) <= met
        if flow.legal[cut] and (goes_on or stack(before)[-1:] != stack(after)[-1:]):
            yield cut
            met.clear()


def _innermost(flow: Flow, start: int, stop: int) -> str:
    """The innermost module of the operations that use the most parameters, or of the first one."""
    nodes = flow.order[start:stop]
    most = max(nodes, key=lambda node: sum(map(nbytes, _parameters(flow, node))))
    return "".join(stack(most)[-1:]) or _root_parameter(flow, nodes)


def _root_parameter(flow: Flow, nodes: Sequence[fx.Node]) -> str:
    """The largest parameter that operations use outside of every module; empty where they use none."""
    used = {parameter for node in nodes if not any(stack(node)) for parameter in _parameters(flow, node)}
    largest = max(used, key=nbytes, default=None)
    found = None if largest is None else role(largest)
    return found.name if found else ""


def _free(flow: Flow, block_cuts: Sequence[int]) -> list[bool]:
    """Whether each cut leaves all that a block does with a parameter, buffer or constant in one layer."""
    last: dict[fx.Node, int] = {}
    closed = []
    for number, node in enumerate(flow.order):
        for source in flow.needs(node):
            if (meaning := role(source)) is None or meaning.kind == "input":
                continue
            before = last.get(source, number)
            if bisect_left(block_cuts, before) == bisect_left(block_cuts, number):
                closed.append((before, number - 1, 1))
            last[source] = number
    return [count == 0 for count in sums(len(flow.order), closed)]


class _Units:
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


class _Runs:
    """Consecutive operations of one unit, and the parameters that each operation is the first to use."""

    def __init__(self, flow: Flow, units: _Units) -> None:
        self.flow, self.units, self.deeper = flow, units.of_all, units.deeper
        self.undivided: list[
            tuple[int, str]
        ] = []  # the first operations of units that no cut parts from the one before
        met: set[fx.Node] = set()
        self.weights: list[int] = []  # parameter bytes first needed by each operation
        for node in self.flow.order:
            fresh = _parameters(self.flow, node) - met
            met |= fresh
            self.weights.append(sum(map(nbytes, fresh)))
        self.total = sum(self.weights)
        self.cuts = self._worthwhile(list(self._cheapest()))

    def _cheapest(self) -> Iterator[int]:
        """One cut between any two neighbouring units with parameters, if there is one."""
        for (_, end), (start, _) in pairwise(self._heavy()):
            candidates = [cut for cut in range(end, start) if self.flow.legal[cut]]
            if candidates:
                yield min(candidates, key=lambda cut: (self.flow.cost[cut], -cut))
            else:
                one, other = (plain(self.units[number]) or "the model" for number in (end, start))
                self.undivided.append((start, f"{one} and {other}: {self.flow.obstacle(start - 1)}"))

    def name(self, start: int, stop: int) -> str:
        """The unit that uses the most parameters in a piece."""
        used: dict[str, set[fx.Node]] = {}
        for unit, node in zip(self.units[start:stop], self.flow.order[start:stop], strict=True):
            if unit:
                used.setdefault(unit, set()).update(_parameters(self.flow, node))
        most = max(used, key=lambda unit: sum(map(nbytes, used[unit])), default="")
        return most or _root_parameter(self.flow, self.flow.order[start:stop])

    def _heavy(self) -> list[tuple[int, int]]:
        """First and last operation of every run of a unit that uses parameters."""
        found: list[tuple[int, int]] = []
        previous, light = None, self._light()
        for number, (unit, node) in enumerate(zip(self.units, self.flow.order, strict=True)):
            uses = plain(unit) not in light and bool(_parameters(self.flow, node))
            if uses and unit == previous:
                found[-1] = (found[-1][0], number)
            elif uses:
                found.append((self._begin(number), number))
                previous = unit
        ends = [self._end(last) for _, last in found]
        return [(first, end) for (first, _), end in zip(found, ends, strict=True)]

    def _light(self) -> set[str]:
        """The units too small to be blocks, by their parameters; of whole modules only what is outside of them."""
        sizes: dict[str, int] = {}
        for unit, weight in zip(self.units, self.weights, strict=True):
            sizes[plain(unit)] = sizes.get(plain(unit), 0) + weight
        largest = max(sizes.values(), default=0)
        small = {unit for unit, size in sizes.items() if size * _SMALL < largest}
        return small if self.deeper else small & {""}

    def _begin(self, number: int) -> int:
        """The first operation of the run that `number` is in."""
        while number and self.units[number - 1] == self.units[number]:
            number -= 1
        return number

    def _end(self, number: int) -> int:
        while number + 1 < len(self.units) and self.units[number + 1] == self.units[number]:
            number += 1
        return number

    def _worthwhile(self, cuts: list[int]) -> list[int]:
        """The cuts, without those where far more bytes cross than at a neighbour with hardly any parameters between."""
        kept = list(cuts)
        for cut in sorted(cuts, key=self.flow.cost.__getitem__, reverse=True):
            place = kept.index(cut)
            for other in kept[max(place - 1, 0) : place] + kept[place + 1 : place + 2]:
                between = sum(self.weights[min(cut, other) + 1 : max(cut, other) + 1])
                if self.flow.cost[cut] > _FAR_MORE * self.flow.cost[other] and between * _LITTLE < self.total:
                    kept.remove(cut)
                    break
        return kept


def _parameters(flow: Flow, node: fx.Node) -> set[fx.Node]:
    return {source for source in flow.needs(node) if (meaning := role(source)) and meaning.kind == "parameter"}
