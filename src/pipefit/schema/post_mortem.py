"""A run that ran out of memory, as a document: which device, at which action, what held its bytes, what was asked for.

`train` leaves one of what its meters counted, and `certify` one of its dry run. The plan is in it, so that the layers
which held the bytes, and what would have fitted, can be told on any machine: `pipefit report` makes a page of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipefit.errors import UsageError
from pipefit.schema.plan import Plan
from pipefit.schema.trace import DeviceTrace, MemorySample, Trace
from pipefit.tables import Shown
from pipefit.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PostMortem(Shown):
    """A plan whose run passed the memory of `device`, the trace until then, and the `moment` at which it did.

    The moment has the bytes that would have been held with what was asked for. `asked_bytes` are those of the one
    allocation that failed; 0 where nobody says, as after a dry run, which goes on to the end. `sentence` is the
    error's.

    Raises:
        UsageError: the trace or the plan has no such device, or more was asked for than would have been held.
    """

    __pydantic_config__ = {"extra": "forbid"}

    plan: Plan
    trace: Trace
    device: int
    moment: MemorySample
    asked_bytes: int
    sentence: str

    def __post_init__(self) -> None:
        if self.device not in [one.device for one in self.trace.devices] or not self.plan.stages_of(self.device):
            raise UsageError(f"this run has no device {self.device} that could have run out of memory")
        if not 0 <= self.asked_bytes <= self.moment.total_bytes:
            raise UsageError(
                f"{self.asked_bytes} bytes were asked for, of {self.moment.total_bytes} that would have been held: "
                "what was asked for is a part of them"
            )

    def __repr__(self) -> str:
        """A line: the plan and the trace would be thousands."""
        return f"<PostMortem: device {self.device} at {self.moment.action}, {self.plan.profile.model}>"

    @property
    def traced(self) -> DeviceTrace:
        """The device that ran out."""
        return next(one for one in self.trace.devices if one.device == self.device)

    @property
    def budget_bytes(self) -> int:
        """What the device has."""
        return self.traced.budget_bytes

    @property
    def held_bytes(self) -> int:
        """What was held as the allocation failed; of a dry run, the peak of the action."""
        return self.moment.total_bytes - self.asked_bytes

    @property
    def left_bytes(self) -> int:
        """What was left of the device."""
        return max(0, self.budget_bytes - self.held_bytes)

    @property
    def lack_bytes(self) -> int:
        """What the device had too little; 0 where tensors alone would have fitted."""
        return max(0, self.moment.total_bytes - self.budget_bytes)

    @property
    def stages(self) -> str:
        """The layers of the device, in words."""
        held = (self.plan.stages[number] for number in self.plan.stages_of(self.device))
        return ", ".join(self.plan.profile.named(stage.start, stage.stop) for stage in held)

    @property
    def head(self) -> str:
        """Which device ran out, at which action, for want of what."""
        asked = f"asked for {format_bytes(self.asked_bytes)} with {format_bytes(self.left_bytes)} left of"
        needed = f"needs {format_bytes(self.moment.total_bytes)} of"
        return (
            f"Device {self.device} ({self.stages}) ran out of memory at {self.moment.action} of step "
            f"{self.moment.step}: it {asked if self.asked_bytes else needed} {format_bytes(self.budget_bytes)}."
        )


def of_dry_run(plan: Plan, trace: Trace) -> PostMortem | None:
    """The post-mortem of a plan that a dry run shows not to fit: of its worst device; None if it fits."""
    worst = max(trace.devices, key=lambda device: device.lack_bytes)
    if not worst.lack_bytes or worst.peak is None or not plan.stages_of(worst.device):
        return None
    over = (sample for sample in worst.memory if sample.total_bytes > worst.budget_bytes)
    return PostMortem(
        plan=plan,
        trace=trace,
        device=worst.device,
        moment=next(over, worst.peak),
        asked_bytes=0,
        sentence=worst.shortage,
    )
