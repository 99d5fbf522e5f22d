"""Plans with random decisions to offload the state of layers, or to update layers on the host."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from random import Random

from pipefit.schema.decisions import Decision, Run, State, StateKind, What
from pipefit.schema.devices import Place, parse_place
from pipefit.schema.plan import Plan
from support.random_offloads import random_place

KINDS: tuple[StateKind, ...] = ("optimizer", "parameters", "gradients")


def moving_states(plan: Plan, rng: Random, kinds: Sequence[StateKind] = KINDS) -> Plan:
    """Return the plan with random runs of layers in every stage that offload these `kinds` of state, or that
    the host updates.
    """
    decisions = [one for number in range(len(plan.stages)) for one in _of_stage(plan, number, rng, kinds)]
    return replace(plan, decisions=(*plan.decisions, *decisions))


def _of_stage(plan: Plan, number: int, rng: Random, kinds: Sequence[StateKind]) -> Iterator[Decision]:
    """Draw decisions about the state of one stage."""
    stage, updated = plan.stages[number], set[int]()
    for start, stop in runs(stage.start, stage.stop, rng) if "optimizer" in kinds else ():
        what = rng.choice([What.OFFLOAD, What.OFFLOAD, What.UPDATE, None])
        if what is not None:
            place = parse_place("host") if what is What.UPDATE else random_place(plan, number, rng)
            yield _about(number, start, stop, "optimizer", place, rng, what)
        updated.update(range(start, stop) if what is What.UPDATE else ())
    inside = inside_recomputed(plan, number)
    for kind in ("parameters", "gradients"):
        for start, stop in runs(stage.start, stage.stop, rng, avoid=inside) if kind in kinds else ():
            if rng.random() < 0.6 and updated.isdisjoint(range(start, stop)):
                place = random_place(plan, number, rng)
                yield _about(number, start, stop, kind, place, rng)


def inside_recomputed(plan: Plan, stage: int) -> set[int]:
    """Return the layers of a stage that cannot start a run, because they are recomputed with the layers
    before them.
    """
    again = [decision.subject for decision in plan.decisions_of(stage, What.RECOMPUTE)]
    return {n for run in again if isinstance(run, Run) for n in range(run.start + 1, run.stop)}


def _about(
    stage: int, start: int, stop: int, kind: StateKind, place: Place, rng: Random, what: What = What.OFFLOAD
) -> Decision:
    """Return a decision with random times."""
    return Decision(
        stage=stage,
        subject=State(start=start, stop=stop, kind=kind),
        what=what,
        place=place,
        ahead=rng.choice([0, 1, 2]),
        behind=rng.choice([0, 1, 2]),
    )


def runs(start: int, stop: int, rng: Random, avoid: Collection[int] = ()) -> Sequence[tuple[int, int]]:
    """Divide layers `start` to `stop - 1` at random, but at none of the layers to `avoid`."""
    allowed = [cut for cut in range(start + 1, stop) if cut not in avoid]
    cuts = sorted(rng.sample(allowed, rng.randint(0, min(3, len(allowed)))))
    return list(zip([start, *cuts], [*cuts, stop], strict=True))
