"""Replicas that divide gradients or parameters on torch's engine, by FSDP2: bytes, and times in memory.

FSDP2 divides each parameter by rows, padded to equal parts (`divided`). Layers are gathered one by one;
layers that share parameters are gathered together, with the stage, which is the root. A gather allocates the
output of the all-gather and then the parameters, as large as the output. In a forward, the output stays until
the next gather has ended, or the stage; in a backward, the gather of the layer before is already allocated:

    F    gather 0, layer 0, free 0, gather 1, layer 1, free 1
    B    gather 1, start gathering 0, layer 1, gather 0, layer 0

If replicas divide gradients only, or after a backward, parameters stay until the next forward or the end of
the step. Gradients are whole until then, and are reduced layer by layer (`Gathering.reduce`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, prod
from typing import NamedTuple

from pipefit.memory.storages import Effect, Moments, StageStorages, effect
from pipefit.schema.actions import FORWARDS, Action, Kind
from pipefit.schema.layer_costs import LayerCost, Parameter, SharedParameter
from pipefit.schema.profile import Measurement
from pipefit.schema.validation import itemsize


class Division(NamedTuple):
    """The part of one of several replicas in a stage.

    `frees` says whether parameters are freed after every forward, `pads` whether a reduction pads gradients
    in copies, as torch's kernel for CPUs does.
    """

    replicas: int
    replica: int
    frees: bool
    pads: bool


# ---- The part of a replica


def divided(measurement: Measurement, division: Division) -> Measurement:
    """Return the costs of layers in which only a replica's part of parameters, gradients and state exists.

    Updates take at most these bytes: each tensor of an elementwise optimizer shrinks as its parameter does.
    """
    return replace(
        measurement,
        kinds=tuple(_divided(cost, division) for cost in measurement.kinds),
        shared=tuple(_shared(measurement, one, division) for one in measurement.shared),
    )


def _divided(cost: LayerCost, division: Division) -> LayerCost:
    trained = [one for one in cost.parameters if one.trainable]
    kept = sum(_part(one, division) for one in trained)
    whole, own = cost.trained_bytes, sum(_own(one, division) for one in trained)
    most = max((_part(one, division) / max(one.nbytes, 1) for one in trained), default=0.0)
    _, numbers = _tensors_and_numbers(cost.state_bytes, whole)
    peaks = {
        f"{name}_bytes": ceil(getattr(cost, f"{name}_bytes") * most) + numbers
        for name in ("update_first_peak", "update_peak", "update_left")
        if getattr(cost, f"{name}_bytes")
    }
    return replace(
        cost,
        parameters=tuple(
            replace(one, shape=(_rows(one, division), *one.shape[1:]), nbytes=_part(one, division))
            for one in cost.parameters
        ),
        gradient_bytes=_gradients(cost.gradient_bytes, whole, kept),
        state_bytes=_state(cost.state_bytes, whole, own),
        early_state_bytes=_state(cost.early_state_bytes, whole, own),
        **peaks,
    )


def _rows(parameter: Parameter, division: Division) -> int:
    """Return the rows of a parameter that each replica has memory for."""
    return -(-_whole_rows(parameter) // division.replicas)


def _whole_rows(parameter: Parameter) -> int:
    return parameter.shape[0] if parameter.shape else 1


def _row_bytes(parameter: Parameter) -> int:
    return prod(parameter.shape[1:]) * itemsize(parameter.dtype)


def _part(parameter: Parameter, division: Division) -> int:
    """Return the bytes of a replica's part of a parameter, padded."""
    return _rows(parameter, division) * _row_bytes(parameter)


def _own(parameter: Parameter, division: Division) -> int:
    """Return the bytes of a replica's part of a parameter without padding, which optimizer state has."""
    rows = _rows(parameter, division)
    return max(0, min(rows, _whole_rows(parameter) - division.replica * rows)) * _row_bytes(parameter)


def _tensors_and_numbers(nbytes: int, whole: int) -> tuple[int, int]:
    """Return how many tensors like its parameters a layer's optimizer state has, and bytes of single numbers.

    Parameters without gradients have no state, so the tensors may be smaller than the parameters.
    """
    tensors = round(nbytes / whole) if whole else 0
    return tensors, max(0, nbytes - tensors * whole)


def _state(nbytes: int, whole: int, own: int) -> int:
    """Return the bytes of a replica's part of the optimizer state for parameters of `whole` bytes."""
    tensors, numbers = _tensors_and_numbers(nbytes, whole)
    return tensors * own + numbers


def _gradients(nbytes: int, whole: int, part: int) -> int:
    """Return the bytes of a replica's part of gradients, which not all parameters may have."""
    return nbytes * part // whole if whole else 0


