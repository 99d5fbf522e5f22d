"""`torch.autocast` for CUDA on tensors that are elsewhere: on the CPU while a model is traced, on a fake device.

A trace has the types that its module computes with, wherever the module asks for them (`x.to(y.dtype)`). Under
autocast these depend on the device: on CUDA a layer norm returns float32, on the CPU what it is given. So what is to
run on a GPU is traced, and compared with its module, under CUDA's casts (`cuda_casts`), on CPU tensors.

Code that names the device `cuda` means the one that stands for it. Without that, `torch.autocast("cuda", ...)` would be
off where there is no GPU, and would look at the GPU where there is one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.amp import autocast_mode

from pipefit.capture.cuda_casts import CudaCasts
from pipefit.profiles import Target

_CUDA, _CPU_KEY = "cuda", "AutocastCPU"

State = tuple[bool, torch.dtype]


@contextmanager
def casting_for(target: Target) -> Iterator[None]:
    """Inside, autocast treats tensors of the CPU as it treats those of the target.

    Not for several threads at once: torch has one table of kernels for all.
    """
    with ExitStack() as stack:
        if target == _CUDA:
            stack.enter_context(as_on_cuda("cpu", stack.enter_context(_casts_on_the_cpu())))
        else:
            stack.enter_context(_off_for_cuda())
        yield


@contextmanager
def _casts_on_the_cpu() -> Iterator[CudaCasts]:
    """Inside, CUDA's kernels for autocast take the places of those for the CPU."""
    casts = CudaCasts("cpu", _CPU_KEY)
    own = torch._C._dispatch_get_registrations_for_dispatch_key(_CPU_KEY)
    kernels = dict.fromkeys(own, torch.library.fallthrough_kernel) | dict(casts.kernels())
    libraries: dict[str, torch.library.Library] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that kernels are replaced
        for name, kernel in kernels.items():
            namespace, _, operator = name.partition("::")
            if namespace not in libraries:
                libraries[namespace] = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
            libraries[namespace].impl(operator, kernel, _CPU_KEY, allow_override=True)  # type: ignore[no-untyped-call]
    try:
        yield casts
    finally:
        for library in libraries.values():
            library._destroy()  # type: ignore[no-untyped-call]


@contextmanager
def as_on_cuda(device_type: str, casts: CudaCasts) -> Iterator[None]:
    """Inside, autocast for `cuda` is autocast for `device_type`, and clearing the cache of casts clears theirs too."""
    with ExitStack() as stack:
        for owner, name, make in (
            (torch, "clear_autocast_cache", lambda clear: _both(casts.clear, clear)),
            (autocast_mode.autocast, "__init__", lambda begin: _renamed(begin, device_type)),
            (autocast_mode.autocast, "__enter__", lambda enter: _entered(enter, device_type)),
            (autocast_mode.autocast, "__exit__", _left),
            (autocast_mode, "_cast", lambda cast: _cast_on(cast, device_type)),
        ):
            stack.enter_context(mock.patch.object(owner, name, make(getattr(owner, name))))
        yield


def _off_for_cuda() -> Any:
    """Inside, autocast for `cuda` is off, and does not ask whether there is a GPU."""
    begin = autocast_mode.autocast.__init__

    def off(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        begin(self, device_type, dtype, enabled and device_type != _CUDA, cache_enabled)

    return mock.patch.object(autocast_mode.autocast, "__init__", off)


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both


def _renamed(begin: Callable[..., None], stand_in: str) -> Callable[..., None]:
    """The constructor of `torch.autocast`, which takes `cuda` for the device that stands for it."""

    def renamed(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        begin(self, stand_in if device_type == _CUDA else device_type, dtype, enabled, cache_enabled)

    return renamed


def _entered(enter: Callable[[Any], Any], device_type: str) -> Callable[[Any], Any]:
    """On entering, what is asked about autocast for `cuda` becomes true of it too."""

    def entered(self: Any) -> Any:
        found = enter(self)
        if self.device == device_type:
            of_cuda = torch.is_autocast_enabled(_CUDA), torch.get_autocast_dtype(_CUDA)
            self.of_cuda = [*vars(self).get("of_cuda", ()), of_cuda]  # several, where several devices stand for it
            _tell_of_cuda((torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)))
        return found

    return entered


def _left(leave: Callable[..., Any]) -> Callable[..., Any]:
    def left(self: Any, *error: Any) -> Any:
        if before := vars(self).get("of_cuda"):
            _tell_of_cuda(before.pop())
        return leave(self, *error)

    return left


def _tell_of_cuda(state: State) -> None:
    torch.set_autocast_enabled(_CUDA, state[0])
    torch.set_autocast_dtype(_CUDA, state[1])


def _cast_on(cast: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """How `custom_fwd` casts what it is given."""
    return lambda value, kind, dtype: cast(value, device_type if kind == _CUDA else kind, dtype)
