"""What each operation's kernel takes on the CPU: looked up by the operation and its arguments, or measured.

A look-up costs a microsecond or two. Measured are only operations that are neither in the profile that is followed, nor
in the user's cache, nor met before. An operation that cannot be measured counts with its results alone, and is named:
in the profile, in plans made from it, and in a warning wherever it runs under a meter.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipefit.errors import PipefitWarning
from pipefit.kernels import Kernel, KernelMemory
from pipefit.meter import signature
from pipefit.meter.cache import Cache
from pipefit.meter.layouts import agree, relaid
from pipefit.meter.machine import flags, this_machine
from pipefit.meter.measuring import measured

aten = torch.ops.aten

# These allocate nothing but their results on any machine, and neither do views.
_KNOWN_EVERYWHERE = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.resize_.default,
        aten.set_.source_Storage,
        aten.set_.source_Storage_storage_offset,
        aten.set_.source_Tensor,
        aten._local_scalar_dense.default,
        aten._unsafe_view.default,
    }
)
_NO_KERNELS = ("c10d", "_c10d", "prim", "profiler")  # messages, a tensor's device or layout, marks of a profiler


class Known:
    """A kernel as a meter needs it."""

    __slots__ = ("_agrees", "_results", "peak_bytes")

    def __init__(self, kernel: Kernel) -> None:
        self.peak_bytes, self._results = kernel.peak_bytes or 0, kernel.results
        self._agrees: bool | None = None  # fake results with the kernel's own, once they were compared

    def laid_out(self, out: Any) -> Any:
        """Fake results as the kernel would have laid them out; real ones are returned as they are."""
        if self._agrees or type(out) is Tensor:
            return out
        if self._agrees is None and agree(out, self._results):
            self._agrees = True
            return out
        self._agrees = False
        return relaid(out, self._results)


class Kernels:
    """The kernels of this machine at work on `threads` threads.

    Args:
        threads: of the kernels, whatever this process uses otherwise.
        given: what a profile knows. It comes first, also where the kernels of this machine take something else.
    """

    def __init__(self, threads: int, given: KernelMemory | None = None) -> None:
        self.threads = threads
        self._given = {kernel.operation: kernel for kernel in given.kernels} if given is not None else {}
        self._cache = Cache(this_machine(threads))
        self._flags = flags()
        self._known: dict[Any, dict[signature.Key | None, Known] | None] = {}
        self._met: dict[str, Kernel] = {}
        self._new: dict[str, Kernel] = {}
        self._told: set[str] = set()

    @property
    def memory(self) -> KernelMemory:
        """Every operation met so far."""
        return KernelMemory(kernels=tuple(self._met.values()))

    def refresh(self) -> None:
        """Read again the settings of this process that kernels depend on."""
        self._flags = flags()

    def of(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Known | None:
        """What the kernel of `func(*args, **kwargs)` takes; None if that is its result `out` alone on any machine."""
        try:
            calls = self._known[func]
        except KeyError:
            calls = self._known[func] = {} if _may_take(func) else None
        if calls is None:
            return None
        key = signature.key_of(func, args, kwargs, self._flags)
        known = calls.get(key)
        if known is None:
            known = Known(self._meet(key, func, args, kwargs, out))
            if key is not None:
                calls[key] = known
        return known

    def keep(self) -> None:
        """Add what was measured to the user's cache."""
        if self._new:
            self._cache.add(self._new.values())
            self._new.clear()

    def tell_unknown(self) -> None:
        """Warn, once, of operations that were met and that could not be measured."""
        unknown = tuple(kernel for kernel in self.memory.unknown if kernel.operation not in self._told)
        self._told |= {kernel.operation for kernel in unknown}
        if unknown:
            warnings.warn(KernelMemory(kernels=unknown).gap, PipefitWarning, stacklevel=3)

    def _meet(
        self, key: signature.Key | None, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> Kernel:
        """A call that has not been looked up before."""
        operation = signature.name_of(func, args) if key is None else signature.text_of(func, key)
        kernel = self._met.get(operation) or self._given.get(operation) or self._cache.read().get(operation)
        if kernel is None:
            kernel = measured(operation, func, args, kwargs, out, threads=self.threads)
            self._new[operation] = kernel
        self._met[operation] = kernel
        return kernel


def _may_take(func: Any) -> bool:
    """Whether its kernel may take memory of its own on some machine."""
    return not (func.is_view or func in _KNOWN_EVERYWHERE or func.namespace.startswith(_NO_KERNELS))
