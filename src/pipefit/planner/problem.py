"""The planning problem (`Question`), and the result of a planner (`PlannerResult`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypedDict

from pipefit.errors import UsageError
from pipefit.lowering import recompute_decisions
from pipefit.planner.closed_forms.ranges import Ranges, ranges_of
from pipefit.planner.closed_forms.surroundings import Surroundings, surroundings
from pipefit.planner.options import Means, PlanOptions
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision
from pipefit.schema.grids import SHARDINGS, Grid, Sharding, Stage, dividing
from pipefit.schema.plan import Objective, Plan
from pipefit.schema.profile import Measurement, ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import Assembled
from pipefit.texts import counted

# ---- Degrees of stages: the devices that share a stage and the way they share it.
#
# A stage of degree (data d, tensor t) is on d t devices: d replicas, each of which computes a local batch of
# every microbatch, of t tensor-parallel ranks, each of which holds a part of the layers and, with
# `sequences`, computes some positions between them. The memory and work of a device are those of the profile
# at the local batch's size, so a degree is possible only if the profile has that size.


class Pins(TypedDict):
    """A degree under the names of planner options and grid fields."""

    data: int
    tensor: int
    sequences: bool


class Degree(NamedTuple):
    """Number of replicas, and of tensor-parallel ranks of each, which may divide positions (`sequences`)."""

    data: int
    tensor: int
    sequences: bool = False

    @staticmethod
    def of(grid: Grid) -> Degree:
        """Return the degree of a grid."""
        return Degree(grid.data, grid.tensor, grid.sequences)

    @staticmethod
    def requested(options: PlanOptions) -> Degree:
        """Return the smallest degree that stages may have under some options."""
        return Degree(options.data or 1, options.tensor or 1, bool(options.sequences and options.tensor))

    def __str__(self) -> str:
        along = " with sequence parallelism" if self.sequences else ""
        return f"{counted(self.data, 'replica')} of {counted(self.tensor, 'shard')} each{along}"

    @property
    def pins(self) -> Pins:
        """The fields by name."""
        return {"data": self.data, "tensor": self.tensor, "sequences": self.sequences}

    @property
    def devices(self) -> int:
        """Number of devices of a stage of this degree."""
        return self.data * self.tensor

    def groups(self, devices: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Return the tensor-parallel ranks of the first replica, and the replicas of the first rank."""
        return devices[: self.tensor], devices[: self.devices : self.tensor]


SINGLE = Degree(1, 1)
_DIVIDED = {"optimizer": "optimizer state", "gradients": "gradients", "parameters": "parameters"}


def divisors(size: int, most: int) -> tuple[int, ...]:
    """Return numbers of replicas up to `most` that divide `size`, each at least twice the one before."""
    result = [1]
    for number in range(2, min(size, most) + 1):
        if size % number == 0 and number >= 2 * result[-1]:
            result.append(number)
    return tuple(result)


def divisible(training: Training) -> tuple[Sharding, ...]:
    """Return the kinds of state that replicas of a stage may divide, the smallest first.

    Under an asynchronous schedule, parameters cannot be divided, and nothing can if every version of the
    weights keeps everything.
    """
    if not training.endless:
        return SHARDINGS
    return SHARDINGS[:1] if training.versions == "everything" else SHARDINGS[:-1]


def check_divided(training: Training, shard: Sharding | None) -> None:
    """Check that replicas may divide the requested state under this schedule.

    Raises:
        UsageError: they may not.
    """
    if shard is not None and shard not in divisible(training):
        raise UsageError(
            f"schedule {training.schedule} updates with microbatches in flight, each with its own weight "
            f"version, so replicas cannot shard {_DIVIDED[shard]}: shard gradients (with versions of "
            "weights only), or use schedule 1f1b"
        )


