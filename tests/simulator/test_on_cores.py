"""Devices that are CPU cores: a core carries its messages, and gloo sends each tensor separately."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipefit.schema.actions import Kind, parse_action
from pipefit.schema.devices import Backend
from pipefit.schema.plan import Plan
from pipefit.simulator import simulate
from pipefit.timing import ways_of_sum
from support.pipelines import equal_profile, make_cluster, make_plan
from support.replica_profiles import gridded
from support.synthetic_models import parameter

DELAY, RATE = 0.25, 32.0


def times(plan: Plan, backend: Backend, *kinds: Kind) -> list[tuple[float, float]]:
    """Return the start and end of the first device's actions of these kinds, if all devices have this
    backend.
    """
    there = replace(plan, cluster=replace(plan.cluster, backend=backend))
    events = simulate(there, steps=1).devices[0].events
    return [(e.start_seconds, e.end_seconds) for e in events if parse_action(e.action).kind in kinds]


def test_nothing_is_computed_while_a_value_is_sent() -> None:
    """A GPU computes the first stage's forwards back to back; a core carries a message between
    two of them.
    """
    profile = equal_profile(2, forward_seconds=1.0, backward_seconds=2.0)
    cluster = make_cluster(2, bytes_per_second=RATE, latency_seconds=DELAY)
    plan = make_plan(profile, [1, 1], microbatches=3, schedule="gpipe", cluster=cluster)
    sent = DELAY + 8 / RATE
    assert times(plan, "cuda", Kind.FORWARD)[:2] == [(0.0, 1.0), (1.0, 2.0)]
    assert times(plan, "cpu", Kind.FORWARD)[:2] == [(0.0, 1.0), (1.0 + sent, 2.0 + sent)]


@pytest.mark.parametrize("count", [1, 4])
def test_every_tensor_of_a_sum_has_its_own_delays(count: int) -> None:
    """A part passes four hops of a ring of three; GPUs send all gradients of a layer together."""
    plan = gridded(3, samples=3, bytes_per_second=RATE, latency_seconds=DELAY)
    parts = tuple(parameter(f"w{number}", 32 // count) for number in range(count))
    measurements = [
        replace(one, kinds=tuple(replace(kind, parameters=parts) for kind in one.kinds))
        for one in plan.profile.measurements
    ]
    plan = replace(plan, profile=replace(plan.profile, measurements=tuple(measurements)))
    nccl = min(way.delay_seconds for way in ways_of_sum(replace(plan.cluster, backend="cuda"), range(3), 32))
    for backend, delay in (("cuda", nccl), ("cpu", 4 * count * DELAY)):
        ends = times(plan, backend, Kind.REDUCE)
        assert ends[-1][1] - ends[0][0] == pytest.approx(delay + 4 * 32 // 3 / RATE, rel=1e-4), backend


def test_who_waits_for_a_transfer_carries_it_meanwhile() -> None:
    """A core takes as long as a GPU for one microbatch over two stages, since nothing overlaps with the
    message.
    """
    cluster = make_cluster(2, bytes_per_second=RATE, latency_seconds=DELAY)
    plan = make_plan(equal_profile(2), [1, 1], microbatches=1, cluster=cluster)
    found = [
        simulate(replace(plan, cluster=replace(cluster, backend=one)), steps=1) for one in ("cuda", "cpu")
    ]
    assert found[0].step_seconds == found[1].step_seconds
