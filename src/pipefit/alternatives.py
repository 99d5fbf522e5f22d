"""Other answers to the question of a plan that are worth knowing, with their prices: seconds a step, and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from pipefit.errors import UsageError
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
