"""Answers about fit: the largest (or smallest) value that fits, and the overview of what fits.

`largest.search` finds a `Fit`, `largest.overview` an `Overview`; `report` shows both. For the number of
devices and for their memory, the smallest value is searched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from pipefit.schema.cluster import Cluster
from pipefit.schema.json_io import FitAnswer, GrowthAnswer, OfPrecision, OfRanks, OfReplicas, OnDevices, Tried
from pipefit.schema.plan import Plan
from pipefit.schema.trace import Category
from pipefit.schema.training import Precision
from pipefit.texts import first_to_last
from pipefit.units import format_bytes

Sense = Literal["largest", "smallest"]

# ---- Answers in words: a plan that fits, a proof that none does (`impossible`, else empty), or neither


def verdict(fits: bool, impossible: str) -> str:
    """Return the answer in two or three words."""
    return "fits" if fits else "does not fit" if impossible else "no plan found"


def refusal(what: str, impossible: str, nearest: str) -> str:
    """Return a sentence: `what` does not fit, with the proof, or no plan was found, with the least excess."""
    return f"{what} does not fit: {impossible}" if impossible else f"no plan was found for {what}: {nearest}"


# ---- The largest value, or the smallest


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One value that was tried: its plan, the peaks of its dry run, and the shortage of a host.

    Peaks are in bytes, None without a dry run; the shortage is empty if hosts have room.
    """

    value: int
    plan: Plan
    certified_bytes: tuple[int, ...] | None = None
    shortage: str = ""

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The peak bytes of every device: from the dry run, or else predicted."""
        if self.certified_bytes is not None:
            return self.certified_bytes
        assert self.plan.prediction is not None  # planners predict
        return self.plan.prediction.peak_bytes

    @property
    def fits(self) -> bool:
        """True if every device and every host has the memory it needs."""
        return self.over_bytes <= 0 and not self.shortage

    @property
    def device(self) -> int:
        """The limiting device: the fullest device that has a stage."""
        budgets = self.plan.cluster.budgets
        used = [device for stage in self.plan.stages for device in stage.devices]
        return max(used, key=lambda device: self.peak_bytes[device] / budgets[device])

    @property
    def stage(self) -> int:
        """The limiting stage: the first stage on the limiting device."""
        return next(number for number, stage in enumerate(self.plan.stages) if self.device in stage.devices)

    @property
    def need_bytes(self) -> int:
        """The peak bytes of the limiting device."""
        return self.peak_bytes[self.device]

    @property
    def budget_bytes(self) -> int:
        """The budget of the limiting device in bytes."""
        return self.plan.cluster.budgets[self.device]

    @property
    def over_bytes(self) -> int:
        """The bytes that the limiting device lacks; negative if it has room."""
        return self.need_bytes - self.budget_bytes

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the limiting stage's blocks, or of its layers if the stage ends within a block."""
        stage = self.plan.stages[self.stage]
        return self.plan.profile.span(stage.start, stage.stop)

    @property
    def miss(self) -> str:
        """The overfilled device or host, its contents, and the excess, as a phrase."""
        if self.over_bytes <= 0:
            return self.shortage
        return (
            f"device {self.device} needs {format_bytes(self.need_bytes)} for stage {self.stage} "
            f"({first_to_last(self.blocks)}), {format_bytes(self.over_bytes)} over its "
            f"{format_bytes(self.budget_bytes)}"
        )

    @property
    def nearest(self) -> str:
        """The excess of the leanest plan, as a phrase, of a value for which no plan was found."""
        return f"in the leanest plan tried, {self.miss}"

    @property
    def parameters(self) -> int:
        """The number of scalar parameters of the model, trainable or not; shared parameters count once."""
        measurement, names = self.plan.measurement, self.plan.profile.layers
        by_layer = [{p.name: prod(p.shape) for p in cost.parameters} for cost in measurement.costs]
        again = sum(
            (len(shared.users) - 1) * by_layer[first][shared.name.removeprefix(f"{names[first]}.")]
            for shared in measurement.shared
            for first in shared.users[:1]
        )
        return sum(sum(layer.values()) for layer in by_layer) - again

    def as_json(self) -> Tried:
        """Return plain data; bytes are those of the dry run, if any."""
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
class Fit:
    """The `sense` value of the `grown` quantity with a plan that fits, and the next one, without such a plan.

    `beyond` is None if no further value was allowed or the model refused it; `refused` has the reasons.
    `impossible` has the proofs that values do not fit, and `searched` says which plans were tried for
    `beyond`.
    """

    grown: str  # a setting of the model, or batch, devices, memory
    sense: Sense
    best: Attempt
    beyond: Attempt | None
    tried: tuple[Attempt, ...]  # by rising value
    refused: dict[int, str]
    impossible: Mapping[int, str] = field(default_factory=dict)
    searched: str = ""

    def __repr__(self) -> str:
        """Return one line, without the plans of all attempts."""
        plan = self.best.plan
        return f"<Fit: {self.answer}; {plan.profile.model} on {plan.cluster}>"

    @property
    def answer(self) -> str:
        """The value in words, and how certain it is that no further one fits."""
        nbytes = f" ({self.best.value} bytes)" if self.grown == "memory" else ""
        value = f"{self.named(self.best.value)}{nbytes}"
        if self.beyond is None:
            return f"{value} fits, the {self.sense} value tried"
        if self.beyond.value in self.impossible:
            return f"{value} is the {self.sense} that fits"
        return f"{value} fits, the {self.sense} with a plan found"

    def verdict(self, attempt: Attempt) -> str:
        """Return the answer for a value that was tried."""
        return verdict(attempt.fits, self.impossible.get(attempt.value, ""))

    def as_json(self) -> GrowthAnswer:
        """Return plain data, the shape of `pipefit fit --grow --json`."""
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
            "impossible": {str(value): proof for value, proof in sorted(self.impossible.items())},
            "searched": self.searched,
        }

    def named(self, value: int) -> str:
        """Format a value with its name: `layers=12`, or `memory=13.50 GiB`."""
        return f"{self.grown}={named_value(self.grown, value)}"


