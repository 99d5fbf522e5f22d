"""The collectives of a device around an update: sums of gradients, parameters from their owners, and agreements.

What they exchange is chosen in `pipefit.runtime.gradients`; the devices that take part are those that the plan's cost
counts (`pipefit.cost.communicators`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipefit.actions import Action, Kind
from pipefit.cost.communicators import members
from pipefit.plans import Plan
from pipefit.runtime.absent import mark, may_be_absent, unmark
from pipefit.runtime.gradients import Exchanged, gathered_parameters, others_freed, reduced, summed_gradients
from pipefit.runtime.stage import StageRunner
from pipefit.runtime.transfers import Transfers

EXECUTED = frozenset({Kind.REDUCE, Kind.UNSHARD, Kind.AGREE})
Resized = Sequence[torch.UntypedStorage]  # storages that have got or lost their memory


class Collectives:
    """The collectives of one device of `plan`."""

    def __init__(self, plan: Plan, device: int, transfers: Transfers) -> None:
        self._plan, self._device, self._transfers = plan, device, transfers
        self._marks = may_be_absent(plan.profile)

    def start(self, stage: StageRunner, action: Action) -> Resized:
        """Begin a collective of a stage."""
        resized = stage.gather(action) if action.kind is Kind.UNSHARD else ()
        exchanged = self._exchanged(stage, action)
        devices = members(self._plan, action)
        owners = [devices[owner] for owner in exchanged.owners]
        self._transfers.collect(action, exchanged.tensors, devices, self._device, owners)
        return resized

    def join(self, stage: StageRunner, action: Action) -> Resized:
        """Wait for the end of a collective, and let the stage have what it brought."""
        tensors = self._transfers.join(action) or ()
        if action.kind is Kind.REDUCE:
            resized = others_freed(stage, action)
            if self._marks:
                unmark(reduced(stage, action, self._plan.summed))
            return resized
        if action.kind is Kind.UNSHARD:
            return stage.gather(action)
        assert stage.agreement is not None
        stage.agreement.conclude(*tensors)
        return ()

    def _exchanged(self, stage: StageRunner, action: Action) -> Exchanged:
        if action.kind is Kind.REDUCE:
            if self._marks:
                mark(reduced(stage, action, self._plan.summed))
            return summed_gradients(stage, action, self._plan.summed)
        if action.kind is Kind.UNSHARD:
            return gathered_parameters(stage, action)
        assert stage.agreement is not None
        return Exchanged([stage.agreement.contribution(stage.device)], [])
