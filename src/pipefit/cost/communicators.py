"""NCCL's communicators, counted from a program: each takes memory of a GPU outside of the caching allocator."""

from __future__ import annotations

from pipefit.actions import Action, Kind, Subject
from pipefit.message_order import channels
from pipefit.plans import Plan
from pipefit.program import Program


def members(plan: Plan, action: Action) -> tuple[int, ...]:
    """The devices that take part in a collective, in the order of their stages and replicas."""
    if action.kind is Kind.AGREE:
        return plan.workers
    if action.place is not None:
        return tuple(member.number for member in action.place.members if member.number is not None)
    if isinstance(action.subject, Subject):
        return tuple(device for stage in plan.summed[action.subject.layer] for device in plan.stages[stage].devices)
    return plan.stages[action.stage].devices


def sums(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The sets of devices that add tensors up: gradients of replicas and of shared parameters, and vectors of the
    agreement.
    """
    grids = [stage.grid for stage in plan.stages]
    replicated = [(grid,) for grid in grids if grid.data > 1]
    shared = [tuple(grids[stage] for stage in stages) for stages in plan.summed.values()]
    found = [
        tuple(device for grid in together for device in grid.holding(shard))
        for together in (*replicated, *shared)
        for shard in range(together[0].tensor)
    ]
    return tuple(dict.fromkeys([*found, *[plan.workers] * plan.training.agrees]))


def tensor_groups(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The sets of devices that hold the shards of one replica, and compute its layers together."""
    divided = (stage.grid for stage in plan.stages if stage.grid.tensor > 1)
    return tuple(dict.fromkeys(grid.group_of(device) for grid in divided for device in grid.devices))


def communicators(plan: Plan, program: Program, device: int) -> int:
    """How many communicators the worker of a device makes: one for each direction of a boundary to another device, one
    for each set of devices that add something up or compute layers together, and one that brings the loss to all
    workers.
    """
    if len(plan.workers) == 1:
        return 0
    own = tuple(actions if other == device else () for other, actions in enumerate(program.actions))
    ends = channels(own, program.placement)  # whoever is at the other end, the device itself sends or receives
    here = [devices for devices in (*sums(plan), *tensor_groups(plan)) if device in devices]
    return len(ends) + len(here) + 1
