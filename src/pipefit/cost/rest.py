"""What a stage holds from step to step: parameters, gradients, optimizer state; and what its update does to them.

The second residency beside that of the microbatches (`pipefit.cost.residency`): it belongs to the stage, not to a
microbatch. Parameters that several layers share exist once.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property

from pipefit.cost.effects import Effect, effect
from pipefit.cost.storages import StageStorages


class StageRest:
    """The bytes of a stage that do not belong to a microbatch, in a step of so many."""

    def __init__(self, storages: StageStorages, microbatches: int) -> None:
        self.storages, self.microbatches = storages, microbatches

    @cached_property
    def parameter_bytes(self) -> int:
        """Parameters and buffers."""
        repeated = sum(again.shared.nbytes for again in self.storages.repetitions)
        return sum(cost.parameter_bytes + cost.buffer_bytes for cost in self.storages.costs) - repeated

    @property
    def loss_bytes(self) -> int:
        """On the last stage, the losses of all microbatches, four bytes each."""
        return 4 * self.microbatches if self.storages.last else 0

    @cached_property
    def gradient_bytes(self) -> int:
        """Parameter gradients, from the first backward of a step to its end."""
        repeated = sum(again.shared.gradient_bytes for again in self.storages.repetitions)
        return sum(cost.gradient_bytes for cost in self.storages.costs) - repeated

    @cached_property
    def early_state_bytes(self) -> int:
        """Optimizer state that exists before the first step."""
        repeated = sum(again.shared.early_state_bytes for again in self.storages.repetitions)
        return sum(cost.early_state_bytes for cost in self.storages.costs) - repeated

    @cached_property
    def state_bytes(self) -> int:
        """Optimizer state, from the first step on."""
        repeated = sum(again.shared.state_bytes for again in self.storages.repetitions)
        return sum(cost.state_bytes for cost in self.storages.costs) - repeated

    @cached_property
    def first_update(self) -> Effect:
        """The STEP that creates the optimizer state, one layer after the other."""
        repeated = Counter[int]()  # bytes by which an earlier layer's update has grown a state that is this one's too
        for again in self.storages.repetitions:
            repeated[again.later] += again.shared.state_bytes - again.shared.early_state_bytes
        grown = peak = 0
        for position, cost in enumerate(self.storages.costs):
            peak = max(peak, grown + cost.update_first_peak_bytes - repeated[position])
            grown += cost.state_bytes - cost.early_state_bytes - repeated[position]
        return effect(peak_bytes=peak, gradients=-self.gradient_bytes, optimizer=grown)

    @cached_property
    def later_update(self) -> Effect:
        """Every later STEP."""
        peak = max(cost.update_peak_bytes for cost in self.storages.costs)
        return effect(peak_bytes=peak, gradients=-self.gradient_bytes)
