"""The random generators that a forward may draw from without naming one: torch's, Python's and numpy's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def python_state() -> tuple[object, ...]:
    """The states of Python's and numpy's generators, to see by whether something was drawn from them."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (name, keys.tobytes(), *rest)  # type: ignore[union-attr]  # of the legacy form


@contextmanager
def put_back() -> Iterator[None]:
    """Afterwards the generators of the CPU are as they were."""
    own, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(own)
        np.random.set_state(numpys)


def seed_all(seed: int) -> None:
    """Seed the generators of the CPU; torch's of a GPU is left alone."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
