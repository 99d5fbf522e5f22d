"""The answer to what is the largest that fits: the value, the next one that does not fit, and all that was tried.

`pipefit.largest.search` finds a `Fit`; `pipefit.report.fit` and `pipefit.report.page` show one. For the number of
devices and for their memory the smallest value is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from pipefit.schema.answers import FitAnswer, GrowthAnswer, OfPrecision, OfReplicas, OnDevices, Tried
from pipefit.schema.cluster import Cluster
from pipefit.schema.plan import Plan
from pipefit.schema.trace import Category
from pipefit.schema.training import Precision
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


# ----------------------------------------------------------------------------------------------------
# The answer to whether a model fits at all: on how many devices, in how large microbatches, in which
# precision.
#
# `pipefit.fit` finds an `Overview`; `pipefit.report.fit` shows it on one screen.

How = Literal["kept", "recomputed", "moved"]
HOWS: tuple[How, ...] = ("kept", "recomputed", "moved")  # each may do what those before it may


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What so many devices hold. The values of attempts are samples in a microbatch.

    `one` is a microbatch of one sample of which all is kept. `largest` has, in the order of `HOWS`, the largest
    microbatch that fits: where everything is kept, where runs of layers may be recomputed, and where tensors and
    optimizer state may move to the host as well. None where not even one sample fits. `fastest` is the plan with the
    most samples per second among those that were looked at and fit.
    """

    devices: int
    one: Attempt
    largest: tuple[Attempt | None, ...]
    fastest: Attempt | None

    def as_json(self) -> OnDevices:
        """Plain data."""
        return {
            "devices": self.devices,
            "one_sample": self.one.as_json(),
            "largest_microbatch": {
                how: 0 if one is None else one.value for how, one in zip(HOWS, self.largest, strict=True)
            },
            "fastest": None
            if self.fastest is None
            else {"microbatch_size": self.fastest.value, "samples_per_second": samples_per_second(self.fastest)},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class InPrecision:
    """What one precision takes: of the whole model's state, and of one device for one sample of which all is kept.

    State is parameters, gradients and optimizer state. `fewest` is the smallest number of devices that hold one sample
    without recomputing or moving anything, of those that were looked at; None if none does.
    """

    precision: Precision
    state_bytes: int
    need_bytes: int
    fewest: int | None

    def as_json(self) -> OfPrecision:
        """Plain data."""
        return {
            "precision": self.precision,
            "state_bytes": self.state_bytes,
            "need_bytes": self.need_bytes,
            "fewest_devices": self.fewest,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """A plan in which every device has the whole model and computes one sample of each microbatch of its own.

    `way` says what the devices divide of its state, and whether hosts have some of it; with `recompute`, every block is
    recomputed by itself. `need_bytes` are the peak of the fullest device, or at least as many where it `is_bound`.
    `samples_per_second` is None if it does not fit.
    """

    way: str
    recompute: bool
    need_bytes: int
    is_bound: bool
    samples_per_second: float | None

    def as_json(self) -> OfReplicas:
        """Plain data."""
        return {
            "way": self.way,
            "recompute": self.recompute,
            "need_bytes": self.need_bytes,
            "is_bound": self.is_bound,
            "samples_per_second": self.samples_per_second,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview(Shown):
    """All of it, for the devices of a cluster. `sizes` are the microbatches that were looked at where smaller ones fit.

    `replicated` are the plans of all devices as replicas, if the model can have them. `impossible` says why no plan
    fits, if that is proven. `filled` says what holds the bytes of the device that limits the cluster at its peak, in
    bytes, and `loss_bytes` are the least that the loss alone takes of a device for one sample.
    """

    cluster: Cluster
    sizes: tuple[int, ...]
    reaches: tuple[Reach, ...]  # by rising number of devices, that of the cluster among them
    precisions: tuple[InPrecision, ...]
    replicated: tuple[Replicated, ...]
    filled: dict[Category, int]
    impossible: str = ""
    loss_bytes: int = 0

    def __repr__(self) -> str:
        """A line: the plans that it rests on would be thousands."""
        answer = "fits" if self.fits else "does not fit" if self.impossible else "has no plan that was found"
        return f"<Overview: {self.here.one.plan.profile.model} {answer} on {self.cluster}>"

    @property
    def here(self) -> Reach:
        """The row of the cluster as it is, or of as many of its devices as the model has blocks."""
        count = len(self.cluster.devices)
        return max((row for row in self.reaches if row.devices <= count), key=lambda row: row.devices)

    @property
    def fits(self) -> bool:
        """Whether some plan fits."""
        return self.here.fastest is not None or self.fastest_replicas is not None

    @property
    def fastest_replicas(self) -> Replicated | None:
        """The plan of replicas that trains the most samples per second, if one fits."""
        fitting = [one for one in self.replicated if one.samples_per_second is not None]
        return max(fitting, key=lambda one: one.samples_per_second or 0.0, default=None)

    @property
    def limiting(self) -> Attempt:
        """The largest microbatch of the cluster of which all is kept; one sample, where not even that fits."""
        return self.here.largest[0] or self.here.one

    def as_json(self) -> FitAnswer:
        """Plain data, the shape of `pipefit fit --json` without `--grow`."""
        one = self.here.one
        return {
            "model": one.plan.profile.model,
            "parameters": one.parameters,
            "cluster": self.cluster.name,
            "fits": self.fits,
            "schedule": one.plan.training.schedule,
            "microbatches_for_each_device": one.plan.training.microbatches / self.here.devices,
            "microbatch_sizes": list(self.sizes),
            "devices": [row.as_json() for row in self.reaches],
            "precisions": [row.as_json() for row in self.precisions],
            "replicated": [row.as_json() for row in self.replicated],
            "impossible": self.impossible,
            "filled": {category.value: nbytes for category, nbytes in self.filled.items()},
        }


def samples_per_second(attempt: Attempt) -> float:
    """How many samples a plan trains in a second, by its predicted step."""
    assert attempt.plan.prediction is not None  # planners predict
    seconds = attempt.plan.prediction.step_seconds
    return attempt.plan.training.batch_size / seconds if seconds else 0.0
