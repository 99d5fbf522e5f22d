"""Moves of weight versions: older weights that only microbatches in flight still need are away until they go backward.

    F3 B0 STASH0 STEP0 WAIT_STASH0 OFFLOAD3  F4 WAIT_OFFLOAD3 B1 ...  RELOAD3 WAIT_RELOAD3 B3

With the join of a STASH forwards begin to use newer weights, and those of the forward before it are free to go. They
come back before the backward, or the second forward, of the microbatch that went through them. Where several do, as
while the pipeline fills, they leave again between two of them. Good under PipeDream, whose stage s of P holds P-s-1
older versions; the last stage has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pipefit.actions import FORWARDS, Action, Kind
from pipefit.decisions import Decision, State
from pipefit.grids import Stage
from pipefit.schedule.bundles import Bundles, named, subjects_of
from pipefit.schedule.copies import Move, Timeline


@dataclass(slots=True)
class _Version:
    """The microbatches that went forward with these weights, and from which position on no other one will."""

    microbatches: list[int] = field(default_factory=list)
    retired: int | None = None


def version_moves(timeline: Timeline, decisions: Sequence[Decision], stage: Stage, bundles: Bundles) -> Iterator[Move]:
    """What a rank of one stage moves away and back by decisions to offload versions of its weights."""
    versions = _versions(timeline, stage) if decisions else []
    for decision in decisions:
        assert isinstance(decision.subject, State)
        subject = named(subjects_of(decision.subject), bundles)
        for version in versions:
            for microbatch, free, users in _gaps(timeline, decision.subject, version):
                offload = Action(Kind.OFFLOAD, decision.stage, microbatch, None, subject, decision.place)
                yield from _move(timeline, decision, offload, free, users)


def _versions(timeline: Timeline, stage: Stage) -> list[_Version]:
    """The versions of a stage's weights that microbatches go forward with, in their order."""
    newest = current = _Version()
    found = [current]
    for position, action in enumerate(timeline.actions):
        begins = action.layers is None or action.layers[0] == stage.start
        if action.kind in FORWARDS and begins and action.microbatch is not None:
            current.microbatches.append(action.microbatch)
        elif action.kind is Kind.STASH and not action.wait:
            newest = _Version()
            found.append(newest)
        elif action.kind is Kind.STASH:
            current.retired, current = position, newest
    return found


def _gaps(timeline: Timeline, state: State, version: _Version) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """When nobody needs the weights of these layers: until which microbatch, from which position on, and its users."""
    if version.retired is None:
        return
    free = version.retired
    needed = (
        (users, microbatch)
        for microbatch in version.microbatches
        if (users := _users(timeline, state, microbatch, version.retired))
    )
    for users, microbatch in sorted(needed):
        yield microbatch, free, users
        free = max(free, users[-1])


def _users(timeline: Timeline, state: State, microbatch: int, after: int) -> tuple[int, ...]:
    """Where a microbatch goes through the layers again, in a second forward or backward."""
    found = []
    for number in timeline.computes[timeline.actions[0].stage][microbatch]:
        action = timeline.actions[number]
        first, end = action.layers or (state.start, state.stop)
        again = action.kind in (Kind.RECOMPUTE, Kind.BACKWARD) and number > after
        if again and first < state.stop and state.start < end:
            found.append(number)
    return tuple(found)


def _move(timeline: Timeline, decision: Decision, offload: Action, free: int, users: tuple[int, ...]) -> Iterator[Move]:
    """The move in a gap, unless the offload could not end before the reload."""
    begun, first = timeline.unit_before(free), timeline.unit(users[0]) - decision.ahead
    if begun + decision.behind >= first:
        return
    freed = timeline.units[begun + decision.behind][1] if decision.behind else free
    back = timeline.before_waiting(timeline.units[first][0]) if decision.ahead else users[0]
    if freed < back:
        yield Move(offload, free, freed, back, users)
