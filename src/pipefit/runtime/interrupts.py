"""Signals held back: while processes are started and stopped, so that none is forgotten halfway."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.resource_tracker import ensure_running

from pipefit.signals import ENDING


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Inside, Ctrl-C is held back, and other signals that have a handler; what came meanwhile takes effect at the end.

    Processes that are started inside ignore Ctrl-C for good. A terminal sends it to all, and the parent stops them.
    """
    came = list[signal.Signals]()

    def hold(number: int, frame: object) -> None:
        came.append(signal.Signals(number))

    # A handler too: the signal may arrive at another thread, and Python runs the handler in the main thread then.
    ours = threading.current_thread() is threading.main_thread()
    usual = {number: handler for number in ENDING if ours and callable(handler := signal.getsignal(number))}
    try:
        for number in usual:
            signal.signal(number, hold)
        with suppress(OSError):  # what cannot be started here fails where it is needed
            ensure_running()  # otherwise multiprocessing starts its tracker inside, and removes the block
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # what a new process inherits
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)
