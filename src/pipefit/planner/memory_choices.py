"""Choices for the memory of one stage, block by block, and the plan's decisions that carry them out.

A block keeps its saved tensors, recomputes by one of its menu's recipes, offloads the tensors that the recipe
leaves, or both. Tensors of a stage move to one place in at most two bundles, since each copy is an action of
the device. One bundle may run in parallel with a single forward or backward, the other with two, which needs
memory for one more microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.errors import UsageError
from pipefit.memory import StageStorages
from pipefit.planner.closed_forms.lifetimes import NEVER, lifetimes
from pipefit.planner.options import Means
from pipefit.planner.problem import Question
from pipefit.schema.actions import Subject
from pipefit.schema.decisions import Decision, Run, SavedTensors, State, StateKind, What
from pipefit.schema.devices import DeviceKind, Place
from pipefit.schema.profile import Measurement
from pipefit.timing import PassSeconds, layer_seconds

# ---- Price of recomputation
#
# Tables over ranges of blocks have row i and column j for blocks i to j - 1; they are differences of sums
# over the blocks before each edge. The loss counts with the last block.

Floats = NDArray[np.float64]

_CLASSES = 6


class Within(NamedTuple):
    """Part of the tables: ranges that start at these edges and stop at those edges."""

    starts: slice
    stops: slice


EVERYWHERE = Within(slice(0, -1), slice(None))


def ranges(sums: Floats, within: Within = EVERYWHERE) -> Floats:
    """Return the sums over ranges of blocks, from sums over the blocks before each edge."""
    result: Floats = sums[None, within.stops] - sums[within.starts, None]
    return result


class BlockPrices:
    """Seconds of blocks, and the seconds that freeing their bytes costs.

    The seconds are those of some kinds of device, by default all of the cluster, each layer on the fastest
    kind for it. Layers are grouped into a few classes by seconds per byte. A class has the price of its
    cheapest layer, so that costs never exceed the true cost. Bytes are those of storages that a block makes
    and saves, which any stage with the block keeps.
    """

    def __init__(self, question: Question, kinds: Collection[DeviceKind] = ()) -> None:
        self.question = question
        forward, backward, update = zip(*_fastest(question, kinds), strict=True)
        update = (*update[:-1], 0.0)  # the loss has no parameters
        self.layers: tuple[float, ...] = forward  # forward seconds of every layer and of the loss
        self.forward, self.backward, self.update = map(self._by_block, (forward, backward, update))
        self._classes = self._classified(np.array(forward))

    def kept(self, within: Within = EVERYWHERE) -> Floats:
        """Return the bytes that ranges keep of a microbatch."""
        return sum(
            (ranges(sums, within) for _, sums in self._classes), np.zeros_like(ranges(self.forward, within))
        )

    def freed(self, seconds: Floats, microbatches: float, within: Within = EVERYWHERE) -> Floats:
        """Return the bytes of `microbatches` that ranges free in `seconds`, the cheapest first."""
        result, left = np.zeros_like(seconds), seconds
        for price, sums in self._classes:
            most = microbatches * ranges(sums, within)
            taken = np.minimum(most, left / price) if price else most
            result, left = result + taken, np.maximum(left - price * taken, 0.0)
        return result

    def seconds(self, need: Floats, microbatches: float, over: Callable[[Floats], Floats] = ranges) -> Floats:
        """Return the seconds in which ranges free `need` bytes over `microbatches`, the cheapest first.

        If `need` exceeds the bytes that a range can free, the seconds to free all of them. `over` returns the
        sums over the ranges of `need`, by default all of them, from the sums over the blocks before each
        edge.
        """
        result = np.zeros_like(need)
        for price, sums in self._classes:
            taken = np.clip(need, 0.0, microbatches * over(sums))
            result += price * taken
            need = need - taken
        return result

    def _by_block(self, of_layers: Iterable[float]) -> Floats:
        """Return the sums over the blocks before each edge."""
        sums: Floats = np.concatenate([[0.0], np.cumsum(np.array(list(of_layers), float))])
        edges = np.array(self.question.edges)
        edges[-1] = len(sums) - 1
        return np.take(sums, edges)

    def _classified(self, forward: Floats) -> list[tuple[float, Floats]]:
        """Return classes of layers, the cheapest first: seconds per byte, and block sums of their bytes."""
        kept = self.kept_by_layers()
        price = forward / np.maximum(kept, 1)
        known = np.unique(price[kept > 0])
        parts = np.array_split(known, min(_CLASSES, len(known))) if len(known) else []
        return [
            (float(part[0]), self._by_block(np.where((price >= part[0]) & (price <= part[-1]), kept, 0.0)))
            for part in parts
        ]

    def kept_by_layers(self) -> Floats:
        """Return, for every layer and the loss, the bytes of the storages it makes that its block saves."""
        edges = np.array(self.question.edges)
        edges[-1] += 1
        model = lifetimes(self.question.measurement)
        ends = edges[np.searchsorted(edges, np.arange(len(model.own)), side="right")]
        pairs = zip(model.own, ends, strict=True)
        return np.array(
            [sum(s.nbytes for s in own if s.saver != NEVER and s.saver < end) for own, end in pairs], float
        )


class DevicePrices:
    """Prices of blocks on every device of a question; devices of one kind share a table."""

    def __init__(self, question: Question) -> None:
        kinds = {device.kind.key: device.kind for device in question.cluster.devices}
        numbers = {key: number for number, key in enumerate(kinds)}
        self._tables = [BlockPrices(question, (kind,)) for kind in kinds.values()]
        self._numbers = [numbers[device.kind.key] for device in question.cluster.devices]
        self._kinds = np.array(self._numbers)
        self._passes = {
            what: np.array([getattr(table, what) for table in self._tables])
            for what in ("forward", "backward", "update")
        }

    def on(self, device: int) -> BlockPrices:
        """Return the prices on a device."""
        return self._tables[self._numbers[device]]

    def seconds(
        self,
        what: Literal["forward", "backward", "update"],
        edges: NDArray[np.intp] | Sequence[int],
        devices: NDArray[np.intp] | Sequence[int],
    ) -> Floats:
        """Return the seconds of a pass or an update of every stage between these edges, on its device.

        Of several splits with the same number of stages, both arrays have a column for each.
        """
        edges, kinds = np.asarray(edges), self._kinds[np.asarray(devices)]
        result: Floats = self._passes[what][kinds, edges[1:]] - self._passes[what][kinds, edges[:-1]]
        return result


def _fastest(question: Question, some: Collection[DeviceKind]) -> list[PassSeconds]:
    """Return the seconds of every layer and of the loss, each on the fastest kind for it."""
    kinds = {kind.key: kind for kind in some or [device.kind for device in question.cluster.devices]}
    times = [layer_seconds(question.measurement, kind, question.training) for kind in kinds.values()]
    return [PassSeconds(*map(min, zip(*of_kinds, strict=True))) for of_kinds in zip(*times, strict=True)]


# ---- Menus of blocks: runs of layers to recompute, and tensors to offload

_PRICES = 16  # number of prices at which recipes are searched
_PART = 1 / 16  # part of a block's optimizer state that is worth a transfer of its own
_SMALLEST = 256  # tensors below 1/256 of the bytes that their block keeps are not worth a transfer

Runs = tuple[tuple[int, int], ...]


class Recipe(NamedTuple):
    """Runs of layers of a block to recompute, the bytes freed per microbatch, and the seconds added.

    `last` are the bytes of a run that ends with the block, which come back before any other backward of the
    block.
    """

    runs: Runs = ()
    nbytes: int = 0
    seconds: float = 0.0
    last: int = 0

    def recomputes(self, layer: int) -> bool:
        """Return whether a layer is in one of the runs."""
        return any(start <= layer < stop for start, stop in self.runs)


class Movable(NamedTuple):
    """Saved tensor that can be offloaded: its name, the bytes of its storage, and the layers that save it."""

    layer: int
    number: int
    nbytes: int
    savers: tuple[int, ...]


class Menu(NamedTuple):
    """Options for layers `start` to `stop - 1`, a block. Each recipe frees more than the one before."""

    start: int
    stop: int
    recipes: tuple[Recipe, ...]
    tensors: tuple[Movable, ...]
    parts: Runs  # layers whose optimizer state moves together
    stays: bool = False  # its weights stay on its device, since a forward changes them

    @property
    def movable_bytes(self) -> int:
        """Bytes of a microbatch that can be offloaded."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def moved(self, recipe: Recipe) -> tuple[Movable, ...]:
        """Return the tensors that can be offloaded in addition to a recipe."""
        return tuple(tensor for tensor in self.tensors if not any(map(recipe.recomputes, tensor.savers)))

    def restricted(self, means: Means) -> Menu:
        """Return the menu under `means`: only the first recipe if nothing may be recomputed, and so on."""
        recipes = self.recipes[:1] if means.recompute == "never" else self.recipes
        return self._replace(recipes=recipes, tensors=self.tensors if means.host or means.peers else ())

    def from_layer(self, start: int) -> Menu:
        """Return the menu of an equal block that starts at layer `start`."""
        by = start - self.start
        recipes = (r._replace(runs=tuple((a + by, b + by) for a, b in r.runs)) for r in self.recipes)
        tensors = (
            t._replace(layer=t.layer + by, savers=tuple(s + by for s in t.savers)) for t in self.tensors
        )
        parts = tuple((a + by, b + by) for a, b in self.parts)
        return Menu(start, self.stop + by, tuple(recipes), tuple(tensors), parts, self.stays)


