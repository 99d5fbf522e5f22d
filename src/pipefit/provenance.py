"""Where a plan comes from: its planner, what was minimised, and how close to the lowest possible value it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pipefit.errors import UsageError
from pipefit.units import format_bytes, format_seconds
from pipefit.validation import check_types

_LARGEST = 1e30  # of any unit


class Objective(StrEnum):
    """What a planner minimises, as a phrase; `unit` is the unit of its value."""

    PEAK = "peak of the fullest device, in bytes"
    PEAK_SHARE = "peak of the fullest device, as a part of its budget"
    ESTIMATED_PEAK = "estimated peak of the fullest device, in bytes"
    PARAMETERS = "parameter bytes of the heaviest stage"
    BLOCKS = "blocks of the longest stage"
    SECONDS = "seconds of the slowest stage, for one microbatch"
    STEP = "time of a step, in seconds"
    ESTIMATED_STEP = "estimated time of a step, in seconds"

    @property
    def unit(self) -> Literal["bytes", "share", "blocks", "seconds"]:
        """The unit of the value."""
        if self is Objective.PEAK_SHARE:
            return "share"
        if self is Objective.BLOCKS:
            return "blocks"
        return "seconds" if self in (Objective.SECONDS, Objective.STEP, Objective.ESTIMATED_STEP) else "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Which planner made a plan, and how good it is proven to be.

    `value` is the plan's value of `objective`, which was minimised. No plan can have a value below `bound`, which is
    equal to `value` if the planner is exact, and None if it does not know. `evaluated` is how many candidate stages,
    splits or plans it compared. `remarks` are sentences about what it tried.

    Raises:
        UsageError: a number is negative, or too large to be a size or a time.
    """

    __pydantic_config__ = {"extra": "forbid"}

    planner: str
    options: dict[str, str | int | float | bool]
    objective: Objective
    value: float
    bound: float | None
    evaluated: int
    seconds: float
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        for name, measure in (("value", self.value), ("bound", self.bound), ("seconds", self.seconds)):
            if measure is not None and not 0 <= measure < _LARGEST:
                raise UsageError(f"{name} must be a number from 0 to {_LARGEST:g}: it is a size, a share or a time")

    def __str__(self) -> str:
        took = f" in {format_seconds(self.seconds)}" if self.seconds else ""
        return " ".join((f"Planned by the {self.planner} planner{took}. {self._optimality}", *self.remarks))

    @property
    def proves_lowest_peak(self) -> bool:
        """Whether it is proven that no other split has a lower peak."""
        return self.bound == self.value and self.objective in _PEAKS

    @property
    def _optimality(self) -> str:
        what = self.objective.partition(",")[0]
        if self.bound is None or self.bound == 0 < self.value:
            return f"The {what} is {self._value}; this planner does not tell how far that is from the lowest possible."
        if self.proves_lowest_peak:
            return f"Proven optimal: no split brings the {what} below {self._value}."
        if self.bound == self.value:
            return f"It minimises only the {what}: {self._value} is the lowest possible."
        gap = 100 * (self.value / self.bound - 1)
        return f"The {what} is {self._value}, at most {gap:.1f} % above the lowest possible."

    @property
    def _value(self) -> str:
        """The value in the unit of its objective."""
        match self.objective.unit:
            case "share":
                return f"{100 * self.value:.1f} % of its budget"
            case "bytes":
                return format_bytes(round(self.value))
            case "seconds":
                return format_seconds(self.value)
            case "blocks":
                return f"{self.value:g}"


_PEAKS = (Objective.PEAK, Objective.PEAK_SHARE)  # the objectives that are true peaks, not estimates or stand-ins
