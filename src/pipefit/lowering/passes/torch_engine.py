"""The pass for messages of `torch.distributed.pipelining`, and plans that this engine cannot run.

That engine waits for each message where it needs it. A WAIT for a send stands where the engine drops the
message's tensors: 1F1B drops them one forward, or one backward, later; GPipe and orders that run as actions
keep every handle until the end of the step.

    LOAD of all microbatches      the whole batch is on the device during the step
    RECV, WAIT                    before the forward or backward that needs it
    F[m] SEND_F[m]                the outputs stay until B[m] has ended, and under 1F1B until F[m+1] has
    B[m] SEND_B[m]                the gradients stay, under 1F1B until B[m+1] has ended

Since torch 2.15, outputs stay until they are sent: under 1F1B until F[m+1] has ended or a backward begins,
under GPipe until all forwards have ended, and in orders that run as actions until B[m] has ended.

Saved tensors move within the pass of their layer: an OFFLOAD after F[m] and a RELOAD before B[m] have the
time of its copies, and the passes have their effects in memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import compress

from pipefit.errors import UsageError
from pipefit.lowering.local_batches import Slices, check_slices
from pipefit.lowering.passes.communication import begins, ends, receives_of, sends_of
from pipefit.lowering.passes.offload import Bundles, named, recomputed_too, subjects_of
from pipefit.lowering.schedules import Order
from pipefit.memory import StageStorages, drops_early, receives_ahead
from pipefit.schema.actions import COMPUTE, FORWARDS, Action, Kind, Subject
from pipefit.schema.decisions import Decision, Run, SavedTensors, What
from pipefit.schema.devices import MemberKind, Place
from pipefit.schema.layer_costs import LayerCost
from pipefit.schema.plan import Plan


def check_for_torch(plan: Plan) -> None:
    """Check that torch's engine can run the plan.

    Raises:
        UsageError: it cannot, and names what it lacks; or replicas cannot divide the batch or their state.
    """
    check_slices(plan, None)
    if reason := next(_reasons(plan), None):
        raise UsageError(
            f"torch.distributed.pipelining {reason}: train this plan with pipefit's own runtime "
            "(pipefit.Trainer, or pipefit train without --engine), or plan without it"
        )


def _reasons(plan: Plan) -> Iterator[str]:
    """Yield what torch's engine lacks for the plan, as ends of a sentence."""
    if plan.training.endless:
        yield f"ends every step with an empty pipeline, unlike schedule {plan.training.schedule}"
    grids = [stage.grid for stage in plan.stages]
    if len({(grid.data, grid.tensor) for grid in grids}) > 1:
        yield "needs the same numbers of replicas and of tensor shards in every stage"
    for number, stage in enumerate(plan.stages):
        yield from _undivided(plan, number) if stage.grid.divides_gradients else ()
    for stages in plan.summed.values():
        if len({plan.stages[stage].devices for stage in stages}) < len(stages):
            names = " and ".join(map(str, stages))
            yield f"cannot sum gradients of a parameter that stages {names} share on one device"
    for decision in plan.decisions:
        if decision.what is What.UPDATE or (
            decision.what is What.OFFLOAD and not isinstance(decision.subject, SavedTensors)
        ):
            yield f"cannot carry out the decision on {decision}"
        if decision.place is not None and any(m.kind is not MemberKind.HOST for m, _ in decision.place):
            yield f"moves saved tensors to the host only, not as in {decision}"


def _undivided(plan: Plan, number: int) -> Iterator[str]:
    """Yield which parameters of a stage FSDP2 cannot divide, and why."""
    stage, measured = plan.stages[number], plan.measured(number)
    within = range(stage.start, stage.stop)
    for layer in within:
        for reason in _undivided_alone(measured.costs[layer]):
            yield f"cannot divide {stage.grid.shard} of layer {plan.profile.layers[layer]}, which {reason}"
    sharing = [[user for user in one.users if user in within] for one in measured.shared]
    together = {user for users in sharing if len(users) > 1 for user in users}  # FSDP2 gathers them together
    if len(dtypes := _trained_dtypes(measured.costs[layer] for layer in together)) > 1:
        which = f"of the layers of stage {number} that share parameters"
        yield f"cannot divide {stage.grid.shard} {which}, which have parameters of {' and '.join(dtypes)}"


