"""The answer to what is the largest that fits: the value, the next one that does not fit, and all that was tried.

`pipefit.fitting.certified` finds a `Fit`; `pipefit.report.fit` and `pipefit.report.page` show one. For the number of
devices and for their memory the smallest value is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from pipefit.answers import GrowthAnswer, Tried
from pipefit.plans import Plan
from pipefit.tables import Shown
from pipefit.texts import first_to_last
from pipefit.units import format_bytes

Sense = Literal["largest", "smallest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One value that was tried: its plan, the peaks of its dry run in bytes if there was one, and what a host lacks."""

    value: int
    plan: Plan
    certified_bytes: tuple[int, ...] | None = None
    shortage: str = ""

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The highest bytes of every device: those of the dry run, or else the predicted ones."""
        if self.certified_bytes is not None:
            return self.certified_bytes
        assert self.plan.prediction is not None  # planners predict
        return self.plan.prediction.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether every device and every host has the memory it needs."""
        return self.over_bytes <= 0 and not self.shortage

    @property
    def device(self) -> int:
        """The device that limits: the fullest of those that have a stage."""
        budgets = self.plan.cluster.budgets
        used = [device for stage in self.plan.stages for device in stage.devices]
        return max(used, key=lambda device: self.peak_bytes[device] / budgets[device])

    @property
    def stage(self) -> int:
        """The stage that limits: it is on that device."""
        return next(number for number, stage in enumerate(self.plan.stages) if self.device in stage.devices)

    @property
    def need_bytes(self) -> int:
        """The highest bytes of the limiting device."""
        return self.peak_bytes[self.device]

    @property
    def budget_bytes(self) -> int:
        """What the limiting device has."""
        return self.plan.cluster.budgets[self.device]

    @property
    def over_bytes(self) -> int:
        """How much the limiting device needs above what it has; negative where it has room."""
        return self.need_bytes - self.budget_bytes

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the blocks of the stage that limits; of its layers, where it ends within a block."""
        stage = self.plan.stages[self.stage]
        return self.plan.profile.span(stage.start, stage.stop)

    @property
    def miss(self) -> str:
        """Which device or host an attempt overfills, with what, and by how much."""
        if self.over_bytes <= 0:
            return self.shortage
        return (
            f"device {self.device} needs {format_bytes(self.need_bytes)} for stage {self.stage} "
            f"({first_to_last(self.blocks)}), {format_bytes(self.over_bytes)} over its "
            f"{format_bytes(self.budget_bytes)}"
        )

    @property
    def parameters(self) -> int:
        """Numbers that the model has as parameters, trainable or not; shared ones count once."""
        measurement, names = self.plan.measurement, self.plan.profile.layers
        by_layer = [{p.name: prod(p.shape) for p in cost.parameters} for cost in measurement.costs]
        again = sum(
            (len(shared.users) - 1) * by_layer[first][shared.name.removeprefix(f"{names[first]}.")]
            for shared in measurement.shared
            for first in shared.users[:1]
        )
        return sum(sum(layer.values()) for layer in by_layer) - again

    def as_json(self) -> Tried:
        """Plain data; bytes are those of the dry run where there was one."""
        return {
            "value": self.value,
            "fits": self.fits,
            "certified": self.certified_bytes is not None,
            "parameters": self.parameters,
            "peak_bytes": list(self.peak_bytes),
            "device": self.device,
            "stage": self.stage,
            "blocks": list(self.blocks),
            "budget_bytes": self.budget_bytes,
            "over_bytes": self.over_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit(Shown):
    """The `sense` value of what was `grown` that fits, and the next one, which does not.

    `beyond` is None where nothing further was allowed or where the model refused it; `refused` has its reasons.
    """

    grown: str  # a setting of the model, or batch, devices, memory
    sense: Sense
    best: Attempt
    beyond: Attempt | None
    tried: tuple[Attempt, ...]  # by rising value
    refused: dict[int, str]

    def __repr__(self) -> str:
        """A line: the plans of all that was tried would be thousands."""
        plan, value = self.best.plan, self.named(self.best.value)
        return f"<Fit: {value} is the {self.sense} that fits, {plan.profile.model} on {plan.cluster}>"

    def as_json(self) -> GrowthAnswer:
        """Plain data, the shape of `pipefit fit --json`."""
        training = self.best.plan.training
        return {
            "model": self.best.plan.profile.model,
            "cluster": self.best.plan.cluster.name,
            "grow": self.grown,
            "sense": self.sense,
            "value": self.best.value,
            "parameters": self.best.parameters,
            "microbatches": training.microbatches,
            "microbatch_size": training.microbatch_size,
            "best": self.best.as_json(),
            "beyond": None if self.beyond is None else self.beyond.as_json(),
            "tried": [attempt.as_json() for attempt in self.tried],
            "refused": {str(value): reason for value, reason in sorted(self.refused.items())},
        }

    def named(self, value: int) -> str:
        """`layers=12`, or `memory=13.50 GiB`."""
        return f"{self.grown}={named_value(self.grown, value)}"


def named_value(grown: str, value: int) -> str:
    """A value as people read it: sizes have units."""
    return format_bytes(value) if grown == "memory" else str(value)
