"""Folding of microbatches in a dry run: one of several equal microbatches is executed for all.

The effect of an action on a device's memory depends on earlier actions of its microbatch, not on other
microbatches. So of all microbatches with the same actions in the same order on a stage, one is run. The
program is shortened to these microbatches, and the memory of the whole program is computed from their effects
(unfolding). The first backward of a step allocates gradients and later ones do not, so its microbatch is
always run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from operator import add
from typing import Any, Generic, NamedTuple, TypeVar

from pipefit.schema.actions import Action, Kind
from pipefit.schema.program import Program
from pipefit.schema.trace import MemorySample

Path = tuple[object, ...]  # the actions of one microbatch on one stage, without its number
Bytes = tuple[int, ...]  # by category
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Folding:
    """The microbatches that are run in the first step and in later ones.

    `like` has for each stage and microbatch an equal microbatch that is run in the first step.
    """

    first: frozenset[int]
    later: frozenset[int]
    like: dict[tuple[int, int], int]

    @staticmethod
    def of(program: Program) -> Folding:
        """Return the fewest microbatches that stand for all."""
        paths, bearers = _paths(program)
        like: dict[tuple[int, int], int] = {}
        met: dict[tuple[int, Path], int] = {}
        for (stage, microbatch), path in sorted(paths.items(), key=lambda item: item[0]):
            like[stage, microbatch] = met.setdefault((stage, path), microbatch)
        return Folding(frozenset(like.values()) | bearers, bearers, like)

    @staticmethod
    def none(programs: Sequence[Program]) -> Folding:
        """Return a folding that runs every microbatch."""
        of_devices = (actions for program in programs for actions in program.actions)
        everyone = frozenset(
            a.microbatch for actions in of_devices for a in actions if a.microbatch is not None
        )
        return Folding(everyone, everyone, {})


def _paths(program: Program) -> tuple[dict[tuple[int, int], Path], frozenset[int]]:
    """Return the actions of every microbatch on every stage, and the microbatches with first backwards."""
    paths: dict[tuple[int, int], list[object]] = {}
    born: set[object] = set()
    bearers = set()
    for actions in program.actions:
        for kind, stage, microbatch, layers, *others in actions:
            if microbatch is None:
                continue
            bears = kind is Kind.BACKWARD and (stage, layers) not in born
            if bears:
                born.add((stage, layers))
                bearers.add(microbatch)
            paths.setdefault((stage, microbatch), []).append((kind, layers, *others, bears))
    return {key: tuple(path) for key, path in paths.items()}, frozenset(bearers)


def shortened(program: Program, microbatches: frozenset[int]) -> Program:
    """Return the program with only the actions of these microbatches."""
    kept = tuple(
        tuple(action for action in actions if action.microbatch is None or action.microbatch in microbatches)
        for actions in program.actions
    )
    return replace(program, actions=kept)


@dataclass(frozen=True, slots=True)
class BytesChange:
    """Effect of an action on the bytes of every category: at its peak, and until the next action begins."""

    at_peak: Bytes
    after: Bytes


class Seat(NamedTuple):
    """An action in a step.

    It has a stage and a microbatch, None without one, and the microbatch that was run instead, if any.
    """

    flight: tuple[int, int] | None
    like: int | None


class StandIn(NamedTuple):
    """Actions whose effects are those of an action on layers that are not run, and on equal ones that are."""

    instead: Callable[[Action], Action | None]  # the executed action for an action on omitted layers
    twin: Callable[[Action], Action | None]  # another executed action that must have the same effect
    execution: Callable[[Action], int | None]  # number of the equal layers in a row that an action is within


def _itself(action: Action) -> None:
    """Return None: nothing stands for the action."""


ALL_LAYERS = StandIn(_itself, _itself, _itself)


class Seated(NamedTuple):
    """The actions of step `number` in order, each with the step and position of the effect that it has.

    Positions are among the `executed` actions of a step. `twins` are pairs of positions in this step whose
    effects must be equal; the second is -1 if no such action is executed.
    """

    number: int
    executed: int
    seats: Sequence[tuple[Seat, int, int]]
    twins: Sequence[tuple[int, int]]


class Seating:
    """The executed actions whose effects all actions have, step after step, on equal devices."""

    def __init__(self, folding: Folding, stand: StandIn = ALL_LAYERS) -> None:
        self._folding, self._stand = folding, stand
        self._known: dict[tuple[Action, int], tuple[int, int]] = {}  # step and position, of the first time

    def step(self, number: int, actions: Sequence[Action]) -> Seated:
        """Return the seats of all actions of the next step; an equal action may come later in the program."""
        ran = self._folding.later if number else self._folding.first
        every = list(numbered(actions))
        executed = [
            key
            for key in every
            if (key[0].microbatch is None or key[0].microbatch in ran) and self._stand.instead(key[0]) is None
        ]
        known = {key: (number, position) for position, key in enumerate(executed)}
        self._known = known | self._known
        twins = [
            (position, known.get((twin, key[1]), (number, -1))[1])
            for position, key in enumerate(executed)
            if (twin := self._stand.twin(key[0])) is not None
        ]
        seats = [self._seat(key, known, ran) for key in every]
        return Seated(number, len(executed), seats, twins)

    def _seat(
        self, key: tuple[Action, int], known: Mapping[tuple[Action, int], tuple[int, int]], ran: Set[int]
    ) -> tuple[Seat, int, int]:
        """Return an action's seat, and the step and position of its effect."""
        action, occurrence = key
        flight = _flight(action)
        if key in known:
            return Seat(flight, None), *known[key]
        instead = self._stand.instead(action) or action
        if flight is None or action.microbatch in ran:
            return Seat(flight, None), *known[instead, occurrence]
        like = self._folding.like[flight]
        return Seat(flight, like), *self._known[instead._replace(microbatch=like), occurrence]


