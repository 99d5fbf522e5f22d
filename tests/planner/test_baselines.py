"""Plans of other systems, on small random questions: none has a lower peak than the leanest plan, and none
that fits is faster than the fastest one.

Splits come from `capture`, `alpa`, `uniform` (Megatron) and `parameters` (DeepSpeed); FSDP, ZeRO-Offload and
ZeRO-Infinity are written by hand. All are simulated, at every microbatch size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import NamedTuple

import pytest

from pipefit.errors import UsageError
from pipefit.memory.arenas import shortage
from pipefit.planner import PLANNERS, PlanOptions, Question, plan
from pipefit.planner.baselines.capture import CaptureOptions, capture
from pipefit.planner.problem import plan_of
from pipefit.planner.replicas import in_replicas
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, State, StateKind, What
from pipefit.schema.devices import Host, Link, Member, parse_place
from pipefit.schema.grids import Grid, Sharding, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Measurement, ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from pipefit.timing import layer_seconds
from support.gallery_samples import sampled, seeds
from support.microbatch_size_profiles import sized
from support.synthetic_models import AMPLE, devices, even, keeping, plain, skewed

BATCH, SIZES = 16, (4, 2, 1)
NEARLY = 1.01  # joint looks for state at hosts where it may gain more than a hundredth
HOSTED: dict[str, tuple[Sharding, tuple[tuple[What, StateKind], ...]]] = {
    "fsdp": ("parameters", ()),
    "offload": ("gradients", ((What.UPDATE, "optimizer"),)),
    "infinity": ("parameters", ((What.OFFLOAD, "optimizer"), (What.OFFLOAD, "parameters"))),
}


class Case(NamedTuple):
    """A profile, and a cluster with ample memory."""

    profile: ModelProfile
    cluster: Cluster


def case(seed: int) -> Case:
    """Draw a few layers of any kind and two to four devices with random links to each other
    and their host.
    """
    rng = Random(seed)
    layers, number = rng.randrange(2, 6), rng.randrange(2, 5)
    made = rng.choice((plain, even, skewed, weighty))(rng, layers)
    members = tuple(Member.device(n) for n in range(number))
    bare, profile = devices(*[AMPLE] * number), sized(made, *SIZES)
    alone = Training(batch_size=1, microbatches=1)
    times = layer_seconds(profile.at(1), bare.devices[0].kind, alone)
    passes = sum(one.forward + one.backward for one in times)
    rates = [
        sum(sum(cost.storages) + cost.parameter_bytes for cost in made.costs) / passes * n
        for n in (0.1, 1, 10)
    ]
    links = [Link(members=(one, Member.host(0)), bytes_per_second=rng.choice(rates)) for one in members]
    links.append(Link(members=members, bytes_per_second=rng.choice(rates)))
    hosts = (Host(memory_bytes=AMPLE, memory_bandwidth=rng.choice(rates)),)
    return Case(profile, replace(bare, links=tuple(links), hosts=hosts))


def weighty(rng: Random, count: int) -> Measurement:
    """Draw layers with far more weights than activations."""
    return keeping(rng, widths=[rng.randrange(1, 9) for _ in range(count + 1)], weights=[1 << 10] * count)


def baselines(one: Case, schedule: str) -> Iterator[tuple[str, Plan]]:
    """Return the plans of all systems at all microbatch sizes, by name."""
    for size in SIZES:
        how = Training(batch_size=BATCH, microbatches=BATCH // size, schedule=schedule)
        asked = Question(profile=one.profile, cluster=one.cluster, training=how)
        splits = {"capture": lambda asked=asked: capture(asked).split}
        splits["capture early"] = lambda asked=asked: capture(asked, CaptureOptions(early_release=True)).split
        splits["alpa"] = lambda asked=asked: PLANNERS["alpa"](asked).split
        for name, made in splits.items():
            yield name, plan_of(asked, made())
        for name, data in ((name, data) for name in ("uniform", "parameters") for data in (1, 2, 4)):
            stages = min(asked.blocks, len(one.cluster.devices) // data)
            with suppress(UsageError):
                pinned = replace(asked, options=PlanOptions(data=data, stages=stages, shard="none"))
                yield name, plan_of(pinned, in_replicas(PLANNERS[name])(pinned).split)
        for name in HOSTED:
            yield from ((name, made) for made in on_all(asked, name))


def on_all(asked: Question, name: str) -> Iterator[Plan]:
    """Build plans of one stage on two or four devices that divide its state and offload it to hosts."""
    (shard, moves), layers = HOSTED[name], len(asked.profile.layers)
    for data in (2, 4):
        if data <= min(len(asked.cluster.devices), asked.training.microbatch_size):
            grid = Grid(devices=tuple(range(data)), data=data, shard=shard, buckets=layers)
            decisions = tuple(
                Decision(
                    stage=0,
                    subject=State(start=n, stop=n + 1, kind=kind),
                    what=what,
                    place=parse_place("host"),
                    ahead=1,
                )
                for what, kind in moves
                for n in range(layers)
            )
            yield Plan(
                profile=asked.profile,
                cluster=asked.cluster,
                training=asked.training,
                stages=(Stage(start=0, stop=layers, grid=grid),),
                decisions=decisions,
            )


class Simulated(NamedTuple):
    """A simulated baseline."""

    name: str
    peak: int
    seconds: float


def simulated(one: Case, schedule: str) -> list[Simulated]:
    """Simulate all baselines that can run and have room at hosts."""
    found = []
    for name, made in baselines(one, schedule):
        with suppress(UsageError):
            simulation = Simulation(made)
            if not shortage(made, simulation.arenas):
                found.append(Simulated(name, max(simulation.peak_bytes), simulation.step_seconds[-1]))
    return found


def check_peaks(seed: int) -> None:
    one = case(seed)
    known = simulated(one, "1f1b")
    for planner in ("exact", "lean"):
        made = plan(one.profile, one.cluster, batch_size=BATCH, planner=planner)
        assert made.prediction
        others = [other for other in known if planner == "lean" or other.name not in ("offload", "infinity")]
        assert max(made.prediction.peak_bytes) <= min(others, key=lambda other: other.peak).peak


def check_seconds(seed: int) -> None:
    one = case(seed)
    known, rng = simulated(one, "1f1b"), Random(seed)
    lowest, highest = min(other.peak for other in known), max(other.peak for other in known)
    for budget in (lowest, round(lowest + (highest - lowest) * rng.random() ** 2), highest):
        tight = tuple(replace(device, memory_bytes=budget) for device in one.cluster.devices)
        best = min((other for other in known if other.peak <= budget), key=lambda other: other.seconds)
        made = plan(one.profile, replace(one.cluster, devices=tight), batch_size=BATCH, schedule="1f1b")
        assert made.prediction and max(made.prediction.peak_bytes) <= budget
        assert made.prediction.step_seconds <= NEARLY * best.seconds, (best, budget)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", seeds(4, of=40))
def test_no_baseline_has_a_lower_peak_than_the_leanest_plan(seed: int) -> None:
    """No baseline has a lower peak than `exact` (all on the devices) or `lean` (state at hosts)."""
    check_peaks(seed)


@pytest.mark.gallery
@pytest.mark.parametrize("seed", sampled(range(40), often=(27,)))
def test_no_baseline_that_fits_is_faster(seed: int) -> None:
    """No baseline that fits is faster, for caps from the lowest baseline peak to the highest. Cases include
    messages that estimates leave out, and layers without parameters in buckets with layers whose state is
    offloaded alone.
    """
    check_seconds(seed)
