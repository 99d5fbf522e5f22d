"""The rewriting that begins sums of gradients: each as soon as the last backward of its layers has ended.

The gradients of a stage with several replicas are summed in buckets, which are runs of layers. The last microbatch goes
backward bucket by bucket (`pipefit.schedule.recomputation`), so that a sum is under way while earlier layers still
compute; all are joined before the update (`pipefit.schedule.updates`).

    B3[6:9] SEND.. REDUCE[6:9] B3[3:6] REDUCE[3:6] B3[0:3] SEND_B3 REDUCE[0:3] ... WAIT_REDUCE[6:9] ... STEP

With one bucket it is `B3 SEND_B3 REDUCE`. (Buckets: PyTorch Distributed, Li et al., VLDB 2020.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from pipefit.actions import Action, Kind
from pipefit.cost.storages import StageStorages
from pipefit.decisions import What
from pipefit.plans import Plan


def sums_of(plan: Plan, stage: int) -> list[Action]:
    """The REDUCEs of a stage, in the order in which they begin; none where it is one replica."""
    place = plan.stages[stage]
    if place.grid.data == 1:
        return []
    cuts = [place.start, *bucket_edges(plan, stage), place.stop]
    runs = [None] if len(cuts) == 2 else [*pairwise(cuts)][::-1]
    return [Action(Kind.REDUCE, stage, layers=run) for run in runs]


def summed(actions: Sequence[Action], plan: Plan) -> list[Action]:
    """One device's actions with the sums of its stages begun, each behind the last backward of its layers and what that
    sends.
    """
    behind = defaultdict[int, list[Action]](list)
    for stage in dict.fromkeys(action.stage for action in actions):
        for reduce in sums_of(plan, stage):
            behind[_last_backward(actions, reduce)].append(reduce)
    return [one for number, action in enumerate(actions) for one in (action, *behind[number])]


def _last_backward(actions: Sequence[Action], reduce: Action) -> int:
    """The position of the last backward of a sum's layers, or of the last of the sends behind it."""
    last = max(
        number
        for number, action in enumerate(actions)
        if action.kind is Kind.BACKWARD and action.stage == reduce.stage and _has(action, reduce)
    )
    while last + 1 < len(actions) and actions[last + 1].kind is Kind.SEND_BACKWARD and not actions[last + 1].wait:
        last += 1
    return last


def _has(backward: Action, reduce: Action) -> bool:
    """Whether a backward passes through layers of a sum."""
    if backward.layers is None or reduce.layers is None:
        return True
    return backward.layers[0] < reduce.layers[1] and reduce.layers[0] < backward.layers[1]


def bucket_edges(plan: Plan, stage: int) -> list[int]:
    """The layers before which a stage is divided in buckets, of about equal bytes of gradients.

    Never between layers that share a parameter, whose gradients would be added up in another order, and not within a
    run that is recomputed as a whole.
    """
    place, storages = plan.stages[stage], StageStorages.of(plan, stage)
    at, before = 0, {place.start: 0}  # by layer, gradient bytes of the layers before it
    for layer, cost in enumerate(storages.costs[: place.stop - place.start], start=place.start):
        before[layer + 1] = at = at + cost.gradient_bytes
    allowed = [layer for layer in range(place.start + 1, place.stop) if not _divides(plan, stage, layer)]
    wanted = [at * number / place.grid.buckets for number in range(1, place.grid.buckets)]
    nearest = {min(allowed, key=lambda layer: abs(before[layer] - size)) for size in wanted if allowed}
    return sorted(layer for layer in nearest if 0 < before[layer] < at)


def _divides(plan: Plan, stage: int, layer: int) -> bool:
    """Whether a cut before a layer would part what has to stay together."""
    place = plan.stages[stage]
    together = [(d.layers[0], d.layers[-1]) for d in plan.decisions_of(stage, What.RECOMPUTE)]
    for shared in plan.measurement.shared:
        users = [user for user in shared.users if place.start <= user < place.stop]
        together += [(users[0], users[-1])] if users and shared.gradient_bytes else []
    return any(first < layer <= last for first, last in together)
