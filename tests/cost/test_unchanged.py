"""Skipped copies of parameters to their home, unchanged since the last update."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from pipefit.memory.states import unchanged
from pipefit.schema.actions import Action, Kind, Subject
from pipefit.schema.devices import Member, Place, Share

HOST = Place([Share(Member.host(), 1)])
LAYERS = 6


def offload(first: int, stage: int, kind: str = "parameters") -> Action:
    """Build the copy of two layers' state, named after the first layer."""
    return Action(Kind.OFFLOAD, stage, subject=Subject(first, kind), place=HOST)


def moved(action: Action) -> tuple[Subject, ...]:
    """Return the states of both layers."""
    assert isinstance(action.subject, Subject)
    first, kind = action.subject
    return Subject(first, kind), Subject(first + 1, kind)


def drawn(rng: Random) -> list[Action]:
    """Draw copies and updates of runs of layers in any order, on two stages, some updates at the host."""
    found = list[Action]()
    for _ in range(rng.randint(2, 30)):
        stage, first = rng.randrange(2), rng.randrange(LAYERS // 2) * 2
        if rng.random() < 0.5:
            found.append(offload(first, stage, rng.choice(["parameters", "parameters", "optimizer"])))
            continue
        start = rng.randrange(LAYERS)
        layers = rng.choice([None, (start, rng.randint(start + 1, LAYERS))])
        found.append(Action(Kind.STEP, stage, layers=layers, place=rng.choice([None, None, HOST])))
    return found


def plainly(actions: list[Action]) -> set[int]:
    """Walk from every copy to the one before it of the same state and look for a device's update."""
    found = set()
    for position, action in enumerate(actions):
        if action.kind is not Kind.OFFLOAD or moved(action)[0].what != "parameters":
            continue
        own = {subject.layer for subject in moved(action)}
        changed = False
        for before in reversed(actions[:position]):
            if before == action:
                break
            if before.kind is Kind.STEP and before.place is None and before.stage == action.stage:
                changed |= before.layers is None or bool(own & set(range(*before.layers)))
        if not changed:
            found.add(position)
    return found


@pytest.mark.sample(50)
@pytest.mark.parametrize("seed", range(200))
def test_what_no_update_has_changed_is_not_copied(seed: int) -> None:
    """Unchanged copies are skipped for any runs of layers, in any order, on any stage."""
    actions, program = drawn(Random(seed)), SimpleNamespace(moved=moved)
    found: Any = unchanged(program, actions)  # type: ignore[arg-type]
    assert found == plainly(actions)
