"""Other answers to the question of a plan that are worth knowing, with their prices: seconds a step, and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipefit.errors import UsageError
from pipefit.tables import Table
from pipefit.texts import counted
from pipefit.units import format_bytes, format_seconds
from pipefit.validation import check_types


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A plan that is better in one respect, by `what` it is the best: `leanest`, `fewest devices` or `fastest`.

    `peak_bytes` is that of its fullest device. `asked_by` are the options of `pipefit plan` that ask for it, beside
    those that the plan itself was asked with.

    Raises:
        UsageError: no stage, device or microbatch, or a negative peak or time.
    """

    __pydantic_config__ = {"extra": "forbid"}

    what: str
    schedule: str
    stages: int
    devices: int
    microbatches: int
    peak_bytes: int
    step_seconds: float
    asked_by: str

    def __post_init__(self) -> None:
        check_types(self)
        if min(self.stages, self.devices, self.microbatches) < 1 or min(self.peak_bytes, self.step_seconds) < 0:
            raise UsageError(
                f"an alternative has a stage, a device, a microbatch and a peak and a time of zero or more, not {self}"
            )


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
    return f"{100 * (one.step_seconds / step_seconds - 1):+.0f} %" if step_seconds else ""


def _line(one: Alternative, step_seconds: float) -> str:
    """What an alternative takes, how much longer its step is, and how to ask for it."""
    longer = _longer(one, step_seconds)
    by = f" ({longer})" if longer else ""
    return (
        f"{one.what.capitalize()}: {counted(one.devices, 'device')}, at most {format_bytes(one.peak_bytes)} on one, "
        f"{format_seconds(one.step_seconds)} a step{by}: {one.asked_by}"
    )
