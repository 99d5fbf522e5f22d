"""Orders of devices on shared wires, against every order, and their benefit to the planner."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations
from random import Random

import pytest

from pipefit.planner import Means, PlanOptions, Question, joint, solved
from pipefit.planner.balance import DOUBLE, Balance
from pipefit.planner.improvement import spread
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, SavedTensors, What
from pipefit.schema.devices import Device, Host, Link, Member, parse_place
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.simulator import Simulation
from support.synthetic_models import layer, measurement, profile, training, value
from support.tight_questions import KIND, cluster, keeping_layer


def pairs(
    devices: int, *, links: float = 1.0, rng: Random | None = None, memory: int = 1 << 20, rate: float = 1.0
) -> Cluster:
    """Build pairs of devices that share a wire to the host; some or all pairs have links."""
    numbers = range(devices)
    up = [
        Link(members=(Member.device(n), Member.host(0)), bytes_per_second=rate, wire=f"uplink{n // 2}")
        for n in numbers
    ]
    across = [
        Link(
            members=(Member.device(a), Member.device(b)),
            bytes_per_second=float(rng.choice((1, 2)) if rng else 4),
        )
        for a in numbers
        for b in range(a)
        if rng is None or rng.random() < links
    ]
    return Cluster(
        name="pairs",
        backend="emulated",
        devices=tuple(Device(kind=KIND, memory_bytes=memory) for _ in numbers),
        hosts=(Host(memory_bytes=1 << 30),),
        links=(*up, *across),
    )


def asked(
    there: Cluster, *, schedule: str = "1f1b", layers: int = 16, state: int = 1, means: Means | None = None
) -> Question:
    """Build a chain of equal layers with one stage per device, or per layer."""
    costs = [replace(keeping_layer(1, 12, 1, 1.0), state_bytes=state) for _ in range(layers)]
    chain = profile(measurement(costs, layer((value(1), value(1)), (value(4),), seconds=0.1)))
    return Question(
        profile=chain,
        cluster=there,
        training=training(schedule, 8),
        options=PlanOptions(means=means or Means()),
    )


def by_hand(there: Cluster, order: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of neighbours without a link, and the microbatches in flight on the fullest wire."""
    linked = {frozenset(m.number for m in link.members) for link in there.links if link.wire is None}
    apart = sum(frozenset(pair) not in linked for pair in pairwise(order))
    loads = [0] * len(there.devices)
    for stage, device in enumerate(order):
        loads[device // 2] += min(8, len(order) - stage)
    return apart, max(loads)


@pytest.mark.sample(10)
@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_the_best_of_all(seed: int) -> None:
    """The order of three to six paired devices minimises neighbours without a link, then the fullest wire."""
    rng = Random(seed)
    there = pairs(rng.randrange(3, 7), links=rng.random(), rng=rng)
    found = spread(asked(there))
    best = min(by_hand(there, order) for order in permutations(range(len(there.devices))))
    natural = by_hand(there, tuple(range(len(found))))
    assert by_hand(there, found) == best or (found == tuple(range(len(found))) and best[1] >= natural[1])


def test_early_stages_share_uplinks_with_late_ones_on_a_dgx1() -> None:
    """Every uplink carries nine microbatches in flight, and every message has an NVLink of two lanes."""
    there = Cluster.preset("dgx1-v100")
    found = spread(asked(there))
    loads = [0] * 4
    for stage, device in enumerate(found):
        loads[device // 2] += 8 - stage
    assert loads == [9] * 4
    lanes = {
        frozenset(m.number for m in link.members): link.lanes for link in there.links if link.wire is None
    }
    assert [lanes.get(frozenset(pair)) for pair in pairwise(found)] == [2] * 7


@pytest.mark.parametrize("devices", [12, 16])
def test_more_than_eight_devices_are_swapped(devices: int) -> None:
    """More than eight devices are ordered by swaps, and the fullest wire is still as light as possible."""
    found = spread(asked(pairs(devices)))
    assert sorted(found) == list(range(devices))
    assert by_hand(pairs(devices), found) == (0, {12: 13, 16: 16}[devices])


def test_fewer_stages_than_devices_have_wires_of_their_own() -> None:
    """Four stages on eight paired devices, and two on sixteen, have wires to themselves."""
    for devices, stages in ((8, 4), (16, 2)):
        found = spread(asked(pairs(devices), layers=stages))
        assert len({device // 2 for device in found}) == len(found) == stages


def test_devices_keep_their_order_where_no_other_is_better() -> None:
    """Devices keep their order with private wires, equal stages in flight, no offload to hosts, or no
    mapping.
    """
    natural = tuple(range(4))
    assert spread(asked(cluster([99] * 4, host_rate=1.0, peer_rate=2.0))) == natural
    assert spread(asked(pairs(4), schedule="gpipe")) == natural
    assert spread(asked(pairs(4), means=Means(host=False))) == natural
    assert spread(asked(pairs(4), means=Means(mapping=False))) == natural
    assert spread(asked(pairs(4))) != natural


def test_what_stages_move_comes_and_goes_faster() -> None:
    """Reordering devices shortens a plan that offloads tensors of the first two stages."""
    there = pairs(4, rate=5.0)
    question, order = asked(there), spread(asked(there))
    away = [SavedTensors(tensors=tuple((layer, 1) for layer in layers)) for layers in ((0, 1, 2), (4, 5, 6))]
    decisions = tuple(
        Decision(stage=n, subject=tensors, what=What.OFFLOAD, place=parse_place("host"), ahead=1)
        for n, tensors in enumerate(away)
    )
    seconds = []
    for devices in (order, range(4)):
        stages = tuple(Stage(start=4 * s, stop=4 * s + 4, grid=Grid.of(d)) for s, d in enumerate(devices))
        plan = Plan(
            profile=question.profile,
            cluster=there,
            training=question.training,
            stages=stages,
            decisions=decisions,
        )
        seconds.append(Simulation(plan).step_seconds[-1])
    assert seconds[0] < seconds[1]


def test_the_planner_takes_the_order() -> None:
    """The planner reorders devices only if a stage offloads tensors to the host."""
    means = Means(recompute="never", peers=False)
    for memory, moves in ((90, True), (1 << 20, False)):
        question = asked(pairs(4, rate=20.0, memory=memory), layers=8, state=0, means=means)
        plan = solved(question, joint, name="joint")
        order = spread(question) if moves else (0, 1, 2, 3)
        assert (tuple(stage.grid.devices[0] for stage in plan.stages), bool(plan.decisions)) == (order, moves)


def test_even_splits_leave_out_the_state_that_hosts_have() -> None:
    """The split equals that of layers without state, on devices smaller by the state of two layers."""
    with_state, memory = asked(pairs(3, memory=350), state=50, layers=24), 350 - DOUBLE * 50
    without = asked(pairs(3, memory=memory), state=0, layers=24)
    devices = (0, 1, 2)
    for host in (0.0, 1.0):
        assert Balance(with_state, devices).split(host, states=True) == Balance(without, devices).split(host)
    assert Balance(with_state, devices).split(0.0) != Balance(without, devices).split(0.0)
