"""What a stage holds whatever microbatches are in flight: parameters, gradients, optimizer state; and its update.

What belongs to a microbatch is in `pipefit.memory.storages`. A parameter or a buffer that several layers of the stage
share exists once. Of what replicas divide (`pipefit.memory.model_state`), only the part that this one keeps is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from pipefit.errors import UsageError
from pipefit.memory.storages import Effect, StageStorages, effect
from pipefit.schema.actions import Action, Kind, Subject
from pipefit.schema.grids import Grid, Sharding, Stage
from pipefit.schema.plan import Plan

# ----------------------------------------------------------------------------------------------------
# Shares of a stage's state: which of its replicas owns each layer, where state is divided between them
# (ZeRO).
#
# Whole layers are dealt out: the one with the most bytes first, each to the replica that owns the fewest by
# then. Those that share a parameter have one owner. So every state keeps its form, any optimizer may be used,
# and updates are those of profiles to the byte. The price is that shares are only as even as the layers
# allow: they differ by up to the largest layer. An embedding that is larger than all else together stays on
# one replica. (ZeRO: Rajbhandari et al., SC 2020; whole tensors are dealt out by torch's
# `ZeroRedundancyOptimizer` too.)

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


# ----------------------------------------------------------------------------------------------------

LayerState = Literal["parameters", "gradients", "optimizer", "early optimizer"]

_FIELDS = {
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer": "state_bytes",
    "early optimizer": "early_state_bytes",
}


class StageRest:
    """The bytes of a stage that do not belong to a microbatch, in a step of `microbatches`.

    `share` is what the device keeps of what replicas divide.
    """

    def __init__(self, storages: StageStorages, microbatches: int, *, share: Share | None = None) -> None:
        self.storages, self.microbatches, self.share = storages, microbatches, share
        self._updates: dict[tuple[int, int, bool], Effect] = {}
        self._sums: dict[LayerState, list[int]] = {}

    @cached_property
    def parameter_bytes(self) -> int:
        """Parameters, their half-precision copies, buffers and constants."""
        return sum(map(self.static_bytes, range(self.storages.count)))

    def static_bytes(self, position: int) -> int:
        """Parameters, their half-precision copies, buffers and constants of one position, without those that an earlier
        one has too, and of parameters that replicas divide without those that are gathered, and all copies.
        """
        storages, layer = self.storages, self.storages.start + position
        away = 0
        if self.divides_parameters and layer < storages.stop:
            away = self.whole_bytes_of("parameters", layer, layer + 1) - self.bytes_of("parameters", layer, layer + 1)
            away += storages.copy_bytes(layer)
        repeated = sum(again.shared.nbytes for again in storages.repetitions if again.later == position)
        repeated += sum(again.shared.nbytes for again in storages.repeated_buffers if again.later == position)
        if layer < storages.stop:
            repeated += storages.costs[position].copy_bytes - storages.copy_bytes(layer)
        return storages.costs[position].static_bytes - repeated - away

    def copies_here(self, layer: int) -> int:
        """The half-precision copies of a layer's weights, as far as they are on the device between steps."""
        return 0 if self.divides_parameters else self.storages.copy_bytes(layer)

    @property
    def divides_parameters(self) -> bool:
        """Whether the device keeps the parameters of the layers that it owns alone."""
        return self.share is not None and self.share.divides_parameters

    def unsharded_bytes(self, layer: int) -> int:
        """What gathering a layer's parameters takes: half-precision copies, and where another replica owns the layer
        the parameters themselves that are read otherwise too.
        """
        return self._unsharded_bytes[layer - self.storages.start]

    @cached_property
    def _unsharded_bytes(self) -> list[int]:
        """The same of every layer of the stage."""
        found = list(map(self.storages.copy_bytes, range(self.storages.start, self.storages.stop)))
        for position, layer in enumerate(range(self.storages.start, self.storages.stop)):
            if self.share is not None and not self.share.keeps("parameters", layer):
                cast_only, _ = self.storages.cast_only_bytes(layer)
                found[position] += self.whole_bytes_of("parameters", layer, layer + 1) - cast_only
        return found

    @property
    def loss_bytes(self) -> int:
        """On the last stage, the losses of all microbatches."""
        return self.storages.measurement.loss_bytes * self.microbatches if self.storages.last else 0

    @cached_property
    def gradient_bytes(self) -> int:
        """Parameter gradients, from the first backward of a step to its STEP."""
        return self.bytes_of("gradients", self.storages.start, self.storages.stop)

    @cached_property
    def weight_bytes(self) -> int:
        """A version of the weights without its rooms: the parameters that updates change, and their copies."""
        storages = self.storages
        return sum(storages.version_bytes(n) - storages.room_bytes(n) for n in range(storages.start, storages.stop))

    def weight_bytes_of(self, start: int, stop: int) -> int:
        """The parameters of layers `start` to `stop - 1` that are trained."""
        return sum(self._trained_bytes[start - self.storages.start : stop - self.storages.start])

    @cached_property
    def versions_bytes(self) -> tuple[int, ...]:
        """What a version of the weights takes, of every layer."""
        return tuple(map(self.storages.version_bytes, range(self.storages.start, self.storages.stop)))

    @cached_property
    def early_state_bytes(self) -> int:
        """Optimizer state that exists before the first step."""
        return self.bytes_of("early optimizer", self.storages.start, self.storages.stop)

    @cached_property
    def state_bytes(self) -> int:
        """Optimizer state, from the first STEP on."""
        return self.bytes_of("optimizer", self.storages.start, self.storages.stop)

    def bytes_of(self, kind: LayerState, start: int, stop: int) -> int:
        """A state of layers `start` to `stop - 1`, as far as the device keeps it between steps."""
        if self.share is None:
            return self.whole_bytes_of(kind, start, stop)
        kept = (layer for layer in range(start, stop) if self.share.keeps(kind, layer))
        return sum(self.whole_bytes_of(kind, layer, layer + 1) for layer in kept)

    def whole_bytes_of(self, kind: LayerState, start: int, stop: int) -> int:
        """All of it; the state of a shared parameter belongs to the stage's first user."""
        before, first = self._before(kind), self.storages.start
        return before[stop - first] - before[start - first]

    def _before(self, kind: LayerState) -> list[int]:
        """All of it, of the layers before every position."""
        if kind not in self._sums:
            field = _FIELDS[kind]
            sizes: list[int] = [getattr(cost, field) for cost in self.storages.costs]
            for again in self.storages.repetitions:
                sizes[again.later] -= again.shared.nbytes if kind == "parameters" else getattr(again.shared, field)
            self._sums[kind] = [0, *accumulate(sizes)]
        return self._sums[kind]

    def gathered_bytes(self, layer: int) -> int:
        """Parameters of a layer that its owner brings to the other replicas: the trained ones, after an update; or all
        of them, where the others do not keep any: in half precision those that are read so alone.
        """
        if self.divides_parameters:
            cast_only, copies = self.storages.cast_only_bytes(layer)
            return self.whole_bytes_of("parameters", layer, layer + 1) - cast_only + copies
        return self._trained_bytes[layer - self.storages.start]

    def exchanged_tensors(self, layer: int, *, gathered: bool) -> int:
        """How many gradients of a layer replicas add up, or how many parameters are `gathered`."""
        every = gathered and self.divides_parameters
        return sum(every or one.trainable for one in self.storages.costs[layer - self.storages.start].parameters)

    @cached_property
    def _trained_bytes(self) -> list[int]:
        """The parameters of every position that are trained; a shared one belongs to its first user."""
        found = [cost.trained_bytes for cost in self.storages.costs]
        for again in self.storages.repetitions:
            found[again.later] -= again.shared.nbytes if again.shared.gradient_bytes else 0
        return found

    def state_bytes_of(self, subject: Subject) -> int:
        """A state of one layer, as actions name it; of the optimizer, from the first step on. Nothing moves of a layer
        that another replica owns.

        Raises:
            UsageError: it is no state that moves.
        """
        for kind in ("parameters", "gradients", "optimizer"):
            if subject.what == kind:
                is_owned = self.share is None or self.share.owns(subject.layer)
                return self.bytes_of(kind, subject.layer, subject.layer + 1) if is_owned else 0
        raise UsageError(f"{subject} cannot be moved as a state: that is a layer's parameters, gradients or optimizer")

    def update_room_bytes(self, start: int, stop: int) -> int:
        """The most that the optimizer of layers `start` to `stop - 1` takes in an update, its state included."""
        early, state = (self.bytes_of(kind, start, stop) for kind in ("early optimizer", "optimizer"))
        first, later = (self.update(start, stop, first=first).peak_bytes for first in (True, False))
        return max(early + first, state + later)

    @property
    def first_update(self) -> Effect:
        """The first STEP of the whole stage."""
        return self.update(self.storages.start, self.storages.stop, first=True)

    def update(self, start: int, stop: int, *, first: bool) -> Effect:
        """A STEP of layers `start` to `stop - 1`, the first one of them or a later one."""
        found = self._updates.get((start, stop, first))
        if found is None:
            make = self._first_update if first else self._later_update
            found = self._updates[start, stop, first] = make(start, stop)
        return found

    def _first_update(self, start: int, stop: int) -> Effect:
        """The first STEP, which creates the optimizer state, one layer after the other."""
        first, end = start - self.storages.start, stop - self.storages.start
        repeated = Counter[int]()  # by position, bytes of state that an earlier layer's update has created already
        for again in self.storages.repetitions:
            repeated[again.later] += again.shared.state_bytes - again.shared.early_state_bytes
        grown = 0
        peaks = []
        for position in self._updated(first, end):
            cost = self.storages.costs[position]
            level = grown + cost.update_first_peak_bytes - repeated[position]
            peaks.append((level, cost.update_first_workspace_bytes))
            grown += cost.state_bytes - cost.early_state_bytes - repeated[position]
        peak, workspace = _first_highest(peaks)
        gradients = self.bytes_of("gradients", start, stop)
        return effect(peak_bytes=peak, workspace=workspace, gradients=-gradients, optimizer=grown)

    def _later_update(self, start: int, stop: int) -> Effect:
        """Every later STEP."""
        positions = self._updated(start - self.storages.start, stop - self.storages.start)
        costs = [self.storages.costs[position] for position in positions]
        peak, workspace = _first_highest([(cost.update_peak_bytes, cost.update_workspace_bytes) for cost in costs])
        return effect(peak_bytes=peak, workspace=workspace, gradients=-self.bytes_of("gradients", start, stop))

    def _updated(self, first: int, end: int) -> list[int]:
        """Those of these positions whose layers the device updates."""
        start = self.storages.start
        return [place for place in range(first, end) if self.share is None or self.share.owns(start + place)]


def _first_highest(moments: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The first of the highest moments, as a meter keeps it: its level, and the part that is a kernel's workspace."""
    return max(moments, key=lambda moment: moment[0], default=(0, 0))
