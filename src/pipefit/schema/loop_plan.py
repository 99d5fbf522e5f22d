"""The plan of a loop: a technique for each submodule, and the certified peaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipefit.errors import UsageError
from pipefit.schema.validation import check_types
from pipefit.texts import counted
from pipefit.units import format_bytes

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
