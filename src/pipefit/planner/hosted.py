"""Replicas that divide their state and leave it to hosts: ZeRO-Offload and ZeRO-Infinity as plans, simulated.

The stages of a plan all have one degree, of several replicas on as many devices as there are, and are cut so that they
take as long (`time`). Replicas divide gradients, or parameters too, in a bucket for each block. The host updates every
bucket, or it has the optimizer state, and the parameters between passes too. Either everything is kept for the
backward, or every bucket but a stage's last runs again.

They are looked for where no plan is known that keeps everything, or that comes within 1 % of the bound. So an answer is
never slower by more than that than the plans by hand of `benchmarks/bench_zero.py`, as long as the budget lasts.

Costs: up to eight simulations for each number of replicas, the kept ones first. (ZeRO-Offload, arXiv 2101.06840;
ZeRO-Infinity, arXiv 2104.07857.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, product
from typing import NamedTuple

from pipefit.decisions import Decision, Run, State, StateKind, What
from pipefit.errors import UsageError
from pipefit.grids import Sharding
from pipefit.planner.driver import plan_of
from pipefit.planner.evaluation import HOST
from pipefit.planner.question import Question, Split
from pipefit.planner.replicas import in_replicas
from pipefit.planner.time import time
from pipefit.plans import Plan
from pipefit.schedule.room import missing_bytes
from pipefit.schedule.sums import bucket_edges
from pipefit.simulator import Simulation

_ACTIONS = 120_000  # in the programs of plans after which no other is simulated

Moves = tuple[tuple[What, StateKind], ...]

_UPDATED: Moves = ((What.UPDATE, "optimizer"),)
_AWAY: Moves = ((What.OFFLOAD, "optimizer"), (What.OFFLOAD, "parameters"))
_WAYS: tuple[tuple[Sharding, Moves], ...] = (("gradients", _UPDATED), ("parameters", _UPDATED), ("parameters", _AWAY))


class Hosted(NamedTuple):
    """A plan that fits, with its seconds and its peaks by simulation."""

    split: Split
    seconds: float
    peaks: tuple[int, ...]  # of every device, in bytes
    decisions: tuple[Decision, ...]


def hosted(question: Question, at_most: float) -> Hosted | None:
    """The fastest of these plans that fits in less than `at_most` seconds; None if none does."""
    best, spent, means = None, 0, question.means
    if not (means.host and means.state) or question.options.recompute != "never":
        return None
    for made in _plans(question):
        if spent > _ACTIONS:
            break
        with suppress(UsageError):  # what cannot be divided or carried out, and hosts that cannot update
            simulation = Simulation(made)
            spent += simulation.actions
            full = any(p > b for p, b in zip(simulation.peak_bytes, made.cluster.budgets, strict=True))
            seconds = simulation.step_seconds[-1]
            if not full and seconds < at_most and not any(missing_bytes(made, simulation.arenas).values()):
                at_most, best = seconds, Hosted(_split(question, made), seconds, simulation.peak_bytes, made.decisions)
    return best


def _plans(question: Question) -> Iterator[Plan]:
    """All of them, those of the most replicas and of what is kept first."""
    recompute = (False, True) if question.means.recompute != "never" else (False,)
    degrees = [degree for degree in question.degrees if degree.data > 1]
    for again, degree in product(recompute, sorted(degrees, key=lambda one: (-one.data, one.tensor, one.sequences))):
        stages = question.options.stages or min(question.blocks, len(question.cluster.devices) // degree.devices)
        options = replace(question.options, stages=stages, **degree.pins)
        with suppress(UsageError):
            split = in_replicas(time)(replace(question, options=options)).split
            for shard, moves in _WAYS:
                if shard in question.shards and (question.means.spill or moves is _UPDATED):
                    grids = tuple(replace(one, shard=shard, buckets=question.blocks) for one in split.grids)
                    yield _moved(plan_of(question, split._replace(grids=grids)), moves, again=again)


def _moved(plan: Plan, moves: Moves, *, again: bool) -> Plan:
    """A plan whose buckets' state moves, or is updated elsewhere, and that computes them again or not."""
    decisions = list[Decision]()
    for number, stage in enumerate(plan.stages):
        runs = [*pairwise([stage.start, *bucket_edges(plan, number), stage.stop])]
        for (what, kind), (start, stop) in product(moves, runs):
            state = State(start=start, stop=stop, kind=kind)
            decisions.append(Decision(stage=number, subject=state, what=what, place=HOST, ahead=1))
        for start, stop in runs[:-1] if again else ():
            decisions.append(Decision(stage=number, subject=Run(start=start, stop=stop), what=What.RECOMPUTE))
    return replace(plan, decisions=tuple(decisions))


def _split(question: Question, plan: Plan) -> Split:
    """The split of a plan."""
    blocks = {layer: block for block, layer in enumerate(question.edges)}
    edges = (0, *(blocks[stage.stop] for stage in plan.stages))
    return Split(edges, tuple(stage.grid.devices[0] for stage in plan.stages), tuple(one.grid for one in plan.stages))
