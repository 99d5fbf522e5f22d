"""Simulated tensor shards: seconds of collectives over links, and memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Run, What
from pipefit.schema.devices import Link
from pipefit.schema.layer_costs import Collective
from pipefit.schema.trace import Trace
from pipefit.simulator import Simulation, simulate
from pipefit.simulator.simulation import contents
from pipefit.timing import Group, sum_for_all
from support.pipelines import make_cluster
from support.synthetic_grids import sharded

SUM, GATHER = Collective("all_reduce", 960), Collective("all_gather", 480)
RATE, LATENCY = 16.0, 0.25


def lasted(trace: Trace, device: int, action: str) -> float:
    """Return the seconds of an action of the last step."""
    found = [event for event in trace.devices[device].events if event.action == action]
    return found[-1].end_seconds - found[-1].start_seconds


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_forward_lasts_longer_by_its_collectives(ranks: int) -> None:
    """Around a ring every rank sends (n - 1) / n of the bytes in n - 1 rounds, twice for a sum; backwards
    have none.
    """
    links = {"bytes_per_second": RATE, "latency_seconds": LATENCY}
    trace = simulate(sharded((1, ranks), together=(SUM, GATHER), links=links))
    bytes_sent, rounds = (2 * 960 + 480) * (ranks - 1) / ranks, 3 * (ranks - 1)
    for device in range(ranks):
        assert lasted(trace, device, "0F0") == pytest.approx(1.0 + bytes_sent / RATE + rounds * LATENCY)
        assert lasted(trace, device, "0B0") == pytest.approx(2.0)


def test_recomputing_repeats_the_collectives_of_a_forward() -> None:
    """A recomputed forward lasts as long as the first, collectives included."""
    plan = sharded((1, 2), together=(SUM,), links={"bytes_per_second": RATE})
    trace = simulate(
        replace(plan, decisions=(Decision(stage=0, subject=Run(start=0, stop=1), what=What.RECOMPUTE),))
    )
    assert lasted(trace, 0, "0R0") == lasted(trace, 0, "0N0") == pytest.approx(1.0 + 960 / RATE)


def two_nodes() -> Cluster:
    """Build two pairs of devices, fast within and slow across."""
    fast = [Link.between(f"device{n}", f"device{n + 1}", bytes_per_second=100.0) for n in (0, 2)]
    everybody = [*(f"device{n}" for n in range(4)), "host0"]
    return make_cluster(4, *fast, Link.between(*everybody, bytes_per_second=10.0, latency_seconds=0.5))


@pytest.mark.parametrize("devices", [(0, 1), (2, 3), (0, 2), (0, 1, 2, 3), (0, 2, 1, 3), (1, 3, 0)])
def test_ranks_wait_as_long_as_their_sums_take(devices: tuple[int, ...]) -> None:
    """Sums take the links' time within a node, across nodes, and with hops on a shared wire; each half of a
    ring takes half of the bytes.
    """
    cluster, group = two_nodes(), Group.of(two_nodes(), devices)
    assert group.seconds([SUM]) == pytest.approx(sum_for_all(cluster, devices, SUM.nbytes).seconds)
    halves = [group.seconds([Collective(kind, 1200)]) for kind in ("reduce_scatter", "all_gather")]
    assert halves[0] == halves[1] < group.seconds([Collective("all_reduce", 1200)])
    bytes_alone = group.seconds([Collective("all_reduce", 1200)]) - group.seconds(
        [Collective("all_reduce", 0)]
    )
    slow = any(one // 2 != other // 2 for one, other in pairwise((*devices, devices[0])))
    assert bytes_alone == pytest.approx(
        2 * (len(devices) - 1) / len(devices) * 1200 / (10.0 if slow else 100.0)
    )


def boundary_bytes(simulation: Simulation, device: int) -> list[int]:
    """Return the change of a device's boundary bytes after each action of a step."""
    changes = dict(simulation.effects[device][0])
    return [effect.after[4] if (effect := changes.get(n)) else 0 for n in range(len(changes) + 20)]


def test_what_nobody_waits_for_is_freed_as_it_is_made() -> None:
    """Of two shards next to one device only the first sends: the other frees outputs and gradients as a pass
    ends.
    """
    front, behind = Simulation(sharded((1, 2), (1, 1))), Simulation(sharded((1, 1), (1, 2)))
    for simulation, sender, other, pass_, join in (
        (front, 0, 1, "0F0", "0WAIT_SEND_F0{0:4}"),
        (behind, 1, 2, "1B0", "1WAIT_SEND_B0{0:4}"),
    ):
        actions = [list(map(str, simulation.program.actions[device])) for device in (sender, other)]
        changes = [boundary_bytes(simulation, device) for device in (sender, other)]
        sent = changes[0][actions[0].index(pass_)] - changes[1][actions[1].index(pass_)]
        assert sent == -changes[0][actions[0].index(join)] > 0
        assert not any("SEND" in action for action in actions[1])
        assert sum(changes[0]) == sum(changes[1])


def test_what_fills_a_shard_is_told() -> None:
    """The contents of every device of a grid match its peak."""
    plan = sharded((2, 2), (1, 2), microbatches=2)
    trace = simulate(plan)
    for device in range(6):
        told = contents(plan, device)
        assert told is not None
        assert told.peak == trace.devices[device].peak


def test_a_stage_of_replicas_and_shards_takes_the_time_of_its_sums() -> None:
    """Each pair of equal shards sums its gradients over separate links: no pair waits for another."""
    one = Simulation(sharded((2, 1), links={"bytes_per_second": RATE})).step_seconds[-1]
    both = Simulation(sharded((2, 2), links={"bytes_per_second": RATE})).step_seconds[-1]
    assert both == pytest.approx(one)


def test_owners_among_equal_shards_take_the_time_of_owners() -> None:
    """If replicas divide optimizer state, each shard's replicas gather parameters at the same time."""
    seconds = []
    for degrees in ((2, 1), (2, 2)):
        plan = sharded(degrees, links={"bytes_per_second": RATE})
        grid = replace(plan.stages[0].grid, shard="optimizer")
        seconds.append(
            Simulation(replace(plan, stages=(replace(plan.stages[0], grid=grid),))).step_seconds[-1]
        )
    assert seconds[0] == pytest.approx(seconds[1])