class Menus:
    """Menus of all blocks of a question; blocks of equal layers share one computation."""

    def __init__(self, question: Question) -> None:
        self.question, self.measurement = question, question.measurement
        self._known: dict[object, Menu] = {}
        self._seconds = BlockPrices(question).layers

    def restricted(self, means: Means) -> Menus:
        """Return the menus without the techniques that `means` lacks; recipes keep their numbers."""
        result = copy(self)
        result.question, result._known = self.question.using(means), {}
        result.blocks = tuple(menu.restricted(means) for menu in self.blocks)
        return result

    @cached_property
    def blocks(self) -> tuple[Menu, ...]:
        """Menu of every block."""
        return tuple(map(self._menu, range(self.question.blocks)))

    def of_stage(self, start: int, stop: int) -> tuple[Menu, ...]:
        """Return the menus of blocks `start` to `stop - 1` in one stage."""
        return self.blocks[start:stop]

    def _menu(self, block: int) -> Menu:
        start, stop = self.question.layers(block, block + 1)
        last = stop == len(self.measurement.layers)
        key = self.measurement.layers[start:stop], last, not start
        result = self._known.get(key)
        if result is None:
            result = self._known[key] = _Block(
                self.measurement, start, stop, self._seconds, self.question.means
            ).menu()
        return result.from_layer(start)


