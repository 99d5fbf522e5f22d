"""The planning problem that every planner solves (a `Question`), and its answer (`Found`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Literal, NamedTuple

from pipefit.errors import UsageError
from pipefit.lowering.passes.recomputation import Recompute
from pipefit.planner.closed_forms.ranges import Ranges, ranges_of
from pipefit.planner.closed_forms.surroundings import Surroundings, surroundings
from pipefit.planner.degrees import Degree, degrees_of, divisible
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision
from pipefit.schema.grids import Grid, Sharding
from pipefit.schema.plan import Objective
from pipefit.schema.profile import Measurement, ModelProfile
from pipefit.schema.training import Training
from pipefit.schema.validation import check_types
from pipefit.simulate.assembled import Assembled
from pipefit.texts import counted

# ----------------------------------------------------------------------------------------------------
# The cost rule of `mpress`: which technique frees the memory of one tensor for the fewest seconds.
#
# A tensor that a forward keeps for its backward has a live interval, the time between the two. It can be
#
#     kept          nothing is added
#     recomputed    its forward runs again, and nothing else computes meanwhile: all of that time is added
#     swapped       to the host, or to peers: copies run beside computing, and what exceeds the live interval is added
#
# `mpress_choice` chooses by these numbers, as the MPress paper does: the host if the live interval hides the
# copies; otherwise recomputation if it adds less than the host does; and then peers, while they have memory,
# if they add less than that. It is a rule for one tensor alone. What many tensors do to each other on one
# link is for the simulator to say, which `joint` asks of whole plans; for the table's tensors it decides as
# this rule does, or is faster. (Zhou et al., "MPress", HPCA 2023, and its table of six tensors.)


class Technique(StrEnum):
    """What is done with a tensor between its forward and its backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    HOST = "host"
    PEER = "peers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What planners may do to free memory: everything, or less where techniques are to be compared.

    Recomputed are runs of layers inside blocks, whole blocks alone, or nothing. Tensors move to the `host` or to
    `peers`, of which the `mapping` of stages to devices brings lenders near and `striping` uses several at once.
    Without `ahead`, nothing comes back or is recomputed before the backward that needs it is next. Gradients and
    parameters only move if `spill` says so, as they do in every pass, which makes steps many times longer. Optimizer
    state only moves if `state` says so.
    """

    recompute: Literal["runs", "blocks", "never"] = "runs"
    host: bool = True
    peers: bool = True
    mapping: bool = True
    striping: bool = True
    ahead: bool = True
    spill: bool = True
    state: bool = True

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def fewer(self) -> tuple[Means, ...]:
        """The means with one technique less: without recomputation, without the host, and without peers."""
        less: list[Means] = [replace(self, recompute="never")] if self.recompute != "never" else []
        less += [replace(self, host=False)] if self.host else []
        return (*less, *([replace(self, peers=False)] if self.peers else []))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCosts:
    """What the techniques cost for one tensor, in seconds; None where a technique is not to be had.

    `recompute_seconds` is the time of its second forward, `host_seconds` and `peer_seconds` those of the way out and
    back together, and `interval_seconds` how long it waits for its backward.

    Raises:
        UsageError: a negative time.
    """

    nbytes: int
    interval_seconds: float
    recompute_seconds: float | None = None
    host_seconds: float | None = None
    peer_seconds: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if any(seconds is not None and seconds < 0 for seconds in (self.interval_seconds, *self._seconds.values())):
            raise UsageError("a tensor's costs are times of zero or more")

    @property
    def _seconds(self) -> dict[Technique, float | None]:
        return {
            Technique.RECOMPUTE: self.recompute_seconds,
            Technique.HOST: self.host_seconds,
            Technique.PEER: self.peer_seconds,
        }

    @property
    def added_seconds(self) -> dict[Technique, float]:
        """What every technique that is to be had adds to a step."""
        found = {}
        for technique, seconds in self._seconds.items():
            if seconds is not None:
                hidden = 0.0 if technique is Technique.RECOMPUTE else self.interval_seconds
                found[technique] = max(0.0, seconds - hidden)
        return found


def mpress_choice(costs: TensorCosts) -> Technique:
    """The technique by the rule of the MPress paper, if peers have memory to spare.

    Raises:
        UsageError: no technique is to be had.
    """
    added = _some(costs)
    if added.get(Technique.HOST) == 0:
        return Technique.HOST
    first = [t for t in (Technique.RECOMPUTE, Technique.HOST) if t in added]
    without_peers = min(first, key=added.__getitem__, default=Technique.PEER)
    return Technique.PEER if added.get(Technique.PEER, float("inf")) < added[without_peers] else without_peers


def _some(costs: TensorCosts) -> dict[Technique, float]:
    """What techniques add; at least one is to be had."""
    if not costs.added_seconds:
        raise UsageError(f"{costs} leaves no technique to choose")
    return costs.added_seconds


# ----------------------------------------------------------------------------------------------------

ON_GRIDS = "joint", "exact", "lean", "capture", "alpa"  # planners that choose how many devices each stage has


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of every planner.

    `stages` None uses every device, or as many as there are blocks. `recompute` says which layers run forward twice,
    and for which microbatches (`pipefit.lowering.passes.recomputation`). With `allow_infeasible` the plan is returned
    even where a device's budget is too small for it; otherwise that raises `InfeasibleError`. `effort` is the part of
    their budgets that searches by simulation take, more than 0. `data` and `tensor` are the degrees of all stages:
    how many replicas each has, and how many shards each of these; without them, planners that can choose them do. The
    same holds of `sequences`, whether all shards divide positions too, and of `shard`, what the replicas of a stage
    divide (`Grid`).

    Raises:
        UsageError: no effort, or a field of another type.
    """

    stages: int | None = None
    data: int | None = None
    tensor: int | None = None
    sequences: bool | None = None
    shard: Sharding | None = None
    recompute: Recompute = "never"
    allow_infeasible: bool = False
    effort: float = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 < self.effort < float("inf"):
            raise UsageError(f"the effort of a search is a part of its budgets, more than 0, not {self.effort}")


