"""The costs of one stage on one kind of device: bytes by action (`Flights`, `StageRest`), and seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from functools import cached_property

from pipefit.actions import Action, Kind, Subject
from pipefit.cost.collectives import Ring
from pipefit.cost.effects import Effect
from pipefit.cost.flight import Flights
from pipefit.cost.messages import Sent
from pipefit.cost.rest import StageRest
from pipefit.cost.shares import Share, share_of
from pipefit.cost.storages import StageStorages
from pipefit.cost.time import Seconds, copy_seconds, host_update_seconds, layer_seconds
from pipefit.devices import DeviceKind, Host
from pipefit.plans import Plan
from pipefit.profiles import Measurement
from pipefit.training import Training


class StageCost:
    """The costs of layers `start` to `stop - 1`; what has been computed is kept.

    `times` are the seconds of all layers of the model, and of the loss, on the stage's kind of device; `share` is what
    the device keeps of what replicas divide, and `sent` how often it sends what leaves the stage.
    """

    def __init__(
        self,
        measurement: Measurement,
        start: int,
        stop: int,
        times: Sequence[Seconds],
        kind: DeviceKind,
        training: Training,
        share: Share | None = None,
        sent: Sent = Sent(),  # noqa: B008 - it is frozen
    ) -> None:
        self.start, self.stop, self.share = start, stop, share
        self._times = times
        self.storages = StageStorages(measurement, start, stop, rooms=training.versions == "everything")
        self.flights = Flights(self.storages, sent)
        self.rest = StageRest(self.storages, training.microbatches, share=share)
        self.layers = frozenset(range(start, stop))
        self._seconds: dict[tuple[Kind, int, int], float] = {}
        self._kind = kind

    @property
    def divides_gradients(self) -> bool:
        """Whether replicas of the stage keep gradients of the layers that they own alone."""
        return self.share is not None and self.share.divides_gradients

    def keeps_gradients(self, layer: int) -> bool:
        """Whether the device keeps the gradients of a layer when they have been summed."""
        return self.share is None or self.share.keeps("gradients", layer)

    def forgetful(self) -> StageCost:
        """The same costs, with flights that remember nothing yet."""
        found = copy(self)
        found.flights = Flights(self.storages, self.flights.sent)
        return found

    def seconds(self, action: Action) -> float:
        """Seconds of a compute action."""
        first, end = action.layers or (self.start, self.stop)
        found = self._seconds.get((action.kind, first, end))
        if found is None:
            found = self._seconds[action.kind, first, end] = self._sum(action.kind, first, end)
        return found

    def _sum(self, kind: Kind, first: int, end: int) -> float:
        """Seconds of layers `first` to `end - 1`, and of the loss behind the model's last layer."""
        if kind is Kind.STASH:
            return copy_seconds(self.rest.weight_bytes_of(first, end), self._kind)
        times = self._times[first : end + (end + 1 == len(self._times))]
        if kind is Kind.STEP:
            own = self.share.owns if self.share is not None else self.layers.__contains__
            return sum(time.update for layer, time in enumerate(times[: end - first], start=first) if own(layer))
        return sum(time.backward if kind is Kind.BACKWARD else time.forward for time in times)

    def host_update_seconds(self, action: Action, host: Host) -> float:
        """Seconds of an update on a host.

        Raises:
            UsageError: the host's memory bandwidth is not known.
        """
        first, end = action.layers or (self.start, self.stop)
        owned = (n for n in range(first, end) if self.share is None or self.share.owns(n))
        return sum(host_update_seconds(self.storages.costs[n - self.start], host) for n in owned)

    def collective_bytes(self, action: Action) -> int:
        """Bytes that every member of a collective contributes: of a REDUCE, gradients of the stage's own parameters, or
        of one that stages share; of an UNSHARD, parameters.
        """
        if action.kind is Kind.REDUCE and isinstance(action.subject, Subject):
            return self.storages.measurement.shared[action.subject.layer].gradient_bytes
        return sum(self._collected_bytes(action, layer) for layer in range(*(action.layers or (self.start, self.stop))))

    def owned_bytes(self, action: Action, replicas: int) -> list[int] | None:
        """Of these bytes, those of the layers that every replica owns; None where each replica gets the sum of all."""
        if self.share is None or isinstance(action.subject, Subject):
            return None
        found = [0] * replicas
        for layer in range(*(action.layers or (self.start, self.stop))):
            found[self.share.owner(layer)] += self._collected_bytes(action, layer)
        return found

    def _collected_bytes(self, action: Action, layer: int) -> int:
        """Bytes of one layer in a collective of its stage."""
        if action.kind is Kind.REDUCE:
            return self.rest.whole_bytes_of("gradients", layer, layer + 1) - self._summed_bytes[layer]
        return self.rest.gathered_bytes(layer) if action.kind is Kind.UNSHARD else 0

    @cached_property
    def _summed_bytes(self) -> Counter[int]:
        """By layer, bytes of the gradients of parameters that layers of other stages have too."""
        found = Counter[int]()
        for shared in self.storages.measurement.shared:
            users = [user for user in shared.users if self.start <= user < self.stop]
            if users and len(users) < len(shared.users):
                found[users[0]] += shared.gradient_bytes
        return found


