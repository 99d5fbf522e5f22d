"""The virtual memory ledger of one device: what every action of a program allocates and frees, to the byte.

It follows each microbatch through its stage, and refuses a program that uses what is not there: a forward without its
inputs, a backward without its gradients or with a storage still away. What is freed when is a function of the program
alone, so no clock is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from pipefit.errors import UsageError
from pipefit.program import Action, Kind
from pipefit.simulator.costs import StageCosts
from pipefit.simulator.effects import Effect, effect
from pipefit.simulator.storages import Storage

Effects = list[tuple[int, Effect]]  # by position in the device's program; actions without an effect are left out
_Handler = Callable[[Action], "Effect | None"]


class _Flight:
    """How far one microbatch has come in a stage."""

    __slots__ = ("again", "backward", "checkpoint", "forward", "joined", "loaded", "moved", "posted")

    def __init__(self, costs: StageCosts) -> None:
        self.forward, self.backward = (
            costs.start,
            costs.stop,
        )  # the next layer forward; the last one with no backward yet
        self.loaded = self.checkpoint = self.again = False  # data is there; inputs alone are kept; forward ran again
        self.posted: set[Kind] = set()
        self.joined: set[Kind] = set()
        self.moved: dict[Storage, tuple[str, str | None]] = {}  # what is not simply there: its state and its place


class Ledger:
    """Reads the program of one device, step after step."""

    def __init__(self, device: int, stages: dict[int, StageCosts], microbatches: int) -> None:
        self._device, self._stages, self._microbatches = device, stages, microbatches
        self._flights: dict[tuple[int, int], _Flight] = {}
        self._born: set[int] = set()  # layers with gradients
        self._stepped: set[int] = set()  # stages with optimizer state
        self._freed: dict[int, Effect] = {}
        self._starts: dict[Kind, _Handler] = {
            Kind.LOAD: self._load,
            Kind.FORWARD: self._forward,
            Kind.FORWARD_ONLY: self._checkpoint,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.RECV_FORWARD: self._receive_forward,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.RECV_BACKWARD: self._receive_backward,
            Kind.OFFLOAD: self._offload,
            Kind.RELOAD: self._reload,
            Kind.REDUCE: self._collect,
            Kind.AGREE: self._collect,
            Kind.STEP: self._update,
        }
        self._joins: dict[Kind, _Handler] = {
            Kind.SEND_FORWARD: self._sent_forward,
            Kind.RECV_FORWARD: self._received,
            Kind.SEND_BACKWARD: self._sent_backward,
            Kind.RECV_BACKWARD: self._received,
            Kind.REDUCE: self._collected,
            Kind.AGREE: self._collected,
            Kind.OFFLOAD: self._offloaded,
            Kind.RELOAD: self._reloaded,
        }

    def read(self, actions: tuple[Action, ...]) -> Effects:
        """The effects of one step.

        Raises:
            UsageError: an action uses what is not there, or is not supported; says which and what is missing.
        """
        starts, joins = self._starts, self._joins
        effects = []
        for position, action in enumerate(actions):
            found = (joins if action.wait else starts)[action.kind](action)
            if found is not None:
                effects.append((position, found))
        self._flights = {key: flight for key, flight in self._flights.items() if not self._done(key[0], flight)}
        return effects

    def _done(self, stage: int, flight: _Flight) -> bool:
        """Nothing of the microbatch is left, so the next step may bring another one of its number."""
        costs = self._stages[stage]
        sent = (costs.last or Kind.SEND_FORWARD in flight.posted) and (
            not costs.start or Kind.SEND_BACKWARD in flight.posted
        )
        return sent and flight.backward == costs.start and not flight.moved

    # ---------------------------------------------------------------- data and messages

    def _load(self, action: Action) -> Effect:
        costs, flight = self._at(action)
        if flight.loaded:
            self._refuse(action, "loads what is there already")
        if costs.start and not costs.last:
            self._refuse(action, "has nothing to load: only the first stage has inputs and only the last one targets")
        flight.loaded = True
        return costs.load

    def _receive_forward(self, action: Action) -> Effect:
        costs, _ = self._post(action)
        return costs.receive_forward

    def _receive_backward(self, action: Action) -> Effect:
        costs, _ = self._post(action)
        return costs.receive_backward

    def _send_forward(self, action: Action) -> None:
        costs, flight = self._post(action)
        if flight.forward < costs.stop:
            self._refuse(action, f"comes before the forward of layer {costs.stop - 1}")

    def _send_backward(self, action: Action) -> None:
        costs, flight = self._post(action)
        if flight.backward > costs.start:
            self._refuse(action, f"comes before the backward of layer {costs.start}")

    def _received(self, action: Action) -> None:
        self._at(action)[1].joined.add(action.kind)

    def _sent_forward(self, action: Action) -> Effect:
        costs, flight = self._at(action)
        flight.joined.add(action.kind)
        return costs.sent_checkpoint if flight.checkpoint else costs.sent_forward

    def _sent_backward(self, action: Action) -> Effect:
        return self._at(action)[0].sent_backward

    def _post(self, action: Action) -> tuple[StageCosts, _Flight]:
        costs, flight = self._at(action)
        if action.kind in flight.posted:
            self._refuse(action, "happens twice")
        flight.posted.add(action.kind)
        return costs, flight

    # ---------------------------------------------------------------- computing

    def _forward(self, action: Action) -> Effect:
        costs, flight, first, end = self._segment(action)
        if first != flight.forward:
            self._refuse(action, f"is out of order: the next layer forward is {flight.forward} of {costs.stop - 1}")
        if first == costs.start and (costs.start and Kind.RECV_FORWARD not in flight.joined):
            self._refuse(action, f"has no inputs: {_wait_for(action, Kind.RECV_FORWARD)} must come before it")
        if not flight.loaded and ((first == costs.start and not costs.start) or (end == costs.stop and costs.last)):
            self._refuse(action, f"has no data: {action.stage}LOAD{action.microbatch} must come before it")
        flight.forward = end
        return costs.forward(first, end)

    def _checkpoint(self, action: Action) -> Effect:
        self._whole(action)
        self._forward(action)
        costs, flight = self._at(action)
        flight.checkpoint = True
        return costs.checkpoint

    def _recompute(self, action: Action) -> Effect:
        self._whole(action)
        costs, flight = self._at(action)
        if not flight.checkpoint or flight.again:
            self._refuse(action, "has nothing to run again: it belongs once between an N and its backward")
        flight.again = True
        return costs.recompute

    def _whole(self, action: Action) -> None:
        if action.layers is not None:
            self._refuse(action, "recomputes a part of a stage, which is not supported yet: write it without layers")

    def _backward(self, action: Action) -> Effect:
        costs, flight, first, end = self._segment(action)
        if flight.checkpoint and not flight.again:
            self._refuse(action, f"needs {action._replace(kind=Kind.RECOMPUTE, layers=None)} before it")
        if flight.forward < costs.stop or end != flight.backward:
            last = flight.backward - 1
            self._refuse(action, f"is out of order: the next layer backward is {last}, after the forward of the stage")
        if end == costs.stop and not costs.last and Kind.RECV_BACKWARD not in flight.joined:
            self._refuse(action, f"has no gradients: {_wait_for(action, Kind.RECV_BACKWARD)} must come before it")
        if flight.moved:
            self._check_back(action, flight, first, end)
        flight.backward = first
        if flight.again:
            return costs.consumed(self._bears_gradients(action, first, end))
        return costs.backward(first, end, self._bears_gradients(action, first, end))

    def _check_back(self, action: Action, flight: _Flight, first: int, end: int) -> None:
        for storage, (state, place) in flight.moved.items():
            if any(first <= layer < end for layer in storage.savers):
                layers = " and ".join(map(str, dict.fromkeys(storage.savers)))
                self._refuse(
                    action,
                    f"needs a saved tensor of layer {layers} that is {state} (@{place}): "
                    "RELOAD it and join the reload before",
                )

    def _bears_gradients(self, action: Action, first: int, end: int) -> bool:
        """Whether this backward is the step's first for its layers."""
        layers = range(first, end)
        if self._born.issuperset(layers):
            return False
        if not self._born.isdisjoint(layers):
            self._refuse(
                action, "is the first backward of the step for some of its layers only: cut it as the others are"
            )
        self._born.update(layers)
        return True

    def _collect(self, action: Action) -> None:
        costs = self._stages[action.stage]
        if not self._born.issuperset(range(costs.start, costs.stop)):
            self._refuse(action, "has no gradients: the backward of every layer must come before it")

    def _collected(self, action: Action) -> None:
        """Gradients are added up in place."""

    def _update(self, action: Action) -> Effect:
        costs = self._stages[action.stage]
        if action.microbatch is not None:
            self._refuse(
                action, "is asynchronous, which is not supported by the simulator yet: write it without a number"
            )
        if not self._born.issuperset(range(costs.start, costs.stop)):
            self._refuse(action, "has no gradients: the backward of every layer must come before it")
        self._born.difference_update(range(costs.start, costs.stop))
        first = action.stage not in self._stepped
        self._stepped.add(action.stage)
        return costs.first_update if first else costs.later_update

    # ---------------------------------------------------------------- moving saved tensors away and back

    def _offload(self, action: Action) -> None:
        flight, storage, layer = self._storage(action)
        if flight.backward <= layer or flight.forward <= layer:
            self._refuse(action, f"moves what is not there: it belongs between forward and backward of layer {layer}")
        if storage in flight.moved:
            self._refuse(action, f"moves a storage that is {flight.moved[storage][0]} already")
        flight.moved[storage] = ("on its way out", action.place)

    def _offloaded(self, action: Action) -> Effect:
        flight, storage, _ = self._storage(action)
        if storage.last_reader >= flight.forward:
            self._refuse(action, f"frees what the forward of layer {storage.last_reader} still reads")
        if storage.sent and Kind.SEND_FORWARD not in flight.joined:
            self._refuse(
                action, f"frees what is still being sent: {_wait_for(action, Kind.SEND_FORWARD)} must come before it"
            )
        flight.moved[storage] = ("away", action.place)
        return self._change(-storage.nbytes)

    def _reload(self, action: Action) -> Effect:
        flight, storage, _ = self._storage(action)
        if flight.moved.get(storage) != ("away", action.place):
            state, place = flight.moved.get(storage, ("on the device", f"device{self._device}"))
            self._refuse(action, f"brings back a storage that is {state} (@{place})")
        flight.moved[storage] = ("on its way back", action.place)
        return self._change(storage.nbytes)

    def _reloaded(self, action: Action) -> None:
        flight, storage, _ = self._storage(action)
        del flight.moved[storage]

    def _storage(self, action: Action) -> tuple[_Flight, Storage, int]:
        """The microbatch, the storage of the tensor that moves, and the layer that names it."""
        costs, flight = self._at(action)
        subject = action.subject
        if subject is None or not isinstance(subject.what, int):
            self._refuse(action, "is not supported by the simulator yet: only saved tensors move, such as [5.3]")
        storage = costs.storages.get((subject.layer, subject.what))
        if storage is None:
            self._refuse(
                action,
                f"names a tensor that stage {action.stage} does not keep: a parameter, a constant or none at all",
            )
        return flight, storage, subject.layer

    def _change(self, nbytes: int) -> Effect:
        """Activations that come or go."""
        found = self._freed.get(nbytes)
        if found is None:
            found = self._freed[nbytes] = effect(activations=nbytes)
        return found

    # ---------------------------------------------------------------- finding things

    def _at(self, action: Action) -> tuple[StageCosts, _Flight]:
        """The costs of the action's stage, and its microbatch there."""
        stage, microbatch = action.stage, action.microbatch
        costs = self._stages[stage]
        if microbatch is None or microbatch >= self._microbatches:
            self._refuse(action, f"needs the number of a microbatch, 0 to {self._microbatches - 1}")
        flight = self._flights.get((stage, microbatch))
        if flight is None:
            flight = self._flights[stage, microbatch] = _Flight(costs)
        return costs, flight

    def _segment(self, action: Action) -> tuple[StageCosts, _Flight, int, int]:
        costs, flight = self._at(action)
        first, end = action.layers or (costs.start, costs.stop)
        if not costs.start <= first < end <= costs.stop:
            self._refuse(action, f"is outside its stage, which holds layers {costs.start} to {costs.stop - 1}")
        return costs, flight, first, end

    def _refuse(self, action: Action, why: str) -> NoReturn:
        raise UsageError(f"device {self._device}: {action} {why}")


def _wait_for(action: Action, kind: Kind) -> str:
    """The text of the WAIT of that kind for the action's stage and microbatch, for people."""
    return f"{action.stage}WAIT_{kind.value}{action.microbatch}"
