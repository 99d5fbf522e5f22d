"""Replicas that do the same at the same times, of which one is simulated: beside simulations of all devices."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice
from random import Random

import pytest

from pipefit.cluster import Cluster
from pipefit.cost.stage import Costs
from pipefit.decisions import Decision, Run, What
from pipefit.grids import Grid, Stage
from pipefit.plans import Plan
from pipefit.profiler import profile
from pipefit.profiles import ModelProfile
from pipefit.simulator import Simulation
from pipefit.simulator.alike import alike
from pipefit.simulator.assembled import Assembled, Parts
from pipefit.training import Training
from pipefit.zoo import build

DEVICES = 16
BEGINNING = f"""name = "made"
backend = "cuda"
kinds.slow = {{ flops = {{ float32 = 5e10 }}, memory_bandwidth = "10GB/s" }}
[[devices]]
count = {DEVICES}
kind = "slow"
memory = "1GiB"
[[hosts]]
memory = "64GiB"
"""
SWITCH = '[[links]]\nmembers = ["device*"]\nbytes_per_second = "{rate}MB/s"\nlatency_seconds = {latency}\n'
NEAR = '[[links]]\nmembers = ["device{0}-{1}"]\nbytes_per_second = "40MB/s"\nlatency_seconds = 1e-5\n'
PAIR = (
    '[[links]]\neach = "device{0}-{1}"\nto = "host0"\nwire = "pair{0}"\n'
    'bytes_per_second = "9MB/s"\nlatency_seconds = 1e-5\n'
)


@cache
def model(tied: bool) -> ModelProfile:
    """A model of 7 layers in microbatches of up to 8 samples, some of whose layers may share a parameter."""
    sizes = {"layers": 4, "hidden": 16, "heads": 2, "vocabulary": 32, "sequence": 8}
    return profile(build("gpt", **sizes, tied=tied), microbatch_size=(8, 4, 2, 1), target="cuda")


def cluster(rng: Random) -> Cluster:
    """Sixteen devices on a switch, which fast links may join in groups, or pairs with one wire to the host."""
    if rng.random() < 0.2:
        return Cluster.parse(BEGINNING + "".join(PAIR.format(at, at + 1) for at in range(0, DEVICES, 2)))
    text = BEGINNING + SWITCH.format(rate=rng.choice([1, 5, 20]), latency=rng.choice([0, 1e-5]))
    size = rng.choice([2, 4, 8, DEVICES])
    groups = range(0, DEVICES, size) if size < DEVICES else ()
    return Cluster.parse(text + "".join(NEAR.format(at, at + size - 1) for at in groups))


def plans(rng: Random) -> Iterator[Plan]:
    """Plans of stages that mostly have several replicas, as many or not, on devices in order or not."""
    while True:
        schedule = rng.choice(["1f1b", "eager-1f1b", "gpipe", "pipedream-2bw"])
        endless = schedule == "pipedream-2bw"
        profiled, stages = model(tied=not endless and rng.random() < 0.3), rng.randint(1, 5)
        alone = rng.random() < 0.3
        data = [rng.choice([1, 2, 4, 8]) for _ in range(stages)] if alone else [rng.choice([2, 4, 8])] * stages
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


def folded(plan: Plan) -> int:
    """How many devices others stand for."""
    found = alike(plan)
    return 0 if found is None else len(found.devices) - len({*found.devices.values()})


@pytest.mark.parametrize("seed", [1, 7])
def test_devices_that_stand_for_others_tell_the_same_floats(seed: int) -> None:
    """Peaks, seconds, utilisation and the times of every device's passes are those of a simulation of all devices."""
    rng, saved, kept = Random(f"alike {seed}"), 0, 0
    for plan in islice(plans(rng), 12):
        whole, found = Simulation(plan), Assembled(plan, Parts(Costs.of(plan)))
        assert found.step_seconds == whole.step_seconds, plan.stages
        assert (found.peak_bytes, found.utilisation) == (whole.peak_bytes, whole.utilisation)
        for device in plan.workers:
            ends = whole.clock.after[device]
            assert {*found.forwards_ended(device).values()} <= {*ends}
            assert {end for _, end in found.backwards_run(device).values()} <= {*ends}
        saved, kept = saved + folded(plan), kept + (not folded(plan))
    assert saved > 10
    assert kept


def test_equal_replicas_are_one() -> None:
    """Of eight replicas of two stages on a switch one is simulated; on wires that pairs share, all are."""
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
