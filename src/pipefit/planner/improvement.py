"""Improves a filled split by small changes, each filled again and simulated, as long as one of them is better.

Of the optimizer state that hosts have, they update that of some stages or of all, or a part of each stage's
(`planner.updating`). Then stages come in the order of their need:
those whose devices lack bytes, then those that compute the largest part of a step. Of each a block goes to a neighbour,
the host's link is used more or less, and more or fewer recomputations come ahead. Better is: fewer bytes over the caps,
then fewer seconds, then a lower peak. (Relieve the bottleneck first: Aceso, EuroSys 2024.)

Of a plan that keeps everything, and whose transfers do not wait for each other, all changes are timed at once
(`planner.at_once`), and those that are no faster are not simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from pipefit.planner.evaluation import Budget
from pipefit.planner.filling import Filled, Filler, Setting
from pipefit.planner.question import Split
from pipefit.planner.updating import divided_updates

_UPDATED = 1.0, 0.5, 0.75, 0.25, 0.0  # parts of the optimizer state at the host that is updated there
_HOST_PARTS = (0.0, 0.5, 1.0, 1.5)
_ENOUGH = 1e-3  # gains below this part of a step are not worth going on for
_ROUNDING = 1e-9


def improved(filler: Filler, start: Filled, *, budget: Budget, at_least: float) -> Filled:
    """The best that small changes make of `start`, until the budget ends.

    No plan takes less than `at_least` seconds, so that there is nothing to look for once a plan is as fast.
    """
    found: Filled | None = start
    while found is not None:
        best = found
        found = _first_better(filler, best, budget, at_least)
    return best


def _first_better(filler: Filler, best: Filled, budget: Budget, at_least: float) -> Filled | None:
    """The first change that makes it better; None if none does, or nothing is left to gain."""
    if best.found.fits and best.found.seconds <= at_least * (1 + _ROUNDING):
        return None
    may_be_faster = _Faster(filler, best)
    for setting in _neighbours(filler, best):
        if budget.ends():
            return None
        if best.found.fits and filler.fewest_seconds(setting.split) >= best.found.seconds:
            continue
        if not may_be_faster(setting):
            continue
        found = filler.fill(setting, best.margins, than=best.found)
        if found is not None and _better(found, best):
            return found
    return None


class _Faster:
    """Whether a setting may be faster than a plan: those beside a plan that keeps everything are timed at once.

    They are if that tells the first step of the plan itself as the simulator does.
    """

    def __init__(self, filler: Filler, best: Filled) -> None:
        self._filler, self._best = filler, best

    def __call__(self, setting: Setting) -> bool:
        known, best = self._times, self._best.found.seconds
        if setting.split not in known or not self._filler.keeps(setting.split):
            return True
        return known[setting.split] < known[self._best.setting.split] - _ENOUGH * best

    @cached_property
    def _times(self) -> Mapping[Split, float]:
        """Seconds of a step of the splits beside the plan's, and of its own; none where they do not tell."""
        found, own = self._best.found, self._best.setting.split
        if not found.fits or not all(choice.idle for choice in found.candidate.choices):
            return {}
        splits = list(dict.fromkeys((own, *(setting.split for setting in _neighbours(self._filler, self._best)))))
        times = self._filler.evaluator.at_once(splits)
        first = found.simulation.step_seconds[0]
        if times is None or abs(times[0] - first) > _ROUNDING * first:
            return {}
        return dict(zip(splits, times, strict=True))


def _better(one: Filled, other: Filled) -> bool:
    """Whether a candidate is better by more than nothing."""
    missing, seconds = other.found.order[:2]
    return one.found.order < (missing, seconds * (1 - _ENOUGH))


def _neighbours(filler: Filler, filled: Filled) -> Iterator[Setting]:
    """The settings that differ by one small change, those of the neediest stage first."""
    found, setting = filled.found, filled.setting
    busy = found.simulation.utilisation
    stages = range(len(setting.host))
    if any(choice.states for choice in found.candidate.choices):
        same = [(part,) * len(setting.host) for part in _UPDATED]
        for parts in dict.fromkeys((*divided_updates(filler.question, setting.split), *same)):
            if parts != setting.updated:
                yield setting._replace(updated=parts)
    for stage in sorted(stages, key=lambda s: (-max(0, found.over[s]), -busy[setting.split.devices[s]])):
        yield from _narrower(setting, stage)
        yield from _host(setting, stage)
        yield from _early(setting, stage, sum(map(bool, found.candidate.choices[stage].recipes)))


def _narrower(setting: Setting, stage: int) -> Iterator[Setting]:
    """The stage gives its first block to the stage before, or its last one to the stage behind, or so on down the line.

    A block may also pass through stages between: all edges up to a later or earlier stage move by one.
    """
    edges = setting.split.edges
    if edges[stage + 1] - edges[stage] < 2:
        return
    last = len(edges) - 1
    for far in range(stage + 1, last):
        yield _with_edges(setting, [e - (stage < n <= far) for n, e in enumerate(edges)])
    for far in range(stage, 0, -1):
        yield _with_edges(setting, [e + (far <= n <= stage) for n, e in enumerate(edges)])


def _with_edges(setting: Setting, edges: list[int]) -> Setting:
    return setting._replace(split=Split(tuple(edges), setting.split.devices))


def _host(setting: Setting, stage: int) -> Iterator[Setting]:
    """The host's link used more or less."""
    for part in _HOST_PARTS:
        if part != setting.host[stage]:
            host = (*setting.host[:stage], part, *setting.host[stage + 1 :])
            yield setting._replace(host=host)


def _early(setting: Setting, stage: int, recomputed: int) -> Iterator[Setting]:
    """Twice or half as many recomputations ahead."""
    now = setting.early[stage]
    for number in {max(1, 2 * now), now // 2, recomputed} - {now}:
        if number <= recomputed:
            yield setting._replace(early=(*setting.early[:stage], number, *setting.early[stage + 1 :]))