def named_value(grown: str, value: int) -> str:
    """Format a value; sizes have units."""
    return format_bytes(value) if grown == "memory" else str(value)


# ---- Overview: devices, microbatch sizes and precisions with which a model fits

How = Literal["kept", "recomputed", "moved"]
HOWS: tuple[How, ...] = (
    "kept",
    "recomputed",
    "moved",
)  # each may do everything that the previous ones may do


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The capacity of a number of devices. The values of attempts are samples in a microbatch.

    `one` is a microbatch of one sample with everything kept. `largest` has, in the order of `HOWS`, the
    largest microbatch that fits: with everything kept, with recomputed runs of layers, and with tensors and
    optimizer state offloaded to the host too; None if no plan was found. `fastest` is the fitting plan
    with the most samples per second among the plans that were compared.
    """

    devices: int
    one: Attempt
    largest: tuple[Attempt | None, ...]
    fastest: Attempt | None

    def as_json(self) -> OnDevices:
        """Return plain data."""
        return {
            "devices": self.devices,
            "one_sample": self.one.as_json(),
            "largest_microbatch": {
                how: 0 if attempt is None else attempt.value
                for how, attempt in zip(HOWS, self.largest, strict=True)
            },
            "fastest": None
            if self.fastest is None
            else {
                "microbatch_size": self.fastest.value,
                "samples_per_second": samples_per_second(self.fastest),
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class InPrecision:
    """The memory of one precision: the model's state, and one device's bytes for one sample.

    State is parameters, gradients and optimizer state. `fewest` is the smallest compared number of devices
    that hold one sample without recomputation or offloading; None if none does.
    """

    precision: Precision
    state_bytes: int
    need_bytes: int
    fewest: int | None

    def as_json(self) -> OfPrecision:
        """Return plain data."""
        return {
            "precision": self.precision,
            "state_bytes": self.state_bytes,
            "need_bytes": self.need_bytes,
            "fewest_devices": self.fewest,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """A plan in which every device has the whole model and computes one sample of each of its microbatches.

    `way` says how the devices divide its state, and whether hosts hold some of it; with `recompute`, every
    block is recomputed separately. `need_bytes` is the peak of the fullest device, or a lower bound of it if
    `is_bound`. `samples_per_second` is None if the plan does not fit.
    """

    way: str
    recompute: bool
    need_bytes: int
    is_bound: bool
    samples_per_second: float | None

    def as_json(self) -> OfReplicas:
        """Return plain data."""
        return {
            "way": self.way,
            "recompute": self.recompute,
            "need_bytes": self.need_bytes,
            "is_bound": self.is_bound,
            "samples_per_second": self.samples_per_second,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The fit of a model on the devices of a cluster.

    `sizes` are the microbatch sizes that were tried while smaller ones fit.

    `replicated` are the plans of all devices as replicas, if the model allows them. If no plan fits and
    none is proven impossible, `divided` is the leanest plan found with layers divided between
    tensor-parallel ranks. `impossible` says why no plan fits, if that is proven. `filled` is the peak of
    the limiting device by category, in bytes, and `loss_bytes` are the least bytes of a device that the
    loss alone needs for one sample.
    """

    cluster: Cluster
    sizes: tuple[int, ...]
    reaches: tuple[Reach, ...]  # by rising number of devices, including that of the cluster
    precisions: tuple[InPrecision, ...]
    replicated: tuple[Replicated, ...]
    filled: dict[Category, int]
    divided: Attempt | None = None
    impossible: str = ""
    loss_bytes: int = 0

    def __repr__(self) -> str:
        """Return one line, without the plans."""
        return f"<Overview: {self.here.one.plan.profile.model} on {self.cluster}: {self.verdict}>"

    @property
    def verdict(self) -> str:
        """The answer in two or three words."""
        return verdict(self.fits, self.impossible)

    @property
    def here(self) -> Reach:
        """The widest row of the cluster's devices that fits; the widest of all if none does."""
        rows = [row for row in self.reaches if row.devices <= len(self.cluster.devices)]
        return max(rows, key=lambda row: (row.fastest is not None, row.devices))

    @property
    def fits(self) -> bool:
        """True if any plan fits."""
        divided = self.divided is not None and self.divided.fits
        return self.here.fastest is not None or self.fastest_replicas is not None or divided

    @property
    def fastest_replicas(self) -> Replicated | None:
        """The fitting plan of replicas with the most samples per second; None if none fits."""
        fitting = [one for one in self.replicated if one.samples_per_second is not None]
        return max(fitting, key=lambda one: one.samples_per_second or 0.0, default=None)

    @property
    def limiting(self) -> Attempt:
        """The largest microbatch of the cluster with everything kept; one sample if none is known to fit."""
        return self.here.largest[0] or self.here.one

    def as_json(self) -> FitAnswer:
        """Return plain data, the shape of `pipefit fit --json` without `--grow`."""
        attempt = self.here.one
        return {
            "model": attempt.plan.profile.model,
            "parameters": attempt.parameters,
            "cluster": self.cluster.name,
            "fits": self.fits,
            "schedule": attempt.plan.training.schedule,
            "microbatches_for_each_device": attempt.plan.training.microbatches / self.here.devices,
            "microbatch_sizes": list(self.sizes),
            "devices": [row.as_json() for row in self.reaches],
            "precisions": [row.as_json() for row in self.precisions],
            "replicated": [row.as_json() for row in self.replicated],
            "divided": None if self.divided is None else _of_ranks(self.divided),
            "impossible": self.impossible,
            "filled": {category.value: nbytes for category, nbytes in self.filled.items()},
        }


def _of_ranks(attempt: Attempt) -> OfRanks:
    grid = attempt.plan.stages[0].grid
    return {
        "ranks": grid.tensor,
        "sequences": grid.sequences,
        "need_bytes": attempt.need_bytes,
        "fits": attempt.fits,
    }


def samples_per_second(attempt: Attempt) -> float:
    """Return the samples per second of a plan, from its predicted step."""
    assert attempt.plan.prediction is not None  # planners predict
    seconds = attempt.plan.prediction.step_seconds
    return attempt.plan.training.batch_size / seconds if seconds else 0.0
