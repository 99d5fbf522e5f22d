"""Attempts: plans and whether they fit; plans that are found fast; and plans of tasks.

A plan that fits proves that something does, however slow its steps are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
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
    answered,
    at_hosts,
    by_distance,
    exact_in_time,
    sizes_of,
    unexplained,
)
from pipefit.processes import beside
from pipefit.profiler import OnDemand, Repeated
from pipefit.schema.cluster import Cluster
from pipefit.schema.fit import Attempt
from pipefit.schema.plan import Plan
from pipefit.schema.training import MOST_SAMPLES, Training
from pipefit.simulator.assembled import assembled

_PARTS, _LESS = 2, 0.99  # how many parts of the state hosts are tried with, each so much of the one before
_IN_PART = "part of the state at hosts"
_HOPELESS = 1.1  # values by which the last fitting one of a way must be exceeded


class Need(NamedTuple):
    """Bytes that a way of planning needs on the fullest device, or host, and those that there are."""

    need: int
    room: int


class Look(NamedTuple):
    """What plans that are soon made say of a value: one that fits, if any does, and what each way of planning
    needs.
    """

    fitting: Attempt | None
    needs: dict[str, tuple[Need, ...]]


def attempt(value: int, plan: Plan) -> Attempt:
    """The attempt of a value whose plan this is. Costs a simulation where the plan moves or recomputes
    anything.
    """
    short = shortage(plan, assembled(plan).arenas) if plan.decisions else ""
    return Attempt(value=value, plan=plan, shortage=short)


def soon_planned(
    value: int, question: Question, looks: Mapping[int, Look] = MappingProxyType({}), *, every: bool = False
) -> Look:
    """The first attempt that fits of those that are soon made, with more and more done about memory.

    Ways of planning that will need far too much, by `looks` at smaller values, are not tried. With `every`,
    all ways are tried, for what they need. The question allows plans that do not fit.
    """
    needs: dict[str, tuple[Need, ...]] = {}
    fitting = list[Attempt]()

    def fits(way: str, planner: Planner, name: str, asked: Question) -> bool:
        if not every and _is_hopeless(looks, way, value):
            return False
        with suppress(UsageError):  # layers that cannot run again, or hosts that may not update
            simulation = unexplained(asked, planner, name=name)
            plan, arenas = simulation.plan, simulation.arenas if simulation.plan.decisions else ()
            result = Attempt(value=value, plan=plan, shortage=shortage(plan, arenas) if arenas else "")
            shares = {member: needed.total() for member, needed in room_needed(plan, arenas).items()}
            full = () if way == _IN_PART else shares.items()  # hosts that are filled say nothing of values
            hosts = (Need(nbytes, plan.cluster.capacity(member)) for member, nbytes in full)
            needs[way] = (Need(result.need_bytes, result.budget_bytes), *hosts)
            fitting.extend([result] if result.fits else [])
        return bool(fitting) and not every

    for recompute in _without_hosts(question):
        asked = replace(question, options=replace(question.options, recompute=recompute))
        if fits(recompute, PLANNERS["exact"], "exact", asked):
            return Look(fitting[0], needs)
    for way, planner in _with_hosts(needs):
        if fits(way, planner, "lean", question):
            return Look(fitting[0], needs)
    return Look(fitting[0] if fitting else None, needs)


def _without_hosts(question: Question) -> Iterator[Recompute]:
    """What to recompute in plans that keep all state on the devices; nothing where these are too small for
    that.
    """
    if question.state_bytes > sum(question.cluster.budgets) or not exact_in_time(question):
        return
    asked = question.options.recompute
    yield from ("never", "always", "stages") if asked == "never" else (asked,)


def _with_hosts(needs: dict[str, tuple[Need, ...]]) -> Iterator[tuple[str, Planner]]:
    """Plans that recompute all blocks and whose hosts hold optimizer state, leaner and leaner.

    Hosts update all layers; or they only hold all optimizer state, which needs least of them; or as much of
    it as they have room for; or also parameters and gradients between passes.
    """
    yield "updated by hosts", partial(at_hosts, part=1.0)
    yield "state at hosts", partial(at_hosts, part=1.0, moves=STATE_AWAY)
    _, *hosts = needs.get("state at hosts", (Need(0, 0),))
    part = min((host.room / host.need for host in hosts if host.need), default=1.0)
    for _ in range(_PARTS if part < 1 else 0):
        yield _IN_PART, partial(at_hosts, part=part, moves=STATE_AWAY)
        part *= _LESS
    yield "all away", partial(at_hosts, part=1.0, moves=ALL_AWAY)


def likely(looks: Mapping[int, Look], at_least: int) -> int:
    """The largest value that is likely to fit, by what every way of planning needed at those that were looked
    at, as if that rose evenly.
    """
    ways = dict.fromkeys(way for look in looks.values() for way in look.needs)
    return max((int(_reached(_known(looks, way))) for way in ways), default=at_least)


def _is_hopeless(looks: Mapping[int, Look], way: str, value: int) -> bool:
    """Return whether a way of planning fills a device or host long before this value, by two looks or more."""
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


# ---- Plans of tasks: profiles are made on demand, for the microbatch sizes and shards that planning needs


class Proposal(NamedTuple):
    """A plan without its alternatives, and its final answer.

    The answer is the plan itself, or another plan if the model's traces differ from its profiles.
    """

    plan: Plan
    answer: Callable[[], Answer]

    def settled(self) -> Plan:
        """Return the final plan, with its alternatives."""
        return self.answer().complete()


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
) -> Proposal:
    """Plan with profiles made on demand.

    Layers may be divided between `shards` ranks, with `along` also along positions.

    Profiles derived from those of other sizes are compared with traces in the background until the proposal
    is settled. With `runs_dry`, alternatives are searched in parallel with the dry run that follows.

    Raises:
        InfeasibleError: no plan fits, by such profiles; also when the proposal is settled.
    """
    make = partial(answered, partial(known, tensor=shards, sequences=along), cluster, training, options)
    try:
        result = make()
    except InfeasibleError:
        if known.checked()():
            raise
        result = make()
    made = result.plan
    used = (made.measured(stage).microbatch_size for stage in range(len(made.stages)))
    as_traced = known.checked(used if attempt(0, made).fits else None)
    (others,) = beside(result.others, forks=runs_dry)

    return Proposal(made, lambda: Answer(made, others) if as_traced() else make())
