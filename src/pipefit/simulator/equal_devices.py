"""Devices of a plan with equal actions at equal times: one of each class is simulated for all of them.

Replicas have the same actions on other rows, so they differ only by their links. Devices, wires and transfers
are divided into classes, first by stage, kind of device and rate, and then while members of a class meet
others in different ways: a device by its messages, a wire by the transfers that it carries, by the order in
which these take it if they become ready at once, and by its other direction if that slows it. Members of a
final class have the same history, by induction over time: whatever a member waits for is equal, in its class,
to the wait of every other member. (Colour refinement; Paige and Tarjan, 1987.) So the seconds are exactly
those of a simulation of all devices, to the last bit.

If messages of replicas share a wire, as on the way to a host, one waits for the other, and all devices are
simulated. The same holds if replicas divide state, if anything moves to another place, and for
tensor-parallel ranks. A collective uses every wire for a time that depends on its bytes: wires in one class
carry the same part of it in all of its ways.

Cost: some microseconds for every pair of neighbours, a few times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

from pipefit.schema.actions import Message
from pipefit.schema.cluster import Route, opposite
from pipefit.schema.decisions import What
from pipefit.schema.devices import Member
from pipefit.schema.grids import common_rows, rows_of
from pipefit.schema.plan import Plan
from pipefit.timing import ways_of_sum

Key = TypeVar("Key")
_BYTES = 2**20 + 1  # bytes of a sum whose hops differ if those of any sum may


class EqualDevices(NamedTuple):
    """Representatives of all devices, of both ends of messages, and of wires."""

    devices: dict[int, int]
    ends: dict[tuple[int, int], tuple[int, int]]
    wires: dict[str, str]

    def message(self, message: Message) -> Message:
        """Return the message that represents another one."""
        source, target = self.ends[message.source, message.target]
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
        members, hops = sorted(devices), defaultdict[str, list[tuple[int, int, float, float]]](list)
        for way, exchange in enumerate(ways_of_sum(plan.cluster, members, _BYTES)):
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
