"""Attempts: plans and whether they fit; plans that are found fast; and plans of tasks.

A plan that fits proves that something does, however slow its steps are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import NamedTuple

from pipefit.errors import InfeasibleError, UsageError
from pipefit.lowering import Recompute
from pipefit.memory import room_needed, shortage
from pipefit.planner import (
    ALL_AWAY,
    PLANNERS,
    STATE_AWAY,
    Answer,
    Planner,
    PlanOptions,
    Question,
    Split,
    answered,
    at_hosts,
    by_distance,
    exact_in_time,
    sizes_of,
    split_without_state,
    unexplained,
)
from pipefit.processes import beside
from pipefit.profiler import OnDemand, Repeated
from pipefit.schema.cluster import Cluster
from pipefit.schema.fit import Attempt
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import MOST_SAMPLES, Training
from pipefit.simulator.assembled import assembled
from pipefit.units import format_bytes

_PARTS, _LESS = 2, 0.99  # how many parts of the state hosts are tried with, each so much of the one before
_IN_PART = "part of the state at hosts"
_HOPELESS = 1.1  # values by which the last fitting one of a way must be exceeded
_LONG = 40_000  # actions of a program above which a search is not worth while
_INFINITE = float("inf")


class Need(NamedTuple):
    """Bytes that a way of planning needs on the fullest device, or host, and those that there are."""

    need: int
    room: int


class Look(NamedTuple):
    """Plans of a value that are made fast: the first that fits, or else the one that misses by the least.

    `needs` are those of each way of planning, and `shares` the part of its fullest device or host that the
    leanest plan of each number of tensor-parallel ranks needs. `actions` are those of the plan's program.
    """

    best: Attempt | None = None
    needs: Mapping[str, tuple[Need, ...]] = MappingProxyType({})
    shares: Mapping[int, float] = MappingProxyType({})
    actions: int = 0

    @property
    def is_long(self) -> bool:
        """True if the plan has so many actions that a search, which simulates plans, compares hardly any."""
        return self.actions > _LONG

    @property
    def fitting(self) -> Attempt | None:
        """The plan that fits, if any does."""
        return self.best if self.best is not None and self.best.fits else None

    def or_else(self, other: Look) -> Look:
        """Return both looks, with the plan of the other one if that is leaner."""
        leaner = min(other.shares.values(), default=_INFINITE) < min(self.shares.values(), default=_INFINITE)
        better = other.fitting is not None or (self.fitting is None and leaner)
        return Look(
            other.best if better else self.best,
            {**self.needs, **other.needs},
            {**self.shares, **other.shares},
            other.actions if better else self.actions,
        )


def attempt(value: int, plan: Plan) -> Attempt:
    """The attempt of a value whose plan this is. Costs a simulation where the plan moves or recomputes
    anything.
    """
    short = shortage(plan, assembled(plan).arenas) if plan.decisions else ""
    return Attempt(value=value, plan=plan, shortage=short)


def leaner(new: Attempt, old: Attempt) -> bool:
    """Return whether `old` does not fit, and `new` fits or lacks less memory."""
    lacks = [(not each.fits, bool(each.shortage), each.need_bytes / each.budget_bytes) for each in (new, old)]
    return not old.fits and lacks[0] < lacks[1]


def soon_planned(
    value: int, question: Question, looks: Mapping[int, Look] = MappingProxyType({}), *, every: bool = False
) -> Look:
    """The first attempt that fits of those that are soon made, with more and more done about memory.

    Ways of planning that will need far too much, by `looks` at smaller values, are not tried. With `every`,
    all ways are tried, for what they need. The question allows plans that do not fit, and fixes the number of
    tensor-parallel ranks.
    """
    ranks = question.options.tensor or 1
    needs: dict[str, tuple[Need, ...]] = {}
    best, share, actions = list[Attempt](), _INFINITE, 0

    def fits(way: str, planner: Planner, name: str, asked: Question) -> bool:
        nonlocal share, actions
        if not every and _is_hopeless(looks, _named(way, ranks), value):
            return False
        with suppress(UsageError):  # layers that cannot run again, or hosts that may not update
            simulation = unexplained(asked, planner, name=name)
            plan, arenas = simulation.plan, simulation.arenas if simulation.plan.decisions else ()
            result = Attempt(value=value, plan=plan, shortage=shortage(plan, arenas) if arenas else "")
            shares = {member: needed.total() for member, needed in room_needed(plan, arenas).items()}
            hosts = [Need(nbytes, plan.cluster.capacity(member)) for member, nbytes in shares.items()]
            every_need = (Need(result.need_bytes, result.budget_bytes), *hosts)
            # hosts that are filled say nothing of values
            needs[_named(way, ranks)] = every_need[:1] if way == _IN_PART else every_need
            full = max(need.need / max(1, need.room) for need in every_need)
            if not best or (not best[0].fits and (result.fits or full < share)):
                best[:], share, actions = [result], full, simulation.actions
        return bool(best) and best[0].fits and not every

    def look() -> Look:
        return Look(best[0] if best else None, needs, {ranks: share} if best else {}, actions)

    for recompute in _without_hosts(question):
        asked = replace(question, options=replace(question.options, recompute=recompute))
        if fits(recompute, PLANNERS["exact"], "exact", asked):
            return look()
    for way, planner in _with_hosts(question, needs, cache(partial(split_without_state, question))):
        if fits(way, planner, "lean", question):
            return look()
    return look()


def _named(way: str, ranks: int) -> str:
    """Return the name of a way of planning with this number of tensor-parallel ranks."""
    return way if ranks == 1 else f"{way}, {ranks} ranks"


def _without_hosts(question: Question) -> Iterator[Recompute]:
    """What to recompute in plans that keep all state on the devices; nothing where these are too small for
    that.
    """
    if question.state_bytes > sum(question.cluster.budgets) or not exact_in_time(question):
        return
    asked = question.options.recompute
    yield from ("never", "always", "stages") if asked == "never" else (asked,)


def hosts_may_hold_all(question: Question) -> bool:
    """Return whether hosts have room for parameters, gradients and optimizer state.

    A single microbatch's gradients are never all there.
    """
    room = sum(host.memory_bytes for host in question.cluster.hosts)
    return question.training.microbatches == 1 or question.state_bytes <= room


def _with_hosts(
    question: Question, needs: Mapping[str, tuple[Need, ...]], split_of: Callable[[float], Split]
) -> Iterator[tuple[str, Planner]]:
    """Plans that recompute all blocks and whose hosts hold optimizer state, leaner and leaner.

    Hosts update all layers; or they only hold all optimizer state, which needs least of them; or as much of
    it as they have room for; or also parameters and gradients between passes. Hosts that update, or hold
    everything, have room for all state.
    """
    of_part = partial(partial, at_hosts, split_of=split_of)
    holds_all = hosts_may_hold_all(question)
    if holds_all:
        yield "updated by hosts", of_part(part=1.0)
    yield "state at hosts", of_part(part=1.0, moves=STATE_AWAY)
    _, *hosts = needs.get(_named("state at hosts", question.options.tensor or 1), (Need(0, 0),))
    part = min((host.room / host.need for host in hosts if host.need), default=1.0)
    for _ in range(_PARTS if part < 1 else 0):
        yield _IN_PART, of_part(part=part, moves=STATE_AWAY)
        part *= _LESS
    if holds_all:
        yield "all away", of_part(part=1.0, moves=ALL_AWAY)


def likely(looks: Mapping[int, Look], at_least: int) -> int:
    """The largest value that is likely to fit, by what every way of planning needed at those that were looked
    at, as if that rose evenly.
    """
    ways = dict.fromkeys(way for look in looks.values() for way in look.needs)
    return max((int(_reached(_known(looks, way))) for way in ways), default=at_least)


def _is_hopeless(looks: Mapping[int, Look], way: str, value: int) -> bool:
    """Return whether two looks or more show that a way of planning fills memory long before this value."""
    known = _known(looks, way)
    return len(known) > 1 and value > _HOPELESS * _reached(known)


def _known(looks: Mapping[int, Look], way: str) -> list[tuple[int, tuple[Need, ...]]]:
    """Return what a way of planning needed, by rising values."""
    return [(value, look.needs[way]) for value, look in sorted(looks.items()) if way in look.needs]


def _reached(known: list[tuple[int, tuple[Need, ...]]]) -> float:
    """The value at which a way of planning fills the first device or host."""
    (first, before), (last, after) = known[-2:][0], known[-1]
    reached = list[float]()
    for number, (need, room) in enumerate(after):
        rises = (
            (need - before[number].need) / (last - first) if last > first and number < len(before) else 0.0
        )
        each = rises if rises > 0 else need / max(1, last)
        reached.append(last + (room - need) / max(each, 1e-9))
    return min(reached)


# ---- Proofs that nothing fits


def impossible(
    profiles: Callable[[int], ModelProfile],
    cluster: Cluster,
    size: int = 1,
    options: PlanOptions = PlanOptions(),
) -> str:
    """Return the proof that no plan fits, with any division, offloading or recomputation; empty without one.

    Parameters and optimizer state must be in some memory between steps. With m replicas of n tensor-parallel
    ranks, a device that computes a layer has an m-th of the `size` samples of a microbatch, and the ranks
    together have the layer's weights and outputs. A cluster of d devices has n m <= d; the options may fix n
    and m.
    """
    parameters, _, state = profiles(size).at(size).state_bytes
    room = sum(cluster.budgets) + sum(host.memory_bytes + (host.disk_bytes or 0) for host in cluster.hosts)
    if parameters + state > room:
        return (
            f"parameters and optimizer state need {format_bytes(parameters + state)}, but devices, hosts "
            f"and disks together have {format_bytes(room)}"
        )
    devices, result = len(cluster.devices), ""
    for replicas in range(1, devices + 1) if options.data is None else (options.data,):
        ranks = options.tensor or devices // replicas
        if size % replicas or replicas * ranks > devices:
            continue
        proof = _too_large(profiles(size // replicas), max(cluster.budgets), size // replicas, ranks)
        if not proof:
            return ""
        result = result or proof
    return result


def _too_large(profile: ModelProfile, budget: int, size: int, ranks: int) -> str:
    """Return the layer that needs more than a device has even divided between ranks; empty if none does."""
    measured, names = profile.at(size), [*(f"layer {name}" for name in profile.layers), "the loss"]
    costs = (*measured.costs, measured.loss)
    needs = (cost.least_tensor_bytes if ranks == 1 else cost.least_divided_bytes for cost in costs)
    name, least = max(zip(names, needs, strict=True), key=lambda one: one[1])
    if least // ranks <= budget:
        return ""
    need = f"{format_bytes(least)} for {'one sample' if size == 1 else f'{size:,} samples'}"
    divided = f", {format_bytes(least // ranks)} on each of {ranks} ranks" if ranks > 1 else ""
    return f"{name} needs at least {need}{divided}, but a device has {format_bytes(budget)}"


# ---- Plans of tasks: profiles are made on demand, for the microbatch sizes and shards that planning needs


class Proposal(NamedTuple):
    """A plan without its alternatives, and its final answer.

    The answer is the plan itself, or another plan if the model's traces differ from its profiles.
    """

    plan: Plan
    answer: Callable[[], Answer]


def sizes_asked(training: Training | None, options: PlanOptions) -> tuple[int, ...]:
    """Return the microbatch sizes that planning may need, including local batches."""
    batch, size, count = options.batch_size, options.microbatch_size, options.microbatches
    if training is not None:
        size = training.microbatch_size
    elif size is None:
        size = batch // count if batch and count else batch
    # other values fail in the later checks
    return sizes_of(size) if size and 0 < size <= MOST_SAMPLES else (1,)


def in_order(
    sizes: Sequence[int], training: Training | None, options: PlanOptions, devices: int
) -> list[int]:
    """Return the sizes of `sizes_asked`, the likeliest first."""
    chosen = training is None and options.microbatch_size is None and options.microbatches is None
    return by_distance(sizes, sizes[-1], devices) if chosen else sorted(sizes, reverse=True)


def plan_on_the_way(
    known: OnDemand | Repeated,
    cluster: Cluster,
    training: Training | None = None,
    options: PlanOptions = PlanOptions(),
    *,
    shards: Sequence[int] = (),
    along: bool = False,
    runs_dry: bool = False,
    compares: bool = True,
    near: Plan | None = None,
) -> Proposal:
    """Plan with profiles made on demand.

    Layers may be divided between `shards` ranks, with `along` also along positions. With `near`, plans like
    that one are searched first (`planner.answered`).

    Profiles derived from those of other sizes are compared with traces in the background until the proposal
    is settled or, without `compares`, by the caller. With `runs_dry`, alternatives are searched in parallel
    with the dry run that follows.

    Raises:
        InfeasibleError: no plan fits, by such profiles; also when the proposal is settled.
    """
    profiles = partial(known, tensor=shards, sequences=along)
    make = partial(answered, profiles, cluster, training, options, near=near)
    try:
        result = make()
    except InfeasibleError:
        if not compares or known.checked()():
            raise
        result = make()
    plan = result.plan
    fits = not options.allow_infeasible or attempt(0, plan).fits
    as_traced = known.checked(sizes_used(plan) if fits else None) if compares else lambda: True
    (others,) = beside(result.others, forks=runs_dry)

    return Proposal(plan, lambda: Answer(plan, others) if as_traced() else make())


def sizes_used(plan: Plan) -> set[int]:
    """Return the microbatch sizes that a plan's stages compute, local batches included."""
    return {plan.measured(stage).microbatch_size for stage in range(len(plan.stages))}
