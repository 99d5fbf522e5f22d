"""Lowering: from a plan to its program, by rewritings that each make one thing explicit.

    states_copied(gathered(summed(copied(communicated(recomputed(computes(plan)))))) + updated(plan))

The schedule gives every rank an order of forwards and backwards, which all its devices share; their rows differ. The
first rewriting divides them into pieces and adds second forwards for what is recomputed, the next puts receives, sends
and loads around them, and the last ones insert copies of saved tensors and of state to other places and back, sums of
replicas' gradients, and gathers of parameters that replicas divide. Each is a function of the plan and of the result of
the one before.

A synchronous schedule has one program, which every step repeats. An endless one has several: those of the first steps,
which fill the pipeline; the body, which repeats; and one that drains it (`step_programs`, `lower_drain`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import fields

from pipefit.errors import UsageError
from pipefit.lowering.asynchronous import Stream, as_early, carried, check_endless, check_in_turn, settled
from pipefit.lowering.local_batches import Slices, check_slices
from pipefit.lowering.passes.collectives import gathered, summed
from pipefit.lowering.passes.communication import communicated
from pipefit.lowering.passes.offload import Bundles, bundles_of, copied
from pipefit.lowering.passes.recomputation import recomputed
from pipefit.lowering.passes.state_offload import brought_in, states_copied
from pipefit.lowering.passes.updates import check_changed_weights, updated
from pipefit.lowering.schedules import Compute, Endless, Order, Schedule, computes
from pipefit.lowering.schedules.gpipe import gpipe, torchgpipe
from pipefit.lowering.schedules.one_f_one_b import eager_1f1b, one_f_one_b
from pipefit.lowering.schedules.pipedream import pipedream, two_buffered
from pipefit.schema.actions import Action, Actions, Kind
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program, UncheckedProgram, joined
from pipefit.schema.training import MOST_MICROBATCHES
from pipefit.schema.validation import instance, whole
from pipefit.texts import unknown

_OfDevices = dict[int, list[Action]]  # what devices do
Smaller = Sequence[tuple[int, int]]  # microbatches of fewer samples than the plan's: their numbers, and their samples

SCHEDULES: dict[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager-1f1b": eager_1f1b,
    "torchgpipe": torchgpipe,
}
ENDLESS: dict[str, Endless] = {"pipedream": pipedream, "pipedream-2bw": two_buffered}


def schedule_named(name: str) -> Schedule:
    """The synchronous schedule of that name.

    Raises:
        UsageError: there is none; says which exist.
    """
    try:
        return SCHEDULES[name]
    except KeyError:
        raise UsageError(unknown(f"there is no schedule {name!r}", str(name), (*SCHEDULES, *ENDLESS))) from None


def is_endless(plan: Plan) -> bool:
    """Whether the plan's schedule leaves microbatches in flight from step to step."""
    return plan.training.endless


def step_programs(plan: Plan) -> tuple[Program, ...]:
    """The programs of the first steps, and as the last one that of all later steps.

    Raises:
        UsageError: as `lower`.
    """
    if not is_endless(plan):
        return (lower(plan),)
    return tuple(lower(plan, entered=entered) for entered in _entered(plan))


def _entered(plan: Plan) -> range:
    """Under an endless schedule, the microbatches before each of the first steps that differ."""
    count = plan.training.microbatches
    return range(0, settled(plan) + count, count)


def rank_programs(
    plan: Plan, rank: int, steps: int, devices: Container[int] | None = None
) -> tuple[UncheckedProgram, ...]:
    """The programs of so many steps, as far as they differ, with the actions of one rank alone, or of some of its
    `devices`.

    They are the same as long as its decisions are.

    Raises:
        UsageError: as `lower`, but for what only programs of all devices show.
    """
    ranks, count = range(rank, rank + 1), plan.training.microbatches
    if is_endless(plan):
        found = (_endless(plan, count, entered, ranks, devices=devices) for entered in _entered(plan)[:steps])
        return tuple(_unchecked(plan, count, *step, endless=True) for step in found)
    return (_unchecked(plan, count, *_synchronous(plan, count, ranks, devices=devices), endless=False),)


def whole_run(plan: Plan) -> Program:
    """All steps of training that differ as one program: what a run of any length uses of places is used here.

    Raises:
        UsageError: as `lower`.
    """
    programs = step_programs(plan)
    return joined(programs) if is_endless(plan) else programs[0]


