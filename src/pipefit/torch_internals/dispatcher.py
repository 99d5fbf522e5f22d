"""Torch's dispatcher: dispatch keys, and which kernels are registered for them."""

import torch
from torch.nn.attention import _cur_sdpa_kernel_backends as enabled_kernels

# ---- The attention kernels that are enabled.

__all__ = ["enabled_kernels"]


_dispatcher__all__ = ["DispatchKey", "DispatchKeySet", "has_kernel", "registrations", "without_dispatch_keys"]

DispatchKey = torch._C.DispatchKey
DispatchKeySet = torch._C.DispatchKeySet
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
registrations = torch._C._dispatch_get_registrations_for_dispatch_key
without_dispatch_keys = torch._C._ExcludeDispatchKeyGuard
