"""Memory of a run of layers on one device, composed exactly from the costs of the layers.

`StageMemory` walks the layers of a stage once and gives every storage an identity, the set of layers that save it and
the boundaries it crosses. From that follow, for every compute action, two numbers:

    peak_bytes    the most that is allocated above what existed when the action began
    after_bytes   what is left above that when it ends (negative when it freed more than it made)

When a forward begins, its inputs exist. It leaves what its layers saved and its outputs. When a backward begins, what
the forward left and the gradients of its outputs exist. It leaves the gradients of its inputs and, after the step's
first microbatch, those of the parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from pipefit.profiles import GradientOrigin, LayerCost, Measurement, Origin, SharedParameter, Value
from pipefit.program import Action, Kind


class ActionMemory(NamedTuple):
    """Bytes above the level at which an action begins."""

    peak_bytes: int
    after_bytes: int


class StepMemory(NamedTuple):
    """The optimizer step: peaks above the level at which it begins (gradients exist) and what it leaves besides."""

    first_peak_bytes: int
    peak_bytes: int
    state_bytes: int


class _Storage:
    """One storage in a stage: its bytes, and the first layer that saves it (whose backward is the last to need it)."""

    __slots__ = ("first_saver", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.first_saver: int | None = None


_GradientValue = tuple[_Storage, bool, int]  # where it lives, whether in one piece, and its own bytes


def _repetitions(measurement: Measurement, start: int, stop: int) -> list[tuple[int, int, SharedParameter]]:
    """Parameters that a stage's layers share: positions of a user and of the next one, for every pair that follows."""
    return [
        (user - start, later - start, shared)
        for shared in measurement.shared
        for user, later in pairwise(user for user in shared.users if start <= user < stop)
    ]


