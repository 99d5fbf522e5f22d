"""Questions whose answers are known from practice, each beside its arithmetic. Every one takes a minute or two."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pipefit
from pipefit.models.hugging_face import hf
from pipefit.report.fit import describe_overview
from pipefit.schema.fit import Overview
from pipefit.tables import plain
from pipefit.units import GIB

pytestmark = pytest.mark.gallery

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN_HALF_B = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
NUMBERS = {"8B": 8_030_261_248, "70B": 70_553_706_496}  # parameters, as their authors count them


def looked(name: str, settings: dict[str, object], sequence: int, cluster: str) -> Overview:
    """The screen of `fit` under mixed precision: float32 parameters, gradients and AdamW, 16 bytes a number."""
    task = replace(hf(name, **settings, sequence=sequence), precision="mixed-bfloat16")
    return pipefit.fit(task, cluster)


def test_8b_fits_one_card_of_80_gib_by_offload() -> None:
    """State is 16 bytes x 8.03e9 = 119.7 GiB, more than the card's 79: hosts have it. Nothing else fits."""
    found = looked("llama", LLAMA_8B, 4096, "1x-rtx-pro-6000")
    kept, recomputed, moved = found.here.largest
    assert found.precisions[0].state_bytes == 16 * NUMBERS["8B"]
    assert kept is None and recomputed is None and moved is not None and moved.fits


def test_8b_fits_eight_a100_fully_sharded() -> None:
    """State is 119.7 / 8 = 15 GiB a card; what 4,096 tokens keep and their logits are some 39 GiB more."""
    found = looked("llama", LLAMA_8B, 4096, "dgx-a100")
    zero = next(one for one in found.replicated if one.way == "ZeRO-3" and not one.recompute)
    assert found.fits and zero.samples_per_second is not None
    assert 16 * NUMBERS["8B"] / 8 < zero.need_bytes < 79 * GIB


@pytest.mark.parametrize(("devices", "sequence", "fits"), [(4, 8192, True), (1, 4096, True)])
def test_70b_on_h100(devices: int, sequence: int, fits: bool) -> None:
    """On 32 of them state is 16 bytes x 70.55e9 / 32 = 32.9 GiB each, and with every block recomputed there are inputs
    of 80 blocks, 80 x 8192 x 8192 x 2 bytes = 10 GiB, gathered halves of two blocks, 2 x 2 x 0.86e9 bytes = 3.2 GiB,
    and logits with their gradients, some 14 GiB: 60 to 70 GiB. On 8 state is 131 GiB each: hosts must have it.
    """
    cluster = f"{devices}xhgx-h100@50GB/s" if devices > 1 else "hgx-h100"
    found = looked("llama", LLAMA_70B, sequence, cluster)
    assert found.fits is fits
    if devices == 4:
        zero = next(one for one in found.replicated if one.way == "ZeRO-3" and one.recompute)
        assert zero.samples_per_second is not None
        assert 16 * NUMBERS["70B"] / 32 + 10 * GIB < zero.need_bytes < 70 * GIB


def test_half_a_billion_at_32k_does_not_fit_24_gib_and_the_logits_are_why() -> None:
    """32,768 x 151,936 logits in float32 are 18.5 GiB; the loss has them, their log-softmax and a gradient at once."""
    found = looked("qwen2", QWEN_HALF_B, 32768, "1x-rtx-3090")
    text = " ".join(plain(describe_overview(found), 80).split())
    assert not found.fits and text.startswith("Does not fit") and "a chunked cross entropy" in text
    assert found.loss_bytes > 2 * 32768 * 151936 * 4
