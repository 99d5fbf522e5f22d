"""Lets searches run without Python's search for cycles of garbage.

Planners make millions of objects, keep many of them and make no cycles to speak of. The collector looks at all of them
again and again, which takes as long as the planning itself. What is no longer used is freed all the same. In the end
all objects count as old ones, at which it looks seldom: as young ones it would look at all of them at once.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Within it the collector does not run; behind it, it does if it did before."""
    runs = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if runs:
            if not gc.get_freeze_count():  # what others have frozen stays so
                gc.freeze()
                gc.unfreeze()
            gc.enable()
