"""Options of planning, from the command line to the planners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self, TypedDict, cast

from pipefit.errors import UsageError
from pipefit.lowering import Recompute
from pipefit.schema.grids import Sharding
from pipefit.schema.training import Versions
from pipefit.schema.validation import check_arguments, check_names, check_types

Goal = Literal["throughput", "peak"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """Techniques with which planners may free memory; all by default.

    `recompute` allows runs of layers inside blocks, whole blocks only, or nothing. Tensors move to the `host`
    or to `peers`; `mapping` permutes stages over devices to bring lenders near, and `striping` divides one
    offload over several peers. Without `ahead`, tensors are reloaded or recomputed only right before the
    backward that needs them. `spill` allows gradients and parameters to move; since they then move in every
    pass, steps become many times longer. `state` allows optimizer state to move.
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


class PlanArguments(TypedDict, total=False):
    """Keyword arguments of `pipefit.plan`: the fields of `PlanOptions`, for type checkers."""

    batch_size: int | None
    microbatches: int | None
    microbatch_size: int | None
    schedule: str | None
    clip_norm: float | None
    versions: Versions
    objective: Goal
    planner: str | None
    means: Means
    stages: int | None
    data: int | None
    tensor: int | None
    sequences: bool | None
    shard: Sharding | None
    recompute: Recompute
    effort: float
    allow_infeasible: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `plan` and of every planner; None leaves a choice open.

    A step has `batch_size` samples, in `microbatches` equal parts or in microbatches of `microbatch_size`.
    `schedule`, `clip_norm` and `versions` are those of `Training`. `objective` is the fastest step that fits,
    or the lowest peak. `planner` is a name in `PLANNERS`; default: `joint` for throughput, `exact` for peak.
    `means` are the techniques with which `joint` and `mpress` may free memory.

    Without `stages` a plan uses every device, or as many devices as the model has blocks. `data` and `tensor`
    are the degrees of all stages: the number of replicas, and of tensor-parallel ranks of each replica.
    `sequences` says whether all tensor-parallel ranks divide positions too, and `shard` is the state that the
    replicas of a stage divide (`Grid`). Planners that can choose these four do so if they are None.

    `recompute` says which layers are recomputed, and for which microbatches
    (`lowering.passes.recomputation`). With `allow_infeasible` a plan that exceeds a device's budget is
    returned; otherwise `InfeasibleError` is raised. `effort` scales the work budgets of searches by
    simulation; it is more than 0.

    Raises:
        UsageError: `effort` is not a positive finite number, or a field has a wrong type.
    """

    batch_size: int | None = None
    microbatches: int | None = None
    microbatch_size: int | None = None
    schedule: str | None = None
    clip_norm: float | None = None
    versions: Versions = "weights"
    objective: Goal = "throughput"
    planner: str | None = None
    means: Means = Means()
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
            raise UsageError(
                f"the effort of a search is a part of its budgets, more than 0, not {self.effort}"
            )

    @classmethod
    def named(cls, given: PlanArguments) -> Self:
        """Return the options with these keyword arguments of `plan`.

        Raises:
            UsageError: an argument is unknown, or has another type.
        """
        check_names("plan", given, cls, _ELSEWHERE)
        check_arguments(cls, given)
        return cls(**given)

    @property
    def describes_training(self) -> bool:
        """True if an option describes the training, so that no `Training` can be given too."""
        default = PlanOptions()
        return any(getattr(self, name) != getattr(default, name) for name in _OF_TRAINING)

    @property
    def recorded(self) -> dict[str, Any]:
        """The given options that a plan records: those of stages and of the search."""
        return {
            name: value
            for name, value in asdict(self).items()
            if value is not None and name not in (*_OF_TRAINING, *_OF_CALL)
        }

    @classmethod
    def of_record(cls, recorded: Mapping[str, object]) -> Self:
        """Return the recorded options of stages and recomputation, without those of the search.

        Raises:
            UsageError: the record, read from a file, has a wrong type.
        """
        kept = ("stages", "data", "tensor", "sequences", "shard", "recompute")
        given = {name: value for name, value in recorded.items() if name in kept}
        return cls.named(cast("PlanArguments", given))


_OF_TRAINING = "batch_size", "microbatches", "microbatch_size", "schedule", "clip_norm", "versions"
_OF_CALL = "objective", "planner", "means"
_ELSEWHERE = {
    "precision": "it belongs to the task, pipefit.Task(module, ..., precision=...), or to a Training"
} | {
    name: f"it belongs to the task, pipefit.Task(module, ..., {name}=...)"
    for name in ("batch", "loss", "optimizer", "groups", "scheduler", "granularity")
}
