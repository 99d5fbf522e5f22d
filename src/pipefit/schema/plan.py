"""A plan: the layers of each device, the recomputed and offloaded memory, and the predicted cost of a step.

A plan contains its profile, cluster and training, so one file can be simulated, explained, certified and run.
A plan can also be written directly: `Plan(profile=..., cluster=..., training=..., stages=...)`.

A `LoopPlan` is the plan of a user's own loop on one device: a technique for each submodule, and the certified
peaks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from math import lcm
from typing import Literal

from pipefit.errors import UsageError
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, What
from pipefit.schema.grids import Division, Stage, dimensions, dividing
from pipefit.schema.profile import Measurement, ModelProfile
from pipefit.schema.trace import AllocatorPeaks
from pipefit.schema.training import Training
from pipefit.schema.validation import check_types
from pipefit.texts import counted, layers_text
from pipefit.units import format_bytes, format_seconds

Engine = Literal[
    "pipefit", "torch"
]  # a runtime that trains plans: pipefit's own, or torch.distributed.pipelining

# ---- Provenance: the planner, its objective, and the gap to the lower bound

_LARGEST = 1e30  # upper limit of a value, in any unit


class Objective(StrEnum):
    """The quantity that a planner minimises, as a phrase; `unit` is the unit of its value."""

    PEAK = "peak of the fullest device, in bytes"
    PEAK_SHARE = "peak of the fullest device, as a share of its budget"
    ESTIMATED_PEAK = "estimated peak of the fullest device, in bytes"
    PARAMETERS = "parameter bytes of the heaviest stage"
    BLOCKS = "blocks of the longest stage"
    SECONDS = "seconds of the slowest stage, for one microbatch"
    STEP = "time of a step, in seconds"
    ESTIMATED_STEP = "estimated time of a step, in seconds"

    @property
    def unit(self) -> Literal["bytes", "share", "blocks", "seconds"]:
        """The unit of the value."""
        if self is Objective.PEAK_SHARE:
            return "share"
        if self is Objective.BLOCKS:
            return "blocks"
        return "seconds" if self in (Objective.SECONDS, Objective.STEP, Objective.ESTIMATED_STEP) else "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The planner of a plan, and its proven quality.

    `value` is the minimised `objective`. No plan can have a value below `bound`, which equals `value` if the
    planner is exact, and is None if unknown. `evaluated` counts the candidate stages, splits or plans that
    were compared. `remarks` are sentences about the search.

    Raises:
        UsageError: a number is negative, or too large to be a size or a time.
    """

    planner: str
    options: dict[str, str | int | float | bool]
    objective: Objective
    value: float
    bound: float | None
    evaluated: int
    seconds: float
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        for name, measure in (("value", self.value), ("bound", self.bound), ("seconds", self.seconds)):
            if measure is not None and not 0 <= measure < _LARGEST:
                raise UsageError(f"{name} must be a number from 0 to {_LARGEST:g}")

    def __str__(self) -> str:
        took = f" in {format_seconds(self.seconds)}" if self.seconds else ""
        return " ".join((f"Planned by the {self.planner} planner{took}. {self._optimality}", *self.remarks))

    @property
    def proves_lowest_peak(self) -> bool:
        """True if the plan's peak is proven to be the lowest of all splits."""
        return self.bound == self.value and self.objective in _PEAKS

    @property
    def _optimality(self) -> str:
        what = self.objective.partition(",")[0]
        if self.bound is None or self.bound == 0 < self.value:
            return f"The {what} is {self._value}; this planner does not know the lowest possible value."
        if self.proves_lowest_peak:
            return f"Proven optimal: no split brings the {what} below {self._value}."
        if self.bound == self.value:
            return f"It minimises only the {what}: {self._value} is the lowest possible."
        gap = 100 * (self.value / self.bound - 1)
        return f"The {what} is {self._value}, at most {gap:.1f} % above the lowest possible."

    @property
    def _value(self) -> str:
        """The value in the unit of its objective, as text."""
        match self.objective.unit:
            case "share":
                return f"{100 * self.value:.1f} % of its budget"
            case "bytes":
                return format_bytes(round(self.value))
            case "seconds":
                return format_seconds(self.value)
            case "blocks":
                return f"{self.value:g}"


