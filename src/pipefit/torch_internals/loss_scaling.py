"""Loss scaling that always lets the optimizer step, as it does unless a gradient is infinite or nan."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.optim import Optimizer

__all__ = ["always_stepping"]


def _step(_: object, optimizer: Optimizer, __: object, *args: Any, **kwargs: Any) -> Any:
    return optimizer.step(*args, **kwargs)


@contextmanager
def always_stepping() -> Iterator[None]:
    """Let every `GradScaler` in the body step its optimizer without a look at the gradients."""
    name = torch.amp.GradScaler._maybe_opt_step.__name__
    with mock.patch.object(torch.amp.GradScaler, name, _step):
        yield
