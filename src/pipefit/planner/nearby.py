"""Plans beside those that are estimated to be fast, simulated: estimates leave out what messages take.

They are the plans of `uniform`, `parameters` and `time` with the same degree for all stages, on as many stages as the
devices are enough for; and what comes of moving a cut of the fastest plan by one block, as long as that is faster. So
an answer is never slower than what Megatron and DeepSpeed do by such splits, as long as the budget lasts. Then
replicas sum in more buckets, beside the backward, and divide their state, where that is faster.

Costs: a simulation for each plan whose slowest stage alone would not take longer than a plan that is known, within a
budget of work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from pipefit.cost.time import layer_seconds
from pipefit.errors import UsageError
from pipefit.planner.degrees import Degree
from pipefit.planner.parameters import parameters
from pipefit.planner.question import Planner, Question, Split
from pipefit.planner.replicas import answers
from pipefit.planner.simulations import Simulations
from pipefit.planner.time import time
from pipefit.planner.uniform import uniform

_WORK = 60_000  # after which no other plan is simulated
_BUCKETS = 4, 16, 64
_PLANNERS: tuple[Planner, ...] = (uniform, parameters, time)


class Timed(NamedTuple):
    """A split that fits and keeps everything, with its seconds by simulation."""

    split: Split
    seconds: float


def nearby(simulations: Simulations, best: Timed | None, at_most: float) -> Timed | None:
    """The fastest of a plan and of those beside it that fit; None if none does. Those that are certain to take
    `at_most` seconds or more are left out.
    """
    question, search = simulations.question, _Search(simulations, at_most)
    best = search.first(alike(question), best, following=True)
    while best is not None:
        found = search.first(beside(best.split), best)
        if found is best:
            break
        best = found
    return None if best is None else search.first(_together(question, best.split), best, following=True)


def alike(question: Question) -> Iterator[Split]:
    """The splits of simple planners whose stages all have one degree, for every degree; the most devices first."""
    devices = len(question.cluster.devices)
    for degree in sorted(question.degrees, key=lambda degree: -degree.devices):
        stages = question.options.stages or min(question.blocks, devices // degree.devices)
        options = replace(question.options, stages=stages, **degree.pins)
        with suppress(UsageError):
            yield from (found.split for found in answers(replace(question, options=options), *_PLANNERS))


def beside(split: Split) -> Iterator[Split]:
    """The splits with one cut moved by a block."""
    edges = split.edges
    for number in range(1, len(edges) - 1):
        for cut in (edges[number] - 1, edges[number] + 1):
            if edges[number - 1] < cut < edges[number + 1]:
                yield split._replace(edges=(*edges[:number], cut, *edges[number + 1 :]))


def _together(question: Question, split: Split) -> Iterator[Split]:
    """The splits whose replicas sum in more buckets, or divide their state too."""
    for shard in question.shards:
        for buckets in (*_BUCKETS, question.blocks):
            grids = [replace(one, shard=shard, buckets=buckets) if one.data > 1 else one for one in split.grids]
            if tuple(grids) != split.grids:
                yield split._replace(grids=tuple(grids))


class _Search:
    """Simulations for one question, within a budget."""

    def __init__(self, simulations: Simulations, at_most: float) -> None:
        self._question, self._simulations, self._at_most = simulations.question, simulations, at_most
        self._until = simulations.work + _WORK
        self._before: Callable[[Degree], Sequence[float]] = cache(self._seconds_before)

    def first(self, splits: Iterator[Split], best: Timed | None, *, following: bool = False) -> Timed | None:
        """The first of these splits that fits and is faster than the best; or the fastest, those `following` too."""
        for split in splits:
            found = self._timed(split, best)
            if found is not None and not following:
                return found
            best = found or best
        return best

    def _timed(self, split: Split, best: Timed | None) -> Timed | None:
        """A split that fits and is faster than the best."""
        known = self._at_most if best is None else min(self._at_most, best.seconds)
        if self._simulations.work > self._until or self._least(split) >= known:
            return None
        try:
            simulation = self._simulations.of(split)
            seconds = simulation.step_seconds[-1]
            if best is not None and seconds >= best.seconds:
                return None
            full = any(p > b for p, b in zip(simulation.peak_bytes, self._question.cluster.budgets, strict=True))
        except UsageError:  # what they exchange cannot be divided, or not be held by replicas
            return None
        return None if full else Timed(split, seconds)

    def _least(self, split: Split) -> float:
        """What the passes of the slowest stage take, on the fastest kind of device."""
        found = []
        for number, blocks in enumerate(pairwise(split.edges)):
            start, stop = self._question.layers(*blocks)
            before = self._before(Degree.of(split.grid(number)))
            found.append(before[stop] - before[start])
        return self._question.training.microbatches * max(found)

    def _seconds_before(self, degree: Degree) -> Sequence[float]:
        """Seconds of the passes through all layers before each, on the fastest kind of device."""
        how, profile = self._question.training, self._question.profile
        measured = self._question.measured(degree)
        kinds = {device.kind.key: device.kind for device in self._question.cluster.devices}.values()
        of_kinds = zip(*(layer_seconds(measured, kind, how.dtype) for kind in kinds), strict=True)
        fewest = [min(of.forward + of.backward for of in times) for times in of_kinds]
        return [0.0, *accumulate(fewest[: len(profile.layers)])]
