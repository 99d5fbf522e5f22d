"""The plan of a loop: a technique for each submodule, and the certified peaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipefit.tables import Block, Shown, Table
from pipefit.units import format_bytes, format_seconds

Technique = Literal["recompute", "offload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
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
class LoopPlan(Shown):
    """The decisions for a module in a loop, and the peaks of that loop.

    Args:
        budget_bytes: the limit.
        peak_bytes: certified peaks of the first step and of later ones, with the decisions.
        plain_bytes: the same without them.
        decisions: submodules that do not keep their saved tensors.
        step_seconds: estimated time of a step without the decisions.
        refused: submodules that cannot be recomputed, with the reason.
        gap: memory inside kernels that could not be measured, as a phrase; empty if there is none.
    """

    budget_bytes: int
    peak_bytes: tuple[int, int]
    plain_bytes: tuple[int, int]
    decisions: tuple[Decision, ...]
    step_seconds: float
    refused: tuple[tuple[str, str], ...] = ()
    gap: str = ""

    @property
    def lost_seconds(self) -> float:
        """Estimated seconds that the decisions add to a step."""
        return sum(decision.seconds for decision in self.decisions)

    def _blocks(self) -> list[Block]:
        first, steady = map(format_bytes, self.peak_bytes)
        share = self.lost_seconds / self.step_seconds if self.step_seconds else 0.0
        peaks = (
            f"Peak {steady} within a budget of {format_bytes(self.budget_bytes)}; first step {first}; "
            f"without the plan {format_bytes(max(self.plain_bytes))}."
        )
        cost = f"A step takes about {share:.1%} longer."
        if not self.decisions:
            cost = "Every submodule keeps its saved tensors."
        blocks: list[Block] = [f"{peaks}\n{cost}"]
        if self.decisions:
            rows = tuple(
                (d.name, d.technique, format_bytes(d.saved_bytes), format_seconds(d.seconds))
                for d in self.decisions
            )
            blocks.append(Table(("submodule", "technique", "frees", "costs a step"), rows))
        notes = [f"{name} is not recomputed: {why}." for name, why in self.refused]
        if self.gap:
            notes.append(self.gap)
        return [*blocks, "\n".join(notes)] if notes else blocks
