"""Identical replicas that act at the same times, with one simulated for all, against simulations of all
devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from random import Random

import pytest

from pipefit.memory.stage import Costs
from pipefit.models import build
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Run, What
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from pipefit.simulator.assembled import Assembled, Parts
from pipefit.simulator.timed_program import (
    COMPUTE,
    JOIN,
    POST,
    Collected,
    TimedDevice,
    alike,
    slowest,
)
from pipefit.timing import sum_for_all, ways_of_sum
from support.known_profiles import profile

DEVICES = 16
KIND = """name = "made"
backend = "cuda"
kinds.slow = { flops = { float32 = 5e10 }, memory_bandwidth = "10GB/s" }
"""
ON_HOST = '[[devices]]\ncount = {count}\nkind = "slow"\nmemory = "1GiB"\nhost = {host}\n[[hosts]]\nmemory = "64GiB"\n'
BEGINNING = KIND + ON_HOST.format(count=DEVICES, host=0)
SWITCH = '[[links]]\nmembers = ["device*"]\nbytes_per_second = "{rate}MB/s"\nlatency_seconds = {latency}\n'
NEAR = '[[links]]\nmembers = ["device{0}-{1}"]\nbytes_per_second = "40MB/s"\nlatency_seconds = 1e-5\n'
PAIR = (
    '[[links]]\neach = "device{0}-{1}"\nto = "host0"\nwire = "pair{0}"\n'
    'bytes_per_second = "9MB/s"\nlatency_seconds = 1e-5\n'
)
DUPLEX = "duplex = {}\n"


@cache
def model(tied: bool) -> ModelProfile:
    """Build a model of 7 layers in microbatches of up to 8 samples, some with a shared parameter."""
    sizes = {"layers": 4, "hidden": 16, "heads": 2, "vocabulary": 32, "sequence": 8}
    return profile(build("gpt", **sizes, tied=tied), microbatch_size=(8, 4, 2, 1), target="cuda")


def cluster(rng: Random) -> Cluster:
    """Build sixteen devices on a switch, on a host or several, optionally in groups with fast links; or pairs
    with one wire to the host.
    """
    if rng.random() < 0.2:
        duplex = DUPLEX.format(rng.choice([1.0, 0.7]))
        return Cluster.parse(
            BEGINNING + "".join(PAIR.format(at, at + 1) + duplex for at in range(0, DEVICES, 2))
        )
    size, hosts = rng.choice([2, 4, 8, DEVICES]), rng.choice([1, 1, 2, 4, 8])
    text = KIND + "".join(ON_HOST.format(count=DEVICES // hosts, host=host) for host in range(hosts))
    text += SWITCH.format(rate=rng.choice([1, 5, 20]), latency=rng.choice([0, 1e-5, 1e-2]))
    text += DUPLEX.format(rng.choice([1.0, 0.7, 0.5]))
    groups = range(0, DEVICES, size) if size < DEVICES else ()
    near = NEAR + DUPLEX.format(rng.choice([1.0, 0.9]))
    return Cluster.parse(text + "".join(near.format(at, at + size - 1) for at in groups))


def plans(rng: Random) -> Iterator[Plan]:
    """Build plans of stages that mostly have several replicas, in equal numbers or not, on devices in order
    or not.
    """
    while True:
        schedule = rng.choice(["1f1b", "eager-1f1b", "gpipe", "pipedream-2bw"])
        endless = schedule == "pipedream-2bw"
        profiled, stages = model(tied=not endless and rng.random() < 0.3), rng.randint(1, 5)
        alone = rng.random() < 0.3
        data = (
            [rng.choice([1, 2, 4, 8]) for _ in range(stages)] if alone else [rng.choice([2, 4, 8])] * stages
        )
        if sum(data) > DEVICES:
            continue
        free = list(range(DEVICES))
        if rng.random() < 0.3:
            rng.shuffle(free)
        cuts = [0, *sorted(rng.sample(range(1, len(profiled.layers)), stages - 1)), len(profiled.layers)]
        made = list[Stage]()
        for number, count in enumerate(data):
            taken, free = tuple(free[:count]), free[count:]
            buckets = rng.choice([1, 1, 3]) if count > 1 else 1
            grid = Grid(devices=taken, data=count, buckets=buckets)
            made.append(Stage(start=cuts[number], stop=cuts[number + 1], grid=grid))
        clip = None if endless else rng.choice([None, None, 1.0])
        again = [] if endless else [n for n in range(stages) if rng.random() < 0.2]
        yield Plan(
            profile=profiled,
            cluster=cluster(rng),
            training=Training(batch_size=48, microbatches=6, schedule=schedule, clip_norm=clip),
            stages=tuple(made),
            decisions=tuple(
                Decision(stage=n, subject=Run(start=made[n].start, stop=made[n].stop), what=What.RECOMPUTE)
                for n in again
            ),
        )


def trees(plan: Plan) -> int:
    """Return the number of a plan's replica sums and agreements that use trees."""
    every = [(stage.devices, sum(stage_gradients(plan, n))) for n, stage in enumerate(plan.stages)]
    every += [(plan.workers, 4)] * plan.training.agrees
    found = (
        (ways_of_sum(plan.cluster, there, nbytes), sum_for_all(plan.cluster, there, nbytes))
        for there, nbytes in every
    )
    return sum(taken != ways[0] for ways, taken in found)


