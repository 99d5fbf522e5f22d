"""What recomputing and moving tensors does for each stage of a plan, as rows of a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipefit.compactions import Compaction
from pipefit.tables import Table
from pipefit.units import format_bytes, format_seconds

_HIDDEN = 1e-4  # the part of a step below which what is added is hidden behind other work


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
