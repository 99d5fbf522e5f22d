"""Shares of a stage's state: which of its replicas owns each layer, where state is divided between them (ZeRO).

Whole layers are dealt out: the one with the most bytes first, each to the replica that owns the fewest by then. So
every state keeps its form, any optimizer may be used, and updates are those of profiles to the byte. The price is that
shares are only as even as the layers allow: by no more than the largest layer. An embedding that is larger than all
else together stays on one replica. (ZeRO: Rajbhandari et al., SC 2020; whole tensors are dealt out by torch's
`ZeroRedundancyOptimizer` too.)
"""

from __future__ import annotations

from typing import NamedTuple

from pipefit.cost.storages import StageStorages
from pipefit.grids import Sharding
from pipefit.plans import Plan

_DIVIDED: dict[Sharding, frozenset[str]] = {  # states, as `LayerState` names them
    "none": frozenset(),
    "optimizer": frozenset({"optimizer", "early optimizer"}),
    "gradients": frozenset({"optimizer", "early optimizer", "gradients"}),
    "parameters": frozenset({"optimizer", "early optimizer", "gradients", "parameters"}),
}


class Share(NamedTuple):
    """What one replica of a stage owns: `owners` has the replica of every layer from `start` on, `divided` the states
    that only the owner of a layer keeps.
    """

    start: int
    owners: tuple[int, ...]
    replica: int
    divided: frozenset[str]

    def owner(self, layer: int) -> int:
        """The replica that owns a layer."""
        return self.owners[layer - self.start]

    def owns(self, layer: int) -> bool:
        """Whether this replica does."""
        return self.owner(layer) == self.replica

    def keeps(self, kind: str, layer: int) -> bool:
        """Whether this replica keeps a state of a layer between steps."""
        return kind not in self.divided or self.owns(layer)


def share_of(plan: Plan, stage: int, device: int) -> Share | None:
    """The share of a device in the state of its stage; None where nothing is divided."""
    grid = plan.stages[stage].grid
    if grid.shard == "none" or grid.data == 1:
        return None
    return Share(plan.stages[stage].start, owners(plan, stage), grid.replica_of(device), _DIVIDED[grid.shard])


def owners(plan: Plan, stage: int) -> tuple[int, ...]:
    """The replica that owns each layer of a stage: those with the most divided bytes are dealt out first."""
    grid = plan.stages[stage].grid
    sizes = _sizes(StageStorages.of(plan, stage), _DIVIDED[grid.shard])
    found, owned = [0] * len(sizes), [0] * grid.data
    for layer in sorted(range(len(sizes)), key=lambda layer: (-sizes[layer], layer)):
        found[layer] = min(range(grid.data), key=lambda replica: (owned[replica], replica))
        owned[found[layer]] += sizes[layer]
    return tuple(found)


def _sizes(storages: StageStorages, divided: frozenset[str]) -> list[int]:
    """The divided bytes of every layer; those of a shared parameter belong to the stage's first user."""
    found = [
        cost.state_bytes
        + cost.gradient_bytes * ("gradients" in divided)
        + cost.parameter_bytes * ("parameters" in divided)
        for cost in storages.costs[: storages.stop - storages.start]
    ]
    for again in storages.repetitions:
        shared = again.shared
        found[again.later] -= (
            shared.state_bytes
            + shared.gradient_bytes * ("gradients" in divided)
            + shared.nbytes * ("parameters" in divided)
        )
    return found
