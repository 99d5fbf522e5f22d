"""Calls of `contiguous` in a traced model, recorded where they have nothing to do.

Python's `Tensor.contiguous` returns a contiguous tensor before torch sees an operation, and of one sample much is
contiguous that is not of several, as a slice of each. A trace should have the same operations for any number of
samples. The operation itself returns such a tensor too, so that a layer that has it computes and holds nothing more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class RecordingContiguous(TorchFunctionMode):
    """Inside, every call of `contiguous` is an operation, which a trace sees."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = torch.ops.aten.contiguous.default if func is Tensor.contiguous else func
        return called(*args, **(kwargs or {}))
