"""Lowering: from a plan to its program, by passes that each make one thing explicit.

    states_copied(gathered(summed(copied(communicated(recomputed(computes(plan)))))) + updated(plan))

The schedule gives every rank an order of forwards and backwards, shared by its devices except for their rows.
The passes cut it into pieces and add recomputations, add receives, sends and loads, and insert offloads and
reloads of saved tensors and of state, gradient reductions, and parameter gathers. Each is a function of the
plan and the previous result.

A synchronous schedule has one program, which every step repeats. An asynchronous one has several: those of
the first steps, which fill the pipeline; the body, which repeats; and one that drains the pipeline
(`step_programs`, `lower_drain`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import fields
from functools import partial

from pipefit.errors import UsageError
from pipefit.lowering.asynchronous import (
    RankActions,
    as_early,
    carried,
    check_endless,
    check_in_turn,
    settled,
)
from pipefit.lowering.local_batches import Slices, check_slices
from pipefit.lowering.passes.collectives import gathered, summed
from pipefit.lowering.passes.communication import communicated, following_of
from pipefit.lowering.passes.offload import Bundles, bundles_of, copied
from pipefit.lowering.passes.recomputation import recomputed
from pipefit.lowering.passes.state_offload import brought_in, states_copied
from pipefit.lowering.passes.torch_engine import as_run, check_for_torch, exchanged, fully_sharded, moves_of
from pipefit.lowering.passes.updates import check_changed_weights, updated
from pipefit.lowering.schedules import Compute, Endless, Order, Schedule, computes
from pipefit.lowering.schedules.pipedream import pipedream, two_buffered
from pipefit.lowering.schedules.synchronous import eager_1f1b, gpipe, one_f_one_b, torchgpipe
from pipefit.schema.actions import Action, Actions, Kind
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program, UncheckedProgram, joined
from pipefit.schema.training import MOST_MICROBATCHES
from pipefit.schema.validation import instance, whole
from pipefit.texts import unknown

_OfDevices = dict[int, list[Action]]  # actions by device
Exchange = Callable[[Order, Plan, Slices], Iterator[Action]]
Smaller = Sequence[tuple[int, int]]  # number and samples of microbatches with fewer samples than the plan's

SCHEDULES: dict[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager-1f1b": eager_1f1b,
    "torchgpipe": torchgpipe,
}
ENDLESS: dict[str, Endless] = {"pipedream": pipedream, "pipedream-2bw": two_buffered}


def schedule_named(name: str) -> Schedule:
    """Return the synchronous schedule of this name.

    Raises:
        UsageError: no schedule has this name; lists the known ones.
    """
    try:
        return SCHEDULES[name]
    except KeyError:
        raise UsageError(unknown(f"unknown schedule {name!r}", str(name), (*SCHEDULES, *ENDLESS))) from None


def is_endless(plan: Plan) -> bool:
    """Return whether the plan's schedule is asynchronous: microbatches stay in flight between steps."""
    return plan.training.endless


def step_programs(plan: Plan) -> tuple[Program, ...]:
    """Return the programs of the first steps; the last one is that of all later steps.

    Raises:
        UsageError: as `lower`.
    """
    if not is_endless(plan):
        return (lower(plan),)
    return tuple(lower(plan, entered=entered) for entered in _entered(plan))


def _entered(plan: Plan) -> range:
    """Return the microbatches before each of the first steps that differ, under an asynchronous schedule."""
    count = plan.training.microbatches
    return range(0, settled(plan) + count, count)


def rank_programs(
    plan: Plan, rank: int, steps: int, devices: Container[int] | None = None
) -> tuple[UncheckedProgram, ...]:
    """Return the differing programs of `steps` steps, with the actions of one rank only.

    With `devices`, only the actions of these devices are included.

    They depend on the rank's decisions only.

    Raises:
        UsageError: as `lower`, except for errors that only programs of all devices reveal.
    """
    ranks, count = range(rank, rank + 1), plan.training.microbatches
    if is_endless(plan):
        result = (
            _endless(plan, count, entered, ranks, devices=devices) for entered in _entered(plan)[:steps]
        )
        return tuple(_unchecked(plan, count, *step, endless=True) for step in result)
    return (_unchecked(plan, count, *_synchronous(plan, count, ranks, devices=devices), endless=False),)


def whole_run(plan: Plan, programs: Sequence[Program] = ()) -> Program:
    """Return all differing steps of training as one program; `programs` are `step_programs`, if known.

    It uses all memory at other places that a run of any length uses.

    Raises:
        UsageError: as `lower`.
    """
    programs = programs or step_programs(plan)
    return joined(programs) if is_endless(plan) else programs[0]


