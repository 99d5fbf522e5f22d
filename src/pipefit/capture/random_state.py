"""The random generators that a forward may draw from without naming one: torch's, Python's and numpy's."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from pipefit.profiles import Target


def python_state() -> bytes:
    """The states of Python's and numpy's generators, to see by whether something was drawn from them."""
    return pickle.dumps((random.getstate(), np.random.get_state(legacy=False)))


@contextmanager
def put_back() -> Iterator[None]:
    """Afterwards the generators of the CPU are as they were."""
    own, numpys = random.getstate(), np.random.get_state(legacy=False)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(own)
        np.random.set_state(numpys)


def seed_torch(seed: int, *, target: Target) -> None:
    """Seed torch's generators, as `torch.manual_seed` does; those of GPUs only where GPUs compute."""
    (torch.manual_seed if target == "cuda" else torch.default_generator.manual_seed)(seed)


def seed_all(seed: int) -> None:
    """Seed the generators of the CPU; torch's of a GPU is left alone."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
