"""Improvement of a filled split by small changes, each filled and simulated, while one is better.

First, hosts that have optimizer state update that of some stages, of all, or a part of each stage's. Then
stages come in the order of need: those whose devices lack bytes, then those that compute the largest part of
a step. For each stage, a block goes to a neighbour, the host's link is used more or less, and more or fewer
recomputations come ahead. At last, stages swap devices that differ, with or without their blocks, or take
unused ones. Better means fewer missing bytes, then fewer seconds, then a lower peak. (Relieve the bottleneck
first: Aceso, EuroSys 2024.)

If a plan keeps everything and its transfers do not wait for each other, all changes are timed at once
(`planner.evaluation`), and changes that are not faster are not simulated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import cached_property, lru_cache
from itertools import (
    accumulate,
    chain,
    combinations,
    combinations_with_replacement,
    pairwise,
    permutations,
    product,
)
from math import inf
from random import Random
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipefit.planner.bounds import host_route, in_flight
from pipefit.planner.evaluation import Budget, Candidate, Evaluation, Evaluator
from pipefit.planner.filling import Filled, Filler, FillingSetting, priced_steps
from pipefit.planner.mapping import MOST, Orders, peer_rates
from pipefit.planner.memory_choices import KEPT, TO_HOST, TO_PEERS, Floats, Menu, StageChoice, parts_of
from pipefit.planner.problem import Question, Split
from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import Member, Place, Share
from pipefit.timing import host_update_seconds

# ---- Polishing
#
# Filling orders blocks by price. Polishing changes single blocks and layers: they recompute more or less, move
# or stay, come ahead or not, their optimizer state moves or is updated on the host, and adjacent runs may be
# joined. Blocks go to neighbours and devices change their stages, with their choices. A change that frees or
# needs memory also changes the recomputation: the dearest bytes that fit are kept, or the cheapest ones that
# lack are recomputed. Each change is simulated, until a budget ends the search.

_T = TypeVar("_T")
_ENOUGH = 1e-4  # smaller gains, as parts of a step, do not continue the search
_ROUNDING = 1e-9
_WARM = 0.02  # part of a step by which an accepted plan may be slower in the beginning
_HOST_UPDATES = 3  # besides the places of tensors: optimizer state at the host, which updates
_LENDERS = 2  # devices from which a stage may borrow, besides those that it borrows from
_DRAWN = 3  # candidates of a group that it tries, before it changes to another group
_LOST, _STALE = 100, 200  # candidates without a better one after which it returns to the best, or ends


def polished(filler: Filler, start: Evaluation, *, budget: Budget, at_least: float) -> Evaluation:
    """Return the best plan that small changes make of `start`, until the budget ends.

    No plan takes less than `at_least` seconds, so the search ends at a plan that is as fast.
    """
    best = start
    result: Evaluation | None = start
    while result is not None and not (result.fits and result.seconds <= at_least * (1 + _ROUNDING)):
        best = result
        result = _first_better(filler, best, budget)
    return best if result is None else result


def wandered(filler: Filler, start: Evaluation, *, budget: Budget, at_least: float) -> Evaluation:
    """Return the best plan that random changes make of `start`, until the budget ends or a plan is that fast.

    Plans that are a little slower are accepted in the beginning, and always plans that are as fast: under many
    schedules the slowest stage decides, so several stages have to change. (Simulated annealing: Kirkpatrick et
    al., Science 1983.)
    """
    rng, best, now = Random(0), start, start  # noqa: S311 - no secret
    number = since = 0
    while since < _STALE and not (best.fits and best.seconds <= at_least):
        for candidate in _drawn(rng, (*_neighbours(filler, now), *_Mended(filler, now))):
            number, since = number + 1, since + 1
            if budget.ends():
                return best
            slower = _WARM / (1 + number / _LOST) * rng.random() ** 4
            result = _evaluated(filler, candidate, _below(now))
            if result is not None and _is_as_good(result, now, slower):
                now = result
                if now.order < best.order:
                    best, since = now, 0
                break
            if since % _LOST == 0:
                now = best
                break
    return best


def _drawn(rng: Random, groups: Sequence[Iterator[Candidate]]) -> Iterator[Candidate]:
    """Yield a few candidates of every group, in random order."""
    for group in rng.sample(groups, len(groups)):
        some = [*group]
        yield from rng.sample(some, min(_DRAWN, len(some)))


def _is_as_good(evaluation: Evaluation, other: Evaluation, slower: float) -> bool:
    """Return whether a plan lacks less memory than another, or as much and is at most that part slower."""
    return (evaluation.over_bytes, evaluation.seconds) <= (other.over_bytes, other.seconds * (1 + slower))


def _evaluated(filler: Filler, candidate: Candidate, below: float) -> Evaluation | None:
    """Return the evaluation of a candidate; None if it cannot be carried out, or is not `below` some seconds."""
    fewest = filler.fewest_seconds(*candidate) if below < inf else 0.0
    return filler.evaluator.evaluate(candidate, below=below, at_least=fewest)


def _below(best: Evaluation) -> float:
    """Return the seconds of a step from which on a plan is not worth reading its memory."""
    return best.seconds * (1 + _WARM) if best.fits else inf


def spared(evaluator: Evaluator, start: Evaluation, *, budget: Budget) -> Evaluation:
    """Return the plan without unneeded techniques, until the budget ends.

    A technique of a stage is left out if steps are then not longer and no more memory is missing.
    """
    best: Evaluation | None = None
    result = start
    while result is not best:
        best = result
        for stage, way in product(range(len(start.candidate.choices)), _LEANER):
            result = _leaner(evaluator, result, stage, way, budget)
    return best


def _leaner(
    evaluator: Evaluator,
    best: Evaluation,
    stage: int,
    way: Callable[[StageChoice], StageChoice],
    budget: Budget,
) -> Evaluation:
    """Return the plan with the choice of one stage changed by `way` if it is as good, else `best`."""
    split, choices = best.candidate
    leaner = way(choices[stage])
    if leaner == choices[stage] or budget.ends():
        return best
    result = evaluator.evaluate(Candidate(split, _with(choices, stage, leaner)))
    as_good = result is not None and (result.over_bytes, result.seconds) <= (best.over_bytes, best.seconds)
    return result if result is not None and as_good else best


def _first_better(filler: Filler, best: Evaluation, budget: Budget) -> Evaluation | None:
    missing, seconds = best.order[:2]
    for candidate in chain.from_iterable(_neighbours(filler, best)):
        if budget.ends():
            return None
        result = _evaluated(filler, candidate, _below(best))
        if result is not None and result.order < (missing, seconds * (1 - _ENOUGH)):
            return result
    return None


def _neighbours(filler: Filler, best: Evaluation) -> Iterator[Iterator[Candidate]]:
    """Yield groups of candidates: with one change on all stages, then with one change on one stage.

    The stage that lacks the most bytes comes first, then the one that computes the most.
    """
    split, choices = best.candidate
    everywhere = (tuple(map(way, choices)) for way in _EVERYWHERE)
    yield (Candidate(split, changed) for changed in everywhere if changed != choices)
    busy = best.simulation.utilisation
    stages = sorted(range(len(choices)), key=lambda s: (-max(0, best.over[s]), -busy[split.devices[s]]))
    for stage in stages:
        yield _changed(filler, best, stage)


def _changed(filler: Filler, best: Evaluation, stage: int) -> Iterator[Candidate]:
    """Yield candidates with the choice of one stage changed."""
    split, choices = best.candidate
    menus = filler.evaluator.stage_menus(split)[stage]
    for choice in _changes(choices[stage], menus, host=filler.question.means.host):
        yield Candidate(split, _with(choices, stage, choice))


def _changes(choice: StageChoice, menus: Sequence[Menu], *, host: bool) -> Iterator[StageChoice]:
    """Yield choices that differ in a block or in the timing of runs.

    Blocks move only if the `host` may be used.
    """
    for block, menu in enumerate(menus):
        for number in (choice.recipes[block] - 1, choice.recipes[block] + 1):
            if 0 <= number < len(menu.recipes):
                yield choice._replace(recipes=_with(choice.recipes, block, number))
        if menu.tensors and (host or choice.places[block]):
            yield from _moved(choice, block)
    yield choice._replace(joined=not choice.joined)
    for early in (choice.early - 1, choice.early + 1):
        if 0 <= early <= sum(map(bool, choice.recipes)):
            yield choice._replace(early=early)
    yield from _state(choice, menus)
    yield from _lapped(choice)
    yield from _exchanged(choice, menus)


def _exchanged(choice: StageChoice, menus: Sequence[Menu]) -> Iterator[StageChoice]:
    """Yield choices with the treatment of two blocks exchanged, as far as their menus allow."""
    for one, other in combinations(range(len(choice.recipes)), 2):
        order = list(range(len(choice.recipes)))
        order[one], order[other] = other, one
        recipes = tuple(min(choice.recipes[n], len(m.recipes) - 1) for n, m in zip(order, menus, strict=True))
        places = tuple(choice.places[n] for n in order)
        if (recipes, places) != (choice.recipes, choice.places):
            yield choice._replace(recipes=recipes, places=places)


def _moved(choice: StageChoice, block: int) -> Iterator[StageChoice]:
    """Yield choices in which the block stays instead of moving, or moves to the host."""
    if choice.places[block]:
        yield _lending(choice._replace(places=_with(choice.places, block, KEPT)))
        return
    places, near = _with(choice.places, block, TO_HOST), choice.near
    ways = dict.fromkeys(((near + 1, choice.lead), (near, choice.lead), (near + 1, 0)))
    for recipes in dict.fromkeys((_with(choice.recipes, block, 0), choice.recipes)):
        for some, lead in ways:
            yield choice._replace(places=places, recipes=recipes, near=some, lead=lead)


def _parted(choice: StageChoice, menus: Sequence[Menu]) -> Iterator[StageChoice]:
    """Yield choices in which tensors of one more layer move, or of one less, in blocks that move others."""
    for block, menu in enumerate(menus):
        if choice.places[block] == TO_HOST:
            layers = {tensor.layer for tensor in menu.moved(choice.recipe(menus, block))}
            for layer in sorted(layers) if len(layers) > 1 else ():
                yield choice._replace(staying=choice.staying ^ {layer})


def _state(choice: StageChoice, menus: Sequence[Menu]) -> Iterator[StageChoice]:
    """Yield choices with one block's state less at the host, or with one block more or less updated there.

    It is the last such block, or the next one.
    """
    parts = [parts_of([menu]) for menu in menus]
    away = [own for own in parts if own & choice.states]
    updated = [own for own in parts if own & choice.updates]
    if away:
        yield choice._replace(states=choice.states - away[-1], updates=choice.updates - away[-1])
    if updated:
        yield choice._replace(updates=choice.updates - updated[-1])
    if len(updated) < len(away):
        more = next(own for own in away if not own & choice.updates) & choice.states
        yield choice._replace(updates=choice.updates | more)
    if choice.gradients:
        yield choice._replace(gradients=choice.gradients - 1)
    if choice.parameters:
        yield choice._replace(parameters=choice.parameters - 1)


def _lapped(choice: StageChoice) -> Iterator[StageChoice]:
    """Yield choices with the other lead, or with one block more or less in the `near` bundle."""
    if choice.blocks_to(TO_HOST):
        yield choice._replace(lead=1 - choice.lead)
    for near in (choice.near - 1, choice.near + 1):
        if 0 <= near <= len(choice.blocks_to(TO_HOST)):
            yield choice._replace(near=near)


class _Mended:
    """Changes of a plan after which every changed stage recomputes as much as its device lacks.

    The bytes that a stage lacks are estimated as in filling, corrected by the plan's own peaks.
    """

    def __init__(self, filler: Filler, best: Evaluation) -> None:
        self._filler, self._best, self._means = filler, best, filler.question.means
        self._split, self._choices = best.candidate
        needs = zip(best.over, self._all(self._split, self._choices), strict=True)
        self._off = [over - need for over, need in needs]
        self._rates = peer_rates(filler.question.cluster)

    def __iter__(self) -> Iterator[Iterator[Candidate]]:
        """Yield groups of candidates: one for each stage, and cuts and devices, with all state at a place."""
        yield from map(self._changed, range(len(self._choices)))
        for place in (None, *self._state_places):
            yield self._cut(place)
            yield self._placed(place)

    @property
    def _state_places(self) -> list[int]:
        """Places other than its device at which optimizer state may be."""
        means, result = self._means, list[int]()
        if means.state and means.host:
            result += [TO_HOST, _HOST_UPDATES]
        if means.state and means.peers:
            result += [TO_PEERS]
        return result

    def _changed(self, stage: int) -> Iterator[Candidate]:
        """Yield candidates with one choice of a stage changed."""
        choice, menus = self._choices[stage], self._filler.evaluator.stage_menus(self._split)[stage]
        ways = [_parted(choice, menus), self._borrowed(stage, choice, menus)]
        ways += [_moved(choice, n) for n, menu in enumerate(menus) if menu.tensors and self._means.host]
        for own in (parts_of(menus), *(frozenset({part}) for part in parts_of(menus))):
            ways += [(self._with_state(stage, choice, own, place) for place in (KEPT, *self._state_places))]
        for other in dict.fromkeys(chain.from_iterable(ways)):
            if (mended := self._mended(self._split, stage, other)) != choice:
                yield Candidate(self._split, _with(self._choices, stage, mended))

    def _with_state(
        self, stage: int, choice: StageChoice, parts: frozenset[int], place: int, device: int | None = None
    ) -> StageChoice:
        """Return a choice with the optimizer state of some parts at a place, if that is possible."""
        if place == TO_PEERS and choice.peers is None:
            lenders = self._lenders(self._split.devices[stage] if device is None else device)
            if not lenders:
                return choice
            choice = choice._replace(peers=lenders[0])
        return _lending(
            choice._replace(
                states=choice.states | parts if place in (TO_HOST, _HOST_UPDATES) else choice.states - parts,
                updates=choice.updates | parts if place == _HOST_UPDATES else choice.updates - parts,
                lent=choice.lent | parts if place == TO_PEERS else choice.lent - parts,
            )
        )

    def _borrowed(self, stage: int, choice: StageChoice, menus: Sequence[Menu]) -> Iterator[StageChoice]:
        """Yield choices with the tensors of one block, or of all, at peers, or with another lender."""
        lenders = self._lenders(self._split.devices[stage]) if self._means.peers else []
        for place in lenders:
            if choice.peers is not None:
                yield choice._replace(peers=place)
            for blocks in (range(len(menus)), *([n] for n in range(len(menus)))):
                places = tuple(
                    TO_PEERS if n in blocks and menu.tensors else there
                    for n, (menu, there) in enumerate(zip(menus, choice.places, strict=True))
                )
                recipes = tuple(0 if n in blocks else again for n, again in enumerate(choice.recipes))
                for again in dict.fromkeys((recipes, choice.recipes)):
                    yield _lending(choice._replace(places=places, peers=place, recipes=again))

    def _lenders(self, device: int) -> list[Place]:
        """Return devices with room that a link of their own joins to a device, the roomiest first."""
        cluster = self._filler.question.cluster
        rooms = [budget - peak for budget, peak in zip(cluster.budgets, self._best.peaks, strict=True)]
        there = [n for n, room in enumerate(rooms) if room > 0 and self._rates[device, n] > 0]
        there.sort(key=lambda n: -rooms[n])
        return [Place([Share(Member.device(n), 1)]) for n in there[:_LENDERS]]

    def _cut(self, place: int | None) -> Iterator[Candidate]:
        """Yield candidates in which a block goes over a cut, or one block over each of some adjacent cuts."""
        edges = self._split.edges
        for first, last in combinations_with_replacement(range(1, len(edges) - 1), 2):
            for by in (-1, 1):
                moved = [edge + by * (first <= n <= last) for n, edge in enumerate(edges)]
                if all(start < stop for start, stop in pairwise(moved)):
                    yield self._on(Split(tuple(moved), self._split.devices), place)

    def _placed(self, place: int | None) -> Iterator[Candidate]:
        """Yield candidates in which two stages swap devices, or one takes an unused device."""
        for setting in _placed(self._filler, FillingSetting.of(self._split)):
            yield self._on(setting.split, place)

    def _on(self, split: Split, place: int | None) -> Candidate:
        """Return the candidate with another split, in which blocks have the same treatment as far as possible.

        The optimizer state of changed stages is at `place`, or stays where it is.
        """
        flat = [*chain.from_iterable(zip(c.recipes, c.places, strict=True) for c in self._choices)]
        states, updates = (
            frozenset[int]().union(*(getattr(choice, name) for choice in self._choices))
            for name in ("states", "updates")
        )
        choices = list[StageChoice]()
        for stage, ((start, stop), own) in enumerate(zip(pairwise(split.edges), self._choices, strict=True)):
            device, same = (
                split.devices[stage],
                split.edges[stage : stage + 2] == self._split.edges[stage : stage + 2],
            )
            if same and device == self._split.devices[stage]:
                choices.append(own)
                continue
            recipes, places = zip(*flat[start:stop], strict=True)
            parts = parts_of(self._filler.evaluator.menus.of_stage(start, stop))
            away, before = places.count(TO_HOST), own.places.count(TO_HOST)
            choice = own._replace(
                recipes=recipes,
                places=places,
                near=away if own.near == before else min(own.near, away),
                states=states & parts,
                updates=updates & parts,
                lent=own.lent & parts,
                gradients=min(own.gradients, stop - start),
                parameters=min(own.parameters, stop - start),
            )
            if choice.peers is None or Member.device(device) in choice.peers.members:
                places = tuple(KEPT if there == TO_PEERS else there for there in places)
                choice = choice._replace(places=places, lent=frozenset(), peers=None)
            if place is not None:
                choice = self._with_state(stage, choice, parts, place, device)
            choices.append(self._mended(split, stage, _lending(choice)))
        return Candidate(split, tuple(choices))

    def _mended(self, split: Split, stage: int, choice: StageChoice) -> StageChoice:
        """Return a choice of a stage that recomputes as much as the stage needs by estimate."""
        need = self._need(split, stage, choice) + self._off[stage]
        menus, held = self._filler.evaluator.stage_menus(split)[stage], self._filler.in_flight(split, stage)
        recipes = [*choice.recipes]
        steps = [*priced_steps(menus)]
        for block, number, nbytes in steps if need > 0 else ():
            if need > 0 and recipes[block] == number - 1:
                recipes[block], need = number, need - held * nbytes
        for block, number, nbytes in reversed(steps) if need < 0 else ():
            if recipes[block] == number and need + held * nbytes <= 0:
                recipes[block], need = number - 1, need + held * nbytes
        return choice._replace(recipes=tuple(recipes), early=min(choice.early, sum(map(bool, recipes))))

    def _all(self, split: Split, choices: Sequence[StageChoice]) -> list[float]:
        return [self._need(split, stage, choice) for stage, choice in enumerate(choices)]

    def _need(self, split: Split, stage: int, choice: StageChoice) -> float:
        """Return the bytes that a stage's device lacks by estimate; negative if it has room."""
        return self._filler.lack(split, stage) - self._filler.freed(split, stage, choice)


