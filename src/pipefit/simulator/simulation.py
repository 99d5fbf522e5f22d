"""A plan's program, simulated: the highest bytes, the seconds of every step, and the trace that shows both.

Good for planners, which ask for one figure thousands of times, and for people, who ask for the trace. Memory is exact
where the profile is. Costs: one microsecond per action for the peaks, two to three with the seconds, six for a trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from operator import itemgetter

from pipefit.errors import UsageError
from pipefit.plans import Plan
from pipefit.program import Program
from pipefit.schedule import lower
from pipefit.simulator.clock import Clock
from pipefit.simulator.costs import Costs
from pipefit.simulator.ledger import Effects, Ledger
from pipefit.simulator.lent import Loan, lent_at, lent_during
from pipefit.simulator.levels import Levels, Row, Step, at_rest, highest, lending, peaks, rests
from pipefit.simulator.script import COMPUTE, COPY, JOIN, NOTHING, Script
from pipefit.trace import DeviceTrace, Event, MemorySample, Stream, Trace


def simulate(plan: Plan, *, program: Program | None = None, steps: int = 1) -> Trace:
    """What `plan` will do in its first `steps` training steps, under `program` or the one it lowers to.

    A memory sample is dated by the start of its action. Bytes lent to another device show on the lender, with a sample
    named after the borrower's action.

    Raises:
        UsageError: the program does not belong to the plan, uses what is not there, or deadlocks.
    """
    return Simulation(plan, program=program, steps=steps).trace()


class Simulation:
    """One program under virtual clock and ledger; each part is worked out when it is first asked for.

    `costs` may be shared by all plans of the same profile and training: `Costs.of(plan)`.
    """

    def __init__(
        self, plan: Plan, *, program: Program | None = None, steps: int = 1, costs: Costs | None = None
    ) -> None:
        self.plan, self.steps = plan, steps
        self.program = lower(plan) if program is None else program
        _check(plan, self.program, steps)
        costs, devices = costs or Costs.of(plan), plan.cluster.devices
        self._stages = [
            costs.stage(stage.start, stage.stop, devices[device].kind)
            for stage, device in zip(plan.stages, self.program.placement, strict=True)
        ]

    @cached_property
    def step_seconds(self) -> tuple[float, ...]:
        """Seconds of every step: from when the last device ended the step before to when the last one ended this."""
        return tuple(end - start for start, end in pairwise((0.0, *self.clock.finished)))

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most bytes allocated on every device."""
        return tuple(self._peak(device) for device in range(len(self.program.actions)))

    def trace(self) -> Trace:
        """Events and memory samples of every device."""
        names = [[str(action) for action in actions] for actions in self.program.actions]
        return Trace(
            source="simulated",
            steps=self.steps,
            devices=tuple(self._device_trace(device, names) for device in range(len(self.program.actions))),
            step_seconds=self.step_seconds,
        )

    # ---------------------------------------------------------------- the two readings

    @cached_property
    def effects(self) -> list[list[Effects]]:
        """The memory effects of every device: those of the first step, and those of any later one."""
        return [self._read(device) for device in range(len(self.program.actions))]

    @cached_property
    def clock(self) -> Clock:
        """When everything happens."""
        return Clock(self.program, self._script, self.steps)

    @cached_property
    def _script(self) -> Script:
        assert self.effects, "the ledger reads first: it refuses what the script cannot resolve"
        return Script(self.program, self.plan.cluster, self._stages)

    def _read(self, device: int) -> list[Effects]:
        stages = {n: costs for n, costs in enumerate(self._stages) if self.program.placement[n] == device}
        ledger = Ledger(device, stages, self.program.microbatches)
        return [ledger.read(self.program.actions[device]) for _ in range(min(self.steps, 2))]

    # ---------------------------------------------------------------- memory

    def _steps_of(self, device: int, steps: int) -> Iterator[Step]:
        """All that a device does to its memory in the first `steps` steps."""
        for step in range(steps):
            for position, effect in self.effects[device][min(step, 1)]:
                yield step, position, effect

    def _at_rest(self, device: int) -> Levels:
        placement = self.program.placement
        return at_rest(costs.memory for n, costs in enumerate(self._stages) if placement[n] == device)

    def _peak(self, device: int) -> int:
        if device in self._loans:
            return max(sum(row[-1]) for row in self._rows(device))
        steps = self._steps_of(device, min(self.steps, 2))  # the third and later ones repeat the second
        return highest(self._at_rest(device), steps) if self.program.actions[device] else 0

    def _rows(self, device: int) -> list[Row]:
        """The highest bytes of every action that changes or exceeds what the device holds, in order of time."""
        steps, count = list(self._steps_of(device, self.steps)), len(self.program.actions[device])
        before = [0.0, *self.clock.after[device]]
        rows = [
            (before[step * count + position], step, device, position, levels)
            for (step, position, _), levels in zip(steps, peaks(self._at_rest(device), steps), strict=True)
        ]
        return self._with_loans(device, rows, steps) if device in self._loans else rows

    def _with_loans(self, device: int, rows: list[Row], steps: list[Step]) -> list[Row]:
        """The rows of a lender: its own, with what it lends meanwhile, and one for every change of that."""
        loans, after, count = self._loans[device], self.clock.after[device], len(self.program.actions[device])
        ends = [after[step * count + position] for step, position, _ in steps]
        during = lent_during(loans, [(row[0], end) for row, end in zip(rows, ends, strict=True)])
        own = [(*row[:-1], lending(row[-1], nbytes)) for row, nbytes in zip(rows, during, strict=True)]
        resting = rests(self._at_rest(device), steps)
        foreign = [
            (loan.seconds, loan.step, loan.device, loan.position, lending(resting[ended], nbytes))
            for loan, (ended, nbytes) in zip(loans, lent_at(loans, ends), strict=True)
        ]
        return sorted(own + foreign, key=itemgetter(0))

    @cached_property
    def _loans(self) -> dict[int, list[Loan]]:
        """The changes of what every lender lends, in order of time; what is given back comes first among equals."""
        loans: dict[int, list[Loan]] = {}
        if not any(action.place and "device" in action.place for actions in self.program.actions for action in actions):
            return loans
        for step in range(self.steps):
            for device, position, lender, nbytes in self._script.lendings:
                number = step * len(self.program.actions[device]) + position
                seconds = self.clock.after[device][number]
                loans.setdefault(lender, []).append(Loan(seconds, nbytes, step, device, position))
        return {lender: sorted(changes) for lender, changes in loans.items()}

    # ---------------------------------------------------------------- the trace

    def _device_trace(self, device: int, names: list[list[str]]) -> DeviceTrace:
        return DeviceTrace(
            device=device,
            budget_bytes=self.plan.cluster.devices[device].memory_bytes,
            events=tuple(
                Event(step=step, action=names[device][position], stream=stream, start_seconds=start, end_seconds=end)
                for start, end, step, position, stream in sorted(self._busy(device))
            ),
            memory=tuple(
                MemorySample(step=step, action=names[where][position], seconds=seconds, bytes=levels)
                for seconds, step, where, position, levels in self._rows(device)
            ),
        )

    def _busy(self, device: int) -> Iterator[tuple[float, float, int, int, Stream]]:
        """Start, end, step, position and stream of everything on a device that takes time."""
        codes, _, transfers = self._script.devices[device]
        clock, transfers_per_step = self.clock, len(self._script.parts)
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


def _check(plan: Plan, program: Program, steps: int) -> None:
    """Refuse a program of another plan."""
    if steps < 1:
        raise UsageError(f"a simulation needs at least one step, not {steps}")
    for what, of_plan, of_program in (
        ("stages", len(plan.stages), program.stages),
        ("microbatches", plan.training.microbatches, program.microbatches),
        ("devices", len(plan.cluster.devices), len(program.actions)),
    ):
        if of_plan != of_program:
            raise UsageError(f"the program is for {of_program} {what}, the plan has {of_plan}: lower the plan again")
