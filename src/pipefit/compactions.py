"""What recomputing and moving tensors does for each stage of a plan: bytes that it frees, and seconds that it adds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipefit.errors import UsageError
from pipefit.tables import Table
from pipefit.units import format_bytes, format_seconds
from pipefit.validation import check_types

_HIDDEN = 1e-4  # the part of a step below which what is added is hidden behind other work


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """One technique on one stage, by what the plan would be without it.

    `what` is `recompute`, or what is moved and where to; `layers` are those that are recomputed or from which something
    is moved. Without it the device's peak would be higher by `freed_bytes` and a step shorter by `added_seconds`, both
    of which may be negative: a technique may be of no use beside the others.

    Raises:
        UsageError: no such stage, or no layers.
    """

    __pydantic_config__ = {"extra": "forbid"}

    stage: int
    what: str
    layers: int
    freed_bytes: int
    added_seconds: float

    def __post_init__(self) -> None:
        check_types(self)
        if self.stage < 0 or self.layers < 1:
            raise UsageError(
                f"a compaction is of a stage and one layer or more, not of stage {self.stage} and {self.layers} layers"
            )


def table(compactions: Sequence[Compaction], step_seconds: float) -> Iterator[Table]:
    """A row for every compaction, with the price of a byte that it frees; no table where there is none."""
    if compactions:
        columns = ("stage", "memory is freed by", "layers", "peak", "step", "a GiB costs")
        yield Table(columns, tuple(_row(one, step_seconds) for one in compactions))


def _row(one: Compaction, step_seconds: float) -> tuple[str, ...]:
    freed = f"{'-' if one.freed_bytes > 0 else '+'}{format_bytes(abs(one.freed_bytes))}" if one.freed_bytes else "none"
    what = one.what if len(one.what) <= 30 else f"{one.what[:29]}\N{HORIZONTAL ELLIPSIS}"
    head = str(one.stage), what, str(one.layers), freed
    if abs(one.added_seconds) <= _HIDDEN * step_seconds:
        return (*head, "hidden", "nothing" if one.freed_bytes > 0 else "-")
    added = format_seconds(abs(one.added_seconds))
    price = f"{format_seconds(one.added_seconds / one.freed_bytes * 2**30)}" if one.freed_bytes > 0 else "-"
    return (*head, f"{'+' if one.added_seconds > 0 else '-'}{added}", price if one.added_seconds > 0 else "-")