def distinct_steps(plan: Plan, *, microbatches: int | None = None) -> int:
    """How many steps of training differ: all later ones do what the last of these does, with the same bytes.

    `microbatches` are those of a step; the plan's unless given.

    Under a synchronous schedule the first step differs, in which optimizer state is created. Under an endless one the
    pipeline fills first, and then the versions of weights grow apart.
    """
    count = microbatches or plan.training.microbatches
    settling = -(-settled(plan, count) // count) + 1 if is_endless(plan) else 0
    return max(distinct_steps_of(plan.training.schedule, len(plan.stages), count), settling)


def distinct_steps_of(schedule: str, stages: int, microbatches: int) -> int:
    """The same of any plan without decisions that has this schedule and so many stages and microbatches."""
    if schedule not in ENDLESS:
        return 2
    filling = 2 if schedule == "pipedream-2bw" else -(-2 * (stages - 1) // microbatches)
    return max(filling, 1) + 1


def loss_delay(plan: Plan) -> int:
    """How many steps later the loss of a step is known on every stage, if none ever waits for it.

    That is 0 under a synchronous schedule. Under an endless one the first stage is behind the last by one microbatch
    less than there are stages.
    """
    return -(-(len(plan.stages) - 1) // plan.training.microbatches) if is_endless(plan) else 0


def updates_alone(plan: Plan) -> bool:
    """Whether every microbatch has an update of its own, instead of a share in its step's."""
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
    """The program of one training step of `plan`.

    Args:
        microbatches: of a smaller last batch; the plan's unless given.
        last: samples of its last microbatch, if these are fewer than the plan's.
        update: False leaves the gradients where they are, to be added to by the next batch.
        entered: under an endless schedule, the microbatches of the steps before since the pipeline was empty.
        steps: how many steps these were; as many as they need with the plan's microbatches unless given.
        smaller: those of them that have fewer samples than the plan's, as in `Entered`.

    Raises:
        UsageError: a decision cannot be carried out, the schedule is not for such stages, two stages of a device share
            a parameter, or replicas cannot divide a microbatch or what they exchange.
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
                f"schedule {plan.training.schedule} updates in every step: it cannot accumulate the gradients of "
                "several batches; use larger batches, or schedule 1f1b"
            )
        own = (*smaller, *_last_one(count, last))
        found = _endless(plan, count, entered, range(len(plan.ranks)), steps, smaller=own)
        return _program(plan, count, *found, endless=True)
    return _program(plan, count, *_synchronous(plan, count, range(len(plan.ranks)), last=last, update=update))


def lower_drain(plan: Plan, *, entered: int, steps: int | None = None, smaller: Smaller = ()) -> Program:
    """The program that ends the microbatches in flight under an endless schedule; the arguments are those of `lower`.

    Raises:
        UsageError: as `lower`.
    """
    found = _endless(plan, 0, entered, range(len(plan.ranks)), steps, smaller=smaller)
    return _program(plan, 0, *found, endless=True)


def lower_evaluation(plan: Plan, *, microbatches: int, last: int | None = None) -> Program:
    """The program that runs `microbatches` forward through all stages and keeps nothing; `last` as in `lower`."""
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
    """What `actions` gives for every device of these ranks, or for those among `devices`, by their ranks and slices;
    `smaller` are microbatches of fewer samples than the plan's.
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
) -> tuple[_OfDevices, Bundles]:
    """What the devices of these ranks do in a step of a synchronous schedule; the arguments are those of `lower`, and
    of `rank_programs`.
    """
    _check_shared(plan)
    check_changed_weights(plan, ranks)
    own, bundles = computes(plan, schedule_named(plan.training.schedule), microbatches, ranks), bundles_of(plan)
    orders = dict(zip(ranks, recomputed(own, plan, sums=update), strict=True))
    ends = {rank: list(updated(plan.ranks[rank], plan, bundles)) if update else [] for rank in ranks}

    def actions(rank: int, slices: Slices) -> list[Action]:
        exchanged = copied(list(communicated(orders[rank], plan, slices)), plan, bundles)
        exchanged = gathered(summed(exchanged, plan, update=update), plan)
        return states_copied(list(slices.together([*exchanged, *ends[rank]])), plan, bundles)

    return _of_devices(plan, ranks, actions, _last_one(microbatches, last), devices), bundles


def _last_one(microbatches: int, last: int | None) -> Smaller:
    """The last one of so many microbatches, if it has fewer samples than the plan's."""
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
    """What the devices of these ranks do in one step of an endless schedule, after `entered` microbatches in `steps`.

    Of no microbatches, it is the drain. Those of `smaller`, of this step or earlier ones, have fewer samples.
    """
    check_slices(plan, None)
    check_endless(plan)
    check_changed_weights(plan, ranks)
    if microbatches:
        check_in_turn(plan, entered)
    steps = -(-entered // plan.training.microbatches) if steps is None else steps
    schedule, bundles, entered = ENDLESS[plan.training.schedule], bundles_of(plan), as_early(plan, entered)

    def actions(rank: int, slices: Slices) -> list[Action]:
        stream = Stream(plan, schedule, rank, bundles, slices, microbatches=microbatches, entered=entered, steps=steps)
        return stream.step() if microbatches else stream.drain()

    early = [(number + entered, samples) for number, samples in smaller]
    return _of_devices(plan, ranks, actions, early, devices), bundles


def _check_shared(plan: Plan) -> None:
    """No two stages of a device share a parameter that is trained: each would have a copy, and a sum over stages of one
    device ends in none.
    """
    for number, members in plan.summed.items():
        name = plan.measurement.shared[number].name
        for stages in plan.ranks:
            both = [stage for stage in members if stage in stages]
            if len(both) > 1:
                device = plan.stages[both[0]].devices[0]
                raise UsageError(
                    f"stages {both[0]} and {both[1]} of device {device} share parameter {name!r}, "
                    "which is not supported: put all of its layers into one stage, or its stages on different devices"
                )


def _program(
    plan: Plan, microbatches: int, of_devices: _OfDevices, bundles: Bundles, *, endless: bool = False
) -> Program:
    """The program of all devices."""
    found = _unchecked(plan, microbatches, of_devices, bundles, endless=endless)
    return Program(**{field.name: getattr(found, field.name) for field in fields(found)})


def _unchecked(
    plan: Plan, microbatches: int, of_devices: _OfDevices, bundles: Bundles, *, endless: bool
) -> UncheckedProgram:
    """The program with these actions; an endless one carries in and out what it leaves open."""
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
