"""Orders of unequal devices: the most even one against all orders, and the plans of `joint` against all plans."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise, permutations
from random import Random

import pytest

from pipefit.planner import PlanOptions, Question, joint, solved
from pipefit.planner.balance import Balance, differ, interchangeable
from pipefit.schema.cluster import Cluster
from support.synthetic_models import layer, measurement, profile, training, value, work
from support.tight_questions import cluster, fastest, keeping_layer, uneven_case


def unequal(rng: Random, speeds: list[float], schedule: str, *, blocks: int = 7) -> Question:
    """Build layers of random products on devices of these speeds, which have memory to spare."""
    costs = [
        replace(keeping_layer(1, 4, 1, 1.0), forward=work(flops=n), backward=work(flops=2 * n))
        for n in (rng.randrange(10, 30) for _ in range(blocks))
    ]
    there = cluster([1 << 40] * len(speeds), host_rate=1.0, peer_rate=1e6)
    devices = tuple(
        replace(one, kind=replace(one.kind, name=f"{speed}", flops={"float32": speed}))
        for one, speed in zip(there.devices, speeds, strict=True)
    )
    return Question(
        profile=profile(measurement(costs, layer((value(1), value(1)), (value(4),), seconds=0.0))),
        cluster=replace(there, devices=devices),
        training=training(schedule, 8),
        options=PlanOptions(stages=len(speeds)),
    )


def slowest(question: Question, edges: tuple[int, ...], devices: tuple[int, ...]) -> float:
    """Return the largest number of operations of a stage over the speed of its device."""
    costs = question.measurement.costs
    return max(
        sum(cost.forward.flops + cost.backward.flops for cost in costs[a:b])
        / question.cluster.devices[device].kind.flops["float32"]
        for (a, b), device in zip(pairwise(edges), devices, strict=True)
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(6))
def test_the_most_even_order_is_that_of_all_orders(seed: int) -> None:
    """With memory to spare and fast links, the slowest stage is about as fast as in the best of all orders and
    cuts, also if some devices are not used.
    """
    rng = Random(seed)
    speeds = [rng.choice((1.0, 2.0, 5.0)) for _ in range(rng.choice((3, 4)))] + [1.5]
    question = unequal(rng, speeds, rng.choice(("1f1b", "pipedream")))
    stages = len(speeds) - seed % 2
    question = replace(question, options=PlanOptions(stages=stages))
    assert differ(question)
    found = Balance(question).arranged(0.0)
    best = min(
        slowest(question, (0, *cuts, 7), order)
        for cuts in combinations(range(1, 7), stages - 1)
        for order in permutations(range(len(speeds)), stages)
    )
    assert sorted(set(found.devices)) == sorted(found.devices)
    assert slowest(question, found.edges, found.devices) <= 1.05 * best


def test_neighbours_share_a_machine_if_the_network_is_slow() -> None:
    """Equal devices of two machines, numbered in turn, are ordered machine by machine."""
    question = unequal(Random(0), [1.0] * 4, "1f1b", blocks=8)
    links = question.cluster.links
    far = [
        link
        if all(member.kind == "device" for member in link.members)
        and sum(member.number or 0 for member in link.members) % 2 == 0
        else replace(link, bytes_per_second=1e-1)
        for link in links
    ]
    question = replace(question, cluster=replace(question.cluster, links=tuple(far)))
    assert interchangeable(question) == ((0, 2), (1, 3))
    assert Balance(question).arranged(0.0).devices in ((0, 2, 1, 3), (1, 3, 0, 2))
    order = [stage.devices[0] for stage in solved(question, joint, name="joint").stages]
    assert [device % 2 for device in order] in ([0, 0, 1, 1], [1, 1, 0, 0])


def test_equal_devices_have_no_orders() -> None:
    """Equal devices are one group, and there is nothing to choose."""
    question = unequal(Random(0), [1.0] * 3, "1f1b")
    assert interchangeable(question) == ((0, 1, 2),)
    assert not differ(question)


def test_links_differ_only_if_messages_take_long() -> None:
    """On a DGX-1, whose devices have different links, messages of a hundredth of a stage leave devices equal."""
    question = unequal(Random(0), [1.0] * 8, "1f1b", blocks=16)
    there = Cluster.preset("dgx1-v100")
    devices = tuple(
        replace(own, kind=one.kind) for own, one in zip(there.devices, question.cluster.devices, strict=True)
    )
    question = replace(question, cluster=replace(there, devices=devices))
    assert len(interchangeable(question)) == 1
    slow = [replace(link, bytes_per_second=link.bytes_per_second * 1e-11) for link in there.links]
    slowly = replace(question, cluster=replace(there, devices=devices, links=tuple(slow)))
    assert len(interchangeable(slowly)) > 1


def test_a_thousand_devices_are_not_compared_in_all_orders() -> None:
    """The number of orders of many devices of several kinds is too large to search."""
    question = unequal(Random(0), [1.0, 2.0, 5.0], "1f1b")
    many: Cluster = replace(question.cluster, devices=question.cluster.devices * 300, links=())
    assert not differ(replace(question, cluster=many))


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(10))
def test_joint_is_about_as_fast_as_all_plans_on_unequal_devices(seed: int) -> None:
    """The plan is at most 3 % slower than the fastest of all splits, orders of the devices and techniques."""
    case = uneven_case(Random(seed), ("1f1b", "gpipe", "pipedream", "eager-1f1b"))
    best = fastest(case)
    question = Question(
        profile=case.profile,
        cluster=case.cluster,
        training=case.training,
        options=PlanOptions(stages=2, allow_infeasible=True),
    )
    made = solved(question, joint, name="joint").prediction
    assert made is not None
    assert best is None or made.step_seconds <= 1.03 * best
