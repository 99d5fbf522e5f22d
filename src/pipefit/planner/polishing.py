"""Polishes a candidate: what is done with a single block of a stage is changed, as long as that makes it better.

Filling treats blocks by one order of prices. Here each may leave it: recompute more or less, move or stay, go ahead or
not; runs that touch may be joined. Each change is simulated as it is, which is worth its time where blocks differ and
programs are short; a budget ends it elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product

from pipefit.planner.choices import KEPT, TO_HOST, StageChoice
from pipefit.planner.evaluation import Budget, Candidate, Evaluation, Evaluator
from pipefit.planner.menus import Menu

_ENOUGH = 1e-4  # gains below this part of a step are not worth going on for
_ROUNDING = 1e-9


def polished(evaluator: Evaluator, start: Evaluation, *, budget: Budget, at_least: float) -> Evaluation:
    """The best that single changes make of `start`, until the budget ends; none is below `at_least` seconds."""
    best = start
    found: Evaluation | None = start
    while found is not None and not (found.fits and found.seconds <= at_least * (1 + _ROUNDING)):
        best = found
        found = _first_better(evaluator, best, budget)
    return best if found is None else found


def spared(evaluator: Evaluator, start: Evaluation, *, budget: Budget) -> Evaluation:
    """The plan without what it does not need: a technique of a stage is left out if steps are then no longer and no
    more memory is missing. Until the budget ends.
    """
    best: Evaluation | None = None
    found = start
    while found is not best:
        best = found
        for stage, way in product(range(len(start.candidate.choices)), _LEANER):
            found = _leaner(evaluator, found, stage, way, budget)
    return best


def _leaner(
    evaluator: Evaluator, best: Evaluation, stage: int, way: Callable[[StageChoice], StageChoice], budget: Budget
) -> Evaluation:
    """The plan that does one thing less on one stage, if that is as good; else the plan itself."""
    split, choices = best.candidate
    leaner = way(choices[stage])
    if leaner == choices[stage] or budget.ends():
        return best
    found = evaluator.evaluate(Candidate(split, (*choices[:stage], leaner, *choices[stage + 1 :])))
    as_good = found is not None and (found.over_bytes, found.seconds) <= (best.over_bytes, best.seconds)
    return found if found is not None and as_good else best


def _first_better(evaluator: Evaluator, best: Evaluation, budget: Budget) -> Evaluation | None:
    missing, seconds = best.order[:2]
    for candidate in _neighbours(evaluator, best):
        if budget.ends():
            return None
        found = evaluator.evaluate(candidate)
        if found is not None and found.order < (missing, seconds * (1 - _ENOUGH)):
            return found
    return None


def _neighbours(evaluator: Evaluator, best: Evaluation) -> Iterator[Candidate]:
    """The candidates that differ in one way on all stages, then those in one: the one that lacks bytes or computes
    the most first.
    """
    split, choices = best.candidate
    for way in _EVERYWHERE:
        if (everywhere := tuple(way(choice) for choice in choices)) != choices:
            yield Candidate(split, everywhere)
    menus, busy = evaluator.stage_menus(split), best.simulation.utilisation
    for stage in sorted(range(len(choices)), key=lambda s: (-max(0, best.over[s]), -busy[split.devices[s]])):
        for choice in _changes(choices[stage], menus[stage], host=evaluator.question.means.host):
            yield Candidate(split, (*choices[:stage], choice, *choices[stage + 1 :]))


def _changes(choice: StageChoice, menus: Sequence[Menu], *, host: bool) -> Iterator[StageChoice]:
    """The choices that differ in a block, or in how runs come; blocks move only if the `host` may be used."""
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
    yield from _state(choice)
    yield from _lapped(choice)
    yield from _exchanged(choice, menus)


def _exchanged(choice: StageChoice, menus: Sequence[Menu]) -> Iterator[StageChoice]:
    """Two blocks, each with what is done with the other, as far as its menu goes."""
    for one, other in combinations(range(len(choice.recipes)), 2):
        order = list(range(len(choice.recipes)))
        order[one], order[other] = other, one
        recipes = tuple(min(choice.recipes[n], len(m.recipes) - 1) for n, m in zip(order, menus, strict=True))
        places = tuple(choice.places[n] for n in order)
        if (recipes, places) != (choice.recipes, choice.places):
            yield choice._replace(recipes=recipes, places=places)


def _moved(choice: StageChoice, block: int) -> Iterator[StageChoice]:
    """The block stays instead of moving, or moves to the host, instead of being recomputed or beside it."""
    if choice.places[block]:
        yield choice._replace(places=_with(choice.places, block, KEPT))
        return
    places, near = _with(choice.places, block, TO_HOST), choice.near
    ways = dict.fromkeys(((near + 1, choice.lead), (near, choice.lead), (near + 1, 0)))
    for recipes in dict.fromkeys((_with(choice.recipes, block, 0), choice.recipes)):
        for some, lead in ways:
            yield choice._replace(places=places, recipes=recipes, near=some, lead=lead)


def _state(choice: StageChoice) -> Iterator[StageChoice]:
    """The state of one block less at the host; one block more or less updated there."""
    if choice.states:
        yield choice._replace(states=choice.states - 1, updates=min(choice.updates, choice.states - 1))
    for updates in (choice.updates - 1, choice.updates + 1):
        if 0 <= updates <= choice.states:
            yield choice._replace(updates=updates)
    if choice.gradients:
        yield choice._replace(gradients=choice.gradients - 1)
    if choice.parameters:
        yield choice._replace(parameters=choice.parameters - 1)


def _lapped(choice: StageChoice) -> Iterator[StageChoice]:
    """One block more or less in the bundle that has the time of one forward or backward; the other lead."""
    if choice.blocks_to(TO_HOST):
        yield choice._replace(lead=1 - choice.lead)
    for near in (choice.near - 1, choice.near + 1):
        if 0 <= near <= len(choice.blocks_to(TO_HOST)):
            yield choice._replace(near=near)


def _without_states(choice: StageChoice) -> StageChoice:
    """All optimizer state stays on the device."""
    return choice._replace(states=0, updates=0)


def _all_updates(choice: StageChoice) -> StageChoice:
    """All blocks whose optimizer state is at the host are updated there."""
    return choice._replace(updates=choice.states)


def _unhurried(choice: StageChoice) -> StageChoice:
    """All copies have the time of two forwards or backwards."""
    return choice._replace(near=0)


def _without_updates(choice: StageChoice) -> StageChoice:
    """All blocks are updated on the device."""
    return choice._replace(updates=0)


def _without_spills(choice: StageChoice) -> StageChoice:
    """All gradients and parameters stay on the device."""
    return choice._replace(gradients=0, parameters=0)


def _without_moves(choice: StageChoice) -> StageChoice:
    """No tensor moves."""
    return choice._replace(places=(KEPT,) * len(choice.places), near=0, peers=None)


def _without_recomputation(choice: StageChoice) -> StageChoice:
    """No layer goes forward again."""
    return choice._replace(recipes=(0,) * len(choice.recipes), early=0)


_LEANER = _without_states, _without_updates, _without_spills, _without_moves, _without_recomputation
_EVERYWHERE = _unhurried, _all_updates, _without_updates


def _with(numbers: tuple[int, ...], place: int, number: int) -> tuple[int, ...]:
    return (*numbers[:place], number, *numbers[place + 1 :])
