"""How the gradients of values lie in memory: each in a storage of its own, or several as parts of one, or expanded.

A layer's backward may copy a gradient that is not dense before it computes with it. So layers are measured with
gradients that lie as the next layer, or the loss, hands them on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GradientLayout:
    """A gradient: the number of its storage among those that arrive together, that storage's bytes, its place there."""

    storage: int
    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


Layouts = tuple[GradientLayout | None, ...]  # None where a value has no gradient


def layouts_of(gradients: Sequence[Tensor | None]) -> Layouts:
    """How these gradients lie."""
    numbers: dict[int, int] = {}
    return tuple(None if gradient is None else _layout(gradient, numbers) for gradient in gradients)


def _layout(gradient: Tensor, numbers: dict[int, int]) -> GradientLayout:
    storage = gradient.untyped_storage()
    number = numbers.setdefault(storage._cdata, len(numbers))
    place = tuple(gradient.shape), gradient.stride(), int(gradient.storage_offset())
    return GradientLayout(number, storage.nbytes(), *place, gradient.dtype)


def dense(values: Sequence[Tensor]) -> Layouts:
    """How gradients lie that a stage receives, or that are measured first: each alone, in the order of its value."""
    return layouts_of(gradients_like(values))


def dense_alike(layouts: Layouts, dense_ones: Layouts) -> Layouts:
    """The `dense_ones` without those that `layouts` have no gradient for: what a stage that ends here receives."""
    left = [one if layout is not None else None for layout, one in zip(layouts, dense_ones, strict=True)]
    numbers = {one.storage: number for number, one in enumerate(filter(None, left))}
    return tuple(None if one is None else replace(one, storage=numbers[one.storage]) for one in left)


def gradients_like(values: Sequence[Tensor]) -> list[Tensor | None]:
    """A dense gradient for every value that requires one."""
    return [torch.empty_like(value, requires_grad=False) if value.requires_grad else None for value in values]


def gradients_in(layouts: Layouts, device: torch.device) -> list[Tensor | None]:
    """Gradients that lie so."""
    storages: dict[int, Tensor] = {}
    found: list[Tensor | None] = []
    for layout in layouts:
        if layout is None:
            found.append(None)
            continue
        if layout.storage not in storages:
            count = layout.nbytes // layout.dtype.itemsize
            storages[layout.storage] = torch.empty(count, dtype=layout.dtype, device=device)
        flat = storages[layout.storage].view(layout.dtype)
        found.append(flat.as_strided(layout.shape, layout.stride, layout.offset))
    return found