def stage_gradients(plan: Plan, number: int) -> list[int]:
    """Return the bytes of gradients of a stage's layers."""
    stage = plan.stages[number]
    return [cost.gradient_bytes for cost in plan.measured(number).costs[stage.start : stage.stop]]


def folded(plan: Plan) -> int:
    """Return the number of devices that others stand for."""
    found = alike(plan)
    return 0 if found is None else len(found.devices) - len({*found.devices.values()})


@pytest.mark.parametrize("seed", [pytest.param(3, marks=pytest.mark.gallery), 14])
def test_devices_that_stand_for_others_tell_the_same_floats(seed: int) -> None:
    """Peaks, seconds, utilisation and the times of every device's passes are those of a simulation of all
    devices.
    """
    rng, saved, kept, up = Random(f"alike {seed}"), 0, 0, 0
    for plan in islice(plans(rng), 6):
        whole, found = Simulation(plan), Assembled(plan, Parts(Costs.of(plan)))
        assert found.step_seconds == whole.step_seconds, plan.stages
        assert (found.peak_bytes, found.utilisation) == (whole.peak_bytes, whole.utilisation)
        for device in plan.workers:
            ends = whole.clock.after[device]
            assert {*found.forwards_ended(device).values()} <= {*ends}
            assert {end for _, end in found.backwards_run(device).values()} <= {*ends}
        saved, kept = saved + folded(plan), kept + (not folded(plan))
        up += folded(plan) and trees(plan)
    assert saved > 5
    assert up
    assert kept


def replicas(rng: Random) -> Plan:
    """Build a plan of one stage whose replicas divide some state, on devices in any order."""
    profiled, data = model(tied=rng.random() < 0.3), rng.choice([2, 4, 8])
    schedule = rng.choice(["1f1b", "pipedream-2bw"])
    shard = rng.choice(["optimizer", "gradients", "parameters"] if schedule == "1f1b" else ["optimizer"])
    buckets = rng.choice([1, 3, 4])
    grid = Grid(devices=tuple(rng.sample(range(DEVICES), data)), data=data, shard=shard, buckets=buckets)
    again = [n for n in range(2, 5) if rng.random() < 0.5]
    return Plan(
        profile=profiled,
        cluster=cluster(rng),
        training=Training(
            batch_size=48,
            microbatches=6,
            schedule=schedule,
            clip_norm=1.0 if schedule == "1f1b" and rng.random() < 0.3 else None,
        ),
        stages=(Stage(start=0, stop=len(profiled.layers), grid=grid),),
        decisions=tuple(
            Decision(stage=0, subject=Run(start=n, stop=n + 1), what=What.RECOMPUTE) for n in again
        ),
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(60))
def test_the_slowest_of_replicas_that_divide_state_represents_all(seed: int) -> None:
    """Steps, utilisation and times of passes are those of a simulation of all devices, to the last bit."""
    plan = replicas(Random(f"slowest {seed}"))
    whole, found = Simulation(plan), Assembled(plan, Parts(Costs.of(plan)))
    assert found.step_seconds == whole.step_seconds
    assert (found.peak_bytes, found.utilisation) == (whole.peak_bytes, whole.utilisation)
    assert sum(map(bool, found.times.clock.after)) == 1
    for device in plan.workers:
        assert {*found.forwards_ended(device).values()} <= {*whole.clock.after[device]}
        assert {end for _, end in found.backwards_run(device).values()} <= {*whole.clock.after[device]}


