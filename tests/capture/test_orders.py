"""Memory order of dimensions: a value keeps its strides across a cut."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipefit.capture.chain import ChainLayer
from pipefit.capture.storages import as_made, contiguous, orders_of

SIZES = [(2, 3, 4, 5), (2, 3, 1, 1), (1, 3, 1, 1), (2, 1, 4, 5), (1, 1, 4, 1), (1, 1, 1, 1), (2, 1, 1, 5)]


@pytest.mark.parametrize("sizes", SIZES)
def test_strides_cross_a_cut_whatever_the_order_in_memory(sizes: tuple[int, ...]) -> None:
    """Strides of dimensions of size 1 are kept too, because kernels detect channels-last by them."""
    for order in permutations(range(4)):
        made = torch.empty([sizes[d] for d in order])
        back = [order.index(d) for d in range(4)]
        value = made.permute(back)
        orders = orders_of((value,))
        (crossing,) = contiguous((value,), orders)
        assert crossing.stride() == torch.empty(crossing.shape).stride()
        (there,) = as_made((crossing,), orders)
        assert (there.shape, there.stride()) == (value.shape, value.stride())
        assert there.is_contiguous(memory_format=torch.channels_last) == value.is_contiguous(
            memory_format=torch.channels_last
        )


def test_a_slice_crosses_as_a_new_tensor() -> None:
    """A slice that no order makes dense is copied, with its dimensions in place."""
    value = torch.empty(4, 6, 5)[:, ::2]
    assert orders_of((value,)) == ()
    assert contiguous((value,), ())[0].stride() == (15, 5, 1)


class Turned(nn.Linear):
    """A linear layer whose output is a view of another order."""

    def forward(self, values: Tensor | tuple[Tensor]) -> Tensor:
        return super().forward(values[0] if isinstance(values, tuple) else values).transpose(0, 1)


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"leaves": ()},
        {"leaves": ((1, 0),)},
        {"packing": "tuple"},
        {"autocast": torch.bfloat16},
        {"autocast": torch.bfloat16, "leaves": ()},
    ],
)
def test_the_caller_of_a_layer_does_what_a_call_does(form: dict[str, Any]) -> None:
    """Values, dtype and strides are equal, also when values leave in another order, packed or under autocast."""
    layer = ChainLayer("layer", Turned(4, 4), **form)
    (values,) = layer((torch.randn(3, 4),))
    (same,) = layer.caller()((torch.randn(3, 4),))
    assert (same.shape, same.dtype, same.stride()) == (values.shape, values.dtype, values.stride())
    given = torch.randn(3, 4)
    assert torch.equal(layer.caller()((given,))[0], layer((given,))[0])
