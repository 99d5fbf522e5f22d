"""Memory of its own for every gradient of a parameter.

Autograd may make several views of one gradient, and hand them on as the gradients of parameters and of values: behind
`torch.cat((p, q))` those of `p` and `q` are parts of one tensor, behind `x + p.view(3, 8)` that of `p` is that of `x`.
Whoever then adds to the parameter's in place, as the backward of the next microbatch or a sum over replicas, would
change the other one too, which may be on its way to another stage; and a small gradient would keep the memory of a
large tensor until the update. So a gradient that is born in shared or larger memory is copied as soon as it is born,
in a measured layer as in a whole stage. Copies cost time in the first backward of a step, and memory until the last
view is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn


@contextmanager
def born_apart(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, a backward runs: each gradient that it makes for one of the `parameters` has memory of its own."""
    without = dict.fromkeys(p for p in parameters if p.requires_grad and p.grad is None)
    hooks = [p.register_post_accumulate_grad_hook(_give_memory) for p in without]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _give_memory(parameter: Tensor) -> None:
    """Copy the gradient that a parameter has just got, if its memory is larger or has other users."""
    gradient = parameter.grad
    if gradient is not None and gradient.layout is torch.strided:
        storage = gradient.untyped_storage()
        if storage.nbytes() > gradient.nbytes or _users(storage) > _users_of_new():
            parameter.grad = gradient.clone()


def _users(storage: torch.UntypedStorage) -> int:
    """How many tensors use a storage, and this object."""
    return int(torch._C._storage_Use_Count(storage._cdata))


@cache
def _users_of_new() -> int:
    """How many that are of the storage of a tensor without views."""
    return _users(torch.empty(1, device="cpu").untyped_storage())
