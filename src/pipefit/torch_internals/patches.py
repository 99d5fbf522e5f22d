"""Every patch of other packages' functions that pipefit makes, each for the body of a context manager.

A patch holds for the whole process. `tests/test_patches.py` checks that each one still has its effect, and
that the patched attributes are as before when its body ends.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, UntypedStorage, fx, nn
from torch.amp import autocast_mode
from torch.distributions import Distribution
from torch.optim import Optimizer
from torch.overrides import resolve_name
from torch.utils import checkpoint

from pipefit.torch_internals import without_dispatch_modes
from pipefit.torch_internals.fake_tensors import FakeTensor, meta_registrations


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute in the body; an inherited one is inherited again after it."""
    inherited, before = name not in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


# ---- Copies


@contextmanager
def deep_copies(of_tensor: Callable[..., Any], of_types: Mapping[type, Callable[..., Any]]) -> Iterator[None]:
    """Let `copy.deepcopy` in the body copy tensors by `of_tensor`, and other types by `of_types`.

    All are called with an object and the memo of the copy.
    """
    dispatch: dict[type, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]
    before = dict(dispatch)
    with (
        _replaced(Tensor, "__deepcopy__", of_tensor),
        _replaced(nn.Parameter, "__deepcopy__", of_tensor),
    ):
        dispatch.update(of_types)
        try:
            yield
        finally:
            dispatch.clear()
            dispatch.update(before)


# ---- Calls that a profiled forward makes

Call = Literal[
    "checkpoint",
    "reentrant checkpoint",
    "fork",
    "compiled",
    "inference_mode",
    "tensor hook",
    "backward",
    "saved_tensors_hooks",
    "data",
]
_GENERATOR = (  # the first from torch 2.14 on; the second only calls it there
    "_checkpoint_without_reentrant_generator_impl"
    if hasattr(checkpoint, "_checkpoint_without_reentrant_generator_impl")
    else "_checkpoint_without_reentrant_generator"
)


@contextmanager
def intercepted(calls: Mapping[Call, Callable[[Any], Any]]) -> Iterator[None]:
    """Replace calls in the body; each entry makes the replacement from the present function.

    "data" is the property `Tensor.data`. Calls that are impossible here, such as `os.fork` on some systems or
    those of a compiler that was never loaded, stay out.
    """
    owners: dict[Call, tuple[Any, str]] = {
        "checkpoint": (checkpoint, _GENERATOR),
        "reentrant checkpoint": (checkpoint.CheckpointFunction, "apply"),
        "fork": (os, "fork"),
        "compiled": (sys.modules.get("torch._dynamo.eval_frame"), "set_eval_frame"),
        "inference_mode": (torch.inference_mode, "__enter__"),
        "tensor hook": (Tensor, "register_hook"),
        "backward": (torch.autograd, "_engine_run_backward"),
        "saved_tensors_hooks": (torch.autograd.graph.saved_tensors_hooks, "__enter__"),
        "data": (Tensor, "data"),
    }
    with ExitStack() as stack:
        for call, make in calls.items():
            owner, name = owners[call]
            if hasattr(owner, name):
                stack.enter_context(_replaced(owner, name, make(getattr(owner, name))))
        yield


# ---- Autocast


@contextmanager
def autocast_calls(
    *,
    begin: Callable[[Any], Any] | None = None,
    enter: Callable[[Any], Any] | None = None,
    leave: Callable[[Any], Any] | None = None,
    cast: Callable[[Any], Any] | None = None,
    clear: Callable[[Any], Any] | None = None,
) -> Iterator[None]:
    """Replace methods of `torch.autocast` and functions beneath it in the body.

    Each argument makes the replacement from the present function: `__init__`, `__enter__`, `__exit__`, the
    cast of `custom_fwd`, and `torch.clear_autocast_cache`.
    """
    with ExitStack() as stack:
        for owner, name, make in (
            (autocast_mode.autocast, "__init__", begin),
            (autocast_mode.autocast, "__enter__", enter),
            (autocast_mode.autocast, "__exit__", leave),
            (autocast_mode, "_cast", cast),
            (torch, "clear_autocast_cache", clear),
        ):
            if make is not None:
                stack.enter_context(_replaced(owner, name, make(getattr(owner, name))))
        yield