def _undivided_alone(cost: LayerCost) -> Iterator[str]:
    """Yield why FSDP2 cannot divide the parameters of a layer."""
    if cost.mutates_inputs and cost.parameters:
        yield "changes its inputs in place"
    if any(not parameter.shape for parameter in cost.parameters):
        yield "has a parameter without dimensions"
    if len(dtypes := _trained_dtypes([cost])) > 1:
        yield f"has parameters of {' and '.join(dtypes)}"


def _trained_dtypes(costs: Iterable[LayerCost]) -> list[str]:
    """Return the dtypes of the layers' parameters that are trained."""
    return sorted({one.dtype for cost in costs for one in cost.parameters if one.trainable})


Pass = tuple[Kind, int, int]  # a FORWARD or BACKWARD of a stage, and the microbatch


def runs_gpipe(plan: Plan) -> bool:
    """Return whether the engine runs the plan's order by its own GPipe."""
    return len(plan.ranks) == len(plan.stages) and plan.training.schedule == "gpipe"


def exchanged(order: Order, plan: Plan, slices: Slices, moves: Moves, bundles: Bundles) -> Iterator[Action]:
    """Yield the actions of one device: its compute actions, and the loads, messages and moves around them."""
    stages = {action.stage for action in order}
    for stage in sorted(stages & {0, len(plan.stages) - 1}):
        for microbatch in range(plan.training.microbatches):
            yield slices.load(stage, microbatch)
    done = set[Pass]()
    held = dict[Pass, list[Action]]()  # sends by the pass that made the tensors
    for action in order:
        for receive in receives_of(action, plan, slices):
            yield receive
            yield receive.join
        copies = list(_copies(action, moves, bundles))
        yield from copies if action.kind is Kind.BACKWARD else ()
        yield action
        yield from copies if action.kind is Kind.FORWARD else ()
        over = _over(action, plan)
        if over is None:
            continue
        done.add(over)
        held[over] = started = list(sends_of(action, plan, slices))
        yield from started
        for key in _dropped(over, done, plan):
            yield from (send.join for send in held.pop(key, ()))
    for sent in held.values():
        yield from (send.join for send in sent)


def _copies(action: Action, moves: Moves, bundles: Bundles) -> Iterator[Action]:
    """Yield the copies of saved tensors in a forward or a backward, each with its join."""
    own, kind = moves.get((action.stage, action.microbatch), ()), Kind.OFFLOAD
    if action.kind is Kind.BACKWARD:
        own, kind = own[::-1], Kind.RELOAD
    for subjects, place in own:
        if action.layers is None or action.layers[0] <= subjects[0].layer < action.layers[1]:
            copy = Action(kind, action.stage, action.microbatch, None, named(subjects, bundles), place)
            yield copy
            yield copy.join


def _over(action: Action, plan: Plan) -> Pass | None:
    """Return the pass of a stage that ends with the action."""
    if action.kind in FORWARDS and ends(action, plan):
        return Kind.FORWARD, action.stage, action.microbatch or 0
    if action.kind is Kind.BACKWARD and begins(action, plan):
        return Kind.BACKWARD, action.stage, action.microbatch or 0
    return None


def _dropped(over: Pass, done: set[Pass], plan: Plan) -> Iterator[Pass]:
    """Yield the passes whose tensors the engine drops when a pass is over."""
    kind, stage, microbatch = over
    if receives_ahead():
        yield from _dropped_by_1f1b(over, done, plan) if drops_early(plan) else ()
    elif drops_early(plan):
        warm_up = len(plan.stages) - stage
        if kind is Kind.BACKWARD or microbatch < warm_up:
            yield kind, stage, microbatch - 1
        if kind is Kind.FORWARD and microbatch >= warm_up - 1:
            yield over
    elif not runs_gpipe(plan):
        yield from [(Kind.FORWARD, stage, microbatch)] if kind is Kind.BACKWARD else ()
    elif over == (Kind.FORWARD, stage, plan.training.microbatches - 1):
        yield from ((kind, stage, earlier) for earlier in range(plan.training.microbatches))


