"""The random generators that a forward may draw from without naming one: torch's, Python's and numpy's."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from pipefit.capture.refusals import Refusal
from pipefit.schema.profile import Target


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


# ----------------------------------------------------------------------------------------------------
# Random numbers that a forward draws elsewhere than from torch, refused: from Python's `random` or from
# numpy.
#
# A trace would draw once and keep those numbers for ever, and a recomputation would draw others than the
# first forward. A draw is seen by the state that it changes; 20 microseconds for each call of a module.

_REASON = (
    "its forward draws random numbers from Python's or numpy's generator, which a trace would freeze and a "
    "recomputation would not repeat"
)
_REMEDY = "draw them with torch (torch.rand), whose draws plans repeat, or turn that off"


@contextmanager
def torch_draws_alone() -> Iterator[None]:
    """Inside, a layer runs.

    Raises:
        Refusal: it has drawn random numbers from another generator than torch's.
    """
    before = python_state()
    yield
    if python_state() != before:
        raise Refusal(_REASON, _REMEDY)


def refuse_foreign_draws(module: nn.Module) -> None:
    """Let `module` and its parts, a copy that is going to be traced, raise a `Refusal` in the part that draws."""
    begun: list[object] = []

    def begin(*_: Any) -> None:
        begun.append(python_state())

    def end(part: nn.Module, *_: Any) -> None:
        if begun.pop() != python_state():
            raise Refusal(_REASON, _REMEDY, module=part)

    for part in module.modules():
        part.register_forward_pre_hook(begin)
        part.register_forward_hook(end)
