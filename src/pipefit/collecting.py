"""Lets searches run without Python's search for cycles of garbage.

Planners make millions of objects, keep many of them and make no cycles to speak of. The collector looks at all of them
again and again, which takes as long as the planning itself. What is no longer used is freed all the same.
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
            gc.enable()