@pytest.mark.parametrize(
    ("passed", "backend", "expected"),
    [
        ((1.0, 1.0, 1.0), "cuda", {0: 1, 1: 1, 2: 1}),
        ((1.0, 2.0, 2.0), "cuda", {0: 0, 1: 1, 2: 1}),  # as of tensor-parallel ranks with slower links
        ((1.0, 1.0, 1.0), "cpu", {0: 0, 1: 1, 2: 2}),
    ],
)
def test_only_devices_with_equal_passes_are_represented(
    passed: tuple[float, ...], backend: str, expected: dict[int, int]
) -> None:
    """Updates may differ; times of passes are reported for every device, and a core carries collectives."""
    gather = Collected("gather", 0, 8, 1, (0, 1, 2), (8, 0, 0), reduces=False)
    timed = {
        device: TimedDevice(
            [POST, JOIN, COMPUTE, COMPUTE], [0.0, 0.0, forward, update], [0, 0, -1, -1], [gather]
        )
        for device, (forward, update) in enumerate(zip(passed, (1.0, 3.0, 2.0), strict=True))
    }
    there = replace(Cluster.parse(BEGINNING + SWITCH.format(rate=1, latency=0)), backend=backend)
    assert slowest(timed, passed.__getitem__, there) == expected


def test_collectives_that_are_ready_at_once_keep_their_order() -> None:
    """A stage's first device takes part in that stage's sum before the sum of shared parameters; the other
    stage's first device, which stands for others, takes no part in the former.
    """
    grids = (11, 7, 6, 1, 13, 0, 2, 12), (15, 3, 8, 5, 4, 10, 14, 9)
    plan = Plan(
        profile=model(tied=True),
        cluster=Cluster.parse(BEGINNING + SWITCH.format(rate=1, latency=0.01)),
        training=Training(batch_size=48, microbatches=6, schedule="gpipe"),
        stages=tuple(
            Stage(start=4 * n, stop=4 + 3 * n, grid=Grid(devices=grid, data=8, buckets=1 + 2 * n))
            for n, grid in enumerate(grids)
        ),
    )
    found = Assembled(plan, Parts(Costs.of(plan)))
    assert found.step_seconds == Simulation(plan).step_seconds
    assert folded(plan)


def test_equal_replicas_are_one() -> None:
    """On a switch one of eight replicas of two stages is simulated; on wires shared by pairs, all are."""
    plan = next(plans(Random(0)))
    grids = [Grid(devices=tuple(range(8 * n, 8 * n + 8)), data=8) for n in range(2)]
    stages = tuple(Stage(start=4 * n, stop=4 + 3 * n, grid=grid) for n, grid in enumerate(grids))
    switch = Cluster.parse(BEGINNING + SWITCH.format(rate=1, latency=0))
    pairs = Cluster.parse(BEGINNING + "".join(PAIR.format(at, at + 1) for at in range(0, DEVICES, 2)))
    for on, count in ((switch, 14), (pairs, 0)):
        made = Plan(
            profile=model(tied=False),
            cluster=on,
            training=Training(batch_size=48, microbatches=6),
            stages=stages,
        )
        assert folded(made) == count, plan
