"""Plans beside a plan: for other sizes of the training and cluster, and after memory ran out.

`points` plans a small grid of the same training: microbatches, recomputation, devices, speed of links.
`remedies` plans the training of a post-mortem again, with room for the memory that the run took beyond its
prediction: nothing on the CPU, and on a GPU the overhead of its allocator and libraries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from pipefit.errors import PipefitError
from pipefit.lowering import Recompute
from pipefit.memory import missing_bytes
from pipefit.planner.driver import solved
from pipefit.planner.exact import exact
from pipefit.planner.joint import exact_in_time
from pipefit.planner.options import PlanOptions
from pipefit.planner.plans import answered
from pipefit.planner.problem import Question
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import What
from pipefit.schema.plan import Plan, Prediction
from pipefit.schema.post_mortem import PostMortem
from pipefit.schema.trace import MemorySample
from pipefit.simulator import Simulation, simulate
from pipefit.texts import counted
from pipefit.units import MIB, format_bytes

# ---- A grid of other sizes
#
# For every point of a small grid, the split of lowest peak is planned and simulated, with one device a stage
# and microbatches of a device's local batch: a slider shows the plan that `pipefit plan --objective peak
# --data 1 --tensor 1` would make. The grid is empty for asynchronous schedules, and for models whose peaks
# are computed one by one for ranges of blocks.

_MICROBATCHES, _DEVICES, _LINKS = (1, 4, 16), (1, 2, 4), (0.25, 1.0, 4.0)
_RECOMPUTE: tuple[Recompute, ...] = ("never", "always")
_MOST_PASSES = 1_000  # stages times microbatches of a point


class Axes(NamedTuple):
    """The values of the four controls."""

    microbatches: tuple[int, ...]
    recompute: tuple[Recompute, ...]
    devices: tuple[int, ...]
    links: tuple[float, ...]


class Point(NamedTuple):
    """The result of one choice.

    It has the highest peak and its budget in bytes, seconds, samples per second, and the share of idle time.
    """

    peak_bytes: int
    budget_bytes: int
    step_seconds: float
    samples_per_second: float
    waiting: float


def axes_of(plan: Plan) -> Axes | None:
    """Return the grid of a plan, including its own numbers of microbatches and stages; None if it has
    none.
    """
    known = {
        measurement.microbatch_size for measurement in plan.profile.measurements if measurement.tensor == 1
    }
    if plan.training.endless or _size(plan) not in known or not exact_in_time(_question(plan, 1, "never", 1)):
        return None
    most = min(len(plan.cluster.devices), len(plan.profile.edges) - 1)
    devices = tuple(sorted({*(count for count in _DEVICES if count <= most), min(len(plan.stages), most)}))
    return Axes(
        microbatches=tuple(
            count
            for count in sorted({*_MICROBATCHES, plan.training.microbatches})
            if count * devices[-1] <= _MOST_PASSES or count == 1
        ),
        recompute=_RECOMPUTE,
        devices=devices,
        links=_LINKS,
    )


def _size(plan: Plan) -> int:
    """Return the samples that a device of the plan computes at once."""
    return plan.training.microbatch_size // plan.stages[0].grid.data


def _question(plan: Plan, microbatches: int, recompute: Recompute, devices: int) -> Question:
    training = replace(plan.training, batch_size=microbatches * _size(plan), microbatches=microbatches)
    options = PlanOptions(stages=devices, recompute=recompute, data=1, tensor=1, allow_infeasible=True)
    return Question(profile=plan.profile, cluster=plan.cluster, training=training, options=options)


def points(plan: Plan, axes: Axes) -> list[Point]:
    """Return all points, with the links changing fastest, then devices, recomputation and microbatches."""
    return [point for choice in product(*axes[:3]) for point in _points(plan, *choice)]


def _points(plan: Plan, microbatches: int, recompute: Recompute, devices: int) -> Iterator[Point]:
    """Yield one split with links of every speed."""
    made = solved(_question(plan, microbatches, recompute, devices), exact, name="exact")
    for factor in _LINKS:
        trace = simulate(replace(made, cluster=_faster(plan.cluster, factor)))
        budgets = plan.cluster.budgets
        fullest = max(trace.devices, key=lambda device: device.peak_bytes / budgets[device.device])
        seconds = trace.step_seconds[-1]
        used = [share for share, peak in zip(trace.utilisation(), trace.peak_bytes, strict=True) if peak]
        yield Point(
            peak_bytes=fullest.peak_bytes,
            budget_bytes=budgets[fullest.device],
            step_seconds=seconds,
            samples_per_second=made.training.batch_size / seconds if seconds else 0.0,
            waiting=1 - sum(used) / len(used) if used else 0.0,
        )


def _faster(cluster: Cluster, factor: float) -> Cluster:
    links = (replace(link, bytes_per_second=link.bytes_per_second * factor) for link in cluster.links)
    return replace(cluster, links=tuple(links))


# ---- Plans that would have fitted

_MOST_DEVICES = 8  # as a multiple of the plan's devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A plan that fits, its difference in words, and the `pipefit plan` options that select it."""

    what: str
    plan: Plan
    asked_by: str

    @property
    def prediction(self) -> Prediction:
        """The predicted peaks and seconds; every planner's plan has them."""
        assert self.plan.prediction is not None
        return self.plan.prediction

    @property
    def fits(self) -> bool:
        """Whether every device, host and disk has room."""
        peaks, budgets = self.prediction.peak_bytes, self.plan.cluster.budgets
        over = any(peak > budget for peak, budget in zip(peaks, budgets, strict=True))
        return not over and not missing_bytes(self.plan, Simulation(self.plan).arenas)


