"""What every planner is asked: which layers, how many stages, on which devices, under which schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pipefit.cluster import Cluster
from pipefit.errors import UsageError
from pipefit.planner.closed_forms.surroundings import Surroundings, surroundings
from pipefit.plans import Objective
from pipefit.profiles import Measurement, ModelProfile
from pipefit.schedule.whole_stages import Recompute
from pipefit.training import Training
from pipefit.validation import check_types


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What may be asked of any planner.

    `stages` None uses every device, or as many as there are layers. `recompute` names the microbatches whose forward
    every stage runs twice (`pipefit.schedule.whole_stages`). With `allow_infeasible` the plan is returned even where a
    device's budget is too small for it; otherwise that raises `InfeasibleError`.
    """

    stages: int | None = None
    recompute: Recompute = "never"
    allow_infeasible: bool = False

    def __post_init__(self) -> None:
        check_types(self)


class DeviceClass(NamedTuple):
    """Devices of one kind with one budget: which of them holds a stage makes no difference."""

    memory_bytes: int
    devices: tuple[int, ...]


class Split(NamedTuple):
    """An answer: stage s holds layers `edges[s]` to `edges[s + 1] - 1` and sits on `devices[s]`."""

    edges: tuple[int, ...]
    devices: tuple[int, ...]


class Found(NamedTuple):
    """What a planner answers: a split, how it was judged, and how many splits or stages were looked at.

    Where it is `proven`, no split has less than `value` of `objective`.
    """

    split: Split
    objective: Objective
    value: float
    evaluated: int = 1
    proven: bool = True


@dataclass(frozen=True, kw_only=True)
class Question:
    """One planning problem, and what follows from it.

    Raises:
        UsageError: more stages than layers or devices, no such schedule, or a microbatch size that was not profiled.
    """

    profile: ModelProfile
    cluster: Cluster
    training: Training
    options: Options = Options()

    def __post_init__(self) -> None:
        asked, layers, devices = self.options.stages, len(self.profile.layers), len(self.cluster.devices)
        if asked is not None and asked < 1:
            raise UsageError(f"a plan has at least one stage, not {asked}")
        if asked is not None and asked > layers:
            raise UsageError(
                f"{self.profile.model} has {layers} layers, too few for {asked} stages: ask for {layers} or fewer"
            )
        if asked is not None and asked > devices:
            raise UsageError(
                f"cluster {self.cluster.name} has {devices} devices, too few for {asked} stages: "
                f"ask for {devices} or fewer"
            )
        self.profile.at(self.training.microbatch_size)

    @cached_property
    def measurement(self) -> Measurement:
        """The layer costs at the microbatch size asked for."""
        return self.profile.at(self.training.microbatch_size)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.profile.layers)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.options.stages or min(self.layers, len(self.cluster.devices))

    def surroundings(self, stage: int) -> tuple[Surroundings, ...]:
        """What surrounds the compute actions of a stage at this position."""
        return surroundings(
            self.training.schedule, stage, self.stages, self.training.microbatches, self.options.recompute
        )

    @cached_property
    def classes(self) -> tuple[DeviceClass, ...]:
        """Classes of equal devices, by their lowest device number; devices in rising number."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for number, device in enumerate(self.cluster.devices):
            kind = device.kind
            key = (device.memory_bytes, kind.name, kind.memory_bandwidth, *sorted(kind.flops.items()))
            groups.setdefault(key, []).append(number)
        return tuple(DeviceClass(self.cluster.budgets[members[0]], tuple(members)) for members in groups.values())

    @property
    def equal_budgets(self) -> bool:
        """Whether all devices have the same memory, so that bytes are compared and not fractions of a budget."""
        return len(set(self.cluster.budgets)) == 1

    @property
    def objective(self) -> Objective:
        """What planners of memory minimise."""
        return Objective.PEAK if self.equal_budgets else Objective.PEAK_SHARE

    def value(self, peaks: tuple[int, ...], devices: tuple[int, ...]) -> float:
        """What the objective makes of the peaks of the stages on these devices."""
        if self.equal_budgets:
            return max(peaks)
        return max(peak / self.cluster.budgets[device] for peak, device in zip(peaks, devices, strict=True))

    def in_order(self, edges: tuple[int, ...]) -> Split:
        """The split at `edges`, stage s on device s."""
        return Split(edges, tuple(range(self.stages)))


Planner = Callable[[Question], Found]
