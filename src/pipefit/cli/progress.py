"""Progress on stderr, for what may take longer than two seconds: a bar on a terminal, elsewhere a line now and then.

Stdout is kept for results meanwhile: what a model of the user's own prints goes to stderr as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from threading import Event, Thread
from time import monotonic
from typing import TextIO

from pipefit.texts import printable

Report = Callable[[int, int, str], None]
FIRST_SECONDS, SECONDS = 1.5, 5.0  # until the first line where stderr is no terminal, and from line to line


@contextmanager
def progress(title: str, *, lines: bool = True) -> Iterator[Report]:
    """A function to call with (done, total, what is being done); a total of 0 is one that nobody knows. The bar goes
    when the work ends.

    Where stderr is no terminal there are `lines`, unless the work writes lines of its own.
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
        """So many of how many, where that is known."""

        def render(self, task: Task) -> Text:
            """Nothing before the first report."""
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
    """A line with what is being done, after a moment and then every few seconds, as long as the work takes."""

    def __init__(self, title: str, stream: TextIO) -> None:
        self._title, self._stream, self._began = title, stream, monotonic()
        self._now, self._ended = title, Event()
        self._thread = Thread(target=self._write, name="pipefit-progress", daemon=True)

    def start(self) -> None:
        """Begin to write; where the system has no thread left for it, nothing is written."""
        with suppress(RuntimeError):
            self._thread.start()

    def report(self, done: int, total: int, what: str) -> None:
        """What is being done now."""
        self._now = f"{self._title}: {what}" + (f" ({done} of {total})" if total else "")

    def stop(self) -> None:
        """No line is written behind the call."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _write(self) -> None:
        seconds = FIRST_SECONDS
        while not self._ended.wait(seconds):
            with suppress(OSError, ValueError):  # nobody reads it any more
                print(
                    f"pipefit: {printable(self._now)}, {monotonic() - self._began:.0f} s", file=self._stream, flush=True
                )
            seconds = SECONDS
