"""Executes the program of one device. The dry run, a single process and the workers of a cluster all use this runner.

They differ in the tensors, which are fake or real, in the transport, and in the meter. `step` is a generator that
yields whenever the device would have to wait for another, so that one process can run all devices in turn.

A program counts microbatches from the first one of its step. What outlives a step of an endless schedule, flights and
messages, is known here by numbers that count on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pipefit.actions import COPIES, OF_ROWS, RECEIVES, SENDS, Action, Kind
from pipefit.errors import OutOfMemory, UsageError
from pipefit.meter import MemoryMeter
from pipefit.meter.stopwatch import Stopwatch
from pipefit.program import UncheckedProgram, shifted
from pipefit.runtime.absent import received, to_send
from pipefit.runtime.buffers import held_buffers
from pipefit.runtime.collectives import EXECUTED, Collectives, Resized
from pipefit.runtime.exchange import Boundary, Exchange
from pipefit.runtime.flight import Flight, on_device
from pipefit.runtime.instructions import LEFT, OWN_JOINS, Instructions, instructions
from pipefit.runtime.moving import Mover
from pipefit.runtime.out_of_memory import moment, named, ran_out
from pipefit.runtime.record import Record
from pipefit.runtime.site import Site
from pipefit.runtime.specializations import Specialization
from pipefit.runtime.stage import StageRunner
from pipefit.runtime.transfers import Transfers
from pipefit.runtime.weights import Weights, required
from pipefit.trace import Category, DeviceTrace, Event, Stream

Microbatch = list[Tensor]


class DeviceRunner:
    """Device `number` of a plan, with its stages: executes its actions step by step, and records them.

    Args:
        site: the plan, its program, and what it has in common with the other devices.
        stages: the stages of the plan that are on this device, by their numbers; of several replicas it is one.
        mover: moves saved tensors away and back.
        meter: counts the device's memory; None for no counting.
        stopwatch: of the GPU that computes; None where the host's clock tells what takes time.
    """

    def __init__(
        self,
        site: Site,
        stages: Mapping[int, StageRunner],
        *,
        number: int,
        mover: Mover,
        meter: MemoryMeter | None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        plan = site.plan
        self.plan, self.program, self.stages = plan, site.program, dict(stages)
        self.number, self._grid = number, plan.stages[min(stages)].grid
        self.transfers, self.mover = Transfers(site.transport), mover
        self._exchange = Exchange(plan, number, self.transfers)
        self._collectives = Collectives(plan, number, self.transfers)
        self.meter, self.clock, self.on_action = meter, site.clock, site.on_action
        self.usual = Specialization.usual(plan, {n: stage.usual for n, stage in stages.items()})
        self.record = Record(stopwatch)
        self._before = 0  # microbatches of the steps before, under an endless schedule
        self._specializations: dict[int, Specialization] = {}  # by microbatch
        self._flights: dict[tuple[int, int | None], Flight] = {}
        self._instructions_of: dict[
            int, tuple[UncheckedProgram, Instructions]
        ] = {}  # by the id of the program, kept alive
        self._training = True
        self._weights: Sequence[float] = ()
        self._inputs: Sequence[Microbatch] = ()
        self._targets: Sequence[Microbatch] = ()
        try:
            if meter is not None:
                meter.reserve(site.lending.lent_by(number))
            for stage in stages.values():
                self._tag([*stage.parameters, *stage.held], Category.PARAMETERS)
                self._tag(stage.kept_losses, Category.BOUNDARY)
                self._tag(stage.optimizer_state(), Category.OPTIMIZER)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"{error} ({self._where()})") from error

    def step(
        self,
        inputs: Sequence[Microbatch],
        targets: Sequence[Microbatch],
        *,
        program: UncheckedProgram | None = None,
        weights: Sequence[float] | None = None,
        specializations: Mapping[int, Sequence[Specialization]] | None = None,
        training: bool = True,
    ) -> Iterator[None]:
        """Execute one step. The first stage reads `inputs` and the last one `targets`, with one entry per microbatch.

        Without microbatches it ends those in flight, as a part of the step before.

        Args:
            program: to execute instead of the plan's, such as one that only evaluates.
            weights: the factor of every microbatch's loss; equal unless given.
            specializations: by device, for every microbatch, if some have other sizes, or for evaluation.
            training: False only evaluates.

        Raises:
            OutOfMemory: the device passed its cap; says at which action, and what held the bytes.
        """
        program = self.program if program is None else program
        self.record.read(wait=False)
        self.mover.begin(program)
        known, count, before = self._instructions(program), len(inputs), self._before
        self._training = training
        given = (specializations or {}).get(self.number, (self.usual,) * count)
        self._specializations |= enumerate(given, start=before)
        self._inputs, self._targets = inputs, targets
        self._weights = weights or (1.0 / max(count, 1),) * count
        if not count:
            self.record.go_on()
        for number, (relative, text, stream) in enumerate(known):
            if self.on_action is not None:
                self.on_action(number)
            action = shifted(relative, before) if before else relative
            if action.wait and action.kind not in OWN_JOINS:  # another device takes part
                while not self.transfers.ready(action):
                    yield
            self._timed(action, text, stream)
        if self.on_action is not None:
            self.on_action(len(known))
        self._inputs = self._targets = ()
        self.record.next_step()
        for stage in self.stages.values():
            stage.end_step(counted=training and count > 0)
        if program.endless:
            self._before += count
            oldest = self._before - len(self.plan.stages)  # no more are ever in flight
            self._specializations = {m: one for m, one in self._specializations.items() if m >= oldest}

    def _instructions(self, program: UncheckedProgram) -> Instructions:
        """The actions of this device in `program`, with text and stream; made once for each program."""
        if id(program) not in self._instructions_of:
            self._instructions_of[id(program)] = program, instructions(program.actions[self.number])
        return self._instructions_of[id(program)][1]

    def trace(self, budget_bytes: int) -> DeviceTrace:
        """The trace of this device so far."""
        return self.record.trace(self.number, budget_bytes, self.meter.allocator if self.meter is not None else None)

    def abandon(self) -> None:
        """Drop everything in flight after a failure, so that no buffer stays allocated."""
        for flight in self._flights.values():
            flight.abandon()
        self._flights.clear()
        self._before, self._specializations = 0, {}
        self._inputs = self._targets = ()
        self.record.forget()
        self.mover.abandon()  # first: what is being copied must not be freed
        for stage in self.stages.values():
            stage.abandon()
        self.transfers.abandon()
        if self.meter is not None:
            self.meter.forget_graphs()

    # ---------------------------------------------------------------- one action

    def _timed(self, action: Action, text: str, stream: Stream) -> None:
        meter, began, mark, sample, event = self.meter, self.clock(), self.record.mark(), None, None
        try:
            if meter is None:
                self._execute(action)
            else:
                meter.begin(text)
                with meter:
                    self._execute(action)
                left = LEFT.get(action.kind, Category.BOUNDARY)
                sample = meter.end(self.record.steps, began, left)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            self.record.ran_out = moment(error, meter, self.record.steps, began)
            raise OutOfMemory(f"{named(error, self.number, text)} ({text}, {self._where()})") from error
        if action.kind is not Kind.LOAD:
            steps, ended = self.record.steps, self.clock()
            event = Event(step=steps, action=text, stream=stream, start_seconds=began, end_seconds=ended)
        self.record.add(sample, event, mark)

    def _execute(self, action: Action) -> None:
        """Execute an action by the method for its kind.

        Raises:
            UsageError: the runtime cannot execute this action yet.
        """
        self.stages[action.stage].check_here(action, self._flights.get((action.stage, action.microbatch)))
        handler = (_JOINS if action.wait else _STARTS).get(action.kind)
        if handler is None or (action.part is not None and action.kind not in OF_ROWS):
            raise UsageError(
                f"the runtime cannot execute {action} yet, and the simulator neither: lower the plan again"
            )
        handler(self, action)

    # ---------------------------------------------------------------- data and messages

    def _load(self, action: Action) -> None:
        stage, flight = self.stages[action.stage], self._flight(action)
        if action.stage == 0:
            flight.values = on_device(flight.rows(action, self._inputs), stage.storages.inputs, stage.device)
        if stage.last:
            flight.targets = on_device(flight.rows(action, self._targets), stage.storages.targets, stage.device)

    def _send(self, action: Action) -> None:
        self._exchange.send(action, self._boundary(action))

    def _receive(self, action: Action) -> None:
        self._exchange.receive(action, self._boundary(action), self.stages[action.stage].device)

    def _boundary(self, action: Action) -> Boundary:
        """The values at the end of the stage that a message crosses."""
        stage, known = self.stages[action.stage], self._specializations[action.microbatch or 0]
        number = stage.stop if action.neighbour > action.stage else stage.start
        return Boundary(known.boundaries[action.stage][number], known.samples[action.stage])

    def _received(self, action: Action) -> None:
        """Keep received tensors for the stage; gradients have an entry for every output, None where it has none."""
        tensors, flight = self.transfers.join(action), self._flight(action)
        if tensors is None:
            return
        if action.kind is Kind.RECV_FORWARD:
            flight.values = tensors
        else:
            flight.gradients = received(tensors, flight.boundaries[self.stages[action.stage].stop], self.plan.profile)

    def _sent(self, action: Action) -> None:
        # Tensors that a layer has saved stay, as activations; the others are freed here.
        self._tag(self.transfers.join(action) or [], Category.ACTIVATIONS)

    # ---------------------------------------------------------------- moving saved tensors and state

    def _copy(self, action: Action) -> None:
        if action.moves_state:
            self.stages[action.stage].move(action)
            return
        flight = self._flight(action)
        smaller = flight.boundaries[0] != self.usual.boundaries[action.stage][0]
        readers = (*flight.values, *flight.targets, *self.transfers.tensors)
        self.mover.carry_out(action, flight.luggage, readers=readers, smaller=smaller)

    # ---------------------------------------------------------------- computing

    def _forward(self, action: Action) -> None:
        stage, flight = self.stages[action.stage], self._flight(action)
        first, end = stage.layers_of(action)
        if first == stage.start:
            self._tag([*flight.values, *flight.targets], Category.ACTIVATIONS)
        if self._training:
            stage.passes.take_weights(flight, first)
            self.mover.check_weights(action, flight.luggage, range(first, end))
        if action.kind is Kind.FORWARD:
            outputs = stage.passes.forward(flight, first, end)
        elif self._training:
            outputs = stage.passes.checkpoint(flight, first, end)
        else:
            outputs = stage.passes.evaluate(flight)
            del self._flights[_key(action)]
        if self.meter is not None:  # the forward may have replaced buffers
            self._tag(held_buffers(flight.layers[first - stage.start : end - stage.start]), Category.PARAMETERS)
        if end == stage.stop and not stage.last:
            self._tag(outputs, Category.BOUNDARY)
            self._exchange.hand_over(Action(Kind.SEND_FORWARD, action.stage, action.microbatch), list(outputs))

    def _recompute(self, action: Action) -> None:
        stage, flight = self.stages[action.stage], self._flight(action)
        first, end = stage.layers_of(action)
        if first in flight.pieces:
            self.mover.check_present(action, flight.luggage, range(0), flight.pieces[first].inputs)
        self.mover.check_weights(action, flight.luggage, range(first, end))
        stage.passes.recompute(flight, first, end)

    def _backward(self, action: Action) -> None:
        stage, flight = self.stages[action.stage], self._flight(action)
        first, end = stage.layers_of(action)
        self.mover.check_present(action, flight.luggage, range(first, end))
        found = stage.passes.backward(flight, first, end)
        if first == stage.start:
            del self._flights[_key(action)]
        if first == stage.start and action.stage > 0:
            outgoing = to_send(found, flight.boundaries[stage.start], self.plan.profile, stage.device)
            self._tag(outgoing, Category.BOUNDARY)
            self._exchange.hand_over(Action(Kind.SEND_BACKWARD, action.stage, action.microbatch), outgoing)

    def _flight(self, action: Action) -> Flight:
        """The microbatch of an action in its stage."""
        stage, microbatch = key = _key(action)
        flight = self._flights.get(key)
        if flight is None:
            specialization, number = self._specializations[microbatch], microbatch - self._before
            flight = self._flights[key] = Flight(
                number,
                self.stages[stage].seed,
                self.stages[stage].batch_number,
                number * self._grid.data + self._grid.replica_of(self.number),
                specialization.samples[stage],
                *specialization.stages[stage][:2],
                specialization.boundaries[stage],
                self._weights[number] / self._grid.data,
                self.mover.luggage(stage, number),
            )
        return flight

    # ---------------------------------------------------------------- the end of a step

    def _collect(self, action: Action) -> None:
        self._resized(self._collectives.start(self.stages[action.stage], action))

    def _collected(self, action: Action) -> None:
        self._resized(self._collectives.join(self.stages[action.stage], action))

    def _reshard(self, action: Action) -> None:
        self._resized(self.stages[action.stage].gather(action))

    def _resized(self, storages: Resized) -> None:
        for storage in storages:
            self.mover.resized(storage)

    def _update(self, action: Action) -> None:
        stage = self.stages[action.stage]
        if action.microbatch is not None:
            self._versions(action)
        stage.step(action)
        if self.meter is not None:  # it takes a while to find
            self._tag(stage.optimizer_state(), Category.OPTIMIZER)

    def _stash(self, action: Action) -> None:
        weights, stage = self._versions(action), self.stages[action.stage]
        kept = weights.stash(stage.layers_of(action))
        self._tag(kept, Category.VERSIONS)
        self._tag([*weights.parameters, *stage.copies.tensors], Category.PARAMETERS)

    def _stashed(self, action: Action) -> None:
        self._versions(action).adopt()

    def _versions(self, action: Action) -> Weights:
        """The versions of weights of an action's stage."""
        return required(self.stages[action.stage].weights, action, self.plan.training.schedule)

    # ---------------------------------------------------------------- meter and messages

    def _tag(self, tensors: Sequence[Tensor], category: Category) -> None:
        if self.meter is not None:
            self.meter.tag(tensors, category)

    def _where(self) -> str:
        named = self.plan.profile.named
        return "; ".join(f"stage {number}, {named(stage.start, stage.stop)}" for number, stage in self.stages.items())


