"""Questions with answers known from practice, each with its arithmetic. Each takes a minute or two."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pipefit
from pipefit.models.hugging_face import hf
from pipefit.planner import plan as planned
from pipefit.report.fit import describe_overview
from pipefit.report.show import text
from pipefit.schema.fit import Overview
from pipefit.schema.json_io import load_cluster
from pipefit.tables import plain
from pipefit.units import GIB
from support import low_rank_adapters

pytestmark = pytest.mark.gallery

LLAMA_8B = low_rank_adapters.LLAMA_8B
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
NUMBERS = {
    "1.5B": 1_543_714_304,
    "8B": 8_030_261_248,
    "70B": 70_553_706_496,
    "8x7B": 46_702_792_704,
}  # parameters, as their authors count them


def looked(name: str, settings: dict[str, object], sequence: int, cluster: str) -> Overview:
    """Return the screen of `fit` under mixed precision: float32 parameters, gradients and AdamW, 16 bytes a
    number.
    """
    task = replace(hf(name, **settings, sequence=sequence), precision="mixed-bfloat16")
    return pipefit.fit(task, cluster)


def test_8b_fits_one_card_of_80_gib_by_offload() -> None:
    """State is 16 bytes x 8.03e9 = 119.7 GiB, more than the card's 79: only hosts can hold it."""
    found = looked("llama", LLAMA_8B, 4096, "1x-rtx-pro-6000")
    kept, recomputed, moved = found.here.largest
    assert found.precisions[0].state_bytes == 16 * NUMBERS["8B"]
    assert kept is None and recomputed is None and moved is not None and moved.fits


def test_8b_fits_eight_a100_fully_sharded() -> None:
    """State is 119.7 / 8 = 15 GiB a card; saved tensors and logits of 4,096 tokens are some 39 GiB more."""
    found = looked("llama", LLAMA_8B, 4096, "dgx-a100")
    zero = next(one for one in found.replicated if one.way == "ZeRO-3" and not one.recompute)
    assert found.fits and zero.samples_per_second is not None
    assert 16 * NUMBERS["8B"] / 8 < zero.need_bytes < 79 * GIB


@pytest.mark.parametrize(
    ("devices", "sequence", "fits"),
    [
        (8, 4096, True),
        (4, 4096, True),
        (4, 8192, True),
        (2, 8192, True),
        (2, 4096, True),
        (1, 8192, True),
        (1, 4096, True),
    ],
)
def test_70b_on_h100(devices: int, sequence: int, fits: bool) -> None:
    """On 32 cards state is 16 bytes x 70.55e9 / 32 = 32.9 GiB each; with every block recomputed, inputs of 80
    blocks are 80 x 8192 x 8192 x 2 bytes = 10 GiB, and logits with copies and gradients, 14 bytes each, 13.7 GiB.
    The last block and the head, 1.91e9 numbers, are gathered in halves beside the block before, and have whole
    gradients in float32: 8 bytes each, 14.2 GiB. One block saves some 40 tensors of its input's size, 5 GiB: at most
    76 GiB. Half the tokens halve all but state and gathered blocks. On 16 cards state is 65.7 GiB each, and the
    others need more than the remaining 12 GiB; on 8 cards state is 131 GiB each: hosts must hold part of it. With
    8,192 tokens on 8 cards, parameters and gradients, 65.7 GiB, inputs of a stage's 10 blocks for 8 microbatches,
    10 GiB, and half-precision copies, 16 GiB, are more than a card has, so hosts hold these in part, too.
    """
    cluster = f"{devices}xhgx-h100@50GB/s" if devices > 1 else "hgx-h100"
    found = looked("llama", LLAMA_70B, sequence, cluster)
    assert found.fits is fits
    if devices < 4:
        fitting = [one for one in found.replicated if one.samples_per_second is not None]
        assert found.here.largest[:2] == (None, None) and all("hosts" in one.way for one in fitting)
    if devices >= 4:
        zero = next(one for one in found.replicated if one.way == "ZeRO-3" and one.recompute)
        assert zero.samples_per_second is not None
        least = 16 * NUMBERS["70B"] / (8 * devices) + 80 * sequence * 8192 * 2
        head, block = 128256 * 8192, 0.86e9
        most = least + 14 * sequence * 128256 + 8 * (head + block) + 40 * sequence * 8192 * 2
        assert least < zero.need_bytes < most


def test_half_a_billion_at_32k_does_not_fit_24_gib_and_the_logits_are_why() -> None:
    """32,768 x 151,936 logits in float32 are 18.5 GiB; the loss has them, their log-softmax and a gradient at
    once.
    """
    found = looked("qwen2", QWEN_HALF_B, 32768, "1x-rtx-3090")
    text = " ".join(plain(describe_overview(found), 80).split())
    assert not found.fits and text.startswith("Does not fit") and "a chunked cross entropy" in text
    assert found.loss_bytes > 2 * 32768 * 151936 * 4


