"""A run that ran out of memory, as a document.

It has the device, the action, the memory by category, and the failed request.

`train` writes one from measured memory, and `certify` one from its dry run. It contains the plan, so that
`pipefit report` can show on any machine which layers held the bytes, and which plans would have fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipefit.errors import UsageError
from pipefit.schema.plan import Plan
from pipefit.schema.trace import DeviceTrace, MemorySample, Trace
from pipefit.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PostMortem:
    """A plan whose run exceeded the memory of `device`, its trace, and the `moment` of the failure.

    The moment has the bytes that would have been held if the request had succeeded. `asked_bytes` is the size
    of the one allocation that failed; 0 if unknown, as after a dry run, which goes on to the end. `sentence`
    is the error message.

    Raises:
        UsageError: the trace or the plan has no such device, or the request is larger than the moment's
            bytes.
    """

    plan: Plan
    trace: Trace
    device: int
    moment: MemorySample
    asked_bytes: int
    sentence: str

    def __post_init__(self) -> None:
        if self.device not in [trace.device for trace in self.trace.devices] or not self.plan.stages_of(
            self.device
        ):
            raise UsageError(
                f"device {self.device} is not part of this run, so it cannot have run out of memory"
            )
        if not 0 <= self.asked_bytes <= self.moment.total_bytes:
            raise UsageError(
                f"the failed allocation of {self.asked_bytes} bytes is not part of the "
                f"{self.moment.total_bytes} bytes needed at that moment"
            )

    def __repr__(self) -> str:
        """Return one line, without the plan and the trace."""
        return f"<PostMortem: device {self.device} at {self.moment.action}, {self.plan.profile.model}>"

    @property
    def traced(self) -> DeviceTrace:
        """The trace of the device that ran out of memory."""
        return next(trace for trace in self.trace.devices if trace.device == self.device)

    @property
    def budget_bytes(self) -> int:
        """The budget of the device in bytes."""
        return self.traced.budget_bytes

    @property
    def held_bytes(self) -> int:
        """The bytes held when the allocation failed; for a dry run, the peak of the action."""
        return self.moment.total_bytes - self.asked_bytes

    @property
    def left_bytes(self) -> int:
        """The bytes left on the device."""
        return max(0, self.budget_bytes - self.held_bytes)

    @property
    def lack_bytes(self) -> int:
        """The bytes that the device lacked; 0 if tensors alone would have fitted."""
        return max(0, self.moment.total_bytes - self.budget_bytes)

    @property
    def stages(self) -> str:
        """The layers of the device, in words."""
        held = (self.plan.stages[number] for number in self.plan.stages_of(self.device))
        return ", ".join(self.plan.profile.named(stage.start, stage.stop) for stage in held)

    @property
    def head(self) -> str:
        """The device, the action, and the lacking memory, in a sentence."""
        asked = f"requested {format_bytes(self.asked_bytes)} with {format_bytes(self.left_bytes)} free of"
        needed = f"needed {format_bytes(self.moment.total_bytes)} of"
        return (
            f"Device {self.device} ({self.stages}) ran out of memory at {self.moment.action} of step "
            f"{self.moment.step}: it {asked if self.asked_bytes else needed} "
            f"{format_bytes(self.budget_bytes)}."
        )


def of_dry_run(plan: Plan, trace: Trace) -> PostMortem | None:
    """Return the post-mortem of the worst device if a dry run shows that the plan does not fit.

    Returns None if the plan fits.
    """
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
