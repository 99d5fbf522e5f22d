"""A post-mortem as text: the contents of the memory when it ran out, and plans that would fit."""

from __future__ import annotations

from pipefit.planner import Remedy, remedies
from pipefit.schema.plan import Plan, fullness, is_tight
from pipefit.schema.post_mortem import PostMortem
from pipefit.simulator import Contents, LayerContents, contents_at, simulate
from pipefit.tables import Block, Table
from pipefit.texts import counted
from pipefit.units import format_bytes, format_seconds

# ---- Plans that would have fitted, with their costs

_PRICES = (
    "Each plan has been simulated for the same batch. The price is the additional step time over the plan "
    "that ran out of memory."
)


def describe_remedies(post_mortem: PostMortem) -> list[Block]:
    """Return a row for each remedy with its price: the additional seconds of a step."""
    own = simulate(post_mortem.plan).step_seconds[-1]
    rows = tuple(_row(remedy, own) for remedy in remedies(post_mortem))
    if not rows:
        return [
            "No plan that was tried would have fitted: with recomputation, offloading or 8 times the devices."
        ]
    columns = ("what would fit", "fullest device", "full", "step", "price", "options of pipefit plan")
    training = post_mortem.plan.training
    each = (
        f"--batch-size {training.batch_size} --microbatches {training.microbatches} --schedule "
        f"{training.schedule}"
    )
    return [Table(columns, rows), f"{_PRICES} Add {each}, unless the row says otherwise."]


def _row(remedy: Remedy, own: float) -> tuple[str, ...]:
    cluster, seconds = remedy.plan.cluster, remedy.prediction.step_seconds
    peaks, budgets = remedy.prediction.peak_bytes, cluster.budgets
    share, peak, device = max((peak / budgets[number], peak, number) for number, peak in enumerate(peaks))
    full = fullness(share, tight=is_tight(cluster, device, peak))
    price = f"{100 * (seconds / own - 1):+z.1f} %" if own else "-"
    return remedy.what, format_bytes(peak), full, format_seconds(seconds), price, remedy.asked_by


# ---- The report

_MOST_LAYERS = 12  # layers that are listed individually


def describe_post_mortem(post_mortem: PostMortem) -> list[Block]:
    """Describe a post-mortem: the failed request, the contents of the memory, layer by layer, and
    remedies.
    """
    return [post_mortem.head, categories(post_mortem), *layers(post_mortem), *describe_remedies(post_mortem)]


def categories(post_mortem: PostMortem) -> Table:
    """Return the memory by category, including the failed request."""
    total = post_mortem.moment.total_bytes or 1
    held = sorted(post_mortem.moment.by_category.items(), key=lambda item: -item[1])
    rows = tuple((name.value, format_bytes(nbytes), f"{100 * nbytes / total:.1f} %") for name, nbytes in held)
    title = "with the failed request" if post_mortem.asked_bytes else "at the peak of the action"
    return Table(("used for", "bytes", "share"), rows, title=title)


def layers(post_mortem: PostMortem) -> list[Block]:
    """Return the layers with the most bytes at the start of the action.

    Returns an empty list if the action is not of a training step.
    """
    contents = contents_at(post_mortem.plan, post_mortem.device, post_mortem.moment)
    if contents is None:
        return []
    title = f"layers, by the plan's prediction, as {post_mortem.moment.action} began"
    return [
        filled(post_mortem.plan, contents, title),
        *([largest(post_mortem.plan, contents)] if contents.tensors else []),
    ]


def filled(plan: Plan, contents: Contents, title: str = "") -> Table:
    """Return a row for each of the fullest layers, one for all others, and one for the rest of the peak."""
    ordered = sorted(contents.layers, key=lambda row: -row.total_bytes)
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
    left = contents.peak.total_bytes - sum(row.total_bytes for row in contents.layers)
    rows.append(
        (f"added by {contents.peak.action}, and buffers", format_bytes(max(0, left)), "", "", "", "", "", "")
    )
    state = "parameters", "half-precision copies", "gradients", "optimizer state"
    columns = ("layer", "in all", *state, "activations", "microbatches")
    table = Table(columns, tuple(rows), title=title)
    copies = any(row.copy_bytes for row in contents.layers)
    return table if copies else table.part([place for place, name in enumerate(columns) if name != state[1]])


def largest(plan: Plan, contents: Contents) -> Table:
    """Return a row for each of the largest activations, and one for all others."""
    ordered = sorted(contents.tensors, key=lambda tensor: -tensor.nbytes * tensor.microbatches)
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
