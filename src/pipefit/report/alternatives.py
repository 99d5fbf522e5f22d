"""The alternatives to a plan, with their prices: as lines, and as rows of a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipefit.alternatives import Alternative
from pipefit.tables import Table
from pipefit.texts import counted
from pipefit.units import format_bytes, format_seconds


def paragraph(alternatives: Sequence[Alternative], step_seconds: float) -> Iterator[str]:
    """A line for each of the alternatives to a plan whose step takes so long; nothing where there is none."""
    lines = [_line(one, step_seconds) for one in alternatives]
    if lines:
        yield "\n".join(lines)


def priced(alternatives: Sequence[Alternative], step_seconds: float) -> Iterator[Table]:
    """A row for each of them; nothing where there is none."""
    if alternatives:
        columns = ("best at", "stages", "devices", "microbatches", "schedule", "fullest", "step", "longer", "ask with")
        yield Table(columns, tuple(_row(one, step_seconds) for one in alternatives))


def _row(one: Alternative, step_seconds: float) -> tuple[str, ...]:
    counts = (str(number) for number in (one.stages, one.devices, one.microbatches))
    prices = (format_bytes(one.peak_bytes), format_seconds(one.step_seconds), _longer(one, step_seconds) or "-")
    return one.what, *counts, one.schedule, *prices, one.asked_by


def _longer(one: Alternative, step_seconds: float) -> str:
    """By which part of the plan's own step that of an alternative is longer; nothing where that is not known."""
    return f"{100 * (one.step_seconds / step_seconds - 1):+z.0f} %" if step_seconds else ""


def _line(one: Alternative, step_seconds: float) -> str:
    """What an alternative takes, how much longer its step is, and how to ask for it."""
    longer = _longer(one, step_seconds)
    by = f" ({longer})" if longer else ""
    return (
        f"{one.what.capitalize()}: {counted(one.devices, 'device')}, at most {format_bytes(one.peak_bytes)} on one, "
        f"{format_seconds(one.step_seconds)} a step{by}: {one.asked_by}"
    )
