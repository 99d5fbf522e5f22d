"""Progress on stderr for work of more than two seconds: a bar on a terminal, otherwise occasional lines.

Meanwhile stdout is kept for results: output of the user's model goes to stderr too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from threading import Event, Thread
from time import monotonic
from typing import TextIO

from pipefit.processes import ENDING, processes, room_for_threads
from pipefit.texts import printable

# ---- Signals that stop a command: Ctrl-C, and those of a scheduler, a closed terminal or a user who quits.
#
# Most of a command's time passes inside torch, in which an exception from outside may be swallowed,
# misinterpreted, or abort the process. There the command prints a word and ends at once: nothing needs
# cleanup, because files are written atomically. While workers run or a file is written (`cleared_away`), a
# signal is an exception instead. Signals that the parent ignores, as nohup does, are ignored.

STOPPED = 130  # shells' exit code of a command that Ctrl-C ended
_USUAL = (signal.SIG_DFL, signal.default_int_handler)
_CLEAR = b"\r\x1b[2K\x1b[?25h"  # clears the line of a progress bar, and shows the cursor, which the bar hides


class Stopped(BaseException):
    """A signal other than Ctrl-C: the command cleans up and ends."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number  # shells' exit code of a command that the signal ended


@contextmanager
def stoppable(*, at_once: bool, to_the_end: bool = False) -> Iterator[None]:
    """Let signals stop the command in the block: at once, or by an exception.

    With `to_the_end`, they also do while the process exits.
    """
    with _handled(
        lambda number: signal.getsignal(number) in _USUAL, _end if at_once else None, stays=to_the_end
    ):
        yield


@contextmanager
def cleared_away() -> Iterator[None]:
    """Raise an exception in the block for signals that would otherwise end the command at once."""
    with _handled(lambda number: signal.getsignal(number) is _end, None):
        yield


@contextmanager
def _handled(
    chosen: Callable[[int], bool], handler: Callable[[int, object], None] | None, *, stays: bool = False
) -> Iterator[None]:
    """Handle the chosen signals with `handler` in the block, and afterwards if it `stays`.

    Without a handler, each raises its exception.
    """
    ours = threading.current_thread() is threading.main_thread()
    usual = {number: signal.getsignal(number) for number in ENDING if ours and chosen(number)}
    for number in usual:
        signal.signal(number, handler or (signal.default_int_handler if number == signal.SIGINT else _raise))
    try:
        yield
    finally:
        for number, before in usual.items():
            if not stays:
                signal.signal(number, before)


def _raise(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    raise Stopped(number)


def _end(number: int, frame: object) -> None:
    """Print a word and end the process. Printed output is flushed, unless a second signal comes first."""
    for other in ENDING:
        signal.signal(other, lambda *_: os._exit(128 + number))
    word, code = b"stopped" if number == signal.SIGINT else str(Stopped(number)).encode(), 128 + number
    if number == signal.SIGINT and not room_for_threads(1):  # OpenBLAS sends it if it cannot start a thread
        word, code = (
            f"no more threads can be started: {processes() or 'ulimit -a shows the limits'}".encode(),
            1,
        )
    with suppress(Exception):
        sys.stdout.flush()
    with suppress(OSError):
        os.write(2, (_CLEAR if os.isatty(2) else b"") + b"pipefit: " + word + b"\n")
    os._exit(code)


Report = Callable[[int, int, str], None]
FIRST_SECONDS, SECONDS = 1.5, 5.0  # until the first line if stderr is not a terminal, and between lines


@contextmanager
def progress(title: str, *, lines: bool = True) -> Iterator[Report]:
    """Provide a function to call with (done, total, current activity).

    A total of 0 means unknown. The bar disappears at the end.

    If stderr is not a terminal, `lines` are written, unless the work writes its own.
    """
    if not sys.stderr.isatty():
        told = _Lines(title, sys.stderr)
        if lines:
            told.start()
        try:
            with redirect_stdout(sys.stderr):
                yield told.report
        finally:
            told.stop()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
    from rich.text import Text

    class Counts(TextColumn):
        """Done of total, if known."""

        def render(self, task: Task) -> Text:
            """Return the counts; empty before the first report."""
            return super().render(task) if task.total else Text()

    text = TextColumn("{task.description}", markup=False)
    counts = Counts("{task.completed:.0f}/{task.total:.0f}", markup=False)
    columns = (SpinnerColumn(), text, BarColumn(), counts, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(title, total=None)
        yield lambda done, total, what: bars.update(
            bar, completed=done, total=total or None, description=f"{title}: {what}"
        )


class _Lines:
    """Lines about the current activity, after a moment and then every few seconds, as long as the work takes.

    A line that stays the same is repeated less and less often.
    """

    def __init__(self, title: str, stream: TextIO) -> None:
        self._title, self._stream, self._began = title, stream, monotonic()
        self._now, self._ended = title, Event()
        self._thread = Thread(target=self._write, name="pipefit-progress", daemon=True)

    def start(self) -> None:
        """Start writing; without a free thread, nothing is written."""
        with suppress(RuntimeError):
            self._thread.start()

    def report(self, done: int, total: int, what: str) -> None:
        """Set the current activity."""
        self._now = f"{self._title}: {what}" + (f" ({done} of {total})" if total else "")

    def stop(self) -> None:
        """Stop writing; no line is written after the call."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _write(self) -> None:
        seconds, before = FIRST_SECONDS, ""
        while not self._ended.wait(seconds):
            with suppress(OSError, ValueError):  # no reader any more
                print(
                    f"pipefit: {printable(self._now)}, {monotonic() - self._began:.0f} s",
                    file=self._stream,
                    flush=True,
                )
            seconds, before = (2 * seconds if self._now == before else SECONDS), self._now
