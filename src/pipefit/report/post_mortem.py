"""A post-mortem as text: the contents of the memory when it ran out, and plans that would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pipefit.errors import PipefitError
from pipefit.memory import missing_bytes
from pipefit.planner import plan as planned
from pipefit.schema.cluster import Cluster
from pipefit.schema.plan import Plan, fullness, is_tight
from pipefit.schema.post_mortem import PostMortem
from pipefit.schema.trace import MemorySample
from pipefit.simulator import Contents, LayerContents, Simulation, contents_at, simulate
from pipefit.tables import Block, Table
from pipefit.texts import counted
from pipefit.units import MIB, format_bytes, format_seconds

# ---- Remedies: plans for the same training that would have fitted, with their costs
#
# Every remedy is planned and simulated, for budgets that leave room for the memory that the run took beyond
# its plan's prediction: nothing on the CPU, and on a GPU the overhead of its allocator and libraries.

_PRICES = (
    "Each plan has been simulated for the same batch. The price is the additional step time over the plan "
    "that ran out of memory."
)
_MOST_DEVICES = 8  # as a multiple of the plan's devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A plan that fits, its difference in words, and the `pipefit plan` options that select it."""

    what: str
    plan: Plan
    asked_by: str


def remedies(found: PostMortem) -> list[Remedy]:
    """Return the plans that would have fitted: those for the same devices, fastest first, then others."""
    cluster = _leaving_room(found)
    same = [one for one in _on_the_same(found.plan, cluster) if _fits(one.plan)]
    same.sort(key=lambda one: _seconds(one.plan))
    return [*same, *_on_others(found.plan, cluster)]


def describe_remedies(found: PostMortem) -> list[Block]:
    """Return a row for each remedy with its price: the additional seconds of a step."""
    own = simulate(found.plan).step_seconds[-1]
    rows = tuple(_row(remedy, own) for remedy in remedies(found))
    if not rows:
        return [
            "No plan that was tried would have fitted: with recomputation, offloading or 8 times the devices."
        ]
    columns = ("what would fit", "fullest device", "full", "step", "price", "options of pipefit plan")
    training = found.plan.training
    each = (
        f"--batch-size {training.batch_size} --microbatches {training.microbatches} --schedule "
        f"{training.schedule}"
    )
    return [Table(columns, rows), f"{_PRICES} Add {each}, unless the row says otherwise."]


def _row(one: Remedy, own: float) -> tuple[str, ...]:
    made = one.plan
    peaks, budgets, seconds = _peaks(made), made.cluster.budgets, _seconds(made)
    share, peak, device = max((peak / budgets[number], peak, number) for number, peak in enumerate(peaks))
    full = fullness(share, tight=is_tight(made.cluster, device, peak))
    price = f"{100 * (seconds / own - 1):+z.1f} %" if own else "-"
    return one.what, format_bytes(peak), full, format_seconds(seconds), price, one.asked_by


