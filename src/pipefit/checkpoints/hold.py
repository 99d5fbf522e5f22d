"""Ownership of a folder: one training at a time may save there, for as long as it runs.

The holder has a lock on the file `training.lock` in the folder, which names it. The system releases the lock
when the holder ends, and then the file means nothing. Locks reach across machines if the shared file system
supports that, as NFS does unless mounted with `nolock` or `local_lock`. Without any locks, the file alone
counts. If locks stay on one machine, the later training writes its name into the file, which the earlier one
finds at its next save; and every save checks the owner of the newest checkpoint (`folders.begin`).
"""

from __future__ import annotations

import errno
import gc
import json
import os
import secrets
import socket
import stat
import time
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from pipefit.errors import FileError, UsageError
from pipefit.schema.file_access import NO_LINK
from pipefit.schema.json_text import checked, json_object
from pipefit.texts import printable, shortened

# ---- Owners of checkpoints and folders
# A training gets an identity when it starts, which its checkpoints carry, and trainings that continue from
# one of them too. Every start by a user is a separate run; workers that are restarted within it, by `pipefit
# train --restarts` or by torchrun, belong to the same run.

_LONGEST_ID = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A training, and one of its runs.

    Args:
        training: identity made at the training's start, and kept by all runs that continue from its
            checkpoints.
        run: identity made at each start by a user, and kept by restarts.
        host: the name of the machine on which the run started.
        pid: its process there: that of `pipefit train`, of the script, or of torchrun's first worker.
        started_seconds: time of the start, since 1970.
        plan: headline of the plan: model, stages and devices.
    """

    training: str
    run: str
    host: str
    pid: int
    started_seconds: float
    plan: str

    def __post_init__(self) -> None:
        if not all(0 < len(name) <= _LONGEST_ID for name in (self.training, self.run)):
            raise UsageError(f"the names of a training and its run must have 1 to {_LONGEST_ID} characters")
        if not 0 <= self.started_seconds < 1 << 40:
            raise UsageError(f"the start time of a run is not valid: {self.started_seconds}")

    def __str__(self) -> str:
        """Return the training's names for a sentence."""
        return (
            f"{printable(self.training[:8])} ({printable(shortened(self.plan))}), process {self.pid} on "
            f"{printable(shortened(self.host))}, started {utc(self.started_seconds)}"
        )


def new_owner(plan: str) -> Owner:
    """Return this process as an owner of a new training.

    Workers that torchrun restarts have the run of their first start.
    """
    agent = _agent()
    run = secrets.token_hex(16) if agent is None else sha256(agent.name.encode()).hexdigest()[:32]
    return Owner(
        training=run,
        run=run,
        host=socket.gethostname() or "this host",
        pid=os.getpid(),
        started_seconds=time.time(),
        plan=plan,
    )


def restarted_since() -> float | None:
    """Return the first start of this worker's run, in seconds since 1970, if torchrun has restarted it."""
    agent = _agent()
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return agent.started_seconds if agent is not None and again else None


