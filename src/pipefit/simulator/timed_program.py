"""Programs prepared for the clock: the actions of every device, and the transfers between them.

A wire is a number for one direction of a link. A transfer has one part for each member of its place, with its
own seconds and wires. The copies of a device run in two streams, one outward and one inward, each in the
order of issue, as the runtime queues them (`runtime.offload.cuda`); messages have no stream and wait only for
their wires. Updates by a host for a device are a third stream, and the memory of the host is the wire on
which the updates of several devices wait for each other.

A device that is a CPU core carries its sends and copies itself, and makes updates at a place itself: it does
not compute during these. Gloo sends every tensor of a collective separately, each with its own delays; NCCL
sends all tensors as one.

Of transfers that become ready at once, the one with the lower number goes first; collectives come after all
others.

Of devices with equal actions at equal times, one represents its class, and so do transfers and wires.
Replicas have the same actions on other rows, so they differ only by their links. Devices, wires and transfers
are divided into classes, first by stage, kind of device and rate, and then while members of a class meet
others in different ways: a device by its messages, a wire by the transfers that it carries, by the order in
which these take it if they become ready at once, and by its other direction if that slows it. Members of a
final class have the same history, by induction over time: whatever a member waits for is equal, in its class,
to the wait of every other member. (Colour refinement; Paige and Tarjan, 1987.) So the seconds are exactly
those of a simulation of all devices, to the last bit. All devices are simulated if messages of replicas share
a wire, as on the way to a host, where one waits for the other; if replicas divide state, or anything moves to
another place; and for tensor-parallel ranks. But if devices only take part in the same collectives, as
replicas of an only stage do, and differ by their updates alone, the slowest represents all (`slowest`). A
collective uses every wire for a time that depends on its bytes: wires in one class carry the same part of it
in all of its ways.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise
from operator import ge
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipefit.errors import UsageError
from pipefit.memory import StageCost, unchanged
from pipefit.schema.actions import (
    COLLECTIVE,
    COPIES,
    MESSAGES,
    RECEIVES,
    Action,
    Kind,
    Message,
    collective,
    message_of,
)
from pipefit.schema.cluster import Cluster, Route, opposite
from pipefit.schema.decisions import What
from pipefit.schema.devices import Member, Place
from pipefit.schema.grids import common_rows, rows_of
from pipefit.schema.plan import Plan
from pipefit.schema.program import UncheckedProgram
from pipefit.timing import (
    PLAIN,
    LinkCollective,
    brought_by_owners,
    sum_for_all,
    sum_for_owners,
    ways_of_sum,
)

Key = TypeVar("Key")
_BYTES = 2**20 + 1  # bytes of a sum whose hops differ if those of any sum may


class EqualDevices(NamedTuple):
    """Representatives of all devices, of both ends of messages, and of wires; without one, of themselves."""

    devices: Mapping[int, int]
    ends: Mapping[tuple[int, int], tuple[int, int]] = MappingProxyType({})
    wires: Mapping[str, str] = MappingProxyType({})

    def message(self, message: Message) -> Message:
        """Return the message that represents another one."""
        ends = message.source, message.target
        source, target = self.ends.get(ends, ends)
        part = message.part and (0, message.part[1] - message.part[0])
        return message._replace(part=part, source=source, target=target)

    def those_of(self, devices: Iterable[int]) -> list[int]:
        """Return the devices that any of these represent, in order."""
        standing = set(devices)
        return sorted(device for device, one in self.devices.items() if one in standing)


class _Edge(NamedTuple):
    """Repeated message from one device to another, between stages."""

    label: Hashable
    source: int
    target: int
    route: Route


class _WireUse(NamedTuple):
    """Use of a wire by a collective: its name, and every hop in all of its ways."""

    name: Hashable
    hops: Hashable
    earliest: int


def alike(plan: Plan) -> EqualDevices | None:
    """Return the devices that represent all others; None if no device represents another."""
    if not _may_be(plan):
        return None
    return _Refinement(plan, [*_messages(plan)], _sums(plan)).found()


def _may_be(plan: Plan) -> bool:
    """Return whether replicas of this plan may have equal actions at equal times."""
    grids = [stage.grid for stage in plan.stages]
    return (
        any(grid.data > 1 for grid in grids)
        and all(grid.tensor == 1 and grid.shard == "none" for grid in grids)
        and len({device for grid in grids for device in grid.devices})
        == sum(len(grid.devices) for grid in grids)
        and all(decision.what is What.RECOMPUTE for decision in plan.decisions)
    )


def _messages(plan: Plan) -> Iterator[_Edge]:
    """Yield the pairs of devices of neighbouring stages that have common rows, in both directions."""
    samples = plan.training.microbatch_size
    for number, (front, behind) in enumerate(pairwise(stage.grid for stage in plan.stages)):
        met = defaultdict[int, int](int)  # number of senders that every receiver has met
        for sender, device in enumerate(front.devices):
            own = rows_of(sender, samples // front.data)
            for order, (receiver, rows) in enumerate(common_rows(own, samples // behind.data)):
                whole = receiver * front.data // behind.data == sender
                there, label = (
                    behind.devices[receiver],
                    (number, order, met[receiver], rows[1] - rows[0], whole),
                )
                met[receiver] += 1
                for source, target in ((device, there), (there, device)):
                    route = plan.cluster.route(Member.device(source), Member.device(target))
                    forward = source == device
                    yield _Edge((*label, forward, source < target), source, target, route)


def _sums(plan: Plan) -> dict[str, list[_WireUse]]:
    """Return the collectives on every wire.

    They are those of the replicas of a stage, of stages that share a parameter, and of all workers if they
    agree on a value.
    """
    own = [((number,), stage.devices) for number, stage in enumerate(plan.stages)]
    shared = [
        (stages, tuple(device for number in stages for device in plan.stages[number].devices))
        for stages in plan.summed.values()
    ]
    result = defaultdict[str, list[_WireUse]](list)
    for name, devices in (*own, *shared, *[((), plan.workers)] * plan.training.agrees):
        members, hops = sorted(devices), defaultdict[str, list[tuple[int, float, float, float]]](list)
        for way, exchange in enumerate(ways_of_sum(plan.cluster, members, _BYTES, (PLAIN,))):
            for source, target, nbytes in exchange.hops:
                route = plan.cluster.route(Member.device(source), Member.device(target))
                for wire, slowed in zip(route.wires, route.slowed, strict=True):
                    hops[wire].append((way, nbytes, route.bytes_per_second, slowed))
        for wire, every in hops.items():
            result[wire].append(_WireUse(name, tuple(sorted(every)), members[0]))
    return result


class _Refinement:
    """Classes of devices, wires and edges, as numbers, which are divided as long as needed."""

    def __init__(self, plan: Plan, edges: Sequence[_Edge], sums: Mapping[str, Sequence[_WireUse]]) -> None:
        self.edges = edges
        self.carried = defaultdict[str, list[tuple[int, int, int]]](
            list
        )  # edges, positions and turns of every wire
        for number, edge in enumerate(edges):
            for position, wire in enumerate(edge.route.wires):
                self.carried[wire].append((number, position, min(edge.source, edge.target)))
        for wire, uses in self.carried.items():
            turns = {one: turn for turn, one in enumerate(sorted({earliest for *_, earliest in uses}))}
            self.carried[wire] = [(n, position, turns[earliest]) for n, position, earliest in uses]
        kinds = [device.kind.key for device in plan.cluster.devices]
        there = sorted((d, n) for n, stage in enumerate(plan.stages) for d in stage.devices)
        self.devices = _numbered(
            {d: (n, kinds[d]) for d, n in there}
        )  # in order: the earliest of a class represents it
        self.wires = _numbered({wire: _in_turn(sums.get(wire, ())) for wire in {**self.carried, **sums}})
        # The other direction of every wire, if it matters
        slowed = any(link.duplex < 1 for link in plan.cluster.links)
        self.opposite = {wire: opposite(wire) if slowed else None for wire in self.wires}
        self.classes = [0] * len(edges)

    def found(self) -> EqualDevices | None:
        """Return the first member of every class; None if equal transfers have to wait for each other."""
        count = 0
        while (now := self._divided()) > count:
            count = now
        if any(len({self.edges[n].label for n, *_ in uses}) < len(uses) for uses in self.carried.values()):
            return None
        ends = dict[tuple[int, int], tuple[int, int]]()
        first = dict[int, tuple[int, int]]()
        for edge, one in zip(self.edges, self.classes, strict=True):
            ends[edge.source, edge.target] = first.setdefault(one, (edge.source, edge.target))
        return EqualDevices(_standing(self.devices), ends, _standing(self.wires))

    def _divided(self) -> int:
        """Divide all classes by the classes that their members meet; return the number of classes."""
        for number, one in enumerate(_numbered(dict(enumerate(map(self._of_edge, self.edges)))).values()):
            self.classes[number] = one
        met = {device: [(one, 0)] for device, one in self.devices.items()}
        for edge, one in zip(self.edges, self.classes, strict=True):
            met[edge.source].append((one, 1))
            met[edge.target].append((one, 2))
        self.devices = _numbered({device: (own[0], *sorted(own[1:])) for device, own in met.items()})
        self.wires = _numbered(
            {
                wire: (
                    own,
                    self.wires.get(self.opposite[wire] or ""),
                    *sorted(
                        (self.classes[n], position, turn) for n, position, turn in self.carried.get(wire, ())
                    ),
                )
                for wire, own in self.wires.items()
            }
        )
        return len({*self.devices.values()}) + len({*self.wires.values()}) + len({*self.classes})

    def _of_edge(self, edge: _Edge) -> Hashable:
        """Return the properties of an edge."""
        ends = self.devices[edge.source], self.devices[edge.target]
        wires = tuple(self.wires[wire] for wire in edge.route.wires)
        return (
            edge.label,
            edge.route.bytes_per_second,
            edge.route.latency_seconds,
            edge.route.slowed,
            wires,
            ends,
        )


def _in_turn(sums: Sequence[_WireUse]) -> Hashable:
    """Return the collectives on a wire.

    Of several that become ready at once, the one with the earliest device goes first, after all messages.
    """
    turns = {one: turn for turn, one in enumerate(sorted({wire_use.earliest for wire_use in sums}))}
    return tuple(sorted((one.name, turns[one.earliest], one.hops) for one in sums))


def _numbered(of: Mapping[Key, Hashable]) -> dict[Key, int]:
    """Return numbers that are equal for equal values."""
    known = dict[Hashable, int]()
    return {key: known.setdefault(hashable, len(known)) for key, hashable in of.items()}


def _standing(classes: Mapping[Key, int]) -> dict[Key, Key]:
    """Return the first member of each key's class."""
    first = dict[int, Key]()
    return {key: first.setdefault(one, key) for key, one in classes.items()}


