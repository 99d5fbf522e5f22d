"""Progress on stderr for work of more than two seconds: a bar on a terminal, otherwise occasional lines.

Meanwhile stdout is kept for results: output of the user's model goes to stderr too.
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
                    f"pipefit: {printable(self._now)}, {monotonic() - self._began:.0f} s", file=self._stream, flush=True
                )
            seconds, before = (2 * seconds if self._now == before else SECONDS), self._now
