"""Memory that stages of any degree save: what they recompute, and what they offload to hosts or peers instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from random import Random

import pytest

from pipefit.memory.arenas import shortage
from pipefit.planner import Means, PlanOptions, Question, plan
from pipefit.planner.mixed_degrees import mixed as alone_mixed
from pipefit.planner.mixed_degrees import refined
from pipefit.planner.neighbours import Mixed
from pipefit.planner.problem import Split, plan_of
from pipefit.schema.decisions import Decision, Run, SavedTensors, What
from pipefit.schema.devices import Host, Link, Member, MemberKind, parse_place
from pipefit.schema.grids import Grid, Sharding
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from support.microbatch_size_profiles import sized
from support.synthetic_models import AMPLE, devices, keeping

HOW = Training(batch_size=32, microbatches=8, schedule="gpipe")
BARE, HOSTS, PEERS = Means(host=False, peers=False), Means(peers=False), Means(host=False)


def mixed(asked: Question) -> Mixed | None:
    """Return the fastest plan of any degrees, improved by the local search if it saves memory."""
    found = alone_mixed(asked)
    return found and refined(found)


def case(
    seed: int,
    rate: float,
    *,
    host_bytes: int = AMPLE,
    data: int | None = None,
    peers: float = 1e6,
    layers: range = range(3, 6),
) -> Question:
    """Build layers of many activations on devices that cannot keep all of them, with these rates to host and
    peers.
    """
    rng, number = Random(seed), 3 if data is None else 4
    count = rng.choice(layers)
    widths = [rng.randrange(20, 60) for _ in range(count + 1)]
    profile = sized(keeping(rng, widths=widths, weights=[2] * count), 4, 2)
    links = [Link(members=(Member.device(n), Member.host(0)), bytes_per_second=rate) for n in range(number)]
    links.append(Link(members=tuple(map(Member.device, range(number))), bytes_per_second=peers))
    hosts = (Host(memory_bytes=host_bytes, memory_bandwidth=1e6),)
    ample = replace(devices(*[AMPLE] * number), links=tuple(links), hosts=hosts)
    kept, lean = (
        plan(profile, ample, HOW, objective="peak", shard="none", data=data, recompute=recompute).provenance
        for recompute in ("never", "stages")
    )
    assert kept and lean
    budget = int(max(kept.value, lean.value) - 1 if rng.random() < 0.5 else (kept.value + lean.value) / 2)
    cluster = replace(ample, devices=tuple(replace(one, memory_bytes=budget) for one in ample.devices))
    return Question(
        profile=profile, cluster=cluster, training=HOW, options=PlanOptions(shard="none", data=data)
    )


def lent(
    seed: int, rate: float = 1e9, *, data: int | None = None, times: float = 4, layers: range = range(3, 6)
) -> Question:
    """Build the case with a very slow host, and `times` the memory on the last device."""
    asked = case(seed, 1e3, peers=rate, data=data, layers=layers)
    *others, last = asked.cluster.devices
    roomy = (*others, replace(last, memory_bytes=int(times * last.memory_bytes)))
    return replace(asked, cluster=replace(asked.cluster, devices=roomy)).using(PEERS)


def moves(found: Mixed, kind: MemberKind = MemberKind.HOST) -> bool:
    """Return whether tensors are offloaded to a place of a kind."""
    places = [one.place for one in found.decisions if one.what is What.OFFLOAD]
    return any(member.kind is kind for place in places if place for member in place.members)


def check(found: Mixed) -> None:
    """Check that the plan's seconds and peaks are simulated and fit."""
    made = plan_of(found.question, found.split, decisions=found.decisions)
    simulation = Simulation(made)
    assert found.seconds == simulation.step_seconds[-1]
    assert found.peaks == simulation.peak_bytes
    assert all(map(int.__le__, simulation.peak_bytes, made.cluster.budgets))
    assert not shortage(made, simulation.arenas)


@pytest.mark.sample(1)
@pytest.mark.parametrize("rate", [1e3, 1e9])
@pytest.mark.parametrize("seed", range(6))
def test_a_host_never_makes_a_plan_of_any_degrees_slower(seed: int, rate: float) -> None:
    """A host never makes a plan slower, over fast and slow links; the plan fits, with exact seconds."""
    asked = case(seed, rate)
    alone, found = mixed(asked.using(BARE)), mixed(asked)
    assert (alone is None) == (found is None)
    if alone is not None and found is not None:
        assert found.seconds <= alone.seconds
        assert not moves(alone)
        check(found)


def test_tensors_move_where_copies_are_hidden_and_not_where_they_are_slow() -> None:
    """Tensors are offloaded in several of these questions, also with replicas, but never over a slow link."""
    found = [one for seed in (1, 2, 3) if (one := mixed(case(seed, 1e9))) is not None]
    assert any(map(moves, found))
    replicas = [one for seed in (1, 3) if (one := mixed(case(seed, 1e9, data=2))) is not None]
    assert any(map(moves, replicas))
    for one in replicas:
        check(one)
    slow = [one for seed in (1, 2, 3) if (one := mixed(case(seed, 1e3))) is not None]
    assert slow and not any(map(moves, slow))


def test_hosts_without_room_get_nothing() -> None:
    """Hosts without room get nothing; the plan recomputes instead."""
    for seed in range(3):
        asked = case(seed, 1e9, host_bytes=1)
        found, alone = mixed(asked), mixed(asked.using(BARE))
        assert (found is None) == (alone is None)
        if found and alone:
            assert found.seconds <= alone.seconds
            assert not moves(found)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [1, 6, 12, 13])
