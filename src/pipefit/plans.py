"""A plan: which layers go on which devices, what is recomputed or moved away, and what a step should cost.

A plan contains the profile, the cluster and the training that it was made for, so that it can be simulated, explained,
certified and run from one file. You may also write one yourself: `Plan(profile=..., cluster=..., training=...,
stages=...)`, with `decisions` if runs of layers are to be recomputed or tensors moved away.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from pipefit.cluster import Cluster
from pipefit.errors import UsageError
from pipefit.places import Place
from pipefit.profiles import Measurement, ModelProfile
from pipefit.training import Training
from pipefit.validation import check_types

Sharding = Literal["none", "optimizer", "gradients", "parameters"]
StateKind = Literal["parameters", "gradients", "optimizer", "versions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The devices of a stage and how they share its work: `data` replicas of `tensor` shards each.

    Device `devices[d * tensor + t]` holds shard t of replica d. `shard` says what is divided between the replicas
    instead of held by each: nothing, the optimizer state (ZeRO 1), the gradients too (2), or the parameters too (3).

    Raises:
        UsageError: the degrees do not multiply to the number of devices, or a device is named twice.
    """

    __pydantic_config__ = {"extra": "forbid"}

    devices: tuple[int, ...]
    data: int = 1
    tensor: int = 1
    shard: Sharding = "none"

    def __post_init__(self) -> None:
        check_types(self)
        if self.data < 1 or self.tensor < 1 or self.data * self.tensor != len(self.devices):
            raise UsageError(
                f"a grid of {self.data} replicas with {self.tensor} shards each has {self.data * self.tensor} devices, "
                f"not {len(self.devices)}"
            )
        if len(set(self.devices)) != len(self.devices) or min(self.devices) < 0:
            raise UsageError(f"a grid names each of its devices once, not {list(self.devices)}")

    @staticmethod
    def of(device: int) -> Grid:
        """The grid of a single device."""
        return Grid(devices=(device,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A contiguous run of layers, `start` to `stop - 1`, and the grid of devices that holds it."""

    __pydantic_config__ = {"extra": "forbid"}

    start: int
    stop: int
    grid: Grid

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.start < self.stop:
            raise UsageError(f"a stage holds at least one layer, not layers {self.start} to {self.stop - 1}")

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices of the grid."""
        return self.grid.devices

    @property
    def device(self) -> int:
        """The device of a stage on a single device.

        Raises:
            UsageError: the stage is on several.
        """
        if len(self.devices) != 1:
            raise UsageError(
                f"the stage of layers {self.start} to {self.stop - 1} is on devices {list(self.devices)}: stages on "
                "several devices can be written down, but not simulated or run yet"
            )
        return self.devices[0]


class What(StrEnum):
    """What a decision does to its subject."""

    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Layers `start` to `stop - 1`, a part of a stage or all of it."""

    __pydantic_config__ = {"extra": "forbid"}

    start: int
    stop: int

    def __post_init__(self) -> None:
        check_types(self)

    def __str__(self) -> str:
        return f"layer {self.start}" if self.stop == self.start + 1 else f"layers {self.start} to {self.stop - 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensors:
    """Saved tensors that move together, each named by its layer and its number there. Their storages are moved."""

    __pydantic_config__ = {"extra": "forbid"}

    tensors: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        check_types(self)

    def __str__(self) -> str:
        return "saved " + ", ".join(f"{layer}.{index}" for layer, index in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """State of layers `start` to `stop - 1`, whatever the microbatch: parameters, gradients, optimizer or versions."""

    __pydantic_config__ = {"extra": "forbid"}

    start: int
    stop: int
    kind: StateKind

    def __post_init__(self) -> None:
        check_types(self)

    def __str__(self) -> str:
        return f"{self.kind} of layers {self.start} to {self.stop - 1}"


class Microbatches(NamedTuple):
    """The microbatches that a decision is for: `taken` of every `every`, from number `first` on.

    Microbatch m is one of them if (m - first) modulo `every` is less than `taken`. So a decision has the same meaning
    for any number of microbatches, and for schedules without end.
    """

    taken: int = 1
    every: int = 1
    first: int = 0

    def __contains__(self, microbatch: object) -> bool:
        assert isinstance(microbatch, int)
        return (microbatch - self.first) % self.every < self.taken


ALL_MICROBATCHES = Microbatches()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is done with a part of a stage's memory instead of keeping it.

    A run of layers can be recomputed: its forward keeps only its inputs, and runs again before its backward. Saved
    tensors or a state can be offloaded to `place`. `ahead` is how many forwards and backwards of the device lie between
    the start of the recomputation or reload and the backward that needs it; with 0 it comes directly before. `behind`
    is how many lie between the start of an offload and its join, which frees the device's copy.

    Raises:
        UsageError: the subject cannot be recomputed or offloaded, or there is a place where none belongs.
    """

    __pydantic_config__ = {"extra": "forbid"}

    stage: int
    subject: Run | SavedTensors | State
    what: What
    microbatches: Microbatches = ALL_MICROBATCHES
    place: Place | None = None
    ahead: int = 0
    behind: int = 1
    why: str = ""

    def __post_init__(self) -> None:
        check_types(self)
        if isinstance(self.subject, Run) != (self.what is What.RECOMPUTE):
            raise UsageError(f"{self}: runs of layers are recomputed, saved tensors and states are offloaded")
        if (self.place is None) != (self.what is What.RECOMPUTE):
            raise UsageError(f"{self}: what is offloaded needs a place to go to, what is recomputed has none")
        if self.ahead < 0 or self.behind < 0 or not 0 < self.microbatches.taken <= self.microbatches.every:
            raise UsageError(
                f"{self}: ahead and behind count actions from zero on, and a share of microbatches is one of so many"
            )

    def __str__(self) -> str:
        where = "" if self.place is None else f" to {self.place}"
        return f"stage {self.stage}: {self.what.value} {self.subject}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulator predicts for a plan: the peak of every device in bytes, and seconds per step."""

    __pydantic_config__ = {"extra": "forbid"}

    peak_bytes: tuple[int, ...]
    step_seconds: float


class Objective(StrEnum):
    """What a planner minimises, as a phrase; `unit` is the unit of its value."""

    PEAK = "peak of the fullest device, in bytes"
    PEAK_SHARE = "peak of the fullest device, as a part of its budget"
    ESTIMATED_PEAK = "estimated peak of the fullest device, in bytes"
    PARAMETERS = "parameter bytes of the heaviest stage"
    LAYERS = "layers of the longest stage"
    SECONDS = "seconds of the slowest stage, for one microbatch"

    @property
    def unit(self) -> Literal["bytes", "share", "layers", "seconds"]:
        """The unit of the value."""
        if self is Objective.PEAK_SHARE:
            return "share"
        if self is Objective.LAYERS:
            return "layers"
        return "seconds" if self is Objective.SECONDS else "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Which planner made a plan, and how good it is proven to be.

    `value` is the plan's value of `objective`, which was minimised. No plan can have a value below `bound`, which is
    equal to `value` if the planner is exact, and None if it does not know. `evaluated` is how many candidate stages or
    splits it compared.
    """

    __pydantic_config__ = {"extra": "forbid"}

    planner: str
    options: dict[str, str | int | float | bool]
    objective: Objective
    value: float
    bound: float | None
    evaluated: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Stages in pipeline order over the devices of a cluster, and decisions about their memory.

    A device may hold several stages; two stages share either all of their devices or none.
    """

    __pydantic_config__ = {"extra": "forbid"}

    profile: ModelProfile
    cluster: Cluster
    training: Training
    stages: tuple[Stage, ...]
    decisions: tuple[Decision, ...] = ()
    prediction: Prediction | None = None
    provenance: Provenance | None = None

    def __post_init__(self) -> None:
        check_types(self)
        edges = [0, *(stage.stop for stage in self.stages)]
        if [stage.start for stage in self.stages] != edges[:-1] or edges[-1] != len(self.profile.layers):
            raise UsageError(
                f"the stages must hold layers 0 to {len(self.profile.layers) - 1} once each and in order, "
                f"not {', '.join(f'{s.start}-{s.stop - 1}' for s in self.stages) or 'none'}"
            )
        self._check_devices()
        for decision in self.decisions:
            _check_decision(decision, self.stages, self.cluster)
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

    def _check_devices(self) -> None:
        """Check that every device exists, and that two stages share all of their devices or none."""
        grids = dict.fromkeys(stage.devices for stage in self.stages)
        used = [device for devices in grids for device in devices]
        if len(set(used)) != len(used):
            raise UsageError("two stages share some of their devices but not all: give them the same grid, or others")
        if any(device >= len(self.cluster.devices) for device in used):
            raise UsageError(
                f"a stage names a device that cluster {self.cluster.name!r} does not have: "
                f"it has {len(self.cluster.devices)}"
            )

    @property
    def measurement(self) -> Measurement:
        """The layer costs at this plan's microbatch size."""
        return self.profile.at(self.training.microbatch_size)

    @property
    def placement(self) -> tuple[tuple[int, ...], ...]:
        """The devices of every stage."""
        return tuple(stage.devices for stage in self.stages)

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every rank. A rank is one grid of devices; ranks are in the order of their first stages."""
        grids: dict[tuple[int, ...], list[int]] = {}
        for number, stage in enumerate(self.stages):
            grids.setdefault(stage.devices, []).append(number)
        return tuple(map(tuple, grids.values()))

    @property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The stages that have a copy of each shared parameter."""
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

    def decisions_of(self, stage: int, what: What) -> tuple[Decision, ...]:
        """The decisions of one kind about one stage."""
        return tuple(d for d in self.decisions if d.stage == stage and d.what is what)

    def __str__(self) -> str:
        """An explanation of the plan: stages, peaks, what limits it, and how it was found."""
        from pipefit.report.plan import explain  # the one import upward, so that a plan can be printed

        return explain(self)


def _check_decision(decision: Decision, stages: tuple[Stage, ...], cluster: Cluster) -> None:
    """Check that the decision is about layers and places that exist.

    Raises:
        UsageError: no such stage, layers outside it, or a place that the cluster does not have.
    """
    if not 0 <= decision.stage < len(stages):
        raise UsageError(f"{decision}: the plan has {len(stages)} stages")
    stage = stages[decision.stage]
    if any(not stage.start <= layer < stage.stop for layer in _layers(decision)):
        raise UsageError(f"{decision}: the stage holds layers {stage.start} to {stage.stop - 1}")
    for member in () if decision.place is None else decision.place.members:
        cluster.check(member, str(decision))


def _layers(decision: Decision) -> Iterable[int]:
    """The layers that the subject names: of a run or a state, the first and the last."""
    subject = decision.subject
    if isinstance(subject, SavedTensors):
        return [layer for layer, _ in subject.tensors]
    return subject.start, subject.stop - 1
