"""Executes the program of one device: in the dry run, in a single process, and in the workers of a cluster.

These differ in the tensors, which are fake or real, in the transport, and in the meter. `step` is a generator
that yields whenever the device would have to wait for another, so that one process can run all devices in
turn.

A program counts microbatches from the first one of its step. Flights and messages that outlive a step of an
asynchronous schedule are numbered continuously here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from pipefit.errors import OutOfMemory, UsageError
from pipefit.measure import Mark, MemoryMeter, Stopwatch
from pipefit.runtime.comm.collectives import EXECUTED, DeviceCollectives, Resized, received, to_send
from pipefit.runtime.comm.transfers import MessagePart, Transfers
from pipefit.runtime.engine.in_flight import Flight, held_buffers, on_device
from pipefit.runtime.engine.replicas import Specialization
from pipefit.runtime.engine.stage import Site, StageRunner
from pipefit.runtime.hardware import Moment, moment, named, ran_out
from pipefit.runtime.offload.moving import Mover
from pipefit.runtime.optim.weight_versions import Weights, required
from pipefit.schema.actions import (
    COMPUTE,
    COPIES,
    OF_ROWS,
    RECEIVES,
    SENDS,
    UPDATES,
    Action,
    Kind,
    Message,
    message_of,
)
from pipefit.schema.grids import Rows
from pipefit.schema.layer_costs import Value
from pipefit.schema.plan import Plan
from pipefit.schema.program import UncheckedProgram, shifted
from pipefit.schema.trace import AllocatorPeaks, Category, DeviceTrace, Event, MemorySample, Stream

# ---- Instructions: actions with text and stream

Instructions = tuple[tuple[Action, str, Stream], ...]

OWN_JOINS = COPIES | UPDATES  # waits that involve no other device
LEFT = {  # category of memory that an action of a kind leaves; default: boundary buffers
    Kind.FORWARD: Category.ACTIVATIONS,
    Kind.RECOMPUTE: Category.ACTIVATIONS,
    Kind.BACKWARD: Category.GRADIENTS,
    Kind.STEP: Category.OPTIMIZER,
    Kind.STASH: Category.PARAMETERS,
}


def instructions(actions: Sequence[Action]) -> Instructions:
    """Return actions with their texts and streams."""
    return tuple((action, str(action), _stream(action)) for action in actions)


def _stream(action: Action) -> Stream:
    if action.kind in COPIES or (action.kind is Kind.STEP and action.place is not None):
        return Stream.COPY
    own = action.kind in COMPUTE or action.kind in (Kind.LOAD, Kind.STASH, Kind.RESHARD)
    return Stream.COMPUTE if own else Stream.COMMUNICATION


# ---- Messages between neighboring stages
# A message carries all that a stage sends or, between stages with replicas, the rows that both ends have. All
# parts of a value are sent from one tensor and received into one without copies, because rows are contiguous
# in memory. If the other end has several tensor shards, each gets the same rows. Values without samples come
# whole in one of the messages; gradients of those that were not sent are zero.

_FORWARD = frozenset({Kind.SEND_FORWARD, Kind.RECV_FORWARD})


class Boundary(NamedTuple):
    """The values at one end of a stage, in a local batch of `samples` samples."""

    values: Sequence[Value]
    samples: int


class DeviceMessages:
    """The messages of one device of `plan`."""

    def __init__(self, plan: Plan, device: int, transfers: Transfers) -> None:
        self._plan, self._device, self._transfers = plan, device, transfers
        self._division = cache(plan.division)

    def hand_over(self, action: Action, tensors: list[Tensor]) -> None:
        """Keep tensors that `action` will send, unless another shard of the replica sends them."""
        if self._times(action):
            self._transfers.hand_over(action, tensors)

    def send(self, action: Action, boundary: Boundary) -> None:
        """Begin to send the tensors handed over for `action`, or the rows of its part."""
        message = message_of(self._device, action, self._plan.placement)
        values = [value for value in boundary.values if action.kind in _FORWARD or value.has_gradient]
        self._transfers.send(action, message, values, self._part(action, message, boundary))

    def receive(self, action: Action, boundary: Boundary, device: torch.device) -> None:
        """Begin to receive; the first of several messages allocates memory on `device` for all of them."""
        message = message_of(self._device, action, self._plan.placement)
        self._transfers.receive(
            action,
            message,
            lambda: self._buffers(action, message, boundary, device),
            self._part(action, message, boundary),
        )

    def _buffers(
        self, action: Action, message: Message, boundary: Boundary, device: torch.device
    ) -> list[Tensor]:
        """Allocate receive buffers; gradients that may come in no message are zero."""
        forward, division = action.kind in _FORWARD, self._division(_behind(message))
        surely = forward or division.front == division.behind
        return [
            (torch.empty if surely or dimension is not None else torch.zeros)(
                value.shape, dtype=getattr(torch, value.dtype), device=device
            )
            for value, dimension in zip(boundary.values, division.dimensions, strict=True)
            if forward or value.has_gradient
        ]

    def _part(self, action: Action, message: Message, boundary: Boundary) -> MessagePart | None:
        """Return the part of the boundary's tensors that the message carries; None for all of them."""
        if action.part is None:
            return None
        behind = _behind(message)
        ends = (message.source, message.target) if message.forward else (message.target, message.source)
        front, back = (self._replica(behind - 1, ends[0]), self._replica(behind, ends[1]))
        carried = self._division(behind).carried(front, back)
        if action.kind not in _FORWARD:
            carried = _among([value.has_gradient for value in boundary.values], carried)
        first = self._replica(action.stage, self._device) * boundary.samples
        rows: Rows = (action.part[0] - first, action.part[1] - first)
        return MessagePart(tuple(carried), rows, boundary.samples * self._times(action))

    def _times(self, action: Action) -> int:
        """Return how often this device sends every row of its replica; it receives each once."""
        own, there = (self._plan.stages[stage].grid for stage in (action.stage, action.neighbour))
        return len(range(own.shard_of(self._device), there.tensor, own.tensor)) if action.kind in SENDS else 1

    def _replica(self, stage: int, device: int) -> int:
        return self._plan.stages[stage].grid.replica_of(device)