class _Block:
    """Menu of one block, from the storages of a stage that holds only this block.

    A recipe is a choice of runs. The menu has the recipes that are best at some price of a byte, from freeing
    nothing to freeing the most. Storages that no layer of the block makes, or that the block passes on, stay,
    since a neighbour may need them.

    Cost: a dozen dynamic programs over the layers of the block.
    """

    def __init__(
        self, measurement: Measurement, start: int, stop: int, seconds: tuple[float, ...], means: Means
    ) -> None:
        self.measurement, self.start, self.stop, self.means = measurement, start, stop, means
        self.storages = StageStorages(measurement, start, stop)
        own = seconds[start:stop]
        own = (
            (*own[:-1], own[-1] + seconds[stop]) if self.storages.last else own
        )  # the loss goes with the last layer
        self.seconds = np.concatenate([[0.0], np.cumsum(own)])

    def menu(self) -> Menu:
        hull = _hull(sorted({Recipe(), *self._recipes()}, key=lambda r: (r.nbytes, r.seconds)))
        moves = self.means.host or self.means.peers
        stays = any(cost.changed_parameters for cost in self.storages.costs)
        tensors = tuple(self._movable()) if moves else ()
        return Menu(self.start, self.stop, hull, tensors, tuple(self._parts()), stays)

    def _parts(self) -> Iterator[tuple[int, int]]:
        """Yield adjacent layers, each time enough to have a good part of the block's optimizer state."""
        nbytes = [cost.state_bytes for cost in self.storages.costs[: self.stop - self.start]]
        start, total, left = self.start, 0, sum(nbytes)
        least = left * _PART
        for layer, own in enumerate(nbytes, self.start):
            total, left = total + own, left - own
            if total and total >= least and left >= least:
                yield start, layer + 1
                start, total = layer + 1, 0
        yield start, self.stop

    def _recipes(self) -> Iterator[Recipe]:
        """Yield the recipes that the question's means allow."""
        if self.means.recompute == "runs":
            yield from map(self._recipe, self._prices())
        elif self.means.recompute == "blocks" and self._repeatable(0, self.stop - self.start):
            freed = int(self.freed[0, -1])
            yield Recipe(((self.start, self.stop),), freed, float(self.seconds[-1]), freed)

    @cached_property
    def freed(self) -> NDArray[np.int64]:
        """Bytes that recomputing the layers from row i to column j - 1 frees.

        Inputs of layer i that no layer of the block saves are subtracted, because recomputation keeps them.
        """
        count = self.stop - self.start
        result = np.zeros((count + 1, count + 1), np.int64)
        for number, (birth, savers) in self._own.items():
            last = min(max(savers), count - 1)
            result[: birth + 1, last + 1 :] += self.storages.sizes[number]
        present = {*self.storages.input_storages, *self.storages.target_storages}
        present.update(*(layer.saves for layer in self.storages.layers))
        for first in range(1, count):
            kept = {*self.storages.values(first)} - present
            result[first, first + 1 :] -= sum(self.storages.sizes[number] for number in kept)
        return result

    @cached_property
    def _own(self) -> dict[int, tuple[int, tuple[int, ...]]]:
        """Storages that the block makes, saves and does not pass on.

        Each with the position of the layer that makes it, and of the layers that save it.
        """
        layers, inputs = self.storages.layers, set(self.storages.input_storages)
        inputs |= set(self.storages.target_storages) | set(self.storages.values(self.storages.count))
        result: dict[int, tuple[int, tuple[int, ...]]] = {}
        savers: dict[int, list[int]] = {}
        for position, layer in enumerate(layers):
            for number in layer.saves:
                savers.setdefault(number, []).append(position)
        for number, positions in savers.items():
            if number not in inputs:
                made = next((p for p, layer in enumerate(layers) if number in layer.outputs), positions[0])
                result[number] = min(made, positions[0]), tuple(positions)
        return result

    def _repeatable(self, start: int, stop: int) -> bool:
        """Return whether all layers from position `start` to `stop - 1` can be recomputed."""
        costs = self.storages.costs[start : stop + (self.storages.last and stop == self.stop - self.start)]
        return not any(cost.unrepeatable for cost in costs)

    def _prices(self) -> list[float]:
        """Return prices in seconds per byte, from one at which nothing is recomputed to a very high one."""
        count = self.stop - self.start
        result = [
            (self.seconds[j] - self.seconds[i]) / self.freed[i, j]
            for i in range(count)
            for j in range(i + 1, count + 1)
            if self.freed[i, j] > 0
        ]
        if not result:
            return []
        low, high = max(min(result), 1e-18), max(*result, 1e-18)
        return [*np.geomspace(low, high * 1.01, _PRICES), 1e6 * high]

    def _recipe(self, price: float) -> Recipe:
        """Return the recipe with the highest value of its bytes at this price, less its seconds."""
        count = self.stop - self.start
        best: list[tuple[float, Runs]] = [(0.0, ())]
        for j in range(1, count + 1):
            choices = [best[j - 1]]
            for i in range(j):
                if self.freed[i, j] > 0 and self._repeatable(i, j):
                    gain = price * float(self.freed[i, j]) - (self.seconds[j] - self.seconds[i])
                    choices.append((best[i][0] + gain, (*best[i][1], (self.start + i, self.start + j))))
            best.append(max(choices, key=lambda choice: (choice[0], -len(choice[1]))))
        runs = best[-1][1]
        at = [(a - self.start, b - self.start) for a, b in runs]
        seconds = sum(float(self.seconds[b] - self.seconds[a]) for a, b in at)
        last = sum(int(self.freed[a, b]) for a, b in at if b == count)
        return Recipe(runs, int(sum(self.freed[a, b] for a, b in at)), seconds, last)

    def _movable(self) -> Iterator[Movable]:
        """Yield one name for each storage that can be offloaded and is worth a transfer."""
        named: set[int] = set()
        least = sum(self.storages.sizes[number] for number in self._own) // _SMALLEST
        for layer in range(self.start, self.stop):
            for saved in self.storages.costs[layer - self.start].saved:
                subject = Subject(layer, saved.index)
                try:
                    number = self.storages.storage(subject)
                except UsageError:  # a parameter, a constant, or a tensor that autograd does not hold
                    continue
                nbytes = self.storages.sizes[number]
                if number in self._own and number not in named and nbytes > least:
                    named.add(number)
                    yield Movable(layer, saved.index, nbytes, self.storages.savers(subject))