def _lending(choice: StageChoice) -> StageChoice:
    """Return a choice without lenders if nothing is lent to it."""
    return choice if choice.lent or TO_PEERS in choice.places else choice._replace(peers=None)


def _without_states(choice: StageChoice) -> StageChoice:
    """Keep all optimizer state on the device."""
    return choice._replace(states=frozenset(), updates=frozenset())


def _all_updates(choice: StageChoice) -> StageChoice:
    """Update all layers on the host whose optimizer state is there."""
    return choice._replace(updates=choice.states)


def _unhurried(choice: StageChoice) -> StageChoice:
    """Give all copies the time of two forwards or backwards."""
    return choice._replace(near=0)


def _without_updates(choice: StageChoice) -> StageChoice:
    """Update all blocks on the device."""
    return choice._replace(updates=frozenset())


def _without_spills(choice: StageChoice) -> StageChoice:
    """Keep all gradients and parameters on the device."""
    return choice._replace(gradients=0, parameters=0)


def _without_moves(choice: StageChoice) -> StageChoice:
    """Move no tensors."""
    return choice._replace(
        places=(KEPT,) * len(choice.places), near=0, peers=None, lent=frozenset(), staying=frozenset()
    )


def _without_recomputation(choice: StageChoice) -> StageChoice:
    """Recompute nothing."""
    return choice._replace(recipes=(0,) * len(choice.recipes), early=0)


