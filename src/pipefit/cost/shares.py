"""Shares of a stage's state: which of its replicas owns each layer, where state is divided between them (ZeRO).

Whole layers are dealt out: the one with the most bytes first, each to the replica that owns the fewest by then. Those
that share a parameter have one owner. So every state keeps its form, any optimizer may be used, and updates are those
of profiles to the byte. The price is that shares are only as even as the layers allow: they differ by up to the largest
layer. An embedding that is larger than all
else together stays on one replica. (ZeRO: Rajbhandari et al., SC 2020; whole tensors are dealt out by torch's
`ZeroRedundancyOptimizer` too.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from pipefit.actions import Action, Kind
from pipefit.cost.storages import StageStorages
from pipefit.errors import UsageError
from pipefit.grids import Grid, Sharding, Stage
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

    def owning(self, *, all_layers: bool) -> Share:
        """The share of a replica that owns all layers, or none: then they belong to one that does not exist."""
        return self._replace(owners=(self.replica if all_layers else -1,) * len(self.owners))

    @property
    def divides_gradients(self) -> bool:
        """Whether only the owner of a layer keeps its gradients."""
        return "gradients" in self.divided

    @property
    def divides_parameters(self) -> bool:
        """Whether only the owner of a layer keeps its parameters."""
        return "parameters" in self.divided

    def keeps(self, kind: str, layer: int) -> bool:
        """Whether this replica keeps a state of a layer between steps."""
        return kind not in self.divided or self.owns(layer)


class Gathered:
    """The layers whose parameters are gathered, as the program of a replica goes on that keeps those of its own layers
    alone: what ledger and runtime agree on. Owners take part, as half-precision copies exist while they are gathered.
    Without a `share` that divides parameters all of them are always there.
    """

    def __init__(self, share: Share | None) -> None:
        self._divides = share is not None and share.divides_parameters
        self._coming, self._here = set[int](), set[int]()

    def __bool__(self) -> bool:
        return self._divides

    @property
    def layers(self) -> frozenset[int]:
        """The layers that have memory for what is gathered."""
        return frozenset(self._coming | self._here)

    def reset(self) -> None:
        """Put all parameters where they are between steps."""
        self._coming.clear()
        self._here.clear()

    def carry_out(self, action: Action, layers: Iterable[int]) -> list[int]:
        """An UNSHARD of these layers, its join, or a RESHARD: those of them that get memory, or lose it.

        Raises:
            UsageError: they are there already, or are not.
        """
        gathered = list(layers) if self._divides else []
        if action.kind is Kind.RESHARD:
            missing = [layer for layer in gathered if layer not in self._here]
            if missing:
                raise UsageError(f"{action} frees parameters of layer {missing[0]}, which are not here")
            self._here.difference_update(gathered)
            return gathered
        if action.wait:
            self._coming.difference_update(gathered)
            self._here.update(gathered)
            return []
        known = [layer for layer in gathered if layer in self._here or layer in self._coming]
        if known:
            raise UsageError(f"{action} brings parameters of layer {known[0]}, which are here or on their way")
        self._coming.update(gathered)
        return gathered

    def check(self, action: Action, layers: Iterable[int]) -> None:
        """Check that the parameters that an action of these layers needs are there.

        Raises:
            UsageError: some are not; says what has to come before the action.
        """
        missing = [layer for layer in layers if self._divides and layer not in self._here]
        if missing:
            raise UsageError(
                f"{action} needs the parameters of layer {missing[0]}, which replicas divide: the join of an "
                f"{Kind.UNSHARD} of this layer must come before it"
            )


def share_of(plan: Plan, stage: int, device: int) -> Share | None:
    """The share of a device in the state of its stage; None where nothing is divided."""
    place = plan.stages[stage]
    if place.grid.shard == "none":
        return None
    return share_among(place, device, owners(StageStorages.of(plan, stage), place.grid))


def share_among(place: Stage, device: int, owners: tuple[int, ...]) -> Share:
    """The share of a device of a stage whose layers have these owners."""
    return Share(place.start, owners, place.grid.replica_of(device), _DIVIDED[place.grid.shard])


def owners(storages: StageStorages, grid: Grid) -> tuple[int, ...]:
    """The replica that owns each layer of a stage: those with the most divided bytes are dealt out first."""
    sizes, first = _sizes(storages, _DIVIDED[grid.shard]), _first_users(storages)
    together = Counter[int]()  # bytes, by the first of the layers that share a parameter
    for layer, nbytes in enumerate(sizes):
        together[first[layer]] += nbytes
    found, owned = dict[int, int](), [0] * grid.data
    for layer in sorted(together, key=lambda layer: (-together[layer], layer)):
        found[layer] = min(range(grid.data), key=lambda replica: (owned[replica], replica))
        owned[found[layer]] += together[layer]
    return tuple(found[layer] for layer in first)


def _first_users(storages: StageStorages) -> list[int]:
    """For the layer at every position the first one with which it shares a parameter, or itself."""
    first = list(range(storages.stop - storages.start))
    for again in storages.repetitions:
        one, other = sorted((first[again.user], first[again.later]))
        first = [one if layer == other else layer for layer in first]
    return first


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