def _hull(recipes: list[Recipe]) -> tuple[Recipe, ...]:
    """Return the recipes that are best at some price, in the order of their bytes.

    Each step costs more per byte than the one before.
    """
    result: list[Recipe] = []
    for recipe in recipes:
        while result and recipe.seconds <= result[-1].seconds:
            result.pop()
        while len(result) > 1 and _price(result[-2], result[-1]) >= _price(result[-2], recipe):
            result.pop()
        if not result or recipe.nbytes > result[-1].nbytes:
            result.append(recipe)
    return tuple(result)


def _price(recipe: Recipe, other: Recipe) -> float:
    return (other.seconds - recipe.seconds) / (other.nbytes - recipe.nbytes)


# ---- Choices of stages

KEPT, TO_HOST, TO_PEERS = range(3)


class StageChoice(NamedTuple):
    """Memory choice of a stage: the recipe number of every block, and the place of its remaining tensors.

    Of the blocks that offload to the host, the first `near` are in the bundle that has the time of one
    forward or backward. This bundle returns `lead` forwards and backwards ahead, the other one more. Of the
    recomputed blocks, the last `early`, whose backwards come first, are recomputed one action ahead, so that
    they may fill the time in which the device waits for gradients. With `joined`, adjacent runs become one
    run, which keeps only its first inputs but has all of its tensors on the device before its backward.
    `states` are the parts of blocks, by their first layers, with optimizer state on the host; the host
    updates those in `updates`. Of the blocks without such parts, the gradients of the first `gradients` are
    on the host between backwards, and the parameters of the first `parameters` between passes. `peers` are
    the lending devices; they also hold the optimizer state of the parts in `lent`. Tensors of the layers in
    `staying` stay, although others of their blocks move.
    """

    recipes: tuple[int, ...]
    places: tuple[int, ...]
    near: int = 0
    lead: int = 1
    early: int = 0
    joined: bool = False
    states: frozenset[int] = frozenset()
    updates: frozenset[int] = frozenset()
    gradients: int = 0
    parameters: int = 0
    peers: Place | None = None
    lent: frozenset[int] = frozenset()
    staying: frozenset[int] = frozenset()

    @staticmethod
    def keep(blocks: int) -> StageChoice:
        """Return the choice that keeps everything."""
        return StageChoice((0,) * blocks, (KEPT,) * blocks)

    @property
    def idle(self) -> bool:
        """True if nothing is recomputed or moved."""
        moves = self.states or self.gradients or self.parameters or self.lent
        return not any(self.recipes) and not any(self.places) and not moves

    def recipe(self, menus: Sequence[Menu], block: int) -> Recipe:
        """Return the recipe of a block."""
        return menus[block].recipes[self.recipes[block]]

    def moved(self, menus: Sequence[Menu], block: int) -> tuple[Movable, ...]:
        """Return the tensors of a block that are offloaded."""
        moved = menus[block].moved(self.recipe(menus, block)) if self.places[block] else ()
        return tuple(tensor for tensor in moved if tensor.layer not in self.staying)

    def blocks_to(self, place: int) -> list[int]:
        """Return the blocks whose tensors move to a place."""
        return [block for block, there in enumerate(self.places) if there == place]


