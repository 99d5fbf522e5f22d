"""A long step, told by a short one: once the pipeline is full, a device does the same for every microbatch, one turn
after the other.

    head | turn | turn | tail                  lowered and read
    head | turn | turn | turn ... turn | tail  what that says of more microbatches

A turn begins with the forward of a microbatch. The end of a step knows that it is one, as it starts no receive for the
next step, so the turns that were left out come before it. That turns are alike is seen and not assumed: the two before
the tail have to be the same but for the numbers of microbatches and transfers, and so have their effects on memory,
which leave as much as they find. Where they are not, nothing is left out.

Costs: a few microseconds for an action of the two turns, and a tenth of one for each that is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pipefit.actions import FORWARDS, Action, Message
from pipefit.plans import Plan
from pipefit.program import shifted
from pipefit.schedule.endless import period
from pipefit.simulator.ledger import Effects
from pipefit.simulator.timed_device import STARTS, Collected, Own, TimedDevice

Passes = tuple[tuple[int, int | None], ...]  # positions and microbatches

_ALIKE, _TAIL = 2, 2  # turns that have to be alike, and those behind them


def shortened(plan: Plan, rank: int, steps: int) -> Plan | None:
    """The plan with as few microbatches in a step as show the turns of a rank in so many steps; None if it has no more,
    or does not do the same for each.

    With n stages behind it, a rank goes backward for the first time behind its forward n, or 2n under eager 1F1B, and
    then in every turn. Under PipeDream it frees its first weights as microbatch n goes backward (`cost.versions`),
    behind forward 2n.
    """
    how, behind = plan.training, len(plan.stages) - 1 - rank
    filling = {"1f1b": behind + 1, "eager-1f1b": 2 * behind + 1, "pipedream": 2 * behind + 1}
    few = filling.get(how.schedule, how.microbatches) + _ALIKE + _TAIL
    if few >= how.microbatches or (how.endless and steps > 1) or period(plan) > 1:
        return None
    if len(plan.ranks) < len(plan.stages) or plan.stages[rank].grid.divides_gradients:  # each microbatch has its sums
        return None
    return replace(plan, training=replace(how, batch_size=few * how.microbatch_size, microbatches=few))


class Turns(NamedTuple):
    """The turn at positions `start` to `stop - 1` of a short step, of which a long one has so many `more`."""

    start: int
    stop: int
    more: int

    @staticmethod
    def of(actions: Sequence[Action], more: int) -> Turns | None:
        """The last turn before the tail of these actions; None unless it is like the one before."""
        begins, before = list[int](), None
        for position, action in enumerate(actions):
            if action.kind in FORWARDS and action.microbatch != before:
                begins.append(position)
                before = action.microbatch
        if len(begins) < _ALIKE + _TAIL:
            return None
        first, start, stop = begins[-_ALIKE - _TAIL : -_TAIL + 1]
        turn = [shifted(action, 1) for action in actions[first:start]]
        return Turns(start, stop, more) if turn == list(actions[start:stop]) else None

    @property
    def length(self) -> int:
        """How many actions a turn has."""
        return self.stop - self.start

    def passes(self, short: Passes) -> Passes:
        """The positions of passes in the long step."""
        head = [one for one in short if one[0] < self.stop]
        turn = [one for one in head if one[0] >= self.start]
        again = [self._later(one, by) for by in range(1, self.more + 1) for one in turn]
        return (*head, *again, *(self._later(one, self.more) for one in short[len(head) :]))

    def _later(self, one: tuple[int, int | None], by: int) -> tuple[int, int | None]:
        position, microbatch = one
        return position + by * self.length, None if microbatch is None else microbatch + by

    def tell(self, effects: Effects) -> bool:
        """Whether the effects on memory of the short step have the peak of the long one: those of turns are the same,
        and leave as much as they find.
        """
        first = self.start - self.length
        one, other = (
            [(position - begin, found) for position, found in effects if begin <= position < begin + self.length]
            for begin in (first, self.start)
        )
        return one == other and not sum(found.after_bytes for _, found in one)

    def timed(self, short: TimedDevice) -> TimedDevice | None:
        """What the clock is told of the long step; None where turns differ to it, or join what began before them."""
        codes, seconds, transfers, started = short
        first, start, stop = self.start - self.length, self.start, self.stop
        begun = [sum(code in STARTS for code in codes[:position]) for position in (first, start, stop)]
        each, turn, tail = begun[2] - begun[1], started[begun[1] : begun[2]], started[begun[2] :]
        alike = (
            codes[first:start] == codes[start:stop]
            and seconds[first:start] == seconds[start:stop]
            and _later_numbers(transfers[first:start], each) == transfers[start:stop]
            and all(number < 0 or number >= begun[0] for number in transfers[start:])
            and not any(isinstance(one, Collected) for one in turn)
            and [_later(one, 1) for one in started[begun[0] : begun[1]]] == turn
        )
        if not alike:
            return None
        more, again = range(1, self.more + 1), transfers[start:stop]
        return TimedDevice(
            codes[:stop] + codes[start:stop] * self.more + codes[stop:],
            seconds[:stop] + seconds[start:stop] * self.more + seconds[stop:],
            [
                *transfers[:stop],
                *(number for by in more for number in _later_numbers(again, by * each)),
                *_later_numbers(transfers[stop:], self.more * each),
            ],
            [
                *started[: begun[2]],
                *(_later(one, by) for by in more for one in turn),
                *(_later(one, self.more) for one in tail),
            ],
        )


def _later_numbers(numbers: Sequence[int], by: int) -> list[int]:
    return [number + by if number >= 0 else number for number in numbers]


def _later(begun: Message | Collected | Own, by: int) -> Message | Collected | Own:
    """The transfer of a turn, so many turns later."""
    if not isinstance(begun, Message) or begun.microbatch is None:
        return begun
    return begun._replace(microbatch=begun.microbatch + by)
