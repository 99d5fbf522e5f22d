"""One device reading its program: the part of the runtime that every way of running shares.

The dry run, the single process and the worker of a cluster all make `DeviceReader`s; they differ in the tensors (fake
or real), the transport and the meter. `step` is a generator that yields whenever the device would have to wait for
another, so that one process can run all devices in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pipefit.errors import OutOfMemory, UsageError
from pipefit.meter import MemoryMeter
from pipefit.plans import Plan
from pipefit.profiles import Value
from pipefit.program import COMPUTE, Action, Kind, Program
from pipefit.runtime.stage import StageRunner
from pipefit.runtime.transport import Transport
from pipefit.runtime.variants import Variant, boundaries
from pipefit.trace import Category, DeviceTrace, Event, MemorySample, Stream

Microbatch = list[Tensor]
Script = tuple[tuple[Action, str, Stream], ...]
_REMEMBERED = 100  # steps whose events and memory a trace holds, besides the first two
_SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
_RECEIVES = (Kind.RECV_FORWARD, Kind.RECV_BACKWARD)
_LEFT = {
    Kind.FORWARD: Category.ACTIVATIONS,
    Kind.RECOMPUTE: Category.ACTIVATIONS,
    Kind.BACKWARD: Category.GRADIENTS,
    Kind.STEP: Category.OPTIMIZER,
}


class DeviceReader:
    """Device `number` of a plan: executes its actions, step after step, and records what happened."""

    def __init__(
        self,
        plan: Plan,
        program: Program,
        stage: int,
        runner: StageRunner,
        *,
        transport: Transport,
        meter: MemoryMeter | None,
        clock: Callable[[], float],
        on_action: Callable[[int], None] | None = None,
    ) -> None:
        self.on_action = on_action
        self.plan, self.stage, self.runner, self.transport, self.meter, self.clock = (
            plan,
            stage,
            runner,
            transport,
            meter,
            clock,
        )
        self.placement, self.number = program.placement, program.placement[stage]
        self.program = program
        self.usual = Variant(boundaries(plan.measurement), {stage: runner.layers})
        self._variants: Sequence[Variant] = ()
        self.events: list[Event] = []
        self.samples: list[MemorySample] = []
        self.steps = 0
        self._scripts: dict[int, tuple[Program, Script]] = {}
        self._started: dict[Action, tuple[list[Tensor], Any]] = {}
        self._arrived: dict[tuple[Kind, int | None], list[Tensor]] = {}
        self._again: set[int | None] = set()  # microbatches whose forward will run twice
        self._kept: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self._loaded: dict[int | None, tuple[list[Tensor], list[Tensor]]] = {}
        try:
            self._tag([*runner.parameters, *runner.buffers], Category.PARAMETERS)
            self._tag(runner.constants, Category.BOUNDARY)
            self._tag(runner.optimizer_state(), Category.OPTIMIZER)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"{error} ({self._where()})") from error

    def step(
        self,
        inputs: Sequence[Microbatch],
        targets: Sequence[Microbatch],
        *,
        program: Program | None = None,
        weights: Sequence[float] | None = None,
        variants: Sequence[Variant] | None = None,
    ) -> Iterator[None]:
        """Execute one step. `inputs` are read on the first stage and `targets` on the last, one entry a microbatch.

        Args:
            program: another than the plan's, such as one that only evaluates.
            weights: of every microbatch's loss; equal parts unless given.
            variants: for every microbatch, where some are not like the plan's.

        Raises:
            OutOfMemory: the device passed its cap; says where, at which action, what held the bytes.
        """
        script = self._script(self.program if program is None else program)
        self._again = {action.microbatch for action, _, _ in script if action.kind is Kind.RECOMPUTE}
        self._variants = variants or (self.usual,) * len(inputs)
        self.runner.weights = list(weights) if weights is not None else [1.0 / len(inputs)] * len(inputs)
        for number, (action, text, stream) in enumerate(script):
            if self.on_action is not None:
                self.on_action(number)
            if action.wait:
                while not self.transport.ready(self._started[action.start][1]):
                    yield
            self._timed(action, text, stream, inputs, targets)
        self.steps += 1
        self._forget()
        self.runner.batch_number += script[-1][0].kind is not Kind.FORWARD_ONLY

    def _script(self, program: Program) -> Script:
        """What this device does in `program`; read once."""
        known = self._scripts.get(id(program))
        if known is None or known[0] is not program:
            known = self._scripts[id(program)] = program, _script(program, self.number)
        return known[1]

    @property
    def step_peak_bytes(self) -> int:
        """The most bytes in the last step; 0 without a meter."""
        last = self.steps - 1
        return max((s.total_bytes for s in reversed(self.samples) if s.step == last), default=0)

    def _forget(self) -> None:
        """Keep the first steps and the latest, not all of a long training."""
        if self.steps > 2 * _REMEMBERED and self.steps % _REMEMBERED == 0:
            kept = self.steps - _REMEMBERED
            self.events = [event for event in self.events if event.step < 2 or event.step >= kept]
            self.samples = [sample for sample in self.samples if sample.step < 2 or sample.step >= kept]

    def trace(self, budget_bytes: int) -> DeviceTrace:
        """What happened so far."""
        return DeviceTrace(
            device=self.number, budget_bytes=budget_bytes, events=tuple(self.events), memory=tuple(self.samples)
        )

    def abandon(self) -> None:
        """Forget everything in flight: after a failure no buffer stays behind."""
        self.runner.abandon()
        self.transport.abandon()
        if self.meter is not None:
            self.meter.forget_graphs()
        self._started.clear()
        self._arrived.clear()
        self._loaded.clear()
        self._kept.clear()

    # ---------------------------------------------------------------- one action

    def _timed(
        self, action: Action, text: str, stream: Stream, inputs: Sequence[Microbatch], targets: Sequence[Microbatch]
    ) -> None:
        meter, began = self.meter, self.clock()
        try:
            if meter is None:
                self._execute(action, inputs, targets)
            else:
                meter.begin(text)
                with meter:
                    self._execute(action, inputs, targets)
                self.samples.append(meter.end(self.steps, began, _LEFT.get(action.kind, Category.BOUNDARY)))
        except torch.OutOfMemoryError as error:
            self.abandon()
            raise OutOfMemory(f"{error} ({self._where()})") from error
        if action.kind is not Kind.LOAD:
            self.events.append(
                Event(step=self.steps, action=text, stream=stream, start_seconds=began, end_seconds=self.clock())
            )

    def _execute(self, action: Action, inputs: Sequence[Microbatch], targets: Sequence[Microbatch]) -> None:
        if action.wait:
            self._finish(action)
        elif action.kind in _SENDS:
            tensors = self._started[action][0]
            self._started[action] = tensors, self.transport.start(action, tensors, self._peer(action))
        elif action.kind in _RECEIVES:
            self._receive(action)
        elif action.kind is Kind.REDUCE:
            self._reduce(action)
        elif action.kind is Kind.AGREE:
            self._agree(action)
        else:
            self._compute(action, inputs, targets)

    def _finish(self, action: Action) -> None:
        """Join what was started: received tensors have arrived, sent ones may go."""
        tensors = self._join(action)
        if action.kind in _RECEIVES:
            self._arrived[action.kind, action.microbatch] = tensors
        elif action.kind in _SENDS:
            self._tag(tensors, Category.ACTIVATIONS)
        elif action.kind is Kind.AGREE:
            assert self.runner.agreement is not None
            self.runner.agreement.conclude(tensors[0])

    def _compute(self, action: Action, inputs: Sequence[Microbatch], targets: Sequence[Microbatch]) -> None:
        match action.kind:
            case Kind.LOAD:
                self._load(action.microbatch, inputs, targets)
            case Kind.FORWARD | Kind.FORWARD_ONLY if action.layers is None:
                self._forward(action)
            case Kind.RECOMPUTE if action.layers is None:
                self._recompute(action)
            case Kind.BACKWARD if action.layers is None:
                self._backward(action)
            case Kind.STEP if action.microbatch is None:
                self.runner.step()
                self._tag(self.runner.optimizer_state(), Category.OPTIMIZER)
            case _:
                raise UsageError(f"the runtime cannot execute {action} yet")

    def _load(self, microbatch: int | None, inputs: Sequence[Microbatch], targets: Sequence[Microbatch]) -> None:
        assert microbatch is not None
        last = self.stage == len(self.placement) - 1
        data = self._cast(inputs[microbatch], self.runner.inputs) if self.stage == 0 else []
        wanted = self._cast(targets[microbatch], self.runner.targets) if last else []
        self._loaded[microbatch] = data, wanted

    def _cast(self, tensors: Microbatch, values: Sequence[Value]) -> Microbatch:
        """Copies of host tensors on the device, in the dtypes the plan's profile saw."""
        kinds = [getattr(torch, value.dtype) for value in values]
        device = self.runner.device
        return [
            tensor.to(device, kind, non_blocking=True, copy=True) for tensor, kind in zip(tensors, kinds, strict=True)
        ]

    def _forward(self, action: Action) -> None:
        microbatch = action.microbatch
        assert microbatch is not None
        data, targets = self._loaded.pop(microbatch, ([], []))
        inputs = data or self._arrived.pop((Kind.RECV_FORWARD, microbatch), [])
        self._tag(inputs, Category.ACTIVATIONS)
        self._tag(targets, Category.ACTIVATIONS)
        layers = self._variants[microbatch].layers[self.stage]
        if action.kind is Kind.FORWARD:
            outputs = self.runner.forward(microbatch, inputs, targets, layers)
        elif microbatch in self._again:
            self._kept[microbatch] = inputs, targets
            outputs = self.runner.checkpoint(microbatch, inputs, targets, layers)
        else:
            outputs = self.runner.evaluate(microbatch, inputs, targets, layers)
        self._tag(outputs, Category.BOUNDARY)
        if self.stage < len(self.placement) - 1:
            self._started[Action(Kind.SEND_FORWARD, self.stage, microbatch)] = list(outputs), None

    def _recompute(self, action: Action) -> None:
        microbatch = action.microbatch
        assert microbatch is not None
        if microbatch not in self._kept:
            raise UsageError(f"{action} has nothing to run again: a forward that keeps its inputs must come before it")
        inputs, targets = self._kept.pop(microbatch)
        self.runner.recompute(microbatch, inputs, targets, self._variants[microbatch].layers[self.stage])

    def _backward(self, action: Action) -> None:
        microbatch = action.microbatch
        assert microbatch is not None
        gradients = self._arrived.pop((Kind.RECV_BACKWARD, microbatch), [])
        outgoing = self.runner.backward(microbatch, gradients, self._values(action)[0])
        if self.stage > 0:
            self._tag(outgoing, Category.BOUNDARY)
            self._started[Action(Kind.SEND_BACKWARD, self.stage, microbatch)] = outgoing, None

    def _receive(self, action: Action) -> None:
        forward = action.kind is Kind.RECV_FORWARD
        entering, leaving = self._values(action)
        values = entering if forward else [v for v in leaving if v.requires_grad]
        device = self.runner.device
        buffers = [torch.empty(v.shape, dtype=getattr(torch, v.dtype), device=device) for v in values]
        self._started[action] = buffers, self.transport.start(action, buffers, self._peer(action))

    def _values(self, action: Action) -> tuple[Sequence[Value], Sequence[Value]]:
        """What enters and what leaves the stage with this microbatch."""
        values, place = self._variants[action.microbatch or 0].boundaries, self.plan.stages[self.stage]
        return values[place.start], values[place.stop]

    def _agree(self, action: Action) -> None:
        assert self.runner.agreement is not None
        vector = self.runner.agreement.contribution(self.runner.device)
        everyone = tuple(range(len(self.placement)))
        self._started[action] = [vector], self.transport.collect(action, vector, everyone)

    def _reduce(self, action: Action) -> None:
        assert action.subject is not None
        parameter = self.runner.shared[action.subject.layer]
        if parameter.grad is None:  # this stage's layers did not use it
            parameter.grad = torch.zeros_like(parameter)
        members = self.plan.holders[action.subject.layer]
        self._started[action] = [parameter.grad], self.transport.collect(action, parameter.grad, members)

    def _join(self, action: Action) -> list[Tensor]:
        tensors, handle = self._started.pop(action.start)
        self.transport.join(action, handle)
        return tensors

    def _peer(self, action: Action) -> int:
        ahead = action.kind in (Kind.SEND_FORWARD, Kind.RECV_BACKWARD)
        return self.placement[self.stage + (1 if ahead else -1)]

    def _tag(self, tensors: Sequence[Tensor], category: Category) -> None:
        if self.meter is not None:
            self.meter.tag(tensors, category)

    def _where(self) -> str:
        stage, names = self.plan.stages[self.stage], self.plan.profile.layers
        return f"stage {self.stage}, layers {names[stage.start]} to {names[stage.stop - 1]}"


def _script(program: Program, device: int) -> Script:
    """A device's actions, with their text and stream."""
    return tuple((action, str(action), _stream(action)) for action in program.actions[device])


def _stream(action: Action) -> Stream:
    return Stream.COMPUTE if action.kind in COMPUTE or action.kind is Kind.LOAD else Stream.COMMUNICATION


def run_in_turn(
    readers: Sequence[DeviceReader], inputs: Sequence[Microbatch], targets: Sequence[Microbatch], **variant: Any
) -> None:
    """One step of every reader inside this process: each runs until it would wait for another; `variant` as in `step`.

    Raises:
        UsageError: the program cannot go on: every device waits.
    """
    running = {reader.number: reader.step(inputs, targets, **variant) for reader in readers}
    try:
        while running:
            before = [len(reader.events) for reader in readers]
            for number, step in list(running.items()):
                if next(step, StopIteration) is StopIteration:
                    del running[number]
            if running and before == [len(reader.events) for reader in readers]:
                raise UsageError(f"the program is stuck: devices {sorted(running)} wait for each other")
    except BaseException:
        for reader in readers:
            reader.abandon()
        raise
