"""Out of memory, whoever says it: torch's allocator, or a library that asks the driver for memory by itself.

cuBLAS, cuDNN, NCCL and others allocate a part of their memory outside of torch. Where the device has none left, they
fail with errors of their own, which torch passes on as a plain `RuntimeError`: "CUBLAS_STATUS_ALLOC_FAILED when calling
cublasCreate(handle)", or "ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 2 'out of memory'".
"""

from __future__ import annotations

import re

import torch

from pipefit.errors import OutOfMemory, PeerLost, first_line

_WORDS = re.compile(
    r"out of memory|can't allocate memory|Failed to CUDA (host )?[cm]alloc"  # the driver, the host, NCCL
    r"|CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_\w*ALLOC\w*_FAILED|CUFFT_ALLOC_FAILED",
    re.IGNORECASE,
)


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_WORDS.search(str(error)))


def unless_ran_out(lost: PeerLost, error: BaseException) -> PeerLost | OutOfMemory:
    """What to raise for a failed message: `lost`, or `OutOfMemory` if `error` says that this process had no memory."""
    if not ran_out(error):
        return lost
    return OutOfMemory(
        f"no memory is left for messages between workers ({first_line(error)}): plan with more --reserve"
    )
