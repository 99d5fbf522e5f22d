"""The scaled-dot-product attention kernel that CUDA chooses, and the same call on fake tensors.

The kernel, not the model, determines what an attention layer saves for backward. With q, k, v, out of B x H x
T x D:

    flash       q, k, v, out, logsumexp (B, H, T) float32                            half precision, no mask
    efficient   q, k, v, out, mask, logsumexp (B, H, T rounded up to 32) float32     float32, or a mask, any
    precision cudnn       q, k, v, out, mask, logsumexp (B, H, T, 1) float32                   only if
    requested, see below math        q, k, v, and every intermediate B x H x T x T score matrix
    everything else

The conditions are those of torch's `sdp_utils` for compute capability 8.0 and later; the first match in
priority order counts. Dropout inside a fused kernel saves a seed, never a mask. The order is torch's: flash,
efficient, math; then cuDNN. Hopper and datacenter Blackwell builds with cuDNN 9.15.1 or later put cuDNN
first. That choice is not imitated: its bytes are flash's, except that with a mask its logsumexp is not
rounded. `torch.nn.attention.sdpa_kernel` is obeyed.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from pipefit.errors import UsageError
from pipefit.torch_internals.dispatcher import enabled_kernels

_HALVES = (torch.float16, torch.bfloat16)
_BIAS_ALIGNMENT = 8  # elements: the efficient kernel reads its bias in blocks of this size
_FLASH_ALIGNMENT = 8  # elements: flash pads head dimensions to a multiple of this


def choose_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> SDPBackend:
    """Return the kernel that CUDA chooses: the first enabled one in torch's order that can run these tensors.

    Raises:
        UsageError: `sdpa_kernel` (or `torch.backends.cuda.enable_*_sdp`) left no kernel that can.
    """
    enabled: list[SDPBackend] = enabled_kernels(with_priority=True)
    fusable = _fusable(query, key, value, mask, enable_gqa)
    able = {
        SDPBackend.FLASH_ATTENTION: fusable and _flash_can(query, key, value, mask, is_causal),
        SDPBackend.EFFICIENT_ATTENTION: fusable and _efficient_can(query, key, value, enable_gqa),
        SDPBackend.CUDNN_ATTENTION: fusable and _cudnn_can(query, key, value, dropout_p),
        SDPBackend.MATH: True,
    }
    for backend in enabled:
        if able.get(backend, False):
            return backend
    raise UsageError(
        f"no enabled attention kernel supports query {tuple(query.shape)} {query.dtype}: "
        f"{[b.name for b in enabled]} are enabled; add SDPBackend.MATH, which supports all"
    )


def _fusable(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool) -> bool:
    """Return whether fused kernels are possible: 4-D, one batch size, matching heads, dense last
    dimension.
    """
    tensors = (query, key, value)
    if (
        any(t.dim() != 4 for t in tensors)
        or len({t.shape[0] for t in tensors}) > 1
        or key.shape[1] != value.shape[1]
    ):
        return False
    heads_match = query.shape[1] % key.shape[1] == 0 if enable_gqa else query.shape[1] == key.shape[1]
    dense = all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in tensors) and (
        mask is None or mask.stride(-1) == 1
    )
    return heads_match and dense and query.shape[2] > 0 and key.shape[2] > 0


def _flash_can(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    same_head_dim = query.shape[-1] == key.shape[-1] == value.shape[-1]
    square = query.shape[2] == key.shape[2]
    return (
        mask is None
        and query.dtype in _HALVES
        and same_head_dim
        and query.shape[-1] <= 256
        and (square or not is_causal)
    )


def _efficient_can(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    aligned = 16 // query.element_size()  # tensor cores load 16 bytes at a time
    head_dims = (
        query.shape[-1] == key.shape[-1] and query.shape[-1] % aligned == 0 and value.shape[-1] % aligned == 0
    )
    same_heads = not enable_gqa or query.shape[1] == key.shape[1]
    return query.dtype in (*_HALVES, torch.float32) and head_dims and same_heads


def _cudnn_can(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> bool:
    head_dims = all(t.shape[-1] <= 128 and t.shape[-1] % 8 == 0 for t in (query, value))
    return query.dtype in _HALVES and head_dims and key.shape[2] > 1 and (dropout_p * 16).is_integer()


def cuda_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run `scaled_dot_product_attention` as its CUDA path composes it, for any device with fake tensors."""
    aten = torch.ops.aten
    backend = choose_kernel(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    mask = _additive(attn_mask, query.dtype)
    logsumexp = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if backend is SDPBackend.FLASH_ATTENTION:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if backend is SDPBackend.EFFICIENT_ATTENTION:
        bias = None if mask is None else _aligned(mask).expand(*query.shape[:3], key.shape[2])
        out = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, logsumexp, dropout_p, is_causal, scale=scale
        )
    elif backend is SDPBackend.CUDNN_ATTENTION:
        out = aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, logsumexp, dropout_p, is_causal, False, scale=scale
        )
    else:
        out = aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
    attended: Tensor = out[0]
    return attended


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    """Run flash attention with padded head dimensions, as CUDA does: the padded copies are saved."""
    head_dim = query.shape[-1]
    padded = [
        F.pad(t, (0, -head_dim % _FLASH_ALIGNMENT)) if head_dim % _FLASH_ALIGNMENT else t
        for t in (query, key, value)
    ]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        *padded, dropout_p, is_causal, False, scale=scale
    )[0]
    return out[..., :head_dim] if out.shape[-1] != head_dim else out


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a boolean mask as the bias that kernels take: a new tensor, which is then saved."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device))


def _aligned(mask: Tensor) -> Tensor:
    """Return the bias, copied into padded rows if its strides are not multiples of eight elements."""
    if mask.stride(-1) == 1 and all(stride % _BIAS_ALIGNMENT == 0 for stride in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    return F.pad(mask, (0, _BIAS_ALIGNMENT - length % _BIAS_ALIGNMENT))[..., :length]
