"""CUDA's driver, for what torch has no public function: copies between addresses, and memory of another process.

The driver's interface is stable, so that this works with every release of torch and CUDA. Handles of memory for other
processes leave no file, unlike torch's own way to share tensors. The library is loaded when a driver is made, and only
runs on GPUs make one. (CUDA Driver API, sections on memory management and on unified addressing.)
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char, c_char_p, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, Protocol

from pipefit.errors import UsageError

_HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1


class Driver(Protocol):
    """Copies, and memory that processes share. Every call is for the calling thread's current device."""

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy between two addresses, whatever devices or pinned memory they are of."""

    def export(self, address: int) -> tuple[bytes, int]:
        """A handle of the allocation that an address of this device is in, and how far into it the address is."""

    def open(self, handle: bytes) -> int:
        """Where another process's allocation begins here; it is mapped until it is closed."""

    def close(self, start: int) -> None:
        """Unmap what was opened there."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", c_char * _HANDLE_BYTES)]


class CudaDriver:
    """The driver of this machine.

    Raises:
        UsageError: it has none.
    """

    def __init__(self, library: Any = None) -> None:
        try:
            self._library = library or ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise UsageError(f"this machine has no CUDA driver ({error}): plan for emulated devices") from error

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyAsync", c_uint64(target), c_uint64(source), c_size_t(nbytes), c_void_p(stream))

    def export(self, address: int) -> tuple[bytes, int]:
        start, nbytes, handle = c_uint64(), c_size_t(), _Handle()
        self._call("cuMemGetAddressRange_v2", byref(start), byref(nbytes), c_uint64(address))
        self._call("cuIpcGetMemHandle", byref(handle), c_uint64(address))
        return bytes(handle), address - start.value

    def open(self, handle: bytes) -> int:
        start = c_uint64()
        here = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", byref(start), here, c_uint(_LAZY_ENABLE_PEER_ACCESS))
        return start.value

    def close(self, start: int) -> None:
        self._call("cuIpcCloseMemHandle", c_uint64(start))

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver.

        Raises:
            RuntimeError: it failed; in the driver's words.
        """
        if error := getattr(self._library, name)(*arguments):
            words = c_char_p()
            self._library.cuGetErrorName(error, byref(words))
            raise RuntimeError(f"{name}: {(words.value or b'unknown error').decode()}")
