"""The costs of one stage on one kind of device: bytes by action (`Flights`, `StageRest`), and seconds."""

from __future__ import annotations

from functools import cache, partial

from pipefit.actions import Action, Kind, Subject
from pipefit.cost.effects import Effect
from pipefit.cost.flight import Flights
from pipefit.cost.rest import StageRest
from pipefit.cost.storages import StageStorages
from pipefit.cost.time import backward_seconds, copy_seconds, forward_seconds, update_seconds
from pipefit.devices import DeviceKind
from pipefit.plans import Plan
from pipefit.profiles import Measurement
from pipefit.training import Training


class StageCost:
    """The costs of layers `start` to `stop - 1` on a device of `kind`; what has been computed is kept."""

    def __init__(self, measurement: Measurement, start: int, stop: int, kind: DeviceKind, training: Training) -> None:
        self.start, self.stop = start, stop
        self.storages = StageStorages(measurement, start, stop)
        self.flights = Flights(self.storages)
        self.rest = StageRest(self.storages, training.microbatches, everything=training.versions == "everything")
        self.layers = frozenset(range(start, stop))
        self.forward_seconds = cache(partial(forward_seconds, measurement, kind=kind, dtype=training.dtype))
        self.backward_seconds = cache(partial(backward_seconds, measurement, kind=kind, dtype=training.dtype))
        self.update_seconds = update_seconds(measurement, start, stop, kind, training.dtype)
        self.stash_seconds = copy_seconds(self.rest.weight_bytes, kind)

    def seconds(self, action: Action) -> float:
        """Seconds of a compute action."""
        if action.kind is Kind.STEP:
            return self.update_seconds
        if action.kind is Kind.STASH:
            return self.stash_seconds
        first, end = action.layers or (self.start, self.stop)
        return self.backward_seconds(first, end) if action.kind is Kind.BACKWARD else self.forward_seconds(first, end)

    def collective_bytes(self, action: Action) -> int:
        """Bytes that every member of a collective contributes: of a REDUCE, a shared parameter's gradient."""
        shared = self.storages.measurement.shared
        subject = action.subject
        if action.kind is Kind.REDUCE and isinstance(subject, Subject):
            return shared[subject.layer].gradient_bytes
        return 0


class Costs:
    """The costs of all stages asked for so far, for one profile and training. Planners share one between plans."""

    def __init__(self, measurement: Measurement, training: Training) -> None:
        self._measurement, self._training = measurement, training
        self._stages: dict[tuple[object, ...], StageCost] = {}

    @staticmethod
    def of(plan: Plan) -> Costs:
        """Costs for `plan`, which serve every plan of the same profile and training."""
        return Costs(plan.measurement, plan.training)

    def stage(self, start: int, stop: int, kind: DeviceKind) -> StageCost:
        """The costs of layers `start` to `stop - 1` on a device of `kind`."""
        key = (start, stop, kind.name, kind.memory_bandwidth, *kind.flops.items())
        found = self._stages.get(key)
        if found is None:
            found = self._stages[key] = StageCost(self._measurement, start, stop, kind, self._training)
        return found


class WholeStage:
    """The effects of a stage whose forward and backward are one action each, for closed forms of a stage's peak."""

    def __init__(self, measurement: Measurement, start: int, stop: int) -> None:
        self.storages = StageStorages(measurement, start, stop)
        self._flights = Flights(self.storages)

    def backward(self, *, is_first: bool) -> Effect:
        """The effect of a backward without recomputation, the step's first or a later one."""
        residency = self._flights.start
        first, last = not self.storages.start, self.storages.last
        kinds: list[tuple[Kind, bool]] = [] if first else [(Kind.RECV_FORWARD, False), (Kind.RECV_FORWARD, True)]
        kinds += [(Kind.LOAD, False)] if first or last else []
        kinds += [(Kind.FORWARD, False)]
        kinds += [] if last else [(Kind.SEND_FORWARD, False), (Kind.SEND_FORWARD, True)]
        kinds += [] if last else [(Kind.RECV_BACKWARD, False), (Kind.RECV_BACKWARD, True)]
        for kind, wait in kinds:
            residency, _ = self._flights.apply(residency, Action(kind, 0, 0, wait=wait))
        _, effect = self._flights.apply(residency, Action(Kind.BACKWARD, 0, 0), is_first=is_first)
        assert effect is not None
        return effect
