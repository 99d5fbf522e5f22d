"""The number of CPU threads, set for as long as something is measured that a worker will run with that number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    """Inside, torch's kernels use `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
