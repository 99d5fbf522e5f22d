"""What memory this host has to spare, for what runs beside the training."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MEMINFO, _CONTAINER = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_bytes(meminfo: Path = _MEMINFO, container: Path = _CONTAINER) -> int:
    """Bytes that a process may still take: of the machine, and of the container that it is in.

    Where the system does not tell what is free, half of the memory that it has.
    """
    free = _number(meminfo, r"MemAvailable:\s+(\d+) kB")
    machine = free * 1024 if free is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    limit, used = _number(container / "memory.max", r"(\d+)"), _number(container / "memory.current", r"(\d+)")
    if limit is None or used is None:
        return machine
    files = _number(container / "memory.stat", r"inactive_file (\d+)") or 0  # given up when memory is needed
    return min(machine, limit - used + files)


def _number(path: Path, pattern: str) -> int | None:
    """The first number in a file behind what `pattern` says; None where there is none."""
    try:
        found = re.search(pattern, path.read_text())
    except OSError:
        return None
    return int(found[1]) if found else None
