"""The costs of one stage on one kind of device: bytes by action (`Flights`, `StageRest`), and seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from pipefit.memory.fully_sharded import Division, ShardedStage, divided
from pipefit.memory.microbatch import Flights
from pipefit.memory.model_state import LayerState, ReplicaShare, StageRest, owners, share_among
from pipefit.memory.storages import Effect, Sent, StageStorages
from pipefit.schema.actions import Action, Kind, Subject
from pipefit.schema.devices import DeviceKind, Host
from pipefit.schema.grids import Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Measurement
from pipefit.schema.training import Training
from pipefit.timing import Group, PassSeconds, copy_seconds, host_update_seconds, layer_seconds
from pipefit.units import format_bytes


class StageCost:
    """The costs of a stage whose microbatches are `flights`; computed figures are cached.

    `times` are the seconds of all layers of the model, and of the loss, on the stage's kind of device;
    `share` is the device's ZeRO share. On torch's engine, replicas may have divided the stage by FSDP2: then
    `part` has the storages of the device's part.
    """

    def __init__(
        self,
        flights: Flights,
        times: Sequence[PassSeconds],
        kind: DeviceKind,
        microbatches: int,
        share: ReplicaShare | None,
        part: tuple[StageStorages, Division] | None = None,
    ) -> None:
        self.flights, self.storages, self.share = flights, flights.storages, share
        self.start, self.stop = self.storages.start, self.storages.stop
        self._times = times
        self.rest = StageRest(self.storages if part is None else part[0], microbatches, share=share)
        self.sharded = None if part is None else ShardedStage(self.storages, *part)
        self._parts = 1 if part is None else part[1].replicas
        self.layers = frozenset(range(self.start, self.stop))
        self._seconds: dict[tuple[Kind, int, int], float] = {}
        self._collected: dict[Kind, list[int]] = {}
        self._kind = kind

    @property
    def divides_gradients(self) -> bool:
        """True if each replica keeps only the gradients of the layers that it owns."""
        return self.share is not None and self.share.divides_gradients

    def keeps_gradients(self, layer: int) -> bool:
        """Return whether the device keeps the gradients of a layer after their reduction."""
        return self.share is None or self.share.keeps("gradients", layer)

    def seconds(self, action: Action) -> float:
        """Return the seconds of a compute action."""
        first, end = action.layers or (self.start, self.stop)
        result = self._seconds.get((action.kind, first, end))
        if result is None:
            result = self._seconds[action.kind, first, end] = self._sum(action.kind, first, end)
        return result

    def _sum(self, kind: Kind, first: int, end: int) -> float:
        """Return the seconds of layers `first` to `end - 1`, and of the loss after the model's last layer."""
        if kind is Kind.STASH:
            return copy_seconds(self.rest.weight_bytes_of(first, end), self._kind)
        times = self._times[first : end + (end + 1 == len(self._times))]
        if kind is Kind.STEP:
            own = self.share.owns if self.share is not None else self.layers.__contains__
            return sum(
                time.update / self._parts
                for layer, time in enumerate(times[: end - first], start=first)
                if own(layer)
            )
        return sum(time.backward if kind is Kind.BACKWARD else time.forward for time in times)

    def host_update_seconds(self, action: Action, host: Host) -> float:
        """Return the seconds of an update on a host.

        Raises:
            UsageError: the host's memory bandwidth is unknown.
        """
        first, end = action.layers or (self.start, self.stop)
        owned = (n for n in range(first, end) if self.share is None or self.share.owns(n))
        return sum(host_update_seconds(self.storages.costs[n - self.start], host) for n in owned)

    def collective_bytes(self, action: Action) -> int:
        """Return the bytes that every member contributes to a collective.

        A REDUCE has gradients of the stage's own parameters or of a shared one; an UNSHARD has parameters.
        """
        if action.kind is Kind.REDUCE and isinstance(action.subject, Subject):
            return self.storages.measurement.shared[action.subject.layer].gradient_bytes
        return sum(self._collected_bytes(action))

    def collective_tensors(self, action: Action) -> int:
        """Return the number of tensors of a collective, each sent separately."""
        if isinstance(action.subject, Subject):
            return 1
        first = self.start if action.layers is None else action.layers[0]
        return sum(
            max(self.rest.exchanged_tensors(layer, gathered=action.kind is Kind.UNSHARD), 1)
            for layer, nbytes in enumerate(self._collected_bytes(action), start=first)
            if nbytes
        )

    def owned_bytes(self, action: Action, replicas: int) -> list[int] | None:
        """Return a collective's bytes by the replica that owns their layers.

        Returns None if each replica gets the whole result.
        """
        if self.sharded is not None and not isinstance(action.subject, Subject):
            return [self.collective_bytes(action) // replicas] * replicas
        if self.share is None or isinstance(action.subject, Subject):
            return None
        result, first = [0] * replicas, 0 if action.layers is None else action.layers[0] - self.start
        for position, nbytes in enumerate(self._collected_bytes(action), start=first):
            result[self.share.owners[position]] += nbytes
        return result

    def _collected_bytes(self, action: Action) -> list[int]:
        """Return the bytes of every layer in a collective of its stage."""
        if action.kind not in self._collected:
            self._collected[action.kind] = [
                self._bytes_in(action.kind, n) for n in range(self.start, self.stop)
            ]
        first, end = action.layers or (self.start, self.stop)
        return self._collected[action.kind][first - self.start : end - self.start]

    def _bytes_in(self, kind: Kind, layer: int) -> int:
        """Return the bytes of a layer in collectives of a kind."""
        if self.sharded is not None:
            what: LayerState = "gradients" if kind is Kind.REDUCE else "parameters"
            return self.rest.whole_bytes_of(what, layer, layer + 1) * self._parts
        if kind is Kind.REDUCE:
            return self.rest.whole_bytes_of("gradients", layer, layer + 1) - self._summed_bytes[layer]
        return self.rest.gathered_bytes(layer) if kind is Kind.UNSHARD else 0

    @cached_property
    def _summed_bytes(self) -> Counter[int]:
        """Gradient bytes, by layer, of parameters that layers of other stages share."""
        result = Counter[int]()
        for shared in self.storages.measurement.shared:
            users = [user for user in shared.users if self.start <= user < self.stop]
            if users and len(users) < len(shared.users):
                result[users[0]] += shared.gradient_bytes
        return result


Way = tuple[int, int, bool]  # of a measurement: samples, ranks, and whether these divide positions too


class Costs:
    """Cached costs of all stages, for one profile and training. Planners share one object between plans.

    `measurement` is at the size of a microbatch; `slices` are at the sizes of local batches, and of layers
    that tensor-parallel ranks divide. `buffered` is as for `StageStorages`.
    """

    def __init__(
        self,
        measurement: Measurement,
        training: Training,
        slices: Sequence[Measurement] = (),
        *,
        buffered: bool = False,
    ) -> None:
        self._measurements = {one.way: one for one in (*slices, measurement)}
        self._size, self._training, self._buffered = measurement.microbatch_size, training, buffered
        self._stages: dict[tuple[object, ...], StageCost] = {}
        self._storages: dict[tuple[object, ...], StageStorages] = {}
        self._flights: dict[tuple[object, ...], Flights] = {}
        self._owners: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._times: dict[tuple[object, ...], tuple[PassSeconds, ...]] = {}  # by measurement, kind and group

    @staticmethod
    def of(plan: Plan, *, buffered: bool = False) -> Costs:
        """Return the costs for `plan`, valid for every plan of the same profile and training."""
        return Costs(plan.measurement, plan.training, plan.profile.measurements, buffered=buffered)

    def stage(
        self,
        start: int,
        stop: int,
        kind: DeviceKind,
        *,
        data: int = 1,
        share: ReplicaShare | None = None,
        group: Group | None = None,
        sequences: bool = False,
        sent: Sent = Sent(),  # noqa: B008 - it is frozen
        division: Division | None = None,
    ) -> StageCost:
        """Return the costs of layers `start` to `stop - 1` on a device of `kind`.

        The device computes a local batch of every microbatch, as one of `data` replicas, and has a ZeRO
        `share`. If tensor-parallel ranks divide the layers, with `sequences` also along positions, the device
        is one of a `group`. On torch's engine, replicas may have divided the stage: `division` is the
        device's part.
        """
        degree = self._size // data, 1 if group is None else group.members, sequences
        casts = division is not None  # FSDP2 replaces the weights in each pass
        flight = start, stop, degree, sent, casts
        key = *flight, kind.key, share, group, division
        if key not in self._stages:
            if flight not in self._flights:
                self._flights[flight] = Flights(self._storages_of(start, stop, degree, casts=casts), sent)
            times = self._seconds(kind, degree, group)
            self._stages[key] = StageCost(
                self._flights[flight],
                times,
                kind,
                self._training.microbatches,
                share,
                None
                if division is None
                else (self._storages_of(start, stop, degree, division, casts=casts), division),
            )
        return self._stages[key]

    def of_device(self, plan: Plan, stage: int, device: int, devices: Sequence[int]) -> StageCost:
        """Return the costs of a stage of `plan` on one of the `devices` that hold it."""
        place, grid = plan.stages[stage], plan.stages[stage].grid
        replica, shard = divmod(devices.index(device), grid.tensor)
        ranks = devices[replica * grid.tensor : (replica + 1) * grid.tensor]
        by_torch, frees = self._buffered and grid.divides_gradients, grid.shard == "parameters"
        pads = plan.profile.assumptions.target == "cpu"
        return self.stage(
            place.start,
            place.stop,
            plan.cluster.devices[device].kind,
            data=grid.data,
            share=None if by_torch else self._share(place, grid.devices[replica * grid.tensor + shard]),
            group=Group.of(plan.cluster, ranks) if grid.tensor > 1 else None,
            sequences=grid.sequences,
            sent=Sent.of(plan, stage, shard, buffered=self._buffered),
            division=Division(grid.data, replica, frees, pads) if by_torch else None,
        )

    def _storages_of(
        self, start: int, stop: int, degree: Way, division: Division | None = None, *, casts: bool = False
    ) -> StageStorages:
        """Return storages of layers `start` to `stop - 1` in one measurement, or of a replica's part."""
        key = start, stop, degree, division, casts
        if key not in self._storages:
            rooms, measurement = self._training.versions == "everything", self._measurements[degree]
            if division is not None:
                measurement = divided(measurement, division)
            self._storages[key] = StageStorages(
                measurement, start, stop, rooms=rooms, buffered=self._buffered, casts=casts
            )
        return self._storages[key]

    def _share(self, place: Stage, device: int) -> ReplicaShare | None:
        """Return a device's ZeRO share of a stage; None if nothing is divided."""
        grid = place.grid
        if grid.shard == "none":
            return None
        there = place.start, place.stop, (self._size // grid.data, grid.tensor, grid.sequences)
        if (*there, grid.shard) not in self._owners:
            self._owners[*there, grid.shard] = owners(self._storages_of(*there), grid)
        return share_among(place, device, self._owners[*there, grid.shard])

    def _seconds(self, kind: DeviceKind, degree: Way, group: Group | None) -> tuple[PassSeconds, ...]:
        """Return the seconds of all layers in one measurement, on a device of `kind`."""
        result = self._times.get((degree, kind.key, group))
        if result is None:
            measurement = self._measurements[degree]
            result = self._times[degree, kind.key, group] = layer_seconds(
                measurement, kind, self._training, group
            )
        return result


def receive_buffers(plan: Plan) -> dict[int, int]:
    """Return the bytes of receive buffers of `torch.distributed.pipelining`, by device.

    That engine allocates one for every microbatch and direction in its first step, and keeps them.
    """
    result = Counter[int]()
    for number, stage in enumerate(plan.stages):
        storages = StageStorages(plan.measured(number), stage.start, stage.stop, buffered=True)
        for device in stage.devices:
            result[device] += storages.received_bytes * plan.training.microbatches
    return dict(result)


def most_receive_buffers(plan: Plan) -> str:
    """Return a sentence about the device with most receive buffers on torch's engine; empty for one stage."""
    device, nbytes = max(receive_buffers(plan).items(), key=lambda item: (item[1], -item[0]))
    if not nbytes:
        return ""
    return f"torch's engine holds {format_bytes(nbytes)} of receive buffers on device {device}"


class WholeStage:
    """The effects of a stage whose forward and backward are one action each, for closed forms."""

    def __init__(self, measurement: Measurement, start: int, stop: int) -> None:
        self.storages = StageStorages(measurement, start, stop)
        self._flights = Flights(self.storages)

    def backward(self, *, is_first: bool) -> Effect:
        """Return the effect of a backward without recomputation, the step's first or a later one."""
        residency = self._flights.start
        first, last = not self.storages.start, self.storages.last
        kinds: list[tuple[Kind, bool]] = (
            [] if first else [(Kind.RECV_FORWARD, False), (Kind.RECV_FORWARD, True)]
        )
        kinds += [(Kind.LOAD, False)] if first or last else []
        kinds += [(Kind.FORWARD, False)]
        kinds += [] if last else [(Kind.SEND_FORWARD, False), (Kind.SEND_FORWARD, True)]
        kinds += [] if last else [(Kind.RECV_BACKWARD, False), (Kind.RECV_BACKWARD, True)]
        for kind, wait in kinds:
            residency, _ = self._flights.apply(residency, Action(kind, 0, 0, wait=wait))
        _, effect = self._flights.apply(residency, Action(Kind.BACKWARD, 0, 0), is_first=is_first)
        assert effect is not None
        return effect