_LEANER = _without_states, _without_updates, _without_spills, _without_moves, _without_recomputation
_EVERYWHERE = _unhurried, _all_updates, _without_updates


def _with(of: tuple[_T, ...], place: int, item: _T) -> tuple[_T, ...]:
    return (*of[:place], item, *of[place + 1 :])


# ---- Order of devices: stages spread over shared wires to hosts
#
# On a DGX-1 every two devices share an uplink. With stage s on device s, the two stages with the most
# microbatches in flight would share one uplink, and that of the last two stages would carry nothing.

Rows = tuple[tuple[float, ...], ...]

_DIGITS = 9  # decimal digits to which loads are compared


def spread(question: Question) -> tuple[int, ...]:
    """Return the device of every stage: its own number, unless another order of equal devices is better."""
    natural = tuple(range(question.stages))
    if not (question.means.host and question.means.mapping) or len(question.classes) > 1:
        return natural
    weights = tuple(in_flight(question.training, stage, question.stages) for stage in natural)
    return best_order(weights, _rows(_loads(question.cluster)), _rows(peer_rates(question.cluster)))


@lru_cache(maxsize=64)
def best_order(weights: tuple[int, ...], to_hosts: Rows, to_peers: Rows) -> tuple[int, ...]:
    """Return the best order of devices for stages that move `weights` tensors each; cached.

    `to_hosts` has a row for each device: the seconds that a byte takes on each wire to the host, to some
    scale. `to_peers` has the bytes per second of links between two devices, zero without a link. Orders are
    compared by

        1. the neighbours without a link of their own, whose messages would use the wires to hosts: the fewest
        2. the load of the fullest wire, if a stage moves its weight: the lowest
        3. the sum of the squares of all wires' loads: the lowest
        4. the seconds of a byte from the first stage to the last: the fewest

    The order of the devices themselves stays unless 2 improves, or 3 with an equal 2. All orders of up to
    `MOST` devices are tried, a tenth of a second for eight. For more devices, stages swap devices, with each
    other or with unused ones, while a swap is better; this is a heuristic.
    """
    loads, rates = np.array(to_hosts).reshape(len(to_hosts), -1), np.array(to_peers)
    natural = np.arange(len(weights))[None]
    first = _scores(natural, weights, loads, rates)[:, 0]
    if len(rates) <= MOST:
        orders: Orders = np.array(list(permutations(range(len(rates)), len(weights))), dtype=np.intp)
    else:
        orders = _swapped(natural[0], weights, loads, rates)
    scores = _scores(orders, weights, loads, rates)
    best = int(np.lexsort(scores[::-1])[0])
    better = scores[1:3, best].tolist() < first[1:3].tolist()
    return tuple(map(int, orders[best])) if better else tuple(range(len(weights)))


