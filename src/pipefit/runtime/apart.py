"""Memory of its own for every gradient of a parameter.

Autograd may make several views of one gradient, and hand them on as the gradients of parameters and of values: behind
`torch.cat((p, q))` those of `p` and `q` are parts of one tensor, behind `x + p.view(3, 8)` that of `p` is that of `x`.
Whoever then adds to the parameter's in place, as the backward of the next microbatch or a sum over replicas, would
change the other one too, which may be on its way to another stage; and a small gradient would keep the memory of a
large tensor until the update. So a gradient that is born in shared or larger memory is copied as soon as it is born,
in a measured layer as in a whole stage; a gradient with memory of its own is not. Copies cost time in the first
backward of a step, and memory until the last view is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

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
        users = torch._C._storage_Use_Count(storage._cdata)  # the gradient, the object `storage`, and others
        if storage.nbytes() > gradient.nbytes or users > 2:
            parameter.grad = gradient.clone()
