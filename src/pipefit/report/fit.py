"""Answers about fit as text: the overview of `pipefit fit`, and the largest value that fits."""

from __future__ import annotations

from collections.abc import Iterator

from pipefit.report.plan import told_sharing
from pipefit.schema.decisions import State, What
from pipefit.schema.fit import (
    Attempt,
    Fit,
    InPrecision,
    Overview,
    Reach,
    Replicated,
    named_value,
    refusal,
    samples_per_second,
)
from pipefit.schema.grids import Grid
from pipefit.schema.plan import Plan, fullness, is_tight
from pipefit.schema.profile import samples
from pipefit.tables import Block, Table
from pipefit.texts import counted, first_to_last
from pipefit.units import format_bytes, format_number

# ---- Overview on one screen: devices, precisions, replicas, the limit, and the next command

_COARSE = 64 << 20  # bytes of a budget from which the usual step of `--grow memory`, 1 MiB, is fine enough
_LARGE_LOSS = 4  # a loss that takes more than this fraction of a budget is named if nothing fits


def describe_overview(overview: Overview, asked: str = "") -> list[Block]:
    """Describe an overview: the answer, tables of devices and precisions, the limit, and the next command.

    `asked` is the model with its settings and the cluster, as on the command line; empty in Python.
    """
    return [
        _head(overview),
        _devices(overview),
        _explained(overview),
        _precisions(overview),
        *_replicated(overview),
        "\n".join([_limits(overview), *_next(overview, asked)]),
    ]


def _head(overview: Overview) -> str:
    """Return the answer in the first words, for the requested cluster."""
    row, plan = overview.here, overview.here.one.plan
    where = f"{plan.profile.model} of {row.one.parameters:,} parameters on {overview.cluster}"
    least = row.one if row.one.fits else row.fastest  # larger microbatches fill what there is
    answer = overview.verdict.capitalize() + (", tightly" if least is not None and _is_tight(least) else "")
    lengths = plan.profile.fingerprint.lengths
    size = f"; samples of length {' and '.join(map(str, lengths))}" if lengths else ""
    fixed = _is_fixed(overview)
    number = plan.training.microbatches if fixed else plan.training.microbatches // row.devices
    each = counted(number, "microbatch") + ("" if fixed else " for each device")
    return (
        f"{answer}: {where}\n{plan.training.schedule}, {each}, {plan.training.precision}, kernels of "
        f"{plan.profile.assumptions.target}{size}"
    )


def _is_fixed(overview: Overview) -> bool:
    """Return whether the number of microbatches is the same for any number of devices."""
    return len({row.one.plan.training.microbatches for row in overview.reaches}) == 1


def _devices(overview: Overview) -> Table:
    """Return a row for each number of devices."""
    largest = overview.sizes[-1]
    rows = tuple(
        (
            str(row.devices),
            format_bytes(row.one.need_bytes),
            format_bytes(row.one.budget_bytes),
            fullness(row.one.need_bytes / row.one.budget_bytes, tight=_is_tight(row.one)),
            *(_size(attempt, largest) for attempt in row.largest),
            "-" if row.fastest is None else format_number(samples_per_second(row.fastest)),
        )
        for row in overview.reaches
    )
    columns = ("devices", "1 sample", "of budget", "full", "kept", "recomputed", "offloaded", "samples/s")
    return Table(
        columns, rows, title="largest microbatch: kept, recomputed, or also offloaded", spare=("of budget",)
    )


def _explained(overview: Overview) -> str:
    """Explain the columns of the first table."""
    *_, last = overview.sizes
    looked = f"{', '.join(map(str, overview.sizes))} {'sample' if last == 1 else 'samples'}"
    known = any(attempt is not None for row in overview.reaches for attempt in row.largest)
    found = f"Of microbatches of {looked}, the table has the largest with a plan that fits"
    none = f"No plan was found for microbatches of {looked}"
    return (
        f"Peaks are for microbatches of one sample with all activations kept. {found if known else none}: "
        "with all activations kept, with recomputation allowed, and with offloading of tensors and optimizer "
        f"state to the host allowed too.{_largest_first(overview)}{_replicas_take_the_others(overview)}"
    )


