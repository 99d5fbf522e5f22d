"""What a schedule without end asks of a plan, and what one of its steps leaves to the next one.

Stages update at different times, and no moment exists at which all of them have seen the same microbatches. So whatever
needs such a moment is refused here, with the ways out: it would train something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from pipefit.actions import Action
from pipefit.decisions import Decision, State
from pipefit.errors import UsageError
from pipefit.grids import Grid
from pipefit.plans import Plan
from pipefit.schedule.bundles import moved_states
from pipefit.schedule.order import check_alone
from pipefit.schedule.state_copies import check_moved
from pipefit.texts import counted


def check_endless(plan: Plan) -> None:
    """Check that every microbatch can be followed by an update of its own stages alone.

    Raises:
        UsageError: several stages on a device, stages that share a parameter, or a decision for another share of the
            microbatches in every step.
    """
    name = plan.training.schedule
    for stages in plan.ranks:
        check_alone(name, len(stages))
    for number, members in plan.summed.items():
        shared = plan.measurement.shared[number].name
        raise UsageError(
            f"parameter {shared!r} is shared by stages {', '.join(map(str, members))}, whose gradients would be added "
            f"up before every update, but schedule {name} updates every stage by itself: put all of its layers into "
            "one stage, untie them, or use schedule 1f1b"
        )
    for number, stage in enumerate(plan.stages):
        _check_divided(plan, number, stage.grid)
    check_moved(moved_states(plan), plan)
    for decision in plan.decisions:
        if isinstance(decision.subject, State):
            _check_state(plan, decision, decision.subject)
        every, count = decision.microbatches.every, plan.training.microbatches
        if count % every:
            raise UsageError(
                f"{decision}: it is for a share of every {counted(every, 'microbatch')}, but under schedule {name} "
                f"their numbers go on from step to step, and {every} does not divide the {count} of a step, so that "
                f"steps would differ: take a share of every {_divisors(count)}, or all"
            )


def _check_divided(plan: Plan, number: int, grid: Grid) -> None:
    """Check that replicas divide nothing of which there would be a part for every version of the weights.

    Raises:
        UsageError: they do.
    """
    name, where = plan.training.schedule, f"stage {number} has {grid.data} replicas that divide {grid.shard}"
    if grid.shard == "parameters":
        raise UsageError(
            f"{where}, but under schedule {name} every microbatch goes through weights of its own version, which would "
            "have to come from their owners for each of them, and older ones again for its backward: divide gradients "
            "(shard='gradients'), which leaves the weights on all, or use schedule 1f1b"
        )
    if grid.shard != "none" and plan.training.versions == "everything":
        raise UsageError(
            f"{where}, and versions='everything' gives every version of the weights room for these, as if each replica "
            "had all of them: let versions hold weights alone (versions='weights'), or divide nothing"
        )


def _check_state(plan: Plan, decision: Decision, state: State) -> None:
    """Check that weights that move exist, as a stage holds older versions of them for some time, or newest ones.

    Raises:
        UsageError: they do not, or belong to layers that stay; says why.
    """
    last = len(plan.stages) - 1
    if state.kind in ("optimizer", "gradients"):
        return
    if state.kind == "versions" and plan.training.schedule == "pipedream" and decision.stage == last:
        raise UsageError(
            f"{decision}: stage {last} is the last one and updates in place, so that it has no older weights; leave it "
            "out"
        )
    _check_layers(plan, decision, state)


def _check_layers(plan: Plan, decision: Decision, state: State) -> None:
    """Check that layers whose weights move are trained, and share no weights with others of their stage.

    Raises:
        UsageError: they do, or are not.
    """
    layers, stage = range(state.start, state.stop), plan.stages[decision.stage]
    costs = plan.measurement.costs[state.start : state.stop]
    if not any(cost.trained_bytes for cost in costs):
        raise UsageError(f"{decision}: these layers have no weights that are trained; leave them out")
    frozen = next((n for n, cost in zip(layers, costs, strict=True) if cost.trained_bytes < cost.parameter_bytes), None)
    if state.kind == "parameters" and frozen is not None:
        raise UsageError(
            f"{decision}: layer {frozen} has weights that are not trained, which all microbatches go through, whatever "
            "their version; leave it out, or use schedule 1f1b"
        )
    for shared in plan.measurement.shared:
        inside = [user in layers for user in shared.users if stage.start <= user < stage.stop]
        if shared.gradient_bytes and any(inside) and not all(inside):
            raise UsageError(
                f"{decision}: parameter {shared.name!r} belongs to other layers of the stage too; move the weights of "
                "all layers that share it, or of none"
            )


def check_in_turn(plan: Plan, entered: int) -> None:
    """Check that a step after so many microbatches begins where shares of the microbatches begin, as a plan's steps do.

    Raises:
        UsageError: the batch before was a smaller one.
    """
    if entered % (turn := period(plan)):
        raise UsageError(
            f"the plan decides for shares of every {turn} microbatches, and the batch before was no multiple of them: "
            "from now on shares would lie across the ends of steps, where the plan's peaks do not hold. After a batch "
            "like that end what is in flight, as Trainer.finish does, or leave it out, or decide for all microbatches"
        )


def period(plan: Plan) -> int:
    """Of how many microbatches in a row every decision takes the same share."""
    return lcm(*(decision.microbatches.every for decision in plan.decisions))


def _divisors(count: int) -> str:
    """The numbers that divide `count`, in words."""
    return " or ".join(str(number) for number in range(2, count + 1) if count % number == 0) or "1"


def carried(actions: Sequence[Action]) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
    """The starts that these actions join without having them, and those that they leave to be joined."""
    before, begun = list[Action](), dict[Action, None]()
    for action in actions:
        if action.in_background and not action.wait:
            begun[action] = None
        elif action.wait and action.start in begun:
            del begun[action.start]
        elif action.wait:
            before.append(action.start)
    return tuple(before), tuple(begun)
