"""Does it fit, on one screen: devices, precisions, replicas, what limits, and what to ask next."""

from __future__ import annotations

from collections.abc import Iterator

from pipefit.fits import Attempt
from pipefit.overviews import InPrecision, Overview, Reach, Replicated, samples_per_second
from pipefit.predictions import fullness, is_tight
from pipefit.tables import Block, Table
from pipefit.texts import counted, first_to_last
from pipefit.units import format_bytes, format_number


def describe_overview(overview: Overview, asked: str = "") -> list[Block]:
    """The answer, a row for each number of devices and for each precision, what limits, and what to ask next.

    `asked` is the model with its settings and the cluster, as a command line has them; empty in Python.
    """
    return [
        _head(overview),
        _devices(overview),
        _explained(overview),
        _precisions(overview),
        _replicated(overview),
        "\n".join([_limits(overview), *_next(overview, asked)]),
    ]


def _head(overview: Overview) -> str:
    """Yes or no in the first word, for the cluster that was asked about."""
    row, plan = overview.here, overview.here.one.plan
    where = f"{plan.profile.model} of {row.one.parameters:,} parameters on {overview.cluster}"
    least = row.one if row.one.fits else row.fastest  # larger microbatches fill what there is
    answer = "Does not fit" if least is None else "Fits, tightly" if _is_tight(least) else "Fits"
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
    """Whether there are as many microbatches on any number of devices."""
    return len({row.one.plan.training.microbatches for row in overview.reaches}) == 1


def _devices(overview: Overview) -> Table:
    """A row for each number of devices."""
    largest = overview.sizes[-1]
    rows = tuple(
        (
            str(row.devices),
            format_bytes(row.one.need_bytes),
            format_bytes(row.one.budget_bytes),
            fullness(row.one.need_bytes / row.one.budget_bytes, tight=_is_tight(row.one)),
            *(_size(one, largest) for one in row.largest),
            "-" if row.fastest is None else format_number(samples_per_second(row.fastest)),
        )
        for row in overview.reaches
    )
    columns = ("devices", "1 sample", "of budget", "full", "kept", "recomputed", "moved", "samples/s")
    return Table(columns, rows, title="largest microbatch: kept, recomputed, or moved too", spare=("of budget",))


def _explained(overview: Overview) -> str:
    """What the columns of the first table mean."""
    looked = ", ".join(map(str, overview.sizes))
    among = f"one of {looked}" if len(overview.sizes) > 1 else f"of {looked}, the one that was looked at"
    return (
        f"Peaks are those of microbatches of one sample, all kept. The largest microbatch that fits is {among}: where "
        "all is kept for the backward, where runs of layers may be recomputed, and where tensors and optimizer state "
        f"may move to the host as well.{_replicas_take_the_others(overview)}"
    )


def _replicas_take_the_others(overview: Overview) -> str:
    """That there are more devices than stages, where it is so."""
    stages, devices = overview.here.devices, len(overview.cluster.devices)
    if stages == devices:
        return ""
    return (
        f" These are pipelines of one device a stage, and this model has {counted(stages, 'stage')} at most: of "
        f"{counted(devices, 'device')} the others are for replicas, which pipefit plan chooses."
    )


def _size(one: Attempt | None, largest: int) -> str:
    """The size of a microbatch; where none larger was looked at, it may be larger."""
    if one is None:
        return "-"
    return f"{one.value} or more" if one.value == largest else str(one.value)


def _is_tight(one: Attempt) -> bool:
    return is_tight(one.plan.cluster, one.device, one.need_bytes)


def _precisions(overview: Overview) -> Table:
    """A row for each precision."""

    def row(one: InPrecision) -> tuple[str, ...]:
        fewest = "-" if one.fewest is None else str(one.fewest)
        return one.precision, format_bytes(one.state_bytes), format_bytes(one.need_bytes), fewest

    columns = ("precision", "state", "1 sample", "fewest devices")
    title = "on one device: state is parameters, gradients and optimizer state"
    return Table(columns, tuple(map(row, overview.precisions)), title=title)


def _replicated(overview: Overview) -> Table:
    """A row for each way to give every device the whole model, with a column for each number of devices."""
    found: dict[str, dict[int, Replicated]] = {}
    for one in overview.replicated:
        found.setdefault(one.way, {})[one.devices] = one
    counts = sorted({one.devices for one in overview.replicated})
    rows = tuple((way, *(_replica(own[count], overview.sizes[-1]) for count in counts)) for way, own in found.items())
    title = "the whole model on each, by arithmetic: 1 sample (largest microbatch kept)"
    return Table(("way", *(counted(count, "device") for count in counts)), rows, title=title)


def _replica(one: Replicated, largest: int) -> str:
    """What one sample needs, and the largest microbatch; with a plus where none larger was looked at."""
    size = f"{one.largest}{'+' * (one.largest == largest)}" if one.largest else "-"
    return f"{format_bytes(one.need_bytes)} ({size})"


def _limits(overview: Overview) -> str:
    """Which device limits, and what holds its bytes."""
    one = overview.limiting
    held = sorted(overview.filled.items(), key=lambda item: -item[1])[:3]
    what = ", ".join(f"{format_bytes(nbytes)} of {category.value}" for category, nbytes in held)
    size = f"With microbatches of {counted(one.value, 'sample')}, all kept, device {one.device} limits"
    holds = f"stage {one.stage} ({first_to_last(one.blocks)}) needs {format_bytes(one.need_bytes)}: {what}."
    return f"{size}: {holds}"


def _next(overview: Overview, asked: str) -> Iterator[str]:
    """What to ask for next."""
    here, best = overview.here, overview.here.fastest
    if best is not None:
        yield (
            f"Fastest of these: microbatches of {counted(best.value, 'sample')}, "
            f"{format_number(samples_per_second(best))} samples per second by {_seconds(best)} seconds."
        )
        size = best.plan.training.batch_size
        size = size if _is_fixed(overview) else size // here.devices * len(overview.cluster.devices)
        command = f"pipefit plan {asked} --batch-size {size} -o plan.json"
        yield f"Next: {command if asked else f'pipefit.plan(task, cluster, batch_size={size})'}"
        return
    yield from _ways_out(overview, here, asked)


def _seconds(best: Attempt) -> str:
    return "estimated" if best.plan.measurement.estimated else "measured"


def _ways_out(overview: Overview, here: Reach, asked: str) -> Iterator[str]:
    """What would fit, where the cluster does not hold one sample."""
    yield f"Not one sample fits: {here.one.miss}."
    more = next((row for row in overview.reaches if row.fastest is not None), None)
    if more is not None:
        yield f"{counted(more.devices, 'device')} of this kind would do{_growing(asked, 'devices')}"
    for one in overview.precisions[1:]:
        if one.fewest is not None and one.fewest <= here.devices:
            option = f"--precision {one.precision}" if asked else f'precision="{one.precision}" in the task'
            yield f"In {one.precision} it fits on {counted(one.fewest, 'device')}: {option}"
    if more is None:
        yield f"How much memory each device must have{_growing(asked, 'memory')}"


def _growing(asked: str, what: str) -> str:
    """How to ask for the least of something."""
    return f": pipefit fit {asked} --grow {what}" if asked else f": pipefit.fitting.growth.{what}"
