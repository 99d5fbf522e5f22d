"""Files that people name, as they are read: regular ones of a reasonable size, each with a sentence for what is not.

So nothing waits on a pipe, and nothing reads from a device until memory ends. Costs a look at the file before it is
read as a whole.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pipefit.errors import FileError, UsageError
from pipefit.texts import kind_of
from pipefit.units import format_bytes


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
