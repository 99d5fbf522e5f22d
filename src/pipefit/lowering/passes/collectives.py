"""The passes that insert gradient reductions and parameter gathers.

The gradients of a stage with several replicas are reduced in buckets, which are runs of layers. The last
microbatch goes backward bucket by bucket (`lowering.passes.recomputation`), so a reduction runs while earlier
layers still compute; all are joined before the update (`lowering.passes.updates`).

    B3[6:9] SEND.. REDUCE[6:9] B3[3:6] REDUCE[3:6] B3[0:3] SEND_B3 REDUCE[0:3] ... WAIT_REDUCE[6:9] ... STEP

With one bucket it is `B3 SEND_B3 REDUCE`. (Buckets: PyTorch Distributed, Li et al., VLDB 2020.)

If only the owner of a layer keeps its gradients (ZeRO 2), every microbatch goes backward in buckets and has
separate reductions, which owners accumulate. A reduction is joined after the stage's next backward, or before
it if that has the same layers, and then other replicas free these gradients:

    B3[6:9] REDUCE3[6:9] B3[3:6] WAIT_REDUCE3[6:9] REDUCE3[3:6] B3[0:3] WAIT_REDUCE3[3:6] REDUCE3[0:3] ...

Thus a replica has the gradients of at most two buckets in addition to its own.

Under an asynchronous schedule every update has separate reductions, joined by its STEP (`summed_units`); all
have the number of the microbatch after which the stage is updated:

    B3 SEND_B3 REDUCE3 STASH3 WAIT_REDUCE3 STEP3 WAIT_STASH3
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from pipefit.lowering.passes.offload import Timeline
from pipefit.schema.actions import COMPUTE, Action, Kind
from pipefit.schema.decisions import What
from pipefit.schema.layer_costs import lenders
from pipefit.schema.plan import Plan


def sums_of(plan: Plan, stage: int, microbatch: int | None = None) -> list[Action]:
    """Return the REDUCEs that a stage's update joins, in the order of their starts.

    The list is empty for one replica, and with ZeRO 2.

    `microbatch` is the microbatch after which the stage is updated, if a step has several updates.
    """
    if plan.stages[stage].grid.data == 1 or plan.stages[stage].grid.divides_gradients:
        return []
    return [Action(Kind.REDUCE, stage, microbatch, run) for run in _runs(plan, stage)]


def cut_for_sums(plan: Plan, stage: int, *, is_last: bool) -> list[int]:
    """Return the layers at which a microbatch's passes are cut; `is_last` marks the stage's last backward."""
    grid = plan.stages[stage].grid
    return bucket_edges(plan, stage) if grid.data > 1 and (is_last or grid.divides_gradients) else []


def summed(actions: Sequence[Action], plan: Plan, *, update: bool) -> list[Action]:
    """Return one device's actions with the reductions of its stages.

    Each starts after the last backward of its layers and this backward's sends. Without an `update`, only
    those of every microbatch (ZeRO 2) are inserted.
    """
    before, behind = defaultdict[int, list[Action]](list), defaultdict[int, list[Action]](list)
    replicated = [
        s for s in dict.fromkeys(action.stage for action in actions) if plan.stages[s].grid.data > 1
    ]
    for stage in replicated:
        backwards = [n for n, one in enumerate(actions) if one.kind is Kind.BACKWARD and one.stage == stage]
        last_of = _last_of(actions, backwards)
        for reduce in sums_of(plan, stage) if update else ():
            behind[_sent(actions, last_of(reduce))].append(reduce)
        for reduce, last in _of_microbatches(actions, backwards, plan, stage):
            behind[_sent(actions, last)].append(reduce)
            following = bisect_right(backwards, last)
            if following == len(backwards):
                before[len(actions)].append(reduce.join)
            elif _has(actions[backwards[following]], reduce):
                before[backwards[following]].append(reduce.join)
            else:
                behind[_sent(actions, backwards[following])].append(reduce.join)
    merged = [one for n, action in enumerate(actions) for one in (*before[n], action, *behind[n])]
    return [*merged, *before[len(actions)]] if replicated else list(actions)


def summed_units(units: Sequence[Sequence[Action]], plan: Plan, stage: int) -> list[list[Action]]:
    """Return the expanded actions of an asynchronous order, with the reductions of its updates.

    A reduction starts after the last backward of its layers and is joined before the STEP. With ZeRO 2, it is
    joined after the next backward if that comes first, or before the expansion of that backward if it has the
    same layers.
    """
    if plan.stages[stage].grid.data == 1:
        return list(map(list, units))
    actions = [action for unit in units for action in unit]
    begins = [
        number for number, unit in enumerate(units) for _ in unit
    ]  # the unit of each position in `actions`
    backwards = [n for n, action in enumerate(actions) if action.kind is Kind.BACKWARD]
    updates = [n for n, action in enumerate(actions) if action.kind is Kind.STEP]
    before, behind = defaultdict[int, list[Action]](list), defaultdict[int, list[Action]](list)
    for update in updates:
        own = [n for n in backwards if actions[n].microbatch == actions[update].microbatch]
        last_of = _last_of(actions, own)
        for reduce in sums_of(plan, stage, actions[update].microbatch):
            behind[last_of(reduce)].append(reduce)
            before[begins[update]].append(reduce.join)
    for reduce, last in _of_microbatches(actions, backwards, plan, stage):
        behind[last].append(reduce)
        following, update = (_next(result, last, len(actions)) for result in (backwards, updates))
        if update < following:
            before[begins[update]].append(reduce.join)
        elif following < len(actions) and _has(actions[following], reduce):
            before[begins[following]].append(reduce.join)
        elif following < len(actions):
            behind[following].append(reduce.join)
    numbered = iter(range(len(actions)))
    return [
        [
            *before[number],
            *(one for action, n in zip(unit, numbered, strict=False) for one in (action, *behind[n])),
        ]
        for number, unit in enumerate(units)
    ]


def _next(positions: Sequence[int], position: int, end: int) -> int:
    """Return the first of rising positions after a position, or the end."""
    result = bisect_right(positions, position)
    return positions[result] if result < len(positions) else end


def _last_of(actions: Sequence[Action], backwards: Sequence[int]) -> Callable[[Action], int]:
    """Return a function from a reduction to the position of the last of these backwards through its
    layers.
    """
    of_layers, of_all = dict[int, int](), -1
    for number in backwards:
        layers = actions[number].layers
        of_all = number if layers is None else of_all
        of_layers.update(dict.fromkeys(range(*layers) if layers else (), number))

    def last(reduce: Action) -> int:
        if reduce.layers is None:
            return backwards[-1]
        return max(of_all, *(of_layers.get(layer, -1) for layer in range(*reduce.layers)))

    return last


def _of_microbatches(
    actions: Sequence[Action], backwards: Sequence[int], plan: Plan, stage: int
) -> Iterator[tuple[Action, int]]:
    """Yield all microbatches' reductions of a ZeRO 2 stage, each with the position of its last backward."""
    if not plan.stages[stage].grid.divides_gradients:
        return
    runs, of_microbatch = _runs(plan, stage), defaultdict[int | None, list[int]](list)
    for number in backwards:
        of_microbatch[actions[number].microbatch].append(number)
    for microbatch, own in of_microbatch.items():
        last_of = _last_of(actions, own)
        for reduce in (Action(Kind.REDUCE, stage, microbatch, run) for run in runs):
            yield reduce, last_of(reduce)


