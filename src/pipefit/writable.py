"""Whether files can be made in a folder, and how one is replaced as a whole.

A file is made to know the first, for rights and names say nothing of /proc or a full disk. Good for refusing a result's
place before hours of work. What changes between the question and the writing, such as a disk that fills, it cannot
know.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

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
