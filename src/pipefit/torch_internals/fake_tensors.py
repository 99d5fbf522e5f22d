"""Fake tensors, and the fake device on which they are."""

import torch
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
