"""Files of a checkpoint as they are opened for reading: only regular ones, and no link is followed.

So a folder from a stranger cannot make the reader wait on a pipe, or read a file from elsewhere. What was checked is
what is read: a library that opens files by path gets the path of the open file (`open_path`).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from pipefit.errors import FileError, UnreadableCheckpoint
from pipefit.texts import printable
from pipefit.writable import NO_LINK

_NOT_ITS_FAULT = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EINTR}


@contextmanager
def regular_file(path: Path) -> Iterator[tuple[FileIO, int]]:
    """The file in `path`, open and unbuffered, and its size in bytes.

    Raises:
        UnreadableCheckpoint: it may not be read, or there is no room to read it just now.
        FileError: it is missing, no regular file, or cannot be read.
    """
    source = printable(os.fspath(path))
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
    """A path by which the open `file` can be opened again, whatever `path` names by now; `path` where there is none."""
    known = (f"{folder}/{file.fileno()}" for folder in ("/proc/self/fd", "/dev/fd"))
    return next((name for name in known if os.path.exists(name)), os.fspath(path))