# ---- Devices
#
# Traces and counts must be equal on every machine, and use no GPU. Torch's tracer saves and restores the
# random state of a GPU, which creates a context there, and a model may compute something else on a machine
# with GPUs. Both query `torch.cuda.is_available()` first.


@contextmanager
def without_gpus() -> Iterator[None]:
    """Let torch report in the body that this machine does not have a GPU."""
    with (
        _replaced(torch.cuda, "is_available", lambda: False),
        _replaced(torch.cuda, "device_count", lambda: 0),
    ):
        yield


@contextmanager
def counting_as_cuda(device_type: str) -> Iterator[None]:
    """Let fake tensors of this device type count as CUDA tensors, of an A100, in Python code of the body."""

    def is_cuda(tensor: FakeTensor) -> bool:
        return tensor.device.type in ("cuda", device_type)

    def device_hint(tensor: Any) -> str:
        result: str = hint(tensor)
        return "cuda" if result == device_type else result

    hint = meta_registrations.device_hint
    with (
        _replaced(FakeTensor, "is_cuda", property(is_cuda)),
        _replaced(meta_registrations, "device_hint", device_hint),
        _replaced(torch.cuda, "get_device_capability", lambda *_: (8, 0)),
    ):
        yield


# ---- Torch's checks of values, which traces and fake tensors do not have
#
# Distributions check their arguments, and the Gaussian likelihood that no variance is negative. A trace
# leaves these checks out; over fake tensors every condition would hold, a failed check too.

_any, _likelihood = torch.any, F.gaussian_nll_loss


@contextmanager
def unchecked_arguments() -> Iterator[None]:
    """Turn off argument validation of torch's distributions in the body, unless a model requests it."""
    with _replaced(Distribution, "_validate_args", False):
        yield


@contextmanager
def no_negative_variance() -> Iterator[None]:
    """Let `gaussian_nll_loss` find no negative variances in the body."""
    resolve_name(_any)  # torch caches its functions' names on the first call
    with _replaced(F, "gaussian_nll_loss", _unchecked):
        yield


@functools.wraps(_likelihood)
def _unchecked(*args: Any, **options: Any) -> Tensor:
    with _replaced(torch, "any", _found_nothing):
        return _likelihood(*args, **options)


def _found_nothing(*args: Any, **options: Any) -> bool:
    _any(*args, **options)
    return False


# ---- Loss scaling


@contextmanager
def always_stepping() -> Iterator[None]:
    """Let every `GradScaler` in the body step its optimizer without a look at the gradients.

    That is what it does unless a gradient is infinite or nan.
    """
    with _replaced(torch.amp.GradScaler, "_maybe_opt_step", _step):
        yield


def _step(_: object, optimizer: Optimizer, __: object, *args: Any, **kwargs: Any) -> Any:
    return optimizer.step(*args, **kwargs)


@contextmanager
def parameters_copied_alone() -> Iterator[None]:
    """Let `copy.deepcopy` in the body leave out gradients of fake parameters, as those of real ones."""
    with _replaced(FakeTensor, "__deepcopy__", _without_gradient):
        yield


