"""Polishes a candidate: what is done with a single block of a stage is changed, as long as that makes it better.

Filling treats blocks by one order of prices. Here each may leave it: recompute more or less, move or stay, go ahead or
not; runs that touch may be joined. Each change is simulated as it is, which is worth its time where blocks differ and
programs are short; a budget ends it elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from pipefit.planner.choices import KEPT, TO_HOST, StageChoice
from pipefit.planner.evaluation import Budget, Candidate, Evaluation, Evaluator
from pipefit.planner.menus import Menu

_ENOUGH = 1e-4  # gains below this part of a step are not worth going on for


def polished(evaluator: Evaluator, start: Evaluation, *, budget: Budget, at_least: float) -> Evaluation:
    """The best that single changes make of `start`, until the budget ends; none is below `at_least` seconds."""
    best = start
    found: Evaluation | None = start
    while found is not None and not (found.fits and found.seconds <= at_least * (1 + _ENOUGH)):
        best = found
        found = _first_better(evaluator, best, budget)
    return best if found is None else found


def spared(evaluator: Evaluator, best: Evaluation) -> Evaluation:
    """The plan without what it does not need: a technique of a stage is left out if steps are then no longer and no
    more memory is missing.
    """
    for candidate in _leaner(best.candidate):
        found = evaluator.evaluate(candidate)
        if found is not None and (found.over_bytes, found.seconds) <= (best.over_bytes, best.seconds):
            return spared(evaluator, found)
    return best


def _leaner(candidate: Candidate) -> Iterator[Candidate]:
    """The candidates that do one thing less on one stage."""
    split, choices = candidate
    for stage, choice in enumerate(choices):
        for leaner in dict.fromkeys((_without_states(choice), _without_moves(choice), _without_recomputation(choice))):
            if leaner != choice:
                yield Candidate(split, (*choices[:stage], leaner, *choices[stage + 1 :]))


def _first_better(evaluator: Evaluator, best: Evaluation, budget: Budget) -> Evaluation | None:
    missing, seconds, _ = best.order
    for candidate in _neighbours(evaluator, best):
        if budget.ends():
            return None
        found = evaluator.evaluate(candidate)
        if found is not None and found.order < (missing, seconds * (1 - _ENOUGH), 0):
            return found
    return None


def _neighbours(evaluator: Evaluator, best: Evaluation) -> Iterator[Candidate]:
    """The candidates that differ in one stage, the one that lacks bytes or computes the most first."""
    split, choices = best.candidate
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
    if choice.states:
        yield choice._replace(states=choice.states - 1)
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


def _lapped(choice: StageChoice) -> Iterator[StageChoice]:
    """One block more or less in the bundle that has the time of one forward or backward; the other lead."""
    if choice.blocks_to(TO_HOST):
        yield choice._replace(lead=1 - choice.lead)
    for near in (choice.near - 1, choice.near + 1):
        if 0 <= near <= len(choice.blocks_to(TO_HOST)):
            yield choice._replace(near=near)


def _without_states(choice: StageChoice) -> StageChoice:
    """All optimizer state stays on the device."""
    return choice._replace(states=0)


def _without_moves(choice: StageChoice) -> StageChoice:
    """No tensor moves."""
    return choice._replace(places=(KEPT,) * len(choice.places), near=0, peers=None)


def _without_recomputation(choice: StageChoice) -> StageChoice:
    """No layer goes forward again."""
    return choice._replace(recipes=(0,) * len(choice.recipes), early=0)


def _with(numbers: tuple[int, ...], place: int, number: int) -> tuple[int, ...]:
    return (*numbers[:place], number, *numbers[place + 1 :])
