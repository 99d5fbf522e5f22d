"""`tensor.data` in a forward that is traced, as an operation: read, a view without a graph; assigned, a copy into it.

Autograd does not see what is done by way of `.data`, and a trace would not either: it would take what was read for a
constant of the model, and lose what was written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from pipefit.capture.refusals import Refusal


@contextmanager
def data_followed() -> Iterator[None]:
    """Inside, a trace follows what is read from `tensor.data` and what is written there."""
    with mock.patch.object(Tensor, "data", property(Tensor.detach, _assign)):
        yield


def _assign(tensor: Tensor, value: Tensor) -> None:
    """Write `value` into `tensor`.

    Raises:
        Refusal: it has another shape or type.
    """
    if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
        raise Refusal("it assigns to the data of a tensor what has another shape or type", "make a new tensor of it")
    with torch.no_grad():
        tensor.copy_(value)