def _largest_first(overview: Overview) -> str:
    """Say which devices the rows of unequal clusters have; empty for equal devices."""
    return "" if overview.cluster.is_uniform else " Rows with fewer devices use those with the most memory."


def _replicas_take_the_others(overview: Overview) -> str:
    """Say that there are more devices than stages; empty if there are not."""
    devices = len(overview.cluster.devices)
    stages = max(row.devices for row in overview.reaches if row.devices <= devices)
    if stages == devices:
        return ""
    return (
        " These are pipelines of one device per stage, and this model has at most "
        f"{counted(stages, 'stage')}: the other devices of {counted(devices, 'device')} are for replicas, "
        "which pipefit plan chooses."
    )


def _size(attempt: Attempt | None, largest: int) -> str:
    """Format the size of a microbatch; the largest that was tried may not be the limit."""
    if attempt is None:
        return "-"
    return f"{attempt.value} or more" if attempt.value == largest else str(attempt.value)


def _is_tight(attempt: Attempt) -> bool:
    return is_tight(attempt.plan.cluster, attempt.device, attempt.need_bytes)


def _precisions(overview: Overview) -> Table:
    """Return a row for each precision."""

    def row(verdict: InPrecision) -> tuple[str, ...]:
        fewest = "-" if verdict.fewest is None else str(verdict.fewest)
        return verdict.precision, format_bytes(verdict.state_bytes), format_bytes(verdict.need_bytes), fewest

    columns = ("precision", "state", "1 sample", "fewest devices, kept")
    title = "on one device: state is parameters, gradients and optimizer state"
    return Table(columns, tuple(map(row, overview.precisions)), title=title)


def _replicated(overview: Overview) -> Iterator[Block]:
    """Yield a row for each way to divide the state between replicas, with and without recomputation."""
    result: dict[str, dict[bool, Replicated]] = {}
    for one in overview.replicated:
        result.setdefault(one.way, {})[one.recompute] = one
    if not result:
        return
    rows = tuple(
        (way, _replica(own.get(False)), _replica(own.get(True)), _rate(own)) for way, own in result.items()
    )
    title = f"{counted(len(overview.cluster.devices), 'replica')} of the whole model, one sample each"
    yield Table(("way", "kept", "every block recomputed", "samples/s"), rows, title=title)


def _replica(one: Replicated | None) -> str:
    """Format the bytes that the fullest device needs."""
    if one is None:
        return "-"
    return f"{'at least ' if one.is_bound else ''}{format_bytes(one.need_bytes)}"


def _rate(own: dict[bool, Replicated]) -> str:
    """Format the samples per second of the fastest of these plans that fits."""
    rates = [value.samples_per_second for value in own.values() if value.samples_per_second is not None]
    return format_number(max(rates)) if rates else "-"


def _limits(overview: Overview) -> str:
    """Describe the limiting device, and the contents of its memory."""
    attempt = overview.limiting
    held = sorted(overview.filled.items(), key=lambda item: -item[1])[:3]
    what = ", ".join(f"{format_bytes(nbytes)} of {category.value}" for category, nbytes in held)
    device = overview.cluster.largest(overview.here.devices)[attempt.device]
    size = (
        f"With microbatches of {counted(attempt.value, 'sample')} and all activations kept, device {device} "
        "limits"
    )
    stage = f"stage {attempt.stage} ({first_to_last(attempt.blocks)})"
    return f"{size}: {stage} needs {format_bytes(attempt.need_bytes)}: {what}."