def check_stages(options: Options, cluster: Cluster) -> None:
    """Check that a cluster has devices for the stages that are asked for, if their number is.

    Raises:
        UsageError: there are none, or more than it has devices for.
    """
    asked, devices = options.stages, len(cluster.devices)
    if asked is not None and asked < 1:
        raise UsageError(f"a plan has at least one stage, not {asked}")
    each = (options.data or 1) * (options.tensor or 1)
    if asked is not None and asked * each > devices:
        of = f" of {each} devices" if each > 1 else ""
        raise UsageError(
            f"cluster {cluster.name} has {counted(devices, 'device')}, too few for {counted(asked, 'stage')}{of}: "
            f"ask for {max(1, devices // each)} or fewer"
        )


class DeviceClass(NamedTuple):
    """Devices of one kind with the same budget, which are interchangeable."""

    memory_bytes: int
    devices: tuple[int, ...]


class Split(NamedTuple):
    """A split of the model: stage s holds blocks `edges[s]` to `edges[s + 1] - 1` and is on `devices[s]`.

    Where stages are on several devices, these are the first ones of their `grids`.
    """

    edges: tuple[int, ...]
    devices: tuple[int, ...]
    grids: tuple[Grid, ...] = ()

    def grid(self, stage: int) -> Grid:
        """The devices of a stage."""
        return self.grids[stage] if self.grids else Grid.of(self.devices[stage])


