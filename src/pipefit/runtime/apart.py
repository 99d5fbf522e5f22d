"""Memory of their own for gradients of parameters.

Autograd may make of one gradient several views, and hand them on as the gradients of a value and of a parameter, or of
two parameters: where `x + p.view(3, 8)` goes backward, both are the gradient of the sum. Whoever then adds up the
parameter's in place, as the backward of the next microbatch, a sum over replicas or another parameter's gradient do,
would change the value's too, which may be on its way to another stage. So a gradient that is born in memory of another
one is copied. The simulator counts both anyway. Costs a few microseconds for each layer and backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from pipefit.capture.storages import extent


def keep_apart(born: Iterable[nn.Parameter], others: Sequence[Tensor | None]) -> None:
    """Give the gradients of parameters that have just got them memory of their own, where they lie in that of gradients
    of each other, or in that of `others`, which stay where they are.
    """
    taken: dict[int, list[tuple[int, int]]] = {}
    for other in others:
        if other is not None:
            taken.setdefault(other.untyped_storage()._cdata, []).append(extent(other))
    for parameter in born:
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            continue
        spans, (first, end) = taken.setdefault(gradient.untyped_storage()._cdata, []), extent(gradient)
        if any(start < end and first < stop for start, stop in spans):
            parameter.grad = gradient.clone()
        else:
            spans.append((first, end))
