"""Small questions whose memory limits bind, and all plans for them: the oracle of bounds and of planners for
speed.

It shares no code with planners: plans are enumerated and simulated one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product
from random import Random
from typing import NamedTuple

from pipefit.errors import UsageError
from pipefit.memory.stage import Costs
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Run, SavedTensors, What
from pipefit.schema.devices import Device, DeviceKind, Host, Link, Member, parse_place
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.layer_costs import LayerCost, Origin
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from pipefit.simulator.assembled import Assembled, Parts
from support.synthetic_models import layer, measurement, profile, training, value, work

INPUT = Origin(kind="input", index=0)
KEEP, RECOMPUTE, JOINED, HOST, PEER = "keep", "recompute", "joined", "host", "peer"
# joined: recomputed in one run with the layer before
# peer: lent by the next device, or by the first to the last
EVERY = KEEP, RECOMPUTE, JOINED, HOST, PEER
KIND = DeviceKind(name="tight", flops={"float32": 1.0}, memory_bandwidth=1.0)


class Case(NamedTuple):
    """A profile, a cluster and a training."""

    profile: ModelProfile
    cluster: Cluster
    training: Training


def keeping_layer(width: int, kept: int, weight: int, seconds: float) -> LayerCost:
    """Build a layer that saves its input and `kept` additional bytes."""
    return layer(
        (value(width),),
        (value(width),),
        storages=(width, kept),
        saved=(INPUT, Origin(kind="own", index=1)),
        parameter_bytes=weight,
        state_bytes=weight,
        seconds=seconds,
    )


def cluster(budgets: Sequence[int], *, host_rate: float, peer_rate: float) -> Cluster:
    """Build devices with a separate link to the host, and one to every other device."""
    numbers = range(len(budgets))
    up = [Link(members=(Member.device(n), Member.host(0)), bytes_per_second=host_rate) for n in numbers]
    across = [
        Link(members=(Member.device(a), Member.device(b)), bytes_per_second=peer_rate)
        for a, b in combinations(numbers, 2)
    ]
    return Cluster(
        name="tight",
        backend="emulated",
        devices=tuple(Device(kind=KIND, memory_bytes=budget) for budget in budgets),
        hosts=(Host(memory_bytes=1 << 30),),
        links=(*up, *across),
    )


def random_case(rng: Random, schedules: Sequence[str], *, layers: int = 3, most: int = 4) -> Case:
    """Draw layers that keep several times their input, on devices that cannot keep everything."""
    width = rng.randrange(1, 4)
    costs = [
        keeping_layer(width, rng.randrange(40), rng.randrange(8), float(rng.randrange(1, 5)))
        for _ in range(layers)
    ]
    found = profile(measurement(costs, layer((value(width), value(1)), (value(4),), seconds=0.5)))
    devices = rng.randrange(1, 3) if layers < 4 else 2
    count = rng.randrange(devices, most + 1)
    ample = cluster([1 << 30] * devices, host_rate=10.0, peer_rate=10.0)
    how = training(rng.choice(schedules), count)
    kept = [Simulation(plan).peak_bytes for plan in plans(Case(found, ample, how), (KEEP,))]
    most_bytes = min(max(peaks) for peaks in kept)
    rate = rng.choice((1.0, 5.0, 20.0, 100.0))
    budgets = [round(most_bytes * rng.uniform(0.45, 1.1))] * devices
    return Case(found, cluster(budgets, host_rate=rate, peer_rate=4 * rate), how)


def uneven_case(
    rng: Random, schedules: Sequence[str], *, layers: int = 3, most: int = 5, devices: int = 2
) -> Case:
    """Draw layers whose seconds depend on the device, and devices of different kinds.

    A layer is bound by its products or by its bytes, so devices may differ in their ratio of the two.
    """
    case = random_case(rng, schedules, layers=max(4, layers), most=most)
    one = case.profile.measurements[0]

    def timed(cost: LayerCost) -> LayerCost:
        forward, backward = (
            work(flops=rng.randrange(1, 9), moved_bytes=rng.choice((0, 0, 6))) for _ in range(2)
        )
        return replace(cost, forward=forward, backward=backward, update=work(moved_bytes=rng.randrange(3)))

    of = measurement([timed(cost) for cost in one.costs[:layers]], timed(one.loss))
    kinds = [
        replace(
            KIND,
            name=f"speed {n}",
            flops={"float32": rng.choice((1.0, 2.0, 3.0))},
            flops_reached={"float32": 1.0},
            memory_bandwidth=rng.choice((1.0, 2.0)),
            bandwidth_reached=1.0,
            operation_seconds=0.0,
        )
        for n in range(devices)
    ]
    there = cluster([case.cluster.budgets[0]] * devices, host_rate=5.0, peer_rate=20.0)
    there = replace(there, devices=tuple(replace(there.devices[0], kind=kind) for kind in kinds))
    return Case(profile(of), there, case.training)


def plans(case: Case, techniques: Sequence[str]) -> Iterator[Plan]:
    """Yield every split of the layers over all devices, with every technique for every layer.

    Devices are in order, or in every order if they are of several kinds.
    """
    count, devices = len(case.profile.layers), range(len(case.cluster.devices))
    alike = len({device.kind.key for device in case.cluster.devices}) == 1
    orders = [tuple(devices)] if alike else [*permutations(devices)]
    for cuts, order in product(combinations(range(1, count), len(devices) - 1), orders):
        stages = tuple(
            Stage(start=a, stop=b, grid=Grid.of(n))
            for n, (a, b) in zip(order, pairwise((0, *cuts, count)), strict=True)
        )
        for chosen in product(techniques, repeat=count):
            decisions = None if PEER in chosen and len(devices) == 1 else _decisions(stages, chosen)
            if decisions is not None:
                yield Plan(
                    profile=case.profile,
                    cluster=case.cluster,
                    training=case.training,
                    stages=stages,
                    decisions=decisions,
                )


def _decisions(stages: Sequence[Stage], chosen: Sequence[str]) -> tuple[Decision, ...] | None:
    """Return the decisions for each layer; None if a run has no layer to join."""
    found = list[Decision]()
    for number, stage in enumerate(stages):
        for n in range(stage.start, stage.stop):
            if chosen[n] == RECOMPUTE:
                found.append(Decision(stage=number, subject=Run(start=n, stop=n + 1), what=What.RECOMPUTE))
            elif chosen[n] == JOINED:
                if n == stage.start or chosen[n - 1] not in (RECOMPUTE, JOINED):
                    return None
                run = found[-1].subject
                assert isinstance(run, Run)
                found[-1] = replace(found[-1], subject=Run(start=run.start, stop=n + 1))
            elif chosen[n] in (HOST, PEER):
                lender = stages[(number + 1) % len(stages)].devices[0]
                place = parse_place("host" if chosen[n] == HOST else f"device{lender}")
                tensors = SavedTensors(tensors=((n, 1),))
                found.append(Decision(stage=number, subject=tensors, what=What.OFFLOAD, place=place))
    return tuple(found)


def fastest(case: Case, techniques: Sequence[str] = EVERY) -> float | None:
    """Return the seconds of the fastest plan that fits, reloading everything in time or one action early;
    None if none.

    Plans are assembled from the options of their stages, because there are many; the fastest is then
    simulated.
    """
    best: tuple[float, Plan] | None = None
    parts = Parts(Costs(case.profile.measurements[0], case.training))
    for plan in plans(case, techniques):
        for ahead in (0, 1):
            early = replace(plan, decisions=tuple(replace(d, ahead=ahead) for d in plan.decisions))
            try:
                found = Assembled(early, parts)
            except UsageError:  # what this schedule does not carry out
                continue
            fits = all(
                p <= d.memory_bytes for p, d in zip(found.peak_bytes, case.cluster.devices, strict=True)
            )
            if fits and (best is None or found.step_seconds[-1] < best[0]):
                best = found.step_seconds[-1], early
            if not plan.decisions:
                break
    if best is None:
        return None
    assert Simulation(best[1]).step_seconds[-1] == best[0]
    return best[0]
