"""Representatives: a dry run executes one of several replicas that do the same, and its memory stands for the others.

Replicas of a stage have equal layers, compute slices of equal size, and do the same actions, each with a neighbour of
its own where both stages have as many replicas. Then the first replica of every stage is a pipeline by itself, but for
the sums of gradients, and these need no memory that depends on who takes part. Where replicas divide state, agree
before an update, or lend memory, each is run: what they own or report differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipefit.actions import Action
from pipefit.places import MemberKind
from pipefit.plans import Plan
from pipefit.program import Program
from pipefit.schedule.arenas import Arena


def representatives(plan: Plan, programs: Sequence[Program], arenas: Sequence[Arena]) -> dict[int, int]:
    """For every worker of a plan the device that is run for it: itself, or that of the first replica."""
    alone = {device: device for device in plan.workers}
    grids = [stage.grid for stage in plan.stages]
    lends = any(arena.lender.kind is MemberKind.DEVICE for arena in arenas)
    if {grid.shard for grid in grids} != {"none"} or len({grid.data for grid in grids}) > 1:
        return alone
    if grids[0].data == 1 or plan.training.agrees or lends:
        return alone
    found = {device: grid.devices[grid.shard_of(device)] for grid in grids for device in grid.devices}
    return found if all(_alike(program, found) for program in programs) else alone


def _alike(program: Program, found: dict[int, int]) -> bool:
    """Whether all devices do what those do that are run for them."""
    plain = _without_replicas(found)
    return all(
        list(map(plain, program.actions[device])) == list(map(plain, program.actions[other]))
        for device, other in found.items()
        if device != other
    )


def _without_replicas(found: dict[int, int]) -> Callable[[Action], object]:
    """A function that makes of an action what it is of any replica: how many rows, and with whom."""

    def plain(action: Action) -> object:
        members = () if action.place is None else action.place.members
        others = {one if one.kind is not MemberKind.DEVICE else found.get(one.number or 0) for one in members}
        rows = None if action.part is None else action.part[1] - action.part[0]
        return action._replace(place=None, part=None), others, rows

    return plain
