"""Simulation of a plan's program: peaks, the seconds of every step, and the trace with both.

Each result is computed at first use, since planners need single figures thousands of times. Peaks are as
exact as the profile. Cost: one microsecond per action for the peaks, two to three with the seconds, six for a
trace. `contents` lists the memory of a full device by layers and activations.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from pipefit.errors import PipefitWarning, UsageError
from pipefit.lowering import check_slices, distinct_steps, lower, lower_for_torch, step_programs
from pipefit.memory import (
    Arena,
    Costs,
    LayerState,
    StageCost,
    StageRest,
    Working,
    lent_bytes,
    message_sizes,
    moved_bytes,
    shortage,
)
from pipefit.memory.arenas import arenas
from pipefit.schema.actions import Action
from pipefit.schema.decisions import State, What
from pipefit.schema.devices import Member
from pipefit.schema.plan import Engine, Plan
from pipefit.schema.program import Program, joined
from pipefit.schema.trace import MOST_STEPS, DeviceTrace, Event, MemorySample, Stream, Trace
from pipefit.schema.validation import instance, whole
from pipefit.simulator.clock import Clock, Times
from pipefit.simulator.ledger import (
    Change,
    Effects,
    Ledger,
    LedgerReading,
    Levels,
    Row,
    at_rest,
    highest,
    peaks,
    reading,
)
from pipefit.simulator.timed_program import COMPUTE, COPY, JOIN, NOTHING, DeviceReader, TimedProgram
from pipefit.texts import counted

_GENERATOR = 5056  # bytes of the state of torch's generator for CPUs


def simulate(
    plan: Plan, *, program: Program | None = None, steps: int | None = None, engine: Engine = "pipefit"
) -> Trace:
    """Simulate the first `steps` training steps of `plan`, by `program` or by its lowered programs.

    By default, all distinct steps are simulated (`lowering.distinct_steps`): two, because the first one
    creates optimizer state; under an asynchronous schedule, until the last is one of a full pipeline. Times
    are in seconds; the time of a memory sample is the start of its action. Memory that a device lends to
    others is allocated before the first step. With `engine="torch"`, messages and memory are those of
    `torch.distributed.pipelining`. Warns (`PipefitWarning`) about operations in the profile whose
    kernels could not be measured, since the peaks lack their memory, and about a host, disk or lender with
    too little room for moved tensors.

    Raises:
        UsageError: the program does not belong to the plan, or uses a tensor or gradient that does not exist.
    """
    instance("plan", plan, Plan, "pipefit.load reads one")
    if program is not None:
        instance("program", program, Program, "create one with pipefit.lower")
    if gap := plan.profile.kernels.gap:
        warnings.warn(gap, PipefitWarning, stacklevel=2)
    simulation = Simulation(plan, program=program, steps=steps, engine=engine)
    if short := shortage(plan, simulation.arenas):
        warnings.warn(f"this plan cannot be trained: {short}", PipefitWarning, stacklevel=2)
    return simulation.trace()


class Simulation:
    """Simulation of one program with its clock and its ledgers; each result is computed at first use.

    `costs` may be shared by all plans of the same profile, training and engine: `Costs.of(plan)`.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        program: Program | None = None,
        steps: int | None = None,
        costs: Costs | None = None,
        engine: Engine = "pipefit",
    ) -> None:
        self.plan, self._is_torch = plan, engine == "torch"
        if self._is_torch and program is None:
            program = lower_for_torch(plan)
        if program is not None and program.endless:
            raise UsageError(
                "the program is a part of an asynchronous schedule without its first steps: simulate its "
                "plan, which starts with their programs"
            )
        self._distinct = distinct_steps(plan) if program is None else 2
        self.steps = self._distinct if steps is None else steps
        self._programs = step_programs(plan) if program is None else (program,)  # the last one repeats
        self.program = self._programs[-1]
        _check(plan, self._programs[0], self.steps)
        costs = costs or Costs.of(plan, buffered=self._is_torch)
        self._stages = [
            {device: costs.of_device(plan, number, device, there) for device in there}
            for number, there in enumerate(self.program.placement)
        ]
        self._storages = [next(iter(of_devices.values())).storages for of_devices in self._stages]
        self._moved_bytes = [moved_bytes(self.program, self._rests_of(device)) for device in self._devices]

    @property
    def actions(self) -> int:
        """Number of actions in the programs of all distinct steps."""
        return sum(len(own) for program in self._programs for own in program.actions)

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """Seconds of every step: from the end of the step before to its own end, each on the last device."""
        return self._times.step_seconds

    @property
    def utilisation(self) -> tuple[float, ...]:
        """Share of the last step in which every device computes."""
        return self._times.utilisation

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most bytes allocated on every device."""
        return tuple(self._peak(device) for device in self._devices)

    def accumulated_peaks(self) -> tuple[int, ...]:
        """Return every device's most allocated bytes if gradients of several batches add up to an update.

        Raises:
            UsageError: the schedule updates in every step.
        """
        programs, result = (lower(self.plan, update=False), self.program) * 2, list[int]()
        for device in self._devices:
            ledger = Ledger(device, self._of_device(device), self.program)
            effects = [ledger.read(program.actions[device]) for program in programs]
            changes = ((step, *change) for step, changes in enumerate(effects) for change in changes)
            result.append(highest(self._at_rest(device), changes))
        return tuple(result)

    def trace(self) -> Trace:
        """Return the events and memory samples of every device."""
        return Trace(
            source="simulated",
            steps=self.steps,
            devices=tuple(self._device_trace(device) for device in self._devices),
            step_seconds=self.step_seconds,
            estimated=self.plan.measurement.estimated,
        )

    # ---- Ledger and clock

    @cached_property
    def effects(self) -> list[list[Effects]]:
        """Memory effects of every device in every distinct step; later steps repeat the last one."""
        return [reading.effects for reading in self._readings]

    @cached_property
    def arenas(self) -> tuple[Arena, ...]:
        """Memory that devices and hosts lend to devices."""
        hosts = [device.host for device in self.plan.cluster.devices]
        return arenas([self._placed(device) for device in self._devices], self._moved_bytes, hosts)

    def _placed(self, device: int) -> list[Action]:
        """Return the actions of a device that name a place, in all distinct steps."""
        placed = self._readings[device].placed  # the ledger first: it refuses moves of unknown tensors
        if not self.program.endless:
            return placed
        return [
            action
            for program in self._programs
            for action in program.actions[device]
            if action.place is not None
        ]

    @property
    def clock(self) -> Clock:
        """Start and end times of every action and transfer."""
        return self._times.clock

    @cached_property
    def _times(self) -> Times:
        counts = [
            [len(self._of_step(n).actions[device]) for n in range(self.steps)] for device in self._devices
        ]
        return Times(self._timed_program, counts, endless=self.program.endless)

    @cached_property
    def _timed_program(self) -> TimedProgram:
        assert self.effects, (
            "the ledger comes first: it refuses actions to which the timed program could give no seconds"
        )
        # The steps of an asynchronous schedule overlap, so they are one program to the clock
        whole = joined([*map(self._of_step, range(self.steps))]) if self.program.endless else self.program
        cluster, placement = self.plan.cluster, self.program.placement
        readers = (
            DeviceReader(n, whole, cluster, self._of_device(n), self._moved_bytes[n]) for n in self._devices
        )
        timed = [reader.read(actions) for reader, actions in zip(readers, whole.actions, strict=True)]
        return TimedProgram(timed, cluster, message_sizes(self.plan, placement, self._storages))

    def _of_device(self, device: int) -> dict[int, StageCost]:
        """Return the costs of the stages of a device."""
        return {n: of_devices[device] for n, of_devices in enumerate(self._stages) if device in of_devices}

    def _rests_of(self, device: int) -> dict[int, StageRest]:
        """Return the state of a device's stages, which does not depend on microbatches in flight."""
        return {number: stage.rest for number, stage in self._of_device(device).items()}

    def _of_step(self, step: int) -> Program:
        """Return the program of a step."""
        return self._programs[min(step, len(self._programs) - 1)]

    @property
    def _devices(self) -> range:
        return range(len(self.program.actions))

    @cached_property
    def _readings(self) -> list[LedgerReading]:
        """Ledger reading of every device."""
        how = {"steps": self.steps, "distinct": self._distinct, "beginning": self._beginning}
        return [reading(device, self._of_device(device), self._programs, **how) for device in self._devices]

    @property
    def _beginning(self) -> int:
        """Bytes of the generator's state, which torch's engine keeps while it prepares the first step."""
        return _GENERATOR if self._is_torch and self.plan.profile.assumptions.target == "cpu" else 0

    # ---- Memory

    def _changes(self, device: int, steps: int) -> Iterator[Change]:
        """Yield the effects of a device's first `steps` steps."""
        last = len(self.effects[device]) - 1
        for step in range(steps):
            for position, effect in self.effects[device][min(step, last)]:
                yield step, position, effect

    def _at_rest(self, device: int) -> Levels:
        lent = lent_bytes(self.arenas, Member.device(device))
        rests = (of_devices[device].rest for of_devices in self._stages if device in of_devices)
        return at_rest(rests, lent, self._readings[device].away)

    def _peak(self, device: int) -> int:
        changes = self._changes(device, min(self.steps, self._distinct))  # later ones repeat the last
        return highest(self._at_rest(device), changes)

    def _rows(self, device: int, names: list[list[str]]) -> list[Row]:
        """Return a row for every action that changes memory or needs temporary bytes, in order of time."""
        changes, starts = list(self._changes(device, self.steps)), self._times.starts(device)
        before = [0.0, *self.clock.after[device]]
        rest = self._at_rest(device)
        if not starts[-1] and any(rest):  # a device that only lends memory
            return [(0.0, 0, "lends", rest)]
        return [
            (before[starts[step] + position], step, names[step][position], levels)
            for (step, position, _), levels in zip(changes, peaks(rest, changes), strict=True)
        ]

    # ---- Trace

    def _device_trace(self, device: int) -> DeviceTrace:
        known = [list(map(str, program.actions[device])) for program in self._programs]
        names = [known[min(step, len(known) - 1)] for step in range(self.steps)]
        return DeviceTrace(
            device=device,
            budget_bytes=self.plan.cluster.devices[device].memory_bytes,
            events=tuple(
                Event(
                    step=step,
                    action=names[step][position],
                    stream=stream,
                    start_seconds=start,
                    end_seconds=end,
                )
                for start, end, step, position, stream in sorted(self._busy(device))
            ),
            memory=tuple(
                MemorySample(step=step, action=name, seconds=seconds, bytes=levels)
                for seconds, step, name, levels in self._rows(device, names)
            ),
        )

    def _busy(self, device: int) -> Iterator[tuple[float, float, int, int, Stream]]:
        """Yield start, end, step, position and stream of everything on a device that takes time."""
        codes, _, transfers = self._timed_program.devices[device]
        clock, transfers_per_turn = self.clock, len(self._timed_program.parts)
        before, starts = [0.0, *clock.after[device]], self._times.starts(device)
        for step in range(self.steps):
            for number in range(starts[step], starts[step + 1]):
                turn, place = divmod(number, len(codes))  # the clock may have repeated the same actions
                code, position = codes[place], number - starts[step]
                if code in (NOTHING, JOIN):
                    continue
                if code == COMPUTE:
                    start, end, stream = before[number], before[number + 1], Stream.COMPUTE
                else:
                    transfer = turn * transfers_per_turn + transfers[place]
                    start, end = clock.begins[transfer], clock.ends[transfer]
                    stream = Stream.COPY if code == COPY else Stream.COMMUNICATION
                if end > start:
                    yield start, end, step, position, stream