def _without_gradient(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return Tensor.__deepcopy__(tensor, memo)  # type: ignore[no-untyped-call,no-any-return]
    if id(tensor) not in memo:
        memo[id(tensor)] = nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
    return memo[id(tensor)]  # type: ignore[no-any-return]


# ---- Known values of fake tensors
#
# They are an attribute of the tensor, which `copy.deepcopy` would copy as a fake tensor, and which stays when
# `tensor.data` is set.


@contextmanager
def values_known_of_originals() -> Iterator[None]:
    """Let copies by `copy.deepcopy` in the body have no known values, nor tensors whose data is replaced."""
    data: Any = Tensor.data
    copied: Callable[..., Any] = Tensor.__deepcopy__

    def set_data(tensor: Tensor, other: Tensor) -> None:
        if isinstance(tensor, FakeTensor):
            tensor.constant = None
        data.__set__(tensor, other)

    def copy_alone(tensor: Tensor, memo: dict[int, Any]) -> Any:
        if not isinstance(tensor, FakeTensor) or tensor.constant is None:
            return copied(tensor, memo)
        known, tensor.constant = tensor.constant, None
        try:
            return copied(tensor, memo)
        finally:
            tensor.constant = known

    with (
        _replaced(Tensor, "__deepcopy__", copy_alone),
        _replaced(Tensor, "data", property(data.__get__, set_data)),
    ):
        yield


# ---- Numbers in texts


@contextmanager
def formatted_numbers() -> Iterator[None]:
    """Let `f"{tensor:.3f}"` in the body format the number of a fake tensor, as that of a real one."""
    with _replaced(FakeTensor, "__format__", _formatted):
        yield


def _formatted(tensor: FakeTensor, form: str) -> str:
    if tensor.dim():
        return format(str(tensor), form)
    if tensor.constant is None and tensor.is_floating_point():
        return format(1.0, form)  # any number: a text is no condition
    return format(tensor.item(), form)


# ---- Traces


@contextmanager
def without_code_lines() -> Iterator[None]:
    """Omit lines of code from traces in the body; torch 2.11 cannot omit them, and takes a quarter longer."""
    name = "do_not_emit_stack_traces"
    with _replaced(fx.config, name, True) if hasattr(fx.config, name) else nullcontext():
        yield


@contextmanager
def recompiled_once() -> Iterator[None]:
    """Let `torch.export` write a graph's code once in the body, not after each region that it inlines.

    Regions begin where gradients or autocast are switched, so a trace would take time that is quadratic in
    the number of blocks. The pass that inlines regions writes the code at its end.
    """
    from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass

    name = "node_inline_"
    with ExitStack() as stack:
        for passes in (replace_set_grad_with_hop_pass, replace_autocast_with_hop_pass):
            if hasattr(passes, name):
                stack.enter_context(_replaced(passes, name, functools.partial(_inlined, passes.node_inline_)))
        yield


def _inlined(inline: Callable[[fx.Node], Any], node: fx.Node) -> Any:
    with _replaced(node.graph.owning_module, "recompile", lambda: None):
        return inline(node)


# ---- Hugging Face's transformers, if they have been imported


@contextmanager
def eager_masks(positions: Callable[[Any], Any]) -> Iterator[None]:
    """Let a transformers model that is traced in the body build the masks that it builds eagerly.

    `positions` makes the replacement of the function that finds packed sequences in positions.
    """
    masks = sys.modules.get("transformers.masking_utils")
    with ExitStack() as stack:
        for name, make in (
            ("is_torchdynamo_exporting", lambda _: lambda: False),
            ("find_packed_sequence_indices", positions),
        ):
            if hasattr(masks, name):
                stack.enter_context(_replaced(masks, name, make(getattr(masks, name))))
        yield


@contextmanager
def eager_branches() -> Iterator[None]:
    """Let transformers read values of fake tensors in the body, as it reads those of real ones."""
    loaded = [module for name, module in list(sys.modules.items()) if name.startswith("transformers.")]
    with ExitStack() as stack:
        for module in loaded:
            for name in ("is_tracing", "is_torchdynamo_exporting"):
                if name in vars(module):
                    stack.enter_context(_replaced(module, name, lambda *_: False))
        yield


@contextmanager
def caches_without_copies() -> Iterator[None]:
    """Let an empty transformers cache keep keys and values themselves in the body, instead of copies."""
    caches = sys.modules.get("transformers.cache_utils")
    with nullcontext() if caches is None else _replaced(caches, "torch", _TorchWithoutCopies()):
        yield


class _TorchWithoutCopies:
    """The module `torch`, except that `cat` of a tensor and empty ones returns the tensor itself."""

    @staticmethod
    def cat(tensors: Sequence[Tensor], *args: Any, **options: Any) -> Tensor:
        filled = [tensor for tensor in tensors if tensor.numel()]
        return filled[0] if len(filled) == 1 else torch.cat(list(tensors), *args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


# ---- Sharded parameters in a dry run


@contextmanager
def resizes_seen(resized: Callable[[UntypedStorage], None]) -> Iterator[None]:
    """Call `resized` in the body after each change of a storage's size, which no operation shows."""
    before = UntypedStorage.resize_

    def resize(storage: UntypedStorage, size: int) -> Any:
        result = before(storage, size)
        resized(storage)
        return result

    with _replaced(UntypedStorage, "resize_", resize):
        yield


@contextmanager
def forms_apart() -> Iterator[None]:
    """Let DTensors in the body work out the forms of results outside of dispatch modes, as real ones do."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    before = ShardingPropagator._propagate_tensor_meta_non_cached

    def form(*args: Any) -> Any:
        with without_dispatch_modes():
            return before(*args)

    with _replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", form):
        yield
