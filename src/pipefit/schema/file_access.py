"""Reading of files that users name, and atomic replacement of files."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from pathlib import Path

from pipefit.errors import FileError, UsageError
from pipefit.texts import kind_of
from pipefit.units import format_bytes

# ---- Reading
#
# Only regular files of limited size are read, so nothing waits on a pipe or reads a device until memory ends.


def path_of(named: str | os.PathLike[str]) -> Path:
    """Return the path that is named.

    Raises:
        UsageError: neither a text nor a path.
    """
    if not isinstance(named, str | os.PathLike):
        raise UsageError(f"a file is named by a text or a path, not by {kind_of(named)}")
    return Path(named)


def content(path: str | os.PathLike[str], source: str, most: int, what: str) -> bytes:
    """Read a file; `source` names it in messages, and `what` names the files that have at most `most` bytes.

    Raises:
        FileError: it is missing, a folder, a pipe or a device, too large, or unreadable.
    """
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise FileError(f"{source} is a folder: name a file in it")
        if not stat.S_ISREG(status.st_mode):
            raise FileError(f"{source} is not a regular file: save its content to a regular file first")
        if status.st_size > most:
            raise FileError(
                f"{source} has {format_bytes(status.st_size)}, but {what} at most {format_bytes(most)}"
            )
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise FileError(f"file {source} does not exist: check the name and the folder") from None
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        reason = error.strerror if isinstance(error, OSError) else None
        raise FileError(f"{source} cannot be read: {reason or error}") from None


# ---- Writing

# `os.open` flags for a file that another user may have replaced by a link or a pipe: do not follow links, do
# not wait for pipes, and do not let child processes inherit it. Windows has none of the three.
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


def obstacle(folder: str | os.PathLike[str]) -> str:
    """Return why no file can be created in an existing folder, in the system's words; empty if one can.

    Creates and deletes a file, because permissions reveal nothing about /proc or a full disk.
    """
    try:
        number, name = tempfile.mkstemp(prefix=".pipefit-", suffix=".tmp", dir=folder)
    except OSError as error:
        return error.strerror or type(error).__name__
    os.close(number)
    os.unlink(name)
    return ""


def replace_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace a file atomically: write a temporary file next to it, flush it to the disk, and rename it.

    The temporary file is removed on any failure, unless this process is killed. Of a link, the target is
    replaced.

    Raises:
        OSError: it cannot be written; the previous file is unchanged.
    """
    target = Path(os.path.realpath(path))
    temporary = temporary_of(target)
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def temporary_of(target: Path) -> Path:
    """Return a new hidden name next to `target`.

    The name is random, because a process number may also be used on another machine or in another container.
    """
    return target.with_name(f".{target.name[:100]}.{secrets.token_hex(6)}.tmp")
