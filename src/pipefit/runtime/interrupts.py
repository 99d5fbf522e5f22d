"""Ctrl-C held back: while processes are started and stopped, so that none is forgotten halfway."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.resource_tracker import ensure_running


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Inside, Ctrl-C is held back; what was pressed meanwhile takes effect at the end.

    Processes that are started inside ignore Ctrl-C for good. A terminal sends it to all, and the parent stops them.
    """
    usual, pressed = signal.getsignal(signal.SIGINT), False

    def press(number: int, frame: object) -> None:
        nonlocal pressed
        pressed = True

    # A handler too: the signal may arrive at another thread, and Python runs the handler in the main thread then.
    ours = threading.current_thread() is threading.main_thread() and usual is not None
    if ours:
        signal.signal(signal.SIGINT, press)
    try:
        ensure_running()  # otherwise multiprocessing starts its tracker inside, and removes the block
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # what a new process inherits
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    finally:
        if ours:
            signal.signal(signal.SIGINT, usual)
        if pressed:
            signal.raise_signal(signal.SIGINT)