def _leaving_room(found: PostMortem) -> Cluster:
    """Return the plan's cluster, with reserves for the memory that the run took beyond its prediction."""
    samples = simulate(found.plan).devices[found.device].memory
    predicted = next(
        (sample.total_bytes for sample in samples if _alike(sample, found.moment)), found.moment.total_bytes
    )
    surplus = max(0, found.moment.total_bytes - predicted)
    if found.traced.allocator is not None:
        surplus = max(surplus, found.traced.allocator.process_bytes - found.traced.allocator.requested_bytes)
    cluster = found.plan.cluster
    reserves = (max(own, -(-surplus // MIB) * MIB if surplus else 0) for own in cluster.reserves)
    sizes = (device.memory_bytes for device in cluster.devices)
    return cluster.reserving([min(one, size - 1) for one, size in zip(reserves, sizes, strict=True)])


def _alike(one: MemorySample, other: MemorySample) -> bool:
    """Return whether two samples are of the same action, of the first step or of later ones."""
    return one.action == other.action and min(one.step, 1) == min(other.step, 1)


def _on_the_same(plan: Plan, cluster: Cluster) -> Iterator[Remedy]:
    """Yield remedies for the same devices."""
    kept = _planned(plan, cluster, planner="exact")
    if kept is not None:
        yield Remedy(what="another split", plan=kept, asked_by="--objective peak")
    fastest = _planned(plan, cluster, planner="joint")
    if fastest is not None:
        yield Remedy(what=_done(fastest), plan=fastest, asked_by="--planner joint")
    leanest = _planned(plan, cluster, planner="exact", recompute="always")
    if leanest is not None:
        yield Remedy(
            what="every layer recomputed", plan=leanest, asked_by="--objective peak --recompute always"
        )
    yield from _smaller(plan, cluster)


def _smaller(plan: Plan, cluster: Cluster) -> Iterator[Remedy]:
    """Yield remedies with smaller microbatches of profiled sizes."""
    training = plan.training
    for size in sorted(
        {measurement.microbatch_size for measurement in plan.profile.measurements}, reverse=True
    ):
        if size < training.microbatch_size and training.batch_size % size == 0:
            count = training.batch_size // size
            finer = replace(
                plan, training=replace(training, microbatches=count), prediction=None, decisions=()
            )
            made = _planned(finer, cluster, planner="exact")
            if made is not None:
                options = f"--objective peak --microbatches {count}"
                yield Remedy(what=counted(count, "microbatch"), plan=made, asked_by=options)


def _on_others(plan: Plan, cluster: Cluster) -> Iterator[Remedy]:
    """Yield remedies for more devices of the largest kind, by doubling, and for the same number with more
    memory.
    """
    count = len(cluster.devices)
    largest = max(cluster.devices, key=lambda device: device.memory_bytes)
    for times in (2, 4, _MOST_DEVICES):
        more = replace(cluster, devices=cluster.devices + (largest,) * (count * (times - 1)))
        made = _planned(plan, more, planner="exact")
        if made is not None and _fits(made):
            yield Remedy(
                what=f"{times * count} devices, all activations kept", plan=made, asked_by="--objective peak"
            )
            break
    kept = _planned(plan, cluster, planner="exact")
    if kept is None or _fits(kept):
        return
    need = max(peak - budget for peak, budget in zip(_peaks(kept), cluster.budgets, strict=True))
    larger = (replace(one, memory_bytes=one.memory_bytes + need) for one in cluster.devices)
    made = replace(kept, cluster=replace(cluster, devices=tuple(larger)))
    size = format_bytes(max(device.memory_bytes for device in made.cluster.devices))
    yield Remedy(
        what=f"the same devices with {size}, all activations kept", plan=made, asked_by="--objective peak"
    )


def _planned(plan: Plan, cluster: Cluster, **options: Any) -> Plan | None:
    """Plan the same training, whether or not it fits; None if the planner fails."""
    try:
        return planned(plan.profile, cluster, plan.training, allow_infeasible=True, **options)
    except PipefitError:
        return None


def _fits(plan: Plan) -> bool:
    """Return whether every device, host and disk has room."""
    over = any(peak > budget for peak, budget in zip(_peaks(plan), plan.cluster.budgets, strict=True))
    return not over and not missing_bytes(plan, Simulation(plan).arenas)


def _peaks(plan: Plan) -> tuple[int, ...]:
    return plan.prediction.peak_bytes if plan.prediction else simulate(plan).peak_bytes


def _seconds(plan: Plan) -> float:
    return plan.prediction.step_seconds if plan.prediction else simulate(plan).step_seconds[-1]


def _done(plan: Plan) -> str:
    """Describe a plan's memory techniques."""
    kinds = {
        "recompute": "layers recomputed",
        "offload": "tensors offloaded",
        "update": "updates on the host",
    }
    done = [
        words
        for kind, words in kinds.items()
        if any(decision.what.value == kind for decision in plan.decisions)
    ]
    return f"the fastest plan: {', '.join(done)}" if done else "the fastest plan"


# ---- The report

_MOST_LAYERS = 12  # layers that are listed individually


def describe_post_mortem(found: PostMortem) -> list[Block]:
    """Describe a post-mortem: the failed request, the contents of the memory, layer by layer, and
    remedies.
    """
    return [found.head, categories(found), *layers(found), *describe_remedies(found)]


def categories(found: PostMortem) -> Table:
    """Return the memory by category, including the failed request."""
    total = found.moment.total_bytes or 1
    held = sorted(found.moment.by_category.items(), key=lambda item: -item[1])
    rows = tuple((name.value, format_bytes(nbytes), f"{100 * nbytes / total:.1f} %") for name, nbytes in held)
    title = "with the failed request" if found.asked_bytes else "at the peak of the action"
    return Table(("used for", "bytes", "share"), rows, title=title)


def layers(found: PostMortem) -> list[Block]:
    """Return the layers with the most bytes at the start of the action.

    Returns an empty list if the action is not of a training step.
    """
    told = contents_at(found.plan, found.device, found.moment)
    if told is None:
        return []
    title = f"layers, by the plan's prediction, as {found.moment.action} began"
    return [filled(found.plan, told, title), *([largest(found.plan, told)] if told.tensors else [])]


def filled(plan: Plan, found: Contents, title: str = "") -> Table:
    """Return a row for each of the fullest layers, one for all others, and one for the rest of the peak."""
    ordered = sorted(found.layers, key=lambda row: -row.total_bytes)
    rows = [_layer(plan, row) for row in ordered[:_MOST_LAYERS]]
    rest = ordered[_MOST_LAYERS:]
    if rest:
        rows.append(
            (
                counted(len(rest), "other"),
                *map(format_bytes, map(sum, zip(*map(_sizes, rest), strict=True))),
                "",
            )
        )
    left = found.peak.total_bytes - sum(row.total_bytes for row in found.layers)
    rows.append(
        (f"added by {found.peak.action}, and buffers", format_bytes(max(0, left)), "", "", "", "", "", "")
    )
    state = "parameters", "half-precision copies", "gradients", "optimizer state"
    columns = ("layer", "in all", *state, "activations", "microbatches")
    table = Table(columns, tuple(rows), title=title)
    copies = any(row.copy_bytes for row in found.layers)
    return table if copies else table.part([place for place, name in enumerate(columns) if name != state[1]])


def largest(plan: Plan, found: Contents) -> Table:
    """Return a row for each of the largest activations, and one for all others."""
    ordered = sorted(found.tensors, key=lambda one: -one.nbytes * one.microbatches)
    rows = [
        (_named(plan, one.layer), one.operation or "passed on", " x ".join(map(str, one.shape)) or "-",
         format_bytes(one.nbytes), str(one.microbatches), format_bytes(one.nbytes * one.microbatches))
        for one in ordered[:_MOST_LAYERS]
    ]  # fmt: skip
    if rest := ordered[_MOST_LAYERS:]:
        rows.append(
            (
                counted(len(rest), "other"),
                "",
                "",
                "",
                "",
                format_bytes(sum(o.nbytes * o.microbatches for o in rest)),
            )
        )
    columns = ("layer", "kept by", "shape", "bytes", "microbatches", "in all")
    return Table(columns, tuple(rows), title="the largest activations")


def _layer(plan: Plan, row: LayerContents) -> tuple[str, ...]:
    return (_named(plan, row.layer), *map(format_bytes, _sizes(row)), str(row.microbatches or ""))


def _named(plan: Plan, layer: int | None) -> str:
    return "from the previous stage, or the data" if layer is None else plan.profile.layers[layer]


def _sizes(row: LayerContents) -> tuple[int, ...]:
    state = row.parameter_bytes, row.copy_bytes, row.gradient_bytes, row.optimizer_bytes
    return row.total_bytes, *state, row.activation_bytes
