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
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from torch import fx, nn

from pipefit.capture.flat import nbytes, operator_name, plain, role, stack
from pipefit.capture.flow import Flow, sums
from pipefit.capture.task import Granularity
from pipefit.capture.units import Units, with_blocks
from pipefit.profiles import Block

_FAR_MORE = 4  # times the bytes of the next cut
_LITTLE = 1000  # only a cut next to a piece with less than one in so many of all parameters is given up for that
_SMALL = 100  # what has less than one in so many of the largest unit's parameters joins a neighbour


class Piece(NamedTuple):
    """Operations `start` to `stop - 1`, to become the layer `name`."""

    start: int
    stop: int
    name: str


class Pieces(NamedTuple):
    """The layers to be, in order, and the blocks that they form; none where each is a block of its own."""

    layers: tuple[Piece, ...]
    blocks: tuple[Block, ...]


WHOLE = "whole"  # the name of a model's only layer


def all_in_one(flow: Flow, why: str) -> Pieces:
    """The model as one layer and one block, for this reason."""
    piece = Piece(0, len(flow.order), WHOLE)
    return Pieces((piece,), (Block(name=WHOLE, layers=1, undivided=why),))


def pieces(flow: Flow, module: nn.Module, granularity: Granularity, kept: Mapping[str, str]) -> Pieces:
    """The layers of a model, and the blocks that a granularity makes of them.

    `kept` are the paths of modules that stay whole, and why.
    """
    blocks, halves = (_Runs(flow, Units(flow, module, deeper=deeper)) for deeper in (False, True))
    is_free = _free(flow, blocks.cuts)
    finer = sorted({*blocks.cuts, *(cut for cut in halves.cuts if is_free[cut])})
    layers = tuple(_named(flow, _fine(flow, frozenset(finer), is_free), partial(_innermost, flow)))
    if granularity == "layers":
        return Pieces(layers, ())
    runs, ends = (blocks, blocks.cuts) if granularity == "blocks" else (halves, finer)
    starts = [layer.start for layer in layers]
    found = [
        Block(
            name=name,
            layers=bisect_left(starts, stop) - bisect_left(starts, start),
            undivided="; ".join(
                (
                    *(reason for place, reason in runs.undivided if start < place < stop),
                    *_whole(flow.order[start:stop], module, kept),
                )
            ),
        )
        for start, stop, name in _named(flow, ends, runs.name)
    ]
    return Pieces(layers, tuple(found))


def _whole(nodes: Sequence[fx.Node], module: nn.Module, kept: Mapping[str, str]) -> Iterator[str]:
    """Which modules that have blocks stay whole among these operations, and why."""
    called = (meaning.name for node in nodes for source in node.all_input_nodes if (meaning := role(source)))
    divisible = with_blocks(dict(module.named_modules(remove_duplicate=False)))
    for path in dict.fromkeys(called):
        if path in kept and path in divisible:
            yield f"{path} stays whole{kept[path]}"


def _named(flow: Flow, cuts: Sequence[int], name: Callable[[int, int], str]) -> Iterator[Piece]:
    """The pieces between cuts, each by the name of its operations, and a number where the name was there before."""
    met: dict[str, int] = {}
    for start, stop in pairwise([0, *(cut + 1 for cut in cuts), len(flow.order)]):
        own = plain(name(start, stop))
        count = met[own] = met.get(own, -1) + 1
        yield Piece(start, stop, f"{own}@{count}" if count else own)


def _fine(flow: Flow, given: Set[int], is_free: Sequence[bool]) -> list[int]:
    """The cuts given, and those where the innermost module changes or goes on to a further parameter.

    Operations that only look at memory in another way, as a reshape does, are no layer of their own.
    """
    cuts, met, computes = list[int](), set[fx.Node](), False
    for cut, (before, after) in enumerate(zip(flow.order, [*flow.order[1:], None], strict=True)):
        met |= _parameters(flow, before)
        computes |= flow.computes(before)
        if after is None or cut in given:
            if not computes and cuts and cuts[-1] not in given:
                cuts.pop()
        elif not (computes and is_free[cut] and flow.legal[cut] and _changes(flow, met, before, after)):
            continue
        cuts.append(cut)
        met, computes = set(), False
    return cuts[:-1]


def _changes(flow: Flow, met: Set[fx.Node], before: fx.Node, after: fx.Node) -> bool:
    """Whether the innermost module changes, or goes on to a parameter that is not among those met."""
    goes_on = bool(met) and not _parameters(flow, after) <= met
    return goes_on or stack(before)[-1:] != stack(after)[-1:]


def _innermost(flow: Flow, start: int, stop: int) -> str:
    """The innermost module of the operations that use the most parameters, or of the first one."""
    nodes = flow.order[start:stop]
    most = max(nodes, key=lambda node: sum(map(nbytes, _parameters(flow, node))))
    return "".join(stack(most)[-1:]) or _of_the_root(flow, nodes)


def _of_the_root(flow: Flow, nodes: Sequence[fx.Node]) -> str:
    """A name for what the root module does: its largest parameter, otherwise the first operation that computes.

    Of parameters of one size it is the first by name, so that every trace of the model has the same.
    """
    own = [node for node in nodes if not any(stack(node))] or nodes
    used = (parameter for node in own for parameter in _parameters(flow, node))
    largest = min(used, key=lambda parameter: (-nbytes(parameter), parameter.name), default=None)
    if largest is not None and (meaning := role(largest)):
        return meaning.name
    return operator_name(next((node for node in own if flow.computes(node)), own[0]))


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


class _Runs:
    """Consecutive operations of one unit, and the parameters that each operation is the first to use."""

    def __init__(self, flow: Flow, units: Units) -> None:
        self.flow, self.units, self.deeper = flow, units.of_all, units.deeper
        # The first operations of units that no cut parts from the unit before, each with the reason
        self.undivided: list[tuple[int, str]] = []
        self.weights: list[int] = []  # parameter bytes first needed by each operation
        met: set[fx.Node] = set()
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
        return most or _of_the_root(self.flow, self.flow.order[start:stop])

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
