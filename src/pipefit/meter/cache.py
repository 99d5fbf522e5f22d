"""The user's cache of what kernels take, so that no operation is measured twice.

There is a file for each kind of machine, in `pipefit/kernels` below XDG_CACHE_HOME, by default `~/.cache`. A file is
always replaced as a whole: when workers write at the same time, the entries of one may be lost, and are measured again
when they are needed. A file that cannot be read, or that belongs to another machine, counts as empty and is replaced.
Where no file can be written, nothing is cached.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from pipefit.kernels import Kernel, KernelMemory
from pipefit.meter.machine import Machine
from pipefit.pieces import adapter

_VERSION = 1


class Cache:
    """What is known of the kernels of one kind of machine."""

    def __init__(self, machine: Machine) -> None:
        self._header = {"pipefit": "kernels", "version": _VERSION, "machine": asdict(machine)}
        text = json.dumps(self._header)
        self.path = _folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def read(self) -> Mapping[str, Kernel]:
        """Every kernel in the file, by its operation."""
        try:
            status = self.path.stat()
        except OSError:
            return {}
        return _read(self.path, json.dumps(self._header), status.st_mtime_ns, status.st_size)

    def add(self, kernels: Iterable[Kernel]) -> None:
        """Add these to the file."""
        together = {**self.read(), **{kernel.operation: kernel for kernel in kernels}}
        memory = KernelMemory(kernels=tuple(together.values()))
        body = adapter(KernelMemory).dump_json(memory, exclude_defaults=True).decode()
        beside = self.path.with_name(f".{self.path.name}.{secrets.token_hex(6)}")
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                beside.write_text(f"{json.dumps(self._header)}\n{body}\n", encoding="utf-8")
                beside.replace(self.path)
            finally:
                beside.unlink(missing_ok=True)


def _folder() -> Path:
    """The folder of the files. The XDG specification ignores a path that is not absolute."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = named if named.is_absolute() else Path("~/.cache").expanduser()
    return base / "pipefit" / "kernels"


@lru_cache(maxsize=8)
def _read(path: Path, header: str, changed: int, size: int) -> Mapping[str, Kernel]:
    """The kernels in a file as it was at that time and size."""
    try:
        first, _, rest = path.read_text(encoding="utf-8").partition("\n")
        if first != header:
            return {}
        memory: KernelMemory = adapter(KernelMemory).validate_json(rest, strict=True)
    except (OSError, ValueError):  # among them what pydantic and our own checks refuse
        return {}
    return {kernel.operation: kernel for kernel in memory.kernels}
