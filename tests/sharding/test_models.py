"""Whole models with their loss: every rank has the loss, gradients and buffers of the module."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipefit.capture import Task
from pipefit.capture.flat_graph import operator_name
from pipefit.models import build
from pipefit.models.hugging_face import hf
from pipefit.tensor_parallel import Prices
from support.huggingface_models import SMALL, TEXT, TINY
from support.ranks_and_whole import Case, differences

GPT = {"layers": 2, "hidden": 16, "heads": 4, "sequence": 8}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGES = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1], "image_size": 32}
EIGHT = {"num_attention_heads": 8, "num_key_value_heads": 4}
FLOWS = ("gpt2", "bert, whole", "bart, whole")
DROPS = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}

ORDINARY: dict[str, Callable[[], Task]] = {
    "gpt": lambda: build("gpt", **GPT, vocabulary=24),
    "mlp": lambda: build("mlp", inputs=16, widths=(32, 16, 32)),
    "resnet": lambda: build("resnet", width=8, blocks=(1,), image_size=16, num_classes=10),
    "hf:gpt2": lambda: hf("gpt2", **{**TINY["gpt2"], **DROPS, "n_layer": 1}),
    "hf:llama": lambda: hf("llama", **{**TINY["llama"], "num_hidden_layers": 1}),
}
GALLERY: dict[str, Callable[[], Task]] = {
    "gpt, tied": lambda: build("gpt", **GPT, vocabulary=26, tied=True),
    "gpt, eager": lambda: build("gpt", **GPT, vocabulary=25, attention="eager"),
    "bert": lambda: build("bert", **GPT, vocabulary=24),
    "bert, unfused": lambda: build("bert", **GPT, vocabulary=24, unfused=True),
    "vgg": lambda: build("vgg11", width=8, image_size=32),
    "resnet of two groups": lambda: build("resnet", width=8, blocks=(1, 1), image_size=32, num_classes=10),
    "unet": lambda: build("unet", width=8, image_size=16, depth=2),
    **{f"hf:{name}, whole": lambda name=name: hf(name, **TINY[name]) for name in TINY},
    "hf:phi3": lambda: hf("phi3", **SMALL, **TEXT, **TOKENS, num_key_value_heads=1),
    "hf:phi3, heads of keys": lambda: hf("phi3", **{**SMALL, **EIGHT}, **TEXT, **TOKENS),
    "hf:convnext": lambda: hf("convnext", **IMAGES),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "ranks", [2, pytest.param(3, marks=pytest.mark.gallery), pytest.param(4, marks=pytest.mark.gallery)]
)
@pytest.mark.parametrize(
    "name", [*ORDINARY, *(pytest.param(name, marks=pytest.mark.gallery) for name in GALLERY)]
)
def test_ranks_compute_what_the_module_does(name: str, ranks: int) -> None:
    """Loss, all gradients and buffers equal the module's in double precision; with two ranks nearly all
    parameters are divided.
    """
    case = Case.of({**ORDINARY, **GALLERY}[name]())
    stage, found = case.by_ranks(ranks)
    plain = case.plain()
    for numbers in found:
        assert differences(numbers, plain) == []
    assert stage.shares.divided_bytes / stage.shares.parameter_bytes > 0.9 or ranks > 2


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", ["gpt", "hf:llama", *(pytest.param(f"hf:{name}", marks=pytest.mark.gallery) for name in FLOWS)]
)
def test_positions_are_divided_where_little_is_to_be_kept(name: str) -> None:
    """If memory is expensive, sequence parallelism divides norms and their surroundings too, in any
    implementation of a norm, and changes no number.
    """
    case = Case.of({**ORDINARY, **GALLERY}[name]())
    stage, found = case.by_ranks(2, Prices(stored=10.0), sequences=True)
    plain = case.plain()
    for numbers in found:
        assert differences(numbers, plain) == []
    norms = [
        way
        for node, way in stage.choice.ways.items()
        if {"layer_norm", "rms_norm", "rsqrt"} & {operator_name(node)}
    ]
    assert norms and all(way.divides for way in norms)
    assert any(way.scattered for way in stage.choice.ways.values())


@pytest.mark.gallery
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kernel", ["grouped_mm", "batched_mm"])
def test_experts_are_divided(kernel: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtral is divided with either of transformers' products of all experts; only its own grouped product,
    which a trace records, supports double precision.
    """
    pytest.importorskip("transformers")
    monkeypatch.setattr("transformers.integrations.moe._can_use_grouped_mm", lambda *_: False)
    made = hf("mixtral", **SMALL, **TEXT, num_key_value_heads=1, num_local_experts=4)
    module = made.build()
    module.set_experts_implementation(kernel)
    case = Case.of(Task(module, batch=made.batch, loss=None))
    stage, found = case.by_ranks(ranks)
    plain = case.plain()
    for numbers in found:
        assert differences(numbers, plain) == []
    assert (
        stage.shares.divided_bytes / stage.shares.parameter_bytes > 0.9 or kernel == "batched_mm"
    )  # which divides tokens instead