def _shared(measurement: Measurement, shared: SharedParameter, division: Division) -> SharedParameter:
    """Return a shared parameter as a replica's part."""
    parameter = _of(measurement, shared)
    whole, part, own = parameter.nbytes, _part(parameter, division), _own(parameter, division)
    return replace(
        shared,
        nbytes=part,
        gradient_bytes=_gradients(shared.gradient_bytes, whole, part),
        state_bytes=_state(shared.state_bytes, whole, own),
        early_state_bytes=_state(shared.early_state_bytes, whole, own),
    )


def _of(measurement: Measurement, shared: SharedParameter) -> Parameter:
    """Return a shared parameter as its users have it: of its size, and of a shape that all of them have."""
    first, *others = (measurement.costs[user].parameters for user in shared.users)
    alike = [one for one in first if one.nbytes == shared.nbytes]
    shapes = [{one.shape for one in parameters} for parameters in others]
    return next((one for one in alike if all(one.shape in there for there in shapes)), alike[0])


# ---- Groups of parameters that are gathered together


class Group(NamedTuple):
    """Parameters that are gathered together.

    Bytes are those of gathered parameters, of gradients before a reduction, of their padded copies, of the
    reduction's input, and of its output.
    """

    gathered_bytes: int
    gradient_bytes: int
    padded_bytes: int
    reduced_bytes: int
    kept_bytes: int


class ShardedStage:
    """Groups of a stage: one for every layer with parameters of its own, and the root with the shared ones.

    `groups` begin with the root. `group_of` has the group of every layer; None for layers without one.
    """

    def __init__(self, whole: StageStorages, part: StageStorages, division: Division) -> None:
        self.storages, self.division, count = whole, division, whole.stop - whole.start
        shared = {position for again in whole.repetitions for position in (again.user, again.later)}
        root = self._group(part, [p for p in range(count) if p in shared])
        self.groups = [root]
        self.group_of: list[int | None] = []
        for position in range(count):
            alone = position not in shared and bool(whole.costs[position].parameters)
            self.group_of.append(len(self.groups) if alone else None)
            self.groups += [self._group(part, [position])] if alone else []

    def _group(self, part: StageStorages, positions: Sequence[int]) -> Group:
        replicas, at = self.division.replicas, set(positions)

        def summed(storages: StageStorages, cost_field: str, shared_field: str) -> int:
            own = sum(getattr(storages.costs[position], cost_field) for position in positions)
            return int(
                own - sum(getattr(a.shared, shared_field) for a in storages.repetitions if a.later in at)
            )

        kept = summed(part, "gradient_bytes", "gradient_bytes")
        parameters = [one for position in positions for one in self.storages.costs[position].parameters]
        again = (a.shared for a in self.storages.repetitions if a.later in at)
        repeated = [_of(self.storages.measurement, shared) for shared in again]
        padded = replicas * (self._padded(parameters) - self._padded(repeated))
        return Group(
            replicas * summed(part, "parameter_bytes", "nbytes"),
            summed(self.storages, "gradient_bytes", "gradient_bytes"),
            padded * self.division.pads,
            replicas * kept,
            kept,
        )

    def _padded(self, parameters: Iterable[Parameter]) -> int:
        """Return the bytes of a replica's parts of the parameters whose gradients a reduction pads."""
        uneven = (one for one in parameters if one.trainable and _whole_rows(one) % self.division.replicas)
        return sum(_part(one, self.division) for one in uneven)

    @property
    def output_bytes(self) -> int:
        """The bytes of the last microbatch's outputs, to which 1F1B and GPipe refer until the end of a step.

        Those of other stages than the last one count with their messages.
        """
        storages = self.storages
        outputs = {*storages.values(storages.stop - storages.start)} & storages.makers.keys()
        return sum(storages.sizes[storage] for storage in outputs) if storages.last else 0

    def is_reached(self, boundary: int) -> bool:
        """Return whether a gradient arrives at a boundary, which gathers the layer before it."""
        return any(value.has_gradient for value in self.storages.costs[boundary - 1].outputs)


