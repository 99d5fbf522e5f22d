"""CUDA's autocast on `fakecuda`: what `torch.autocast("cuda", ...)` does on a GPU, it does to tensors without bytes.

The casts themselves are those of `pipefit.capture.cuda_casts`. Code that names the device `cuda` means the fake one, so
that a layer which turns autocast off for a part of itself, or asks whether it is on, is told what it would be told on a
GPU: inside `as_on_cuda` the two names have one state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.amp import autocast_mode

from pipefit.capture.cuda_casts import CudaCasts

_KEY = "AutocastPrivateUse1"
_CUDA = "cuda"

State = tuple[bool, torch.dtype]


class _Registered:
    """The casts of CUDA in the open device slot, of that name, for as long as this exists."""

    def __init__(self, device_type: str) -> None:
        self.casts = CudaCasts(device_type, _KEY)
        # Torch lets all operators but those of its lists pass, on every device type but the open slot.
        everything = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
        everything.fallback(torch.library.fallthrough_kernel, _KEY)  # type: ignore[no-untyped-call]
        self._libraries = {"_": everything}
        self._known: set[str] = set()

    def follow(self) -> None:
        """Register kernels for the operators that are cast on CUDA by now: extensions bring their own."""
        for name, kernel in self.casts.kernels(known=self._known):
            namespace, _, operator = name.partition("::")
            if namespace not in self._libraries:
                self._libraries[namespace] = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
            self._libraries[namespace].impl(operator, kernel, _KEY)  # type: ignore[no-untyped-call]
            self._known.add(name)


_registered = functools.cache(_Registered)


@contextmanager
def as_on_cuda(device_type: str) -> Iterator[None]:
    """Inside, autocast for `cuda` is autocast for `device_type`, and clearing the cache of casts clears ours too."""
    registered = _registered(device_type)
    registered.follow()
    casts = registered.casts
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


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both


def _renamed(begin: Callable[..., None], device_type: str) -> Callable[..., None]:
    """The constructor of `torch.autocast`, which takes `cuda` for the fake device."""

    def renamed(self: Any, kind: str | None = None, *args: Any, **kwargs: Any) -> None:
        kind = kwargs.pop("device_type", None) if kind is None else kind
        begin(self, device_type if kind == _CUDA else kind, *args, **kwargs)

    return renamed


def _entered(enter: Callable[[Any], Any], device_type: str) -> Callable[[Any], Any]:
    """On entering, what is asked about autocast for `cuda` becomes true of it too."""

    def entered(self: Any) -> Any:
        found = enter(self)
        if self.device == device_type:
            self.of_cuda = torch.is_autocast_enabled(_CUDA), torch.get_autocast_dtype(_CUDA)
            _tell_of_cuda((torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)))
        return found

    return entered


def _left(leave: Callable[..., Any]) -> Callable[..., Any]:
    def left(self: Any, *error: Any) -> Any:
        if (before := vars(self).pop("of_cuda", None)) is not None:
            _tell_of_cuda(before)
        return leave(self, *error)

    return left


def _tell_of_cuda(state: State) -> None:
    torch.set_autocast_enabled(_CUDA, state[0])
    torch.set_autocast_dtype(_CUDA, state[1])


def _cast_on(cast: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """How `custom_fwd` casts what it is given."""
    return lambda value, kind, dtype: cast(value, device_type if kind == _CUDA else kind, dtype)
