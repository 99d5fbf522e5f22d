"""Process limit that simulates a full disk."""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def fill_disk(nbytes: int) -> None:
    """Limit the files of this process to this many bytes.

    Python would silently truncate its byte code there, and every later process would read it.
    """
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextmanager
def full_disk(nbytes: int = 4096) -> Iterator[None]:
    """Limit file sizes to this many bytes inside the context."""
    usual, code = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), sys.dont_write_bytecode
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    fill_disk(nbytes)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = code
        signal.signal(signal.SIGXFSZ, usual)