def _check(plan: Plan, program: Program, steps: int) -> None:
    """Check that a program belongs to its plan.

    Raises:
        UsageError: stages, microbatches, devices or steps do not match.
    """
    whole("steps", steps, 1, MOST_STEPS)
    for what, of_plan, of_program in (
        ("stage", len(plan.stages), program.stages),
        ("microbatch", plan.training.microbatches, program.microbatches),
        ("device", len(plan.cluster.devices), len(program.actions)),
    ):
        if of_plan != of_program:
            raise UsageError(
                f"the program is for {counted(of_program, what)}, but the plan has {of_plan}: lower the "
                "plan again"
            )
    for number, (there, stage) in enumerate(zip(program.placement, plan.stages, strict=True)):
        if len(there) != len(stage.devices):
            raise UsageError(
                f"stage {number} is on devices {list(there)} in the program, but on {list(stage.devices)} "
                "in the plan: lower the plan again"
            )
    check_slices(plan, None)


# ---- Contents of a device
#
#     for row in contents(plan, device=0).layers: ...
#
# Cost: one simulation, and one more walk through the programs of the requested devices.


class LayerContents(NamedTuple):
    """Bytes of one layer, without state that a decision moves, which comes and goes.

    `parameter_bytes` include buffers and constants, `copy_bytes` are those of half-precision copies of
    weights. `activation_bytes` are those of activations of the layer that a backward still needs, over
    `microbatches` microbatches. Layer None has the inputs from the stage before, or from the data.
    """

    layer: int | None
    parameter_bytes: int
    copy_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    microbatches: int

    @property
    def total_bytes(self) -> int:
        """Sum of all bytes."""
        state = self.parameter_bytes + self.copy_bytes + self.gradient_bytes + self.optimizer_bytes
        return state + self.activation_bytes


