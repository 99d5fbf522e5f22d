"""The state of a stage that does not belong to a microbatch, and its update.

State is parameters, gradients and optimizer state.

`memory.storages` has the memory of microbatches. A parameter or buffer that several layers of the stage share
exists once. With ZeRO, only the part that this replica keeps is counted.
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
from pipefit.schema.layer_costs import lenders
from pipefit.schema.plan import Plan

# ---- Shares of a stage's state: the ZeRO owner of each layer
#
# Whole layers are assigned: the largest first, each to the replica that owns the fewest bytes so far. Layers
# that share a parameter have one owner. Thus every state keeps its form, any optimizer works, and updates
# equal those of profiles to the byte. In return, shares differ by up to the largest layer: an embedding that
# is larger than everything else stays on one replica. (ZeRO: Rajbhandari et al., SC 2020; torch's
# `ZeroRedundancyOptimizer` also assigns whole tensors.)

_DIVIDED: dict[Sharding, frozenset[str]] = {  # states, as `LayerState` names them
    "none": frozenset(),
    "optimizer": frozenset({"optimizer", "early optimizer"}),
    "gradients": frozenset({"optimizer", "early optimizer", "gradients"}),
    "parameters": frozenset({"optimizer", "early optimizer", "gradients", "parameters"}),
}


class ReplicaShare(NamedTuple):
    """The share of one replica of a stage.

    `owners` has the owning replica of every layer from `start` on, `divided` the states that only the owner
    of a layer keeps.
    """

    start: int
    owners: tuple[int, ...]
    replica: int
    divided: frozenset[str]

    def owner(self, layer: int) -> int:
        """Return the replica that owns a layer."""
        return self.owners[layer - self.start]

    def owns(self, layer: int) -> bool:
        """Return whether this replica owns a layer."""
        return self.owner(layer) == self.replica

    def owning(self, *, all_layers: bool) -> ReplicaShare:
        """Return the share of a replica that owns all layers, or none."""
        return self._replace(owners=(self.replica if all_layers else -1,) * len(self.owners))

    @property
    def divides_gradients(self) -> bool:
        """True if only the owner of a layer keeps its gradients."""
        return "gradients" in self.divided

    @property
    def divides_parameters(self) -> bool:
        """True if only the owner of a layer keeps its parameters."""
        return "parameters" in self.divided

    def keeps(self, kind: str, layer: int) -> bool:
        """Return whether this replica keeps a state of a layer between steps."""
        return kind not in self.divided or self.owns(layer)


class Gathered:
    """The layers whose parameters a replica has gathered, at a point of its program.

    Ledger and runtime both use it.

    The replica keeps only the parameters of the layers that it owns. Owners take part in gathering too,
    because half-precision copies exist only while gathered. Without a `share` that divides parameters, all
    parameters are always present.
    """

    def __init__(self, share: ReplicaShare | None, storages: StageStorages) -> None:
        self._divides = share is not None and share.divides_parameters
        self._lenders = lenders(storages.measurement.shared, storages.start, storages.stop)
        self._coming, self._here = set[int](), set[int]()

    def __bool__(self) -> bool:
        return self._divides

    @property
    def layers(self) -> frozenset[int]:
        """The layers with memory for gathered parameters."""
        return frozenset(self._coming | self._here)

    def reset(self) -> None:
        """Restore the state between steps."""
        self._coming.clear()
        self._here.clear()

    def carry_out(self, action: Action, layers: Iterable[int]) -> list[int]:
        """Carry out an UNSHARD of these layers, its join, or a RESHARD.

        Returns the layers that gain or lose memory.

        Raises:
            UsageError: an UNSHARD of gathered layers, or a RESHARD of layers that are not gathered.
        """
        gathered = list(layers) if self._divides else []
        if action.kind is Kind.RESHARD:
            missing = [layer for layer in gathered if layer not in self._here]
            if missing:
                raise UsageError(
                    f"{action} frees parameters of layer {missing[0]}, which are not on the device"
                )
            self._here.difference_update(gathered)
            return gathered
        if action.wait:
            self._coming.difference_update(gathered)
            self._here.update(gathered)
            return []
        known = [layer for layer in gathered if layer in self._here or layer in self._coming]
        if known:
            raise UsageError(
                f"{action} gathers parameters of layer {known[0]}, which are already on the device or on "
                "their way"
            )
        self._coming.update(gathered)
        return gathered

    def check(self, action: Action, layers: Iterable[int]) -> None:
        """Check that the parameters for an action of these layers are gathered.

        Raises:
            UsageError: some are not; says what must come before the action.
        """
        if not self._divides:
            return
        needed = dict.fromkeys(one for layer in layers for one in (layer, *self._lenders.get(layer, ())))
        missing = [layer for layer in needed if layer not in self._here]
        if missing:
            raise UsageError(
                f"{action} needs the parameters of layer {missing[0]}, which are sharded: the WAIT of an "
                f"{Kind.UNSHARD} of this layer must come before it"
            )


def share_of(plan: Plan, stage: int, device: int) -> ReplicaShare | None:
    """Return a device's share of its stage's state; None if nothing is divided."""
    place = plan.stages[stage]
    if place.grid.shard == "none":
        return None
    return share_among(place, device, owners(StageStorages.of(plan, stage), place.grid))


def share_among(place: Stage, device: int, owners: tuple[int, ...]) -> ReplicaShare:
    """Return the share of a device of a stage whose layers have these owners."""
    return ReplicaShare(place.start, owners, place.grid.replica_of(device), _DIVIDED[place.grid.shard])


def owners(storages: StageStorages, grid: Grid) -> tuple[int, ...]:
    """Return the replica that owns each layer of a stage.

    Layers with the most divided bytes are assigned first.
    """
    sizes, first = _sizes(storages, _DIVIDED[grid.shard]), _first_users(storages)
    together = Counter[int]()  # bytes, by the first of the layers that share a parameter
    for layer, nbytes in enumerate(sizes):
        together[first[layer]] += nbytes
    result, owned = dict[int, int](), [0] * grid.data
    for layer in sorted(together, key=lambda layer: (-together[layer], layer)):
        result[layer] = min(range(grid.data), key=lambda replica: (owned[replica], replica))
        owned[result[layer]] += together[layer]
    return tuple(result[layer] for layer in first)


def _first_users(storages: StageStorages) -> list[int]:
    """Return, for every position, the first position with which it shares a parameter, or itself."""
    first = list(range(storages.stop - storages.start))
    for again in storages.repetitions:
        one, other = sorted((first[again.user], first[again.later]))
        first = [one if layer == other else layer for layer in first]
    return first


def _sizes(storages: StageStorages, divided: frozenset[str]) -> list[int]:
    """Return the divided bytes of every layer; those of a shared parameter belong to the stage's first
    user.
    """
    result = [
        cost.state_bytes
        + cost.gradient_bytes * ("gradients" in divided)
        + cost.parameter_bytes * ("parameters" in divided)
        for cost in storages.costs[: storages.stop - storages.start]
    ]
    for again in storages.repetitions:
        shared = again.shared
        result[again.later] -= (
            shared.state_bytes
            + shared.gradient_bytes * ("gradients" in divided)
            + shared.nbytes * ("parameters" in divided)
        )
    return result


# ---- Bytes of a stage's state

LayerState = Literal["parameters", "gradients", "optimizer", "early optimizer"]

_FIELDS = {
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer": "state_bytes",
    "early optimizer": "early_state_bytes",
}


class StageRest:
    """The bytes of a stage that do not belong to a microbatch, in a step of `microbatches`.

    `share` is the device's ZeRO share.
    """

    def __init__(
        self, storages: StageStorages, microbatches: int, *, share: ReplicaShare | None = None
    ) -> None:
        self.storages, self.microbatches, self.share = storages, microbatches, share
        self._updates: dict[tuple[int, int, bool], Effect] = {}
        self._sums: dict[LayerState, list[int]] = {}

    @cached_property
    def parameter_bytes(self) -> int:
        """Bytes of parameters, their half-precision copies, buffers and constants."""
        return sum(map(self.static_bytes, range(self.storages.count)))

    def static_bytes(self, position: int) -> int:
        """Return the bytes of one position's parameters, their half-precision copies, buffers and constants.

        Tensors that an earlier position has too are excluded. If replicas divide parameters, so are all
        copies and the parameters of layers that other replicas own.
        """
        storages, layer = self.storages, self.storages.start + position
        away = 0
        if self.divides_parameters and layer < storages.stop:
            away = self.whole_bytes_of("parameters", layer, layer + 1) - self.bytes_of(
                "parameters", layer, layer + 1
            )
            away += storages.copy_bytes(layer)
        repeated = sum(again.shared.nbytes for again in storages.repetitions if again.later == position)
        repeated += sum(again.shared.nbytes for again in storages.repeated_buffers if again.later == position)
        if layer < storages.stop:
            repeated += storages.costs[position].copy_bytes - storages.copy_bytes(layer)
        return storages.costs[position].static_bytes - repeated - away

    def copies_here(self, layer: int) -> int:
        """Return the bytes of a layer's half-precision weight copies that stay on the device between
        steps.
        """
        return 0 if self.divides_parameters else self.storages.copy_bytes(layer)

    @property
    def divides_parameters(self) -> bool:
        """True if the device keeps only the parameters of the layers that it owns."""
        return self.share is not None and self.share.divides_parameters

    def unsharded_bytes(self, layer: int) -> int:
        """Return the bytes that gathering a layer's parameters allocates.

        These are half-precision copies and, if another replica owns the layer, the parameters that are also
        read in full precision.
        """
        return self._unsharded_bytes[layer - self.storages.start]

    @cached_property
    def _unsharded_bytes(self) -> list[int]:
        """The `unsharded_bytes` of every layer of the stage."""
        result = list(map(self.storages.copy_bytes, range(self.storages.start, self.storages.stop)))
        for position, layer in enumerate(range(self.storages.start, self.storages.stop)):
            if self.share is not None and not self.share.keeps("parameters", layer):
                cast_only, _ = self.storages.cast_only_bytes(layer)
                result[position] += self.whole_bytes_of("parameters", layer, layer + 1) - cast_only
        return result

    @property
    def loss_bytes(self) -> int:
        """Bytes of all microbatches' losses, on the last stage."""
        return self.storages.measurement.loss_bytes * self.microbatches if self.storages.last else 0

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the receive buffers of all microbatches, for inputs and gradients of outputs."""
        return self.storages.received_bytes * self.microbatches

    @property
    def step_bytes(self) -> int:
        """Bytes that a buffered stage keeps until the end of a step: its batch, and the losses."""
        return self.storages.kept_bytes * self.microbatches

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of parameter gradients, from the first backward of a step to its STEP."""
        return self.bytes_of("gradients", self.storages.start, self.storages.stop)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the trained parameters and their half-precision copies: a weight version without its
        room.
        """
        storages = self.storages
        return sum(
            storages.version_bytes(n) - storages.room_bytes(n) for n in range(storages.start, storages.stop)
        )

    def weight_bytes_of(self, start: int, stop: int) -> int:
        """Return the bytes of the trained parameters of layers `start` to `stop - 1`."""
        return sum(self._trained_bytes[start - self.storages.start : stop - self.storages.start])

    @cached_property
    def versions_bytes(self) -> tuple[int, ...]:
        """Bytes of a weight version, for every layer."""
        return tuple(map(self.storages.version_bytes, range(self.storages.start, self.storages.stop)))

    @cached_property
    def early_state_bytes(self) -> int:
        """Bytes of optimizer state that exists before the first step."""
        return self.bytes_of("early optimizer", self.storages.start, self.storages.stop)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of optimizer state, from the first STEP on."""
        return self.bytes_of("optimizer", self.storages.start, self.storages.stop)

    def bytes_of(self, kind: LayerState, start: int, stop: int) -> int:
        """Return the bytes of a state of layers `start` to `stop - 1` that the device keeps between steps."""
        if self.share is None:
            return self.whole_bytes_of(kind, start, stop)
        kept = (layer for layer in range(start, stop) if self.share.keeps(kind, layer))
        return sum(self.whole_bytes_of(kind, layer, layer + 1) for layer in kept)

    def whole_bytes_of(self, kind: LayerState, start: int, stop: int) -> int:
        """Return the bytes of a state, undivided.

        Those of a shared parameter belong to the stage's first user.
        """
        before, first = self._before(kind), self.storages.start
        return before[stop - first] - before[start - first]

    def _before(self, kind: LayerState) -> list[int]:
        """Return the undivided bytes of a state in the layers before every position."""
        if kind not in self._sums:
            field = _FIELDS[kind]
            sizes: list[int] = [getattr(cost, field) for cost in self.storages.costs]
            for again in self.storages.repetitions:
                sizes[again.later] -= (
                    again.shared.nbytes if kind == "parameters" else getattr(again.shared, field)
                )
            self._sums[kind] = [0, *accumulate(sizes)]
        return self._sums[kind]

    def gathered_bytes(self, layer: int) -> int:
        """Return the parameter bytes of a layer that its owner sends to the other replicas.

        These are the trained parameters, after an update; or all parameters, if the other replicas keep none:
        in half precision those that are only read so.
        """
        if self.divides_parameters:
            cast_only, copies = self.storages.cast_only_bytes(layer)
            return self.whole_bytes_of("parameters", layer, layer + 1) - cast_only + copies
        return self._trained_bytes[layer - self.storages.start]

    def exchanged_tensors(self, layer: int, *, gathered: bool) -> int:
        """Return the number of a layer's gradients to reduce, or of its parameters to gather (`gathered`)."""
        every = gathered and self.divides_parameters
        return sum(
            every or parameter.trainable
            for parameter in self.storages.costs[layer - self.storages.start].parameters
        )

    @cached_property
    def _trained_bytes(self) -> list[int]:
        """Bytes of the trained parameters of every position; those of a shared one belong to its first
        user.
        """
        result = [cost.trained_bytes for cost in self.storages.costs]
        for again in self.storages.repetitions:
            result[again.later] -= again.shared.nbytes if again.shared.gradient_bytes else 0
        return result

    def state_bytes_of(self, subject: Subject) -> int:
        """Return the bytes of one layer's state, named as in actions.

        Optimizer state counts as after the first step. States of a layer that another replica owns do not
        move: 0.

        Raises:
            UsageError: the subject is not a state that can be moved.
        """
        for kind in ("parameters", "gradients", "optimizer"):
            if subject.what == kind:
                is_owned = self.share is None or self.share.owns(subject.layer)
                return self.bytes_of(kind, subject.layer, subject.layer + 1) if is_owned else 0
        raise UsageError(
            f"{subject} cannot be offloaded as a state: only a layer's parameters, gradients or optimizer can"
        )

    def update_room_bytes(self, start: int, stop: int) -> int:
        """Return the peak bytes of the optimizer, state included, in an update of layers `start` to `stop -
        1`.
        """
        early, state = (self.bytes_of(kind, start, stop) for kind in ("early optimizer", "optimizer"))
        first, later = (self.update(start, stop, first=first).peak_bytes for first in (True, False))
        return max(early + first, state + later)

    @property
    def first_update(self) -> Effect:
        """The effect of the first STEP of the whole stage."""
        return self.update(self.storages.start, self.storages.stop, first=True)

    def update(self, start: int, stop: int, *, first: bool) -> Effect:
        """Return the effect of a STEP of layers `start` to `stop - 1`, their first one or a later one."""
        result = self._updates.get((start, stop, first))
        if result is None:
            make = self._first_update if first else self._later_update
            result = self._updates[start, stop, first] = make(start, stop)
        return result

    def _first_update(self, start: int, stop: int) -> Effect:
        """Return the effect of the first STEP, which creates the optimizer state layer by layer."""
        first, end = start - self.storages.start, stop - self.storages.start
        repeated = Counter[
            int
        ]()  # by position, bytes of state that an earlier layer's update has already created
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
        """Return the effect of every later STEP."""
        positions = self._updated(start - self.storages.start, stop - self.storages.start)
        costs = [self.storages.costs[position] for position in positions]
        peak, workspace = _first_highest(
            [(cost.update_peak_bytes, cost.update_workspace_bytes) for cost in costs]
        )
        return effect(
            peak_bytes=peak, workspace=workspace, gradients=-self.bytes_of("gradients", start, stop)
        )

    def _updated(self, first: int, end: int) -> list[int]:
        """Return the positions whose layers the device updates.

        A layer whose parameters and optimizer state all belong to earlier layers has no update of its own.
        """
        start, costs = self.storages.start, self.storages.costs
        owned = (n for n in range(first, end) if self.share is None or self.share.owns(start + n))
        return [n for n in owned if self._is_own(n) or not costs[n].trained_bytes]

    def _is_own(self, position: int) -> bool:
        """Return whether a layer has parameters or optimizer state that belong to no earlier layer."""
        layer = self.storages.start + position
        return self._trained_bytes[position] > 0 or self.whole_bytes_of("optimizer", layer, layer + 1) > 0


def _first_highest(moments: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the level and the kernel workspace of the first of the highest moments, as a meter keeps it."""
    return max(moments, key=lambda moment: moment[0], default=(0, 0))
