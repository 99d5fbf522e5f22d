"""Saved bytes of a transformer block on CUDA, against the formulas of Korthikanti et al. (2022).

"Reducing Activation Recomputation in Large Transformer Models", section 4: with b sequences of s tokens,
hidden size h and a heads, a block of float16 keeps 34 s b h + 5 a s^2 b bytes, and without the score
matrices, as under flash attention, 34 s b h. The paper omits small terms, which are named here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipefit.models import build
from pipefit.profiler import profile
from pipefit.schema.layer_costs import LayerCost
from pipefit.schema.training import Precision

SEEDS = 24  # flash attention's dropout: two 8-byte numbers with alignment
SIZES = [(2, 32, 64, 4), (3, 64, 96, 6)]
PUBLISHED = [(4, 2048, 6144, 64), (4, 512, 1024, 16)]  # GPT of 22 billion parameters; BERT-large


def kept(name: str, size: tuple[int, int, int, int], attention: str, precision: Precision) -> int:
    """Return the second block's saved bytes, including its input, each storage once."""
    return storage_bytes(block(name, size, attention, precision))


def block(name: str, size: tuple[int, int, int, int], attention: str, precision: Precision) -> LayerCost:
    """Return the costs of the second block."""
    b, s, h, a = size
    extra: dict[str, Any] = {"mask": False} if name == "bert" else {}
    task = build(name, layers=2, hidden=h, heads=a, vocabulary=64, sequence=s, attention=attention, **extra)
    (measurement,) = profile(
        replace(task, precision=precision), microbatch_size=b, target="cuda"
    ).measurements
    return measurement.costs[2]


def storage_bytes(block: LayerCost) -> int:
    held = {(saved.origin.kind, saved.origin.index) for saved in block.saved}
    sizes = {
        **{("own", number): nbytes for number, nbytes in enumerate(block.storages)},
        **{("input", number): value.nbytes for number, value in enumerate(block.inputs)},
    }
    return sum(nbytes for storage, nbytes in sizes.items() if storage in held)


def statistics(b: int, s: int) -> int:
    """Return the bytes of mean and deviation of every token in two layer norms, in float32."""
    return 2 * 2 * 4 * b * s


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_a_float16_block_with_score_matrices(name: str, size: tuple[int, int, int, int]) -> None:
    """The block keeps 34 s b h + 5 a s^2 b, the norms' statistics, and GPT's causal mask of s^2 bytes."""
    b, s, h, a = size
    rest = statistics(b, s) + (s * s if name == "gpt" else 0)
    assert kept(name, size, "eager", "float16") == 34 * s * b * h + 5 * a * s * s * b + rest


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_a_float16_block_with_flash_attention(name: str, size: tuple[int, int, int, int]) -> None:
    """The block keeps 34 s b h, the norms' statistics, and flash attention's log-sum-exp of every row and its
    seeds.
    """
    b, s, h, a = size
    assert kept(name, size, "sdpa", "float16") == 34 * s * b * h + statistics(b, s) + 4 * a * s * b + SEEDS


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "precision", ["mixed-float16", pytest.param("mixed-bfloat16", marks=pytest.mark.gallery)]
)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_a_block_under_autocast(name: str, size: tuple[int, int, int, int], precision: Precision) -> None:
    """Under autocast the two norms' inputs are float32 (4 s b h more), and attention's three projections each
    copy their common input in half precision (4 s b h more). Copies of the weights, 2 x (12 h^2 + 9 h) bytes
    with the biases, exist once, for any number of microbatches.
    """
    b, s, h, a = size
    found = block(name, size, "sdpa", precision)
    assert storage_bytes(found) == (34 + 8) * s * b * h + statistics(b, s) + 4 * a * s * b + SEEDS
    assert found.copy_bytes == 2 * (12 * h * h + 9 * h)


@pytest.mark.gallery
@pytest.mark.parametrize(("name", "size"), zip(["gpt", "bert"], PUBLISHED, strict=True))
def test_formulas_hold_at_the_sizes_of_the_accuracy_page(name: str, size: tuple[int, int, int, int]) -> None:
    """The formulas hold at the sizes of the table in docs/accuracy.md."""
    test_a_float16_block_with_score_matrices(name, size)
    test_a_float16_block_with_flash_attention(name, size)