class Costs:
    """The costs of all stages asked for so far, for one profile and training. Planners share one between plans.

    `measurement` is at the size of a microbatch; `slices` are at those of the slices that replicas compute, and of
    layers that tensor-parallel ranks divide.
    """

    def __init__(self, measurement: Measurement, training: Training, slices: Sequence[Measurement] = ()) -> None:
        self._measurements = {(one.microbatch_size, one.tensor): one for one in (*slices, measurement)}
        self._size, self._training = measurement.microbatch_size, training
        self._stages: dict[tuple[object, ...], StageCost] = {}
        self._times: dict[tuple[object, ...], tuple[Seconds, ...]] = {}  # of all layers, by samples and kind of device

    @staticmethod
    def of(plan: Plan) -> Costs:
        """Costs for `plan`, which serve every plan of the same profile and training."""
        return Costs(plan.measurement, plan.training, plan.profile.measurements)

    def stage(
        self,
        start: int,
        stop: int,
        kind: DeviceKind,
        bundles: Sequence[tuple[Subject, ...]] = (),
        *,
        data: int = 1,
        share: Share | None = None,
        ring: Ring | None = None,
        sent: Sent = Sent(),  # noqa: B008 - it is frozen
    ) -> StageCost:
        """The costs of layers `start` to `stop - 1` on a device of `kind`, in a program with these bundles.

        The device computes a slice of every microbatch, as one of `data` replicas, and has a `share` of what they
        divide; or it is one of the ranks of such a replica, which divide the layers and exchange around the `ring`.
        What flights remember of an action names a bundle by its number alone, so that programs share it only where the
        stage's bundles are the same.
        """
        own = tuple((number, one) for number, one in enumerate(bundles) if start <= one[0].layer < stop)
        degree = self._size // data, 1 if ring is None else ring.members
        key = (start, stop, kind.key, own, degree, share, ring, sent)
        found = self._stages.get(key)
        if found is None:
            found = self._stages[key] = (
                self.stage(start, stop, kind, data=data, share=share, ring=ring, sent=sent).forgetful()
                if own
                else StageCost(
                    self._measurements[degree],
                    start,
                    stop,
                    self._seconds(kind, degree, ring),
                    kind,
                    self._training,
                    share,
                    sent,
                )
            )
        return found

    def of_device(
        self, plan: Plan, stage: int, device: int, devices: Sequence[int], bundles: Sequence[tuple[Subject, ...]] = ()
    ) -> StageCost:
        """The costs of a stage of `plan` on one of the `devices` that hold it in a program with these bundles."""
        place, grid = plan.stages[stage], plan.stages[stage].grid
        replica, shard = divmod(devices.index(device), grid.tensor)
        group = devices[replica * grid.tensor : (replica + 1) * grid.tensor]
        return self.stage(
            place.start,
            place.stop,
            plan.cluster.devices[device].kind,
            bundles,
            data=grid.data,
            share=share_of(plan, stage, grid.devices[replica * grid.tensor + shard]),
            ring=Ring.of(plan.cluster, group) if grid.tensor > 1 else None,
            sent=Sent.of(plan, stage, shard),
        )

    def _seconds(self, kind: DeviceKind, degree: tuple[int, int], ring: Ring | None) -> tuple[Seconds, ...]:
        """The seconds of all layers, at so many samples and divided between so many ranks, on a device of `kind`."""
        found = self._times.get((degree, kind.key, ring))
        if found is None:
            measurement = self._measurements[degree]
            found = self._times[degree, kind.key, ring] = layer_seconds(measurement, kind, self._training.dtype, ring)
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