def utc(seconds: float) -> str:
    """Return a time as text, such as 2026-11-27 20:22:38 UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def process_start(pid: int) -> float | None:
    """Return the start of a process of this machine, in seconds since 1970.

    Return None if there is none, or it is unknown.
    """
    ticks = _start_ticks(pid)
    try:
        boot = next(
            int(line.split()[1])
            for line in Path("/proc/stat").read_text().splitlines()
            if line.startswith("btime ")
        )
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    return None if ticks is None else boot + ticks / os.sysconf("SC_CLK_TCK")


def _start_ticks(pid: int) -> int | None:
    """Return the start of a process in clock ticks since the system's start; None if it is unknown.

    It stays the same if the clock is set.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(status.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


@dataclass(frozen=True, slots=True)
class _Agent:
    """torchrun's process on this machine, which restarts workers and outlives them."""

    name: str
    started_seconds: float


def _agent() -> _Agent | None:
    """Return the torchrun agent that started this process; None without torchrun.

    On one machine its name is the agent's process. On several, the first worker may be restarted on another
    machine, so the job's name is used, if there is one.
    """
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    if job is None:
        return None
    started = process_start(os.getppid())
    several = False
    with suppress(KeyError, ValueError):
        several = int(os.environ["WORLD_SIZE"]) > int(os.environ["LOCAL_WORLD_SIZE"])
    if (several and job != "none") or started is None:
        return _Agent(job, started or time.time())
    return _Agent(f"{socket.gethostname()} {os.getppid()} {_start_ticks(os.getppid())} {_boot()}", started)


def _boot() -> str:
    """Return the identity of the system's start; empty if it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""


# ---- Holds

LOCK = "training.lock"
_LARGEST = 1 << 16  # bytes that the file may have
_TRIES = 100
_NAMING_SECONDS = 1.0  # between a holder's lock and its name
_WAY_OUT = "wait until it ends, or save to another folder"


class Hold:
    """A hold on `directory`, made if missing, for `owner`, until `release` or the end of the process.

    Another hold of this process on the same folder is taken over, unless it is `busy`: an unused object that
    has trained must not block the folder.

    Raises:
        FileError: another training holds it, which is named; or the folder cannot be made; or this is
            Windows.
    """

    def __init__(self, directory: Path, owner: Owner) -> None:
        if not hasattr(os, "O_DIRECTORY"):
            raise FileError(
                "checkpoints cannot be saved on Windows, which lacks folder locks: train without saving, "
                "or on Linux"
            )
        self.directory, self.owner, self.busy = directory, owner, False
        self._path = directory.absolute() / LOCK
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(
                f"{printable(directory)} cannot be created: {error.strerror}; save to another folder"
            ) from None
        self.file = self._locked()
        self._give_up = weakref.finalize(self, _released, self._path, self.file, os.getpid())
        _HOLDS.add(self)
        self._write_name()

    def release(self) -> None:
        """Release the folder for others."""
        self._give_up()

    @property
    def released(self) -> bool:
        """True if others may save to the folder."""
        return not self._give_up.alive

    def check(self) -> None:
        """Check that the folder still belongs to this training, as far as its file shows.

        Raises:
            FileError: another training has taken it, which is named; or the file is gone.
        """
        check_holder(self.directory, self.owner)

    def _locked(self) -> int:
        """Open and lock the file."""
        for _ in range(_TRIES):
            file = _opened(self._path)
            try:
                locked = _lock(file)
                if not _is(file, self._path):
                    os.close(file)  # its holder has just ended, and removed it
                    continue
                if not locked:
                    self._check_no_holder(file)
            except BlockingIOError:
                other = next((hold for hold in _ours() if not hold.released and _is(file, hold._path)), None)
                if other is not None and not other.busy:
                    os.close(file)
                    other.release()
                    continue
                holder = _holder_of(file)
                os.close(file)
                raise FileError(_locked_by(self.directory, holder)) from None
            except FileError:
                os.close(file)
                raise
            return file
        raise FileError(f"{printable(self._path)} keeps changing: save to another folder")

    def _check_no_holder(self, file: int) -> None:
        """Check, on a file system without locks, that the file does not name a process that may run."""
        holder = _read(file)
        if holder is None or (holder.host == socket.gethostname() and not _lives(holder)):
            return
        raise FileError(
            f"{_held(self.directory, holder)}; this file system does not support locks that would show "
            f"whether it has ended: if it has, remove {printable(self._path)}"
        )

    def _write_name(self) -> None:
        with suppress(OSError):  # a full disk does not prevent a hold without a name
            os.ftruncate(self.file, 0)
            os.pwrite(self.file, json.dumps(asdict(self.owner), indent=1).encode(), 0)


def keep(file: int) -> None:
    """Keep a hold that another process has passed on as an open file, until this process ends.

    Forks and programs that this process starts do not keep it: if they live longer, the folder must be free.
    """
    os.set_inheritable(file, False)
    _PASSED.append(file)


def check_holder(directory: Path, owner: Owner) -> None:
    """Check that the lock file in `directory` names this run, or is empty.

    Raises:
        FileError: it names another, or is gone.
    """
    try:
        file = os.open(directory / LOCK, os.O_RDONLY | NO_LINK)
    except OSError as error:
        raise FileError(
            f"{printable(directory / LOCK)}, the lock of this training's folder, cannot be read any more "
            f"({error.strerror}): save to another folder"
        ) from None
    try:
        holder = _read(file)
    finally:
        os.close(file)
    if holder is not None and holder.run != owner.run:
        raise FileError(_held(directory, holder))


def _held(directory: Path, holder: Owner | None) -> str:
    who = "another training" if holder is None else f"another training, {holder},"
    return f"{who} is saving to {printable(directory)}: {_WAY_OUT}"


def _locked_by(directory: Path, holder: Owner | None) -> str:
    """Return the message about a locked folder, whose holder may have left the lock to another process."""
    here = holder is not None and holder.host == socket.gethostname()
    gone = holder is not None and here and _start_ticks(holder.pid) is None
    more = "; that process is not found here, but one that it started may hold the folder: fuser {} names it"
    return _held(directory, holder) + (more.format(printable(directory / LOCK)) if gone else "")


def _opened(path: Path) -> int:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o666)
    except OSError as error:
        raise FileError(
            f"{printable(path)}, the lock of the folder, cannot be opened: {error.strerror}; save to another "
            "folder"
        ) from None
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(file)
        what = "has other names" if stat.S_ISREG(status.st_mode) else "is not a regular file"
        raise FileError(f"{printable(path)} {what}: remove it, or save to another folder")
    return file


def _lock(file: int) -> bool:
    """Lock the file; return False on a file system without locks.

    Raises:
        BlockingIOError: another process has the lock.
    """
    import fcntl  # missing on Windows, which only reads checkpoints

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise BlockingIOError(error.errno, error.strerror) from None
        return False
    return True


def _is(file: int, path: Path) -> bool:
    """Return whether an open file is the one at `path`."""
    try:
        there = os.lstat(path)
    except OSError:
        return False
    here = os.fstat(file)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _holder_of(file: int) -> Owner | None:
    """Return the holder of the file, after waiting a moment for its name."""
    until = time.monotonic() + _NAMING_SECONDS
    while (holder := _read(file)) is None and time.monotonic() < until:
        time.sleep(0.02)
    return holder


def _read(file: int) -> Owner | None:
    """Return the owner that a lock file names; None if it names none."""
    try:
        return checked(Owner, json_object(os.pread(file, _LARGEST, 0), LOCK), LOCK)
    except (OSError, FileError):
        return None


def _lives(owner: Owner) -> bool:
    """Return whether the process of a run on this machine may still run."""
    started = process_start(owner.pid)
    return started is not None and started < owner.started_seconds + 1


_HOLDS: weakref.WeakSet[Hold] = weakref.WeakSet()
_PASSED: list[int] = []


def _ours() -> list[Hold]:
    gc.collect()  # holds of unused trainers
    return list(_HOLDS)


def _released(path: Path, file: int, process: int) -> None:
    """Unlock explicitly, because other processes may have the file open too, and remove the file."""
    import fcntl

    if os.getpid() == process:
        with suppress(OSError):
            if _is(file, path):
                os.unlink(path)
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def _let_go_in_forks() -> None:
    """Drop the parent's holds in a fork: if it lives longer, the folder must be free."""
    for file in (*_PASSED, *(hold.file for hold in list(_HOLDS) if hold._give_up.detach())):
        with suppress(OSError):
            os.close(file)
    _PASSED.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_forks)
