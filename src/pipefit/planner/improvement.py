"""One local search over whole plans: changes of a plan, each simulated, that are kept if the plan is better.

`improved` takes the first better change, `wandered` also changes several stages at random, and `spared`
leaves out unneeded techniques. Better means fewer missing bytes, then fewer seconds, then a lower peak.

`Changes` are those of one plan. Blocks go over one cut or over several, or devices change their stages, with
or without their blocks; a block recomputes more or less, or its tensors move or stay, to the host or to
devices with room; optimizer state of layers, blocks or stages moves, or hosts update it; copies and
recomputations come ahead or not, and adjacent runs are joined. A change that frees or needs memory may also
change the recomputation of its stage: the dearest bytes that fit are kept, or the cheapest ones that lack are
recomputed. The stage that lacks the most bytes comes first, then the one that computes the most. (Relieve the
bottleneck first: Aceso, EuroSys 2024.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
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
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pipefit.planner.bounds import host_route, in_flight
from pipefit.planner.evaluation import Budget, Candidate, Evaluation, Evaluator
from pipefit.planner.filling import Filler
from pipefit.planner.mapping import MOST, Orders, peer_rates, shared_out, swaps
from pipefit.planner.memory_choices import KEPT, TO_HOST, TO_PEERS, Floats, Menu, StageChoice, parts_of
from pipefit.planner.problem import Question, Split
from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import Member, Place, Share

# ---- Search

_T = TypeVar("_T")
_ENOUGH = 1e-4  # smaller gains, as parts of a step, do not continue the search
_ROUNDING = 1e-9
_WARM = 0.02  # part of a step by which an accepted plan may be slower in the beginning
_HOST_UPDATES = 3  # besides the places of tensors: optimizer state at the host, which updates
_LENDERS = 2  # devices from which a stage may borrow, besides those that it borrows from
_DRAWN = 3  # candidates of a group that it tries, before it changes to another group
_LOST, _STALE = 100, 200  # candidates without a better one after which it returns to the best, or ends


def improved(
    filler: Filler,
    start: Evaluation,
    *,
    budget: Budget,
    at_least: float,
    lends: bool = False,
    latest: bool = False,
) -> Evaluation:
    """Return the best plan that single changes make of `start`, until the budget ends.

    A group of changes is repeated while one is better, then the next group follows. No plan takes less than
    `at_least` seconds, so the search ends at a plan that is as fast. With `lends`, devices have to lend
    memory first; `latest` as in `Changes`.
    """
    changes = Changes(filler, start, latest=latest)
    best, number, without = start, 0, 0
    groups = [*(changes.lending() if lends else changes)]
    while without < len(groups) and not (best.fits and best.seconds <= at_least * (1 + _ROUNDING)):
        limit = best.over_bytes, best.seconds * (1 - _ENOUGH)
        number, without = number + 1, without + 1
        for candidate in groups[(number - 1) % len(groups)]:
            if budget.ends():
                return best
            result = _evaluated(filler, candidate, _below(best))
            if result is not None and result.order < limit:
                best, number, without = result, number - 1, 0
                groups = [*Changes(filler, result, latest=latest)]
                break
    return best


def wandered(
    filler: Filler, start: Evaluation, *, budget: Budget, at_least: float, seed: int = 0
) -> Evaluation:
    """Return the best plan that random changes make of `start`, until the budget ends or a plan is that fast.

    Plans that are a little slower are accepted in the beginning, and always plans that are as fast: under
    many schedules the slowest stage decides, so several stages have to change. (Simulated annealing:
    Kirkpatrick et al., Science 1983.)
    """
    rng, best, now = Random(seed), start, start  # noqa: S311 - no secret
    number = since = 0
    while since < _STALE and not (best.fits and best.seconds <= at_least):
        for candidate in _drawn(rng, [*Changes(filler, now)]):
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
        else:
            since += 1  # even if there is nothing to change
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
    """Return a candidate's evaluation; None if it cannot be carried out, or is not `below` some seconds."""
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
            split, choices = result.candidate
            leaner = way(choices[stage])
            if leaner == choices[stage]:
                continue
            if budget.ends():
                return result
            other = evaluator.evaluate(Candidate(split, _with(choices, stage, leaner)))
            if other is not None and _is_as_good(other, result, 0.0):
                result = other
    return result


# ---- Changes


