"""Moves of weight versions: weights that updates do not change any more are away but where microbatches need them.

    F3 B0 STASH0 OFFLOAD3 STEP0 WAIT_STASH0  F4 WAIT_OFFLOAD3 B1 ...  RELOAD3 WAIT_RELOAD3 B3

From the STASH on updates change a copy, so that the weights of the forward before it are free to go. They come back
before every pass that goes through them, run by run where passes have been cut at the edges of the layers, and leave
again behind it. Under PipeDream these are the backward and the second forward of one microbatch, of many only while the
pipeline fills. Its stage s of P holds P-s-1 older versions, and the last stage none. Under the two-version form
every stage has two versions at all times: the forwards of a step go through weights that the update in the step before
last has made, and of two updates later ones only the copy is worked on.

A copy is named by a microbatch in flight that went through the weights. Before a forward that is another one than its
own, so that weights stay where no other is in flight, as between two microbatches of the last stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipefit.actions import FORWARDS, Action, Kind
from pipefit.decisions import Decision, State
from pipefit.grids import Stage
from pipefit.schedule.bundles import Bundles, named, subjects_of
from pipefit.schedule.copies import Move, Timeline
from pipefit.schedule.state_copies import StateCopies

_AGAIN = frozenset({Kind.RECOMPUTE, Kind.BACKWARD})


@dataclass(slots=True)
class _Version:
    """The microbatches that go forward with these weights, and behind which positions their layers have been copied."""

    microbatches: list[int] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)


class _Use(NamedTuple):
    """The passes of a microbatch through some layers that need them at once: a forward, or all that follow it."""

    positions: tuple[int, ...]
    microbatch: int
    is_forward: bool


def version_moves(timeline: Timeline, decisions: Sequence[Decision], stage: Stage, bundles: Bundles) -> Iterator[Move]:
    """What a rank of one stage moves away and back by decisions to offload versions of its weights."""
    if not decisions:
        return
    versions, copies = _versions(timeline, stage), StateCopies(timeline)
    for decision in decisions:
        assert isinstance(decision.subject, State)
        subject = named(subjects_of(decision.subject), bundles)
        for version in versions:
            for microbatch, free, users in _gaps(timeline, decision.subject, version):
                offload = Action(Kind.OFFLOAD, decision.stage, microbatch, None, subject, decision.place)
                if move := copies.gap(offload, free, users, behind=decision.behind, ahead=decision.ahead):
                    yield move


def _versions(timeline: Timeline, stage: Stage) -> list[_Version]:
    """The versions of a stage's weights that microbatches go forward with, in their order."""
    newest = current = _Version()
    found = [current]
    for position, action in enumerate(timeline.actions):
        begins = action.layers is None or action.layers[0] == stage.start
        if action.kind in FORWARDS and begins and action.microbatch is not None:
            current.microbatches.append(action.microbatch)
        elif action.kind is Kind.STASH and action.wait:
            current = newest
        elif action.kind is Kind.STASH:
            if newest is current:
                newest = _Version()
                found.append(newest)
            current.copied.append(position)
    return found


def _gaps(timeline: Timeline, state: State, version: _Version) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """When nobody needs the weights of these layers: by the name of which microbatch, from which position on, and the
    positions of its next use.
    """
    copied = [position for position in version.copied if _touches(timeline.actions[position], state)]
    if not copied:
        return
    free = max(copied)
    uses = sorted(use for m in version.microbatches for use in _uses(timeline, state, m, free))
    for number, use in enumerate(uses):
        later = (one.microbatch for one in uses[number:] if not one.is_forward)
        name = next((m for m in later if _computes(timeline, m)[0] < free), None)
        if use.positions[0] > free and name is not None:
            yield name, free, use.positions
        free = max(free, use.positions[-1])


def _uses(timeline: Timeline, state: State, microbatch: int, since: int) -> Iterator[_Use]:
    """Where a microbatch goes through the layers behind a position: forward, and in all that follows."""
    for kinds in (FORWARDS, _AGAIN):
        passes = ((number, timeline.actions[number]) for number in _computes(timeline, microbatch) if number > since)
        found = tuple(number for number, action in passes if action.kind in kinds and _touches(action, state))
        if found:
            yield _Use(found, microbatch, kinds is FORWARDS)


def _computes(timeline: Timeline, microbatch: int) -> list[int]:
    """Where the only stage of a rank computes for a microbatch, its forward first."""
    return timeline.computes[timeline.actions[0].stage][microbatch]


def _touches(action: Action, state: State) -> bool:
    """Whether an action is one of some of the layers of a state."""
    first, end = action.layers or (state.start, state.stop)
    return first < state.stop and state.start < end