class StageMemory:
    """Layers `start` to `stop - 1` on one device; with `measurement.loss` behind the model's last layer.

    Costs: one walk over the layers and what they save, microseconds per saved tensor.
    """

    def __init__(self, measurement: Measurement, start: int, stop: int, *, microbatches: int = 1) -> None:
        costs = measurement.costs
        self._measurement = measurement
        self.start, self.stop = start, stop
        self.last = stop == len(costs)
        self.layers: Sequence[LayerCost] = (*costs[start:stop], measurement.loss) if self.last else costs[start:stop]
        self.inputs = costs[start].inputs
        self.outputs = costs[stop - 1].outputs
        self.targets = measurement.loss.inputs[len(self.outputs) :] if self.last else ()
        self.microbatches = microbatches
        self._again = _repetitions(measurement, start, stop)
        self._saved_bytes = [0] * len(self.layers)
        self._boundaries = self._walk()
        self._held_bytes = [0, *accumulate(self._saved_bytes)]

    # ---------------------------------------------------------------- what stays for the whole step

    @cached_property
    def parameter_bytes(self) -> int:
        """Parameters and buffers."""
        repeated = sum(shared.nbytes for _, _, shared in self._again)
        return sum(cost.parameter_bytes + cost.buffer_bytes for cost in self.layers) - repeated

    @property
    def loss_bytes(self) -> int:
        """On the last stage, the losses of all microbatches and the seed of the backward, four bytes each."""
        return 4 * (self.microbatches + 1) if self.last else 0

    @cached_property
    def gradient_bytes(self) -> int:
        """Parameter gradients, from the first backward of a step to its end."""
        repeated = sum(shared.gradient_bytes for _, _, shared in self._again)
        return sum(cost.gradient_bytes for cost in self.layers) - repeated

    @cached_property
    def early_state_bytes(self) -> int:
        """Optimizer state that exists before the first step."""
        return sum(cost.early_state_bytes for cost in self.layers)

    @cached_property
    def step(self) -> StepMemory:
        """The optimizer step, which updates one layer after the other."""
        first = grown = highest = 0
        updated = Counter[int]()  # bytes of state that a layer shares with an earlier one
        for _, later, shared in self._again:
            updated[later] += shared.state_bytes
        for number, cost in enumerate(self.layers):
            first = max(first, grown + cost.update_first_peak_bytes - updated[number])
            highest = max(highest, cost.update_peak_bytes)
            grown += cost.state_bytes - cost.early_state_bytes - updated[number]
        return StepMemory(first, highest, self.early_state_bytes + grown)

    # ---------------------------------------------------------------- boundary buffers

    @property
    def input_bytes(self) -> int:
        """What receiving (or loading) the inputs of one microbatch allocates."""
        return sum(value.nbytes for value in self.inputs)

    @property
    def target_bytes(self) -> int:
        """What loading the targets of one microbatch allocates."""
        return sum(value.nbytes for value in self.targets)

    @property
    def output_gradient_bytes(self) -> int:
        """What receiving the gradients of the outputs allocates; nothing on the last stage."""
        return 0 if self.last else gradient_bytes(self.outputs)

    @property
    def input_gradient_bytes(self) -> int:
        """What a backward leaves to be sent to the stage before, each gradient in one piece; nothing on the first."""
        if not self.start:
            return 0
        whole = {id(s): s.nbytes for s, contiguous, _ in self._present(0) if contiguous}
        return sum(whole.values()) + self._made_bytes

    @cached_property
    def _made_bytes(self) -> int:
        """Gradients of the inputs that are made to be sent: copies in one piece, and zeros for inputs that no layer of
        the stage used.
        """
        if not self.start:
            return 0
        unused = (v for v, found in zip(self.inputs, self._gradient_values[0], strict=True) if found is None)
        return gradient_bytes(tuple(unused)) + sum(dense for _, contiguous, dense in self._present(0) if not contiguous)

    def collective_bytes(self, action: Action) -> int:
        """What every member of a collective contributes: a shared parameter's gradient."""
        if action.kind is Kind.REDUCE and action.subject is not None:
            return self._measurement.shared[action.subject.layer].gradient_bytes
        return 0

    @cached_property
    def sent_bytes(self) -> int:
        """What joining the send of the outputs frees: output storages that no layer saved."""
        return 0 if self.last else sum(s.nbytes for s in set(self._boundaries[-1]) if s.first_saver is None)

    @cached_property
    def buffer_bytes(self) -> int:
        """Buffers: a recomputation works on copies of them, so that statistics are not updated twice."""
        return sum(cost.buffer_bytes for cost in self.layers)

    @property
    def checkpoint_bytes(self) -> int:
        """What is held of a microbatch that will be recomputed: its inputs, and on the last stage its targets."""
        return self.input_bytes + self.target_bytes

    @cached_property
    def checkpoint_sent_bytes(self) -> int:
        """What joining the send of the outputs frees then: all of them that are not inputs handed on."""
        return 0 if self.last else self._travelling(len(self.layers))

    # ---------------------------------------------------------------- compute actions

    def forward(self, start: int | None = None, stop: int | None = None) -> ActionMemory:
        """The forward of layers `start` to `stop - 1`, by default of the whole stage."""
        first, end = self._segment(start, stop)
        peak = max(self._live(number) + self.layers[number].forward_peak_bytes for number in range(first, end))
        before = self._live(first)
        return ActionMemory(peak - before, self._live(end) - before)

    def checkpoint(self) -> ActionMemory:
        """The forward of the whole stage that keeps only its inputs; leaves the outputs besides."""
        peak = max(self._travelling(n) + cost.checkpoint_peak_bytes for n, cost in enumerate(self.layers))
        return ActionMemory(peak, self.checkpoint_sent_bytes)

    def recompute(self) -> ActionMemory:
        """The forward again, from the inputs; leaves what the layers saved, and copies of the buffers."""
        peak = self.forward().peak_bytes
        return ActionMemory(peak + self.buffer_bytes, self._held(len(self.layers)) + self.buffer_bytes - self._live(0))

    def backward(
        self, start: int | None = None, stop: int | None = None, *, first_microbatch: bool = False
    ) -> ActionMemory:
        """The backward of layers `start` to `stop - 1`, by default of the whole stage."""
        first, end = self._segment(start, stop)
        entry = peak = self._held(end) + self._gradients(end)
        born = 0
        added = Counter[int]()  # bytes of gradient that a layer adds to one that waits: into a third
        for user, _, shared in self._again:
            added[user] += shared.gradient_bytes
        for number in reversed(range(first, end)):
            cost = self.layers[number]
            level = self._held(number + 1) + self._gradients(number + 1) + born + added[number]
            level += 0 if first_microbatch else self._waiting(number)
            for span in cost.backward_first if first_microbatch else cost.backward_later:
                gone = {self._boundaries[number][k] for k in span.released}
                released = sum(storage.nbytes for storage in gone if storage.first_saver == number)
                peak = max(peak, level + span.peak_bytes - released)
            born += cost.gradient_bytes - added[number] if first_microbatch else 0
        left = self._held(first) + born
        if first:
            return ActionMemory(peak - entry, left + self._gradients(first) - entry)
        peak = max(peak, left + self._gradients(0) + self._made_bytes)
        return ActionMemory(peak - entry, left + self.input_gradient_bytes - entry)

    def _travelling(self, number: int) -> int:
        """Bytes of the values at the boundary before position `number` besides the inputs and targets that are held.

        Where the first layer works in place, it is given copies of the inputs.
        """
        held = self._boundaries[0][len(self.inputs) :] if self.layers[0].mutates_inputs else self._boundaries[0]
        return sum(storage.nbytes for storage in set(self._boundaries[number]) - set(held))

    def _waiting(self, number: int) -> int:
        """Gradients of shared parameters that wait for those of an earlier layer, while the backward is at `number`.

        In the first microbatch they are counted as born; autograd adds them up before it touches what exists.
        """
        return sum(shared.gradient_bytes for user, later, shared in self._again if user <= number < later)

    # ---------------------------------------------------------------- the walk

    def _walk(self) -> list[tuple[_Storage, ...]]:
        """The storages of the values at every boundary: before layer 0, 1, ... of the stage, and behind the last.

        Targets wait at every boundary until the loss takes them; the loss itself goes into the preallocated losses.
        """
        targets = tuple(_Storage(value.nbytes) for value in self.targets)
        values = tuple(_Storage(value.nbytes) for value in self.inputs)
        boundaries = [values + targets]
        for number, cost in enumerate(self.layers):
            own = [_Storage(nbytes) for nbytes in cost.storages]
            inputs = boundaries[-1]
            for origin in cost.saved_storages:
                storage = own[origin.index] if origin.kind == "own" else inputs[origin.index]
                if storage.first_saver is None:
                    storage.first_saver = number
                    self._saved_bytes[number] += storage.nbytes
            values = tuple(_find(origin, own, inputs) for origin in cost.output_origins)
            boundaries.append(values + targets)
        if self.last:
            boundaries[-1] = ()
        return boundaries

    def _segment(self, start: int | None, stop: int | None) -> tuple[int, int]:
        """Positions in `layers`; the loss belongs to the segment that ends the model."""
        first = 0 if start is None else start - self.start
        end = len(self.layers) if stop is None or stop == self.stop else stop - self.start
        return first, end

    def _held(self, number: int) -> int:
        """Bytes saved by the layers before position `number`: all that is left of a forward when their backward is
        next.
        """
        return self._held_bytes[number]

    def _live(self, number: int) -> int:
        """Bytes that exist when layers before position `number` have run forward: saved by one of them, or values
        there.
        """
        waiting = {s for s in self._boundaries[number] if s.first_saver is None or s.first_saver >= number}
        return self._held(number) + sum(storage.nbytes for storage in waiting)

    @cached_property
    def _gradient_values(self) -> list[list[_GradientValue | None]]:
        """The gradients of the values at every boundary: before layer 0, 1, ... of the stage, and behind the last.

        Followed from the end: a layer may pass a gradient on, or hand out slices of one, or have none for a value.
        """
        values: list[_GradientValue | None] = [
            (_Storage(v.nbytes), True, v.nbytes) if v.requires_grad else None
            for v in (() if self.last else self.outputs)
        ]
        boundaries = [values]
        for cost in reversed(self.layers):
            own = [_Storage(nbytes) for nbytes in cost.gradient_storages]
            values = [
                _gradient(origin, value.nbytes, own, boundaries[-1])
                for origin, value in zip(cost.input_gradients, cost.inputs, strict=True)
            ]
            boundaries.append(values)
        return boundaries[::-1]

    def _present(self, number: int) -> list[_GradientValue]:
        """The gradients that exist at the boundary before position `number`."""
        return [value for value in self._gradient_values[number] if value is not None]

    @property
    def last_gradients(self) -> int:
        """Bytes of the gradients that the loss hands to the model's last layer."""
        return self._gradients(len(self.layers) - 1)

    def unlike_gradients(self) -> list[tuple[int, int]]:
        """Boundaries at which a value has no gradient of its own, but a slice of one, or none because a later layer
        drops it; with the layer up to which a stage that ends before it is handed a whole one.
        """
        born = {id(s): n for n in range(len(self._gradient_values)) for s, _, _ in self._present(n)}
        found = dict[tuple[int, int], None]()
        for number in range(len(self._gradient_values)):
            holders = Counter(id(s) for s, _, _ in self._present(number))
            for storage, contiguous, nbytes in self._present(number):
                if not contiguous or storage.nbytes != nbytes or holders[id(storage)] > 1:
                    found[number, born[id(storage)]] = None
        for number, cost in enumerate(self.layers):
            for index, value in enumerate(cost.inputs):
                if value.requires_grad and self._gradient_values[number][index] is None:
                    found[number, self._dropped(number, index)] = None
        return list(found)

    def _dropped(self, number: int, index: int) -> int:
        """The layer, or the loss, in which a value that gets no gradient ends, from that before layer `number` on."""
        while number < len(self.layers) - 1 and (o := self.layers[number].input_gradients[index]).kind == "output":
            number, index = number + 1, o.index
        return number

    def gradients_before(self, layer: int) -> int:
        """Bytes of the gradients of the values before a layer of the stage, or behind its last."""
        return self._gradients(len(self.layers) if layer == self.stop else layer - self.start)

    def _gradients(self, number: int) -> int:
        """Bytes of the gradients of the values at the boundary before position `number`."""
        if number == 0 and not self.start:
            return 0
        return sum({id(s): s.nbytes for s, _, _ in self._present(number)}.values())


def gradient_bytes(values: Sequence[Value]) -> int:
    """Bytes of the gradients of `values`: as large as they, for those that need one."""
    return sum(value.nbytes for value in values if value.requires_grad)


def _find(origin: Origin, own: Sequence[_Storage], inputs: Sequence[_Storage]) -> _Storage:
    """The storage an output lives in; one of no bytes for parameters and constants, which exist anyway."""
    match origin.kind:
        case "own":
            return own[origin.index]
        case "input":
            return inputs[origin.index]
        case _:
            return _Storage(0)


def _gradient(
    origin: GradientOrigin, nbytes: int, own: Sequence[_Storage], behind: Sequence[_GradientValue | None]
) -> _GradientValue | None:
    """The gradient of a value of `nbytes`, from those behind the layer; the loss starts from a constant."""
    if origin.kind == "own":
        return own[origin.index], origin.contiguous, nbytes
    passed = behind[origin.index] if origin.kind == "output" and origin.index < len(behind) else None
    return None if passed is None else (passed[0], passed[1] and origin.contiguous, nbytes)