class Changes:
    """Groups of changes of a plan.

    The bytes that a changed stage lacks are estimated as in filling, corrected by the plan's own peaks. With
    `latest`, stages that end a step late come early too, as steps wait at their end for moved state.
    """

    def __init__(self, filler: Filler, best: Evaluation, *, latest: bool = False) -> None:
        self._filler, self._best, self._means = filler, best, filler.question.means
        self._latest = latest
        self._split, self._choices = best.candidate
        needs = zip(best.over, self._all(self._split, self._choices), strict=True)
        self._off = [over - need for over, need in needs]
        self._rates = peer_rates(filler.question.cluster)

    def __iter__(self) -> Iterator[Iterator[Candidate]]:
        """Yield groups of candidates.

        Other cuts and devices, with all state at a place; one change on all stages; one change on one stage,
        as it is or with the recomputation that it needs. Only cuts and devices of a plan that keeps
        everything.
        """
        idle = self._best.fits and all(choice.idle for choice in self._choices)
        for place in (None, *(self._state_places if not idle else ())):
            yield self._cut(place)
            yield self._placed(place)
        if idle:
            return
        everywhere = (tuple(map(way, self._choices)) for way in _EVERYWHERE)
        yield (Candidate(self._split, changed) for changed in everywhere if changed != self._choices)
        for stage in self._in_order:
            yield self._as_it_is(stage)
            yield self._changed(stage)

    @property
    def _in_order(self) -> list[int]:
        """Stages in the order of their changes.

        That which lacks the most bytes comes first, then the one that computes the most. With `latest`, the
        one that ends last, the one that ends second and so on come between.
        """
        over, simulation, devices = self._best.over, self._best.simulation, self._split.devices
        stages, busy = range(len(over)), simulation.utilisation
        result = sorted(stages, key=lambda s: (-max(0, over[s]), -busy[devices[s]]))
        if not self._latest:
            return result
        lacking, ends = sum(nbytes > 0 for nbytes in over), simulation.last_ends
        late = sorted(stages, key=lambda s: -ends[devices[s]])
        between = chain.from_iterable(zip(result[lacking:], late, strict=False))
        return [*dict.fromkeys((*result[:lacking], *between, *result))]

    def lending(self) -> Iterator[Iterator[Candidate]]:
        """Yield groups of candidates in which a stage borrows memory."""
        idle = self._best.fits and all(choice.idle for choice in self._choices)
        for stage, choice in enumerate(self._choices if not idle else ()):
            menus = self._filler.evaluator.stage_menus(self._split)[stage]
            state = [TO_PEERS] if self._means.state else []
            ways = (self._borrowed(stage, choice, menus), self._moved_state(stage, choice, menus, state))
            yield self._mended_all(stage, chain.from_iterable(ways), or_not=True)

    def _as_it_is(self, stage: int) -> Iterator[Candidate]:
        """Yield candidates with one choice of a stage changed, and no other recomputation."""
        menus = self._filler.evaluator.stage_menus(self._split)[stage]
        for choice in _changes(self._choices[stage], menus, host=self._means.host):
            yield Candidate(self._split, _with(self._choices, stage, choice))

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
        """Yield candidates with one choice of a stage changed, and the recomputation that this needs."""
        choice, menus = self._choices[stage], self._filler.evaluator.stage_menus(self._split)[stage]
        ways = [_parted(choice, menus), self._borrowed(stage, choice, menus)]
        ways += [_moved(choice, n) for n, menu in enumerate(menus) if menu.tensors and self._means.host]
        ways.append(self._moved_state(stage, choice, menus, (KEPT, *self._state_places)))
        yield from self._mended_all(stage, chain.from_iterable(ways))

    def _moved_state(
        self, stage: int, choice: StageChoice, menus: Sequence[Menu], places: Sequence[int]
    ) -> Iterator[StageChoice]:
        """Yield choices with the optimizer state of all blocks, or of one, at each place."""
        some = dict.fromkeys((parts_of(menus), *(parts_of([menu]) for menu in menus)))
        for own, place in product(some, places):
            yield self._with_state(stage, choice, own, place)

    def _mended_all(
        self, stage: int, choices: Iterator[StageChoice], *, or_not: bool = False
    ) -> Iterator[Candidate]:
        """Yield candidates with these choices of a stage, and the recomputation that it and its lenders need.

        With `or_not`, also with no other recomputation of the stage itself.
        """
        split, before = self._split, self._filler.lent(self._split, stage, self._choices[stage])
        for other in dict.fromkeys(choices):
            for choice in dict.fromkeys((*((other,) if or_not else ()), self._mended(split, stage, other))):
                changed = _with(self._choices, stage, choice)
                more = (self._filler.lent(split, stage, choice) - before) * len(split.grid(stage).devices)
                for member, need in choice.peers.split(more) if choice.peers and more > 0 else ():
                    for lender in range(len(split.devices)):
                        if member.number in split.grid(lender).devices:
                            mended = self._mended(split, lender, changed[lender], need)
                            changed = _with(changed, lender, mended)
                if changed != self._choices:
                    yield Candidate(split, changed)

    def _with_state(
        self,
        stage: int,
        choice: StageChoice,
        parts: frozenset[int],
        place: int,
        devices: Sequence[int] | None = None,
    ) -> StageChoice:
        """Return a choice with the optimizer state of some parts at a place, if that is possible."""
        if place == TO_PEERS and choice.peers is None:
            lenders = self._lenders(devices or self._split.grid(stage).devices)
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
        lenders = self._lenders(self._split.grid(stage).devices) if self._means.peers else []
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

    def _lenders(self, devices: Sequence[int]) -> list[Place]:
        """Return the places of stages, and unused devices, that links of their own join to `devices`.

        The roomiest ones come first, then all together in shares of their room.
        """
        budgets, peaks = self._filler.question.cluster.budgets, self._best.peaks
        room = {device: budget - peaks[device] for device, budget in enumerate(budgets)}
        grids = [self._split.grid(stage).devices for stage in range(len(self._split.devices))]
        used = {device for grid in grids for device in grid}
        groups = sorted([*grids, *((device,) for device in range(len(budgets)) if device not in used)])
        rates = self._rates[list(devices)].min(axis=0)
        there = [group for group in groups if all(rates[device] > 0 for device in group)]
        there.sort(key=lambda group: -sum(room[device] for device in group))
        result = [Place([Share(Member.device(n), 1) for n in group]) for group in there[:_LENDERS]]
        shares = {device: room[device] for group in there for device in group if room[device] > 0}
        return [*result, shared_out(shares, range(len(budgets)))] if len(there) > 1 and shares else result

    def _cut(self, place: int | None) -> Iterator[Candidate]:
        """Yield candidates in which a block goes over a cut, or one block over each of some adjacent cuts."""
        edges = self._split.edges
        for first, last in combinations_with_replacement(range(1, len(edges) - 1), 2):
            for by in (-1, 1):
                moved = [edge + by * (first <= n <= last) for n, edge in enumerate(edges)]
                if all(start < stop for start, stop in pairwise(moved)):
                    yield self._on(self._split._replace(edges=tuple(moved)), place)

    def _placed(self, place: int | None) -> Iterator[Candidate]:
        """Yield candidates in which two stages swap devices, with or without blocks, or take unused devices.

        Devices that are interchangeable stay.
        """
        groups, (edges, devices, _) = self._filler.groups, self._split
        if not self._means.mapping or not groups or self._split.grids:
            return
        widths = [stop - start for start, stop in pairwise(edges)]
        for one, other in combinations(range(len(devices)), 2):
            if groups[devices[one]] != groups[devices[other]]:
                swapped = _swapped_pair(devices, one, other)
                yield self._on(Split(edges, swapped), place)
                if widths[one] != widths[other]:
                    moved = (0, *accumulate(_swapped_pair(widths, one, other)))
                    yield self._on(Split(moved, swapped), place)
        unused = {groups[device]: device for device in sorted(groups) if device not in devices}
        for stage, device in product(range(len(devices)), unused.values()):
            if groups[device] != groups[devices[stage]]:
                yield self._on(Split(edges, _with(devices, stage, device)), place)

    def _on(self, split: Split, place: int | None) -> Candidate:
        """Return the candidate with another split, in which blocks are treated the same as far as possible.

        The optimizer state of changed stages is at `place`, or stays where it is.
        """
        flat = [*chain.from_iterable(zip(c.recipes, c.places, strict=True) for c in self._choices)]
        states, updates = (
            frozenset[int]().union(*(getattr(choice, name) for choice in self._choices))
            for name in ("states", "updates")
        )
        choices = list[StageChoice]()
        stages = zip(
            pairwise(split.edges), self._choices, self._filler.evaluator.stage_menus(split), strict=True
        )
        for stage, ((start, stop), own, menus) in enumerate(stages):
            devices, same = (
                split.grid(stage).devices,
                split.edges[stage : stage + 2] == self._split.edges[stage : stage + 2],
            )
            if same and devices == self._split.grid(stage).devices:
                choices.append(own)
                continue
            recipes, places = zip(*flat[start:stop], strict=True)
            recipes = tuple(min(n, len(menu.recipes) - 1) for n, menu in zip(recipes, menus, strict=True))
            parts = parts_of(menus)
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
            if choice.peers is None or any(Member.device(n) in choice.peers.members for n in devices):
                places = tuple(KEPT if there == TO_PEERS else there for there in places)
                choice = choice._replace(places=places, lent=frozenset(), peers=None)
            if place is not None:
                choice = self._with_state(stage, choice, parts, place, devices)
            choices.append(self._mended(split, stage, _lending(choice)))
        return Candidate(split, tuple(choices))

    def _mended(self, split: Split, stage: int, choice: StageChoice, more: float = 0.0) -> StageChoice:
        """Return a choice that recomputes as much as its stage needs by estimate, and `more` bytes."""
        need = self._need(split, stage, choice) + self._off[stage] + more
        steps = [*self._filler.priced_steps(split, stage)]
        recipes = [*choice.recipes]
        for step in steps if need > 0 else ():
            if need > 0 and recipes[step.block] == step.recipe - 1:
                recipes[step.block], need = step.recipe, need - step.nbytes
        for step in reversed(steps) if need < 0 else ():
            if recipes[step.block] == step.recipe and need + step.nbytes <= 0:
                recipes[step.block], need = step.recipe - 1, need + step.nbytes
        return choice._replace(recipes=tuple(recipes), early=min(choice.early, sum(map(bool, recipes))))

    def _all(self, split: Split, choices: Sequence[StageChoice]) -> list[float]:
        return [self._need(split, stage, choice) for stage, choice in enumerate(choices)]

    def _need(self, split: Split, stage: int, choice: StageChoice) -> float:
        """Return the bytes that a stage's device lacks by estimate; negative if it has room."""
        return self._filler.lack(split, stage) - self._filler.freed(split, stage, choice)