def test_two_unequal_cards_hold_what_neither_does() -> None:
    """State of 1.54e9 numbers is 16 bytes each, 23 GiB, more than a card of 24 GiB has room for beside saved
    tensors and logits; a card of 16 GiB more holds the rest, and a copy of the tied embedding. Neither card
    has less than a quarter of the layers.
    """
    pair = load_cluster("2x-rtx-4090")
    small = replace(pair.devices[1], memory_bytes=16 * GIB)
    cluster = replace(pair, name="24 and 16 GiB", devices=(pair.devices[0], small))
    settings = QWEN_HALF_B | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    }
    task = replace(hf("qwen2", **settings, sequence=1024), precision="mixed-bfloat16")
    found = pipefit.fit(task, cluster)
    alone, both = (reach.largest[0] for reach in found.reaches)
    assert found.precisions[0].state_bytes == 16 * NUMBERS["1.5B"]
    assert alone is None and both is not None and both.fits
    layers = [stage.stop - stage.start for stage in both.plan.stages]
    assert len(layers) == 2 and min(layers) > sum(layers) / 4


BLOCK_WEIGHTS = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336  # query and output, key and value, MLP
ADAPTERS = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))  # 32 blocks, rank 16
INPUTS, LOGITS = 32 * 2048 * 4096 * 2, 2048 * 128256 * 4  # of all blocks in bfloat16; in float32


def every_block_recomputed(found: Overview) -> int:
    """Return the peak of one device that recomputes every block."""
    cluster, profile = found.cluster, found.reaches[0].one.plan.profile
    made = planned(
        profile,
        cluster,
        microbatches=4,
        planner="uniform",
        recompute="always",
        stages=1,
        allow_infeasible=True,
    )
    assert made.prediction is not None
    return made.prediction.peak_bytes[0]


def test_lora_of_8b_fits_24_gib_recomputed() -> None:
    """The frozen base takes 2 bytes x 8.03e9, the adapters 16 bytes x 41.9e6, together 15.6 GiB. With every
    block recomputed there are also block inputs, 0.5 GiB, and logits, their log-softmax and its gradient, 2.9
    GiB.
    """
    found = pipefit.fit(low_rank_adapters.lora(), "1x-rtx-3090")
    state = 2 * NUMBERS["8B"] + 16 * ADAPTERS
    assert found.precisions[0].state_bytes == state
    assert every_block_recomputed(found) == pytest.approx(state + INPUTS + 3 * LOGITS, rel=0.005)
    kept, recomputed, _ = found.reaches[0].largest
    assert kept is None and recomputed is not None and recomputed.fits and len(text(found).splitlines()) <= 40


def test_qlora_of_8b_fits_16_gib() -> None:
    """Weights of blocks take half a byte and a float32 scale for every 64, 3.66 GiB; embeddings, the last
    layer and 65 norms 2 bytes, 1.96 GiB; adapters 16 bytes, 0.63 GiB. Inputs and logits are those of LoRA.
    """
    found = pipefit.fit(low_rank_adapters.qlora(), "1x-rtx-4080")
    base = 32 * BLOCK_WEIGHTS // 2 + 32 * BLOCK_WEIGHTS // 64 * 4 + 2 * (2 * 128256 * 4096 + 65 * 4096)
    assert every_block_recomputed(found) == pytest.approx(
        base + 16 * ADAPTERS + INPUTS + 3 * LOGITS, rel=0.005
    )
    kept, recomputed, _ = found.reaches[0].largest
    assert kept is None and recomputed is not None and recomputed.fits and len(text(found).splitlines()) <= 40


def test_mixtral_8x7b_fits_eight_h100_by_offload_alone() -> None:
    """State is 16 bytes x 46.7e9 = 696 GiB, 87 GiB on each of 8 devices of 78. Without 12 bytes of optimizer
    state and float32 gradients on the device, ZeRO-3 with every block recomputed takes 69 GiB.
    """
    found = looked("mixtral", {}, 4096, "hgx-h100")
    assert found.precisions[0].state_bytes == 16 * NUMBERS["8x7B"]
    assert 16 * NUMBERS["8x7B"] / 8 > max(found.cluster.budgets)
    kept, recomputed, moved = found.here.largest
    assert kept is None and recomputed is None and moved is not None and moved.fits
    fitting = [one for one in found.replicated if one.samples_per_second is not None]
    assert fitting and all("hosts" in one.way and one.recompute for one in fitting)
    assert min(one.need_bytes for one in fitting) > 8 * NUMBERS["8x7B"] / 8