class TensorContents(NamedTuple):
    """Activation of a layer, with `nbytes` in each of its `microbatches`.

    `operation` is the first autograd operation that keeps it, with its shape; both are empty for values that
    are only passed on. Layer None has the inputs from the stage before, or from the data.
    """

    layer: int | None
    operation: str
    shape: tuple[int, ...]
    nbytes: int
    microbatches: int


class Contents(NamedTuple):
    """Memory of a device at the start of an action, by layers and by activations, and the action's peak."""

    peak: MemorySample
    layers: tuple[LayerContents, ...]
    tensors: tuple[TensorContents, ...]


def contents(plan: Plan, device: int) -> Contents | None:
    """Return the contents of a device at its peak; None for a device without a stage."""
    return contents_at(plan, device, simulate(plan).devices[device].peak)


def contents_at(plan: Plan, device: int, moment: MemorySample | None) -> Contents | None:
    """Return the contents of a device at the start of an action; None for a device without a stage.

    Computed from the plan, not measured. Also None if the plan's programs lack the action, for example during
    an evaluation. Steps after the distinct ones are equal, so their contents are those of the last distinct
    one.
    """
    programs = step_programs(plan)
    if moment is None or moment.action not in map(
        str, programs[-1].actions[device]
    ):  # of an evaluation, for example
        return None
    return _contents(plan, device, moment, programs, Costs.of(plan))