# ---- One device
#
# Transfers of one device, which are copies and updates at a place, have their seconds and wires here.
# Messages and collectives have other ends, and are identified by a key.

NOTHING, COMPUTE, POST, RECEIVE, COPY, JOIN = range(6)  # a receive is posted like a send
STARTS = frozenset({POST, RECEIVE, COPY})  # codes that start a transfer
STREAMS = 3  # of every device: copies outward, copies inward, updates at a place

# Seconds, the names of wires, and the part of its rate that each keeps while its other direction is busy
NamedPart = tuple[float, tuple[str, ...], tuple[float, ...]]
NamedParts = tuple[NamedPart, ...]


class Own(NamedTuple):
    """Transfer of this device alone: its parts and its stream; stream -1 if it copies nothing."""

    parts: NamedParts
    stream: int


class Collected(NamedTuple):
    """One end of a collective: its key, its occurrence number, the bytes of every member, and its messages.

    NCCL sends all tensors as one message, gloo one message for each tensor. If the `replicas` of a stage own
    `shares` of the bytes, it is a reduce-scatter to the owners (`reduces`), or an all-gather from them.
    """

    what: Hashable
    turn: int
    nbytes: int
    messages: int
    replicas: tuple[int, ...]
    shares: tuple[int, ...] | None
    reduces: bool


