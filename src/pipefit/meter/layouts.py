"""How the results of a kernel lie in memory, and fake results that lie in the same way.

For fake tensors torch has rules for the shapes, strides and dtypes of results. The kernel that really runs may return
other strides, another dtype (the statistics of norms under autocast), a storage that is larger than the result, or
another size of workspace, depending on the processor. The operations that follow then copy or keep other bytes, so fake
results are made to lie as the kernel's do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from pipefit.kernels import Layout
from pipefit.texts import dtype_name


def results_of(out: Any) -> list[Any]:
    """What an operation returned, one by one, lists within it too."""
    if not isinstance(out, (tuple, list)):
        return [out]
    return [result for part in out for result in results_of(part)]


def layouts_of(out: Any, given: Iterable[Tensor]) -> tuple[Layout | None, ...]:
    """How the results lie; None for one that is no tensor, or that shares its storage with a `given` one."""
    theirs = {tensor.untyped_storage()._cdata for tensor in given}
    numbers: dict[int, int] = {}
    return tuple(_layout_of(result, theirs, numbers) for result in results_of(out))


def _layout_of(result: Any, theirs: set[int], numbers: dict[int, int]) -> Layout | None:
    if not isinstance(result, Tensor) or (storage := result.untyped_storage())._cdata in theirs:
        return None
    return Layout(
        shape=tuple(result.shape),
        strides=result.stride(),
        offset=int(result.storage_offset()),
        storage=numbers.setdefault(storage._cdata, len(numbers)),
        storage_bytes=storage.nbytes(),
        dtype=dtype_name(result.dtype),
    )


def agree(out: Any, layouts: tuple[Layout | None, ...]) -> bool:
    """Whether fake results lie as `layouts` say. Real results always do, because the kernel has made them."""
    results = results_of(out)
    if len(results) != len(layouts) or not any(isinstance(result, FakeTensor) for result in results):
        return True
    numbers: dict[int, int] = {}
    return all(
        layout is None or _layout_of(result, set(), numbers) == layout
        for result, layout in zip(results, layouts, strict=True)
    )


def relaid(out: Any, layouts: tuple[Layout | None, ...]) -> Any:
    """Fake results like `out` that lie as `layouts` say, made in the fake mode that is active."""
    return _relaid(out, iter(layouts), {})


def _relaid(out: Any, layouts: Iterator[Layout | None], storages: dict[int, Tensor]) -> Any:
    if isinstance(out, (tuple, list)):
        return type(out)([_relaid(part, layouts, storages) for part in out])
    layout = next(layouts)
    if layout is None or not isinstance(out, Tensor):
        return out
    if layout.storage not in storages:
        storages[layout.storage] = torch.empty(layout.storage_bytes, dtype=torch.uint8, device=out.device)
    elements = storages[layout.storage].view(getattr(torch, layout.dtype))
    return elements.as_strided(layout.shape, layout.strides, layout.offset)