def _rows(array: Floats) -> Rows:
    return tuple(map(tuple, array.tolist()))


def _loads(cluster: Cluster) -> Floats:
    """Return the seconds that a byte of each device takes on each wire to the host: a row for each device."""
    routes = [host_route(cluster, device) for device in range(len(cluster.devices))]
    wires = {
        wire: n for n, wire in enumerate(dict.fromkeys(w for r in routes if r is not None for w in r.wires))
    }
    result = np.zeros((len(routes), len(wires)))
    for device, route in enumerate(routes):
        if route is not None:
            result[device, [wires[wire] for wire in route.wires]] = 1 / route.both_ways_per_second
    return result / (result.max(initial=0.0) or 1.0)


def _scores(orders: Orders, weights: tuple[int, ...], loads: Floats, rates: Floats) -> Floats:
    """Return a row for each criterion of `best_order`, the first one first, and a column for each order."""
    wires = np.einsum("s,osw->ow", np.array(weights, dtype=float), loads[orders])
    between = rates[orders[:, :-1], orders[:, 1:]]
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = np.where(between > 0, 1 / between, 0.0).sum(axis=1) * rates.max(initial=0.0)
    apart = (between == 0).sum(axis=1)
    result: Floats = np.round(
        np.array([apart, wires.max(axis=1, initial=0.0), (wires**2).sum(axis=1), seconds], dtype=float),
        _DIGITS,
    )
    return result


