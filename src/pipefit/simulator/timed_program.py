"""A program prepared for the clock: for every action a code, its seconds, and the transfer that it starts or joins.

A wire is a number, that of one direction of a link. A transfer has one part for each member of its place, with seconds
and wires of its own. The copies of a device run in two streams, one outward and one inward, each in the order in which
they were issued; messages have no stream and wait for their wires alone. What a host updates for a device is a third
stream, and the memory of the host is the wire on which the updates of several devices wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from pipefit.actions import COLLECTIVE, COPIES, MESSAGES, Action, Kind, Message, collective, message_of
from pipefit.cluster import Cluster
from pipefit.cost.collectives import Hop, ring_from_owners, ring_sum, ring_to_owners
from pipefit.cost.stage import StageCost
from pipefit.cost.states import unchanged
from pipefit.errors import UsageError
from pipefit.places import Member, Place
from pipefit.program import Program

NOTHING, COMPUTE, POST, COPY, JOIN = range(5)
STREAMS = 3  # of every device: copies outward, copies inward, updates at a place

Parts = tuple[tuple[float, tuple[int, ...]], ...]  # seconds and wires


class TimedActions(NamedTuple):
    """The actions of one device: a code, seconds and the number of a transfer for each, -1 where it has none."""

    codes: list[int]
    seconds: list[float]
    transfers: list[int]


class TimedProgram:
    """The actions of all devices, and the transfers between them."""

    def __init__(
        self,
        program: Program,
        cluster: Cluster,
        stages: Sequence[Mapping[int, StageCost]],
        moved_bytes: Callable[[Action], int],
        message_bytes: Callable[[Message], int],
    ) -> None:
        self._program, self._cluster, self._stages = program, cluster, stages
        self._moved_bytes, self._message_bytes = moved_bytes, message_bytes
        self._wires: dict[str, int] = {}
        self._messages: dict[Message, int] = {}
        self._collectives: dict[tuple[Hashable, int], int] = {}
        self._turns: Counter[tuple[Hashable, int, int]] = Counter()  # how often a stage of a device started it
        self._members = _members(program)
        self._route = cache(cluster.route)
        self._message_parts: dict[Message, Parts] = {}
        self._copy_parts: dict[tuple[int, bool, int, Place | None], Parts] = {}
        self.parts: list[Parts] = []
        # The stream of every transfer: of a copy STREAMS * device outward and one more inward, of an update at a place
        # two more, -1 of all others
        self.streams: list[int] = []
        self.ends: list[int] = []  # how many devices must start it before it is ready
        self.devices = [self._read(device, actions) for device, actions in enumerate(program.actions)]

    @property
    def wires(self) -> int:
        """How many wires the transfers use."""
        return len(self._wires)

    def _read(self, device: int, actions: tuple[Action, ...]) -> TimedActions:
        """The actions of one device, with their seconds and transfers."""
        codes, seconds, transfers = timed = TimedActions([], [], [])
        started: dict[tuple[object, ...], int] = {}
        copying_nothing = unchanged(self._program, actions)
        for position, action in enumerate(actions):
            kind, code, duration, transfer = action.kind, NOTHING, 0.0, -1
            if kind is Kind.STASH and action.wait:
                pass
            elif action.wait:
                code, transfer = JOIN, started.pop(action[:-1])
            elif kind in MESSAGES or kind in COLLECTIVE:
                meet = self._message if kind in MESSAGES else self._collective
                code, transfer = POST, meet(device, action)
                started[action[:-1]] = transfer
            elif position in copying_nothing:
                code, transfer = POST, self._add((), ends=1)
                started[action[:-1]] = transfer
            elif kind in COPIES or (kind is Kind.STEP and action.place is not None):
                code, transfer = COPY, self._copy(device, action) if kind in COPIES else self._update(device, action)
                started[action[:-1]] = transfer
            elif kind not in (Kind.LOAD, Kind.RESHARD):
                code, duration = COMPUTE, self._stages[action.stage][device].seconds(action)
            codes.append(code)
            seconds.append(duration)
            transfers.append(transfer)
        return timed

    def _add(self, parts: Parts, *, ends: int, stream: int = -1) -> int:
        """The number of a new transfer."""
        self.parts.append(parts)
        self.streams.append(stream)
        self.ends.append(ends)
        return len(self.parts) - 1

    # ---------------------------------------------------------------- messages

    def _message(self, device: int, action: Action) -> int:
        """The number of the message that this send or receive is one end of."""
        message = message_of(device, action, self._program.placement)
        number = self._messages.get(message)
        if number is None:
            alike = message._replace(microbatch=None)
            parts = self._message_parts.get(alike)
            if parts is None:
                parts = self._message_parts[alike] = self._new_message_parts(alike)
            number = self._messages[message] = self._add(parts, ends=2)
        return number

    def _new_message_parts(self, message: Message) -> Parts:
        """The parts of a message; none between stages of one device."""
        source, target = message.source, message.target
        nbytes = self._message_bytes(message)
        return () if source == target else (self._part(Member.device(source), Member.device(target), nbytes),)

    # ---------------------------------------------------------------- collectives

    def _collective(self, device: int, action: Action) -> int:
        """The number of the collective that this stage of a device takes part in."""
        what = collective(action)
        own = what, device, action.stage
        key = what, self._turns[own]
        self._turns[own] += 1
        number = self._collectives.get(key)
        if number is None:
            members = self._members[what]
            parts = self._ring(self._hops(members, action, self._stages[action.stage][device]))
            number = self._collectives[key] = self._add(parts, ends=len(members))
        return number

    def _hops(self, members: list[int], action: Action, stage: StageCost) -> tuple[Hop, ...]:
        """The hops of a collective: of a sum for all, of sums for owners, or of what owners bring to all."""
        named = action.place.members if action.place is not None else ()  # those that hold the same shard
        replicas = [member.number or 0 for member in named] or self._program.placement[action.stage]
        shares = stage.owned_bytes(action, len(replicas))
        if shares is None:
            return ring_sum(members, stage.collective_bytes(action))
        return (ring_to_owners if action.kind is Kind.REDUCE else ring_from_owners)(replicas, shares)

    def _ring(self, hops: tuple[Hop, ...]) -> Parts:
        """The parts of a collective: each hop of the ring, with the delay of all its messages."""
        parts = []
        for hop in hops:
            source, target = Member.device(hop.source), Member.device(hop.target)
            seconds, wires = self._part(source, target, hop.nbytes)
            parts.append((seconds + (hop.messages - 1) * self._route(source, target).latency_seconds, wires))
        return tuple(parts)

    # ---------------------------------------------------------------- copies

    def _copy(self, device: int, action: Action) -> int:
        outward = action.kind is Kind.OFFLOAD
        key = device, outward, self._moved_bytes(action), action.place
        parts = self._copy_parts.get(key)
        if parts is None:
            parts = self._copy_parts[key] = self._new_copy_parts(*key)
        return self._add(parts, ends=1, stream=STREAMS * device + (not outward))

    def _update(self, device: int, action: Action) -> int:
        """The number of an update that a host makes for this device, on the wire that is the host's memory."""
        assert action.place is not None, "only updates at a place run in the background"
        host = (action.place.members[0].number, self._cluster.devices[device].host)
        number = next(one for one in host if one is not None)
        seconds = self._stages[action.stage][device].host_update_seconds(action, self._cluster.hosts[number])
        wire = self._wires.setdefault(f"memory of host {number}", len(self._wires))
        return self._add(((seconds, (wire,)),), ends=1, stream=STREAMS * device + 2)

    def _new_copy_parts(self, device: int, outward: bool, nbytes: int, place: Place | None) -> Parts:
        assert place is not None, "the ledger refuses copies without a place"
        here, parts = Member.device(device), []
        for member, share in place.split(nbytes):
            self._cluster.check(member, f"place {str(place)!r}")
            there = member if member.number is not None else self._near(member, device)
            if there == here:
                raise UsageError(f"device {device} cannot move a tensor to {str(place)!r}: name other members")
            parts.append(self._part(*((here, there) if outward else (there, here)), share))
        return tuple(parts)

    def _near(self, member: Member, device: int) -> Member:
        """The host, or the disk of the host, of a device."""
        return Member(member.kind, self._cluster.devices[device].host)

    def _part(self, source: Member, target: Member, nbytes: int) -> tuple[float, tuple[int, ...]]:
        route = self._route(source, target)
        return route.seconds(nbytes), tuple(self._wires.setdefault(wire, len(self._wires)) for wire in route.wires)


def _members(program: Program) -> dict[Hashable, list[int]]:
    """The devices that take part in every collective, one for each stage of each that does."""
    found: dict[Hashable, dict[tuple[int, int], int]] = {}
    for device, actions in enumerate(program.actions):
        for action in actions:
            if action.kind in COLLECTIVE:
                found.setdefault(collective(action), {})[action.stage, device] = device
    return {key: list(devices.values()) for key, devices in found.items()}
