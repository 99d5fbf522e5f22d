"""CUDA's choice of attention kernel and its saved tensors, compared with closed forms and torch's rules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipefit.errors import UsageError
from pipefit.fake_cuda.target import FakeTarget, choose_kernel
from support.saved_tensor_models import ATTENDED, HALF, Saved

B, H, T, D = ATTENDED
QKV = 4 * [ATTENDED]  # and the output


def attend(fake: FakeTarget, dtype: torch.dtype, **options: object) -> Saved:
    """Return the tensors that attention saves, after its backward."""
    q, k, v = (torch.randn(B, H, T, D, dtype=dtype, device=fake.device, requires_grad=True) for _ in range(3))
    saved = Saved(lambda: F.scaled_dot_product_attention(q, k, v, **options))  # type: ignore[arg-type]
    assert isinstance(saved.result, Tensor)
    saved.result.sum().backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape
    return saved


@pytest.mark.parametrize("options", [{"is_causal": True}, {}, {"dropout_p": 0.1}])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_attention_is_flash(dtype: torch.dtype, options: dict[str, object]) -> None:
    """Without a mask attention saves q, k, v, the output and one float32 per query, not the scores; dropout
    inside saves no mask.
    """
    with FakeTarget("cuda") as fake:
        kinds = attend(fake, dtype, **options).kinds
    assert sorted(kinds, key=str) == sorted([(s, dtype) for s in QKV] + [((B, H, T), torch.float32)], key=str)


@pytest.mark.parametrize(
    ("dtype", "options"), [(torch.float32, {"is_causal": True}), (torch.float32, {"dropout_p": 0.1})]
)
def test_single_precision_attention_is_efficient(dtype: torch.dtype, options: dict[str, object]) -> None:
    """In float32 attention saves q, k, v, the output and one float32 per query, the queries rounded up to a
    multiple of 32.
    """
    with FakeTarget("cuda") as fake:
        kinds = attend(fake, dtype, **options).kinds
    assert sorted(kinds, key=str) == sorted(
        [(s, dtype) for s in QKV] + [((B, H, 128), torch.float32)], key=str
    )


@pytest.mark.parametrize("boolean", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_masked_attention_saves_the_mask_in_aligned_rows(dtype: torch.dtype, boolean: bool) -> None:
    """A mask selects the efficient kernel, which saves a bias of the query's type with rows padded to eight
    elements.
    """
    with FakeTarget("cuda") as fake:
        mask = torch.ones(T, T, dtype=torch.bool if boolean else dtype, device=fake.device)
        saved = attend(fake, dtype, attn_mask=mask)
    bias = T * 104 * dtype.itemsize
    assert saved.nbytes[-5:] == sorted([*4 * [B * H * T * D * dtype.itemsize], bias])
    assert B * H * 128 * 4 in saved.nbytes


def test_uneven_head_dimension_is_padded_for_flash() -> None:
    """Flash saves q, k, v and output with head dimensions padded to a multiple of eight; the caller sees the
    original.
    """
    with FakeTarget("cuda") as fake:
        q = torch.randn(2, 4, 16, 20, dtype=HALF, device=fake.device, requires_grad=True)
        saved = Saved(lambda: F.scaled_dot_product_attention(q, q, q))
    assert saved.result.shape == q.shape  # type: ignore[attr-defined]
    assert saved.kinds.count(((2, 4, 16, 24), HALF)) == 4


@pytest.mark.parametrize(
    ("kernel", "shape", "dtype", "options"),
    [
        (SDPBackend.FLASH_ATTENTION, (2, 4, 16, 256), HALF, {}),
        (SDPBackend.EFFICIENT_ATTENTION, (2, 4, 16, 264), HALF, {}),
        (SDPBackend.EFFICIENT_ATTENTION, (2, 4, 16, 36), torch.float32, {}),
        (SDPBackend.MATH, (2, 4, 16, 33), torch.float32, {}),
        (SDPBackend.MATH, (2, 4, 16, 32), torch.float64, {}),
        (SDPBackend.MATH, (4, 16, 32), HALF, {}),
    ],
)
def test_kernel_follows_shape_and_precision(
    kernel: SDPBackend, shape: tuple[int, ...], dtype: torch.dtype, options: dict[str, bool]
) -> None:
    """CUDA's rules are: flash to head dimension 256 in half precision, efficient in 16-byte steps, math for
    the rest.
    """
    with FakeTarget("cuda") as fake:
        q = torch.empty(shape, dtype=dtype, device=fake.device)
        assert choose_kernel(q, q, q, **options) is kernel  # type: ignore[arg-type]


def test_kernel_follows_lengths_and_heads() -> None:
    """Causal attention over unequal lengths is not flash's; grouped heads are flash's, and otherwise
    math's.
    """
    with FakeTarget("cuda"):
        q, k = torch.empty(2, 8, 16, 32, dtype=HALF), torch.empty(2, 8, 24, 32, dtype=HALF)
        few = torch.empty(2, 2, 16, 32, dtype=HALF)
        assert choose_kernel(q, k, k) is SDPBackend.FLASH_ATTENTION
        assert choose_kernel(q, k, k, is_causal=True) is SDPBackend.EFFICIENT_ATTENTION
        assert choose_kernel(q, few, few, enable_gqa=True) is SDPBackend.FLASH_ATTENTION
        assert choose_kernel(q.float(), few.float(), few.float(), enable_gqa=True) is SDPBackend.MATH


def test_kernel_obeys_the_user() -> None:
    """`sdpa_kernel` selects among the kernels that can run, in its order; if none can, the error names the
    enabled ones.
    """
    with FakeTarget("cuda") as fake:
        q = torch.empty(2, 4, 16, 32, dtype=HALF, device=fake.device)
        with sdpa_kernel(SDPBackend.MATH):
            assert choose_kernel(q, q, q) is SDPBackend.MATH
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            assert choose_kernel(q, q, q) is SDPBackend.CUDNN_ATTENTION
            assert ((B, H, T, 1), torch.float32) in attend(fake, HALF).kinds
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(UsageError, match="FLASH_ATTENTION"):
            choose_kernel(q.float(), q.float(), q.float())


def test_encoder_layer_takes_fused_attention_below_python() -> None:
    """Attention inside nn.TransformerEncoderLayer is fused on the cuda target and does not save the
    scores.
    """
    with FakeTarget("cuda") as fake:
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).to(fake.device, HALF)
        saved = Saved(
            lambda: layer(torch.randn(2, 48, 64, dtype=HALF, device=fake.device)), layer.parameters()
        )
    assert ((2, 4, 48), torch.float32) in saved.kinds
    assert not [shape for shape, _ in saved.kinds if shape[-2:] == (48, 48)]
