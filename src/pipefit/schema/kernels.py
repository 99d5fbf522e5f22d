"""What kernels of the CPU take inside a call, as it was measured.

While it runs, a kernel may hold more than the results it returns: packed operands, scratch, copies in another layout.
Its results may also lie in memory otherwise than torch's rules for shapes say. Both depend on the processor and on the
release of torch, so they are not computed but measured, once for each operation, where the model will run
(`pipefit.measure.kernels`). They are kept here by the text of the operation: its name, and the dtypes, shapes and
strides of its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipefit.errors import UsageError
from pipefit.schema.validation import check_dtype
from pipefit.texts import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a result of a kernel lies in memory: elements of `dtype`, except for the bytes of its storage.

    Results of one call with the same `storage` share it.

    Raises:
        UsageError: not as many strides as dimensions, a negative number, or no dtype of torch.
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
    """What one operation takes, results included: the most bytes that it ever holds above what was there before it.

    If it could not be measured, `peak_bytes` is None and `reason` says why; only its results are counted then.

    Raises:
        UsageError: a negative peak, or neither a peak nor a reason.
    """

    __pydantic_config__ = {"extra": "forbid"}

    operation: str  # such as aten.mm.default(float32[4x8], float32[8x2 by 1,8])
    peak_bytes: int | None
    results: tuple[Layout | None, ...] = ()  # None where a result is no tensor, or one of the arguments
    reason: str = ""

    def __post_init__(self) -> None:
        if self.peak_bytes is not None and self.peak_bytes < 0:
            raise UsageError(f"{self.operation} cannot take {self.peak_bytes} bytes")
        if (self.peak_bytes is None) != bool(self.reason):
            raise UsageError(f"{self.operation} needs either bytes, or the reason why they are not known")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelMemory:
    """What the kernels of a model take, operation by operation."""

    __pydantic_config__ = {"extra": "forbid"}

    kernels: tuple[Kernel, ...] = ()

    @property
    def unknown(self) -> tuple[Kernel, ...]:
        """Those that could not be measured: what they take beside their results is missing from every peak."""
        return tuple(kernel for kernel in self.kernels if kernel.peak_bytes is None)

    @property
    def gap(self) -> str:
        """What every peak lacks, in words that end without a full stop; empty if all operations were measured."""
        if not self.unknown:
            return ""
        first, others = self.unknown[0], len(self.unknown) - 1
        more = f" and {counted(others, 'other')}" if others else ""
        return f"peaks are without what kernels take inside {first.operation}{more}: {first.reason}"