def test_the_fewest_blocks_that_are_enough_move(seed: int) -> None:
    """The plan with hosts is no slower than one that offloads the fewest blocks that suffice in every
    recomputed stage, found by simulating all numbers.
    """
    asked = case(seed, 1e9)
    alone, found = mixed(asked.using(BARE)), mixed(asked.using(HOSTS))
    if alone is None:
        return
    assert found is not None
    for stage in {again.stage for again in alone.decisions}:
        others = tuple(one for one in alone.decisions if one.stage != stage)
        start, stop = alone.split.edges[stage : stage + 2]
        for end in range(start + 1, stop + 1):
            moved = (*others, *away(asked, stage, asked.edges[start], asked.edges[end]))
            simulation = Simulation(plan_of(asked, alone.split, decisions=moved))
            if all(map(int.__le__, simulation.peak_bytes, asked.cluster.budgets)):
                assert found.seconds <= simulation.step_seconds[-1] * (1 + 1e-9)
                break


def away(asked: Question, stage: int, start: int, stop: int) -> tuple[Decision, ...]:
    """Saved tensors of the layers are at the host between the next two forwards or backwards."""
    tensors = tuple(
        (layer, saved.index)
        for layer in range(start, stop)
        for saved in asked.profile.measurements[0].costs[layer].saved
        if saved.origin.kind == "own"
    )
    subject = SavedTensors(tensors=tensors)
    return (
        Decision(
            stage=stage, subject=subject, what=What.OFFLOAD, place=parse_place("host"), behind=1, ahead=1
        ),
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("rate", [1e3, 1e9])
@pytest.mark.parametrize("seed", range(6))
def test_a_peer_never_makes_a_plan_of_any_degrees_slower(seed: int, rate: float) -> None:
    """A peer never makes a plan slower, over fast and slow links; the plan and its lenders fit, with exact
    seconds.
    """
    asked = lent(seed, rate)
    alone, found = mixed(asked.using(BARE)), mixed(asked)
    assert (alone is None) == (found is None)
    if alone is not None and found is not None:
        assert found.seconds <= alone.seconds
        check(found)


@pytest.mark.gallery
def test_tensors_move_to_devices_that_have_memory_left() -> None:
    """Peers shorten the step in several of these questions, also with replicas, but never over
    a slow link.
    """
    for data in (None, 2):
        pairs = [(mixed(one), mixed(one.using(BARE))) for one in (lent(seed, data=data) for seed in range(6))]
        lending = [(found, alone) for found, alone in pairs if found and moves(found, MemberKind.DEVICE)]
        assert lending
        for found, alone in lending:
            check(found)
            assert alone and found.seconds < alone.seconds
    slow = [one for seed in range(6) if (one := mixed(lent(seed, 1e3))) is not None]
    assert slow and not any(moves(one, MemberKind.DEVICE) for one in slow)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [2, 25, 37])
def test_peers_get_as_much_as_they_have_room_for(seed: int) -> None:
    """Some blocks of a stage are offloaded and others recomputed if lenders lack room for all."""
    asked = lent(seed, times=1, layers=range(8, 13))
    alone, found = mixed(asked.using(BARE)), mixed(asked)
    assert alone and found and found.seconds < alone.seconds
    check(found)
    ways = [
        {one.what for one in found.decisions if one.stage == stage}
        for stage in range(len(found.split.devices))
    ]
    assert {What.RECOMPUTE, What.OFFLOAD} in ways


@pytest.mark.sample(2)
@pytest.mark.parametrize("shard", ["none", "optimizer", "parameters"])
@pytest.mark.parametrize("seed", range(4))
def test_replicas_recompute_the_best_blocks(seed: int, shard: Sharding) -> None:
    """Replicas of one stage recompute nearly as well as the best of all sets of blocks, whatever they divide."""
    rng, blocks = Random(seed), 6
    widths = [rng.randrange(20, 60) for _ in range(blocks + 1)]
    profile = sized(keeping(rng, widths=widths, weights=[30] * blocks), 4, 2)
    ample, how = devices(AMPLE, AMPLE), Training(batch_size=16, microbatches=4)
    grid = Grid(devices=(0, 1), data=2, shard=shard, buckets=blocks if shard == "parameters" else 1)
    split = Split((0, blocks), (0,), (grid,))
    options = PlanOptions(shard=shard, data=2, stages=1, means=BARE)
    wide = Question(profile=profile, cluster=ample, training=how, options=options)
    sets = [again for count in range(blocks + 1) for again in combinations(range(blocks), count)]
    every = {again: Simulation(plan_of(wide, split, decisions=recomputed(again))) for again in sets}
    peaks = [max(every[again].peak_bytes) for again in (sets[0], sets[-1])]
    budget = peaks[1] + (peaks[0] - peaks[1]) * 2 // 5
    fitting = [one.step_seconds[-1] for one in every.values() if max(one.peak_bytes) <= budget]
    asked = replace(wide, cluster=devices(budget, budget))
    found = mixed(asked)
    assert found is not None
    check(found)
    assert found.seconds <= min(fitting) * (1 + 1e-9)


def recomputed(blocks: Sequence[int]) -> tuple[Decision, ...]:
    """Every one of these blocks of the first stage is recomputed separately."""
    runs = [Run(start=block, stop=block + 1) for block in blocks]
    return tuple(Decision(stage=0, subject=run, what=What.RECOMPUTE) for run in runs)
