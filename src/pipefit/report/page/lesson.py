"""What if: other numbers of microbatches and devices, recomputation and faster links, computed with the page.

For every point of a small grid the split of lowest peak is planned and simulated, with one device a stage and
microbatches of what a device of the plan computes at once: what a slider does is a plan that `pipefit plan` would make
with `--objective peak --data 1 --tensor 1`, and no model of it. A grid takes a second, for models of many layers too;
endless schedules, and models of which peaks are computed one by one for ranges of blocks, have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from json import dumps
from typing import NamedTuple

from pipefit.cluster import Cluster
from pipefit.decisions import What
from pipefit.errors import PipefitError
from pipefit.planner import Options, Question, exact, solved
from pipefit.planner.joint import exact_in_time
from pipefit.plans import Plan
from pipefit.schedule.recompute_settings import Recompute
from pipefit.simulator import simulate
from pipefit.tables import kept_together
from pipefit.texts import counted
from pipefit.units import format_bytes, format_seconds

_MICROBATCHES, _DEVICES, _LINKS = (1, 4, 16), (1, 2, 4), (0.25, 1.0, 4.0)
_RECOMPUTE: tuple[Recompute, ...] = ("never", "always")
_MOST_PASSES = 1_000  # of a point: stages times microbatches


class Axes(NamedTuple):
    """The values of the four controls."""

    microbatches: tuple[int, ...]
    recompute: tuple[Recompute, ...]
    devices: tuple[int, ...]
    links: tuple[float, ...]


class Point(NamedTuple):
    """What one choice gives: the highest peak and its budget in bytes, seconds, samples per second, part of waiting."""

    peak_bytes: int
    budget_bytes: int
    step_seconds: float
    samples_per_second: float
    waiting: float


def axes_of(plan: Plan) -> Axes | None:
    """The grid of a plan, with its own number of microbatches and stages in it; None where there is none."""
    known = {one.microbatch_size for one in plan.profile.measurements if one.tensor == 1}
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
    """The samples that a device of the plan computes at once."""
    return plan.training.microbatch_size // plan.stages[0].grid.data


def _question(plan: Plan, microbatches: int, recompute: Recompute, devices: int) -> Question:
    training = replace(plan.training, batch_size=microbatches * _size(plan), microbatches=microbatches)
    options = Options(stages=devices, recompute=recompute, data=1, tensor=1, allow_infeasible=True)
    return Question(profile=plan.profile, cluster=plan.cluster, training=training, options=options)


def points(plan: Plan, axes: Axes) -> list[Point]:
    """Every point, with the links changing fastest, then devices, recomputation and microbatches."""
    return [point for choice in product(*axes[:3]) for point in _points(plan, *choice)]


def _points(plan: Plan, microbatches: int, recompute: Recompute, devices: int) -> Iterator[Point]:
    """One split, beside links of every speed."""
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


def _own(plan: Plan) -> str:
    """What the plan itself takes, beside which positions are read; nothing where it holds no prediction."""
    if plan.prediction is None:
        return ""
    pairs = zip(plan.prediction.peak_bytes, plan.cluster.budgets, strict=True)
    peak, budget = max(pairs, key=lambda pair: pair[0] / pair[1])
    moves = any(decision.what is not What.RECOMPUTE for decision in plan.decisions)
    step = format_seconds(plan.prediction.step_seconds)
    shares = any(len(stage.devices) > 1 for stage in plan.stages)
    more = [words for is_so, words in ((moves, "it moves tensors too"), (shares, "its devices share stages")) if is_so]
    return (
        f" This plan takes {format_bytes(peak)} of {format_bytes(budget)} and {step} a step"
        f"{'; ' * bool(more)}{' and '.join(more)}{', which no position does' * bool(more)}."
    )


def lesson(plan: Plan) -> str:
    """The section's content: a control for each axis, figures, and the data; empty where there is no grid."""
    axes = axes_of(plan)
    if axes is None:
        return ""
    try:
        found = points(plan, axes)
    except PipefitError:  # this plan was made by hand, of what no planner makes
        return ""
    rows = [[p.peak_bytes, p.budget_bytes, p.step_seconds, p.samples_per_second, round(p.waiting, 4)] for p in found]
    start = (
        sum(count <= plan.training.microbatches for count in axes.microbatches) - 1,
        int(any(decision.what is What.RECOMPUTE for decision in plan.decisions)),
        axes.devices.index(len(plan.stages)) if len(plan.stages) in axes.devices else 0,
        _LINKS.index(1.0),
    )
    names = ("microbatches", "recomputation", "devices", "links")
    controls = "".join(
        f'<label>{name} <input type="range" min="0" max="{len(values) - 1}" value="{place}" step="1" '
        f'data-axis="{number}" aria-describedby="whatif"><output></output></label>'
        for number, (name, values, place) in enumerate(zip(names, axes, start, strict=True))
    )
    told = [list(map(str, axes.microbatches)), list(axes.recompute), list(map(str, axes.devices))]
    told.append([f"x {factor:g}" for factor in axes.links])
    data = dumps({"axes": told, "rows": rows}, separators=(",", ":"))
    return (
        "<p>Each position is a plan for the lowest peak with one device a stage, computed when this page was made, "
        f"with microbatches of {counted(_size(plan), 'sample')}.{kept_together(_own(plan))}</p>"
        f'<div class="whatif">{controls}</div>'
        '<div class="outcome"><span>fullest</span><span class="bar"><i class="c3" id="whatif-bar"></i>'
        '<u id="whatif-cap"></u></span><span class="figure" id="whatif-peak"></span></div>'
        '<p id="whatif" role="status" aria-live="polite"></p>'
        f'<script type="application/json" id="grid">{data}</script>'
    )
