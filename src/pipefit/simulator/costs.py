"""What the actions of a stage cost, worked out once for each kind of action and run of layers."""

from __future__ import annotations

from functools import cache, cached_property, partial

from pipefit.cluster import DeviceKind
from pipefit.cost.memory import StageMemory
from pipefit.cost.time import backward_seconds, forward_seconds, update_seconds
from pipefit.plans import Plan
from pipefit.profiles import Measurement
from pipefit.simulator.effects import Effect, effect
from pipefit.simulator.storages import Storage, saved_storages
from pipefit.training import Training


class StageCosts:
    """Seconds and memory effects of the actions of layers `start` to `stop - 1` on one device.

    `first`, `end` are the layers of an action, half open. What a method returns is kept.
    """

    def __init__(self, measurement: Measurement, start: int, stop: int, kind: DeviceKind, training: Training) -> None:
        self.start, self.stop = start, stop
        self.memory = StageMemory(measurement, start, stop, microbatches=training.microbatches)
        self.last = self.memory.last
        self.forward = cache(self._forward)
        self.backward = cache(self._backward)
        self.consumed = cache(self._consumed)
        self.forward_seconds = cache(partial(forward_seconds, measurement, kind=kind, dtype=training.dtype))
        self.backward_seconds = cache(partial(backward_seconds, measurement, kind=kind, dtype=training.dtype))
        self.update_seconds = update_seconds(measurement, start, stop, kind, training.dtype)

    @cached_property
    def load(self) -> Effect:
        """LOAD: the inputs on the first stage, the targets on the last."""
        nbytes = (0 if self.start else self.memory.input_bytes) + self.memory.target_bytes
        return effect(peak_bytes=nbytes, boundary=nbytes)

    @cached_property
    def receive_forward(self) -> Effect:
        """RECV_F."""
        return effect(boundary=self.memory.input_bytes)

    @cached_property
    def receive_backward(self) -> Effect:
        """RECV_B."""
        return effect(boundary=self.memory.output_gradient_bytes)

    @cached_property
    def sent_forward(self) -> Effect:
        """WAIT_SEND_F."""
        return effect(boundary=-self.memory.sent_bytes)

    @cached_property
    def checkpoint(self) -> Effect:
        """N: the inputs wait to be used again, the outputs travel."""
        peak_bytes, after_bytes = self.memory.checkpoint()
        held = self.memory.checkpoint_bytes
        return effect(peak_bytes=peak_bytes, activations=held, boundary=after_bytes - held)

    @cached_property
    def recompute(self) -> Effect:
        """R: the inputs become all that the layers save."""
        peak_bytes, after_bytes = self.memory.recompute()
        return effect(peak_bytes=peak_bytes, activations=after_bytes)

    @cached_property
    def sent_checkpoint(self) -> Effect:
        """WAIT_SEND_F behind an N."""
        return effect(boundary=-self.memory.checkpoint_sent_bytes)

    @cached_property
    def sent_backward(self) -> Effect:
        """WAIT_SEND_B."""
        return effect(boundary=-self.memory.input_gradient_bytes)

    @cached_property
    def first_update(self) -> Effect:
        """The STEP that creates the optimizer state."""
        step = self.memory.step
        return effect(
            peak_bytes=step.first_peak_bytes,
            gradients=-self.memory.gradient_bytes,
            optimizer=step.state_bytes - self.memory.early_state_bytes,
        )

    @cached_property
    def later_update(self) -> Effect:
        """Every later STEP."""
        return effect(peak_bytes=self.memory.step.peak_bytes, gradients=-self.memory.gradient_bytes)

    @cached_property
    def storages(self) -> dict[tuple[int, int], Storage]:
        """The storage of every saved tensor, by layer and number."""
        return saved_storages(self.memory)

    def _forward(self, first: int, end: int) -> Effect:
        peak_bytes, after_bytes = self.memory.forward(first, end)
        saved = self._saved_bytes(first, end)
        return effect(peak_bytes=peak_bytes, activations=saved, boundary=after_bytes - saved)

    def _backward(self, first: int, end: int, first_microbatch: bool) -> Effect:
        peak_bytes, after_bytes = self.memory.backward(first, end, first_microbatch=first_microbatch)
        saved, travelling = self._saved_bytes(first, end), self._gradients(first) - self._gradients(end)
        return effect(
            peak_bytes=peak_bytes,
            activations=-saved,
            boundary=travelling,
            gradients=after_bytes + saved - travelling,
        )

    def _consumed(self, first_microbatch: bool) -> Effect:
        """The backward of a recomputed microbatch: the copies of the buffers go too."""
        peak_bytes, after_bytes = self.memory.backward(first_microbatch=first_microbatch)
        copies, saved = self.memory.buffer_bytes, self._saved_bytes(self.start, self.stop)
        travelling = self._gradients(self.start) - self._gradients(self.stop)
        return effect(
            peak_bytes=peak_bytes,
            activations=-saved - copies,
            boundary=travelling,
            gradients=after_bytes + saved - travelling,
        )

    def _saved_bytes(self, first: int, end: int) -> int:
        """What these layers save: all that their backward consumes, besides the gradients of their outputs."""
        after_bytes = self.memory.backward(first, end).after_bytes
        return self._gradients(first) - self._gradients(end) - after_bytes

    def _gradients(self, layer: int) -> int:
        """Bytes of the gradients of the values at the boundary before `layer`."""
        return self.memory.input_gradient_bytes if layer == self.start else self.memory.gradients_before(layer)


class Costs:
    """The costs of every stage asked for so far, for one profile and training. Planners keep one for all plans."""

    def __init__(self, measurement: Measurement, training: Training) -> None:
        self._measurement, self._training = measurement, training
        self._stages: dict[tuple[object, ...], StageCosts] = {}

    @staticmethod
    def of(plan: Plan) -> Costs:
        """Costs for `plan`, and for every plan of the same profile and training."""
        return Costs(plan.measurement, plan.training)

    def stage(self, start: int, stop: int, kind: DeviceKind) -> StageCosts:
        """The costs of layers `start` to `stop - 1` on a device of `kind`."""
        key = (start, stop, kind.name, kind.memory_bandwidth, *kind.flops.items())
        found = self._stages.get(key)
        if found is None:
            found = self._stages[key] = StageCosts(self._measurement, start, stop, kind, self._training)
        return found