def _next(overview: Overview, asked: str) -> Iterator[str]:
    """Yield the next command, or alternatives that would fit."""
    here, best, replicas = overview.here, overview.here.fastest, overview.fastest_replicas
    rate = 0.0 if best is None else samples_per_second(best)
    devices, budget = len(overview.cluster.devices), min(overview.cluster.budgets)
    if replicas is not None and (replicas.samples_per_second or 0.0) > rate:
        how = f"{replicas.way}, every block recomputed" if replicas.recompute else replicas.way
        begins = "It fits as" if best is None else "Fastest of these:"
        yield (
            f"{begins} {devices} replicas ({how}): {format_bytes(budget - replicas.need_bytes)} of each "
            f"device's {format_bytes(budget)} are free, {format_number(replicas.samples_per_second or 0)} "
            "samples per second."
        )
        yield f"Next: {_command(asked, 4 * devices)}"
    elif best is not None:
        yield (
            f"Fastest of these: microbatches of {counted(best.value, 'sample')}, "
            f"{format_number(rate)} samples per second by {_seconds(best)} seconds."
        )
        yield f"Next: {_command(asked, _batch_size(overview, best))}"
    elif overview.divided is not None and overview.divided.fits:
        attempt = overview.divided
        yield (
            f"It fits with layers divided between {_of_ranks(attempt)}"
            f"{''.join(f', {words}' for words in _techniques(attempt.plan))}: device {attempt.device} needs "
            f"{format_bytes(attempt.need_bytes)} of {format_bytes(attempt.budget_bytes)}, "
            f"{format_number(samples_per_second(attempt))} samples per second."
        )
        yield f"Next: {_command(asked, attempt.plan.training.batch_size, attempt.plan.stages[0].grid)}"
    else:
        yield from _ways_out(overview, here, asked)


def _of_ranks(attempt: Attempt) -> str:
    """Return the tensor-parallel ranks of a plan in words."""
    grid = attempt.plan.stages[0].grid
    along = " with sequence parallelism" if grid.sequences else ""
    return f"{counted(grid.tensor, 'tensor-parallel rank')}{along}"


def _batch_size(overview: Overview, attempt: Attempt) -> int:
    """Return the samples of a step in microbatches of this size on all devices."""
    size, devices = attempt.plan.training.batch_size, len(overview.cluster.devices)
    return size if _is_fixed(overview) else size // overview.here.devices * devices


def _command(asked: str, size: int, grid: Grid | None = None) -> str:
    """Return the command, or the call, that plans a batch of this size, with the ranks of a grid."""
    option, argument = (f" --tensor {grid.tensor}", f", tensor={grid.tensor}") if grid else ("", "")
    if grid is not None and grid.sequences:
        option, argument = f"{option} --sequences", f"{argument}, sequences=True"
    command = f"pipefit plan {asked} --batch-size {size}{option} -o plan.json"
    return command if asked else f"pipefit.plan(task, cluster, batch_size={size}{argument})"


def _seconds(best: Attempt) -> str:
    return "estimated" if best.plan.measurement.estimated else "measured"


def _ways_out(overview: Overview, here: Reach, asked: str) -> Iterator[str]:
    """Yield alternatives that would fit, if the cluster does not hold one sample."""
    if overview.impossible:
        yield f"One sample does not fit: {overview.impossible}."
    else:
        others = ["replicas with ZeRO-1 to 3"] if overview.replicated else []
        others += [] if overview.divided is None else [_of_ranks(overview.divided)]
        also = f", and {' and '.join(others)} in the same three ways" if others else ""
        yield (
            "Tried, without a plan that fits one sample: pipelines of one device per stage, with "
            f"activations kept, recomputed by block, and offloaded to hosts{also}."
        )
        command = _command(asked, _batch_size(overview, here.one))
        yield f"Not tried: microbatches of several samples, and a search of full length: {command}"
    if overview.loss_bytes > here.one.budget_bytes // _LARGE_LOSS:
        yield (
            f"The loss alone needs {format_bytes(overview.loss_bytes)} of one device for one sample: "
            "compute it in chunks of positions (a chunked cross entropy), so that not all logits are in "
            "memory at once."
        )
    more = next((row for row in overview.reaches if row.fastest is not None), None)
    if more is not None:
        yield f"{counted(more.devices, 'device')} of this kind would suffice{_growing(asked, 'devices')}"
    for verdict in overview.precisions[1:]:
        if verdict.fewest is not None and verdict.fewest <= here.devices:
            option = (
                f"--precision {verdict.precision}"
                if asked
                else f'precision="{verdict.precision}" in the task'
            )
            yield f"In {verdict.precision} it fits on {counted(verdict.fewest, 'device')}: {option}"
    if more is None:
        step = " --step 1KiB" if asked and here.one.budget_bytes < _COARSE else ""
        yield f"To find the memory that each device needs{_growing(asked, 'memory')}{step}"


