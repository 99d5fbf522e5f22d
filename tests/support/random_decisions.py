"""Plans with random decisions of all kinds: every stage recomputes runs of layers and offloads saved tensors,
alone and in bundles, to hosts and peers, each for a share of the microbatches. Under asynchronous schedules
weights of all versions, optimizer state and gradients move too, and hosts update layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random

from pipefit.errors import UsageError
from pipefit.memory.storages import StageStorages
from pipefit.schema.actions import Subject
from pipefit.schema.decisions import Decision, Microbatches, Run, SavedTensors, State, StateKind, What
from pipefit.schema.plan import Plan
from support.random_offloads import random_place
from support.random_state_offloads import inside_recomputed, moving_states, runs
from support.random_trainings import cuts_a_shared_parameter

RUNS, MOVES = 3, 4  # of a stage, at most


def compacted(plan: Plan, rng: Random) -> Plan:
    """Replace the decisions of every stage by random ones."""
    plan, decisions = replace(plan, decisions=()), list[Decision]()
    for stage in range(len(plan.stages)):
        decisions += _runs(plan, stage, rng)
        decisions += _moves(plan, stage, [one for one in decisions if one.stage == stage], rng)
    plan = replace(plan, decisions=tuple(decisions))
    return _with_state(plan, rng) if plan.training.endless else plan


def _share(plan: Plan, rng: Random) -> Microbatches:
    """Draw a share of the microbatches; under an asynchronous schedule, one that is the same in every
    step.
    """
    count, every = plan.training.microbatches, rng.randint(1, 3)
    if plan.training.endless:
        every = rng.choice([number for number in range(1, count + 1) if count % number == 0])
    return Microbatches(rng.randint(1, every), every, rng.randrange(every))


def _times(plan: Plan) -> list[int]:
    """Draw values of `ahead` and `behind`; they may cross steps of an asynchronous schedule."""
    return [0, 0, 1, 2, 4] if plan.training.endless else [0, 0, 1, 2]


def _meet(plan: Plan, one: Microbatches, other: Microbatches) -> bool:
    """Return whether two decisions share a microbatch."""
    return any(number in one and number in other for number in range(plan.training.microbatches))


# -------------------------------------------------------------------- recomputation


def _runs(plan: Plan, stage: int, rng: Random) -> list[Decision]:
    """Draw short runs, which may be adjacent, and may overlap for different microbatches."""
    place, found = plan.stages[stage], list[Decision]()
    for _ in range(rng.randint(0, RUNS)):
        start = rng.randrange(place.start, place.stop)
        layers = range(start, min(place.stop, start + rng.randint(1, 4)))
        share, taken = (
            _share(plan, rng),
            {n for one in found for n in range(one.layers[0], one.layers[1] + 1)},
        )
        if not taken.isdisjoint(layers) and any(_meet(plan, share, one.microbatches) for one in found):
            continue
        if cuts_a_shared_parameter(plan, place, layers.start, layers.stop) or not _repeatable(plan, layers):
            continue
        run = Run(start=layers.start, stop=layers.stop)
        ahead = rng.choice(_times(plan))
        found.append(Decision(stage=stage, subject=run, what=What.RECOMPUTE, microbatches=share, ahead=ahead))
    return found


def _repeatable(plan: Plan, layers: range) -> bool:
    """Return whether a second forward of these layers equals the first; the loss belongs to the last
    layer.
    """
    costs = [plan.measurement.costs[layer] for layer in layers]
    costs += [plan.measurement.loss] if layers.stop == len(plan.profile.layers) else []
    return not any(cost.unrepeatable for cost in costs)


# -------------------------------------------------------------------- offloading


def _moves(plan: Plan, stage: int, runs: Sequence[Decision], rng: Random) -> Iterator[Decision]:
    """Draw saved tensors to offload, none for a microbatch that recomputes a layer that saves it."""
    names = list(_names(plan, stage))
    rng.shuffle(names)
    for _ in range(rng.randint(0, MOVES)):
        taken, names = names[: (cut := rng.choice([1, 1, 2, 4]))], names[cut:]
        share = _share(plan, rng)
        again = {
            layer
            for run in runs
            if _meet(plan, share, run.microbatches)
            for layer in range(run.layers[0], run.layers[1] + 1)
        }
        free = [name for name, savers in taken if again.isdisjoint(savers)]
        if free:
            yield Decision(
                stage=stage,
                subject=SavedTensors(tensors=tuple(free)),
                what=What.OFFLOAD,
                place=random_place(plan, stage, rng),
                microbatches=share,
                behind=rng.choice(_times(plan)),
                ahead=rng.choice(_times(plan)),
            )


def _names(plan: Plan, stage: int) -> Iterator[tuple[tuple[int, int], Collection[int]]]:
    """Return the saved tensors of a stage that can be offloaded, one for each storage, and the layers that
    save it.
    """
    storages, place, seen = StageStorages.of(plan, stage), plan.stages[stage], set[int]()
    for layer in range(place.start, place.stop):
        for saved in plan.measured(stage).costs[layer].saved:
            subject = Subject(layer, saved.index)
            with suppress(UsageError):  # of a parameter, or kept by a custom function for itself
                number = storages.storage(subject)
                if storages.sizes[number] and number not in seen:
                    seen.add(number)
                    yield (layer, saved.index), storages.savers(subject)


# -------------------------------------------------------------------- weights, gradients and optimizer state


def _with_state(plan: Plan, rng: Random) -> Plan:
    """Return the plan with weights and state moved too; gradients and the newest weights only if no layers
    share a parameter, which parts of a stage cannot handle.
    """
    alone: tuple[StateKind, ...] = ("optimizer", "gradients", "parameters")
    kinds = alone[:1] if plan.measurement.shared else alone
    found = moving_states(replace(plan, decisions=(*plan.decisions, *_versions(plan, rng))), rng, kinds)
    return replace(found, decisions=tuple(one for one in found.decisions if _may_move(plan, one)))


def _may_move(plan: Plan, decision: Decision) -> bool:
    """Return whether a decision moves something other than parameters, or parameters of trained layers only,
    and nothing that replicas shard or share.
    """
    if not isinstance(decision.subject, State):
        return True
    shard = plan.stages[decision.stage].grid.shard
    if shard != "none" and (decision.subject.kind in ("parameters", "gradients")):
        return False
    if shard == "optimizer" and decision.what is What.UPDATE:
        return False
    if decision.subject.kind != "parameters":
        return True
    costs = plan.measurement.costs[decision.subject.start : decision.subject.stop]
    return any(cost.trained_bytes for cost in costs) and all(
        c.trained_bytes == c.parameter_bytes for c in costs
    )


def _versions(plan: Plan, rng: Random) -> Iterator[Decision]:
    """Move older weights of runs of layers in some stages that hold them; with shared parameters, those of
    all layers.
    """
    older = plan.stages[:-1] if plan.training.schedule == "pipedream" else plan.stages
    for number, stage in enumerate(older):
        avoid = range(stage.start, stage.stop) if plan.measurement.shared else inside_recomputed(plan, number)
        for start, stop in runs(stage.start, stage.stop, rng, avoid):
            if any(cost.trained_bytes for cost in plan.measurement.costs[start:stop]) and rng.random() < 0.5:
                yield Decision(
                    stage=number,
                    subject=State(start=start, stop=stop, kind="versions"),
                    what=What.OFFLOAD,
                    place=random_place(plan, number, rng),
                    behind=rng.choice(_times(plan)),
                    ahead=rng.choice(_times(plan)),
                )
