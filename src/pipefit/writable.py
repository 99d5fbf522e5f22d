"""Whether files can be made in a folder: by making one, for rights and names say nothing of /proc or a full disk.

Good for refusing a result's place before hours of work. Costs a file that is made and removed. What changes between
the question and the writing, such as a disk that fills, it cannot know.
"""

from __future__ import annotations

import os
import tempfile


def obstacle(folder: str | os.PathLike[str]) -> str:
    """What keeps us from making a file in a folder that exists, in the system's words; empty if nothing does."""
    try:
        number, name = tempfile.mkstemp(prefix=".pipefit-", suffix=".tmp", dir=folder)
    except OSError as error:
        return error.strerror or type(error).__name__
    os.close(number)
    os.unlink(name)
    return ""
