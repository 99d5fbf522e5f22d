"""Parameters that only their owners keep: on other replicas they have memory while they are gathered.

They are storages that lose their memory, as what is moved away is (`pipefit.runtime.moving`). So graphs and layers hold
the tensors all the time, and see their numbers again when they have come from their owner.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipefit.actions import Action, Kind
from pipefit.cost.shares import Gathered, Share
from pipefit.cost.states import Layers
from pipefit.runtime.states import storages_of
from pipefit.runtime.weight_copies import WeightCopies


class GatheredParameters:
    """The parameters of one replica of a stage, of which it keeps those of its own layers alone; false where it keeps
    all. `own` are those of every layer from `start` on; their `copies` have memory as long as they have.

    Raises:
        UsageError: the memory of a parameter is not torch's, and could not be freed.
    """

    def __init__(
        self, share: Share | None, own: Sequence[Sequence[nn.Parameter]], copies: WeightCopies, start: int
    ) -> None:
        self._gathered, self._own, self._copies, self._start = Gathered(share), own, copies, start
        self._storages: dict[int, list[tuple[torch.UntypedStorage, int]]] = {}  # by layer, of others' parameters
        for layer, parameters in enumerate(own, start=start):
            if self._gathered and share is not None and not share.owns(layer):
                copied = [copies.copies[id(weight)].tensor for weight in copies.own(layer)]
                self._storages[layer] = storages_of(
                    [*parameters, *copied], "the plan divides the parameters of this stage"
                )
        self.abandon()

    def __bool__(self) -> bool:
        return bool(self._gathered)

    def parameters(self, layers: Layers) -> list[list[Tensor]]:
        """Those of every layer, without their graphs: the trained ones, or all where only owners keep them."""
        every = self._own[layers[0] - self._start : layers[1] - self._start]
        return [[p.data for p in own if p.requires_grad or self] for own in every]

    def carry_out(self, action: Action, layers: Layers) -> list[torch.UntypedStorage]:
        """Allocate what an UNSHARD brings, or free what a RESHARD does not keep; the storages that were resized.

        Behind the join of an UNSHARD the copies have the values that have come, for a backward needs them too.
        """
        found = []
        for layer in self._gathered.carry_out(action, range(*layers)):
            for storage, nbytes in self._storages[layer]:
                storage.resize_(0 if action.kind is Kind.RESHARD else nbytes)
                found.append(storage)
        for layer in self._storages.keys() & range(*layers):
            for weight in self._copies.own(layer):
                copy = self._copies.copies[id(weight)]
                copy.fresh = False
                if action.kind is Kind.UNSHARD and action.wait:
                    copy.follow(weight)
        return found

    def check(self, action: Action, layers: Layers) -> None:
        """Check that the parameters of these layers are here.

        Raises:
            UsageError: some are not.
        """
        self._gathered.check(action, range(*layers))

    def abandon(self) -> None:
        """Free what others keep."""
        self._gathered.reset()
        for storages in self._storages.values():
            for storage, _ in storages:
                storage.resize_(0)
