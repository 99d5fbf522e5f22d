"""A limit of the process that stands for a full disk."""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def fill_disk(nbytes: int) -> None:
    """From now on the system writes no file of this process beyond so many bytes.

    Python would cut its byte code off there without a word, and every later process would find that.
    """
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextmanager
def full_disk(nbytes: int = 4096) -> Iterator[None]:
    """Inside, the system writes no file beyond so many bytes."""
    usual, code = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), sys.dont_write_bytecode
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    fill_disk(nbytes)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = code
        signal.signal(signal.SIGXFSZ, usual)
