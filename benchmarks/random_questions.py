"""Random planning questions: uneven chains on equal and unequal devices, under every schedule. Not a benchmark itself.

A question depends only on its seed, which also counts through the classes, so that any consecutive seeds hold about as
many questions of each. The classes:

    devices     "equal"; "budgets" of one speed with unequal memory; "kinds" of two or three speeds, some also with
                unequal memory; in any order
    hosts       "fast" links to the host; "slow" ones, a tenth as fast; "uplinks" that two devices share; "machines",
                two of them joined by a slow network, with their devices numbered in turn
    schedules   GPipe, 1F1B, eager 1F1B, PipeDream, PipeDream-2BW
    memory      "loose": everything fits an even split with room to spare; "medium" and "tight": half, and a tenth, of
                the bytes that recomputation of all layers would free

Budgets are set by simulation of an even split in the order of the devices, without a planner.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Run, What
from pipefit.schema.devices import Device, DeviceKind, Host, Link, Member
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.layer_costs import LayerCost, Origin
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from support.synthetic_models import layer, measurement, profile, training, value, work

DEVICES = "equal", "kinds", "budgets", "kinds"
HOSTS = "fast", "slow", "uplinks", "machines"
SCHEDULES = "1f1b", "pipedream", "eager-1f1b", "gpipe", "pipedream-2bw"
MEMORY = {"loose": 1.3, "medium": 0.5, "tight": 0.1}

MB = 1_000_000
TFLOPS = 10e12
ROOM = 1 << 50
INPUT = Origin(kind="input", index=0)
KEPT = Origin(kind="own", index=1), Origin(kind="own", index=2)


class RandomQuestion(NamedTuple):
    """A profile, a cluster and a training, with the classes of the question."""

    seed: int
    devices: str
    hosts: str
    memory: str
    profile: ModelProfile
    cluster: Cluster
    training: Training

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.devices, self.hosts, self.training.schedule, self.memory


def random_question(seed: int) -> RandomQuestion:
    """Return the question of a seed."""
    rng = Random(seed)
    devices = DEVICES[seed % len(DEVICES)]
    hosts = HOSTS[(seed // 4) % len(HOSTS)]
    memory = (*MEMORY,)[(seed // 3) % len(MEMORY)]
    schedule = SCHEDULES[seed % len(SCHEDULES)]
    count = rng.choice((2, 3, 4, 4, 6, 8))
    blocks = rng.randint(count + 1, 4 * count)
    chain = _chain(rng, blocks)
    how = training(schedule, rng.choice((count, 2 * count, 4 * count, 3 * count + 1)))
    kinds = _kinds(rng, devices, count)
    shares = [rng.choice((0.5, 0.75, 1.0, 1.0, 1.5)) for _ in range(count)]
    if devices == "equal" or (devices == "kinds" and rng.random() < 0.5):
        shares = [1.0] * count
    ample = _cluster(rng, kinds, hosts, [ROOM] * count)
    kept, least = (_peak(chain, ample, how, recompute=again) for again in (False, True))
    base = least + MEMORY[memory] * max(kept - least, 0)
    budgets = [round(base * share) for share in shares]
    there = tuple(
        Device(kind=one.kind, memory_bytes=nbytes, host=one.host)
        for one, nbytes in zip(ample.devices, budgets, strict=True)
    )
    cluster = Cluster(
        name=f"random {seed}", backend="emulated", devices=there, hosts=ample.hosts, links=ample.links
    )
    return RandomQuestion(seed, devices, hosts, memory, chain, cluster, how)


# ---- Chains


def _chain(rng: Random, blocks: int) -> ModelProfile:
    """Draw a chain of blocks with two layers each: one that keeps much, and one that computes much."""
    like = rng.choice(("alike", "uneven", "early activations"))
    width = rng.randint(4, 16) * MB
    layers = list[LayerCost]()
    drawn = _block(rng, width, 1.0, 1.0)
    for number in range(blocks):
        if like == "uneven":
            drawn = _block(rng, width, rng.uniform(0.3, 3.0), rng.uniform(0.3, 3.0))
        elif like == "early activations":
            part = number / max(1, blocks - 1)
            drawn = _block(rng, width, 2.0 - 1.8 * part, 0.2 + 1.8 * part)
        layers += drawn
    heavy = rng.random() < 0.5  # an embedding: a large weight and little work
    if heavy:
        layers[0] = _layer(width, 2 * MB, 200 * MB, 0.02 * TFLOPS)
    loss = layer(
        (value(width), value(MB)),
        (value(4),),
        works=(work(flops=round(rng.uniform(0.0, 0.2) * TFLOPS)),) * 2 + (work(),),
    )
    sizes = [2] * blocks
    return profile(measurement(layers, loss), blocks=sizes)


def _block(rng: Random, width: int, kept: float, weight: float) -> list[LayerCost]:
    """Draw the two layers of a block, with multiples of its saved bytes and of its weights."""
    return [
        _layer(
            width,
            round(kept * rng.uniform(2.0, 8.0) * width),
            round(weight * rng.uniform(4, 12) * MB),
            rng.uniform(0.02, 0.1) * TFLOPS,
        ),
        _layer(
            width,
            round(kept * rng.uniform(0.5, 3.0) * width),
            round(weight * rng.uniform(8, 24) * MB),
            rng.uniform(0.05, 0.3) * TFLOPS,
        ),
    ]


def _layer(width: int, kept: int, weight: int, flops: float) -> LayerCost:
    """Build a layer that saves its input and `kept` further bytes in two tensors, with an Adam state."""
    part = kept // 3
    forward = work(flops=round(flops), moved_bytes=2 * width + kept)
    backward = work(flops=round(2 * flops), moved_bytes=4 * width + 2 * kept)
    return layer(
        (value(width),),
        (value(width),),
        storages=(width, part, kept - part),
        saved=(INPUT, *KEPT),
        parameter_bytes=weight,
        state_bytes=2 * weight,
        works=(forward, backward, work(moved_bytes=7 * weight)),
    )


# ---- Clusters


def _kinds(rng: Random, devices: str, count: int) -> list[DeviceKind]:
    """Draw the kind of every device."""
    speeds = [1.0]
    if devices == "kinds":
        speeds = rng.choice(([1.0, 0.5], [1.0, 0.33], [1.0, 0.8], [1.0, 0.6, 0.3]))
    kinds = [
        DeviceKind(
            name=f"{speed:g}",
            flops={"float32": speed * TFLOPS},
            memory_bandwidth=speed * 500e9,
            flops_reached={"float32": 1.0},
        )
        for speed in speeds
    ]
    result = [kinds[number % len(kinds)] for number in range(count)]
    rng.shuffle(result)
    return result


def _cluster(rng: Random, kinds: Sequence[DeviceKind], hosts: str, budgets: Sequence[int]) -> Cluster:
    """Draw hosts and links of these devices."""
    count, machines = len(kinds), 2 if hosts == "machines" else 1
    to_host = rng.choice((1e9, 2e9)) * (0.1 if hosts == "slow" else 1.0)
    near, far = rng.choice((2e9, 10e9)), rng.choice((0.1e9, 0.4e9))
    links = [
        Link(
            members=(Member.device(n), Member.host(n % machines)),
            bytes_per_second=to_host,
            latency_seconds=1e-5,
            wire=f"uplink {n // 2}" if hosts == "uplinks" else None,
        )
        for n in range(count)
    ]
    links += [
        Link(
            members=(Member.device(a), Member.device(b)),
            bytes_per_second=near if a % machines == b % machines else far,
            latency_seconds=1e-5,
        )
        for a, b in combinations(range(count), 2)
    ]
    return Cluster(
        name="random",
        backend="emulated",
        devices=tuple(
            Device(kind=kind, memory_bytes=nbytes, host=n % machines)
            for n, (kind, nbytes) in enumerate(zip(kinds, budgets, strict=True))
        ),
        hosts=(Host(memory_bytes=1 << 40, memory_bandwidth=rng.choice((20e9, 5e9))),) * machines,
        links=tuple(links),
    )


def _peak(chain: ModelProfile, cluster: Cluster, how: Training, *, recompute: bool) -> int:
    """Return the highest peak of an even split in the order of the devices."""
    count, blocks = len(cluster.devices), len(chain.blocks)
    edges = [2 * (blocks * n // count) for n in range(count + 1)]
    stages = tuple(Stage(start=a, stop=b, grid=Grid.of(n)) for n, (a, b) in enumerate(pairwise(edges)))
    every = [
        Decision(stage=s, subject=Run(start=n, stop=n + 2), what=What.RECOMPUTE)
        for s, stage in enumerate(stages)
        for n in range(stage.start, stage.stop, 2)
    ]
    decisions = tuple(every) if recompute else ()
    plan = Plan(profile=chain, cluster=cluster, training=how, stages=stages, decisions=decisions)
    return max(Simulation(plan).peak_bytes)
