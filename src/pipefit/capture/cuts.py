"""Where to cut a traced model into layers: between its own modules, where few bytes cross.

Every operation belongs to a unit: a module of the size that the granularity asks for. Between two units that hold
parameters there is one cut, where the fewest bytes cross; of several such places the last, so that equal blocks become
equal layers. Operations without parameters (reshapes, masks, dropout, the loss) join a neighbouring layer. A cut where
many times more bytes cross than at the next one is given up. Linear in the number of operations.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx, nn

from pipefit.capture.flat import nbytes, plain, role, stack
from pipefit.capture.flow import Flow
from pipefit.capture.task import Granularity

_FAR_MORE = 4  # times the bytes of the next cut
_LITTLE = 1000  # only a cut next to a piece with less than one in so many of all parameters is given up for that
_HALF = 100  # a part of a block with less than one in so many of the largest part's parameters joins a neighbour
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Operations `start` to `stop - 1`, to become the layer `name`."""

    start: int
    stop: int
    name: str


def pieces(flow: Flow, module: nn.Module, granularity: Granularity) -> tuple[Piece, ...]:
    """The layers to be, in order."""
    if granularity == "operations":
        cuts = [cut for cut in range(len(flow.order) - 1) if flow.legal[cut]]
        units = [stack(node)[-1] if stack(node) else "" for node in flow.order]
        names = [units[cut] for cut in (*cuts, len(units) - 1)]
        return _named([0, *(cut + 1 for cut in cuts), len(units)], names)
    units = _Units(module, granularity).of_all(flow.order)
    runs = _Runs(flow, units, least=_HALF if granularity == "halves" else 0)
    cuts = runs.cuts()
    bounds = [0, *(cut + 1 for cut in cuts), len(flow.order)]
    return _named(bounds, [runs.name(start, stop) for start, stop in itertools.pairwise(bounds)])


def _named(bounds: Sequence[int], names: Sequence[str]) -> tuple[Piece, ...]:
    met: dict[str, int] = {}
    found = []
    for start, stop, unit in zip(bounds, bounds[1:], names, strict=False):
        name = plain(unit) or "model"
        count = met[name] = met.get(name, -1) + 1
        found.append(Piece(start=start, stop=stop, name=f"{name}@{count}" if count else name))
    return tuple(found)


class _Units:
    """For every operation the unit it belongs to: one of the modules that it ran in."""

    def __init__(self, module: nn.Module, granularity: Granularity) -> None:
        self.modules = dict(module.named_modules(remove_duplicate=False))
        self.deeper = granularity == "halves"
        self._holds = {path: _has_blocks(part) for path, part in self.modules.items()}

    def of_all(self, order: Sequence[fx.Node]) -> list[str]:
        """The unit of each operation; "" for those of no unit."""
        lone = self._too_large([self.of(stack(node), frozenset()) for node in order])
        while lone:  # a module that is most of the model is split into its parts
            found = [self.of(stack(node), lone) for node in order]
            more = self._too_large(found) | lone
            if more == lone:
                return found
            lone = more
        return [self.of(stack(node), lone) for node in order]

    def of(self, path: Sequence[str], lone: frozenset[str]) -> str:
        """The unit of an operation that ran in the modules of `path`."""
        inside = [part for part in path if part]
        for depth, part in enumerate(inside):
            if part in lone or not self._is_unit(part):
                continue
            below = inside[depth + 1] if self.deeper and depth + 1 < len(inside) else ""
            return below or part
        return ""

    def _is_unit(self, path: str) -> bool:
        path = plain(path)
        module, parent = self.modules.get(path), self.modules.get(path.rpartition(".")[0])
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
            and not isinstance(self.modules.get(plain(unit).rpartition(".")[0]), _CONTAINERS)
        )


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


@dataclass(slots=True)
class _Runs:
    """Consecutive operations of one unit, and the parameters that each operation is the first to use."""

    flow: Flow
    units: list[str]
    least: int  # a unit with less than one part in `least` of the largest unit's parameters goes with a neighbour
    weights: list[int] = field(init=False)  # parameter bytes first needed by each operation
    total: int = field(init=False)

    def __post_init__(self) -> None:
        met: set[fx.Node] = set()
        self.weights = []
        for node in self.flow.order:
            fresh = _parameters(self.flow, node) - met
            met |= fresh
            self.weights.append(sum(map(nbytes, fresh)))
        self.total = sum(self.weights)

    def cuts(self) -> list[int]:
        """One cut between any two neighbouring units with parameters, then without those that cost too much."""
        heavy = self._heavy()
        found = []
        for (_, end), (start, _) in itertools.pairwise(heavy):
            candidates = [cut for cut in range(end, start) if self.flow.legal[cut]]
            if candidates:
                found.append(min(candidates, key=lambda cut: (self.flow.cost[cut], -cut)))
        return self._worthwhile(found)

    def name(self, start: int, stop: int) -> str:
        """The unit that uses the most parameters in a piece."""
        used: dict[str, set[fx.Node]] = {}
        for unit, node in zip(self.units[start:stop], self.flow.order[start:stop], strict=True):
            if unit:
                used.setdefault(unit, set()).update(_parameters(self.flow, node))
        return max(used, key=lambda unit: sum(map(nbytes, used[unit])), default="")

    def _heavy(self) -> list[tuple[int, int]]:
        """First and last operation of every run of a unit that uses parameters."""
        found: list[tuple[int, int]] = []
        previous, light = None, self._light()
        for number, (unit, node) in enumerate(zip(self.units, self.flow.order, strict=True)):
            uses = plain(unit) not in light and any(
                (r := role(n)) and r.kind == "parameter" for n in self.flow.needs(node)
            )
            if uses and unit == previous:
                found[-1] = (found[-1][0], number)
            elif uses:
                found.append((self._begin(number), number))
                previous = unit
        ends = [self._end(last) for _, last in found]
        return [(first, end) for (first, _), end in zip(found, ends, strict=True)]

    def _light(self) -> set[str]:
        """The units too small to be layers; by their parameters, wherever they are first used."""
        sizes: dict[str, int] = {}
        for unit, weight in zip(self.units, self.weights, strict=True):
            sizes[plain(unit)] = sizes.get(plain(unit), 0) + weight
        largest = max(sizes.values(), default=0)
        return {unit for unit, size in sizes.items() if size * self.least < largest} if self.least else set()

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
