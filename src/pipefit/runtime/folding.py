"""Microbatches that do the same are run once: a long program cut short, and its memory unfolded again.

What an action does to a device's memory depends on what has been done with its microbatch before, not on the others in
flight. So of all microbatches that meet the same actions in the same order, on every stage, one is enough: a dry run
executes the program of these few, and every other microbatch is given the effects of the one it is like. The first
backward of a step differs from later ones, because gradients are born in it, so its microbatch is always run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipefit.program import Action, Kind, Program
from pipefit.trace import MemorySample

Path = tuple[object, ...]  # the actions of one microbatch on one stage, without its number
Bytes = tuple[int, ...]  # by category


@dataclass(frozen=True, slots=True)
class Folding:
    """Which microbatches are run in a first step and in later ones, and for each stage and microbatch one that is like
    it and is run in the first.
    """

    first: frozenset[int]
    later: frozenset[int]
    like: dict[tuple[int, int], int]

    @staticmethod
    def of(program: Program) -> Folding:
        """The fewest microbatches, by the rule above."""
        paths, bearers = _paths(program)
        like: dict[tuple[int, int], int] = {}
        met: dict[tuple[int, Path], int] = {}
        for (stage, microbatch), path in sorted(paths.items(), key=lambda item: item[0]):
            like[stage, microbatch] = met.setdefault((stage, path), microbatch)
        return Folding(frozenset(like.values()) | bearers, bearers, like)

    @staticmethod
    def none(program: Program) -> Folding:
        """Every microbatch is run."""
        everyone = frozenset(range(program.microbatches))
        return Folding(everyone, everyone, {})


def _paths(program: Program) -> tuple[dict[tuple[int, int], Path], frozenset[int]]:
    """The path of every microbatch through every stage, and the microbatches whose backwards bear gradients."""
    paths: dict[tuple[int, int], list[object]] = {}
    born: set[object] = set()
    bearers = set()
    for actions in program.actions:
        for action in actions:
            if action.microbatch is None:
                continue
            bears = action.kind is Kind.BACKWARD and (action.stage, action.layers) not in born
            if bears:
                born.add((action.stage, action.layers))
                bearers.add(action.microbatch)
            step = action._replace(microbatch=None), bears
            paths.setdefault((action.stage, action.microbatch), []).append(step)
    return {key: tuple(path) for key, path in paths.items()}, frozenset(bearers)


def shortened(program: Program, microbatches: frozenset[int]) -> Program:
    """The program with the actions of these microbatches alone."""
    kept = tuple(
        tuple(action for action in actions if action.microbatch is None or action.microbatch in microbatches)
        for actions in program.actions
    )
    return replace(program, actions=kept)


@dataclass(frozen=True, slots=True)
class Change:
    """What an action did to the bytes of every category: at its highest moment, and when the next one began."""

    at_peak: Bytes
    after: Bytes


class Unfolding:
    """Puts the memory of one device together again, step by step, from what short programs measured."""

    def __init__(self, folding: Folding, rest: Bytes) -> None:
        self._folding, self._level = folding, rest
        self._known: dict[tuple[int, int, int], Change] = {}  # by stage, microbatch and place in its path

    def step(self, number: int, actions: Sequence[Action], measured: Sequence[Change]) -> Iterator[MemorySample]:
        """The samples of one step of all `actions`, from the changes of those that were run, in their order.

        The times of samples are positions in the program.
        """
        ran = self._folding.later if number else self._folding.first
        for position, (action, change) in enumerate(zip(actions, self._changes(actions, ran, measured), strict=True)):
            peak: Any = _plus(self._level, change.at_peak)
            yield MemorySample(step=number, action=str(action), seconds=float(position), bytes=peak)
            self._level = _plus(self._level, change.after)

    def _changes(self, actions: Sequence[Action], ran: frozenset[int], measured: Sequence[Change]) -> Iterator[Change]:
        """Of every action: measured in this step, or like one that was; the like of an action may come behind it."""
        places = list(_places(actions))
        left = iter(measured)
        known = [next(left) if place is None or place[1] in ran else None for place in places]
        for place, change in zip(places, known, strict=True):
            if place is not None and change is not None:
                self._known.setdefault(place, change)
        for place, change in zip(places, known, strict=True):
            if change is not None:
                yield change
            elif place is not None:
                stage, microbatch, number = place
                yield self._known[stage, self._folding.like[stage, microbatch], number]


def _places(actions: Sequence[Action]) -> Iterator[tuple[int, int, int] | None]:
    """Stage and microbatch of every action, and its number in the path of that microbatch; None without one."""
    lengths: dict[tuple[int, int], int] = {}
    for action in actions:
        if action.microbatch is None:
            yield None
            continue
        flight = action.stage, action.microbatch
        number = lengths[flight] = lengths.get(flight, -1) + 1
        yield *flight, number


def _plus(one: Bytes, other: Bytes) -> Bytes:
    return tuple(a + b for a, b in zip(one, other, strict=True))
