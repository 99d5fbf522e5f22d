"""CUDA's autocast on `fakecuda`: what `torch.autocast("cuda", ...)` does on a GPU, it does to tensors without bytes.

The casts are those of `pipefit.capture.cuda_casts`, as kernels of the open device slot's autocast key.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager

import torch

from pipefit.capture.cuda_autocast import as_on_cuda
from pipefit.capture.cuda_casts import CudaCasts

_KEY = "AutocastPrivateUse1"


def autocast_of(device_type: str) -> AbstractContextManager[None]:
    """Inside, autocast for `cuda`, and for the open device slot of that name, is that of CUDA."""
    registered = _registered(device_type)
    registered.follow()
    return as_on_cuda(device_type, registered.casts)


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
