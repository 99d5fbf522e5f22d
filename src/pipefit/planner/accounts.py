"""Accounts for what each technique does on each stage: the plan is simulated once more without it.

So the bytes are those of the ledger and the seconds those of the simulator, and what techniques do to each other is in
both. Costs a simulation for each technique of each stage; of long programs only as many are told as a budget of actions
allows, those of the most layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pipefit.compactions import Compaction
from pipefit.cost.stage import Costs
from pipefit.decisions import Decision, SavedTensors, State, What
from pipefit.plans import Plan
from pipefit.simulator.assembled import Assembled, Parts

_ACTIONS = 300_000  # in all steps that are simulated: some two seconds

Group = tuple[int, str]  # a stage, and what is done on it


class Accounts(NamedTuple):
    """What techniques do on stages, and how many more there are of which this was not found out."""

    compactions: tuple[Compaction, ...] = ()
    left_out: int = 0

    @property
    def remarks(self) -> tuple[str, ...]:
        """A sentence about those that were left out."""
        if not self.left_out:
            return ()
        count = len(self.compactions)
        return (f"Of {count + self.left_out} ways in which stages free memory, the {count} of most layers are told.",)


def accounts(plan: Plan, whole: Assembled, *, most_actions: int = _ACTIONS) -> Accounts:
    """What each technique does on each stage of `plan`, of which `whole` is the simulation."""
    groups = Counter[Group]()
    for decision in plan.decisions:
        groups[decision.stage, _technique(decision)] += len(_layers(decision))
    actions = whole.actions
    told = sorted(group for group, _ in groups.most_common(max(1, most_actions // max(1, actions))))
    return Accounts(tuple(_compactions(plan, whole, told)), len(groups) - len(told))


def _compactions(plan: Plan, whole: Assembled, groups: Sequence[Group]) -> Iterator[Compaction]:
    parts = Parts(Costs.of(plan))
    for stage, technique in groups:
        own = [d for d in plan.decisions if (d.stage, _technique(d)) == (stage, technique)]
        without = tuple(d for d in plan.decisions if (d.stage, _technique(d)) != (stage, technique))
        simulation = Assembled(replace(plan, decisions=without), parts)
        device = plan.stages[stage].devices[0]  # replicas do alike
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
