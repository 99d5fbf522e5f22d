"""Divides updates between hosts and devices, where hosts have the optimizer state.

An update on a host takes the host's memory as long as its bytes need; one on a device takes the wires on which its
state comes and goes. Both are behind the last backward of all stages, so that a step ends when the busiest of hosts and
wires does. A device does one of its copies and host updates after the other. So each stage does all of one sort. Stages
go from the busiest host to their devices, one after the other: each time the one whose wires are then the least busy.

Costs: microseconds; whoever asks simulates the few that are the shortest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from itertools import pairwise
from typing import NamedTuple

from pipefit.cost.time import host_update_seconds
from pipefit.planner.host_links import host_route
from pipefit.planner.question import Question, Split

_FEW = 3  # divisions that are worth a simulation


class Update(NamedTuple):
    """The update of a stage: its host and the seconds there; the wires of its state, and the seconds of one way."""

    host: int
    host_seconds: float
    wires: tuple[str, ...]
    wire_seconds: float


def divided_updates(question: Question, split: Split) -> list[tuple[float, ...]]:
    """The parts of every stage's state that its host updates, one or zero: a few ways, the shortest by estimate first.

    No way where a host's memory bandwidth is not known.
    """
    updates = _updates(question, split)
    if updates is None:
        return []
    away = [frozenset[int]()]
    while len(away[-1]) < len(updates):
        away.append(away[-1] | {_next(updates, away[-1])})
    shortest = sorted(away, key=lambda some: max(busy_seconds(updates, some).values()))[:_FEW]
    return [tuple(float(stage not in some) for stage in range(len(updates))) for some in shortest]


def busy_seconds(updates: Sequence[Update], away: Set[int]) -> Mapping[int | str, float]:
    """How long every host and every wire is busy if the stages that are `away` update on their devices."""
    found = defaultdict[int | str, float](float)
    for stage, update in enumerate(updates):
        for busy in update.wires if stage in away else (update.host,):
            found[busy] += update.wire_seconds if stage in away else update.host_seconds
    return found


def _next(updates: Sequence[Update], away: Set[int]) -> int:
    """Of the stages that the busiest host updates, the one whose wires would be the least busy."""
    busy = busy_seconds(updates, away)
    there = [stage for stage in range(len(updates)) if stage not in away]
    host = max((updates[stage].host for stage in there), key=busy.__getitem__)

    def busiest_wire(stage: int) -> float:
        return max((busy[wire] for wire in updates[stage].wires), default=0.0) + updates[stage].wire_seconds

    return min((stage for stage in there if updates[stage].host == host), key=busiest_wire)


def _updates(question: Question, split: Split) -> list[Update] | None:
    """The update of every stage; None if a host cannot have its state, or nothing says how long it takes there."""
    cluster, found = question.cluster, list[Update]()
    for device, edges in zip(split.devices, pairwise(split.edges), strict=True):
        number, route = cluster.devices[device].host, host_route(cluster, device)
        if route is None or cluster.hosts[number].memory_bandwidth is None:
            return None
        layers = question.measurement.costs[slice(*question.layers(*edges))]
        on_host = sum(host_update_seconds(cost, cluster.hosts[number]) for cost in layers)
        moved = sum(cost.state_bytes for cost in layers) / route.both_ways_per_second
        found.append(Update(number, on_host, route.wires, moved))
    return found
