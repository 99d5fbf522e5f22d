"""Fake tensors, and the fake device on which they are."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch import _meta_registrations as meta_registrations
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.utils import _foreach_utils as foreach_utils

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorConverter",
    "FakeTensorMode",
    "PrivateUse1Hooks",
    "active_fake_mode",
    "default_device",
    "fake_tensor_like",
    "foreach_utils",
    "in_kernel_invocation_manager",
    "meta_registrations",
    "privateuse1_name",
    "without_torch_dispatch",
]

PrivateUse1Hooks = torch._C._acc.PrivateUse1Hooks
privateuse1_name = torch._C._get_privateuse1_backend_name
default_device = torch._C._get_default_device
without_torch_dispatch = torch._C._DisableTorchDispatch


def fake_tensor_like(attributes: Mapping[str, Any], elem: Tensor, device: torch.device) -> FakeTensor:
    """Return `FakeTensor(mode, elem, device)` in a third of its time.

    `attributes` are those of another new fake tensor of this mode and device.
    """
    made: FakeTensor = Tensor._make_subclass(
        FakeTensor, elem, elem.requires_grad, dispatch_device=True, device_for_backend_keys=device
    )
    if attributes["fake_mode"]._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
    else:
        torch._C._set_throw_on_mutable_data_ptr(made)
    vars(made).update(attributes)
    return made
