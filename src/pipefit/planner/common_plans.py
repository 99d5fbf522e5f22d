"""Common plans: parallelism that people use on servers and clusters, simulated.

All stages of such a plan have one degree with several replicas, and are cut to take equally long (`time`): as
many stages as the devices allow, or one. Replicas divide optimizer state, gradients or parameters, in a
bucket for each block, as fully sharded data parallelism does (ZeRO-1 to 3, FSDP). State is on the devices; or
the host updates all of it, bucket by bucket or block by block; or the host keeps the optimizer state, and the
parameters between passes too (ZeRO-Offload, ZeRO-Infinity). Stages of tensor-parallel ranks without replicas
are included if hosts update or keep their state. Activations are kept, or every block but a stage's last is
recomputed separately.

Common plans are not searched if a known plan is within 1 % of the lower bound, nor for large questions if a
known plan keeps everything. A candidate is skipped if it would gain less than 1 % even with nothing moved and
instant updates. So a result is slower than such plans by at most 1 %, as long as the budget lasts. If no plan
is known to fit, the search continues until one does.

Cost: up to 36 simulations for each number of replicas, those without recomputation first; only of plans whose
memory bound fits, within one budget for all microbatch sizes. (ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity,
arXiv 2104.07857; FSDP, VLDB 2023; activation checkpointing, arXiv 1604.06174.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import NamedTuple

from pipefit.errors import UsageError
from pipefit.lowering import Recompute, bucket_edges, cuts
from pipefit.planner.baselines.simple import time
from pipefit.planner.evaluation import HOST
from pipefit.planner.neighbours import Mixed, Simulations
from pipefit.planner.options import Means
from pipefit.planner.problem import SINGLE, Degree, Question, Split, plan_of
from pipefit.planner.replicas import in_replicas
from pipefit.schema.decisions import Decision, Run, State, StateKind, What
from pipefit.schema.devices import Member
from pipefit.schema.grids import SHARDINGS, Sharding
from pipefit.schema.layer_costs import LayerCost, SharedParameter, Work
from pipefit.schema.plan import Plan

_WORK = 60_000  # budget of work for simulations
_WORK_TO_FIT = 2_000_000  # the same budget if no plan is known to fit
_WORTH = 0.01  # part of a step that hosts have to gain

Moves = tuple[tuple[What, StateKind], ...]
Layers = tuple[int, int]  # the first layer, and the one after the last

UPDATED: Moves = ((What.UPDATE, "optimizer"),)
AWAY: Moves = ((What.OFFLOAD, "optimizer"), (What.OFFLOAD, "parameters"))
_WAYS: tuple[tuple[Sharding, Moves], ...] = (
    ("none", ()),
    ("optimizer", ()),
    ("gradients", ()),
    ("parameters", ()),
    ("gradients", UPDATED),
    ("parameters", UPDATED),
    ("parameters", AWAY),
)
_WAYS_OF_RANKS: tuple[tuple[Sharding, Moves], ...] = (("none", UPDATED), ("none", AWAY))


class CommonCandidate(NamedTuple):
    """Split with the memory decisions of all its stages."""

    split: Split
    recompute: Recompute
    moves: Moves
    decisions: tuple[Decision, ...]

    @property
    def way(self) -> str:
        """Name of the state division and of the hosts' part, in words."""
        shard = self.split.grid(0).shard
        zero = "data parallel" if shard == "none" else f"ZeRO-{SHARDINGS.index(shard)}"
        at_hosts = {UPDATED: ", updated by hosts", AWAY: ", state at hosts"}.get(self.moves, "")
        return zero + at_hosts


