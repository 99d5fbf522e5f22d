"""A plan's program, simulated: the peaks, the seconds of every step, and the trace that has both.

Planners may ask for one figure alone thousands of times; people ask for the trace. Peaks are exact where the profile
is. Costs: one microsecond per action for the peaks, two to three with the seconds, six for a trace.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise

from pipefit.actions import Action
from pipefit.cost.stage import Costs, StageCost
from pipefit.errors import PipefitWarning, UsageError
from pipefit.plans import Plan
from pipefit.program import Program
from pipefit.schedule import lower
from pipefit.schedule.arenas import Arena, arenas
from pipefit.simulator.clock import Clock
from pipefit.simulator.ledger import Effects, Ledger
from pipefit.simulator.levels import Change, Levels, Row, at_rest, highest, peaks
from pipefit.simulator.timed_program import COMPUTE, COPY, JOIN, NOTHING, TimedProgram
from pipefit.trace import PREDICTED_STEPS, DeviceTrace, Event, MemorySample, Stream, Trace
from pipefit.validation import whole


def simulate(plan: Plan, *, program: Program | None = None, steps: int = PREDICTED_STEPS) -> Trace:
    """What devices do in the first `steps` training steps of `plan`, by `program` or the one that `lower` makes of it.

    The first step differs from all others, because the optimizer's state is created in it; the second and all later
    steps are alike, so that two steps are enough. Times are seconds; the time of a memory sample is the start of its
    action. Memory that a device lends to others is allocated before the first step. Warns (`PipefitWarning`) of
    operations in the profile whose kernels could not be measured: the peaks are without what these take.

    Raises:
        UsageError: the program does not belong to the plan, or uses a tensor or gradient that does not exist then.
    """
    if gap := plan.profile.kernels.gap:
        warnings.warn(gap, PipefitWarning, stacklevel=2)
    return Simulation(plan, program=program, steps=steps).trace()


class Simulation:
    """One program with its clock and its ledgers; each part is computed when it is first asked for.

    `costs` may be shared by all plans of the same profile and training: `Costs.of(plan)`.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        program: Program | None = None,
        steps: int = PREDICTED_STEPS,
        costs: Costs | None = None,
    ) -> None:
        self.plan, self.steps = plan, steps
        self.program = lower(plan) if program is None else program
        _check(plan, self.program, steps)
        costs, devices = costs or Costs.of(plan), plan.cluster.devices
        self._stages = [
            costs.stage(stage.start, stage.stop, devices[there[0]].kind)
            for stage, there in zip(plan.stages, self.program.placement, strict=True)
        ]
        self._moved_bytes = _moved_bytes(self.program, self._stages)

    @cached_property
    def step_seconds(self) -> tuple[float, ...]:
        """Seconds of every step: from the end of the step before to the end of this one, each on the last device."""
        return tuple(end - start for start, end in pairwise((0.0, *self.clock.finished)))

    @cached_property
    def utilisation(self) -> tuple[float, ...]:
        """The share of the last step in which every device computes."""
        length = self.step_seconds[-1]
        return tuple(sum(timed.seconds) / length if length else 0.0 for timed in self._timed_program.devices)

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most bytes allocated on every device."""
        return tuple(self._peak(device) for device in range(len(self.program.actions)))

    def trace(self) -> Trace:
        """Events and memory samples of every device."""
        return Trace(
            source="simulated",
            steps=self.steps,
            devices=tuple(self._device_trace(device) for device in range(len(self.program.actions))),
            step_seconds=self.step_seconds,
            estimated=self.plan.measurement.estimated,
        )

    # ---------------------------------------------------------------- ledger and clock

    @cached_property
    def effects(self) -> list[list[Effects]]:
        """The memory effects of every device: those of the first step, and those of any later one."""
        return [effects for effects, _ in self._readings]

    @cached_property
    def arenas(self) -> tuple[Arena, ...]:
        """The memory that devices lend to each other."""
        return arenas([placed for _, placed in self._readings], self._moved_bytes)

    @cached_property
    def clock(self) -> Clock:
        """When every action and transfer begins and ends."""
        return Clock(self._timed_program, self.steps)

    @cached_property
    def _timed_program(self) -> TimedProgram:
        assert self.effects, (
            "the ledger comes first: it refuses actions to which the timed program could give no seconds"
        )
        return TimedProgram(self.program, self.plan.cluster, self._stages, self._moved_bytes)

    @cached_property
    def _readings(self) -> list[tuple[list[Effects], list[Action]]]:
        """Of every device: the effects of its first two steps, and its actions that name a place."""
        return [self._read(device) for device in range(len(self.program.actions))]

    def _read(self, device: int) -> tuple[list[Effects], list[Action]]:
        stages = {n: costs for n, costs in enumerate(self._stages) if device in self.program.placement[n]}
        ledger = Ledger(device, stages, self.program)
        return [ledger.read(self.program.actions[device]) for _ in range(min(self.steps, 2))], ledger.placed

    # ---------------------------------------------------------------- memory

    def _changes(self, device: int, steps: int) -> Iterator[Change]:
        """The effects of a device's first `steps` steps."""
        for step in range(steps):
            for position, effect in self.effects[device][min(step, 1)]:
                yield step, position, effect

    def _at_rest(self, device: int) -> Levels:
        placement = self.program.placement
        lent = sum(arena.nbytes for arena in self.arenas if arena.lender == device)
        return at_rest((costs.rest for n, costs in enumerate(self._stages) if device in placement[n]), lent)

    def _peak(self, device: int) -> int:
        changes = self._changes(device, min(self.steps, 2))  # the third and later ones repeat the second
        return highest(self._at_rest(device), changes)

    def _rows(self, device: int, names: list[str]) -> list[Row]:
        """A row for every action that changes what the device holds or needs temporary bytes, in order of time."""
        changes, count = list(self._changes(device, self.steps)), len(self.program.actions[device])
        before = [0.0, *self.clock.after[device]]
        rest = self._at_rest(device)
        if not count and any(rest):  # a device that only lends memory
            return [(0.0, 0, "lends", rest)]
        return [
            (before[step * count + position], step, names[position], levels)
            for (step, position, _), levels in zip(changes, peaks(rest, changes), strict=True)
        ]

    # ---------------------------------------------------------------- the trace

    def _device_trace(self, device: int) -> DeviceTrace:
        names = list(map(str, self.program.actions[device]))
        return DeviceTrace(
            device=device,
            budget_bytes=self.plan.cluster.devices[device].memory_bytes,
            events=tuple(
                Event(step=step, action=names[position], stream=stream, start_seconds=start, end_seconds=end)
                for start, end, step, position, stream in sorted(self._busy(device))
            ),
            memory=tuple(
                MemorySample(step=step, action=name, seconds=seconds, bytes=levels)
                for seconds, step, name, levels in self._rows(device, names)
            ),
        )

    def _busy(self, device: int) -> Iterator[tuple[float, float, int, int, Stream]]:
        """Start, end, step, position and stream of everything on a device that takes time."""
        codes, _, transfers = self._timed_program.devices[device]
        clock, transfers_per_step = self.clock, len(self._timed_program.parts)
        before = [0.0, *clock.after[device]]
        for step in range(self.steps):
            for position, code in enumerate(codes):
                if code in (NOTHING, JOIN):
                    continue
                if code == COMPUTE:
                    number = step * len(codes) + position
                    start, end, stream = before[number], before[number + 1], Stream.COMPUTE
                else:
                    number = step * transfers_per_step + transfers[position]
                    start, end = clock.begins[number], clock.ends[number]
                    stream = Stream.COPY if code == COPY else Stream.COMMUNICATION
                if end > start:
                    yield start, end, step, position, stream


