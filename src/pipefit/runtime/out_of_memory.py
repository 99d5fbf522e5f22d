"""Out of memory, whoever says it: torch's allocator, or a library that asks the driver for memory by itself.

cuBLAS, cuDNN, NCCL and others allocate a part of their memory outside of torch. Where the device has none left, they
fail with errors of their own, which torch passes on as a plain `RuntimeError`: "CUBLAS_STATUS_ALLOC_FAILED when calling
cublasCreate(handle)", or "ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 2 'out of memory'".
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

import torch

from pipefit.errors import all_lines, no_memory
from pipefit.meter import MemoryMeter
from pipefit.meter.cpu import OverCap
from pipefit.trace import CATEGORIES, Category, MemorySample

_ASKED = re.compile(r"Tried to allocate ([0-9.]+) (bytes|[KMGT]iB)\b")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class Moment(NamedTuple):
    """A device that has run out: what it would have held with what was asked for, and what that was, 0 if unknown."""

    sample: MemorySample
    asked_bytes: int


def moment(error: BaseException, meter: MemoryMeter | None, step: int, seconds: float) -> Moment | None:
    """The moment at which an error says that memory ran out, in the action that a meter has begun; None without one.

    A meter of our own has counted what was asked for; torch's allocator says it, in two digits, and has not.
    """
    if meter is None:
        return None
    sample = meter.end(step, seconds)
    if isinstance(error, OverCap):
        return Moment(sample, error.asked_bytes)
    said = _ASKED.search(str(error))
    asked = round(float(said[1]) * _UNITS[said[2]]) if said else 0
    temporary = CATEGORIES.index(Category.TEMPORARY)
    counted = (nbytes + asked * (place == temporary) for place, nbytes in enumerate(sample.bytes))
    return Moment(replace(sample, bytes=tuple(counted)), asked)  # type: ignore[arg-type]


def named(error: BaseException, device: int, action: str) -> str:
    """What an error says of memory that ran out at an action, with the device; our own meters name it themselves."""
    if isinstance(error, OverCap):
        return str(error)
    return f"device {device} ran out of memory at {action}: {all_lines(error)}"


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or no_memory(error)