def _swapped(start: NDArray[np.intp], weights: tuple[int, ...], loads: Floats, rates: Floats) -> Orders:
    """Return an order of `start`'s number of devices, improved by swaps while one of them is better."""
    order = np.array([*start, *sorted(set(range(len(rates))) - set(start.tolist()))], dtype=np.intp)
    count, best = len(start), -1
    while best != 0:
        tried = np.array([order, *_swaps(order, count)])
        best = int(np.lexsort(_scores(tried[:, :count], weights, loads, rates)[::-1])[0])
        order = tried[best]
    return order[None, :count]


def _swaps(order: NDArray[np.intp], count: int) -> Iterator[NDArray[np.intp]]:
    for one, other in combinations(range(len(order)), 2):
        if one < count:
            swapped = order.copy()
            swapped[[one, other]] = order[[other, one]]
            yield swapped


# ---- Updates divided between hosts and devices
#
# A host update occupies the host's memory; a device update occupies the wires that its state comes and goes
# on. Both come after the last backward of all stages, so a step ends when the busiest host or wire does. A
# device does its copies and host updates one after the other, so each stage does only one kind.

_FEW = 3  # divisions that are worth a simulation


class Update(NamedTuple):
    """The update of a stage.

    Its host and the seconds there; the wires of its state, and the seconds of one way.
    """

    host: int
    host_seconds: float
    wires: tuple[str, ...]
    wire_seconds: float


