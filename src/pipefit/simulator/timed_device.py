"""What one device does, prepared for the clock: for every action a code, its seconds, and the transfer it starts or
joins.

Transfers that only this device knows, copies and updates at a place, have their seconds and wires here. Messages and
collectives have other ends, and are found by what they are (`simulator.timed_program`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import NamedTuple

from pipefit.actions import COLLECTIVE, COPIES, MESSAGES, RECEIVES, Action, Kind, Message, collective, message_of
from pipefit.cluster import Cluster
from pipefit.cost.stage import StageCost
from pipefit.cost.states import unchanged
from pipefit.errors import UsageError
from pipefit.places import Member, Place
from pipefit.program import UncheckedProgram

NOTHING, COMPUTE, POST, RECEIVE, COPY, JOIN = range(6)  # a receive is posted like what the device gives
STARTS = frozenset({POST, RECEIVE, COPY})  # a transfer
STREAMS = 3  # of every device: copies outward, copies inward, updates at a place

# Seconds, the names of wires, and the part of its rate that is left while the other direction of each wire is busy
NamedPart = tuple[float, tuple[str, ...], tuple[float, ...]]
NamedParts = tuple[NamedPart, ...]


class Own(NamedTuple):
    """A transfer of this device alone: its parts, and its stream; -1 where it copies nothing."""

    parts: NamedParts
    stream: int


class Collected(NamedTuple):
    """An end of a collective: what it is, the how manieth of it this is, the bytes that every member has, and in how
    many messages these go: NCCL sends them as one, gloo every tensor for itself.

    Where the `replicas` of a stage own `shares` of them, it `reduces` to the owners, or brings theirs to all.
    """

    what: Hashable
    turn: int
    nbytes: int
    messages: int
    replicas: tuple[int, ...]
    shares: tuple[int, ...] | None
    reduces: bool


class TimedDevice(NamedTuple):
    """The actions of one device: a code, seconds and the number of a transfer for each, -1 where it has none."""

    codes: list[int]
    seconds: list[float]
    transfers: list[int]
    started: list[Message | Collected | Own]  # the transfers


class DeviceReader:
    """Reads what one device does."""

    def __init__(
        self,
        device: int,
        program: UncheckedProgram,
        cluster: Cluster,
        stages: Mapping[int, StageCost],
        moved_bytes: Callable[[Action], int],
    ) -> None:
        self._device, self._program, self._cluster, self._stages = device, program, cluster, stages
        self._moved_bytes = moved_bytes
        self._turns: Counter[tuple[Hashable, int]] = Counter()  # how often a stage started a collective
        self._copies: dict[tuple[bool, int, Place | None], Own] = {}

    def read(self, actions: tuple[Action, ...]) -> TimedDevice:
        """What these actions are to the clock; collectives are counted from the first of them."""
        self._turns.clear()
        codes, seconds, transfers, starts = timed = TimedDevice([], [], [], [])
        open_starts: dict[tuple[object, ...], int] = {}
        copying_nothing = unchanged(self._program, actions)
        for position, action in enumerate(actions):
            kind, code, duration, transfer = action.kind, NOTHING, 0.0, -1
            if kind is Kind.STASH and action.wait:
                pass
            elif action.wait:
                code, transfer = JOIN, open_starts.pop(action[:-1])
            elif begun := self._begun(action, copies=position not in copying_nothing):
                copied = isinstance(begun, Own) and begun.stream >= 0
                code, transfer = COPY if copied else RECEIVE if kind in RECEIVES else POST, len(starts)
                open_starts[action[:-1]] = transfer
                starts.append(begun)
            elif kind not in (Kind.LOAD, Kind.RESHARD):
                code, duration = COMPUTE, self._stages[action.stage].seconds(action)
            codes.append(code)
            seconds.append(duration)
            transfers.append(transfer)
        return timed

    def _begun(self, action: Action, *, copies: bool) -> Message | Collected | Own | None:
        """The transfer that an action begins, if it does; parameters that `copies` says are unchanged are not moved."""
        kind = action.kind
        if kind in MESSAGES:
            return message_of(self._device, action, self._program.placement)
        if kind in COLLECTIVE:
            return self.collected(action)
        if kind in COPIES:
            return self._copy(action) if copies else Own((), -1)
        return self._update(action) if kind is Kind.STEP and action.place is not None else None

    def collected(self, action: Action) -> Collected:
        """The end of a collective that an action begins; asked for in the order in which the device begins them."""
        what = collective(action)
        turn = self._turns[what, action.stage]
        self._turns[what, action.stage] += 1
        named = action.place.members if action.place is not None else ()  # those that hold the same shard
        replicas = tuple(member.number or 0 for member in named) or self._program.placement[action.stage]
        stage = self._stages[action.stage]
        shares = stage.owned_bytes(action, len(replicas))
        return Collected(
            what,
            turn,
            stage.collective_bytes(action),
            stage.collective_tensors(action) if self._cluster.backend == "cpu" else 1,
            replicas,
            None if shares is None else tuple(shares),
            action.kind is Kind.REDUCE,
        )

    def _copy(self, action: Action) -> Own:
        key = action.kind is Kind.OFFLOAD, self._moved_bytes(action), action.place
        if key not in self._copies:
            self._copies[key] = Own(tuple(self._parts(*key)), STREAMS * self._device + (not key[0]))
        return self._copies[key]

    def _parts(self, outward: bool, nbytes: int, place: Place | None) -> Iterator[NamedPart]:
        assert place is not None, "the ledger refuses copies without a place"
        here = Member.device(self._device)
        for member, share in place.split(nbytes):
            self._cluster.check(member, f"place {str(place)!r}")
            there = member if member.number is not None else Member(member.kind, self._host)
            if there == here:
                raise UsageError(f"device {self._device} cannot move a tensor to {str(place)!r}: name other members")
            route = self._cluster.route(*((here, there) if outward else (there, here)))
            yield route.seconds(share), route.wires, route.slowed

    def _update(self, action: Action) -> Own:
        """An update that a host makes for this device, on the wire that is the host's memory."""
        assert action.place is not None, "only updates at a place run in the background"
        number = action.place.members[0].number
        number = self._host if number is None else number
        seconds = self._stages[action.stage].host_update_seconds(action, self._cluster.hosts[number])
        return Own(((seconds, (f"memory of host {number}",), (1.0,)),), STREAMS * self._device + 2)

    @property
    def _host(self) -> int:
        return self._cluster.devices[self._device].host
