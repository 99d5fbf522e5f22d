"""A forward that is recorded as in training, but keeps nothing for a backward: that of a run to be recomputed.

Some kernels (attention, recurrent layers, matrix products) differ in their last bits where no graph is recorded, so a
forward that will run again records one, and drops what it would save. Numbers are the exception: for the backward of
`x * 2.0` autograd keeps the 2.0 as long as the graph exists, which a meter must know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor


@contextmanager
def saving_nothing() -> Iterator[None]:
    """Inside, autograd records a graph that keeps no tensors, so that it cannot run backward."""
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_drop, _nothing):
        yield


def saves_nothing() -> bool:
    """Whether this is inside `saving_nothing`."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0] is _drop


def _drop(tensor: Tensor) -> None:
    """What is saved instead of a tensor."""


def _nothing(_: None) -> NoReturn:
    raise AssertionError("a forward that saves nothing has no backward")
