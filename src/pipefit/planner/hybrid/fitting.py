"""The fastest plans that fit, of the fewest estimated seconds: by the exact programme, or of long questions by labels.

A question is long where numbers of stages, blocks and devices are too many to tell all of them apart. Then plans are
looked for that take little longer than the least that any takes (`hybrid.least`), and then ever longer ones: those of
all degrees together, and those of each alone, since what is found is no optimum (`hybrid.labels`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pipefit.grids import Sharding
from pipefit.planner.bounds import in_flight
from pipefit.planner.hybrid.labels import Labelled, Lines, Option, counts_upto
from pipefit.planner.hybrid.least import Least, work_before
from pipefit.planner.hybrid.programme import Choice, Way, banded
from pipefit.planner.hybrid.search import LONG, WORK, Hybrid, Search, budget_level, searches
from pipefit.planner.question import Question

_TIMES = 6  # that plans are looked for which turn out to fit
_FIRST = 1.5  # times what no step takes less than, in which plans are looked for first
_ROUNDING = 1 + 1e-9
_INFINITE = float("inf")


def fastest(
    question: Question, most: int, shards: Sequence[Sharding], at_most: float = _INFINITE, *, again: bool = False
) -> list[Hybrid]:
    """Plans that fit, whose replicas divide one of `shards`: for up to `most` numbers of stages the one of the fewest
    estimated seconds, if these are no more than `at_most`; the fastest first. Stages may keep their inputs alone if
    they may run `again`.

    Where state is divided, those that a few searches find.
    """
    level, found = budget_level(question), list[Hybrid]()
    for search in searches(question, shards, again=again):
        found += _fitting(search, level, at_most, most)
    return sorted(found, key=lambda one: one.value)[:most]


def _fitting(search: Search, level: float, at_most: float, most: int) -> list[Hybrid]:
    """Up to `most` plans that take no longer than `at_most` seconds and whose stages stay within a level."""
    search.expects = True
    long = search.evaluated * search.states.count > LONG
    for _ in range(1 + (_TIMES if long else min(_TIMES, WORK // search.candidates))):
        tried = (_labelled if long else Search.fastest)(search, level, at_most, most)
        fit = [one for one in tried if search.value(one) <= level]
        if fit[:1] == tried[:1]:
            return fit
    return fit


def _labelled(search: Search, level: float, at_most: float, most: int) -> list[Hybrid]:
    """Fast plans of a long question whose stages stay within a level, the fastest first."""
    longest = max(float(search.seconds(choice).step[0, -1]) for choice in search.choices)
    slowest = at_most
    if at_most == _INFINITE:
        slowest = _FIRST * Least.of(search.question).seconds(len(search.question.cluster.devices))
    found = _within(search, level, slowest)
    while not found and at_most == _INFINITE and slowest < longest:
        slowest *= 2
        found = _within(search, level, slowest)
    return found[:most]


def _within(search: Search, level: float, slowest: float) -> list[Hybrid]:
    """The same of those that take no longer than `slowest` seconds."""
    question, how = search.question, search.question.training
    options = [
        option
        for choice in search.choices
        for way in search.ways(choice.degree)
        for option in _options(search, choice, way, level, slowest)
    ]
    held = [0, *(in_flight(how, 0, left) for left in range(1, question.blocks + 1))]
    lines = Lines(how.microbatches, None if how.endless else np.array(held))
    spent = how.microbatches * work_before(question)[:-1] / (slowest * _ROUNDING)
    most_used = len(question.cluster.devices) - spent
    found = dict[tuple[int, ...], Hybrid]()
    for degrees in dict.fromkeys([tuple(search.tables), *((degree,) for degree in search.tables)]):
        own = [one for one in options if one.choice.degree in degrees]
        best = Labelled(question.blocks, search.states.used, own, lines, most_used, search.barred)
        stages = best.best() if best.value <= slowest else ()
        if len(stages) in search.counts:
            made = Hybrid(search.split(stages), best.value, sum(one.ranges for one in own), stages)
            found.setdefault(made.split.edges, made)
    return sorted(found.values(), key=lambda one: one.value)


def _options(search: Search, choice: Choice, way: Way, level: float, slowest: float) -> Iterator[Option]:
    """What stages cost that are this choice, if any of them takes no longer than `slowest`."""
    times = search.seconds(choice, way)
    starts, stops = np.nonzero(np.triu(times.step <= slowest, 1))
    if not len(starts):
        return
    width, step = int((stops - starts).max()), np.where(times.step <= slowest, times.step, _INFINITE)
    head, each, longer = (banded(one, width) for one in (step, times.each, times.longer))
    most_bytes = level * search.unit(choice)
    room = search.tables[choice.degree].room(counts_upto(search.counts[-1]), way, width, most_bytes)
    yield Option(choice, way, head, each, longer, room)
