"""A plan as an attempt: whether every device and every host has the memory that it needs."""

from __future__ import annotations

from pipefit.fits import Attempt
from pipefit.plans import Plan
from pipefit.schedule.room import shortage
from pipefit.simulator import Simulation


def attempt(value: int, plan: Plan) -> Attempt:
    """The attempt of a value whose plan this is. Costs a simulation where the plan moves or recomputes anything."""
    short = shortage(plan, Simulation(plan).arenas) if plan.decisions else ""
    return Attempt(value=value, plan=plan, shortage=short)
