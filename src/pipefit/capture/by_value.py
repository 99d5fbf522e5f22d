"""Results of value-dependent operations on fake tensors, which have no values.

The results are those of a run in which every mask selects its whole tensor, every condition holds and every
number that is read is 1. In a mixture of experts, every expert then gets every token. This applies to layers
that a user wrote (`pipefit.chain`) and to modules that stay whole in a traced model. Peaks for other values
are unknown, so profiles and plans report these operations by name. A whole module that raises an exception
under these assumptions runs under the opposite ones (`otherwise`). Numbers that an optimizer reads, such as
its step count, are reported only if its memory depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipefit.schema.layer_costs import Kernel

aten = torch.ops.aten


@dataclass(slots=True)
class NumberReads:
    """Counters of a layer over all of its runs.

    `count` numbers have been read, `conditions` of them may decide what runs, `most` may be read, and `assumed`
    results have been assumed, numbers included.
    """

    count: int = 0
    conditions: int = 0
    assumed: int = 0
    most: int = 20_000


_reading: ContextVar[NumberReads | None] = ContextVar("numbers read by the running layer", default=None)
_otherwise: ContextVar[bool] = ContextVar("assume the opposite", default=False)
_updating: ContextVar[int | None] = ContextVar("numbers read by an update", default=None)

NUMBERS = (1, 2, 1_000_000)  # tried in place of each number that an optimizer's update reads
_REASON = "it depends on values: counted as if every mask selected everything and every condition were true"
_OTHERWISE = "it depends on values: counted as if every mask selected half and every condition were false"


def assumed(func: Any, args: tuple[Any, ...]) -> Any:
    """Return the assumed result of `func(*args)`; None if nothing can be assumed. Call it under a fake
    mode.
    """
    rule, numbers = _RULES.get(func), _reading.get()
    if numbers is not None:
        numbers.assumed += 1
    return None if rule is None else rule(*args)


def assumptions() -> int:
    """Return how many results have been assumed for the running layer, which other values may change."""
    numbers = _reading.get()
    return 0 if numbers is None else numbers.assumed


def unknown(func: Any) -> Kernel:
    """Return a `Kernel` of unknown memory for `func`, whose result is assumed."""
    return Kernel(operation=str(func), peak_bytes=None, reason=_OTHERWISE if _otherwise.get() else _REASON)


def is_assumed(kernel: Kernel) -> bool:
    """Return whether a profile's `kernel` had an assumed result."""
    return kernel.reason in (_REASON, _OTHERWISE)


def reads_a_number(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether `func(*args)` gives Python an assumed number, as every condition on a tensor does."""
    return func is aten._local_scalar_dense.default and getattr(args[0], "constant", None) is None


@contextmanager
def _set(variable: ContextVar[Any], value: object) -> Iterator[None]:
    """Give a context variable this value in the body."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def reading(numbers: NumberReads) -> Iterator[NumberReads]:
    """Count in `numbers` what a layer reads and assumes in the body.

    Raises:
        RuntimeError: more than `numbers.most` numbers are read, as by a loop whose condition always holds.
    """
    with _set(_reading, numbers):
        yield numbers


def updating(number: int = NUMBERS[0]) -> AbstractContextManager[None]:
    """Let an optimizer's update in the body read `number` in place of every number, without reporting it.

    The profiler tries several numbers, and reports the read if the memory of the update depends on the
    number.
    """
    return _set(_updating, number)


def otherwise() -> AbstractContextManager[None]:
    """Assume the opposite in the body: no condition holds, masks select half, and numbers are 2 or hardly 0."""
    return _set(_otherwise, True)


READINGS = [unknown(aten._local_scalar_dense.default)]
with otherwise():
    READINGS.append(unknown(aten._local_scalar_dense.default))


def is_named(func: Any) -> bool:
    """Return whether assumptions about `func` are reported: not those about numbers that an update reads."""
    return func is not aten._local_scalar_dense.default or _updating.get() is None


def _number(tensor: Tensor) -> bool | int | float:
    numbers = _reading.get()
    if numbers is not None:
        numbers.count += 1
        numbers.conditions += (
            tensor.dtype is torch.bool or tensor.is_floating_point()
        ) and _updating.get() is None
        if numbers.count > numbers.most:
            raise RuntimeError("numbers are read from tensors endlessly if every condition is true")
    if tensor.is_floating_point() and _otherwise.get() and _updating.get() is None:
        return 2.0**-24  # below every probability, so `item() < p` holds here alone
    result = _updating.get() or (2 if _otherwise.get() else 1)
    return (
        result % 2 == 1
        if tensor.dtype is torch.bool
        else float(result)
        if tensor.is_floating_point()
        else result
    )


def _selects(count: int) -> int:
    """Return how many of `count` elements a mask selects."""
    return count // 2 if _otherwise.get() else count


def _nonzero(tensor: Tensor) -> Tensor:
    """Return indices with the strides that kernels give them: one dimension after the other."""
    return torch.empty((tensor.ndim, _selects(tensor.numel())), dtype=torch.int64, device=tensor.device).t()


def _selected(tensor: Tensor, mask: Tensor) -> Tensor:
    return tensor.new_empty(_selects(aten.broadcast_tensors.default([tensor, mask])[0].numel()))


def _indexed(tensor: Tensor, indices: list[Tensor | None]) -> Tensor:
    """Index `tensor`, with each mask replaced by the indices of all its elements."""
    places: list[Tensor | None] = []
    for index in indices:
        places += _nonzero(index).unbind(1) if index is not None and index.dtype is torch.bool else (index,)
    result: Tensor = aten.index.Tensor(tensor, places)
    return result


def _ctc(log_probabilities: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return the losses and log alphas: 2 * (longest target) + 1 log alphas for each step and sample."""
    steps, samples = log_probabilities.shape[:2]
    longest = targets.shape[1] if targets.ndim == 2 else targets.numel()
    return log_probabilities.new_empty(samples), log_probabilities.new_empty(samples, steps, 2 * longest + 1)


_RULES: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _number,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _selected,
    aten.index.Tensor: _indexed,
    aten._ctc_loss.Tensor: _ctc,
}