def _runs(plan: Plan, stage: int) -> list[tuple[int, int] | None]:
    """Return the buckets of a stage, the last layers first; None means the whole stage."""
    place = plan.stages[stage]
    cuts = [place.start, *bucket_edges(plan, stage), place.stop]
    return [*reversed([*pairwise(cuts)])] if len(cuts) > 2 else [None]


def _sent(actions: Sequence[Action], backward: int) -> int:
    """Return the position of the last send that a backward starts, or of the backward itself."""
    last = backward
    while (
        last + 1 < len(actions)
        and actions[last + 1].kind is Kind.SEND_BACKWARD
        and not actions[last + 1].wait
    ):
        last += 1
    return last


def _has(backward: Action, reduce: Action) -> bool:
    """Return whether a backward includes layers of a reduction."""
    if backward.layers is None or reduce.layers is None:
        return True
    return backward.layers[0] < reduce.layers[1] and reduce.layers[0] < backward.layers[1]


def bucket_edges(plan: Plan, stage: int) -> list[int]:
    """Return the layers at which a stage is cut into buckets of about equal bytes.

    Bytes are those of gradients, or of parameters with ZeRO 3.

    Bytes of a shared parameter belong to its first user. A run that is recomputed as a whole is not
    separated.
    """
    place, measured = plan.stages[stage], plan.measured(stage)
    gathers = place.grid.shard == "parameters"
    repeated = Counter[int]()  # by layer, bytes that belong to an earlier one
    for shared in measured.shared:
        for user in [user for user in shared.users if place.start <= user < place.stop][1:]:
            repeated[user] += shared.nbytes if gathers else shared.gradient_bytes
    at, before = 0, {place.start: 0}  # bytes before each layer
    for layer, cost in enumerate(measured.costs[place.start : place.stop], start=place.start):
        at += (cost.parameter_bytes if gathers else cost.gradient_bytes) - repeated[layer]
        before[layer + 1] = at
    runs = (decision.layers for decision in plan.decisions_of(stage, What.RECOMPUTE))
    within = {n for layers in runs for n in range(layers[0] + 1, layers[-1] + 1)}
    allowed = [n for n in range(place.start + 1, place.stop) if n not in within]
    cuts = {before[layer]: layer for layer in reversed(allowed)}  # the first of layers without bytes
    nearest = _nearest(sorted(cuts), at, place.grid.buckets)
    return [cuts[size] for size in nearest if 0 < size < at]


