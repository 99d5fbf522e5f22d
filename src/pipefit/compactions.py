"""What recomputing and moving tensors does for each stage of a plan: bytes that it frees, and seconds that it adds."""

from __future__ import annotations

from dataclasses import dataclass

from pipefit.errors import UsageError
from pipefit.texts import counted
from pipefit.validation import check_types


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
                f"a compaction is of a stage and one layer or more, not of stage {self.stage} and "
                f"{counted(self.layers, 'layer')}"
            )