def parts_of(menus: Iterable[Menu]) -> frozenset[int]:
    """Return all parts of some blocks, by their first layers."""
    return frozenset(start for menu in menus for start, _ in menu.parts)


def decisions_of(stage: int, choice: StageChoice, menus: Sequence[Menu], host: Place) -> Iterator[Decision]:
    """Yield the decisions of a stage; `host` is the place of its device's host."""
    again = [block for block, number in enumerate(choice.recipes) if number]
    early = again[len(again) - choice.early :] if choice.early else []
    runs = [(run, int(block in early)) for block in again for run in choice.recipe(menus, block).runs]
    for (start, stop), ahead in _joined(runs) if choice.joined else runs:
        yield Decision(stage=stage, subject=Run(start=start, stop=stop), what=What.RECOMPUTE, ahead=ahead)
    to_host = choice.blocks_to(TO_HOST)
    yield from _bundle(stage, choice, menus, to_host[: choice.near], host, 1, choice.lead)
    yield from _bundle(stage, choice, menus, to_host[choice.near :], host, 2, choice.lead + 1)
    yield from _states(stage, choice, menus, host)
    if choice.peers is not None:
        yield from _bundle(stage, choice, menus, choice.blocks_to(TO_PEERS), choice.peers, 1, 1)


def _states(stage: int, choice: StageChoice, menus: Sequence[Menu], host: Place) -> Iterator[Decision]:
    """Yield the decisions about optimizer state, gradients and parameters."""
    updated = {menu.start: choice.updates.intersection(a for a, _ in menu.parts) for menu in menus}
    others = [menu for menu in menus if not updated[menu.start]]
    for menu in menus:
        alone = choice.states if menu.stays else choice.states - choice.updates
        for some, what, place in (
            (choice.updates - alone, What.UPDATE, host),
            (alone, What.OFFLOAD, host),
            (choice.lent, What.OFFLOAD, choice.peers),
        ):
            for start, stop in _adjacent(menu, some):
                state, ahead = State(start=start, stop=stop, kind="optimizer"), int(what is What.OFFLOAD)
                yield Decision(stage=stage, subject=state, what=what, place=place, ahead=ahead)
    moved: tuple[tuple[StateKind, Sequence[Menu]], ...] = (
        ("gradients", others[: choice.gradients]),
        ("parameters", [menu for menu in others[: choice.parameters] if not menu.stays]),
    )
    for kind, blocks in moved:
        for menu in blocks:
            state = State(start=menu.start, stop=menu.stop, kind=kind)
            yield Decision(stage=stage, subject=state, what=What.OFFLOAD, place=host, ahead=1)


