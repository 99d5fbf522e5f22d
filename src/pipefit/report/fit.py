"""The largest that fits, as text: the answer, what limits it, by how much the next one misses, and what was tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from pipefit.plans import Plan
from pipefit.tables import Block, Table
from pipefit.units import format_bytes

Sense = Literal["largest", "smallest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One value that was tried: its plan, and the peaks of its dry run in bytes if there was one."""

    value: int
    plan: Plan
    certified_bytes: tuple[int, ...] | None = None

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The highest bytes of every device: those of the dry run, or else the predicted ones."""
        if self.certified_bytes is not None:
            return self.certified_bytes
        assert self.plan.prediction is not None  # planners predict
        return self.plan.prediction.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether every device has the memory it needs."""
        return self.over_bytes <= 0

    @property
    def stage(self) -> int:
        """The stage that limits: its device is the fullest."""
        budgets = self.plan.cluster.budgets
        devices = [stage.device for stage in self.plan.stages]
        return max(range(len(devices)), key=lambda number: self.peak_bytes[devices[number]] / budgets[devices[number]])

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
    def device(self) -> int:
        """The device that limits."""
        return self.plan.stages[self.stage].device

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers on the device that limits."""
        stage = self.plan.stages[self.stage]
        return self.plan.profile.layers[stage.start : stage.stop]

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

    def as_json(self) -> dict[str, Any]:
        """Plain data; bytes are those of the dry run where there was one."""
        return {
            "value": self.value,
            "fits": self.fits,
            "certified": self.certified_bytes is not None,
            "parameters": self.parameters,
            "peak_bytes": list(self.peak_bytes),
            "device": self.device,
            "stage": self.stage,
            "layers": list(self.layers),
            "budget_bytes": self.budget_bytes,
            "over_bytes": self.over_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The `sense` value of what was `grown` that fits, and the next one, which does not.

    `beyond` is None where nothing further was allowed or where the model refused it; `refused` has its reasons.
    """

    grown: str  # a setting of the model, or batch, devices, memory
    sense: Sense
    best: Attempt
    beyond: Attempt | None
    tried: tuple[Attempt, ...]  # by rising value
    refused: dict[int, str]

    def as_json(self) -> dict[str, Any]:
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


def miss(attempt: Attempt) -> str:
    """Which device an attempt overfills, with what, and by how much."""
    return (
        f"device {attempt.device} needs {format_bytes(attempt.need_bytes)} for stage {attempt.stage} "
        f"({_layers(attempt)}), {format_bytes(attempt.over_bytes)} over its {format_bytes(attempt.budget_bytes)}"
    )


def describe_fit(fit: Fit) -> list[Block]:
    """The answer and how it was asked, what limits it, by how much the next one misses, and all that was tried."""
    return ["\n".join(_head(fit)), _tried(fit), "\n".join(_limits(fit))]


def _head(fit: Fit) -> Iterator[str]:
    plan = fit.best.plan
    training = plan.training
    size = f" ({fit.best.value} bytes)" if fit.grown == "memory" else ""
    yield (
        f"{fit.named(fit.best.value)}{size} is the {fit.sense} that fits: {plan.profile.model} of "
        f"{fit.best.parameters:,} parameters on {plan.cluster}"
    )
    recompute = ", recomputed" if plan.decisions else ""
    yield (
        f"{training.schedule}, {training.microbatches} microbatches of {training.microbatch_size}, "
        f"{training.precision}{recompute}, kernels of {plan.profile.assumptions.target}"
    )


def _tried(fit: Fit) -> Table:
    """A row for each value, rising. The model's size is told where it grows."""
    grows = len({attempt.parameters for attempt in fit.tried}) > 1
    rows = tuple(
        (
            named_value(fit.grown, attempt.value),
            *((f"{attempt.parameters:,}",) if grows else ()),
            format_bytes(attempt.need_bytes),
            format_bytes(attempt.budget_bytes),
            f"{100 * attempt.need_bytes / attempt.budget_bytes:.1f} %",
            str(attempt.device),
            "yes" if attempt.fits else "no",
            "planned" if attempt.certified_bytes is None else "dry run",
        )
        for attempt in fit.tried
    )
    size = ("parameters",) if grows else ()
    return Table((fit.grown, *size, "peak", "of budget", "full", "device", "fits", "by"), rows)


def _limits(fit: Fit) -> Iterator[str]:
    best, further = fit.best, "larger" if fit.sense == "largest" else "smaller"
    yield (
        f"Device {best.device} limits: stage {best.stage} ({_layers(best)}) needs {format_bytes(best.need_bytes)}, "
        f"which leaves it {format_bytes(-best.over_bytes)} free."
    )
    if fit.beyond is not None:
        yield f"{fit.named(fit.beyond.value)} does not fit: {miss(fit.beyond)}."
        return
    larger = [value for value in fit.refused if value > best.value]
    if larger and fit.sense == "largest":
        yield f"{fit.named(min(larger))} is refused: {fit.refused[min(larger)]}."
    else:
        yield f"No {further} value was to be tried."


def _layers(attempt: Attempt) -> str:
    first, last = attempt.layers[0], attempt.layers[-1]
    return f"layer {first}" if len(attempt.layers) == 1 else f"layers {first} to {last}"
