"""Attempts: plans and whether they fit; plans that are found fast; and plans of tasks.

A plan that fits proves that something does, however slow its steps are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Unpack

from pipefit.errors import InfeasibleError, UsageError
from pipefit.lowering.passes.recomputation import Recompute
from pipefit.memory.arenas import shortage
from pipefit.planner import PLANNERS, Answer, Asked, Question, answered, solved
from pipefit.planner.joint import exact_in_time
from pipefit.planner.lean import ALL_AWAY, at_hosts
from pipefit.planner.open_choices import by_distance, sizes_of
from pipefit.processes import beside
from pipefit.profiler.on_demand import OnDemand
from pipefit.schema.cluster import Cluster
from pipefit.schema.fit import Attempt
from pipefit.schema.plan import Plan
from pipefit.schema.training import MOST_SAMPLES, Training
from pipefit.simulator import Simulation

_PARTS = 1.0, 0.75, 0.5, 0.25  # shares of every stage's layers that hosts update; less if hosts lack room


def attempt(value: int, plan: Plan) -> Attempt:
    """Return the attempt of a value with this plan. Simulates the plan if it offloads or recomputes anything."""
    short = shortage(plan, Simulation(plan).arenas) if plan.decisions else ""
    return Attempt(value=value, plan=plan, shortage=short)


def soon_fitting(value: int, question: Question) -> Attempt | None:
    """Return the first attempt that fits among plans that are found fast; None if none fits.

    The plans use more and more memory techniques.

    The question must allow plans that do not fit.
    """
    found = (attempt(value, plan) for plan in _soon(question))
    return next((one for one in found if one.fits), None)


def _soon(question: Question) -> Iterator[Plan]:
    """Yield plans that are found fast, with more and more memory techniques.

    They keep everything, recompute all blocks, have hosts update layers, and have hosts hold parameters and
    gradients between passes.
    """
    asked = question.options.recompute
    ways: tuple[Recompute, ...] = ("never", "always", "stages") if asked == "never" else (asked,)
    if exact_in_time(question):
        for recompute in ways:
            with suppress(UsageError):  # layers that cannot be recomputed
                options = replace(question.options, recompute=recompute)
                yield solved(replace(question, options=options), PLANNERS["exact"], name="exact")
    for part in _PARTS:
        with suppress(UsageError):
            yield solved(question, partial(at_hosts, part=part), name="lean")
    with suppress(UsageError):
        yield solved(question, partial(at_hosts, part=1.0, moves=ALL_AWAY), name="lean")


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


def sizes_asked(training: Training | None, asked: Asked) -> tuple[int, ...]:
    """Return the microbatch sizes that planning may need, including local batches."""
    batch, size, count = asked.get("batch_size"), asked.get("microbatch_size"), asked.get("microbatches")
    if training is not None:
        size = training.microbatch_size
    elif size is None:
        size = batch // count if batch and count else batch
    return sizes_of(size) if size and 0 < size <= MOST_SAMPLES else (1,)  # other values fail in the later checks


def in_order(sizes: Sequence[int], training: Training | None, asked: Asked, devices: int) -> list[int]:
    """Return the sizes of `sizes_asked`, the likeliest first."""
    chosen = training is None and asked.get("microbatch_size") is None and asked.get("microbatches") is None
    return by_distance(sizes, sizes[-1], devices) if chosen else sorted(sizes, reverse=True)


def plan_on_the_way(
    known: OnDemand,
    cluster: Cluster,
    training: Training | None = None,
    *,
    shards: Sequence[int] = (),
    along: bool = False,
    runs_dry: bool = False,
    **asked: Unpack[Asked],
) -> Proposal:
    """Plan with profiles made on demand.

    Layers may be divided between `shards` ranks, with `along` also along positions.

    Profiles derived from those of other sizes are compared with traces in the background until the proposal
    is settled. With `runs_dry`, alternatives are searched in parallel with the dry run that follows. Other
    arguments are those of `planner.plan`.

    Raises:
        InfeasibleError: no plan fits, by such profiles; also when the proposal is settled.
    """
    make = partial(answered, partial(known, tensor=shards, sequences=along), cluster, training, **asked)
    try:
        found = make()
    except InfeasibleError:
        if known.checked()():
            raise
        found = make()
    made = found.plan
    used = (made.measured(stage).microbatch_size for stage in range(len(made.stages)))
    as_traced = known.checked(used if attempt(0, made).fits else None)
    (others,) = beside(found.others, forks=runs_dry)

    return Proposal(made, lambda: Answer(made, others) if as_traced() else make())
