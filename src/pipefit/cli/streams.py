"""The standard streams of a command, so that none of them loses a result in silence, or costs one.

Stdin and stderr that our parent closed lead nowhere, here and in workers, and no other file takes their place; a closed
stdout refuses every word, as it does with the system's own programs. Stdout has a buffer under PYTHONUNBUFFERED too,
which ends with a line: without it Python takes a write of which a full disk has taken a part for a whole one. What
stderr cannot take is lost, as on a full disk: days of training do not end for want of a log.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import TextIO


class Told(io.TextIOWrapper):
    """A stream of words for people, which raises nothing where the system does not take them."""

    def write(self, text: str) -> int:
        """Write the text, or lose it; its length."""
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Write what waits, or lose it."""
        with suppress(OSError):
            super().flush()


def fill_streams() -> bool:
    """Make the process's own streams such; others that a caller has put in their place stay.

    Returns whether stdout can be written to: it is neither closed nor open for reading only.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            way = os.O_RDONLY if name == "stdout" else os.O_RDWR
            stream = os.fdopen(os.open(os.devnull, way), mode, encoding="utf-8")
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    if (out := sys.__stdout__) is not None and sys.stdout is out and isinstance(out.buffer, io.RawIOBase):
        sys.stdout = _again(out, io.TextIOWrapper)
    if (err := sys.__stderr__) is not None and sys.stderr is err:
        sys.stderr = _again(err, Told)
    return _takes_words(sys.stdout)


def _takes_words(stream: TextIO) -> bool:
    """Whether the system lets this process write to a stream; one that is no file takes what it likes."""
    try:
        os.write(stream.fileno(), b"")
    except OSError as error:
        return error.errno != errno.EBADF
    except (AttributeError, ValueError):
        pass
    return True


def _again(stream: TextIO, kind: type[io.TextIOWrapper]) -> io.TextIOWrapper:
    """A stream of another kind to the same file, with a buffer that ends with a line."""
    buffer = os.fdopen(stream.fileno(), "wb", closefd=False)
    return kind(buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=True)