_Handler = Callable[[DeviceRunner, Action], None]
_STARTS: Mapping[Kind, _Handler] = (
    {
        Kind.LOAD: DeviceRunner._load,
        Kind.FORWARD: DeviceRunner._forward,
        Kind.FORWARD_ONLY: DeviceRunner._forward,
        Kind.RECOMPUTE: DeviceRunner._recompute,
        Kind.BACKWARD: DeviceRunner._backward,
        Kind.RESHARD: DeviceRunner._reshard,
        Kind.STEP: DeviceRunner._update,
        Kind.STASH: DeviceRunner._stash,
    }
    | dict.fromkeys(COPIES, DeviceRunner._copy)
    | dict.fromkeys(SENDS, DeviceRunner._send)
    | dict.fromkeys(EXECUTED, DeviceRunner._collect)
    | dict.fromkeys(RECEIVES, DeviceRunner._receive)
)
_JOINS: Mapping[Kind, _Handler] = (
    {
        Kind.STEP: DeviceRunner._update,
        Kind.STASH: DeviceRunner._stashed,
    }
    | dict.fromkeys(COPIES, DeviceRunner._copy)
    | dict.fromkeys(SENDS, DeviceRunner._sent)
    | dict.fromkeys(EXECUTED, DeviceRunner._collected)
    | dict.fromkeys(RECEIVES, DeviceRunner._received)
)


def _key(action: Action) -> tuple[int, int]:
    """Stage and microbatch of an action that has both."""
    assert action.microbatch is not None
    return action.stage, action.microbatch