def divided_updates(question: Question, split: Split) -> list[tuple[float, ...]]:
    """Return a few divisions of updates between hosts and devices, the shortest by estimate first.

    A division has, for every stage, 1 if its host updates its state, else 0. One stage after the other goes
    from the busiest host to its device: the one whose wires are then the least busy. Returns an empty list if
    a host has no link or no known memory bandwidth.
    """
    updates = _updates(question, split)
    if updates is None:
        return []
    away = [frozenset[int]()]
    while len(away[-1]) < len(updates):
        away.append(away[-1] | {_next(updates, away[-1])})
    shortest = sorted(away, key=lambda some: max(busy_seconds(updates, some).values()))[:_FEW]
    return [tuple(float(stage not in some) for stage in range(len(updates))) for some in shortest]


def busy_seconds(updates: Sequence[Update], away: Set[int]) -> Mapping[int | str, float]:
    """Return the busy seconds of every host and wire if the stages in `away` update on their devices."""
    result = defaultdict[int | str, float](float)
    for stage, update in enumerate(updates):
        for busy in update.wires if stage in away else (update.host,):
            result[busy] += update.wire_seconds if stage in away else update.host_seconds
    return result


def _next(updates: Sequence[Update], away: Set[int]) -> int:
    """Return the stage of the busiest host whose wires would be the least busy."""
    busy = busy_seconds(updates, away)
    there = [stage for stage in range(len(updates)) if stage not in away]
    host = max((updates[stage].host for stage in there), key=busy.__getitem__)

    def busiest_wire(stage: int) -> float:
        return max((busy[wire] for wire in updates[stage].wires), default=0.0) + updates[stage].wire_seconds

    return min((stage for stage in there if updates[stage].host == host), key=busiest_wire)