class TimedDevice(NamedTuple):
    """Actions of one device: a code, seconds and the number of a transfer for each, -1 without a transfer."""

    codes: list[int]
    seconds: list[float]
    transfers: list[int]
    started: list[Message | Collected | Own]  # the transfers


class DeviceReader:
    """Reader of the actions of one device."""

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
        self._turns: Counter[tuple[Hashable, int]] = (
            Counter()
        )  # number of collectives that a stage has started
        self._copies: dict[tuple[bool, int, Place | None], Own] = {}

    def read(self, actions: tuple[Action, ...]) -> TimedDevice:
        """Return these actions for the clock; collectives are counted from the first action."""
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
        """Return the transfer that an action starts, if any.

        Without `copies`, unchanged parameters do not move.
        """
        kind = action.kind
        if kind in MESSAGES:
            return message_of(self._device, action, self._program.placement)
        if kind in COLLECTIVE:
            return self.collected(action)
        if kind in COPIES:
            return self._copy(action) if copies else Own((), -1)
        return self._update(action) if kind is Kind.STEP and action.place is not None else None

    def collected(self, action: Action) -> Collected:
        """Return the end of a collective that an action starts; call it in the device's order."""
        what = collective(action)
        turn = self._turns[what, action.stage]
        self._turns[what, action.stage] += 1
        named = action.place.members if action.place is not None else ()  # members that hold the same shard
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
                raise UsageError(
                    f"device {self._device} cannot offload to {str(place)!r}: name other members"
                )
            route = self._cluster.route(*((here, there) if outward else (there, here)))
            yield route.seconds(share), route.wires, route.slowed

    def _update(self, action: Action) -> Own:
        """Return an update by a host for this device, on the wire that is the host's memory."""
        assert action.place is not None, "only updates at a place run in the background"
        number = action.place.members[0].number
        number = self._host if number is None else number
        seconds = self._stages[action.stage].host_update_seconds(action, self._cluster.hosts[number])
        return Own(((seconds, (f"memory of host {number}",), (1.0,)),), STREAMS * self._device + 2)

    @property
    def _host(self) -> int:
        return self._cluster.devices[self._device].host


