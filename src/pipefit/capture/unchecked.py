"""What torch checks of values that a trace and fake tensors do not have.

Distributions check their arguments, and the Gaussian likelihood that no variance is negative. A trace leaves these out;
over fake tensors nothing is known, and every condition would hold, this one too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.nn import functional as F
from torch.overrides import resolve_name

_any, _likelihood = torch.any, F.gaussian_nll_loss


@contextlib.contextmanager
def unchecked_arguments() -> Iterator[None]:
    """Inside, torch's distributions do not check the values of what they are given, unless they are told to."""
    with mock.patch.object(Distribution, "_validate_args", False):
        yield


@contextlib.contextmanager
def no_negative_variance() -> Iterator[None]:
    """Inside, `gaussian_nll_loss` looks for negative variances, and finds none."""
    resolve_name(_any)  # torch keeps the names of its functions as they are when it is first asked
    with mock.patch.object(F, "gaussian_nll_loss", _unchecked):
        yield


@functools.wraps(_likelihood)
def _unchecked(*args: Any, **options: Any) -> Tensor:
    with mock.patch.object(torch, "any", _found_nothing):
        return _likelihood(*args, **options)


def _found_nothing(*args: Any, **options: Any) -> bool:
    _any(*args, **options)
    return False
