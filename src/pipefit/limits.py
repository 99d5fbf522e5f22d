"""The system's limits on a process, in words, for messages about work that they keep from being done."""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from _thread import allocate_lock, stack_size, start_new_thread
from pathlib import Path

from pipefit.errors import all_lines, no_memory
from pipefit.units import format_bytes

if sys.platform != "win32":
    import resource  # now: where a limit is met there may be no way to load it

_STACK_BYTES = 1 << 16
_NO_ROOM = re.compile(
    r".*(failed to map segment|cannot allocate memory|cannot create shared object|memory protections).*", re.IGNORECASE
)


def met(error: BaseException) -> str:
    """The limit that an error has met, in words; empty if it tells of none, or there is none."""
    number, said = getattr(error, "errno", None), all_lines(error)
    if number in (errno.EMFILE, errno.ENFILE) or os.strerror(errno.EMFILE) in said:
        limit = files()
    elif number == errno.EAGAIN or os.strerror(errno.EAGAIN) in said or "can't start new thread" in said:
        limit = processes()
    elif number == errno.ENOMEM or no_memory(error) or no_room_for(error):
        limit = addresses() or "the system has so much memory as free shows"
    else:
        return ""
    return limit or "the system has no more: ulimit -a shows its limits"


def files() -> str:
    """The limit of open files, in words; empty if there is none."""
    most = _soft("RLIMIT_NOFILE")
    return "" if most is None else f"a process may open {most} files here (ulimit -n)"


def processes() -> str:
    """The limits of processes and threads, in words: of this user, and of this process's control groups."""
    of_user, of_groups = _soft("RLIMIT_NPROC"), _of_control_groups()
    found = [] if of_user is None else [f"this user may have {of_user} processes and threads (ulimit -u)"]
    if of_groups:
        found.append(f"this control group may have {min(of_groups)} of them (pids.max)")
    return ", and ".join(found)


def addresses() -> str:
    """The limit of this process's address space, in words; empty if there is none."""
    most = _soft("RLIMIT_AS")
    return "" if most is None else f"this process may have {format_bytes(most)} of addresses (ulimit -v)"


def room_for_threads(count: int) -> bool:
    """Whether so many threads can be started now; they are, for a moment, with small stacks.

    A handler of a signal may ask: no lock is taken that the code which it interrupts could hold.
    """
    usual, gate, ended, started = stack_size(_STACK_BYTES), allocate_lock(), list[bool](), 0

    def wait() -> None:
        with gate:
            ended.append(True)

    with gate:
        try:
            for started in range(1, count + 1):  # noqa: B007 - how many there are
                start_new_thread(wait, ())
            room = True
        except RuntimeError:
            started, room = started - 1, False
        finally:
            stack_size(usual)
    while len(ended) < started:
        time.sleep(0)
    return room


def no_room_for(library: BaseException) -> str:
    """What an import says that failed for want of memory for a library, in one of its lines; empty if it did not."""
    said = _NO_ROOM.search(str(library)) if isinstance(library, ImportError) else None
    return "" if said is None else said[0].strip()


def _soft(name: str) -> int | None:
    """What a limit is at present; None if there is none, or none of that name."""
    if sys.platform == "win32":
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else int(soft)


def _of_control_groups() -> list[int]:
    """How many processes and threads the control groups of this process may have, if they tell."""
    found = []
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    for _, controllers, path in groups:
        if controllers not in ("", "pids"):
            continue
        root = Path("/sys/fs/cgroup") / controllers
        for folder in (root / path.lstrip("/"), root):  # the second, where a container sees its own group alone
            try:
                found.append(int((folder / "pids.max").read_text()))
                break
            except (OSError, ValueError):  # there is none, or it is "max"
                continue
    return found
