"""Accounts for what each technique does on each stage: the plan is simulated once more without it.

So the bytes are those of the ledger and the seconds those of the simulator, and what techniques do to each other is in
both. Costs a simulation for each technique of each stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipefit.compactions import Compaction
from pipefit.cost.stage import Costs
from pipefit.decisions import Decision, SavedTensors, State, What
from pipefit.plans import Plan
from pipefit.simulator import Simulation


def compactions(plan: Plan, whole: Simulation) -> Iterator[Compaction]:
    """What each technique does on each stage of `plan`, of which `whole` is the simulation."""
    costs = Costs.of(plan)
    groups = dict.fromkeys((decision.stage, _technique(decision)) for decision in plan.decisions)
    for stage, technique in sorted(groups):
        own = [d for d in plan.decisions if (d.stage, _technique(d)) == (stage, technique)]
        without = tuple(d for d in plan.decisions if (d.stage, _technique(d)) != (stage, technique))
        simulation = Simulation(replace(plan, decisions=without), costs=costs)
        device = plan.stages[stage].device
        yield Compaction(
            stage=stage,
            what=technique,
            layers=len({layer for decision in own for layer in _layers(decision)}),
            freed_bytes=simulation.peak_bytes[device] - whole.peak_bytes[device],
            added_seconds=whole.step_seconds[-1] - simulation.step_seconds[-1],
        )


def _technique(decision: Decision) -> str:
    """What is done, in words."""
    if decision.what is What.RECOMPUTE:
        return "recompute"
    what = f"move {decision.subject.kind} state to" if isinstance(decision.subject, State) else "move to"
    return f"{what} {decision.place}"


def _layers(decision: Decision) -> tuple[int, ...]:
    subject = decision.subject
    return decision.layers if isinstance(subject, SavedTensors) else tuple(range(subject.start, subject.stop))