_PEAKS = (Objective.PEAK, Objective.PEAK_SHARE)  # objectives that are exact peaks, not estimates


# ---- Alternatives: other plans, with their seconds per step and bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A plan that is the best in one respect, `what`: `leanest`, `fewest devices` or `fastest`.

    `peak_bytes` is the peak of its fullest device. `asked_by` are the `pipefit plan` options that select it,
    in addition to the options of this plan.

    Raises:
        UsageError: no stage, device or microbatch, or a negative peak or time.
    """

    what: str
    schedule: str
    stages: int
    devices: int
    microbatches: int
    peak_bytes: int
    step_seconds: float
    asked_by: str

    def __post_init__(self) -> None:
        check_types(self)
        if (
            min(self.stages, self.devices, self.microbatches) < 1
            or min(self.peak_bytes, self.step_seconds) < 0
        ):
            raise UsageError(
                f"an alternative needs a non-negative stage, device, microbatch, peak and time, not {self}"
            )


# ---- Compactions: bytes freed and seconds added by recomputation and offloading, stage by stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """One technique on one stage, compared with the plan without it.

    `what` is `recompute`, or names the moved data and the target; `layers` counts the recomputed layers, or
    the layers with moved data. Without the technique, the device's peak would be higher by `freed_bytes` and
    a step shorter by `added_seconds`; both may be negative, because other techniques may make one useless.

    Raises:
        UsageError: no such stage, or no layers.
    """

    stage: int
    what: str
    layers: int
    freed_bytes: int
    added_seconds: float

    def __post_init__(self) -> None:
        check_types(self)
        if self.stage < 0 or self.layers < 1:
            raise UsageError(
                f"a compaction needs a stage and at least one layer, not stage {self.stage} and "
                f"{counted(self.layers, 'layer')}"
            )


# ---- Predictions: peaks, step time and the memory of GPU processes

TIGHT = 0.95  # of a GPU's memory: memory that is not counted, such as cuDNN's workspaces, may take the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted figures of a plan: the peak of every device in bytes, and seconds per step.

    Seconds are estimated if the profile has no measured seconds (`Measurement.estimated`). `utilisation` is
    the share of a step in which each device computes; empty if unknown. `compactions` list the effect of
    recomputation and offloading on each stage. `processes` are the GPU memory of each device's process, found
    by a dry run: None for devices without tensors; empty without a dry run.

    Raises:
        UsageError: a negative peak or time, or a number of figures that differs from the number of peaks.
    """

    peak_bytes: tuple[int, ...]
    step_seconds: float
    utilisation: tuple[float, ...] = ()
    compactions: tuple[Compaction, ...] = ()
    processes: tuple[AllocatorPeaks | None, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        for name, told in (("processes", self.processes), ("utilisation", self.utilisation)):
            if told and len(told) != len(self.peak_bytes):
                raise UsageError(
                    f"a prediction of {counted(len(self.peak_bytes), 'peak')} must have {name} for each of "
                    f"these devices or for none, not for {len(told)}"
                )
        for name, figures in (
            ("peak_bytes", self.peak_bytes),
            ("step_seconds", (self.step_seconds,)),
            ("utilisation", self.utilisation),
        ):
            if wrong := [figure for figure in figures if not figure >= 0]:
                raise UsageError(f"{name} of a prediction must be non-negative, not {wrong[0]}")

    def is_tight(self, cluster: Cluster, device: int) -> bool:
        """Return whether a GPU has little memory left: for its process, or for tensors if the process is
        unknown.
        """
        process = self.processes[device] if self.processes else None
        if process is None:
            return is_tight(cluster, device, self.peak_bytes[device])
        return (
            cluster.backend == "cuda"
            and process.process_bytes >= TIGHT * cluster.devices[device].memory_bytes
        )


def is_tight(cluster: Cluster, device: int, peak_bytes: int) -> bool:
    """Return whether a peak leaves little of a GPU's budget."""
    return cluster.backend == "cuda" and peak_bytes >= TIGHT * cluster.budgets[device]


def fullness(part: float, *, tight: bool) -> str:
    """Format how full a device is for a table cell.

    Examples: `80.0 %`, `96.2 % tight` if little is left, `110.0 % over`.

    If tensors leave much of the budget but the GPU's process leaves little of the GPU: `84.9 %, process
    tight`.
    """
    why = " tight" if part >= TIGHT else ", process tight"
    return f"{100 * part:.1f} %" + (" over" if part > 1 else why if tight else "")


# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Stages in pipeline order on the devices of a cluster, and decisions about their memory.

    A device may hold several stages; two stages share either all of their devices or none.

    Raises:
        UsageError: stages, decisions or a prediction do not match the profile and the cluster, the precision
            differs from
        the profile's, or the microbatch size was not profiled.
    """

    profile: ModelProfile
    cluster: Cluster
    training: Training
    stages: tuple[Stage, ...]
    decisions: tuple[Decision, ...] = ()
    prediction: Prediction | None = None
    provenance: Provenance | None = None
    alternatives: tuple[Alternative, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        edges = [0, *(stage.stop for stage in self.stages)]
        if [stage.start for stage in self.stages] != edges[:-1] or edges[-1] != len(self.profile.layers):
            raise UsageError(
                f"the stages must hold layers 0 to {len(self.profile.layers) - 1} exactly once and in "
                f"order, not {', '.join(f'{s.start}-{s.stop - 1}' for s in self.stages) or 'none'}"
            )
        self._check_devices()
        for decision in self.decisions:
            _check_decision(decision, self.stages, self.cluster)
        if self.prediction is not None and len(self.prediction.peak_bytes) != len(self.cluster.devices):
            raise UsageError(
                f"the prediction has {counted(len(self.prediction.peak_bytes), 'peak')}, but cluster "
                f"{self.cluster.name!r} has {counted(len(self.cluster.devices), 'device')}"
            )
        if self.training.precision != self.profile.assumptions.precision:
            raise UsageError(
                f"the plan would train in {self.training.precision}, but {self.profile.model} was profiled "
                f"in {self.profile.assumptions.precision}: profile it again with --precision "
                f"{self.training.precision}, or plan for Training(..., "
                f"precision={self.profile.assumptions.precision!r})"
            )
        self.profile.at(self.training.microbatch_size)
        self._check_slices()

    def _check_slices(self) -> None:
        """Check that replicas can divide a microbatch, and that their local batch was profiled."""
        size, known = self.training.microbatch_size, {m.microbatch_size for m in self.profile.measurements}
        every, training = lcm(*(stage.grid.data for stage in self.stages)), self.training
        for number, stage in enumerate(self.stages):
            data = stage.grid.data
            if size % data:
                raise UsageError(
                    f"the {data} replicas of stage {number} cannot split a microbatch of "
                    f"{counted(size, 'sample')} evenly: use "
                    f"{dividing(size, every, training.batch_size, training.microbatches)}, "
                    "or another number of replicas"
                )
            if size // data not in known:
                raise UsageError(
                    f"the {data} replicas of stage {number} compute local batches of "
                    f"{counted(size // data, 'sample')}, but {self.profile.model} was profiled at "
                    f"{', '.join(map(str, sorted(known)))}: profile it at all sizes of the plan, as in "
                    f"profile(task, microbatch_size=({size}, {size // data}))"
                )
            self.measured(number)  # refuses ranks that the profile does not know

    def _check_devices(self) -> None:
        """Check that every device exists, and that two stages share all of their devices or none."""
        grids = dict.fromkeys(stage.devices for stage in self.stages)
        used = [device for devices in grids for device in devices]
        device, times = Counter(used).most_common(1)[0]
        if times > 1:
            shares = [list(devices) for devices in grids if device in devices]
            raise UsageError(
                f"device {device} is in the grids {', '.join(map(str, shares))}, but two stages must share "
                "all of their devices or none"
            )
        for number, stage in enumerate(self.stages):
            if max(stage.devices) >= len(self.cluster.devices):
                raise UsageError(
                    f"stage {number} is on device {max(stage.devices)}, but cluster {self.cluster.name!r} "
                    f"has {counted(len(self.cluster.devices), 'device')}"
                )

    @property
    def measurement(self) -> Measurement:
        """The layer costs at this plan's microbatch size."""
        return self.profile.at(self.training.microbatch_size)

    def measured(self, stage: int) -> Measurement:
        """Return the layer costs on a device of a stage: for its local batch and its tensor-parallel
        shard.
        """
        grid = self.stages[stage].grid
        size = self.training.microbatch_size // grid.data
        return self.profile.at(size, grid.tensor, sequences=grid.sequences)

    def division(self, stage: int) -> Division:
        """Return how the values between stage `stage - 1` and `stage` are divided.

        Raises:
            UsageError: the values cannot be divided; names the boundary and a remedy.
        """
        front, behind = (self.stages[number].grid.data for number in (stage - 1, stage))
        one, other = self.measured(stage - 1), self.measured(stage)
        sizes, layer = (one.microbatch_size, other.microbatch_size), self.stages[stage].start
        sent, received = (measurement.costs[layer].inputs for measurement in (one, other))
        if front == behind:
            return Division((None,) * len(sent), front, behind)
        try:
            result = dimensions(sent, received, sizes, gathers=front < behind)
        except UsageError as error:
            raise UsageError(
                f"{counted(front, 'replica')} of stage {stage - 1} cannot split the values for {behind} of "
                f"stage {stage}: {error}; use the same number of replicas for both stages, or end the stage "
                "at another layer"
            ) from error
        return Division(result, front, behind)

    @property
    def is_sliced(self) -> bool:
        """True if a stage has several replicas, which divide every microbatch."""
        return any(stage.grid.data > 1 for stage in self.stages)

    @property
    def asks_for_replicas(self) -> bool:
        """True if the planner's options requested replicas, or a sharding between replicas."""
        asked = self.provenance.options if self.provenance else {}
        return "data" in asked or asked.get("shard", "none") != "none"

    @property
    def names_rows(self) -> bool:
        """True if the plan's programs name the rows of a message: true if a stage is on several devices."""
        return any(len(stage.devices) > 1 for stage in self.stages)

    @property
    def workers(self) -> tuple[int, ...]:
        """The devices in use, host by host; worker w runs device w of them.

        Devices of a host are in the order of ranks, and within a rank in the order of its grid.
        """
        devices = (device for stages in self.ranks for device in self.stages[stages[0]].devices)
        return tuple(sorted(devices, key=lambda device: self.cluster.devices[device].host))

    def stages_of(self, device: int) -> tuple[int, ...]:
        """Return the stages that a device holds."""
        return tuple(number for number, stage in enumerate(self.stages) if device in stage.devices)

    @property
    def placement(self) -> tuple[tuple[int, ...], ...]:
        """The devices of every stage."""
        return tuple(stage.devices for stage in self.stages)

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every rank. A rank is one grid of devices; ranks are ordered by their first
        stages.
        """
        grids: dict[tuple[int, ...], list[int]] = {}
        for number, stage in enumerate(self.stages):
            grids.setdefault(stage.devices, []).append(number)
        return tuple(map(tuple, grids.values()))

    @property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The stages that have a copy of each shared parameter."""
        return tuple(
            tuple(
                n for n, s in enumerate(self.stages) if any(s.start <= user < s.stop for user in shared.users)
            )
            for shared in self.measurement.shared
        )

    @property
    def summed(self) -> dict[int, tuple[int, ...]]:
        """The stages that all-reduce the gradients of each shared parameter, by its number.

        Only parameters with gradients on several stages are included.
        """
        shared = zip(self.measurement.shared, self.holders, strict=True)
        return {n: stages for n, (one, stages) in enumerate(shared) if one.gradient_bytes and len(stages) > 1}

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The first layer of every stage but the first."""
        return tuple(stage.start for stage in self.stages[1:])

    @property
    def split(self) -> tuple[int, ...]:
        """Layers per stage."""
        return tuple(stage.stop - stage.start for stage in self.stages)

    def decisions_of(self, stage: int, what: What) -> tuple[Decision, ...]:
        """Return the decisions of one kind about one stage."""
        return tuple(d for d in self.decisions if d.stage == stage and d.what is what)

    @property
    def headline(self) -> str:
        """The model, its parts, the number of stages and the cluster, in one line."""
        return (
            f"{self.profile.model}: {self.profile.parts} in {counted(len(self.stages), 'stage')} on "
            f"{self.cluster}"
        )

    def __repr__(self) -> str:
        """Return one line instead of thousands."""
        return f"<Plan: {self.headline}>"


def _check_decision(decision: Decision, stages: tuple[Stage, ...], cluster: Cluster) -> None:
    """Check that the decision's layers and places exist.

    Raises:
        UsageError: no such stage, layers outside the stage, or a place that the cluster does not have.
    """
    if not 0 <= decision.stage < len(stages):
        raise UsageError(f"{decision}: the plan has {counted(len(stages), 'stage')}")
    stage = stages[decision.stage]
    if any(not stage.start <= layer < stage.stop for layer in decision.layers):
        raise UsageError(f"{decision}: the stage holds {layers_text(stage.start, stage.stop)}")
    for member in () if decision.place is None else decision.place.members:
        cluster.check(member.at(cluster.devices[stage.devices[0]].host), str(decision))


Technique = Literal["recompute", "offload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopDecision:
    """What happens in the calls of one submodule to the tensors that autograd saves there.

    Args:
        name: the submodule, as in `named_modules`.
        technique: `recompute` or `offload`.
        moved: numbers of the offloaded tensors among those that a call saves, in their order.
        buffers: buffers that a call writes, such as statistics; a second forward starts from their values
            before the first one, and leaves the present values alone.
        saved_bytes: bytes that the calls of a step no longer hold until backward.
        seconds: estimated time lost in a step.
    """

    name: str
    technique: Technique
    moved: tuple[int, ...] = ()
    buffers: tuple[str, ...] = ()
    saved_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlan:
    """The decisions for a module in a loop, and the peaks of that loop.

    Args:
        budget_bytes: the limit.
        peak_bytes: certified peaks of the first step and of later ones, with the decisions.
        plain_bytes: the same without them.
        decisions: submodules that do not keep their saved tensors.
        step_seconds: estimated time of a step without the decisions.
        state_on_host: whether the optimizer's state is on the host between steps.
        refused: submodules that cannot be recomputed, with the reason.
        gap: memory inside kernels that could not be measured, as a phrase; empty if there is none.

    Raises:
        UsageError: a submodule has two decisions, or a field has another type.
    """

    budget_bytes: int
    peak_bytes: tuple[int, int]
    plain_bytes: tuple[int, int]
    decisions: tuple[LoopDecision, ...]
    step_seconds: float
    state_on_host: bool = False
    refused: tuple[tuple[str, str], ...] = ()
    gap: str = ""

    def __post_init__(self) -> None:
        check_types(self)
        names = [decision.name for decision in self.decisions]
        if len(set(names)) < len(names):
            raise UsageError("a loop plan decides once for each submodule")

    def __repr__(self) -> str:
        """Return one line, without the decisions."""
        decided, peak = counted(len(self.decisions), "decision"), format_bytes(max(self.peak_bytes))
        return f"<LoopPlan: {decided}, peak {peak} within {format_bytes(self.budget_bytes)}>"

    @property
    def lost_seconds(self) -> float:
        """Estimated seconds that the decisions add to a step."""
        return sum(decision.seconds for decision in self.decisions)
