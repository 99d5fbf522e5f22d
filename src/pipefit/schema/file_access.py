"""Whether files can be made in a folder, and how one is replaced as a whole.

A file is made to know the first, for rights and names say nothing of /proc or a full disk. Good for refusing a result's
place before hours of work. What changes between the question and the writing, such as a disk that fills, it cannot
know.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from pathlib import Path

from pipefit.errors import FileError, UsageError
from pipefit.texts import kind_of
from pipefit.units import format_bytes

# ----------------------------------------------------------------------------------------------------
# Files that people name, as they are read: regular ones of a reasonable size, each with a sentence for what
# is not.
#
# So nothing waits on a pipe, and nothing reads from a device until memory ends. Costs a look at the file
# before it is read as a whole.


def path_of(named: str | os.PathLike[str]) -> Path:
    """The path that is named.

    Raises:
        UsageError: it is neither a text nor a path.
    """
    if not isinstance(named, str | os.PathLike):
        raise UsageError(f"a file is named by a text or a path, not by {kind_of(named)}")
    return Path(named)


def content(path: str | os.PathLike[str], source: str, most: int, what: str) -> bytes:
    """The bytes of a file, which messages call `source`; `what` says in words what has at most `most` bytes.

    Raises:
        FileError: it is missing, a folder, a pipe or a device, larger than that, or cannot be read.
    """
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise FileError(f"{source} is a folder; name a file in it")
        if not stat.S_ISREG(status.st_mode):
            raise FileError(f"{source} is not a regular file; save its content to one first")
        if status.st_size > most:
            raise FileError(f"{source} has {format_bytes(status.st_size)}; {what} at most {format_bytes(most)}")
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise FileError(f"there is no file {source}; check the name and the folder") from None
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        reason = error.strerror if isinstance(error, OSError) else None
        raise FileError(f"{source} cannot be read: {reason or error}") from None


# ----------------------------------------------------------------------------------------------------

# Flags of `os.open` for a file whose name somebody else may have given to a link or a pipe: neither is followed or
# waited for, and no program that is started inherits it. Windows has none of the three.
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


def obstacle(folder: str | os.PathLike[str]) -> str:
    """What keeps us from making a file in a folder that exists, in the system's words; empty if nothing does."""
    try:
        number, name = tempfile.mkstemp(prefix=".pipefit-", suffix=".tmp", dir=folder)
    except OSError as error:
        return error.strerror or type(error).__name__
    os.close(number)
    os.unlink(name)
    return ""


def replace_file(path: str | os.PathLike[str], content: bytes, *, through_links: bool = True) -> None:
    """Write a temporary file beside the file that is meant, flush it to the disk, and then rename it.

    Nothing stays beside it however that ends, unless this process is killed. A user who names a link means what it
    leads to; where nobody has named it, the link itself is replaced.

    Raises:
        OSError: it cannot be written; what was there is as it was.
    """
    target = Path(os.path.realpath(path) if through_links else path)
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
    """A new hidden name beside `target`. Others have it neither at the same time nor left from before, as they may have
    the number of a process, on another machine or in another container.
    """
    return target.with_name(f".{target.name[:100]}.{secrets.token_hex(6)}.tmp")
