"""Tensors that stages of any degrees leave to hosts instead of computing them again."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from made_up import AMPLE, devices, keeping
from pipefit.decisions import What
from pipefit.devices import Host, Link
from pipefit.places import Member
from pipefit.planner import Means, Options, Question, plan
from pipefit.planner.driver import plan_of
from pipefit.planner.mixed import Mixed, mixed
from pipefit.schedule.room import shortage
from pipefit.simulator import Simulation
from pipefit.training import Training
from slice_sizes import sized

HOW = Training(batch_size=32, microbatches=8, schedule="gpipe")
BARE = Means(host=False)


def case(seed: int, rate: float, *, host_bytes: int = AMPLE, data: int | None = None) -> Question:
    """Layers of many activations on devices with less memory than what keeps all needs, and links to their host."""
    rng, number = Random(seed), 3 if data is None else 4
    count = rng.randrange(3, 6)
    widths = [rng.randrange(20, 60) for _ in range(count + 1)]
    profile = sized(keeping(rng, widths=widths, weights=[2] * count), 4, 2)
    links = [Link(members=(Member.device(n), Member.host(0)), bytes_per_second=rate) for n in range(number)]
    links.append(Link(members=tuple(map(Member.device, range(number))), bytes_per_second=1e6))
    hosts = (Host(memory_bytes=host_bytes, memory_bandwidth=1e6),)
    ample = replace(devices(*[AMPLE] * number), links=tuple(links), hosts=hosts)
    kept, lean = (
        plan(profile, ample, HOW, objective="peak", shard="none", data=data, recompute=recompute).provenance
        for recompute in ("never", "always")
    )
    assert kept and lean
    budget = int(max(kept.value, lean.value) - 1 if rng.random() < 0.5 else (kept.value + lean.value) / 2)
    cluster = replace(ample, devices=tuple(replace(one, memory_bytes=budget) for one in ample.devices))
    return Question(profile=profile, cluster=cluster, training=HOW, options=Options(shard="none", data=data))


def moves(found: Mixed) -> bool:
    return any(one.what is What.OFFLOAD for one in found.decisions)


def check(found: Mixed) -> None:
    """A plan is what it says: its seconds, its peaks, and room for all of them."""
    made = plan_of(found.question, found.split, decisions=found.decisions)
    simulation = Simulation(made)
    assert found.seconds == simulation.step_seconds[-1]
    assert found.peaks == simulation.peak_bytes
    assert all(map(int.__le__, simulation.peak_bytes, made.cluster.budgets))
    assert not shortage(made, simulation.arenas)


@pytest.mark.parametrize("rate", [1e3, 1e9])
@pytest.mark.parametrize("seed", range(6))
def test_a_host_never_makes_a_plan_of_any_degrees_slower(seed: int, rate: float) -> None:
    """With fast links and slow ones; what is found fits, and takes as long as it says."""
    asked = case(seed, rate)
    alone, found = mixed(replace(asked, means=BARE)), mixed(asked)
    assert (alone is None) == (found is None)
    if alone is not None and found is not None:
        assert found.seconds <= alone.seconds
        assert not moves(alone)
        check(found)


def test_tensors_move_where_copies_are_hidden_and_not_where_they_are_slow() -> None:
    """Tensors of several of these questions move, of replicas too; none does over a slow link."""
    found = [one for seed in range(6) if (one := mixed(case(seed, 1e9))) is not None]
    assert any(map(moves, found))
    replicas = [one for seed in range(6) if (one := mixed(case(seed, 1e9, data=2))) is not None]
    assert any(map(moves, replicas))
    for one in replicas:
        check(one)
    slow = [one for seed in range(6) if (one := mixed(case(seed, 1e3))) is not None]
    assert slow and not any(map(moves, slow))


def test_hosts_without_room_get_nothing() -> None:
    """The plan runs again instead, as without a host."""
    for seed in range(3):
        asked = case(seed, 1e9, host_bytes=1)
        found, alone = mixed(asked), mixed(replace(asked, means=BARE))
        assert (found and found.seconds) == (alone and alone.seconds)