# ---- All devices


def slowest(
    devices: Mapping[int, TimedDevice], passes: Callable[[int], Hashable], cluster: Cluster
) -> dict[int, int]:
    """Return the device that represents each of these.

    Devices that start the same collectives in the same order, and nothing else, are represented by the
    slowest of them: it ends every action last, so all collectives are ready when it starts them. Their
    seconds of `passes` are equal, so passes take place at equal times, and only updates end earlier on the
    others, as on replicas of an only stage that divide its state. Not so on CPU cores, which carry
    collectives themselves.
    """
    if cluster.backend == "cpu":
        return {device: device for device in devices}
    groups = dict[Hashable, list[int]]()
    for device, own in devices.items():
        key: Hashable = device
        if own.started and all(isinstance(begun, Collected) for begun in own.started):
            key = passes(device), tuple(begun[:2] for begun in own.started)
        groups.setdefault(key, []).append(device)
    result = dict[int, int]()
    for members in groups.values():
        last = max(members, key=lambda device: sum(devices[device].seconds))
        for device in members:
            result[device] = last if _is_at_least(devices[last], devices[device]) else device
    return result


def _is_at_least(one: TimedDevice, other: TimedDevice) -> bool:
    """Return whether a device has the same actions as another one, each taking as long or longer."""
    same = one.codes == other.codes and one.transfers == other.transfers and one.started == other.started
    return same and all(map(ge, one.seconds, other.seconds))


# Seconds, wires, and the part of its rate that each keeps while its other direction is busy
Part = tuple[float, tuple[int, ...], tuple[float, ...]]
Parts = tuple[Part, ...]


class TimedActions(NamedTuple):
    """Actions of one device: a code, seconds and the number of a transfer for each, -1 without a transfer."""

    codes: list[int]
    seconds: list[float]
    transfers: list[int]