def _behind(message: Message) -> int:
    """Return the stage after the boundary that a message crosses."""
    return message.receiver if message.forward else message.receiver + 1


def _among(wanted: Sequence[bool], carried: Sequence[tuple[int, int | None]]) -> list[tuple[int, int | None]]:
    """Return the wanted ones of `carried`, numbered among the wanted ones."""
    return [(sum(wanted[:number]), dimension) for number, dimension in carried if wanted[number]]


# ---- Events and memory of a device's first and latest steps
# Times are the host's, or a GPU's if it has a stopwatch. GPU times are read when the next step begins: the
# step's result has then arrived, so reading does not wait. Under an asynchronous schedule the GPU may not be
# done yet, and they are read later.

_REMEMBERED = 100  # number of latest steps in a trace, in addition to the first two


class _Marked(NamedTuple):
    """An event and a sample, by their numbers, whose GPU times have not been read."""

    event: int | None
    sample: int | None
    began: Mark
    ended: Mark


@dataclass(slots=True)
class RunRecord:
    """Events and memory samples of the first two steps and the latest ones, and the number of steps."""

    stopwatch: Stopwatch | None = None
    steps: int = 0
    events: list[Event] = field(default_factory=list)
    samples: list[MemorySample] = field(default_factory=list)
    ran_out: Moment | None = None  # when the last failed action ran out of memory
    _marked: list[_Marked] = field(default_factory=list)

    @property
    def step_peak_bytes(self) -> int:
        """Peak bytes of the last step; 0 without a meter."""
        last = self.steps - 1
        of_last = takewhile(lambda sample: sample.step == last, reversed(self.samples))
        return max((sample.total_bytes for sample in of_last), default=0)

    def mark(self) -> Mark | None:
        """Mark this moment on the GPU; None without a stopwatch."""
        return None if self.stopwatch is None else self.stopwatch.mark()

    def add(self, sample: MemorySample | None, event: Event | None, began: Mark | None) -> None:
        """Add the sample and event of an action, with host times.

        On the GPU it began at `began` and ends now.
        """
        self.samples += [sample] if sample is not None else []
        self.events += [event] if event is not None else []
        if began is not None and (ended := self.mark()) is not None:
            own = None if event is None else len(self.events) - 1
            self._marked.append(_Marked(own, None if sample is None else len(self.samples) - 1, began, ended))

    def read(self, *, wait: bool) -> None:
        """Read the GPU times of all marks, if the GPU has passed the last one or if `wait`."""
        if self.stopwatch is None or not self._marked:
            return
        if not wait and not self.stopwatch.has_come_to(self._marked[-1].ended):
            return
        times = self.stopwatch.read([mark for one in self._marked for mark in (one.began, one.ended)])
        for marked, began, ended in zip(self._marked, times[::2], times[1::2], strict=True):
            if marked.event is not None:
                self.events[marked.event] = replace(
                    self.events[marked.event], start_seconds=began, end_seconds=ended
                )
            if marked.sample is not None:
                self.samples[marked.sample] = replace(self.samples[marked.sample], seconds=began)
        self._marked.clear()

    def forget(self) -> None:
        """Drop the marks of a failed step, whose times stay the host's."""
        self._marked.clear()

    def next_step(self) -> None:
        """Begin the next step.

        Every 100 steps, drop steps that are neither among the first two nor the latest.
        """
        self.steps += 1
        if self.steps > 2 * _REMEMBERED and self.steps % _REMEMBERED == 0:
            self.read(wait=True)  # before events and samples are renumbered
            kept = self.steps - _REMEMBERED
            self.events = [event for event in self.events if event.step < 2 or event.step >= kept]
            self.samples = [sample for sample in self.samples if sample.step < 2 or sample.step >= kept]

    def go_on(self) -> None:
        """Count the following actions to the previous step, until `next_step`.

        They complete the microbatches that this step left in flight.
        """
        self.steps = max(0, self.steps - 1)

    def trace(self, device: int, budget_bytes: int, allocator: AllocatorPeaks | None = None) -> DeviceTrace:
        """Return the trace of this device, with the peaks of its `allocator` if it has one."""
        self.read(wait=True)
        return DeviceTrace(
            device=device,
            budget_bytes=budget_bytes,
            events=tuple(self.events),
            memory=tuple(self.samples),
            allocator=allocator,
        )


