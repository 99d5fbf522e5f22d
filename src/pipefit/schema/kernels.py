"""Measured memory inside CPU kernel calls.

A running kernel may hold more than its results: packed operands, scratch, copies in another layout. Its
results may also have another memory layout than torch's shape rules predict. Both depend on the processor and
on the release of torch, so `measure.kernels` measures them once for each operation, on the target machine.
The key is the text of the operation: its name, and the dtypes, shapes and strides of its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipefit.errors import UsageError
from pipefit.schema.validation import check_dtype
from pipefit.texts import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The memory layout of a kernel's result. Offsets are in elements of `dtype`, `storage_bytes` in bytes.

    Results of one call with the same `storage` share it.

    Raises:
        UsageError: strides do not match the dimensions, a negative number, or an unknown dtype.
    """

    __pydantic_config__ = {"extra": "forbid"}

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage: int
    storage_bytes: int
    dtype: str  # such as float32

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        if min(self.offset, self.storage, self.storage_bytes, 0) < 0 or len(self.shape) != len(self.strides):
            raise UsageError(
                "a result has as many strides as dimensions, and no negative place or size, not "
                f"{counted(len(self.strides), 'stride')} for {counted(len(self.shape), 'dimension')}, offset "
                f"{self.offset}, storage {self.storage} and {self.storage_bytes} bytes"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """The peak memory of one operation, results included, above the memory held before it.

    If it could not be measured, `peak_bytes` is None and `reason` says why; then only its results are
    counted.

    Raises:
        UsageError: a negative peak, or neither a peak nor a reason.
    """

    __pydantic_config__ = {"extra": "forbid"}

    operation: str  # such as aten.mm.default(float32[4x8], float32[8x2 by 1,8])
    peak_bytes: int | None
    results: tuple[Layout | None, ...] = ()  # None if a result is not a tensor, or is one of the arguments
    reason: str = ""

    def __post_init__(self) -> None:
        if self.peak_bytes is not None and self.peak_bytes < 0:
            raise UsageError(f"{self.operation} cannot take {self.peak_bytes} bytes")
        if (self.peak_bytes is None) != bool(self.reason):
            raise UsageError(f"{self.operation} needs either bytes, or the reason why they are not known")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelMemory:
    """The measured memory of a model's kernels, operation by operation."""

    __pydantic_config__ = {"extra": "forbid"}

    kernels: tuple[Kernel, ...] = ()

    @property
    def unknown(self) -> tuple[Kernel, ...]:
        """Kernels that could not be measured; every peak lacks their memory except for their results."""
        return tuple(kernel for kernel in self.kernels if kernel.peak_bytes is None)

    @property
    def gap(self) -> str:
        """The kernel memory that every peak lacks, as a phrase; empty if all operations were measured."""
        if not self.unknown:
            return ""
        first, others = self.unknown[0], len(self.unknown) - 1
        more = f" and {counted(others, 'other')}" if others else ""
        return f"peaks are without what kernels take inside {first.operation}{more}: {first.reason}"
