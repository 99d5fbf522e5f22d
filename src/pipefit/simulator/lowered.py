"""What a device of a rank does, lowered once, and what it holds, read once.

Where every stage has a device of its own, that is the same whichever device it is (`as_alone`), which says how long its
actions take and where its messages go: whoever asks reads that of the actions. Of a step of many microbatches only as
many are lowered and read as tell of the others (`simulator.turns`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from pipefit.actions import Action, Kind
from pipefit.cost.stage import StageCost
from pipefit.grids import Grid
from pipefit.plans import Plan
from pipefit.program import UncheckedProgram, in_a_row
from pipefit.schedule import distinct_steps, rank_programs
from pipefit.simulator.levels import at_rest, highest
from pipefit.simulator.readings import Reading, reading
from pipefit.simulator.timed_device import DeviceReader, TimedDevice
from pipefit.simulator.turns import Passes, Turns, shortened


class Held(NamedTuple):
    """The peak of a device, without what it lends, and the actions that use memory elsewhere."""

    peak_bytes: int
    placed: tuple[Action, ...]


def is_alone(plan: Plan) -> bool:
    """Whether every stage has a device of its own."""
    devices = {device for stage in plan.stages for device in stage.devices}
    return all(len(stage.devices) == 1 for stage in plan.stages) and len(devices) == len(plan.stages)


def as_alone(plan: Plan) -> Plan:
    """The plan of stages with a device of their own, as if stage s were on device s."""
    return replace(plan, stages=tuple(replace(stage, grid=Grid.of(n)) for n, stage in enumerate(plan.stages)))


class Lowered:
    """The actions of a device of a rank in so many steps; its layers are those of `stages`.

    Raises:
        UsageError: a decision cannot be carried out.
    """

    def __init__(self, plan: Plan, rank: int, device: int, steps: int, stages: Mapping[int, StageCost]) -> None:
        self._plan, self._rank, self._device, self._steps, self._stages = plan, rank, device, steps, stages
        short = shortened(plan, rank, steps)
        if short is not None:
            self.programs = self._programs(short)
            more = plan.training.microbatches - short.training.microbatches
            self._turns = Turns.of(self.programs[-1].actions[device], more)
        if short is None or self._turns is None:
            self._lower_all()

    def _lower_all(self) -> None:
        """Lower all microbatches."""
        self.programs, self._turns = self._programs(self._plan), None

    def _programs(self, plan: Plan) -> tuple[UncheckedProgram, ...]:
        return rank_programs(plan, self._rank, self._steps, [self._device])

    @property
    def counts(self) -> list[int]:
        """How many actions each program has."""
        more = 0 if self._turns is None else self._turns.more * self._turns.length
        return [len(program.actions[self._device]) + more for program in self.programs]

    def timed(self, reader: DeviceReader) -> TimedDevice:
        """What the clock is told of a step that repeats, or of all steps of an endless schedule."""
        last = self.programs[-1]
        every = [self.programs[min(step, len(self.programs) - 1)] for step in range(self._steps)]
        found = reader.read(in_a_row(every, self._device) if last.endless else last.actions[self._device])
        if self._turns is None:
            return found
        if (whole := self._turns.timed(found)) is not None:
            return whole
        self._lower_all()
        return self.timed(reader)

    def passes(self, kinds: frozenset[Kind]) -> Passes:
        """The positions of passes of these kinds in the last step, and their microbatches."""
        actions = enumerate(self.programs[-1].actions[self._device])
        found = tuple((n, a.microbatch) for n, a in actions if a.kind in kinds and not a.wait)
        return found if self._turns is None else self._turns.passes(found)

    @cached_property
    def held(self) -> Held:
        """What the device holds.

        Raises:
            UsageError: an action uses what does not exist then.
        """
        read = self._reading()
        if self._turns is not None and not all(map(self._turns.tell, read.effects)):
            self._lower_all()
            read = self._reading()
        changes = ((n, position, one) for n, effects in enumerate(read.effects) for position, one in effects)
        placed = read.placed
        if self.programs[-1].endless:
            placed = [a for program in self.programs for a in program.actions[self._device] if a.place is not None]
        rest = at_rest((stage.rest for stage in self._stages.values()), 0, read.away)
        return Held(highest(rest, changes), tuple(placed))

    def _reading(self) -> Reading:
        distinct = distinct_steps(self._plan)
        return reading(self._device, self._stages, self.programs, steps=self._steps, distinct=distinct)
