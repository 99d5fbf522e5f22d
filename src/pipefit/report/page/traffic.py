"""What passes over the links of a plan's cluster in one step: messages between stages, copies by decisions, and sums of
gradients with what owners of parameters bring to other replicas. What ranks of tensor shards exchange inside of layers
is not told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from typing import NamedTuple

from pipefit.actions import COLLECTIVE, COPIES, SENDS, Action, Kind, message_of
from pipefit.cost.collectives import Hop
from pipefit.cost.messages import message_sizes
from pipefit.cost.stage import Costs
from pipefit.cost.storages import StageStorages
from pipefit.places import Member
from pipefit.plans import Plan
from pipefit.program import Program
from pipefit.schedule import step_programs
from pipefit.schedule.arenas import moved_by_devices
from pipefit.simulator.timed_device import Collected, DeviceReader
from pipefit.simulator.timed_program import exchange_of


class Stretch(NamedTuple):
    """Bytes from one member of the cluster to another, and what they are."""

    source: Member
    target: Member
    what: str  # messages, copies or sums


def traffic(plan: Plan) -> dict[Stretch, int]:
    """The bytes of a step by where they come from and go to, in the order in which they first appear.

    The step is the last of those that differ. A device's own bytes in two stages of its own do not travel.
    """
    program, storages = step_programs(plan)[-1], [StageStorages.of(plan, n) for n in range(len(plan.stages))]
    moved, sizes = moved_by_devices(plan, program), message_sizes(plan, program.placement, storages)
    found = Counter[Stretch]()
    for device, actions in enumerate(program.actions):
        for action in actions:
            if action.wait:
                continue
            if action.kind in SENDS:
                message = message_of(device, action, program.placement)
                stretch = Stretch(Member.device(device), Member.device(message.target), "messages")
                found[stretch] += sizes(message)
            elif action.kind in COPIES and action.place is not None:
                _add_copy(found, plan, device, action, moved[device](action))
    for hop in _sums(plan, program):
        found[Stretch(Member.device(hop.source), Member.device(hop.target), "sums")] += hop.nbytes
    return {stretch: nbytes for stretch, nbytes in found.items() if nbytes and stretch.source != stretch.target}


def _sums(plan: Plan, program: Program) -> Iterator[Hop]:
    """The hops of every collective, the way by which its seconds are reckoned."""
    found: dict[tuple[Hashable, int], tuple[Collected, list[int]]] = {}
    costs, moved = Costs.of(plan), moved_by_devices(plan, program)
    for device, actions in enumerate(program.actions):
        stages = {n: costs.of_device(plan, n, device, plan.stages[n].devices) for n in plan.stages_of(device)}
        reader = DeviceReader(device, program, plan.cluster, stages, moved[device])
        for begun in (reader.collected(one) for one in actions if one.kind in COLLECTIVE and not one.wait):
            found.setdefault((begun.what, begun.turn), (begun, []))[1].append(device)
    for begun, members in found.values():
        yield from exchange_of(plan.cluster, members, begun).hops


def _add_copy(found: Counter[Stretch], plan: Plan, device: int, action: Action, nbytes: int) -> None:
    """Add what a copy moves to each member of its place, or from there."""
    assert action.place is not None
    here, host = Member.device(device), plan.cluster.devices[device].host
    for member, share in action.place.split(nbytes):
        there = member.at(host)
        pair = (here, there) if action.kind is Kind.OFFLOAD else (there, here)
        found[Stretch(*pair, "copies")] += share
