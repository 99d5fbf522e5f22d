"""What operations return whose results depend on values, over fake tensors that have none.

As if every mask selected all of its tensor and every condition held, which for a loop over experts means that each of
them is given every token. A layer that its author wrote may do this, in `pipefit.chain`, and so may a module that stays
whole in a traced model; what a peak is with other values is unknown, so the operations are kept by name, and profiles
and plans say so. Numbers that are read are ones. A whole module that raises an exception then runs as if the opposite
were true (`otherwise`).
An optimizer reads numbers too, such as its count of steps; it is named only if its memory depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipefit.schema.kernels import Kernel

aten = torch.ops.aten


@dataclass(slots=True)
class Reading:
    """How many numbers a layer has read in all of its runs, and how many it may read; and how often something was
    assumed of what it runs, numbers included.
    """

    count: int = 0
    assumed: int = 0
    most: int = 20_000


_reading: ContextVar[Reading | None] = ContextVar("the numbers that the layer which runs has read", default=None)
_otherwise: ContextVar[bool] = ContextVar("whether the opposite is assumed", default=False)
_updating: ContextVar[int | None] = ContextVar("what an update reads where it reads a number", default=None)

NUMBERS = (1, 2, 1_000_000)  # that an update is given for those it reads
_REASON = "it depends on values: counted as if every mask selected all and every condition held"
_OTHERWISE = "it depends on values: counted as if every mask selected half and no condition held"


def assumed(func: Any, args: tuple[Any, ...]) -> Any:
    """What `func(*args)` returns by these assumptions; None where nothing can be assumed. Call it under a fake mode."""
    rule, numbers = _RULES.get(func), _reading.get()
    if numbers is not None:
        numbers.assumed += 1
    return None if rule is None else rule(*args)


def assumptions() -> int:
    """How often something has been assumed of the layer that runs: other values may let it do otherwise."""
    numbers = _reading.get()
    return 0 if numbers is None else numbers.assumed


def unknown(func: Any) -> Kernel:
    """The operation, of which something is assumed now, as one whose memory is not known."""
    return Kernel(operation=str(func), peak_bytes=None, reason=_OTHERWISE if _otherwise.get() else _REASON)


def is_assumed(kernel: Kernel) -> bool:
    """Whether it is the operation of a profile of which something was assumed."""
    return kernel.reason in (_REASON, _OTHERWISE)


def reads_a_number(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether `func(*args)` gives Python a number that is assumed, as every condition on a tensor does."""
    return func is aten._local_scalar_dense.default and getattr(args[0], "constant", None) is None


@contextmanager
def reading(numbers: Reading) -> Iterator[Reading]:
    """Inside, a layer runs. One that reads too many numbers loops for as long as a condition holds: for ever.

    Raises:
        RuntimeError: it has read more than it may.
    """
    token = _reading.set(numbers)
    try:
        yield numbers
    finally:
        _reading.reset(token)


@contextmanager
def updating(number: int = NUMBERS[0]) -> Iterator[None]:
    """Inside, an optimizer updates, reads this number wherever it reads one, and is not named for it.

    Whoever makes a profile tries several, and lets it be named if its memory depends on them.
    """
    token = _updating.set(number)
    try:
        yield
    finally:
        _updating.reset(token)


@contextmanager
def otherwise() -> Iterator[None]:
    """Inside, no condition holds, masks select half of their tensors, and numbers that are read are twos."""
    token = _otherwise.set(True)
    try:
        yield
    finally:
        _otherwise.reset(token)


READINGS = [unknown(aten._local_scalar_dense.default)]
with otherwise():
    READINGS.append(unknown(aten._local_scalar_dense.default))


def is_named(func: Any) -> bool:
    """Whether to say of `func` that something was assumed of it."""
    return func is not aten._local_scalar_dense.default or _updating.get() is None


def _number(tensor: Tensor) -> bool | int | float:
    numbers = _reading.get()
    if numbers is not None:
        numbers.count += 1
        if numbers.count > numbers.most:
            raise RuntimeError("numbers are read from tensors without an end, as if every condition held")
    found = _updating.get() or (2 if _otherwise.get() else 1)
    return found % 2 == 1 if tensor.dtype is torch.bool else float(found) if tensor.is_floating_point() else found


def _selects(count: int) -> int:
    """How many of so many elements a mask selects."""
    return count // 2 if _otherwise.get() else count


def _nonzero(tensor: Tensor) -> Tensor:
    """Laid out as kernels do it: one dimension after the other."""
    return torch.empty((tensor.ndim, _selects(tensor.numel())), dtype=torch.int64, device=tensor.device).t()


def _selected(tensor: Tensor, mask: Tensor) -> Tensor:
    return tensor.new_empty(_selects(aten.broadcast_tensors.default([tensor, mask])[0].numel()))


def _indexed(tensor: Tensor, indices: list[Tensor | None]) -> Tensor:
    """Masks among the indices become the places of all their elements."""
    places: list[Tensor | None] = []
    for index in indices:
        places += _nonzero(index).unbind(1) if index is not None and index.dtype is torch.bool else (index,)
    found: Tensor = aten.index.Tensor(tensor, places)
    return found


def _ctc(log_probabilities: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """The losses, and for each the logarithms of alpha: two for every target as long as there may be, and one more."""
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
