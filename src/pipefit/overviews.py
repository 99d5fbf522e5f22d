"""The answer to whether a model fits at all: on how many devices, in how large microbatches, in which precision.

`pipefit.fit` finds an `Overview`; `pipefit.report.overview` shows it on one screen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipefit.answers import FitAnswer, OfPrecision, OfReplicas, OnDevices
from pipefit.cluster import Cluster
from pipefit.fits import Attempt
from pipefit.tables import Shown
from pipefit.trace import Category
from pipefit.training import Precision

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