def _nearest(sizes: Sequence[int], whole: int, parts: int) -> Iterator[int]:
    """Yield the bucket boundaries among the rising `sizes`.

    For each end of `parts` equal parts of `whole`, this is the nearest size.
    """
    for number, size in enumerate(sizes):
        first, last = (
            1,
            parts - 1,
        )  # the parts whose end is nearest to `size`: part n ends at whole * n / parts
        if number:
            first = (sizes[number - 1] + size) * parts // (2 * whole) + 1
        if number + 1 < len(sizes):
            last = min(last, (size + sizes[number + 1]) * parts // (2 * whole))
        if first <= last:
            yield size


# ---- Gathers of parameters that replicas divide (ZeRO 3)
#
# Passes are cut in buckets, and a bucket's parameters are present during the passes through it:
#
#     UNSHARD[0:3] WAIT_UNSHARD[0:3] UNSHARD[3:6] F0[0:3] RESHARD[0:3] WAIT_UNSHARD[3:6] F0[3:6] RESHARD[3:6]
# ...
#
# A gather starts when the device begins the previous compute action. Parameters stay if nothing would be
# computed while they are freed, as at the turn from a forward to its backward. Thus a replica has the
# parameters of at most two buckets in addition to its own. A shared parameter is in the bucket of its first
# user, which is gathered for passes through the other users too. (ZeRO: Rajbhandari et al., SC 2020; FSDP:
# Zhao et al., VLDB 2023.)


def gathered(actions: Sequence[Action], plan: Plan) -> list[Action]:
    """Return one device's actions with parameters gathered before they are used, and freed after it."""
    unshards = list(_unshards(actions, plan))
    if not unshards:
        return list(actions)
    timeline = Timeline(actions)
    before, behind = defaultdict[int, list[Action]](list), defaultdict[int, list[Action]](list)
    computing = [number for number, action in enumerate(actions) if action.kind in COMPUTE]
    for unshard, uses in _uses(actions, computing, unshards, plan).items():
        for first, last in uses:
            start = computing[max(first - 1, 0)]
            before[timeline.before_waiting(start)].append(unshard)
            before[computing[first]].append(unshard.join)
            behind[computing[last]].append(unshard._replace(kind=Kind.RESHARD))
    for starts in before.values():
        starts.sort(key=lambda action: action.wait)  # a join must not delay a start at the same place
    return [
        one for number, action in enumerate(actions) for one in (*before[number], action, *behind[number])
    ]


def _unshards(actions: Sequence[Action], plan: Plan) -> Iterator[Action]:
    """Yield the UNSHARDs of all buckets of the ZeRO 3 stages."""
    for stage in dict.fromkeys(action.stage for action in actions):
        place = plan.stages[stage]
        if place.grid.shard == "parameters":
            cuts = [place.start, *bucket_edges(plan, stage), place.stop]
            yield from (Action(Kind.UNSHARD, stage, layers=run) for run in pairwise(cuts))


def _users(unshard: Action, plan: Plan) -> frozenset[int]:
    """Return the layers whose passes need the parameters of a bucket: its own, and later users of a parameter
    in it.
    """
    assert unshard.layers is not None
    own, stage = frozenset(range(*unshard.layers)), plan.stages[unshard.stage]
    borrowing = lenders(plan.measurement.shared, stage.start, stage.stop)
    return own.union(layer for layer, others in borrowing.items() if not own.isdisjoint(others))


def _uses(
    actions: Sequence[Action], computing: Sequence[int], unshards: Sequence[Action], plan: Plan
) -> dict[Action, list[tuple[int, int]]]:
    """Return the first and last compute actions of each use of every bucket, during which it stays
    gathered.
    """
    uses: dict[Action, list[tuple[int, int]]] = {unshard: [] for unshard in unshards}
    needed = defaultdict[tuple[int, int], list[Action]](list)  # by stage and layer
    for unshard in unshards:
        for layer in _users(unshard, plan):
            needed[unshard.stage, layer].append(unshard)
    passed = dict[
        tuple[int, tuple[int, int]], list[Action]
    ]()  # the buckets of a pass, by its stage and layers
    for number, position in enumerate(computing):
        action = actions[position]
        place = plan.stages[action.stage]
        key = action.stage, action.layers or (place.start, place.stop)
        if key not in passed:
            passed[key] = list(
                dict.fromkeys(b for layer in range(*key[1]) for b in needed.get((key[0], layer), ()))
            )
        for bucket in passed[key]:
            runs = uses[bucket]
            begins = runs.pop()[0] if runs and runs[-1][1] >= number - 2 else number
            runs.append((begins, number))
    return uses
