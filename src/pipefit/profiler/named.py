"""Whose exception it is that a model raises while it is profiled: a layer's, the loss's or the optimizer's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from pipefit.capture.by_value import Reading, reading
from pipefit.capture.foreign_draws import torch_draws_alone
from pipefit.capture.refusals import Refusal
from pipefit.capture.refused_runs import why
from pipefit.errors import PipefitError, UsageError
from pipefit.texts import dtype_name

_ASSUMED = (
    ". Until then it has read numbers, and a profile assumes that every condition on a tensor holds: leave out a check "
    "that fails then, or make it torch._assert_async(condition)"
)


@contextmanager
def named(what: str, values: Sequence[Tensor]) -> Iterator[None]:
    """Inside, an exception becomes an error that says `what` it is.

    Raises:
        UsageError: something raised an exception.
    """
    numbers = Reading()
    try:
        with torch_draws_alone(), reading(numbers):
            yield
    except PipefitError:
        raise
    except Refusal as refusal:
        raise UsageError(f"{what} cannot be planned: {refusal}") from refusal
    except Exception as error:
        shapes = ", ".join(f"{dtype_name(value.dtype)} {tuple(value.shape)}" for value in values)
        assumed = _ASSUMED if numbers.count else ""
        raise UsageError(f"{what} cannot be run on {shapes}: {why(error)}{assumed}") from error
