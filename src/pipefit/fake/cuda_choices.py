"""What torch decides by asking whether a tensor is on `cuda`, decided for `fakecuda` in the same way.

- The shapes of some results, and what some operators keep for backward (`logsigmoid`, `embedding_bag`, transforms):
  torch's Python code for fake tensors asks `is_cuda`, or `device_hint`. So does the code of models.
- `softmax` of float16 into float32, which on CUDA is one kernel, and elsewhere a conversion and a kernel.
- Operators that are composed of others on devices without a kernel of their own, which CUDA has (`KERNELS`).
- Attention has a file of its own (`attention_choice`).

Torch's C++ code asks too; what else it decides so is not known to matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, _meta_registrations
from torch._subclasses.fake_tensor import FakeTensor

aten = torch.ops.aten
KERNELS = ("_fused_rms_norm", "mish_backward", "silu_backward")


def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """`softmax` as its CUDA path composes it."""
    return _normalised(aten._softmax.default, x, dim, dtype)


def log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """`log_softmax` as its CUDA path composes it."""
    return _normalised(aten._log_softmax.default, x, dim, dtype)


def _normalised(kernel: Callable[..., Any], x: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    half_to_float = x.dtype == torch.float16 and dtype == torch.float32
    found: Tensor = kernel(x if half_to_float or dtype is None else x.to(dtype), dim, half_to_float)
    return found


def kernel(*_: object, **__: object) -> None:
    """Stands for a kernel of CUDA's: that there is one decides, and fake tensors never reach it."""
    raise NotImplementedError("a kernel of a device without bytes")


@contextmanager
def counting_as_cuda(device_type: str) -> Iterator[None]:
    """Inside, Python code that asks a fake tensor of that device type whether it is on `cuda` hears that it is."""

    def is_cuda(tensor: FakeTensor) -> bool:
        return tensor.device.type in ("cuda", device_type)

    def device_hint(tensor: Any) -> str:
        found: str = hint(tensor)
        return "cuda" if found == device_type else found

    hint = _meta_registrations.device_hint
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(FakeTensor, "is_cuda", property(is_cuda)))
        stack.enter_context(mock.patch.object(_meta_registrations, "device_hint", device_hint))
        yield
