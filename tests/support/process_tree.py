"""Linux's /proc, read while processes come and go: one that has ended has no children, no command and no files."""

import os
from pathlib import Path

__all__ = ["children", "command", "descendants", "environment", "is_running", "mappings", "open_files"]


def children(process: int) -> list[int]:
    """Return the processes that a process's main thread has started and that still exist, zombies included."""
    return [int(number) for number in _read(process, f"task/{process}/children").split()]


def descendants(process: int) -> list[int]:
    """Return a process's children, their children, and so on."""
    return [number for child in children(process) for number in (child, *descendants(child))]


def command(process: int) -> str:
    """Return a process's command line, its words separated by spaces."""
    return _read(process, "cmdline").replace("\0", " ")


def environment(process: int) -> list[str]:
    """Return the assignments with which a process was started."""
    return _read(process, "environ").split("\0")


def is_running(process: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    state = _read(process, "stat").rpartition(")")[2].split()
    return bool(state) and state[0] not in "ZX"


def mappings(process: int) -> list[str]:
    """Return the lines of a process's memory map."""
    return _read(process, "maps").splitlines()


def open_files(process: int) -> list[str]:
    """Return the targets of a process's file descriptors."""
    targets = []
    try:
        links = list(Path(f"/proc/{process}/fd").iterdir())
    except OSError:
        return []
    for link in links:
        try:
            targets.append(os.readlink(link))
        except OSError:
            continue
    return targets


def _read(process: int, name: str) -> str:
    try:
        return Path(f"/proc/{process}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""
