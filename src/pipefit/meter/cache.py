"""The user's cache of what kernels take, so that no operation is measured twice.

There is a file for each kind of machine, in `pipefit/kernels` below XDG_CACHE_HOME, by default `~/.cache`: a line that
names the machine, then a line for every time that something was measured, behind its digest. Workers add lines at the
same time, each with one write, and read only what has been added since they last looked. A file that cannot be read,
that a disk has damaged, that belongs to another machine, or that is a link counts as empty and is replaced; nothing is
written to what a link leads to. Where no file can be written, nothing is cached.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from pipefit.kernels import Kernel, KernelMemory
from pipefit.meter.machine import Machine
from pipefit.pieces import adapter
from pipefit.writable import NO_LINK, replace_file

_VERSION = 5
_DIGITS = 16  # of the digest of a line


class Cache:
    """What is known of the kernels of one kind of machine."""

    def __init__(self, machine: Machine) -> None:
        header = json.dumps({"pipefit": "kernels", "version": _VERSION, "machine": asdict(machine)}).encode()
        self.path = _folder() / f"{hashlib.sha256(header).hexdigest()[:16]}.jsonl"
        self._header = header + b"\n"
        self._reader = _reader(self.path, self._header)

    def read(self) -> Mapping[str, Kernel]:
        """Every kernel in the file, by its operation."""
        return self._reader.read()

    def add(self, kernels: Iterable[Kernel]) -> None:
        """Add these to the file."""
        memory = KernelMemory(kernels=tuple(kernels))
        line = _signed(adapter(KernelMemory).dump_json(memory, exclude_defaults=True)) + b"\n"
        self._reader.read()
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self._reader.broken:
                replace_file(self.path, self._header + line, through_links=False)
            else:
                self._append(line)

    def _append(self, line: bytes) -> None:
        """Two workers may both begin the file: it then holds its first line twice."""
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | NO_LINK, 0o644)
        try:
            os.write(file, line if os.fstat(file).st_size else self._header + line)
        finally:
            os.close(file)


class _Reader:
    """What has been read of a file so far."""

    def __init__(self, path: Path, header: bytes) -> None:
        self._path, self._header = path, header
        self._file, self._end = 0, 0  # its inode, and how many of its bytes have been read
        self._kernels: dict[str, Kernel] = {}
        self._lock = threading.Lock()
        self.broken = False

    def read(self) -> Mapping[str, Kernel]:
        """All that the file says now."""
        with self._lock:
            self._look()
            return self._kernels

    def _look(self) -> None:
        try:
            status = self._path.lstat()
            if status.st_ino != self._file or status.st_size < self._end:
                self._file, self._end, self._kernels, self.broken = status.st_ino, 0, {}, False
            if stat.S_ISLNK(status.st_mode):
                raise ValueError("it is a link")
            if status.st_size > self._end and not self.broken:
                self._read_on()
        except FileNotFoundError:
            self._file, self._end, self._kernels, self.broken = 0, 0, {}, False
        except (OSError, ValueError):  # among them what pydantic and our own checks refuse
            self._kernels, self.broken = {}, True

    def _read_on(self) -> None:
        """The lines that have been added; what has no end yet is still being written."""
        with open(self._path, "rb", opener=lambda path, flags: os.open(path, flags | NO_LINK)) as file:
            file.seek(self._end)
            *lines, _ = file.read().split(b"\n")
        if not self._end and [line + b"\n" for line in lines[:1]] != [self._header]:
            raise ValueError("it does not begin as a cache of this machine does")
        for line in lines:
            self._end += len(line) + 1
            if line + b"\n" != self._header:
                if line != _signed(text := line[_DIGITS + 1 :]):
                    raise ValueError("a line is not as it was written")
                memory: KernelMemory = adapter(KernelMemory).validate_json(text, strict=True)
                self._kernels.update((kernel.operation, kernel) for kernel in memory.kernels)


def _signed(text: bytes) -> bytes:
    """A text behind its digest."""
    return f"{hashlib.sha256(text).hexdigest()[:_DIGITS]} ".encode() + text


@lru_cache(maxsize=8)
def _reader(path: Path, header: bytes) -> _Reader:
    """The one reader of a file in this process."""
    return _Reader(path, header)


def _folder() -> Path:
    """The folder of the files. The XDG specification ignores a path that is not absolute."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = named if named.is_absolute() else Path(os.path.expanduser("~/.cache"))
    if not base.is_absolute():  # a user without a home, as in some containers
        base = Path(os.devnull)  # below it nothing can be made
    return base / "pipefit" / "kernels"
