"""What a stage holds whatever microbatches are in flight: parameters, gradients, optimizer state; and its update.

What belongs to a microbatch is in `pipefit.cost.residency`. A parameter or a buffer that several layers of the stage
share exists once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from pipefit.cost.effects import Effect, effect
from pipefit.cost.storages import StageStorages


class StageRest:
    """The bytes of a stage that do not belong to a microbatch, in a step of `microbatches`.

    `everything` says that a version of the weights has room for gradients and optimizer state too.
    """

    def __init__(self, storages: StageStorages, microbatches: int, *, everything: bool = False) -> None:
        self.storages, self.microbatches, self.everything = storages, microbatches, everything

    @cached_property
    def parameter_bytes(self) -> int:
        """Parameters, buffers and constants."""
        repeated = sum(again.shared.nbytes for again in self.storages.repetitions)
        repeated += sum(again.shared.nbytes for again in self.storages.repeated_buffers)
        return sum(cost.static_bytes for cost in self.storages.costs) - repeated

    @property
    def loss_bytes(self) -> int:
        """On the last stage, the losses of all microbatches, four bytes each."""
        return 4 * self.microbatches if self.storages.last else 0

    @cached_property
    def gradient_bytes(self) -> int:
        """Parameter gradients, from the first backward of a step to its STEP."""
        repeated = sum(again.shared.gradient_bytes for again in self.storages.repetitions)
        return sum(cost.gradient_bytes for cost in self.storages.costs) - repeated

    @cached_property
    def weight_bytes(self) -> int:
        """All parameters that are trained, without those that no update changes."""
        shared = sum(again.shared.nbytes for again in self.storages.repetitions if again.shared.gradient_bytes)
        return sum(cost.trained_bytes for cost in self.storages.costs) - shared

    @property
    def room_bytes(self) -> int:
        """What a version takes beside its weights."""
        return self.gradient_bytes + self.state_bytes if self.everything else 0

    @property
    def version_bytes(self) -> int:
        """What a version of the weights takes."""
        return self.weight_bytes + self.room_bytes

    @cached_property
    def early_state_bytes(self) -> int:
        """Optimizer state that exists before the first step."""
        repeated = sum(again.shared.early_state_bytes for again in self.storages.repetitions)
        return sum(cost.early_state_bytes for cost in self.storages.costs) - repeated

    @cached_property
    def state_bytes(self) -> int:
        """Optimizer state, from the first STEP on."""
        repeated = sum(again.shared.state_bytes for again in self.storages.repetitions)
        return sum(cost.state_bytes for cost in self.storages.costs) - repeated

    @cached_property
    def first_update(self) -> Effect:
        """The first STEP, which creates the optimizer state, one layer after the other."""
        repeated = Counter[int]()  # by position, bytes of state that an earlier layer's update has created already
        for again in self.storages.repetitions:
            repeated[again.later] += again.shared.state_bytes - again.shared.early_state_bytes
        grown = 0
        peaks = []
        for position, cost in enumerate(self.storages.costs):
            level = grown + cost.update_first_peak_bytes - repeated[position]
            peaks.append((level, cost.update_first_workspace_bytes))
            grown += cost.state_bytes - cost.early_state_bytes - repeated[position]
        peak, workspace = _first_highest(peaks)
        return effect(peak_bytes=peak, workspace=workspace, gradients=-self.gradient_bytes, optimizer=grown)

    @cached_property
    def later_update(self) -> Effect:
        """Every later STEP."""
        costs = self.storages.costs
        peak, workspace = _first_highest([(cost.update_peak_bytes, cost.update_workspace_bytes) for cost in costs])
        return effect(peak_bytes=peak, workspace=workspace, gradients=-self.gradient_bytes)


def _first_highest(moments: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The first of the highest moments, as a meter keeps it: its level, and the part that is a kernel's workspace."""
    return max(moments, key=lambda moment: moment[0])