def all_contents(plan: Plan, trace: Trace) -> list[Contents | None]:
    """Return the contents of every device at its peak; `trace` is that of the plan's simulation."""
    programs, costs = step_programs(plan), Costs.of(plan)
    return [_contents(plan, device, one.peak, programs, costs) for device, one in enumerate(trace.devices)]


def _contents(
    plan: Plan, device: int, moment: MemorySample | None, programs: Sequence[Program], costs: Costs
) -> Contents | None:
    body = programs[-1]
    stages = {
        number: costs.of_device(plan, number, device, stage.devices)
        for number, stage in enumerate(plan.stages)
        if device in stage.devices
    }
    if moment is None or not stages:
        return None
    ledger = Ledger(device, stages, body)  # the first steps may not move everything yet
    last = min(moment.step, len(programs) + 1)
    for step in range(last + 1):
        actions = programs[min(step, len(programs) - 1)].actions[device]
        here = list(map(str, actions)).index(moment.action) if step == last else len(actions)
        ledger.read(actions[:here])
    rows = (
        row for number, cost in stages.items() for row in _rows(ledger, number, cost, _moving(plan, number))
    )
    tensors = (tensor for number, cost in stages.items() for tensor in _tensors(ledger, number, cost))
    return Contents(moment, tuple(rows), tuple(tensors))


def _moving(plan: Plan, stage: int) -> set[tuple[str, int]]:
    """Return the states of layers that decisions move."""
    result = set()
    for decision in plan.decisions:
        if decision.stage == stage and isinstance(decision.subject, State):
            kinds = ("gradients", "optimizer") if decision.what is What.UPDATE else (decision.subject.kind,)
            result |= {(kind, layer) for kind in kinds for layer in decision.layers}
    return result


def _rows(ledger: Ledger, number: int, cost: StageCost, moving: set[tuple[str, int]]) -> list[LayerContents]:
    """Return the layers of a stage, after the inputs from elsewhere."""
    flights, born, stepped = ledger.contents(number)
    gathered, rest = ledger.gathered(number), cost.rest
    saved, counts = Counter[int](), Counter[int]()
    for residency in flights:
        result = Working(cost.storages, residency).activations()
        saved.update(result)
        counts.update(result.keys())
    elsewhere = [LayerContents(None, 0, 0, 0, 0, saved[-1], counts[-1])] if saved[-1] else []
    return elsewhere + [
        LayerContents(
            layer,
            (
                0
                if ("parameters", layer) in moving
                else sum(map(rest.static_bytes, positions)) - rest.copies_here(layer)
            )
            + (rest.unsharded_bytes(layer) - copies if layer in gathered else 0),
            copies,
            _state(cost, "gradients", layer, moving) if layer in born else 0,
            _state(cost, "optimizer" if layer in stepped else "early optimizer", layer, moving),
            sum(saved[position] for position in positions),
            max(counts[position] for position in positions),
        )
        for layer in range(cost.start, cost.stop)
        for positions in [_positions(cost, layer)]
        for copies in [rest.storages.copy_bytes(layer) if layer in gathered else rest.copies_here(layer)]
    ]


def _tensors(ledger: Ledger, number: int, cost: StageCost) -> Iterator[TensorContents]:
    """Yield the activations of a stage, each kind of instance once."""
    result = Counter[tuple[int, int, int]]()
    for residency in ledger.contents(number)[0]:
        result.update(Working(cost.storages, residency).kept())
    for (maker, storage, nbytes), count in result.items():
        layer = None if maker < 0 else min(cost.start + maker, cost.stop - 1)
        tensor = cost.storages.saved_as.get(storage)
        operation = "copies of buffers" if storage < 0 else tensor.operation if tensor else ""
        yield TensorContents(layer, operation, tensor.shape if tensor else (), nbytes, count)


def _positions(cost: StageCost, layer: int) -> range:
    """Return the positions of a layer; the loss counts with the last one."""
    first = layer - cost.start
    return range(first, cost.storages.count if layer == cost.stop - 1 else first + 1)


def _state(cost: StageCost, kind: LayerState, layer: int, moving: set[tuple[str, int]]) -> int:
    return 0 if (kind.removeprefix("early "), layer) in moving else cost.rest.bytes_of(kind, layer, layer + 1)