class CommonSearch:
    """Search for the fastest common plans of several questions, within one budget of work."""

    def __init__(self) -> None:
        self.work = 0

    def fastest(self, question: Question, at_most: float) -> Mixed | None:
        """Return the fastest common plan that fits in less than `at_most` seconds; None if none does."""
        if question.options.recompute not in ("never", "always"):
            return None
        simulations, bounds = Simulations(question), Simulations(_without_updates(question))
        try:
            return self._fastest(question, at_most, simulations, bounds)
        finally:
            self.work += simulations.work + bounds.work

    def _fastest(
        self, question: Question, at_most: float, simulations: Simulations, bounds: Simulations
    ) -> Mixed | None:
        best: Mixed | None = None
        emptied = Simulations(_without_state(question))
        least = cache(lambda split: bounds.of(split).seconds)
        for split, recompute, moves, decisions in common_plans(question):
            known = at_most < float("inf")
            work = self.work + simulations.work + bounds.work
            if work > simulations.share_of(_WORK if known else _WORK_TO_FIT):
                break
            with suppress(UsageError):  # state that cannot be divided or moved, or hosts that cannot update
                bound_of_memory = emptied if moves else simulations
                if not bound_of_memory.may_fit(split, recompute, without_parameters=moves == AWAY):
                    continue
                lowest = (bound(split) for bound in (simulations.least, least))
                if known and any(seconds >= at_most * (1 - _WORTH) for seconds in lowest):
                    continue
                if (result := simulations.fitting(split, decisions, at_most)) is not None:
                    best, at_most = result, result.seconds
        return best


def _without_updates(question: Question) -> Question:
    """Return the question with updates that take no time, as if hosts did them in parallel."""
    return _with_costs(question, lambda cost: replace(cost, update=Work(flops=0, moved_bytes=0)))


def _without_state(question: Question) -> Question:
    """Return the question without optimizer state."""
    return _with_costs(
        question,
        lambda cost: replace(cost, state_bytes=0, early_state_bytes=0),
        lambda shared: replace(shared, state_bytes=0, early_state_bytes=0),
    )


def _may_have_room(question: Question, moves: Moves) -> bool:
    """Return whether all devices together, and all hosts, have room for the state that these moves leave.

    Not counted is state that devices need only during passes.
    """
    costs, shared = question.measurement.costs, question.measurement.shared
    moved = sum(cost.state_bytes for cost in costs)
    moved -= sum((len(one.users) - 1) * one.state_bytes for one in shared)
    hosts = sum(question.cluster.capacity(Member.host(n)) for n in range(len(question.cluster.hosts)))
    left = question.state_bytes - moved if moves == UPDATED else 0 if moves else question.state_bytes
    return left <= sum(question.cluster.budgets) and (not moves or moved <= hosts)


def _with_costs(
    question: Question,
    changed: Callable[[LayerCost], LayerCost],
    shared: Callable[[SharedParameter], SharedParameter] = lambda tensor: tensor,
) -> Question:
    """Return the question with changed costs of all layers and of the parameters that layers share."""
    measurements = (
        replace(
            measurement,
            kinds=tuple(map(changed, measurement.kinds)),
            shared=tuple(map(shared, measurement.shared)),
        )
        for measurement in question.profile.measurements
    )
    return replace(question, profile=replace(question.profile, measurements=tuple(measurements)))


def common_plans(question: Question) -> Iterator[CommonCandidate]:
    """Yield all common plans, those without recomputation and with the most replicas first."""
    means, asked = question.means, question.options.recompute
    settings: tuple[Recompute, ...] = ("never", "always") if asked == "never" else (asked,)
    degrees = sorted(
        (one for one in question.degrees if one != SINGLE), key=lambda one: (-one.data, *one[1:])
    )
    replicas = [(shard, moves) for shard, moves in _WAYS if shard in question.shards]
    for recompute, degree in product(settings if means.recompute != "never" else (asked,), degrees):
        ways = [
            (shard, moves)
            for shard, moves in (replicas if degree.data > 1 else _WAYS_OF_RANKS)
            if is_allowed(means, moves) and _may_have_room(question, moves)
        ]
        for split, (shard, moves) in product(_splits(question, degree) if ways else (), ways):
            buckets = question.blocks if shard in ("gradients", "parameters") else 1
            grids = tuple(replace(grid, shard=shard, buckets=buckets) for grid in split.grids)
            divided = split._replace(grids=grids)
            plan = plan_of(question, divided)
            runs = (
                _decided(question, plan, moves, in_buckets=one, recompute=recompute) for one in (True, False)
            )
            for decisions in dict.fromkeys(runs) if moves else [next(runs)]:
                yield CommonCandidate(divided, recompute, moves, decisions)