def _changes(choice: StageChoice, menus: Sequence[Menu], *, host: bool) -> Iterator[StageChoice]:
    """Yield choices that differ in a block, in the timing of runs, or in spilled gradients and parameters.

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
    if choice.gradients:
        yield choice._replace(gradients=choice.gradients - 1)
    if choice.parameters:
        yield choice._replace(parameters=choice.parameters - 1)
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


def _lapped(choice: StageChoice) -> Iterator[StageChoice]:
    """Yield choices with the other lead, or with one block more or less in the `near` bundle."""
    if choice.blocks_to(TO_HOST):
        yield choice._replace(lead=1 - choice.lead)
    for near in (choice.near - 1, choice.near + 1):
        if 0 <= near <= len(choice.blocks_to(TO_HOST)):
            yield choice._replace(near=near)


def _lending(choice: StageChoice) -> StageChoice:
    """Return a choice without lenders if nothing is lent to it."""
    return choice if choice.lent or TO_PEERS in choice.places else choice._replace(peers=None)


_Way = Callable[[StageChoice], StageChoice]
_NONE = frozenset[int]()
_LEANER: tuple[_Way, ...] = (  # without techniques, one after the other
    lambda choice: choice._replace(states=_NONE, updates=_NONE),
    lambda choice: choice._replace(updates=_NONE),
    lambda choice: choice._replace(gradients=0, parameters=0),
    lambda choice: choice._replace(
        places=(KEPT,) * len(choice.places), near=0, peers=None, lent=_NONE, staying=_NONE
    ),
    lambda choice: choice._replace(recipes=(0,) * len(choice.recipes), early=0),
)
_EVERYWHERE: tuple[_Way, ...] = (  # all copies have the time of two passes; the host updates all, or nothing
    lambda choice: choice._replace(near=0),
    lambda choice: choice._replace(updates=choice.states),
    lambda choice: choice._replace(updates=_NONE),
)


def _with(of: tuple[_T, ...], place: int, item: _T) -> tuple[_T, ...]:
    return (*of[:place], item, *of[place + 1 :])


def _swapped_pair(of: Sequence[int], one: int, other: int) -> tuple[int, ...]:
    result = [*of]
    result[one], result[other] = result[other], result[one]
    return tuple(result)


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
        tried = np.array([order, *swaps(order, count)])
        best = int(np.lexsort(_scores(tried[:, :count], weights, loads, rates)[::-1])[0])
        order = tried[best]
    return order[None, :count]
