"""Where files are made: whether a folder takes one, and names for what will replace a file as a whole.

A folder is asked by making a file in it, for rights and names say nothing of /proc or a full disk. Good for refusing a
result's place before hours of work. Costs a file that is made and removed. What changes between the question and the
writing, such as a disk that fills, it cannot know.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path


def obstacle(folder: str | os.PathLike[str]) -> str:
    """What keeps us from making a file in a folder that exists, in the system's words; empty if nothing does."""
    try:
        number, name = tempfile.mkstemp(prefix=".pipefit-", suffix=".tmp", dir=folder)
    except OSError as error:
        return error.strerror or type(error).__name__
    os.close(number)
    os.unlink(name)
    return ""


def temporary_of(target: Path) -> Path:
    """A new hidden name beside `target`. Others have it neither at the same time nor left from before, as they may have
    the number of a process, on another machine or in another container.
    """
    return target.with_name(f".{target.name[:100]}.{secrets.token_hex(6)}.tmp")
