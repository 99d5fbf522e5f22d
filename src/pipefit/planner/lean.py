"""The lean planner: the lowest peak of all plans that it reads, with state at hosts if that lowers it.

The plan of `exact`, which keeps everything on the devices, is one of the compared plans. The others have
stages of one degree, for every degree and number of stages, cut as by `exact` or `time`; a stage's state is
at its hosts:

    one device             the host updates every block; or gradients, parameters and optimizer state are at
                           the host between passes, block by block
    replicas (ZeRO-2, 3)   the same for the state that they divide, in a bucket for each block, by blocks or
                           by whole buckets; gradients stay (ZeRO-Offload, ZeRO-Infinity)

Nothing returns before it is needed. From the leanest plan on, cuts move by a block while that lowers the
peak. So the result is the lowest of the plans read, not of all plans. Peaks are read from programs, to the
byte; time is not considered, and steps are often several times as long.

Cost: a program of every stage of a few dozen plans (`hybrid.divided_state`), within a limit of work; those
with the most devices for each stage come first, then those with the fewest. The plan says if the limit has
ended the search. (ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from pipefit.errors import UsageError
from pipefit.memory import missing_bytes
from pipefit.planner.baselines.simple import time
from pipefit.planner.common_plans import AWAY, UPDATED, Moves, decided, is_allowed
from pipefit.planner.exact import exact
from pipefit.planner.hybrid import leanest_split
from pipefit.planner.hybrid.divided_state import Reader
from pipefit.planner.neighbours import beside
from pipefit.planner.open_choices import counts_of
from pipefit.planner.problem import SINGLE, PlannerResult, Question, Split, plan_of
from pipefit.planner.replicas import in_replicas
from pipefit.schema.decisions import Decision, What
from pipefit.schema.grids import Sharding
from pipefit.schema.layer_costs import LayerCost
from pipefit.simulator import Simulation
from pipefit.simulator.assembled import assembled
from pipefit.texts import counted

_WORK = 250_000  # limit of actions read

STATE_AWAY: Moves = ((What.OFFLOAD, "optimizer"),)
ALL_AWAY: Moves = (*AWAY, (What.OFFLOAD, "gradients"))
_OF_ONE: tuple[tuple[Sharding, Moves], ...] = (("none", UPDATED), ("none", ALL_AWAY))
_OF_SEVERAL: tuple[tuple[Sharding, Moves], ...] = (
    ("parameters", ()),
    ("gradients", UPDATED),
    ("parameters", UPDATED),
    ("parameters", AWAY),
)


class StateCandidate(NamedTuple):
    """Split with the treatment of its stages' state."""

    split: Split
    moves: Moves
    in_buckets: bool = False  # instead of block by block


def lean(question: Question) -> PlannerResult:
    """Return the plan with the lowest peak: that of `exact`, or one whose state is at hosts."""
    kept, search = exact(question), _PeakReader(question)
    result = search.best(kept.value)
    told = counted(search.count, "plan")
    if result is None:
        remark = (
            f"None of {told} with state on hosts has a lower peak."
            if search.count
            else "State cannot be kept on hosts."
        )
        return kept._replace(remarks=(*kept.remarks, remark))
    candidate, value = result
    remark = f"It has the lowest peak of {told} with state on hosts, below the lowest possible peak without."
    remark += " The search stopped at its work limit." if search.ended else ""
    decisions = search.decisions(candidate)
    return PlannerResult(
        candidate.split,
        question.objective,
        value,
        search.count,
        proven=False,
        decisions=decisions,
        remarks=(remark,),
    )


def leanest_with_hosts(questions: Iterable[Question]) -> tuple[Question, PlannerResult]:
    """Return the question whose plan has the lowest peak, and that plan.

    Raises:
        UsageError: no question has a plan; the error of the last one.
    """
    refusal, result = UsageError("no planning problem was given"), list[tuple[Question, PlannerResult]]()
    for question in questions:
        try:
            result.append((question, lean(question)))
        except UsageError as error:
            refusal = error
    if not result:
        raise refusal
    return min(result, key=lambda one: one[1].value)


def split_without_state(question: Question, part: float) -> Split:
    """Return the split with the lowest peak of stages that recompute and lack a part of optimizer state."""
    return leanest_split(_without_state(question, part))


def at_hosts(
    question: Question,
    part: float,
    moves: Moves = UPDATED,
    split_of: Callable[[float], Split] | None = None,
) -> PlannerResult:
    """Return the plan that recomputes all blocks and has state at hosts, with one device for each stage.

    Hosts update the part `part` of every stage's blocks, rounded down, or hold their state by other `moves`.
    The split has the lowest peak of stages without that optimizer state; `split_of` returns it if it is
    known. If this plan does not fit, hardly any does, and it costs one simulation; its steps are the longest.

    Raises:
        UsageError: the plan cannot be carried out, or is not allowed.
    """
    if not is_allowed(question.means, moves) or question.means.recompute == "never":
        raise UsageError("the means must allow this state at hosts, and recomputation")
    split = split_without_state(question, part) if split_of is None else split_of(part)
    decisions = decided(question, plan_of(question, split), moves, part=part)
    simulation = assembled(plan_of(question, split, decisions=decisions))
    value = question.value(tuple(simulation.peak_bytes[device] for device in split.devices), split.devices)
    return PlannerResult(
        split,
        question.objective,
        value,
        proven=False,
        decisions=simulation.plan.decisions,
        simulation=simulation,
    )