def _dropped_by_1f1b(over: Pass, done: set[Pass], plan: Plan) -> Iterator[Pass]:
    """Yield the passes whose tensors 1F1B drops when a pass is over, before torch 2.15.

    The handle of the last send of the warm-up but one stays until the warm-up's forwards are all that is
    left.
    """
    kind, stage, microbatch = over
    warm_up, count = len(plan.stages) - stage, plan.training.microbatches
    late = warm_up - 2
    if kind is Kind.BACKWARD:
        yield kind, stage, microbatch - 1
        if (Kind.FORWARD, stage, microbatch + 1) in done and microbatch != late:
            yield Kind.FORWARD, stage, microbatch
        if microbatch == count - warm_up and microbatch > late:
            yield Kind.FORWARD, stage, late
    elif (Kind.BACKWARD, stage, microbatch - 1) in done and microbatch - 1 != late:
        yield Kind.FORWARD, stage, microbatch - 1


# ---- Saved tensors that move to the host

Move = tuple[tuple[Subject, ...], Place]  # saved tensors of one layer, one for each storage
Moves = dict[tuple[int, int | None], list[Move]]  # by stage and microbatch


def moves_of(plan: Plan) -> Moves:
    """Return the moves of all stages on torch's engine.

    Raises:
        UsageError: a decision moves tensors that are recomputed, or that the stage does not keep.
    """
    numbers = range(plan.training.microbatches)
    stages = sorted({decision.stage for decision in plan.decisions if decision.what is What.OFFLOAD})
    return {
        (stage, number): moves
        for stage in stages
        for number, moves in zip(numbers, moves_of_stage(plan, stage), strict=True)
    }


def moves_of_stage(plan: Plan, stage: int) -> list[list[Move]]:
    """Return the moves of a stage on torch's engine, for each microbatch.

    Each layer that saves a storage of a decision moves it. Storages that the engine or a recomputation keeps
    on the device do not move, because their copies would only add to them.

    Raises:
        UsageError: a decision moves tensors that are recomputed, or that the stage does not keep.
    """
    storages = StageStorages.of(plan, stage)
    decisions = *plan.decisions_of(stage, What.OFFLOAD), *plan.decisions_of(stage, What.RECOMPUTE)
    known = dict[tuple[bool, ...], list[Move]]()
    result = list[list[Move]]()
    for microbatch in range(plan.training.microbatches):
        key = tuple(microbatch in decision.microbatches for decision in decisions)
        if key not in known:
            known[key] = _moves(storages, list(compress(decisions, key)), microbatch)
        result.append(known[key])
    return result


def _moves(storages: StageStorages, decisions: Sequence[Decision], microbatch: int) -> list[Move]:
    """Return the moves of a microbatch by these decisions, in the order of the layers.

    Raises:
        UsageError: a decision moves tensors that are recomputed, or that the stage does not keep.
    """
    runs = [decision.subject for decision in decisions if isinstance(decision.subject, Run)]
    again = {layer for run in runs for layer in range(run.start, run.stop)}
    places = dict[int, Place]()
    for decision in decisions:
        for subject in subjects_of(decision.subject) if isinstance(decision.subject, SavedTensors) else ():
            if (saver := max(storages.savers(subject))) in again:
                raise recomputed_too(decision, saver, microbatch)
            assert decision.place is not None
            places.setdefault(storages.storage(subject), decision.place)
    named_in = {layer: named for layer, named in storages.named_in.items() if layer not in again}
    kept = _kept_anyway(storages, runs, named_in)
    result = list[Move]()
    for named_storages in named_in.values():
        moved = {storage: subjects[0] for storage, subjects in named_storages.items() if storage not in kept}
        by_place = defaultdict[Place, list[Subject]](list)
        for storage in moved.keys() & places.keys():
            by_place[places[storage]].append(moved[storage])
        result += [(tuple(sorted(subjects)), place) for place, subjects in by_place.items()]
    return result


