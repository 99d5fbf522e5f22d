"""The random generators that a forward may use without naming one: torch's, Python's and numpy's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from pipefit.capture.refusals import DRAWS, Refusal
from pipefit.schema.profile import Target


def python_state() -> tuple[object, ...]:
    """Return the states of Python's and numpy's generators, whose changes show draws."""
    numpys: Any = np.random.get_state()
    kind, key, *numbers = numpys
    return random.getstate(), kind, key.tobytes(), numbers


@contextmanager
def put_back() -> Iterator[None]:
    """Restore the CPU's generators after the body."""
    own, numpys = random.getstate(), np.random.get_state(legacy=False)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(own)
        np.random.set_state(numpys)


def seed_torch(seed: int, *, target: Target) -> None:
    """Seed torch's generators like `torch.manual_seed`; those of GPUs only for the target `cuda`."""
    (torch.manual_seed if target == "cuda" else torch.default_generator.manual_seed)(seed)


def seed_all(seed: int) -> None:
    """Seed the CPU's generators: torch's, Python's and numpy's."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


# ---- Random draws from Python's `random` or numpy, which are refused
#
# A trace would draw once and keep the numbers, and a recomputation would draw others than the first forward.
# Draws are detected by changes of state, in 20 microseconds for each call of a module.


@contextmanager
def torch_draws_alone() -> Iterator[None]:
    """Check that a layer running in the body draws from torch's generators only.

    Raises:
        Refusal: it drew from another generator.
    """
    before = python_state()
    yield
    if python_state() != before:
        raise Refusal(*DRAWS)


def refuse_foreign_draws(module: nn.Module) -> None:
    """Let every part of `module`, a copy to be traced, raise a `Refusal` if it draws outside of torch."""
    begun: list[object] = []

    def begin(*_: Any) -> None:
        begun.append(python_state())

    def end(part: nn.Module, *_: Any) -> None:
        if begun.pop() != python_state():
            raise Refusal(*DRAWS, module=part)

    for part in module.modules():
        part.register_forward_pre_hook(begin)
        part.register_forward_hook(end)