def _adjacent(menu: Menu, some: Collection[int]) -> list[tuple[int, int]]:
    """Return the parts of a block that are in `some`, with adjacent ones joined."""
    result = list[tuple[int, int]]()
    for start, stop in menu.parts:
        if start in some:
            first = result.pop()[0] if result and result[-1][1] == start else start
            result.append((first, stop))
    return result


def _joined(runs: Sequence[tuple[tuple[int, int], int]]) -> list[tuple[tuple[int, int], int]]:
    """Return the runs, with adjacent ones that are recomputed equally early joined."""
    result: list[tuple[tuple[int, int], int]] = []
    for run, ahead in runs:
        touches = result and result[-1][0][1] == run[0] and result[-1][1] == ahead
        start = result.pop()[0][0] if touches else run[0]
        result.append(((start, run[1]), ahead))
    return result


def _bundle(
    stage: int,
    choice: StageChoice,
    menus: Sequence[Menu],
    blocks: Sequence[int],
    place: Place,
    behind: int,
    ahead: int,
) -> Iterator[Decision]:
    """Yield the decision that offloads the tensors of some blocks together; nothing if they lack tensors."""
    tensors = tuple((t.layer, t.number) for block in blocks for t in choice.moved(menus, block))
    if tensors:
        yield Decision(
            stage=stage,
            subject=SavedTensors(tensors=tensors),
            what=What.OFFLOAD,
            place=place,
            behind=behind,
            ahead=ahead,
        )