def is_allowed(means: Means, moves: Moves) -> bool:
    """Return whether the means allow these moves of state to hosts."""
    optimizer_alone = all(kind == "optimizer" for _, kind in moves)
    return not moves or (means.host and means.state and (means.spill or optimizer_alone))


def _splits(question: Question, degree: Degree) -> Iterator[Split]:
    """Yield the splits into the most stages of a degree that the devices allow, and into one."""
    most, asked = (
        min(question.blocks, len(question.cluster.devices) // degree.devices),
        question.options.stages,
    )
    for stages in dict.fromkeys((most, 1)) if asked is None else (asked,):
        options = replace(question.options, stages=stages, **degree.pins)
        with suppress(UsageError):
            yield in_replicas(time)(replace(question, options=options)).split


def _decided(
    question: Question, plan: Plan, moves: Moves, *, in_buckets: bool, recompute: Recompute
) -> tuple[Decision, ...]:
    """Return the decisions that move or update state elsewhere, and that recompute.

    Recomputed are all blocks if the options request that, or else all but the last of every stage, whose
    backward follows at once.
    """
    asked = question.options.recompute
    again = slice(None, -1) if recompute == "always" != asked else slice(0)
    result = decided(question, plan, moves, in_buckets=in_buckets and bool(moves), again=again, ahead=1)
    return (*(plan.decisions if asked == "always" else ()), *result)


def decided(
    question: Question,
    plan: Plan,
    moves: Moves,
    *,
    in_buckets: bool = False,
    again: slice = slice(None),
    ahead: int = 0,
    part: float = 1.0,
) -> tuple[Decision, ...]:
    """Return the decisions that move a part of every stage's state, and recompute some of its runs.

    Runs are those of buckets, or of blocks; those in `again` are recomputed.
    """
    result = list[Decision]()
    for number in range(len(plan.stages)):
        runs = runs_of(question, plan, number, in_buckets=in_buckets)
        moving = together(question, runs)
        result += moved(number, moving[: int(part * len(moving))], moves, ahead=ahead)
        result += ran_again(number, runs[again])
    return tuple(result)


def runs_of(question: Question, plan: Plan, number: int, *, in_buckets: bool) -> list[Layers]:
    """Return the runs of a stage's layers that are treated together: those of a bucket, or of a block."""
    stage, edges = plan.stages[number], bucket_edges(plan, number) if in_buckets else question.edges
    return [*pairwise(cuts(edges, stage.start, stage.stop))]


def together(question: Question, runs: Sequence[Layers]) -> list[Layers]:
    """Return the runs whose state moves: `runs`, merged where layers share a parameter."""
    start, stop = runs[0][0], runs[-1][1]
    users = [
        [user for user in shared.users if start <= user < stop] for shared in question.measurement.shared
    ]
    inside = {layer for here in users if here for layer in range(here[0] + 1, here[-1] + 1)}
    return [*pairwise([start, *(edge for edge, _ in runs[1:] if edge not in inside), stop])]


def moved(number: int, runs: Iterable[Layers], moves: Moves, *, ahead: int) -> Iterator[Decision]:
    """Yield the decisions that move the state of a stage's runs to its hosts, or update it there."""
    for (what, kind), (start, stop) in product(moves, runs):
        state = State(start=start, stop=stop, kind=kind)
        yield Decision(stage=number, subject=state, what=what, place=HOST, ahead=ahead)


def ran_again(number: int, runs: Iterable[Layers]) -> Iterator[Decision]:
    """Yield the decisions that recompute a stage's runs."""
    for start, stop in runs:
        yield Decision(stage=number, subject=Run(start=start, stop=stop), what=What.RECOMPUTE)
