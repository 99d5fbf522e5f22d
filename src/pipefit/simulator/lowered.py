"""What the only device of a rank does, whichever device that is: lowered once, and what it holds read once.

Which device it is says how long its actions take and where its messages go, which whoever asks reads of the actions. Of
a step of many microbatches only as many are lowered and read as tell of the others (`simulator.turns`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from pipefit.actions import Action, Kind
from pipefit.cost.stage import StageCost
from pipefit.grids import Grid
from pipefit.plans import Plan
from pipefit.program import in_a_row
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


class Lowered:
    """The actions of a rank in so many steps; its layers are those of `stage`, whose bytes are those of any device.

    Raises:
        UsageError: a decision cannot be carried out; speaks of it as if stage s were on device s.
    """

    def __init__(self, plan: Plan, rank: int, steps: int, stage: StageCost) -> None:
        self._rank, self._steps, self._stage = rank, steps, stage
        self._plan = replace(plan, stages=tuple(replace(s, grid=Grid.of(n)) for n, s in enumerate(plan.stages)))
        short = shortened(self._plan, rank, steps)
        if short is not None:
            self.programs = rank_programs(short, rank, steps)
            more = plan.training.microbatches - short.training.microbatches
            self._turns = Turns.of(self.programs[-1].actions[rank], more)
        if short is None or self._turns is None:
            self._lower_all()

    def _lower_all(self) -> None:
        """Lower all microbatches."""
        self.programs, self._turns = rank_programs(self._plan, self._rank, self._steps), None

    @property
    def counts(self) -> list[int]:
        """How many actions each program has."""
        more = 0 if self._turns is None else self._turns.more * self._turns.length
        return [len(program.actions[self._rank]) + more for program in self.programs]

    def timed(self, reader: DeviceReader) -> TimedDevice:
        """What the clock is told of a step that repeats, or of all steps of an endless schedule."""
        last = self.programs[-1]
        every = [self.programs[min(step, len(self.programs) - 1)] for step in range(self._steps)]
        found = reader.read(in_a_row(every, self._rank) if last.endless else last.actions[self._rank])
        if self._turns is None:
            return found
        if (whole := self._turns.timed(found)) is not None:
            return whole
        self._lower_all()
        return self.timed(reader)

    def passes(self, kinds: frozenset[Kind]) -> Passes:
        """The positions of passes of these kinds in the last step, and their microbatches."""
        actions = enumerate(self.programs[-1].actions[self._rank])
        found = tuple((n, a.microbatch) for n, a in actions if a.kind in kinds and not a.wait)
        return found if self._turns is None else self._turns.passes(found)

    @cached_property
    def held(self) -> Held:
        """What the device holds.

        Raises:
            UsageError: an action uses what does not exist then; speaks of it as if stage s were on device s.
        """
        read = self._reading()
        if self._turns is not None and not all(map(self._turns.tell, read.effects)):
            self._lower_all()
            read = self._reading()
        changes = ((n, position, one) for n, effects in enumerate(read.effects) for position, one in effects)
        placed = read.placed
        if self.programs[-1].endless:
            placed = [a for program in self.programs for a in program.actions[self._rank] if a.place is not None]
        return Held(highest(at_rest([self._stage.rest], 0, read.away), changes), tuple(placed))

    def _reading(self) -> Reading:
        stages, distinct = {self._rank: self._stage}, distinct_steps(self._plan)
        return reading(self._rank, stages, self.programs, steps=self._steps, distinct=distinct)