def _updates(question: Question, split: Split) -> list[Update] | None:
    """Return the update of every stage; None if a host has no link or no known memory bandwidth."""
    cluster, result = question.cluster, list[Update]()
    for device, edges in zip(split.devices, pairwise(split.edges), strict=True):
        number, route = cluster.devices[device].host, host_route(cluster, device)
        if route is None or cluster.hosts[number].memory_bandwidth is None:
            return None
        layers = question.measurement.costs[slice(*question.layers(*edges))]
        on_host = sum(host_update_seconds(cost, cluster.hosts[number]) for cost in layers)
        moved = sum(cost.state_bytes for cost in layers) / route.both_ways_per_second
        result.append(Update(number, on_host, route.wires, moved))
    return result


# ---- Improvement of settings

_UPDATED = 1.0, 0.5, 0.75, 0.25, 0.0  # parts of the optimizer state at the host that are updated there
_HOST_PARTS = (0.0, 0.5, 1.0, 1.5)
_IMPROVEMENT_ENOUGH = 1e-3  # smaller gains, as parts of a step, do not continue the search
_IMPROVEMENT_ROUNDING = 1e-9


def improved(filler: Filler, start: Filled, *, budget: Budget, at_least: float) -> Filled:
    """Return the best plan that small changes make of `start`, until the budget ends.

    No plan takes less than `at_least` seconds, so the search ends at a plan that is as fast.
    """
    result: Filled | None = start
    while result is not None:
        best = result
        result = _improvement_first_better(filler, best, budget, at_least)
    return best


def _improvement_first_better(filler: Filler, best: Filled, budget: Budget, at_least: float) -> Filled | None:
    """Return the first better change; None if there is none, or if nothing is left to gain."""
    if best.found.fits and best.found.seconds <= at_least * (1 + _IMPROVEMENT_ROUNDING):
        return None
    may_be_faster = _Faster(filler, best)
    for setting in _improvement_neighbours(filler, best):
        if budget.ends():
            return None
        if best.found.fits and filler.fewest_seconds(setting.split) >= best.found.seconds:
            continue
        if not may_be_faster(setting):
            continue
        result = filler.fill(setting, best.margins, than=best.found)
        if result is not None and _better(result, best):
            return result
    return None


class _Faster:
    """Filter of settings that may be faster than a plan that keeps everything; times them all at once.

    The times are used only if the timer agrees with the simulator about the first step of the plan itself.
    """

    def __init__(self, filler: Filler, best: Filled) -> None:
        self._filler, self._best = filler, best

    def __call__(self, setting: FillingSetting) -> bool:
        known, best = self._times, self._best.found.seconds
        if setting.split not in known or not self._filler.keeps(setting.split):
            return True
        return known[setting.split] < known[self._best.setting.split] - _IMPROVEMENT_ENOUGH * best

    @cached_property
    def _times(self) -> Mapping[Split, float]:
        """Seconds of a step of the neighbouring splits and of the plan's own.

        Empty if the timer does not apply.
        """
        result, own = self._best.found, self._best.setting.split
        if not result.fits or not all(choice.idle for choice in result.candidate.choices):
            return {}
        splits = list(
            dict.fromkeys(
                (own, *(setting.split for setting in _improvement_neighbours(self._filler, self._best)))
            )
        )
        times = self._filler.evaluator.at_once(splits)
        first = result.simulation.step_seconds[0]
        if times is None or abs(times[0] - first) > _IMPROVEMENT_ROUNDING * first:
            return {}
        return dict(zip(splits, times, strict=True))