class StepEffects(Generic[T]):
    """The effects of all actions of one device, from those of the executed actions.

    `alike` turns False if an action and its twin have different effects.
    """

    def __init__(self) -> None:
        self.alike = True
        self._seen = list[Sequence[T]]()  # by step

    def step(self, seated: Seated, seen: Sequence[T]) -> Iterator[tuple[Seat, T]]:
        """Yield the seat and effect of every action of the next step, from those `seen` in it."""
        assert len(seen) == seated.executed, "every executed action has an effect"
        self._seen.append(seen)
        self.alike &= all(other >= 0 and seen[one] == seen[other] for one, other in seated.twins)
        return ((seat, self._seen[step][position]) for seat, step, position in seated.seats)


class Unfolding:
    """Memory of one device in the whole program, step by step, from that in the shortened program."""

    def __init__(self, rest: Bytes) -> None:
        self._repetition = StepEffects[BytesChange]()
        self._level = rest

    @property
    def alike(self) -> bool:
        """True if equal actions on equal layers had equal effects so far."""
        return self._repetition.alike

    def step(
        self, seated: Seated, actions: Sequence[Action], measured: Sequence[BytesChange]
    ) -> Iterator[MemorySample]:
        """Yield the memory samples of one step, from the measured changes of the executed actions.

        The time of a sample is its position in the program.
        """
        changes = self._repetition.step(seated, measured)
        for position, (action, (_, change)) in enumerate(zip(actions, changes, strict=True)):
            peak: Any = plus(self._level, change.at_peak)
            yield MemorySample(step=seated.number, action=str(action), seconds=float(position), bytes=peak)
            self._level = plus(self._level, change.after)


def numbered(actions: Sequence[Action]) -> Iterator[tuple[Action, int]]:
    """Yield every action of a step with the number of equal actions before it."""
    counts: dict[Action, int] = {}
    for action in actions:
        number = counts[action] = counts.get(action, -1) + 1
        yield action, number


def _flight(action: Action) -> tuple[int, int] | None:
    """Return the stage and microbatch of an action; None without a microbatch."""
    return None if action.microbatch is None else (action.stage, action.microbatch)


def plus(one: Bytes, other: Iterable[int], times: int = 1) -> Bytes:
    """Add `other` so many `times` to an amount, category by category."""
    if times == 1:
        return tuple(map(add, one, other))
    return tuple(a + times * b for a, b in zip(one, other, strict=True))
