"""Without GPUs: what is traced and counted is the same on every machine, and asks nothing of a GPU where there is one.

Torch's tracer saves and restores the random state of a GPU, which makes a context there; and a model may compute
something else where there is one. Both ask `torch.cuda.is_available()` first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch


@contextmanager
def without_gpus() -> Iterator[None]:
    """Inside, torch says that this machine has no GPU."""
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        mock.patch.object(torch.cuda, "device_count", return_value=0),
    ):
        yield