def remedies(post_mortem: PostMortem) -> list[Remedy]:
    """Return the plans that would have fitted: those for the same devices, fastest first, then others."""
    cluster = _leaving_room(post_mortem)
    same = [remedy for remedy in _on_the_same(post_mortem.plan, cluster) if remedy.fits]
    same.sort(key=lambda remedy: remedy.prediction.step_seconds)
    return [*same, *_on_others(post_mortem.plan, cluster)]


def _leaving_room(post_mortem: PostMortem) -> Cluster:
    """Return the plan's cluster, with reserves for the memory that the run took beyond its prediction."""
    samples = simulate(post_mortem.plan).devices[post_mortem.device].memory
    predicted = next(
        (sample.total_bytes for sample in samples if _alike(sample, post_mortem.moment)),
        post_mortem.moment.total_bytes,
    )
    surplus = max(0, post_mortem.moment.total_bytes - predicted)
    if post_mortem.traced.allocator is not None:
        surplus = max(
            surplus, post_mortem.traced.allocator.process_bytes - post_mortem.traced.allocator.requested_bytes
        )
    cluster = post_mortem.plan.cluster
    reserves = (max(own, -(-surplus // MIB) * MIB if surplus else 0) for own in cluster.reserves)
    sizes = (device.memory_bytes for device in cluster.devices)
    return cluster.reserving([min(one, size - 1) for one, size in zip(reserves, sizes, strict=True)])


def _alike(sample: MemorySample, other: MemorySample) -> bool:
    """Return whether two samples are of the same action, of the first step or of later ones."""
    return sample.action == other.action and min(sample.step, 1) == min(other.step, 1)


def _on_the_same(plan: Plan, cluster: Cluster) -> Iterator[Remedy]:
    """Yield remedies for the same devices, whether or not they fit."""
    yield from _remedy("another split", plan, cluster, planner="exact")
    for remedy in _remedy("the fastest plan", plan, cluster, planner="joint", options="--planner joint"):
        techniques = _techniques(remedy.plan)
        yield replace(remedy, what=f"{remedy.what}: {techniques}") if techniques else remedy
    yield from _remedy("every layer recomputed", plan, cluster, planner="exact", recompute="always",
                       options="--objective peak --recompute always")  # fmt: skip
    training = plan.training
    for size in sorted(
        {measurement.microbatch_size for measurement in plan.profile.measurements}, reverse=True
    ):
        if size < training.microbatch_size and training.batch_size % size == 0:
            count = training.batch_size // size
            finer = replace(plan, training=replace(training, microbatches=count))
            yield from _remedy(counted(count, "microbatch"), finer, cluster, planner="exact",
                               options=f"--objective peak --microbatches {count}")  # fmt: skip


def _on_others(plan: Plan, cluster: Cluster) -> Iterator[Remedy]:
    """Yield remedies for more devices of the largest kind, by doubling, and for the same number with more
    memory.
    """
    count = len(cluster.devices)
    largest = max(range(count), key=lambda number: cluster.devices[number].memory_bytes)
    for times in (2, 4, _MOST_DEVICES):
        more = cluster.with_copies(largest, count * (times - 1))
        what = f"{times * count} devices, all activations kept"
        if fitting := [remedy for remedy in _remedy(what, plan, more, planner="exact") if remedy.fits]:
            yield from fitting
            break
    for kept in _remedy("", plan, cluster, planner="exact"):
        if not kept.fits:
            peaks = zip(kept.prediction.peak_bytes, cluster.budgets, strict=True)
            need = max(peak - budget for peak, budget in peaks)
            larger = tuple(replace(one, memory_bytes=one.memory_bytes + need) for one in cluster.devices)
            size = format_bytes(max(device.memory_bytes for device in larger))
            made = replace(kept.plan, cluster=replace(cluster, devices=larger))
            yield replace(kept, what=f"the same devices with {size}, all activations kept", plan=made)


def _remedy(
    what: str,
    plan: Plan,
    cluster: Cluster,
    *,
    planner: str,
    recompute: Recompute = "never",
    options: str = "--objective peak",
) -> Iterator[Remedy]:
    """Yield the plan of the same training, whether or not it fits; nothing if the planner fails."""
    asked = PlanOptions(planner=planner, recompute=recompute, allow_infeasible=True)
    with suppress(PipefitError):
        made = answered(plan.profile, cluster, plan.training, asked).plan
        yield Remedy(what=what, plan=made, asked_by=options)


def _techniques(plan: Plan) -> str:
    """Name a plan's memory techniques."""
    kinds = {
        What.RECOMPUTE: "layers recomputed",
        What.OFFLOAD: "tensors offloaded",
        What.UPDATE: "updates on the host",
    }
    used = {decision.what for decision in plan.decisions}
    return ", ".join(words for kind, words in kinds.items() if kind in used)
