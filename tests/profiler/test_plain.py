"""Comparison of plain attributes by their contents."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipefit.profiler.feedback import changed_name, plain_attributes

CHANGES: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "list": ([1], lambda held: held.append(2)),
    "dictionary": ({"a": [1]}, lambda held: held["a"].append(2)),
    "set": ({1}, lambda held: held.add(2)),
    "object": (SimpleNamespace(seen=SimpleNamespace(count=0)), lambda held: setattr(held.seen, "count", 1)),
    "array": (np.zeros(3), lambda held: held.fill(1.0)),
    "Python's generator": (random.Random(0), lambda held: held.random()),
    "NumPy's generator": (np.random.default_rng(0), lambda held: held.random()),
    "NumPy's older generator": (np.random.RandomState(0), lambda held: held.rand()),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_inside_is_seen(what: str) -> None:
    """A change inside any container is seen; without a change, two snapshots are equal."""
    held, change = CHANGES[what]
    module = nn.Sequential(nn.Linear(1, 1))
    module[0].held = held
    before = plain_attributes(module)
    assert changed_name(before, plain_attributes(module)) is None
    change(held)
    assert changed_name(before, plain_attributes(module)) == "0.held"


def test_another_object_in_its_place_is_seen() -> None:
    """Another object is seen even if it equals the first; new attributes and lost ones are seen too."""
    module = nn.Linear(1, 1)
    module.held = SimpleNamespace()
    before = plain_attributes(module)
    module.held = SimpleNamespace()
    assert changed_name(before, plain_attributes(module)) == "held"
    del module.held
    assert changed_name(before, plain_attributes(module)) == "held"
    assert changed_name(plain_attributes(module), before) == "held"


def test_what_holds_itself_ends() -> None:
    """A list in itself ends, and tensors are compared elsewhere."""
    module = nn.Linear(1, 1)
    module.held = [torch.zeros(2)]
    module.held.append(module.held)
    before = plain_attributes(module)
    module.held[0].add_(1.0)
    assert changed_name(before, plain_attributes(module)) is None