def degrees_of(
    profile: ModelProfile,
    training: Training,
    devices: int,
    options: PlanOptions,
    *,
    unreplicated: bool = False,
) -> tuple[Degree, ...]:
    """Return the degrees that stages may have on this number of devices, rising.

    `data`, `tensor` and `sequences` of the options restrict them. Requested sharding (`shard`) needs several
    replicas in some degree. With `unreplicated` no degree has replicas.

    Raises:
        UsageError: the requested degrees are impossible; the message says which are possible.
    """
    size = training.microbatch_size
    check_pins(profile, size, devices, options)
    check_divided(training, options.shard)
    known = [measurement for measurement in profile.measurements if _divides(measurement, size)]
    result = {Degree(size // one.microbatch_size, one.tensor, one.sequences) for one in known}
    return tuple(
        sorted(
            degree
            for degree in result
            if degree.devices <= devices
            and options.data in (None, degree.data)
            and (degree.data == 1 or not unreplicated)
            and options.tensor in (None, degree.tensor)
            and (options.sequences in (None, degree.sequences) or degree.tensor == 1)
        )
    )


def _divides(measurement: Measurement, size: int) -> bool:
    return size % measurement.microbatch_size == 0


def check_pins(
    profile: ModelProfile, size: int, devices: int, options: PlanOptions, batch: int | None = None
) -> None:
    """Check that stages can have the requested degrees with microbatches of `size` samples.

    Sharding (`shard`) needs replicas, and `sequences` needs tensor-parallel ranks. `batch` is the number of
    samples of a step, if it was requested.

    Raises:
        UsageError: they cannot.
    """
    check_degrees(size, devices, options, batch)
    shard = options.shard
    if shard is not None and shard != "none":
        _check_replicas(profile, size, shard, most=_most_replicas(size, devices, options))
    along = any(measurement.sequences for measurement in profile.measurements)
    if options.sequences and options.tensor is None and not along:
        raise UsageError(
            f"{profile.model} was profiled without sequence parallelism: profile it, or plan the model, "
            "with --tensor 2 --sequences"
        )
    degree = Degree.requested(options)
    if degree == SINGLE:
        return
    _check_slices(profile, size, degree.data)
    profile.at(size // degree.data, degree.tensor, sequences=degree.sequences)


def check_degrees(size: int, devices: int, options: PlanOptions, batch: int | None = None) -> None:
    """Check the parts of `check_pins` that need no profile.

    Raises:
        UsageError: stages cannot have these degrees, whatever the model.
    """
    for what, number in (("data", options.data), ("tensor", options.tensor)):
        if number is not None and number < 1:
            raise UsageError(f"a stage needs at least one device: {what} must be 1 or more, not {number}")
    if options.sequences and options.tensor == 1:
        raise UsageError("sequence parallelism needs several shards: give tensor=2 or more, or omit it")
    degree = Degree.requested(options)
    if degree.devices > devices:
        raise UsageError(
            f"a stage of {degree} needs {counted(degree.devices, 'device')}, but there are {devices}: "
            "use fewer"
        )
    if size % degree.data:
        raise UsageError(
            f"{degree.data} replicas cannot split microbatches of {counted(size, 'sample')} evenly: use "
            f"{dividing(size, degree.data, batch)}, or another number of replicas"
        )
    shard = options.shard
    if shard is not None and shard != "none":
        most = _most_replicas(size, devices, options)
        if all(size % count for count in range(2, most + 1)):
            raise UsageError(
                f"replicas of a stage divide {_DIVIDED[shard]}, and with microbatches of "
                f"{counted(size, 'sample')} no "
                f"stage can have two here: {_two_replicas(options, devices)}, or leave out what they "
                "divide"
            )


def _most_replicas(size: int, devices: int, options: PlanOptions) -> int:
    """Return the requested number of replicas, or the most that a stage can have."""
    return min(size, devices // (options.tensor or 1)) if options.data is None else options.data


def _two_replicas(options: PlanOptions, devices: int) -> str:
    """Return the advice that would let a stage have two replicas."""
    if options.data is not None:
        return "give 2 or more replicas"
    if devices < 2 * (options.tensor or 1):
        return "give fewer shards" if options.tensor and devices > 1 else "choose a cluster with more devices"
    return "use microbatches of an even number of samples"


def _check_replicas(profile: ModelProfile, size: int, shard: str, *, most: int) -> None:
    """Check that a stage can have two replicas or more, up to `most`."""
    counts = {
        size // measurement.microbatch_size
        for measurement in profile.measurements
        if _divides(measurement, size)
    }
    if not any(1 < count <= most for count in counts):
        raise UsageError(
            f"sharding {_DIVIDED[shard]} needs two replicas of a stage, which microbatches of "
            f"{counted(size, 'sample')} do not allow here: profile {profile.model} at a size and its half, "
            "such as 2 and 1 (-b 2 -b 1), give 2 or more replicas, or do not shard"
        )


def _check_slices(profile: ModelProfile, size: int, data: int) -> None:
    measured = sorted({measurement.microbatch_size for measurement in profile.measurements})
    if size // data not in measured:
        raise UsageError(
            f"{data} replicas compute local batches of {counted(size // data, 'sample')}, but "
            f"{profile.model} was profiled at {', '.join(map(str, measured))}: profile it at {size} and "
            f"{size // data} (-b {size} -b {size // data}, microbatch_size=({size}, {size // data}))"
        )


# ---- Splits and results

ON_GRIDS = (
    "joint",
    "exact",
    "lean",
    "capture",
    "alpa",
)  # planners that choose the number of devices of each stage


CHOOSE_SIZES = "joint", "exact", "lean"  # planners that choose the microbatch size


def check_stages(options: PlanOptions, cluster: Cluster) -> None:
    """Check that the cluster has devices for the requested number of stages, if one is requested.

    Raises:
        UsageError: the number is below one, or the cluster has too few devices.
    """
    asked, devices = options.stages, len(cluster.devices)
    if asked is not None and asked < 1:
        raise UsageError(f"a plan needs at least one stage, not {asked}")
    each = Degree.requested(options).devices
    if asked is not None and asked * each > devices:
        of = f" of {each} devices" if each > 1 else ""
        raise UsageError(
            f"cluster {cluster.name} has {counted(devices, 'device')}, too few for "
            f"{counted(asked, 'stage')}{of}: "
            f"use {max(1, devices // each)} or fewer"
        )


class DeviceClass(NamedTuple):
    """Devices of one kind with the same budget, which are interchangeable."""

    memory_bytes: int
    devices: tuple[int, ...]


class Split(NamedTuple):
    """Split of the model: stage s holds blocks `edges[s]` to `edges[s + 1] - 1` and runs on `devices[s]`.

    If stages run on several devices, `devices` are the first ones of their `grids`.
    """

    edges: tuple[int, ...]
    devices: tuple[int, ...]
    grids: tuple[Grid, ...] = ()

    def grid(self, stage: int) -> Grid:
        """Return the devices of a stage."""
        return self.grids[stage] if self.grids else Grid.of(self.devices[stage])


class PlannerResult(NamedTuple):
    """Result of a planner: a split, its value, and the number of splits, stages or plans evaluated.

    `work` is the work of a search by simulation, in the unit of its budgets. `proven` says that no other
    split has a lower value; `bound` is a lower bound of every plan's value, if one below `value` is known.
    `decisions` None stands for the recomputation that the question's options request. `remarks` are sentences
    about the search, and `simulation` is the plan's, if the planner has made it.
    """

    split: Split
    objective: Objective
    value: float
    evaluated: int = 1
    work: int = 0
    proven: bool = True
    bound: float | None = None
    decisions: tuple[Decision, ...] | None = None
    remarks: tuple[str, ...] = ()
    simulation: Assembled | None = None


@dataclass(frozen=True, kw_only=True)
class Question:
    """Planning problem: a profile, a cluster, a training, and the planner's options.

    `opens_sizes` says that the user did not fix the microbatch size.

    Raises:
        UsageError: more stages than blocks or devices, an unknown schedule, or a microbatch size that was not
            profiled.
    """

    profile: ModelProfile
    cluster: Cluster
    training: Training
    options: PlanOptions = PlanOptions()
    opens_sizes: bool = False

    def __post_init__(self) -> None:
        check_stages(self.options, self.cluster)
        asked, blocks = self.options.stages, self.blocks
        if asked is not None and blocks < asked < len(self.profile.edges):
            raise UsageError(
                f"schedule {self.training.schedule} updates every stage separately, so layers that share a "
                "parameter, and those between them, must be in one stage: plan with at most "
                f"{counted(blocks, 'stage')}, untie the layers, or use schedule 1f1b"
            )
        if asked is not None and asked > blocks:
            why = f" ({self.profile.indivisible})" if self.profile.indivisible else ""
            raise UsageError(
                f"{self.profile.model} has {self.profile.parts}{why}, too few for "
                f"{counted(asked, 'stage')}: use {blocks} or fewer"
            )

    @cached_property
    def measurement(self) -> Measurement:
        """Layer costs at the training's microbatch size."""
        return self.profile.at(self.training.microbatch_size)

    @cached_property
    def means(self) -> Means:
        """Techniques with which the planner may free memory.

        If the optimizer updates all layers at once (`staying`), no state moves, since moved state is updated
        run by run.
        """
        means = self.options.means
        return replace(means, state=False, spill=False) if self.staying else means

    def using(self, means: Means) -> Question:
        """Return the question with other means."""
        return replace(self, options=replace(self.options, means=means))

    @cached_property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state of the model, each once."""
        return sum(self.measurement.state_bytes)

    @property
    def staying(self) -> str:
        """The reason why no state moves, whatever the means; empty if state may move."""
        reason = next((cost.undivided for cost in self.measurement.costs if cost.undivided), "")
        return reason and f"the optimizer {reason} and therefore updates all layers at once"

    @cached_property
    def degrees(self) -> tuple[Degree, ...]:
        """Degrees that stages may have, rising.

        Raises:
            UsageError: the requested degrees are impossible.
        """
        devices, replicated = len(self.cluster.devices), not self.changed_by_replicas
        return degrees_of(self.profile, self.training, devices, self.options, unreplicated=not replicated)

    @property
    def changed_by_replicas(self) -> str:
        """The reason why replicas would change the numbers of training; empty if not, or if requested."""
        return changed_by_replicas(self.profile, self.options, opens_sizes=self.opens_sizes)

    @property
    def shards(self) -> tuple[Sharding, ...]:
        """Kinds of state that replicas of a stage may divide, the smallest first."""
        if self.options.shard is not None:
            return (self.options.shard,)
        return divisible(self.training)

    def measured(self, degree: Degree) -> Measurement:
        """Return the layer costs of one device of a stage of this degree."""
        size = self.training.microbatch_size // degree.data
        return self.profile.at(size, degree.tensor, sequences=degree.sequences)

    def of_one(self, degree: Degree) -> Question:
        """Return the question of one device of a stage of this degree: local batches and parts of layers."""
        if degree == SINGLE:
            return self
        alike = [one for one in self.profile.measurements if one.way[1:] == degree[1:]]
        parts = tuple(replace(one, tensor=1, sequences=False) for one in alike)
        return replace(
            self,
            profile=replace(self.profile, measurements=parts),
            training=replace(self.training, batch_size=self.training.batch_size // degree.data),
            options=replace(self.options, **SINGLE.pins, shard=None),
        )

    @cached_property
    def edges(self) -> tuple[int, ...]:
        """First layer of each block, and the number of layers.

        Under a schedule that updates every stage separately, layers that share a trained parameter are in one
        block, together with the layers between them.
        """
        result = self.profile.edges
        if not self.training.endless:
            return result
        shared = [one.users for one in self.measurement.shared if one.gradient_bytes]
        return tuple(edge for edge in result if not any(users[0] < edge <= users[-1] for users in shared))

    @property
    def blocks(self) -> int:
        """Number of blocks; stages are cut between blocks."""
        return len(self.edges) - 1

    @cached_property
    def ranges(self) -> Ranges:
        """Memory of every range of blocks."""
        return ranges_of(self.measurement, self.edges, self.training.microbatches, self.options.recompute)

    @property
    def stages(self) -> int:
        """Number of stages."""
        each = Degree.requested(self.options).devices
        return self.options.stages or max(1, min(self.blocks, len(self.cluster.devices) // each))

    def layers(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first layer of blocks `start` to `stop - 1`, and the layer after the last one."""
        return self.edges[start], self.edges[stop]

    def surroundings(self, stage: int) -> tuple[Surroundings, ...]:
        """Return the surroundings of the compute actions of a stage at this position."""
        how = self.training
        return surroundings(
            how.schedule, stage, self.stages, how.microbatches, self.options.recompute, versions=how.versions
        )

    @cached_property
    def classes(self) -> tuple[DeviceClass, ...]:
        """Classes of equal devices, in the order of their lowest device numbers."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for number, device in enumerate(self.cluster.devices):
            groups.setdefault((self.cluster.budgets[number], device.kind.key), []).append(number)
        return tuple(
            DeviceClass(self.cluster.budgets[members[0]], tuple(members)) for members in groups.values()
        )

    @property
    def equal_budgets(self) -> bool:
        """True if all devices have the same budget; peaks are then compared in bytes, else as shares."""
        return len(set(self.cluster.budgets)) == 1

    @property
    def objective(self) -> Objective:
        """The objective of planners that minimise memory: the peak, or the peak's share of the budget."""
        return Objective.PEAK if self.equal_budgets else Objective.PEAK_SHARE

    def value(self, peaks: tuple[int, ...], devices: tuple[int, ...]) -> float:
        """Return the objective's value for stages with these peaks on these devices."""
        if self.equal_budgets:
            return max(peaks)
        return max(peak / self.cluster.budgets[device] for peak, device in zip(peaks, devices, strict=True))

    def in_order(self, edges: tuple[int, ...]) -> Split:
        """Return the split at `edges` with stage s on device s."""
        return Split(edges, tuple(range(self.stages)))


def changed_by_replicas(profile: ModelProfile, options: PlanOptions, *, opens_sizes: bool) -> str:
    """Return why replicas would change the numbers of whole microbatches; empty if not, or if requested.

    If microbatches may have any size (`opens_sizes`), the random draws of replicas are as good as those of
    smaller microbatches.
    """
    if options.data is not None or options.shard not in (None, "none"):
        return ""
    return profile.coupled or ("" if opens_sizes else profile.draws)


Planner = Callable[[Question], PlannerResult]


# ---- Plans of splits

_SHORT = 200  # forwards of all stages in a step up to which all microbatches are simulated


def plan_of(question: Question, split: Split, *, decisions: tuple[Decision, ...] | None = None) -> Plan:
    """Return the plan of a split, with these decisions or with those that the question's options request."""
    training = question.training
    layers = [question.layers(*blocks) for blocks in pairwise(split.edges)]
    stages = tuple(
        Stage(start=start, stop=stop, grid=split.grid(number)) for number, (start, stop) in enumerate(layers)
    )
    if decisions is None:
        decisions = recompute_decisions(
            stages,
            question.edges,
            question.options.recompute,
            training.schedule,
            training.microbatches,
        )
    return Plan(
        profile=question.profile,
        cluster=question.cluster,
        training=training,
        stages=stages,
        decisions=decisions,
    )


def shortened(question: Question, stages: int) -> Training:
    """Return the training with the number of microbatches that is simulated for plans of so many stages.

    3P + 2 under 1F1B, 6P + 2 under eager 1F1B and 5P under PipeDream; the training itself if that saves
    little under synchronous schedules, under other schedules, and if the question fixes the recomputation,
    which may depend on the number of microbatches. GPipe holds more memory for more microbatches.
    """
    how = question.training
    few = {"1f1b": 3 * stages + 2, "eager-1f1b": 6 * stages + 2, "pipedream": 5 * stages}.get(
        how.schedule, how.microbatches
    )
    saves = how.endless or (how.microbatches > few and stages * how.microbatches > _SHORT)
    if question.options.recompute != "never" or not saves:
        return how
    return replace(how, batch_size=how.microbatch_size * few, microbatches=few)
