"""Progress on stderr, for what may take longer than two seconds; silent where stderr is no terminal.

Stdout is kept for results meanwhile: what a model of the user's own prints goes to stderr as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout

Report = Callable[[int, int, str], None]


@contextmanager
def progress(title: str) -> Iterator[Report]:
    """A function to call with (done, total, what is being done). The bar goes when the work ends."""
    if not sys.stderr.isatty():
        with redirect_stdout(sys.stderr):
            yield _ignore
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
        yield lambda done, total, what: bars.update(bar, completed=done, total=total, description=f"{title}: {what}")


def _ignore(done: int, total: int, what: str) -> None:
    """Where stderr is no terminal."""