def distinct_steps(plan: Plan, *, microbatches: int | None = None) -> int:
    """Return the number of steps that differ: all later steps repeat the last of these, with the same bytes.

    `microbatches` are those of a step, default the plan's. Under a synchronous schedule, the first step
    differs because it creates the optimizer state. Under an asynchronous one, the pipeline fills first, and
    then the weight versions diverge.
    """
    count = microbatches or plan.training.microbatches
    settling = -(-settled(plan, count) // count) + 1 if is_endless(plan) else 0
    return max(distinct_steps_of(plan.training.schedule, len(plan.stages), count), settling)


def distinct_steps_of(schedule: str, stages: int, microbatches: int) -> int:
    """Return the number of steps that differ, for a plan without decisions."""
    if schedule not in ENDLESS:
        return 2
    filling = 2 if schedule == "pipedream-2bw" else -(-2 * (stages - 1) // microbatches)
    return max(filling, 1) + 1


def loss_delay(plan: Plan) -> int:
    """Return the number of steps after which every stage knows a step's loss without waiting for it.

    0 under a synchronous schedule. Under an asynchronous one, the first stage lags the last by one microbatch
    less than the number of stages.
    """
    return -(-(len(plan.stages) - 1) // plan.training.microbatches) if is_endless(plan) else 0


def updates_alone(plan: Plan) -> bool:
    """Return whether every microbatch has a separate update instead of a share in its step's update."""
    return plan.training.schedule == "pipedream"


def lower(
    plan: Plan,
    *,
    microbatches: int | None = None,
    last: int | None = None,
    update: bool = True,
    entered: int = 0,
    steps: int | None = None,
    smaller: Smaller = (),
) -> Program:
    """Lower `plan` to the program of one training step.

    Args:
        plan: the plan.
        microbatches: of a smaller last batch; default: the plan's.
        last: samples of its last microbatch, if fewer than the plan's.
        update: False leaves the gradients in place, for the next batch to accumulate.
        entered: under an asynchronous schedule, the microbatches of earlier steps since the pipeline was
            empty.
        steps: the number of these steps; default: the number for the plan's microbatches.
        smaller: the microbatches among them with fewer samples than the plan's, as in `Entered`.

    Raises:
        UsageError: a decision cannot be carried out, the schedule does not suit the stages, two stages of a
            device share a parameter, or replicas cannot divide a microbatch or the exchanged values.
    """
    instance("plan", plan, Plan, "pipefit.load reads one")
    check_slices(plan, last)
    count = (
        plan.training.microbatches
        if microbatches is None
        else whole("microbatches", microbatches, 1, MOST_MICROBATCHES)
    )
    if is_endless(plan):
        if not update:
            raise UsageError(
                f"schedule {plan.training.schedule} updates in every step and cannot accumulate gradients "
                "over several batches: use larger batches, or schedule 1f1b"
            )
        own = (*smaller, *_last_one(count, last))
        result = _endless(plan, count, entered, range(len(plan.ranks)), steps, smaller=own)
        return _program(plan, count, *result, endless=True)
    return _program(plan, count, *_synchronous(plan, count, range(len(plan.ranks)), last=last, update=update))


def lower_for_torch(plan: Plan) -> Program:
    """Lower a plan to the program of a step on `torch.distributed.pipelining`.

    Raises:
        UsageError: torch's engine cannot run the plan; or as `lower`.
    """
    check_for_torch(plan)
    count, run, moves = plan.training.microbatches, as_run(plan), moves_of(plan)
    bundles = tuple(dict.fromkeys(one for of in moves.values() for one, _ in of if len(one) > 1))
    exchange = partial(exchanged, moves=moves, bundles=bundles)
    ranks, finish = range(len(plan.ranks)), partial(fully_sharded, plan=plan)
    of_devices, _ = _synchronous(run, count, ranks, exchange=exchange, finish=finish)
    return _program(plan, count, of_devices, bundles)


def lower_drain(plan: Plan, *, entered: int, steps: int | None = None, smaller: Smaller = ()) -> Program:
    """Return the program that ends the microbatches in flight under an asynchronous schedule.

    Arguments are those of `lower`.

    Raises:
        UsageError: as `lower`.
    """
    result = _endless(plan, 0, entered, range(len(plan.ranks)), steps, smaller=smaller)
    return _program(plan, 0, *result, endless=True)


def lower_evaluation(plan: Plan, *, microbatches: int, last: int | None = None) -> Program:
    """Return the program that runs `microbatches` forward through all stages and keeps nothing.

    `last` is as in `lower`.
    """
    check_slices(plan, last)

    def forwards(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[Compute]:
        order = gpipe(rank, ranks, chunks, microbatches)
        return (compute._replace(kind=Kind.FORWARD_ONLY) for compute in order if compute.kind is Kind.FORWARD)

    orders: Sequence[Order] = computes(plan, forwards, microbatches)
    bundles = bundles_of(plan)

    def actions(rank: int, slices: Slices) -> list[Action]:
        forward = gathered(list(communicated(orders[rank], plan, slices)), plan)
        return brought_in(list(slices.together(forward)), plan.ranks[rank], plan, bundles)

    of_devices = _of_devices(plan, range(len(orders)), actions, _last_one(microbatches, last))
    return _program(plan, microbatches, of_devices, bundles)


def _of_devices(
    plan: Plan,
    ranks: Sequence[int],
    actions: Callable[[int, Slices], list[Action]],
    smaller: Smaller,
    devices: Container[int] | None = None,
) -> _OfDevices:
    """Return the result of `actions` for every device of these ranks, or for those in `devices`.

    `smaller` are microbatches with fewer samples than the plan's.
    """
    return {
        device: actions(rank, Slices(plan, *divmod(number, grid.tensor), smaller=dict(smaller)))
        for rank in ranks
        for grid in (plan.stages[plan.ranks[rank][0]].grid,)
        for number, device in enumerate(grid.devices)
        if devices is None or device in devices
    }


def _synchronous(
    plan: Plan,
    microbatches: int,
    ranks: Sequence[int],
    *,
    last: int | None = None,
    update: bool = True,
    devices: Container[int] | None = None,
    exchange: Exchange | None = None,
    finish: Callable[[list[Action]], list[Action]] = list,
) -> tuple[_OfDevices, Bundles]:
    """Return the actions of these ranks' devices in a step of a synchronous schedule.

    Arguments are those of `lower` and `rank_programs`; `exchange` inserts loads and messages, default
    `communicated`, and `finish` completes a device's step.
    """
    _check_shared(plan)
    check_changed_weights(plan, ranks)
    schedule, bundles = schedule_named(plan.training.schedule), bundles_of(plan)
    own = computes(plan, schedule, microbatches, ranks)
    orders = dict(zip(ranks, recomputed(own, plan, sums=update), strict=True))
    ends = {rank: list(updated(plan.ranks[rank], plan, bundles)) if update else [] for rank in ranks}

    following = following_of(schedule, len(plan.ranks), len(plan.ranks[0]), microbatches)
    around = exchange or partial(communicated, following=following)

    def actions(rank: int, slices: Slices) -> list[Action]:
        step = copied(list(around(orders[rank], plan, slices)), plan, bundles)
        step = gathered(summed(step, plan, update=update), plan)
        return states_copied(list(slices.together(finish([*step, *ends[rank]]))), plan, bundles)

    return _of_devices(plan, ranks, actions, _last_one(microbatches, last), devices), bundles


def _last_one(microbatches: int, last: int | None) -> Smaller:
    """Return the last of `microbatches` microbatches, if it has fewer samples than the plan's."""
    return () if last is None else ((microbatches - 1, last),)


def _endless(
    plan: Plan,
    microbatches: int,
    entered: int,
    ranks: Sequence[int],
    steps: int | None = None,
    *,
    smaller: Smaller = (),
    devices: Container[int] | None = None,
) -> tuple[_OfDevices, Bundles]:
    """Return the actions of these ranks' devices in a step of an asynchronous schedule.

    The step follows `entered` microbatches in `steps` steps.

    Without microbatches, it is the drain. Microbatches in `smaller`, of this step or earlier ones, have fewer
    samples.
    """
    check_slices(plan, None)
    check_endless(plan)
    check_changed_weights(plan, ranks)
    if microbatches:
        check_in_turn(plan, entered)
    steps = -(-entered // plan.training.microbatches) if steps is None else steps
    schedule, bundles, entered = ENDLESS[plan.training.schedule], bundles_of(plan), as_early(plan, entered)

    def actions(rank: int, slices: Slices) -> list[Action]:
        stream = RankActions(
            plan, schedule, rank, bundles, slices, microbatches=microbatches, entered=entered, steps=steps
        )
        return stream.step() if microbatches else stream.drain()

    early = [(number + entered, samples) for number, samples in smaller]
    return _of_devices(plan, ranks, actions, early, devices), bundles


def _check_shared(plan: Plan) -> None:
    """Check that no two stages of a device share a trained parameter.

    Each would have a copy, and the sum over the stages of one device would end in neither.
    """
    for number, members in plan.summed.items():
        name = plan.measurement.shared[number].name
        for stages in plan.ranks:
            both = [stage for stage in members if stage in stages]
            if len(both) > 1:
                device = plan.stages[both[0]].devices[0]
                raise UsageError(
                    f"stages {both[0]} and {both[1]} of device {device} share parameter {name!r}, "
                    "which is not supported: put all of its layers into one stage, or its stages on "
                    "different devices"
                )


def _program(
    plan: Plan, microbatches: int, of_devices: _OfDevices, bundles: Bundles, *, endless: bool = False
) -> Program:
    """Return the checked program of all devices."""
    result = _unchecked(plan, microbatches, of_devices, bundles, endless=endless)
    return Program(**{field.name: getattr(result, field.name) for field in fields(result)})


def _unchecked(
    plan: Plan, microbatches: int, of_devices: _OfDevices, bundles: Bundles, *, endless: bool
) -> UncheckedProgram:
    """Return the program with these actions; an asynchronous one carries in and out its open starts."""
    devices = [tuple(of_devices.get(device, ())) for device in range(len(plan.cluster.devices))]
    left: list[Actions] = [(), ()] if not endless else [*zip(*map(carried, devices), strict=True)]
    return UncheckedProgram(
        placement=plan.placement,
        microbatches=microbatches,
        actions=tuple(devices),
        bundles=bundles,
        carried_in=left[0],
        carried_out=left[1],
    )
