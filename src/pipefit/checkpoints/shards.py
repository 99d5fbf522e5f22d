"""Shards: safetensors files of a checkpoint, written here and read by the `safetensors` package.

The format is eight bytes with the length of a JSON header, the header, and the tensors' bytes. The writer
computes the SHA-256 in the same pass, reports progress, flushes the file to the disk, and passes on the
system's errors. The reader is the `safetensors` package, whose parser is safe for untrusted files; it maps
the file into memory, so that a stage reads only its own tensors. Before that the same open file is read once
as a whole, for its hash.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from numpy import from_dlpack
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipefit.checkpoints.manifest import DTYPES, Shard, StoredTensor
from pipefit.errors import FileError, UnreadableCheckpoint
from pipefit.schema.file_access import NO_LINK
from pipefit.texts import dtype_name, printable, shortened
from pipefit.units import format_bytes

# ---- Files of a checkpoint opened for reading
# Only regular files are opened, and links are not followed, so an untrusted folder cannot make the reader
# wait on a pipe, or read a file from elsewhere. The checked file is the one that is read: a library that
# opens files by path gets the path of the open file (`open_path`).

_NOT_ITS_FAULT = {
    errno.EACCES,
    errno.EPERM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
    errno.EINTR,
}


@contextmanager
def regular_file(path: Path) -> Iterator[tuple[FileIO, int]]:
    """Open the file in `path` unbuffered; yield it and its size in bytes.

    Raises:
        UnreadableCheckpoint: access is denied, or resources to read it are lacking just now.
        FileError: it is missing, not a regular file, or cannot be read.
    """
    source = printable(path)
    try:
        number = os.open(path, os.O_RDONLY | NO_LINK)
        with os.fdopen(number, "rb", buffering=0) as file:
            status = os.fstat(number)
            if not stat.S_ISREG(status.st_mode):
                raise FileError(f"{source} is not a regular file")
            yield file, status.st_size
    except FileNotFoundError:
        raise FileError(f"{source} is missing") from None
    except OSError as error:
        kind = UnreadableCheckpoint if error.errno in _NOT_ITS_FAULT else FileError
        raise kind(f"{source} cannot be read: {error.strerror}") from None


def open_path(file: FileIO, path: Path) -> str:
    """Return a path to the open `file`, even if `path` has changed; `path` if the system has none."""
    known = (f"{folder}/{file.fileno()}" for folder in ("/proc/self/fd", "/dev/fd"))
    return next((name for name in known if os.path.exists(name)), os.fspath(path))


# ---- Shards

_BLOCK = 8 << 20  # bytes written and hashed at a time
_NAMES = {code: name for name, code in DTYPES.items()}


def write_shard(
    path: Path, tensors: Mapping[str, Tensor], progress: Callable[[int], None] = lambda _: None
) -> Shard:
    """Write `tensors` to a new shard; return its name, size and hash. See `write_tensors`."""
    nbytes, digest = write_tensors(path, tensors, progress)
    return Shard(file=path.name, nbytes=nbytes, sha256=digest)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], progress: Callable[[int], None] = lambda _: None
) -> tuple[int, str]:
    """Write `tensors` to a new safetensors file, flushed to the disk; return its bytes and its SHA-256.

    `progress` is called with the bytes of each written block.

    Raises:
        OSError: the system refuses, as on a full disk.
    """
    digest, nbytes = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for block in chain((_header(tensors),), map(_bytes_of, tensors.values())):
            for start in range(0, len(block), _BLOCK):
                piece = block[start : start + _BLOCK]
                _write(file.fileno(), piece)
                digest.update(piece)
                nbytes += len(piece)
                progress(len(piece))
        os.fsync(file.fileno())
    return nbytes, digest.hexdigest()


def read_shard(folder: Path, shard: Shard, wanted: Sequence[StoredTensor]) -> dict[str, Tensor]:
    """Return the tensors `wanted` of a shard, by their keys, as views of the mapped file.

    Raises:
        FileError: the shard is missing, damaged, or holds other tensors than its manifest says.
    """
    path = folder / shard.file
    source = printable(path)
    with regular_file(path) as (file, nbytes):
        _check_bytes(file, nbytes, shard, source)
        with _parsed(file, path, source) as content:
            _check_tensors(content, wanted, source)
            return {
                tensor.key: content.get_tensor(tensor.key)  # type: ignore[no-untyped-call]
                for tensor in wanted
            }


def check_header(folder: Path, shard: Shard, wanted: Sequence[StoredTensor]) -> None:
    """Check that a shard has its size, and lists the tensors `wanted`, without reading their bytes.

    Raises:
        FileError: the shard is missing, damaged, or holds other tensors than its manifest says.
    """
    path = folder / shard.file
    source = printable(path)
    with regular_file(path) as (file, nbytes):
        _check_size(nbytes, shard, source)
        with _parsed(file, path, source) as content:
            _check_tensors(content, wanted, source)


def check_shard(folder: Path, shard: Shard) -> None:
    """Check size and hash of a shard.

    Raises:
        FileError: it is missing, or damaged.
    """
    path = folder / shard.file
    with regular_file(path) as (file, nbytes):
        _check_bytes(file, nbytes, shard, printable(path))


def _header(tensors: Mapping[str, Tensor]) -> memoryview:
    """Return the length of the header, and the header, padded so that the tensors are aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # required by transformers
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.numel() * tensor.element_size()
        dtype = DTYPES[dtype_name(tensor.dtype)]
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in the order of its indices.

    `Tensor.numpy` is not used: afterwards the storage could not lose its memory any more, as offloaded state
    must.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    raw: Any = from_dlpack(flat.to("cpu").view(torch.uint8))
    return memoryview(raw)


def _write(file: int, piece: memoryview) -> None:
    while len(piece):
        piece = piece[os.write(file, piece) :]


def _check_bytes(file: FileIO, nbytes: int, shard: Shard, source: str) -> None:
    _check_size(nbytes, shard, source)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != shard.sha256:
        raise FileError(f"{source} is damaged: its SHA-256 differs from the saved one")


def _check_size(nbytes: int, shard: Shard, source: str) -> None:
    if nbytes != shard.nbytes:
        raise FileError(
            f"{source} is damaged: it has {format_bytes(nbytes)}, but {format_bytes(shard.nbytes)} were "
            f"saved ({nbytes} and {shard.nbytes} bytes)"
        )


@contextmanager
def _parsed(file: FileIO, path: Path, source: str) -> Iterator[safe_open]:
    """Open the file with the library."""
    try:
        with safe_open(open_path(file, path), framework="pt") as content:
            yield content
    except (SafetensorError, OSError) as error:
        raise FileError(f"{source} is not a safetensors file: {printable(shortened(str(error)))}") from None


def _check_tensors(file: safe_open, wanted: Sequence[StoredTensor], source: str) -> None:
    """Check that the header has these tensors, with their dtypes and shapes."""
    known = set(file.keys())  # type: ignore[no-untyped-call]
    for tensor in wanted:
        if tensor.key not in known:
            raise FileError(f"{source} is damaged: {printable(tensor.key)} is missing")
        result = file.get_slice(tensor.key)  # type: ignore[no-untyped-call]
        dtype, shape = _NAMES.get(result.get_dtype(), result.get_dtype()), tuple(result.get_shape())
        if (dtype, shape) != (tensor.dtype, tensor.shape):
            raise FileError(
                f"{source} is damaged: {printable(tensor.key)} has dtype torch.{dtype} and shape {shape}, "
                f"but torch.{tensor.dtype} and {tensor.shape} in the manifest"
            )
