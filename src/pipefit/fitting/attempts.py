"""A plan as an attempt: whether every device and every host has the memory that it needs; and plans that are soon made.

A plan that fits is proof enough that something does, however slow its steps are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from pipefit.errors import UsageError
from pipefit.fits import Attempt
from pipefit.planner import PLANNERS, Question, solved
from pipefit.planner.joint import exact_in_time
from pipefit.planner.lean import ALL_AWAY, at_hosts
from pipefit.plans import Plan
from pipefit.schedule.recompute_settings import Recompute
from pipefit.schedule.room import shortage
from pipefit.simulator import Simulation

_PARTS = 1.0, 0.75, 0.5, 0.25  # of every stage's layers that hosts update: less of them where hosts have no room


def attempt(value: int, plan: Plan) -> Attempt:
    """The attempt of a value whose plan this is. Costs a simulation where the plan moves or recomputes anything."""
    short = shortage(plan, Simulation(plan).arenas) if plan.decisions else ""
    return Attempt(value=value, plan=plan, shortage=short)


def soon_fitting(value: int, question: Question) -> Attempt | None:
    """The first attempt that fits of those that are soon made, with more and more done about memory; None if none does.

    The question allows plans that do not fit.
    """
    found = (attempt(value, plan) for plan in _soon(question))
    return next((one for one in found if one.fits), None)


def _soon(question: Question) -> Iterator[Plan]:
    """The leanest plans that keep everything, and that recompute all blocks; such whose hosts update layers, and such
    whose hosts have parameters and gradients between passes too.
    """
    asked = question.options.recompute
    ways: tuple[Recompute, ...] = ("never", "always", "stages") if asked == "never" else (asked,)
    if exact_in_time(question):
        for recompute in ways:
            with suppress(UsageError):  # layers that cannot run again
                options = replace(question.options, recompute=recompute)
                yield solved(replace(question, options=options), PLANNERS["exact"], name="exact")
    for part in _PARTS:
        with suppress(UsageError):
            yield solved(question, partial(at_hosts, part=part), name="lean")
    with suppress(UsageError):
        yield solved(question, partial(at_hosts, part=1.0, moves=ALL_AWAY), name="lean")
