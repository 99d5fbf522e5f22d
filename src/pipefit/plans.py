"""A plan: which layers go where, under which schedule, and what that is predicted to cost. Pure data, self-contained.

A plan carries the profile, the cluster and the training it was made for, so that it can be simulated, explained,
certified and run from its one file. Anyone may write one by hand: `Plan(profile=..., cluster=..., training=...,
stages=...)`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipefit.cluster import Cluster
from pipefit.errors import UsageError
from pipefit.profiles import Measurement, ModelProfile
from pipefit.training import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A contiguous run of layers, `start` to `stop - 1`, and the devices that hold it."""

    __pydantic_config__ = {"extra": "forbid"}

    start: int
    stop: int
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise UsageError(f"a stage holds at least one layer, not layers {self.start} to {self.stop - 1}")
        if len(self.devices) != 1:
            raise UsageError(f"a stage runs on exactly one device, not on {list(self.devices)}")

    @property
    def device(self) -> int:
        """The device of a stage that has one."""
        return self.devices[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulator says of a plan: the highest bytes of every device, and seconds per step."""

    __pydantic_config__ = {"extra": "forbid"}

    peak_bytes: tuple[int, ...]
    step_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Who made a plan and how good it is known to be.

    `objective` is what was minimised, with its value; `bound` is a value no plan can go below (equal to the value when
    the planner is exact, None when it does not know); `evaluated` counts candidate stages or splits looked at.
    """

    __pydantic_config__ = {"extra": "forbid"}

    planner: str
    options: dict[str, str | int | float | bool]
    objective: str
    value: float
    bound: float | None
    evaluated: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Stages in pipeline order over the devices of a cluster."""

    __pydantic_config__ = {"extra": "forbid"}

    profile: ModelProfile
    cluster: Cluster
    training: Training
    stages: tuple[Stage, ...]
    prediction: Prediction | None = None
    provenance: Provenance | None = None

    def __post_init__(self) -> None:
        edges = [0, *(stage.stop for stage in self.stages)]
        if [stage.start for stage in self.stages] != edges[:-1] or edges[-1] != len(self.profile.layers):
            raise UsageError(
                f"the stages must hold layers 0 to {len(self.profile.layers) - 1} once each and in order, "
                f"not {', '.join(f'{s.start}-{s.stop - 1}' for s in self.stages) or 'none'}"
            )
        used = [device for stage in self.stages for device in stage.devices]
        if len(set(used)) != len(used):
            raise UsageError("every stage needs a device of its own")
        if any(not 0 <= device < len(self.cluster.devices) for device in used):
            raise UsageError(
                f"a stage names a device that cluster {self.cluster.name!r} does not have: "
                f"it has {len(self.cluster.devices)}"
            )
        if self.prediction is not None and len(self.prediction.peak_bytes) != len(self.cluster.devices):
            raise UsageError(
                f"the prediction names {len(self.prediction.peak_bytes)} peaks, but cluster {self.cluster.name!r} has "
                f"{len(self.cluster.devices)} devices"
            )
        if self.training.precision != self.profile.assumptions.precision:
            raise UsageError(
                f"the plan would train in {self.training.precision}, but {self.profile.model} was profiled in "
                f"{self.profile.assumptions.precision}: profile it again with --precision {self.training.precision}"
            )
        self.profile.at(self.training.microbatch_size)

    @property
    def measurement(self) -> Measurement:
        """The layer costs at this plan's microbatch size."""
        return self.profile.at(self.training.microbatch_size)

    @property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """For every shared parameter, the stages that have a copy."""
        return tuple(
            tuple(n for n, s in enumerate(self.stages) if any(s.start <= user < s.stop for user in shared.users))
            for shared in self.measurement.shared
        )

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The first layer of every stage but the first."""
        return tuple(stage.start for stage in self.stages[1:])

    @property
    def split(self) -> tuple[int, ...]:
        """Layers per stage."""
        return tuple(stage.stop - stage.start for stage in self.stages)

    def __str__(self) -> str:
        """The plan explained: stages, peaks, what limits, what was tried."""
        from pipefit.report.plan import explain  # above this module; a plan that prints itself is worth the exception

        return explain(self)
