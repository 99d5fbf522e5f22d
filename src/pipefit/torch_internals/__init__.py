"""Every private name of torch that pipefit uses, under a public name.

`tests/test_private_torch.py` checks that this torch still has each of them, and that no other module uses
one. This module has names that are cheap to import; `fake_tensors` has the others.
`patches` has every process-wide patch, as a context manager.
"""

import torch
import torch.distributed
from torch._C._profiler import _ExperimentalConfig as ExperimentalConfig
from torch._ops import HigherOrderOperator, OpOverload
from torch.autograd import ProfilerConfig, ProfilerState  # type: ignore[attr-defined]
from torch.autograd import _disable_profiler_legacy as stop_profiler  # type: ignore[attr-defined]
from torch.autograd import _enable_profiler_legacy as start_profiler  # type: ignore[attr-defined]
from torch.autograd.graph import _engine_run_backward as run_backward
from torch.nn.attention import _cur_sdpa_kernel_backends as enabled_kernels
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes

__all__ = [
    "DispatchKey",
    "DispatchKeySet",
    "ExperimentalConfig",
    "HigherOrderOperator",
    "OpOverload",
    "ProfilerConfig",
    "ProfilerState",
    "TorchDispatchMode",
    "backward_id",
    "backward_node",
    "below_autograd",
    "enabled_kernels",
    "end_coalescing",
    "has_kernel",
    "is_functorch_tensor",
    "negative_view",
    "pytree",
    "registrations",
    "retains_graph",
    "run_backward",
    "saved_tensors_hooks_on_top",
    "start_coalescing",
    "start_profiler",
    "stop_profiler",
    "storage_uses",
    "unscale_gradients",
    "without_dispatch_keys",
    "without_dispatch_modes",
    "without_torch_function",
    "wrapper_tensor",
]

backward_id = (
    torch._C._current_graph_task_id
)  # of the backward pass that runs in this thread; -1 if none does
backward_node = torch._C._current_autograd_node  # that autograd evaluates in this thread, or None
saved_tensors_hooks_on_top = torch._C._autograd._top_saved_tensors_default_hooks
retains_graph = torch._C._autograd._get_current_graph_task_keep_graph  # whether the present backward does
storage_uses = torch._C._storage_Use_Count  # references to a storage, by its `_cdata`
unscale_gradients = torch._amp_foreach_non_finite_check_and_unscale_
negative_view = torch._neg_view
below_autograd = torch._C._AutoDispatchBelowAutograd
without_torch_function = torch._C.DisableTorchFunction
wrapper_tensor = torch.Tensor._make_wrapper_subclass  # a tensor of a subclass, without memory
is_functorch_tensor = torch._C._functorch.is_functorch_wrapped_tensor
start_coalescing = torch.distributed.ProcessGroup._start_coalescing
end_coalescing = torch.distributed.ProcessGroup._end_coalescing
DispatchKey = torch._C.DispatchKey
DispatchKeySet = torch._C.DispatchKeySet
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
registrations = torch._C._dispatch_get_registrations_for_dispatch_key
without_dispatch_keys = torch._C._ExcludeDispatchKeyGuard