class Found(NamedTuple):
    """What a planner found: a split, its value, and how many splits, stages or plans were evaluated. `work` is what a
    search by simulation has taken, in the unit of its budgets.

    `proven` says that no other split has a lower value of the objective; `bound` is what no plan's value is below, if
    that is known to be lower. `decisions` are what is done with memory; without any, what the question's options say.
    `remarks` are sentences about what was tried, and `simulation` is that of the plan, where it was made on the way.
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
    """One planning problem: a profile, a cluster, a training, the planner's options, and the means it may use.

    `opens_sizes` says that nobody has asked for microbatches of this size.

    No state moves where the optimizer updates all layers at once (`staying`): what has moved is updated run by run.

    Raises:
        UsageError: more stages than blocks or devices, no such schedule, or a microbatch size that was not profiled.
    """

    profile: ModelProfile
    cluster: Cluster
    training: Training
    options: Options = Options()
    means: Means = Means()
    opens_sizes: bool = False

    def __post_init__(self) -> None:
        check_stages(self.options, self.cluster)
        asked, blocks = self.options.stages, self.blocks
        if asked is not None and blocks < asked < len(self.profile.edges):
            raise UsageError(
                f"schedule {self.training.schedule} updates every stage by itself, so that layers that share a "
                f"parameter are in one stage, with those between them: ask for {counted(blocks, 'stage')} or fewer, "
                "untie them, or use schedule 1f1b"
            )
        if asked is not None and asked > blocks:
            why = f" ({self.profile.indivisible})" if self.profile.indivisible else ""
            raise UsageError(
                f"{self.profile.model} has {self.profile.parts}{why}, too few for {counted(asked, 'stage')}: "
                f"ask for {blocks} or fewer"
            )
        if self.staying:
            object.__setattr__(self, "means", replace(self.means, state=False, spill=False))

    @cached_property
    def measurement(self) -> Measurement:
        """The layer costs at the training's microbatch size."""
        return self.profile.at(self.training.microbatch_size)

    @property
    def staying(self) -> str:
        """Why no state moves, whatever the means; empty if it may."""
        reason = next((cost.undivided for cost in self.measurement.costs if cost.undivided), "")
        return reason and f"the optimizer {reason} and so updates all layers at once"

    @cached_property
    def degrees(self) -> tuple[Degree, ...]:
        """The degrees that stages may have, rising.

        Raises:
            UsageError: those that are asked for are not possible.
        """
        asked, devices = self.options, len(self.cluster.devices)
        return degrees_of(
            self.profile,
            self.training,
            devices,
            data=asked.data,
            tensor=asked.tensor,
            sequences=asked.sequences,
            shard=asked.shard,
            unreplicated=bool(self.changed_by_replicas),
        )

    @property
    def changed_by_replicas(self) -> str:
        """Why stages have no replicas: they would change the numbers, and nobody asks for them; or empty."""
        return changed_by_replicas(self.profile, self.options, opens_sizes=self.opens_sizes)

    @property
    def shards(self) -> tuple[Sharding, ...]:
        """What replicas of a stage may divide, the least first."""
        if self.options.shard is not None:
            return (self.options.shard,)
        return divisible(self.training)

    def measured(self, degree: Degree) -> Measurement:
        """The layer costs of a device of a stage of this degree."""
        size = self.training.microbatch_size // degree.data
        return self.profile.at(size, degree.tensor, sequences=degree.sequences)

    @cached_property
    def edges(self) -> tuple[int, ...]:
        """The layer at which each block begins, and the number of layers. Under a schedule that updates every stage by
        itself, layers that share a trained parameter are in one block, with those between them.
        """
        found = self.profile.edges
        if not self.training.endless:
            return found
        shared = [one.users for one in self.measurement.shared if one.gradient_bytes]
        return tuple(edge for edge in found if not any(users[0] < edge <= users[-1] for users in shared))

    @property
    def blocks(self) -> int:
        """Number of blocks, between which stages are cut."""
        return len(self.edges) - 1

    @cached_property
    def ranges(self) -> Ranges:
        """The memory of every range of blocks."""
        return ranges_of(self.measurement, self.edges, self.training.microbatches, self.options.recompute)

    @property
    def stages(self) -> int:
        """Number of stages."""
        each = (self.options.data or 1) * (self.options.tensor or 1)
        return self.options.stages or max(1, min(self.blocks, len(self.cluster.devices) // each))

    def layers(self, start: int, stop: int) -> tuple[int, int]:
        """The first layer of blocks `start` to `stop - 1`, and the one behind them."""
        return self.edges[start], self.edges[stop]

    def surroundings(self, stage: int) -> tuple[Surroundings, ...]:
        """The surroundings that the compute actions of a stage at this position meet."""
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
        return tuple(DeviceClass(self.cluster.budgets[members[0]], tuple(members)) for members in groups.values())

    @property
    def equal_budgets(self) -> bool:
        """Whether all devices have the same budget: peaks are compared in bytes then, else as shares of budgets."""
        return len(set(self.cluster.budgets)) == 1

    @property
    def objective(self) -> Objective:
        """What planners that minimise memory minimise: the peak, or the peak's share of the budget."""
        return Objective.PEAK if self.equal_budgets else Objective.PEAK_SHARE

    def value(self, peaks: tuple[int, ...], devices: tuple[int, ...]) -> float:
        """The objective's value for stages with these peaks on these devices."""
        if self.equal_budgets:
            return max(peaks)
        return max(peak / self.cluster.budgets[device] for peak, device in zip(peaks, devices, strict=True))

    def in_order(self, edges: tuple[int, ...]) -> Split:
        """The split at `edges` with stage s on device s."""
        return Split(edges, tuple(range(self.stages)))


def changed_by_replicas(profile: ModelProfile, options: Options, *, opens_sizes: bool) -> str:
    """Why replicas would change the numbers of whole microbatches, unless they are asked for; or empty.

    Where microbatches may have any size (`opens_sizes`), draws of replicas are as good as those of smaller ones.
    """
    if options.data is not None or options.shard not in (None, "none"):
        return ""
    return profile.coupled or ("" if opens_sizes else profile.draws)


Planner = Callable[[Question], Found]