class FlatProgram(NamedTuple):
    """A timed program as arrays, in the order of `clock.c`, which says what they are."""

    first_action: NDArray[np.int64]
    codes: NDArray[np.int8]
    seconds: NDArray[np.float64]
    of_action: NDArray[np.int64]
    first_part: NDArray[np.int64]
    transfer: NDArray[np.int64]
    part_seconds: NDArray[np.float64]
    is_slowed: NDArray[np.int8]
    first_use: NDArray[np.int64]
    part: NDArray[np.int64]
    wire: NDArray[np.int64]
    slowed: NDArray[np.float64]
    opposite: NDArray[np.int64]
    stream: NDArray[np.int64]
    starters: NDArray[np.int64]


def _firsts(counts: Iterable[int]) -> NDArray[np.int64]:
    """Return the position of the first of each of these numbers of elements, and the end."""
    return np.array([0, *accumulate(counts)], np.int64)


class TimedProgram:
    """Actions of all devices, or of those that represent all, and the transfers between them."""

    def __init__(
        self,
        devices: Sequence[TimedDevice],
        cluster: Cluster,
        message_bytes: Callable[[Message], int],
        alike: EqualDevices | None = None,
    ) -> None:
        self._message_bytes, self._alike = message_bytes, alike
        self._wires: dict[str, int] = {}
        self._numbers: dict[Hashable, int] = {}  # of messages and collectives
        self._members = _members(devices)
        self._cluster, self._on_cores = cluster, cluster.backend == "cpu"
        self._message_parts: dict[Hashable, Parts] = {}  # of all microbatches
        self._own_parts: dict[NamedParts, Parts] = {}
        self._exchanged: dict[Hashable, Parts] = {}  # of collectives of the same bytes
        self.parts: list[Parts] = []
        # Stream of every transfer: STREAMS * device for outward copies, plus 1 for inward copies, plus 2 for
        # updates at a place; -1 for all others
        self.streams: list[int] = []
        self.ends: list[int] = []  # number of devices that must start it before it is ready
        numbers = [[self._number(begun) for begun in device.started] for device in devices]
        self.devices = [self._numbered(device, own) for device, own in zip(devices, numbers, strict=True)]

    @cached_property
    def flat(self) -> FlatProgram:
        """The program as arrays."""
        parts, opposite = [*chain.from_iterable(self.parts)], self.opposite
        of_transfers, of_parts = [*map(len, self.parts)], [len(wires) for _, wires, _ in parts]
        joined = chain.from_iterable
        return FlatProgram(
            first_action=_firsts(len(device.codes) for device in self.devices),
            codes=np.array([*joined(device.codes for device in self.devices)], np.int8),
            seconds=np.array([*joined(device.seconds for device in self.devices)], np.float64),
            of_action=np.array([*joined(device.transfers for device in self.devices)], np.int64),
            first_part=_firsts(of_transfers),
            transfer=np.repeat(np.arange(len(of_transfers), dtype=np.int64), of_transfers),
            part_seconds=np.array([seconds for seconds, *_ in parts], np.float64),
            is_slowed=np.array(
                [any(opposite[wire] >= 0 for wire in wires) for _, wires, _ in parts], np.int8
            ),
            first_use=_firsts(of_parts),
            part=np.repeat(np.arange(len(of_parts), dtype=np.int64), of_parts),
            wire=np.array([*joined(wires for _, wires, _ in parts)], np.int64),
            slowed=np.array([*joined(slowed for *_, slowed in parts)], np.float64),
            opposite=np.array(opposite, np.int64),
            stream=np.array(self.streams, np.int64),
            starters=np.array(self.ends, np.int64),
        )

    @cached_property
    def opposite(self) -> list[int]:
        """For every wire of transfers, the other direction of its link; -1 if that slows nothing."""
        if all(one == 1.0 for part in chain.from_iterable(self.parts) for one in part[2]):
            return [-1] * len(self._wires)
        stands = self._alike.wires if self._alike is not None else {}
        others = (opposite(name) for name in self._wires)
        return [self._wires.get(stands.get(name, name), -1) if name is not None else -1 for name in others]

    def _numbered(self, device: TimedDevice, numbers: list[int]) -> TimedActions:
        """Return the actions of one device, with the program's numbers of transfers."""
        for own, begun in enumerate(device.started):
            if isinstance(begun, Collected):
                numbers[own] = self._collective(begun)
        numbers.append(-1)  # the number of no transfer
        transfers = [numbers[own] for own in device.transfers]
        seconds = (
            [*map(self._taken, device.codes, device.seconds, transfers)] if self._on_cores else device.seconds
        )
        return TimedActions(device.codes, seconds, transfers)

    def _taken(self, code: int, seconds: float, transfer: int) -> float:
        """Return the seconds of an action on a CPU core, which carries the transfers that it starts."""
        return (
            max((part[0] for part in self.parts[transfer]), default=0.0) if code in (POST, COPY) else seconds
        )

    def _number(self, begun: Message | Collected | Own) -> int:
        """Return the number of a started transfer, -1 for an end of a collective."""
        if isinstance(begun, Message):
            begun = self._alike.message(begun) if self._alike is not None else begun
            number = self._numbers.get(begun)
            if number is None:
                number = self._numbers[begun] = self._message(begun)
            return number
        if isinstance(begun, Collected):
            return -1
        parts = self._own_parts.get(begun.parts)
        if parts is None:
            parts = self._own_parts[begun.parts] = tuple(self._on_wires(*part) for part in begun.parts)
        return self._add(parts, ends=1, stream=begun.stream)

    def _collective(self, begun: Collected) -> int:
        """Return the number of the collective with this end."""
        key = begun.what, begun.turn
        if key not in self._numbers:
            self._numbers[key] = self._exchange(begun)
        return self._numbers[key]

    def _add(self, parts: Parts, *, ends: int, stream: int = -1) -> int:
        """Add a transfer and return its number."""
        self.parts.append(parts)
        self.streams.append(stream)
        self.ends.append(ends)
        return len(self.parts) - 1

    def _message(self, message: Message) -> int:
        """Return the number of a new message; between stages of one device it is without parts."""
        forward, receiver, _, part, source, target = message
        key = forward, receiver, part, source, target
        parts = self._message_parts.get(key)
        if parts is None:
            nbytes = self._message_bytes(message)
            parts = (
                ()
                if source == target
                else (self._part(Member.device(source), Member.device(target), nbytes),)
            )
            self._message_parts[key] = parts
        return self._add(parts, ends=2)

    def _exchange(self, begun: Collected) -> int:
        """Return the number of a new collective; every wire is a part, with the delay of all messages."""
        begin = self._members[begun.what]
        key = tuple(begin), begun._replace(what=None, turn=0)
        if key not in self._exchanged:
            members = begin if self._alike is None else self._alike.those_of(begin)
            exchange = exchange_of(self._cluster, members, begun)
            parts = (
                self._on_wires(exchange.delay_on(wire) + s, (wire,), (exchange.slowed[wire],))
                for wire, s in exchange.wire_seconds.items()
            )
            self._exchanged[key] = tuple(dict.fromkeys(parts))
        return self._add(self._exchanged[key], ends=len(begin))

    def _part(self, source: Member, target: Member, nbytes: int) -> Part:
        route = self._cluster.route(source, target)
        return self._on_wires(route.seconds(nbytes), route.wires, route.slowed)

    def _on_wires(self, seconds: float, names: Sequence[str], slowed: tuple[float, ...]) -> Part:
        if self._alike is not None:
            names = [self._alike.wires.get(name, name) for name in names]
        return seconds, tuple(self._wires.setdefault(wire, len(self._wires)) for wire in names), slowed


def exchange_of(cluster: Cluster, members: list[int], begun: Collected) -> LinkCollective:
    """Return the exchange of a collective: an all-reduce, a reduce-scatter or an all-gather."""
    if begun.shares is None:
        result = sum_for_all(cluster, members, begun.nbytes)
    else:
        result = (sum_for_owners if begun.reduces else brought_by_owners)(
            cluster, begun.replicas, begun.shares
        )
    return result._replace(delay_seconds=result.delay_seconds * begun.messages)


def _members(devices: Sequence[TimedDevice]) -> dict[Hashable, list[int]]:
    """Return the devices that take part in every collective, once for each of their stages."""
    result: dict[Hashable, list[int]] = {}
    for number, device in enumerate(devices):
        for begun in device.started:
            if isinstance(begun, Collected) and not begun.turn:
                result.setdefault(begun.what, []).append(number)
    return result