def _kept_anyway(
    storages: StageStorages, runs: Sequence[Run], named_in: Mapping[int, Mapping[int, Sequence[Subject]]]
) -> set[int]:
    """Return the storages that stay on the device: others than layers with moves hold them too.

    The engine holds inputs of a stage until the backward, and outputs of the last stage, before torch 2.15
    of all stages. A recomputation holds its inputs. Autograd's hooks do not see some saved tensors.
    """
    layers, count = storages.layers, storages.stop - storages.start
    result = {*storages.input_storages, *storages.target_storages}
    if storages.last or receives_ahead():
        result.update(*(layer.saves for layer in layers[count:]), layers[count - 1].outputs)
    for run in runs:
        result.update(storages.values(run.start - storages.start))
    for layer, subjects in named_in.items():
        result.update(set(layers[layer - storages.start].saves) - subjects.keys())
    return result


# ---- Replicas that divide gradients or parameters, by FSDP2
#
# A pass gathers the parameters that are not on the device, layer by layer, within itself: an UNSHARD with its
# microbatch before it has their time. Before a stage's first pass, orders that run as actions gather the
# whole stage, and free it again if three other stages come first: UNSHARD and RESHARD without a microbatch.
# Gradients are reduced once, after a stage's last backward.

_ACTIVE = 3  # stages of a rank that torch keeps gathered
_PASSES = COMPUTE - {Kind.STEP}


def as_run(plan: Plan) -> Plan:
    """Return the plan as torch's engine runs it, without moves: recomputations start with their backward.

    Stages that FSDP2 divides are as if each replica had all of their state.
    """
    return replace(
        plan,
        decisions=tuple(
            replace(decision, ahead=0) if decision.what is What.RECOMPUTE else decision
            for decision in plan.decisions
            if decision.what is not What.OFFLOAD
        ),
        stages=tuple(
            replace(stage, grid=replace(stage.grid, shard="none", buckets=1))
            if stage.grid.divides_gradients
            else stage
            for stage in plan.stages
        ),
    )


def fully_sharded(actions: Sequence[Action], plan: Plan) -> list[Action]:
    """Return a device's actions with the gathers and reductions of stages that FSDP2 divides."""
    sharded = {n for n in {action.stage for action in actions} if plan.stages[n].grid.divides_gradients}
    as_actions = not (drops_early(plan) or runs_gpipe(plan))
    coming = [action.stage for action in actions if action.kind in _PASSES]
    result, active, waiting, here = list[Action](), list[int](), set[int](), set[int]()
    for action in actions:
        stage = action.stage
        if action.kind is Kind.REDUCE and action.subject is None and stage in sharded:
            result += [] if action.wait else [action, action.join]
            continue
        if action.kind in _PASSES and as_actions:
            following = list(dict.fromkeys(coming))[:_ACTIVE]
            for old in [one for one in active if one not in following]:
                active.remove(old)
                here.discard(old)
                result += [Action(Kind.RESHARD, old)] * (old in sharded)
            new = [one for one in following if one not in active]
            active += new
            waiting |= sharded.intersection(new)
            result += [Action(Kind.UNSHARD, one) for one in new if one in sharded]
            if stage in waiting:
                waiting.remove(stage)
                here.add(stage)
                result.append(Action(Kind.UNSHARD, stage, wait=True))
            coming.pop(0)
        if action.kind in _PASSES and stage in sharded - here:
            unshard = Action(Kind.UNSHARD, stage, action.microbatch)
            result += [unshard, unshard.join]
            here.add(stage)
        result.append(action)
        frees = plan.stages[stage].grid.shard == "parameters"
        if action.kind in FORWARDS and frees and ends(action, plan):
            here.discard(stage)
    return result
