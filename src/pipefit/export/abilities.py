"""What another tool can train, and everything in a plan that it cannot, reported at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from pipefit.errors import UsageError
from pipefit.schema.decisions import Decision, State, What
from pipefit.schema.devices import MemberKind
from pipefit.schema.plan import Plan

Offloadable = Literal["activations", "gradients", "optimizer", "parameters", "versions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """The abilities of a tool: its name, and values of `pipefit plan`'s options."""

    tool: str
    precisions: Collection[str]
    shards: Collection[str]  # state that replicas may divide
    schedules: Collection[str] = ("1f1b", "eager-1f1b")
    stages: bool = True  # whether a model may be divided into stages
    several: bool = (
        False  # whether a device may hold several stages, of which stage s is on device s mod devices
    )
    tensor: bool = False  # whether layers may be divided
    offloads: Collection[Offloadable] = ()  # what may be on a host between its uses

    def check(self, plan: Plan) -> None:
        """Check that the tool supports the plan, apart from the model's layers.

        Raises:
            UsageError: it does not; names all obstacles, and the options to plan with.
        """
        found = dict(self._obstacles(plan))
        if found:
            raise UsageError(
                f"{self.tool} does not support {', or '.join(found.values())}: plan with {' '.join(found)}"
            )

    def _obstacles(self, plan: Plan) -> Iterator[tuple[str, str]]:
        """Yield the options to plan with, and the description, of each obstacle."""
        if not self.stages and len(plan.stages) > 1:
            yield "--stages 1", "several stages"
        if plan.training.schedule not in self.schedules:
            yield f"--schedule {' or '.join(self.schedules)}", f"schedule {plan.training.schedule}"
        if plan.training.precision not in self.precisions:
            yield f"--precision {' or '.join(self.precisions)}", f"precision {plan.training.precision}"
        grids = Counter((stage.grid.data, stage.grid.tensor) for stage in plan.stages)
        ((data, tensor), _), *others = grids.most_common()
        if others or (tensor > 1 and not self.tensor):
            what = "replicas or shards that differ from stage to stage" if others else "tensor shards"
            yield f"--data {data} --tensor {tensor if self.tensor else 1}", what
        shards = {stage.grid.shard for stage in plan.stages if stage.grid.data > 1}
        if len(shards) > 1 or not shards <= {*self.shards}:
            yield f"--shard {' or '.join(self.shards)}", f"replicas that shard {' or '.join(sorted(shards))}"
        ranks = plan.ranks
        in_turn = all(
            [*held] == [*range(rank, len(plan.stages), len(ranks))] for rank, held in enumerate(ranks)
        )
        if len(ranks) < len(plan.stages) and not (self.several and in_turn):
            yield (
                "--stages N, one for each device",
                "several stages on a device" + ", not in turn" * self.several,
            )
        for decision in plan.decisions:
            kind = offloaded(decision)
            if kind is not None and (kind not in self.offloads or not is_on_host(decision)):
                yield (
                    "--planner exact (and --recompute always if that does not fit)",
                    f"offloaded tensors ({decision})",
                )
                break


def offloaded(decision: Decision) -> Offloadable | None:
    """Return what a decision offloads; None if it recomputes."""
    if decision.what is What.RECOMPUTE:
        return None
    return decision.subject.kind if isinstance(decision.subject, State) else "activations"


def is_on_host(decision: Decision) -> bool:
    """Return whether the decision's place is a host."""
    return all(member.kind is MemberKind.HOST for member, _ in decision.place or ())


def recomputes(plan: Plan) -> bool:
    """Return whether the plan recomputes any layer."""
    return any(decision.what is What.RECOMPUTE for decision in plan.decisions)