def _without_state(question: Question, part: float) -> Question:
    """Return the question with the part `part` of optimizer state removed and all stages recomputed."""

    def less(cost: LayerCost) -> LayerCost:
        state, early = (round((1 - part) * nbytes) for nbytes in (cost.state_bytes, cost.early_state_bytes))
        return replace(cost, state_bytes=state, early_state_bytes=early)

    measurements = tuple(
        replace(measurement, kinds=tuple(map(less, measurement.kinds)))
        for measurement in question.profile.measurements
    )
    options = replace(question.options, recompute="always")
    return replace(question, profile=replace(question.profile, measurements=measurements), options=options)


class _PeakReader:
    """Reader of the peaks of candidates, within a limit of work."""

    def __init__(self, question: Question) -> None:
        self._question, self._reader = question, Reader(question)
        self._known: dict[StateCandidate, float] = {}
        self.ended = False  # whether the limit of work has ended it

    @property
    def count(self) -> int:
        """Number of plans read."""
        return len(self._known)

    def best(self, below: float) -> tuple[StateCandidate, float] | None:
        """Return the candidate with the lowest peak, and its value, if it is `below` a value."""
        for candidate in _candidates(self._question):
            if self._ends():
                break
            self._value(candidate)
        for candidate in sorted(self._known, key=self._known.__getitem__):
            if self._known[candidate] >= below:
                return None
            if self._has_room(candidate):
                return self._moved(candidate)
        return None

    def _moved(self, best: StateCandidate) -> tuple[StateCandidate, float]:
        """Return the best of a candidate and of those with cuts moved by one block at a time."""
        while not self._ends():
            others = [best._replace(split=split) for split in beside(best.split)]
            result = min(others, key=self._value, default=best)
            if self._value(result) >= self._value(best) or not self._has_room(result):
                break
            best = result
        return best, self._value(best)

    def _ends(self) -> bool:
        """Return whether the work is spent."""
        self.ended = self.ended or self._reader.actions > _WORK
        return self.ended

    def _value(self, candidate: StateCandidate) -> float:
        """Return the highest peak, in bytes or as a share of unequal budgets.

        Infinity if the candidate cannot be carried out.
        """
        if candidate not in self._known:
            question, split = self._question, candidate.split
            try:
                decisions = self.decisions(candidate)
                peaks = self._reader.peaks(split, range(len(split.devices)), decisions)
            except UsageError:
                peaks = [float("inf")]
            units = [
                1
                if question.equal_budgets
                else min(question.cluster.budgets[device] for device in grid.devices)
                for grid in map(split.grid, range(len(split.devices)))
            ]
            self._known[candidate] = max(peak / unit for peak, unit in zip(peaks, units, strict=False))
        return self._known[candidate]

    def _has_room(self, candidate: StateCandidate) -> bool:
        """Return whether hosts have memory for the moved state."""
        plan = plan_of(self._question, candidate.split, decisions=self.decisions(candidate))
        return not any(missing_bytes(plan, Simulation(plan).arenas).values())

    def decisions(self, candidate: StateCandidate) -> tuple[Decision, ...]:
        """Return the decisions about the state of every stage, run by run, and about recomputation."""
        question = self._question
        again = slice(None) if question.options.recompute != "never" else slice(0)
        plan = plan_of(question, candidate.split)
        return decided(question, plan, candidate.moves, in_buckets=candidate.in_buckets, again=again)


def _candidates(question: Question) -> Iterator[StateCandidate]:
    """Yield the splits of every degree and number of stages, with every way to have state at hosts."""
    if not (question.means.host and question.means.state):
        return
    *others, widest = sorted(question.degrees, key=lambda degree: degree.devices)
    for degree in (widest, *others):
        most = min(question.blocks, len(question.cluster.devices) // degree.devices)
        pinned = question.options.stages if question.degrees != (SINGLE,) else question.stages
        counts = counts_of(most) if pinned is None else (pinned,)
        for count, planner in product(counts, (exact, time)):
            options = replace(question.options, stages=count, **degree.pins)
            with suppress(UsageError):
                split = in_replicas(planner)(replace(question, options=options)).split
                for shard, moves in _OF_ONE if degree.data == 1 else _OF_SEVERAL:
                    if shard in (*question.shards, "none") and is_allowed(question.means, moves):
                        divided = _divided(question, split, shard)
                        yield StateCandidate(divided, moves)
                        if degree.data > 1 and moves:
                            yield StateCandidate(divided, moves, in_buckets=True)


def _divided(question: Question, split: Split, shard: Sharding) -> Split:
    """Return the split with replicas that divide `shard`, in a bucket for each block."""
    grids = tuple(
        replace(grid, shard=shard, buckets=question.blocks) if grid.data > 1 else grid
        for grid in map(split.grid, range(len(split.devices)))
    )
    return split._replace(grids=grids)
