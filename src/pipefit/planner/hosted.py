"""Replicas that divide their state and leave it to hosts: ZeRO-Offload and ZeRO-Infinity as plans, simulated.

The stages of a plan all have one degree, of several replicas, and are cut so that they take as long (`time`): as many
as there are devices for, or one. Replicas divide gradients, or parameters too, in a bucket for each block. The host
updates all state, bucket by bucket or block by block, or it has the optimizer state, and the parameters between passes
too. Either everything is kept for the backward, or all but the last of these runs of layers run again.

They are looked for where no plan is known that comes within 1 % of the bound, nor of what a plan would take if nothing
moved and updates took no time; of large questions only where no plan keeps everything. So an answer is never slower by
more than that than the plans by hand of `benchmarks/bench_zero.py`, as long as the budget lasts.

Costs: up to 24 simulations for each number of replicas, the kept ones first; half of them where every block has
parameters of its own. (ZeRO-Offload, arXiv 2101.06840;
ZeRO-Infinity, arXiv 2104.07857.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import NamedTuple

from pipefit.decisions import Decision, Run, State, StateKind, What
from pipefit.errors import UsageError
from pipefit.grids import Sharding
from pipefit.layer_costs import LayerCost
from pipefit.planner.degrees import Degree
from pipefit.planner.driver import plan_of
from pipefit.planner.evaluation import HOST
from pipefit.planner.question import Question, Split
from pipefit.planner.replicas import in_replicas
from pipefit.planner.simulations import Simulations
from pipefit.planner.time import time
from pipefit.plans import Plan
from pipefit.schedule.sums import bucket_edges
from pipefit.work import Work

_WORK = 60_000  # after which no other plan is simulated
_WORTH = 0.01  # the part of a step that hosts have to gain

Moves = tuple[tuple[What, StateKind], ...]
Layers = tuple[int, int]  # the first, and the one behind the last

UPDATED: Moves = ((What.UPDATE, "optimizer"),)
AWAY: Moves = ((What.OFFLOAD, "optimizer"), (What.OFFLOAD, "parameters"))
_WAYS: tuple[tuple[Sharding, Moves], ...] = (("gradients", UPDATED), ("parameters", UPDATED), ("parameters", AWAY))


class Hosted(NamedTuple):
    """A plan that fits, with its seconds and its peaks by simulation."""

    split: Split
    seconds: float
    peaks: tuple[int, ...]  # of every device, in bytes
    decisions: tuple[Decision, ...]


def hosted(question: Question, at_most: float) -> Hosted | None:
    """The fastest of these plans that fits in less than `at_most` seconds; None if none does."""
    best, simulations, bounds = None, Simulations(question), Simulations(_without_updates(question))
    if not (question.means.host and question.means.state) or question.options.recompute != "never":
        return None
    least = cache(lambda split: bounds.of(split).step_seconds[-1])
    for split, decisions in _candidates(question):
        if simulations.work + bounds.work > _WORK:
            break
        with suppress(UsageError):  # what cannot be divided or carried out, and hosts that cannot update
            if any(bound(split) >= at_most * (1 - _WORTH) for bound in (simulations.least, least)):
                continue
            found = simulations.of(split, decisions)
            seconds = found.step_seconds[-1]
            if seconds < at_most and found.fits:
                at_most, best = seconds, Hosted(split, seconds, found.peak_bytes, decisions)
    return best


def _without_updates(question: Question) -> Question:
    """The question with updates that take no time, as if hosts did them beside everything else."""

    def quick(cost: LayerCost) -> LayerCost:
        return replace(cost, update=Work(flops=0, moved_bytes=0))

    measurements = (replace(one, kinds=tuple(map(quick, one.kinds))) for one in question.profile.measurements)
    return replace(question, profile=replace(question.profile, measurements=tuple(measurements)))


def _candidates(question: Question) -> Iterator[tuple[Split, tuple[Decision, ...]]]:
    """All of them, those of the most replicas and of what is kept first."""
    recompute = (False, True) if question.means.recompute != "never" else (False,)
    degrees = [degree for degree in question.degrees if degree.data > 1]
    ways = [(shard, moves) for shard, moves in _WAYS if question.means.spill or moves is UPDATED]
    for again, degree in product(recompute, sorted(degrees, key=lambda one: (-one.data, one.tensor, one.sequences))):
        for split, (shard, moves) in product(_splits(question, degree), ways):
            if shard in question.shards:
                grids = tuple(replace(one, shard=shard, buckets=question.blocks) for one in split.grids)
                divided = split._replace(grids=grids)
                plan = plan_of(question, divided)
                runs = (_decided(question, plan, moves, in_buckets=one, again=again) for one in (True, False))
                yield from ((divided, decisions) for decisions in dict.fromkeys(runs))


def _splits(question: Question, degree: Degree) -> Iterator[Split]:
    """Those into as many stages of a degree as there are devices for, and one."""
    most, asked = min(question.blocks, len(question.cluster.devices) // degree.devices), question.options.stages
    for stages in dict.fromkeys((most, 1)) if asked is None else (asked,):
        options = replace(question.options, stages=stages, **degree.pins)
        with suppress(UsageError):
            yield in_replicas(time)(replace(question, options=options)).split


def _decided(question: Question, plan: Plan, moves: Moves, *, in_buckets: bool, again: bool) -> tuple[Decision, ...]:
    """What moves the state of a plan, or updates it elsewhere, and computes its layers again or not."""
    decisions = list[Decision]()
    for number in range(len(plan.stages)):
        runs = runs_of(question, plan, number, in_buckets=in_buckets)
        decisions += moved(number, runs, moves, ahead=1)
        decisions += ran_again(number, runs[:-1] if again else ())
    return tuple(decisions)


def runs_of(question: Question, plan: Plan, number: int, *, in_buckets: bool) -> list[Layers]:
    """The runs of layers of a stage that move together: those of a bucket, or of a block."""
    stage, edges = plan.stages[number], bucket_edges(plan, number) if in_buckets else question.edges
    return [*pairwise([stage.start, *(edge for edge in edges if stage.start < edge < stage.stop), stage.stop])]


def moved(number: int, runs: Iterable[Layers], moves: Moves, *, ahead: int) -> Iterator[Decision]:
    """What moves the state of runs of a stage's layers to its hosts, or updates it there."""
    for (what, kind), (start, stop) in product(moves, runs):
        state = State(start=start, stop=stop, kind=kind)
        yield Decision(stage=number, subject=state, what=what, place=HOST, ahead=ahead)


def ran_again(number: int, runs: Iterable[Layers]) -> Iterator[Decision]:
    """What computes runs of a stage's layers again."""
    for start, stop in runs:
        yield Decision(stage=number, subject=Run(start=start, stop=stop), what=What.RECOMPUTE)
