"""Devices of a plan that do the same at the same times: one of each group is simulated for all of them.

Replicas have the same actions on other rows, so that they only differ by the links that they use. Devices, wires and
transfers are divided into classes, at first by stage, kind of device and rate, and then as long as members of a class
meet others in different ways: a device by its messages, a wire by all transfers that it carries, by the order in which
these take it when they become ready at once, and by its other direction where that slows it. What is then in one class
has the same history, by induction over time: whatever a member waits for is, in its class, what every other member
waits for. (Colour refinement; Paige and Tarjan, 1987.) So the seconds are exactly those of all devices, and not a float
differs.

Where messages of replicas share a wire, as on the way to a host, one waits for the other, and all devices are
simulated. So they are where replicas divide state, or anything moves to a place, and for the shards of a replica. A
collective takes its own seconds of every wire, in a way that depends on its bytes: wires in one class carry the same of
it in every way that it may go.

Costs: some microseconds for every pair of neighbours, a few times.
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
_BYTES = 2**20 + 1  # of a sum whose hops carry different numbers of bytes where those of others may


class Alike(NamedTuple):
    """The device that stands for every other, and the same for the two ends of messages, and for wires."""

    devices: dict[int, int]
    ends: dict[tuple[int, int], tuple[int, int]]
    wires: dict[str, str]

    def message(self, message: Message) -> Message:
        """The message that stands for another one."""
        source, target = self.ends[message.source, message.target]
        part = message.part and (0, message.part[1] - message.part[0])
        return message._replace(part=part, source=source, target=target)

    def those_of(self, devices: Iterable[int]) -> list[int]:
        """The devices that any of these stand for, in order."""
        standing = set(devices)
        return sorted(device for device, one in self.devices.items() if one in standing)


class _Edge(NamedTuple):
    """What goes from one device to another again and again: a message between stages."""

    label: Hashable
    source: int
    target: int
    route: Route


class _Sum(NamedTuple):
    """What a collective takes of a wire: its name, and every hop in every way that it may take."""

    name: Hashable
    hops: Hashable
    earliest: int


def alike(plan: Plan) -> Alike | None:
    """The devices that stand for all others; None where each stands for itself."""
    if not _may_be(plan):
        return None
    return _Refinement(plan, [*_messages(plan)], _sums(plan)).found()


def _may_be(plan: Plan) -> bool:
    """Whether replicas of this plan may do the same at the same times."""
    grids = [stage.grid for stage in plan.stages]
    return (
        any(grid.data > 1 for grid in grids)
        and all(grid.tensor == 1 and grid.shard == "none" for grid in grids)
        and len({device for grid in grids for device in grid.devices}) == sum(len(grid.devices) for grid in grids)
        and all(decision.what is What.RECOMPUTE for decision in plan.decisions)
    )


def _messages(plan: Plan) -> Iterator[_Edge]:
    """The pairs of devices of neighbouring stages that have common rows, both ways."""
    samples = plan.training.microbatch_size
    for number, (front, behind) in enumerate(pairwise(stage.grid for stage in plan.stages)):
        met = defaultdict[int, int](int)  # how many senders every receiver has met
        for sender, device in enumerate(front.devices):
            own = rows_of(sender, samples // front.data)
            for order, (receiver, rows) in enumerate(common_rows(own, samples // behind.data)):
                whole = receiver * front.data // behind.data == sender
                there, label = behind.devices[receiver], (number, order, met[receiver], rows[1] - rows[0], whole)
                met[receiver] += 1
                for source, target in ((device, there), (there, device)):
                    route = plan.cluster.route(Member.device(source), Member.device(target))
                    forward = source == device
                    yield _Edge((*label, forward, source < target), source, target, route)


def _sums(plan: Plan) -> dict[str, list[_Sum]]:
    """The collectives on every wire: of replicas of a stage, of stages that share a parameter, of all that agree."""
    own = [((number,), stage.devices) for number, stage in enumerate(plan.stages)]
    shared = [
        (stages, tuple(device for number in stages for device in plan.stages[number].devices))
        for stages in plan.summed.values()
    ]
    found = defaultdict[str, list[_Sum]](list)
    for name, devices in (*own, *shared, *[((), plan.workers)] * plan.training.agrees):
        members, hops = sorted(devices), defaultdict[str, list[tuple[int, int, float, float]]](list)
        for way, exchange in enumerate(ways_of_sum(plan.cluster, members, _BYTES)):
            for source, target, nbytes in exchange.hops:
                route = plan.cluster.route(Member.device(source), Member.device(target))
                for wire, slowed in zip(route.wires, route.slowed, strict=True):
                    hops[wire].append((way, nbytes, route.bytes_per_second, slowed))
        for wire, every in hops.items():
            found[wire].append(_Sum(name, tuple(sorted(every)), members[0]))
    return found


class _Refinement:
    """Classes of devices, wires and edges, as numbers, which are divided as long as that is needed."""

    def __init__(self, plan: Plan, edges: Sequence[_Edge], sums: Mapping[str, Sequence[_Sum]]) -> None:
        self.edges = edges
        self.carried = defaultdict[str, list[tuple[int, int, int]]](list)  # edges, positions and turns of every wire
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
        )  # in order: the earliest of a class stands for it
        self.wires = _numbered({wire: _in_turn(sums.get(wire, ())) for wire in {**self.carried, **sums}})
        # The other direction of every wire, if that matters
        slowed = any(link.duplex < 1 for link in plan.cluster.links)
        self.opposite = {wire: opposite(wire) if slowed else None for wire in self.wires}
        self.classes = [0] * len(edges)

    def found(self) -> Alike | None:
        """The first of every class; None where what begins together has to wait for each other."""
        count = 0
        while (now := self._divided()) > count:
            count = now
        if any(len({self.edges[n].label for n, *_ in uses}) < len(uses) for uses in self.carried.values()):
            return None
        ends = dict[tuple[int, int], tuple[int, int]]()
        first = dict[int, tuple[int, int]]()
        for edge, one in zip(self.edges, self.classes, strict=True):
            ends[edge.source, edge.target] = first.setdefault(one, (edge.source, edge.target))
        return Alike(_standing(self.devices), ends, _standing(self.wires))

    def _divided(self) -> int:
        """Divide all classes by what their members meet; how many there are."""
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
                    *sorted((self.classes[n], position, turn) for n, position, turn in self.carried.get(wire, ())),
                )
                for wire, own in self.wires.items()
            }
        )
        return len({*self.devices.values()}) + len({*self.wires.values()}) + len({*self.classes})

    def _of_edge(self, edge: _Edge) -> Hashable:
        """What an edge is."""
        ends = self.devices[edge.source], self.devices[edge.target]
        wires = tuple(self.wires[wire] for wire in edge.route.wires)
        return edge.label, edge.route.bytes_per_second, edge.route.latency_seconds, edge.route.slowed, wires, ends


def _in_turn(sums: Sequence[_Sum]) -> Hashable:
    """The collectives on a wire. Of several that become ready at once, that goes first in which the earliest device has
    part; messages go before all of them.
    """
    turns = {one: turn for turn, one in enumerate(sorted({one.earliest for one in sums}))}
    return tuple(sorted((one.name, turns[one.earliest], one.hops) for one in sums))


def _numbered(of: Mapping[Key, Hashable]) -> dict[Key, int]:
    """Numbers that are equal where what they stand for is."""
    known = dict[Hashable, int]()
    return {key: known.setdefault(one, len(known)) for key, one in of.items()}


def _standing(classes: Mapping[Key, int]) -> dict[Key, Key]:
    """The first member of everyone's class."""
    first = dict[int, Key]()
    return {key: first.setdefault(one, key) for key, one in classes.items()}