def _growing(asked: str, what: str) -> str:
    """Return the command for the least amount of something."""
    return f": pipefit fit {asked} --grow {what}" if asked else f": pipefit.largest.growth.{what}"


# ---- The largest value that fits


def describe_fit(fit: Fit) -> list[Block]:
    """Describe a search: the answer and the request, the limit, the excess of the next value, and all
    attempts.
    """
    return ["\n".join(_fit_head(fit)), _tried(fit), "\n".join(_fit_limits(fit))]


_AWAY = {
    "": "saved tensors",
    "optimizer": "optimizer state",
    "gradients": "gradients",
    "parameters": "parameters",
    "versions": "older weights",
}  # by kind of state


def _techniques(plan: Plan) -> Iterator[str]:
    """Yield in words that a plan recomputes, what it offloads, and that hosts update."""
    kinds = {decision.what for decision in plan.decisions}
    away = {
        decision.subject.kind if isinstance(decision.subject, State) else ""
        for decision in plan.decisions
        if decision.what is What.OFFLOAD
    }
    *names, last = [name for kind, name in _AWAY.items() if kind in away] or [""]
    if What.RECOMPUTE in kinds:
        yield "recomputed"
    if last:
        yield f"offloading {', '.join(names)} and {last}" if names else f"offloading {last}"
    if What.UPDATE in kinds:
        yield "updated on the host"


def _fit_head(fit: Fit) -> Iterator[str]:
    plan = fit.best.plan
    training = plan.training
    yield f"{fit.answer}: {plan.profile.model} of {fit.best.parameters:,} parameters on {plan.cluster}"
    done = "".join(f", {words}" for words in _techniques(plan))
    size = samples(training.microbatch_size, plan.profile.fingerprint.lengths)
    yield (
        f"{training.schedule}, {counted(training.microbatches, 'microbatch')} of {size}, "
        f"{training.precision}{done}, kernels of {plan.profile.assumptions.target}"
    )


def _tried(fit: Fit) -> Table:
    """Return a row for each value, rising; with the number of parameters if it varies."""
    grows = len({attempt.parameters for attempt in fit.tried}) > 1
    rows = tuple(
        (
            named_value(fit.grown, attempt.value),
            *((f"{attempt.parameters:,}",) if grows else ()),
            format_bytes(attempt.need_bytes),
            format_bytes(attempt.budget_bytes),
            fullness(
                attempt.need_bytes / attempt.budget_bytes,
                tight=is_tight(attempt.plan.cluster, attempt.device, attempt.need_bytes),
            ),
            str(attempt.device),
            fit.verdict(attempt),
            "planned" if attempt.certified_bytes is None else "dry run",
        )
        for attempt in fit.tried
    )
    size = ("parameters",) if grows else ()
    columns = (fit.grown, *size, "peak", "of budget", "full", "device", "answer", "by")
    return Table(columns, rows, spare=("of budget",))


def _fit_limits(fit: Fit) -> Iterator[str]:
    yield from told_sharing(fit.best.plan.stages)
    best, further = fit.best, "larger" if fit.sense == "largest" else "smaller"
    yield (
        f"Device {best.device} limits: stage {best.stage} ({first_to_last(best.blocks)}) needs "
        f"{format_bytes(best.need_bytes)}, {format_bytes(-best.over_bytes)} below its budget."
    )
    if fit.beyond is not None:
        proof = fit.impossible.get(fit.beyond.value, "")
        words = refusal(fit.named(fit.beyond.value), proof, fit.beyond.nearest)
        yield f"{words if proof else words[0].upper() + words[1:]}."
        yield from [fit.searched] if fit.searched else []
        return
    larger = [value for value in fit.refused if value > best.value]
    if larger and fit.sense == "largest":
        yield f"{fit.named(min(larger))} is refused: {fit.refused[min(larger)]}."
    else:
        yield f"There was no {further} value to try."
