"""Random numbers that a forward draws elsewhere than from torch, refused: from Python's `random` or from numpy.

A trace would draw once and keep those numbers for ever, and a recomputation would draw others than the first forward.
A draw is seen by the state that it changes; 20 microseconds for each call of a module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pipefit.capture.random_state import python_state
from pipefit.capture.refusals import Refusal

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