# ---- The runner

Microbatch = list[Tensor]


class DeviceRunner:
    """Device `number` of a plan, with its stages: executes its actions step by step, and records them.

    Args:
        site: the plan, its program, and objects shared with the other devices.
        stages: the plan's stages on this device, by their numbers; of a stage with replicas, one of them.
        mover: offloads and reloads saved tensors.
        meter: counts the device's memory; None for no counting.
        stopwatch: clock of the GPU that computes; None if the host's clock suffices.
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
        self._exchange = DeviceMessages(plan, number, self.transfers)
        self._collectives = DeviceCollectives(plan, number, self.transfers)
        self.meter, self.clock, self.on_action = meter, site.clock, site.on_action
        self.usual = Specialization.usual(plan, {n: stage.usual for n, stage in stages.items()})
        self.record = RunRecord(stopwatch)
        self._before = 0  # microbatches of previous steps, under an asynchronous schedule
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
        """Execute one step.

        The first stage reads `inputs` and the last one `targets`, with one entry per microbatch. Without
        microbatches it completes those in flight, as part of the previous step.

        Args:
            program: program to execute instead of the plan's, such as an evaluation.
            weights: factor of every microbatch's loss; default: equal factors.
            specializations: by device, for every microbatch, if some have other sizes, or for evaluation.
            training: False only evaluates.

        Raises:
            OutOfMemory: the device passed its cap; says at which action, and which tensors held the bytes.
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
            oldest = self._before - len(self.plan.stages)  # at most that number are in flight
            self._specializations = {
                m: specialization for m, specialization in self._specializations.items() if m >= oldest
            }

    def _instructions(self, program: UncheckedProgram) -> Instructions:
        """Return the actions of this device in `program`, with text and stream; cached for each program."""
        if id(program) not in self._instructions_of:
            self._instructions_of[id(program)] = program, instructions(program.actions[self.number])
        return self._instructions_of[id(program)][1]

    def trace(self, budget_bytes: int) -> DeviceTrace:
        """Return the trace of this device so far."""
        return self.record.trace(
            self.number, budget_bytes, self.meter.allocator if self.meter is not None else None
        )

    def abandon(self) -> None:
        """Drop everything in flight after a failure, so that no buffer stays allocated."""
        for flight in self._flights.values():
            flight.abandon()
        self._flights.clear()
        self._before, self._specializations = 0, {}
        self._inputs = self._targets = ()
        self.record.forget()
        self.mover.abandon()  # first: memory of running copies must not be freed
        for stage in self.stages.values():
            stage.abandon()
        self.transfers.abandon()

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
            UsageError: the runtime cannot execute this action.
        """
        self.stages[action.stage].check_here(action, self._flights.get((action.stage, action.microbatch)))
        handler = (_JOINS if action.wait else _STARTS).get(action.kind)
        if handler is None or (action.part is not None and action.kind not in OF_ROWS):
            raise UsageError(
                f"neither the runtime nor the simulator supports {action} yet: lower the plan again"
            )
        handler(self, action)

    # ---------------------------------------------------------------- data and messages

    def _load(self, action: Action) -> None:
        stage, flight = self.stages[action.stage], self._flight(action)
        if action.stage == 0:
            flight.values = on_device(flight.rows(action, self._inputs), stage.storages.inputs, stage.device)
        if stage.last:
            flight.targets = on_device(
                flight.rows(action, self._targets), stage.storages.targets, stage.device
            )

    def _send(self, action: Action) -> None:
        self._exchange.send(action, self._boundary(action))

    def _receive(self, action: Action) -> None:
        self._exchange.receive(action, self._boundary(action), self.stages[action.stage].device)

    def _boundary(self, action: Action) -> Boundary:
        """Return the values at the end of the stage that a message crosses."""
        stage, known = self.stages[action.stage], self._specializations[action.microbatch or 0]
        number = stage.stop if action.neighbour > action.stage else stage.start
        return Boundary(known.boundaries[action.stage][number], known.samples[action.stage])

    def _received(self, action: Action) -> None:
        """Keep received tensors for the stage.

        Gradients have an entry for every output, None without a gradient.
        """
        tensors, flight = self.transfers.join(action), self._flight(action)
        if tensors is None:
            return
        if action.kind is Kind.RECV_FORWARD:
            flight.values = tensors
        else:
            flight.gradients = received(
                tensors, flight.boundaries[self.stages[action.stage].stop], self.plan.profile
            )

    def _sent(self, action: Action) -> None:
        # Tensors that a layer has saved stay, as activations; the others are freed here.
        self._tag(self.transfers.join(action) or [], Category.ACTIVATIONS)

    # ---------------------------------------------------------------- offloading saved tensors and state

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
            self._tag(
                held_buffers(flight.layers[first - stage.start : end - stage.start]), Category.PARAMETERS
            )
        if end == stage.stop and not stage.last:
            self._tag(outputs, Category.BOUNDARY)
            self._exchange.hand_over(
                Action(Kind.SEND_FORWARD, action.stage, action.microbatch), list(outputs)
            )

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
        result = stage.passes.backward(flight, first, end)
        if first == stage.start:
            del self._flights[_key(action)]
        if first == stage.start and action.stage > 0:
            outgoing = to_send(result, flight.boundaries[stage.start], self.plan.profile, stage.device)
            self._tag(outgoing, Category.BOUNDARY)
            self._exchange.hand_over(Action(Kind.SEND_BACKWARD, action.stage, action.microbatch), outgoing)

    def _flight(self, action: Action) -> Flight:
        """Return the microbatch of an action in its stage; create it at its first action."""
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
        if self.meter is not None:  # listing the state takes time
            self._tag(stage.optimizer_state(), Category.OPTIMIZER)

    def _stash(self, action: Action) -> None:
        weights, stage = self._versions(action), self.stages[action.stage]
        kept = weights.stash(stage.layers_of(action))
        self._tag(kept, Category.VERSIONS)
        self._tag([*weights.parameters, *stage.copies.tensors], Category.PARAMETERS)

    def _stashed(self, action: Action) -> None:
        self._versions(action).adopt()

    def _versions(self, action: Action) -> Weights:
        """Return the weight versions of an action's stage."""
        return required(self.stages[action.stage].weights, action, self.plan.training.schedule)

    # ---------------------------------------------------------------- meter and messages

    def _tag(self, tensors: Sequence[Tensor], category: Category) -> None:
        if self.meter is not None:
            self.meter.tag(tensors, category)

    def _where(self) -> str:
        named = self.plan.profile.named
        return "; ".join(
            f"stage {number}, {named(stage.start, stage.stop)}" for number, stage in self.stages.items()
        )


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
    """Return stage and microbatch of an action that has both."""
    assert action.microbatch is not None
    return action.stage, action.microbatch
