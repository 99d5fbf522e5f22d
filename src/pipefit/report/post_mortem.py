"""A post-mortem as text: what held the memory as it ran out, by category and by layer, and what would have fitted."""

from __future__ import annotations

from pipefit.plans import Plan
from pipefit.post_mortems import PostMortem
from pipefit.report.remedies import describe_remedies
from pipefit.simulator.contents import Contents, LayerContents, contents_at
from pipefit.tables import Block, Table
from pipefit.texts import counted
from pipefit.units import format_bytes

_MOST_LAYERS = 12  # that are told one by one


def describe_post_mortem(found: PostMortem) -> list[Block]:
    """What was asked for, what held the rest, layer by layer, and what would have fitted."""
    return [found.head, categories(found), *layers(found), *describe_remedies(found)]


def categories(found: PostMortem) -> Table:
    """What the bytes were used for, what was asked for included."""
    total = found.moment.total_bytes or 1
    held = sorted(found.moment.by_category.items(), key=lambda item: -item[1])
    rows = tuple((name.value, format_bytes(nbytes), f"{100 * nbytes / total:.1f} %") for name, nbytes in held)
    title = "with what was asked for" if found.asked_bytes else "at the peak of the action"
    return Table(("used for", "bytes", "share"), rows, title=title)


def layers(found: PostMortem) -> list[Block]:
    """The layers with the most bytes as the action began; nothing where the action is none of a training step."""
    told = contents_at(found.plan, found.device, found.moment)
    if told is None:
        return []
    title = f"layers, by the plan's account, as {found.moment.action} began"
    return [filled(found.plan, told, title), *([largest(found.plan, told)] if told.tensors else [])]


def filled(plan: Plan, found: Contents, title: str = "") -> Table:
    """A row for each of the fullest layers, one for all others, and one for what is left of the peak."""
    ordered = sorted(found.layers, key=lambda row: -row.total_bytes)
    rows = [_layer(plan, row) for row in ordered[:_MOST_LAYERS]]
    rest = ordered[_MOST_LAYERS:]
    if rest:
        rows.append(
            (counted(len(rest), "other"), *map(format_bytes, map(sum, zip(*map(_sizes, rest), strict=True))), "")
        )
    left = found.peak.total_bytes - sum(row.total_bytes for row in found.layers)
    rows.append((f"what {found.peak.action} adds, and buffers", format_bytes(max(0, left)), "", "", "", "", "", ""))
    state = "parameters", "half-precision copies", "gradients", "optimizer state"
    columns = ("layer", "in all", *state, "activations", "microbatches")
    table = Table(columns, tuple(rows), title=title)
    copies = any(row.copy_bytes for row in found.layers)
    return table if copies else table.part([place for place, name in enumerate(columns) if name != state[1]])


def largest(plan: Plan, found: Contents) -> Table:
    """A row for each of the activations with the most bytes, and one for all others."""
    ordered = sorted(found.tensors, key=lambda one: -one.nbytes * one.microbatches)
    rows = [
        (_named(plan, one.layer), one.operation or "handed on", " x ".join(map(str, one.shape)) or "-",
         format_bytes(one.nbytes), str(one.microbatches), format_bytes(one.nbytes * one.microbatches))
        for one in ordered[:_MOST_LAYERS]
    ]  # fmt: skip
    if rest := ordered[_MOST_LAYERS:]:
        rows.append(
            (counted(len(rest), "other"), "", "", "", "", format_bytes(sum(o.nbytes * o.microbatches for o in rest)))
        )
    columns = ("layer", "kept by", "shape", "bytes", "microbatches", "in all")
    return Table(columns, tuple(rows), title="the largest activations")


def _layer(plan: Plan, row: LayerContents) -> tuple[str, ...]:
    return (_named(plan, row.layer), *map(format_bytes, _sizes(row)), str(row.microbatches or ""))


def _named(plan: Plan, layer: int | None) -> str:
    return "from the stage before, or the data" if layer is None else plan.profile.layers[layer]


def _sizes(row: LayerContents) -> tuple[int, ...]:
    state = row.parameter_bytes, row.copy_bytes, row.gradient_bytes, row.optimizer_bytes
    return row.total_bytes, *state, row.activation_bytes