def _moved_bytes(program: Program, stages: list[StageCost]) -> Callable[[Action], int]:
    """The bytes of the storages that an OFFLOAD or RELOAD moves, by action; what has been computed is kept."""
    known: dict[object, int] = {}

    def nbytes(action: Action) -> int:
        key = action.stage, action.subject
        if key not in known:
            storages = stages[action.stage].storages
            known[key] = sum(storages.sizes[storages.storage(subject)] for subject in program.moved(action))
        return known[key]

    return nbytes


def _check(plan: Plan, program: Program, steps: int) -> None:
    """Refuse a program of another plan."""
    whole("steps", steps, 1)
    for what, of_plan, of_program in (
        ("stages", len(plan.stages), program.stages),
        ("microbatches", plan.training.microbatches, program.microbatches),
        ("devices", len(plan.cluster.devices), len(program.actions)),
    ):
        if of_plan != of_program:
            raise UsageError(f"the program is for {of_program} {what}, the plan has {of_plan}: lower the plan again")
    for number, there in enumerate(program.placement):
        if len(there) != 1:
            raise UsageError(
                f"stage {number} is on devices {list(there)}, which cannot be simulated yet: put it on one device"
            )
    if program.carried_in or program.carried_out:
        raise UsageError("the program is the body of an endless schedule, which cannot be simulated yet")
