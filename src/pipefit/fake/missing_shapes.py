"""Shape functions of a few training kernels that torch cannot run on fake tensors.

They are fused optimizers, the fused GRU cell, margin losses, the backward of CTC, quantisation that is imitated in
training, and draws that have a gradient. Fake tensors need a function from
input shapes to output shapes for every operator. For an operator without one, torch would run the real kernel on zeros
as large as the model; a `FakeTarget` refuses that and names the operator.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def register_missing_shapes() -> torch.library.Library:
    """Register the functions that this torch lacks, once. They last as long as the library that is returned."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, shapes in _SHAPES.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            library.impl(name, shapes, "Meta")  # type: ignore[no-untyped-call]
    return library


def _in_place(*_: object, **__: object) -> None:
    """A fused optimizer step writes into its arguments and returns nothing."""


def _gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The next state, batch x hidden, and the five gates kept for backward."""
    return torch.empty_like(hx), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def _gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """Gradients of input gates, hidden gates, state, and the two biases."""
    gates = workspace.new_empty(grad_hy.shape[0], 3 * grad_hy.shape[1])
    bias = workspace.new_empty(3 * grad_hy.shape[1]) if has_bias else None
    return (
        gates,
        torch.empty_like(gates),
        torch.empty_like(grad_hy),
        bias,
        None if bias is None else torch.empty_like(bias),
    )


def _loss_backward(grad: Tensor, x: Tensor, *_: object, **__: object) -> Tensor:
    """The gradient of a loss in its first argument."""
    return torch.empty_like(x)


def _like_the_first(x: Tensor, *_: object, **__: object) -> Tensor:
    """A draw, or its gradient, for each element."""
    return torch.empty_like(x)


def _rounded(x: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    """The rounded values, and a mask of those that were in range, kept for backward."""
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _learnt_backward(grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, *_: object) -> tuple[Tensor, ...]:
    """Gradients of the values, the scale and the zero point."""
    return torch.empty_like(x), torch.empty_like(scale), torch.empty_like(zero_point)


_SHAPES = {
    "_fused_sgd_": _in_place,
    "_fused_sgd_.tensor_lr": _in_place,
    "_fused_adam_.tensor_lr": _in_place,
    "_fused_adamw_.tensor_lr": _in_place,
    "_fused_adagrad_": _in_place,
    "_fused_adagrad_.tensor_lr": _in_place,
    "_ctc_loss_backward.Tensor": _loss_backward,
    "multi_margin_loss_backward": _loss_backward,
    "multilabel_margin_loss_backward": _loss_backward,
    "fractional_max_pool3d_backward": _loss_backward,
    "_standard_gamma": _like_the_first,
    "_standard_gamma_grad": _like_the_first,
    "_sample_dirichlet": _like_the_first,
    "_dirichlet_grad": _like_the_first,
    "fake_quantize_per_tensor_affine_cachemask": _rounded,
    "fake_quantize_per_channel_affine_cachemask": _rounded,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _rounded,
    "_fake_quantize_learnable_per_tensor_affine": _like_the_first,
    "_fake_quantize_learnable_per_channel_affine": _like_the_first,
    "_fake_quantize_learnable_per_tensor_affine_backward": _learnt_backward,
    "_fake_quantize_learnable_per_channel_affine_backward": _learnt_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}
