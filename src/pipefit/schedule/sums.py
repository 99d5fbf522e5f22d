"""The rewriting that begins sums of gradients: each as soon as the last backward of its layers has ended.

The gradients of a stage with several replicas are summed in buckets, which are runs of layers. The last microbatch goes
backward bucket by bucket (`pipefit.schedule.recomputation`), so that a sum is under way while earlier layers still
compute; all are joined before the update (`pipefit.schedule.updates`).

    B3[6:9] SEND.. REDUCE[6:9] B3[3:6] REDUCE[3:6] B3[0:3] SEND_B3 REDUCE[0:3] ... WAIT_REDUCE[6:9] ... STEP

With one bucket it is `B3 SEND_B3 REDUCE`. (Buckets: PyTorch Distributed, Li et al., VLDB 2020.)

Where only the owner of a layer keeps its gradients (ZeRO 2), every microbatch goes backward in buckets and has sums of
its own, which owners add up. A sum is joined behind the stage's next backward, or before it where that has the same
layers, and then the gradients of all others are freed:

    B3[6:9] REDUCE3[6:9] B3[3:6] WAIT_REDUCE3[6:9] REDUCE3[3:6] B3[0:3] WAIT_REDUCE3[3:6] REDUCE3[0:3] ...

So besides its own a replica has the gradients of two buckets at most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from pipefit.actions import Action, Kind
from pipefit.cost.storages import StageStorages
from pipefit.decisions import What
from pipefit.plans import Plan


def sums_of(plan: Plan, stage: int) -> list[Action]:
    """The REDUCEs that a stage's update joins, in the order in which they begin; none where it is one replica, or every
    microbatch has its own.
    """
    if plan.stages[stage].grid.data == 1 or plan.stages[stage].grid.divides_gradients:
        return []
    return [Action(Kind.REDUCE, stage, layers=run) for run in _runs(plan, stage)]


def cut_for_sums(plan: Plan, stage: int, *, is_last: bool) -> list[int]:
    """The layers before which a microbatch's passes are cut; `is_last` says whether it is the stage's last backward."""
    grid = plan.stages[stage].grid
    return bucket_edges(plan, stage) if grid.data > 1 and (is_last or grid.divides_gradients) else []


def summed(actions: Sequence[Action], plan: Plan, *, update: bool) -> list[Action]:
    """One device's actions with the sums of its stages begun, each behind the last backward of its layers and what that
    sends; without an `update`, those of every microbatch alone.
    """
    before, behind = defaultdict[int, list[Action]](list), defaultdict[int, list[Action]](list)
    for stage in dict.fromkeys(action.stage for action in actions):
        once = [] if not update else sums_of(plan, stage)
        for begin, reduce in _begun(actions, once):
            behind[begin].append(reduce)
        for begin, reduce in _begun(actions, _of_microbatches(actions, plan, stage)):
            following = next(_backwards(actions, Action(Kind.REDUCE, stage), begin + 1), None)
            behind[begin].append(reduce)
            if following is None:
                before[len(actions)].append(reduce.join)
            elif _has(actions[following], reduce):
                before[following].append(reduce.join)
            else:
                behind[_sent(actions, following)].append(reduce.join)
    merged = [one for n, action in enumerate(actions) for one in (*before[n], action, *behind[n])]
    return [*merged, *before[len(actions)]]


def _begun(actions: Sequence[Action], reduces: Sequence[Action]) -> Iterator[tuple[int, Action]]:
    """Where each sum begins: behind the last of its backwards."""
    for reduce in reduces:
        *_, last = _backwards(actions, reduce)
        yield _sent(actions, last), reduce


def _of_microbatches(actions: Sequence[Action], plan: Plan, stage: int) -> list[Action]:
    """The sums of all microbatches of a stage in which only owners keep gradients."""
    grid = plan.stages[stage].grid
    if grid.data == 1 or not grid.divides_gradients:
        return []
    backwards = (action for action in actions if action.kind is Kind.BACKWARD and action.stage == stage)
    microbatches, runs = dict.fromkeys(action.microbatch for action in backwards), _runs(plan, stage)
    return [Action(Kind.REDUCE, stage, microbatch, run) for microbatch in microbatches for run in runs]


def _runs(plan: Plan, stage: int) -> list[tuple[int, int] | None]:
    """The buckets of a stage, the last layers first; None is the whole stage."""
    place = plan.stages[stage]
    cuts = [place.start, *bucket_edges(plan, stage), place.stop]
    return [*reversed([*pairwise(cuts)])] if len(cuts) > 2 else [None]


def _backwards(actions: Sequence[Action], reduce: Action, first: int = 0) -> Iterator[int]:
    """The positions, from the `first` on, of the backwards that pass through layers of a sum: of its microbatch, or of
    any where it is one of all.
    """
    for number, action in enumerate(actions[first:], start=first):
        of_sum = reduce.microbatch is None or action.microbatch == reduce.microbatch
        if action.kind is Kind.BACKWARD and action.stage == reduce.stage and of_sum and _has(action, reduce):
            yield number


def _sent(actions: Sequence[Action], backward: int) -> int:
    """The position of the last of the sends that a backward begins, or of itself."""
    last = backward
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