class Gathering:
    """A stage's gathered parameters at a point of its program, as FSDP2's own hooks gather and free them."""

    def __init__(self, stage: ShardedStage) -> None:
        self._stage, self._bytes = stage, [group.gathered_bytes for group in stage.groups]
        self._present = [number for number, nbytes in enumerate(self._bytes) if nbytes]
        self._here, self._coming = set[int](), set[int]()
        self._output: int | None = None  # the group whose output of the all-gather a forward keeps
        self._order = list[int]()  # groups in the order of their forwards in this step
        self._turns = dict[int, list[int]]()  # by group, its places in this order that no backward has used
        self._reached = set[int]()  # groups that this backward has gathered
        self._as_actions = False  # whether torch runs the order as actions, of which UNSHARD is one

    @property
    def layers(self) -> frozenset[int]:
        """The layers with memory for gathered parameters of their own."""
        start, group_of = self._stage.storages.start, self._stage.group_of
        return frozenset(start + n for n, g in enumerate(group_of) if g in self._here or g in self._coming)

    def passing(self, action: Action) -> Moments:
        """Carry out a forward, recomputation or backward; return its gathers by boundary of the stage."""
        storages = self._stage.storages
        start, stop = action.layers or (storages.start, storages.stop)
        first, end = start - storages.start, stop - storages.start
        moments: dict[int, list[int]] = {boundary: [] for boundary in range(first, end + 1)}
        if action.kind is Kind.BACKWARD:
            for boundary in range(end, first, -1):
                moments[boundary] += self._reach(boundary)
            if not first:
                self._reached.clear()
        elif action.kind in FORWARDS or self._stage.is_reached(end):  # a gradient arrives at a recomputation
            self._forward(action, first, end, moments)
        return tuple((boundary, tuple(changes)) for boundary, changes in moments.items() if changes)

    def _forward(self, action: Action, first: int, end: int, moments: Mapping[int, list[int]]) -> None:
        """Add the changes of a forward or recomputation to those of each boundary in `moments`."""
        if action.kind is Kind.RECOMPUTE:
            moments[first] += self._reach(end)
        elif not first:
            moments[0] += self._gather(0, keeps=True)
        for position in range(first, end):
            group = self._stage.group_of[position]
            if group is not None:
                moments[position] += self._gather(group, keeps=True)
            if action.kind in FORWARDS:
                moments[position + 1] += self._passed(group)
            else:  # a layer that runs alone is the root of its forward
                moments[position + 1] += self._drop_output()
        if end == len(self._stage.group_of) and action.kind in FORWARDS:
            moments[end] += [*self._passed(0), *self._drop_output()]

    def _gather(self, group: int, *, keeps: bool) -> Iterator[int]:
        """Yield the changes of a gather; with `keeps`, the output of the all-gather stays."""
        nbytes = self._bytes[group]
        if group in self._here or not nbytes:
            return
        if group not in self._coming:
            yield nbytes
        self._coming.discard(group)
        self._here.add(group)
        yield nbytes
        if keeps:
            yield from self._drop_output()
            self._output = group
        else:
            yield -nbytes

    def _drop_output(self) -> Iterator[int]:
        if self._output is not None:
            yield -self._bytes[self._output]
            self._output = None

    def _passed(self, group: int | None) -> Iterator[int]:
        """Yield the changes after the forward of a group."""
        if group is None or not self._bytes[group]:
            return
        if self._stage.division.frees:
            yield from self._free(group)
        self._turns.setdefault(group, []).append(len(self._order))
        self._order.append(group)

    def _free(self, group: int) -> Iterator[int]:
        if group in self._here:
            self._here.remove(group)
            yield -self._bytes[group]

    def _reach(self, boundary: int) -> Iterator[int]:
        """Yield changes as a backward comes to a boundary: the layer before it, and the root at the last."""
        if not self._stage.is_reached(boundary):
            return
        last = (0,) if boundary == len(self._stage.group_of) else ()
        for group in (self._stage.group_of[boundary - 1], *last):
            if group is None or group in self._reached or not self._bytes[group]:
                continue
            self._reached.add(group)
            yield from self._gather(group, keeps=False)
            turns = self._turns.get(group)
            following = self._order[turn - 1] if turns and (turn := turns.pop()) else None
            if following is not None and following not in self._here | self._coming:
                self._coming.add(following)
                yield self._bytes[following]

    def at_once(self, action: Action) -> Effect | None:
        """Return the effect of an UNSHARD of the whole stage, of its join, or of a RESHARD."""
        if action.kind is Kind.RESHARD:
            changes = [change for group in self._present for change in self._free(group)]
        elif action.wait:
            changes = [c for group in self._present for c in self._gather(group, keeps=False)]
        else:
            self._as_actions = True
            new = [group for group in self._present if group not in self._here | self._coming]
            self._coming.update(new)
            changes = [self._bytes[group] for group in new]
        return effect(peak_bytes=_highest(changes), parameters=sum(changes)) if changes else None

    def reduce(self) -> Effect:
        """Return the effect of reducing all gradients at the end of a step, which frees parameters."""
        changes, freed, before = [0 if self._as_actions else self._stage.output_bytes], 0, 0
        for number, group in enumerate(self._stage.groups):
            gone = [*self._free(number)]
            freed -= sum(gone)
            changes += [*gone, -before, group.reduced_bytes, group.padded_bytes, -group.padded_bytes]
            changes.append(group.kept_bytes - group.gradient_bytes)
            before = group.reduced_bytes
        changes.append(-before)
        pending = sum(self._bytes[group] for group in self._coming)
        self._coming.clear()
        self._order.clear()
        self._turns.clear()
        kept = sum(group.kept_bytes - group.gradient_bytes for group in self._stage.groups)
        return effect(peak_bytes=_highest(changes), gradients=kept, parameters=-freed - pending)


def _highest(changes: Sequence[int]) -> int:
    """Return the highest sum of the first changes."""
    level = highest = 0
    for change in changes:
        level += change
        highest = max(highest, level)
    return highest