def _better(filled: Filled, other: Filled) -> bool:
    """Return whether a candidate is better by more than a negligible gain."""
    missing, seconds = other.found.order[:2]
    return filled.found.order < (missing, seconds * (1 - _IMPROVEMENT_ENOUGH))


def _improvement_neighbours(filler: Filler, filled: Filled) -> Iterator[FillingSetting]:
    """Yield the settings that differ by one small change, those of the neediest stage first."""
    result, setting = filled.found, filled.setting
    busy = result.simulation.utilisation
    stages = range(len(setting.host))
    if any(choice.states for choice in result.candidate.choices):
        same = [(part,) * len(setting.host) for part in _UPDATED]
        for parts in dict.fromkeys((*divided_updates(filler.question, setting.split), *same)):
            if parts != setting.updated:
                yield setting._replace(updated=parts)
    for stage in sorted(stages, key=lambda s: (-max(0, result.over[s]), -busy[setting.split.devices[s]])):
        yield from _narrower(setting, stage)
        yield from _host(setting, stage)
        yield from _early(setting, stage, sum(map(bool, result.candidate.choices[stage].recipes)))
    yield from _placed(filler, setting)


def _placed(filler: Filler, setting: FillingSetting) -> Iterator[FillingSetting]:
    """Yield settings with two stages' devices swapped, with or without their blocks, and with unused devices.

    Devices that are interchangeable stay.
    """
    groups, (edges, devices, _) = filler.groups, setting.split
    if not filler.question.means.mapping or not groups:
        return
    widths = [stop - start for start, stop in pairwise(edges)]
    for one, other in combinations(range(len(devices)), 2):
        if groups[devices[one]] != groups[devices[other]]:
            swapped = _swapped_pair(devices, one, other)
            yield setting._replace(split=Split(edges, swapped))
            if widths[one] != widths[other]:
                moved = (0, *accumulate(_swapped_pair(widths, one, other)))
                yield setting._replace(split=Split(moved, swapped))
    unused = {groups[device]: device for device in sorted(groups) if device not in devices}
    for stage, device in product(range(len(devices)), unused.values()):
        if groups[device] != groups[devices[stage]]:
            placed = (*devices[:stage], device, *devices[stage + 1 :])
            yield setting._replace(split=Split(edges, placed))


def _swapped_pair(of: Sequence[int], one: int, other: int) -> tuple[int, ...]:
    result = [*of]
    result[one], result[other] = result[other], result[one]
    return tuple(result)


def _narrower(setting: FillingSetting, stage: int) -> Iterator[FillingSetting]:
    """Yield settings in which the stage has one block less.

    It gives its first block to the stage before or its last one to the stage after. A block may also pass
    through stages between: all edges up to a later or earlier stage move by one.
    """
    edges = setting.split.edges
    if edges[stage + 1] - edges[stage] < 2:
        return
    last = len(edges) - 1
    for far in range(stage + 1, last):
        yield _with_edges(setting, [e - (stage < n <= far) for n, e in enumerate(edges)])
    for far in range(stage, 0, -1):
        yield _with_edges(setting, [e + (far <= n <= stage) for n, e in enumerate(edges)])


def _with_edges(setting: FillingSetting, edges: list[int]) -> FillingSetting:
    return setting._replace(split=Split(tuple(edges), setting.split.devices))


def _host(setting: FillingSetting, stage: int) -> Iterator[FillingSetting]:
    """Yield settings that use the host's link more or less."""
    for part in _HOST_PARTS:
        if part != setting.host[stage]:
            host = (*setting.host[:stage], part, *setting.host[stage + 1 :])
            yield setting._replace(host=host)


def _early(setting: FillingSetting, stage: int, recomputed: int) -> Iterator[FillingSetting]:
    """Yield settings with twice, half, or all of the recomputations ahead."""
    now = setting.early[stage]
    for number in {max(1, 2 * now), now // 2, recomputed} - {now}:
        if number <= recomputed:
            yield setting._replace(early=(*setting.early[:stage], number, *setting.early[stage + 1 :]))
