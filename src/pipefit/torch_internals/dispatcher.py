"""Torch's dispatcher, with the kernels registered for its keys, and autograd's small profiler."""

import torch
from torch._C._profiler import _ExperimentalConfig as ExperimentalConfig
from torch.autograd import ProfilerConfig, ProfilerState  # type: ignore[attr-defined]
from torch.autograd import _disable_profiler_legacy as stop_profiler  # type: ignore[attr-defined]
from torch.autograd import _enable_profiler_legacy as start_profiler  # type: ignore[attr-defined]
from torch.nn.attention import _cur_sdpa_kernel_backends as enabled_kernels

__all__ = [
    "DispatchKey",
    "DispatchKeySet",
    "ExperimentalConfig",
    "ProfilerConfig",
    "ProfilerState",
    "enabled_kernels",
    "has_kernel",
    "registrations",
    "start_profiler",
    "stop_profiler",
    "without_dispatch_keys",
]

DispatchKey = torch._C.DispatchKey
DispatchKeySet = torch._C.DispatchKeySet
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
registrations = torch._C._dispatch_get_registrations_for_dispatch_key
without_dispatch_keys = torch._C._ExcludeDispatchKeyGuard
