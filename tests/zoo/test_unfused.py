"""GELU and layer norm of plain operations match torch's own: the same numbers, three times the saved
bytes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipefit import models
from pipefit.models.bert import UnfusedGELU, UnfusedLayerNorm

PAIRS = {
    "gelu": (UnfusedGELU, nn.GELU),
    "norm": (lambda: UnfusedLayerNorm(24, eps=1e-12), lambda: nn.LayerNorm(24, eps=1e-12)),
}


def outcome(module: nn.Module, hidden: Tensor, weights: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of the input and of all parameters."""
    x = hidden.clone().requires_grad_()
    out = module(x)
    (out * weights).sum().backward()
    return [out.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("name", PAIRS)
def test_the_numbers_are_those_of_the_fused_kernel(name: str) -> None:
    """Output and gradients equal torch's in float64 to 1e-12, from the same parameters."""
    torch.manual_seed(0)
    plain, fused = (make().double() for make in PAIRS[name])
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    fused.load_state_dict(plain.state_dict())
    hidden, weights = torch.randn(3, 7, 24, dtype=torch.float64), torch.randn(3, 7, 24, dtype=torch.float64)
    torch.testing.assert_close(
        outcome(plain, hidden, weights), outcome(fused, hidden, weights), rtol=1e-12, atol=1e-12
    )


def saved_bytes(module: nn.Module, hidden: Tensor) -> int:
    """Return the bytes of the distinct storages that the forward keeps, without its parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(hidden)
    assert out.requires_grad
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)


@pytest.mark.parametrize(("name", "plain_rows", "fused_rows"), [("gelu", 0, 0), ("norm", 1, 2)])
def test_plain_operations_save_three_times_as_much(name: str, plain_rows: int, fused_rows: int) -> None:
    """Plain operations save 3 n bytes and fused ones n, in addition to layer norm's numbers for each row."""
    hidden = torch.randn(3, 7, 24).requires_grad_() * 1.0
    plain, fused = (make() for make in PAIRS[name])
    n, rows = 3 * 7 * 24 * 4, 3 * 7 * 4
    assert saved_bytes(plain, hidden) == 3 * n + plain_rows * rows
    assert saved_bytes(fused, hidden) == n + fused_rows * rows


def test_a_bert_of_plain_operations_has_the_same_logits() -> None:
    """From the same weights, with the same names, logits are equal up to rounding."""
    small: dict[str, Any] = {
        "layers": 2,
        "hidden": 24,
        "heads": 4,
        "vocabulary": 31,
        "sequence": 10,
        "dropout": 0.0,
    }
    plain, fused = (models.build("bert", **small, unfused=unfused).build() for unfused in (True, False))
    plain.load_state_dict(fused.state_dict())
    tokens = torch.randint(31, (2, 10))
    torch.testing.assert_close(plain(tokens), fused(tokens))
    assert any(isinstance(module, UnfusedGELU) for module in plain.modules())
    assert not any(isinstance(module, nn.LayerNorm | nn.GELU) for module in plain.modules())
