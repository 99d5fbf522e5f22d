"""`hf:` models: from a name and settings to a task, without network access, with helpful refusals."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from pipefit.capture import Task, capture
from pipefit.capture.sample import sample
from pipefit.errors import UsageError
from pipefit.models.hugging_face import hf
from support.gallery_samples import sampled
from support.huggingface_models import TINY

BLOCKS = {
    "gpt2": "transformer.h.2",
    "llama": "model.layers.2",
    "bert": "bert.encoder.layer.2",
    "t5": "decoder.block.1",
    "vit": "vit.layers.2",
    "whisper": "model.encoder.layers.1",
    "albert": "albert.encoder.albert_layer_groups.0.albert_layers.0@2",
    "bart": "model.decoder.layers.1",
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", sampled(TINY, often=("gpt2", "llama", "t5", "vit")))
def test_blocks_are_found(name: str) -> None:
    """The blocks of every kind of architecture are found, and the chain ends in the model's own loss."""
    task = hf(name, **TINY[name])
    inputs, targets = sample(task, 2)
    found = capture(task, inputs, targets)
    assert BLOCKS[name] in [block.name for block in found.blocks]
    values = found.flatten(inputs)
    for layer in found.layers:
        values = layer(values)
    assert found.loss(values, ()).ndim == 0


def test_attention_takes_its_fast_path() -> None:
    """Without padding no mask is built: attention gets the causal flag, as in eager execution."""
    task = hf("llama", **TINY["llama"])
    code = code_of(task)
    calls = [line for line in code.splitlines() if "scaled_dot_product_attention.default(" in line]
    assert len(calls) == TINY["llama"]["num_hidden_layers"] and all(
        "None, 0.0, True" in call for call in calls
    )
    assert "cumsum" not in code


def test_attention_can_be_set() -> None:
    """Eager attention multiplies and computes its own softmax."""
    code = code_of(hf("gpt2", **TINY["gpt2"], attention="eager"))
    assert "softmax" in code and "scaled_dot_product_attention" not in code


def code_of(task: Task) -> str:
    """Return the code of all layers, in order."""
    return "".join(layer.module.pipefit_code.text for layer in capture(task, *sample(task, 2)).layers)


def test_weights_given_are_kept() -> None:
    """A module passed from Python, pretrained or not, is trained directly."""
    made = hf("gpt2", **TINY["gpt2"])
    module = made.build()
    task = replace(made, module=module)
    found = capture(task, *sample(task, 2))
    layer = next(layer for layer in found.layers if layer.name == "transformer.h.0.attn.c_attn")
    assert layer.module.weight is module.transformer.h[0].attn.c_attn.weight


def test_labels_may_stay_outside() -> None:
    """An external loss receives the model's output object with its logits."""
    made = hf("gpt2", **TINY["gpt2"])

    def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())  # type: ignore[attr-defined]

    def batch(size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        inputs, _ = made.batch(size)
        return {"input_ids": inputs["input_ids"]}, inputs["labels"]

    task = Task(made.module, batch=batch, loss=loss)
    inputs, targets = sample(task, 2)
    found = capture(task, inputs, targets)
    values = found.flatten(inputs)
    for layer in found.layers:
        values = layer(values)
    assert type(found.rebuild(values)).__name__ == "CausalLMOutputWithCrossAttentions"
    assert found.loss(values, found.flatten_targets(targets)).ndim == 0


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("gtp2", {}, "did you mean gpt2"),
        (
            "openai-community/gpt2-xl",
            {},
            r"did you mean gpt2\? Names of checkpoints are not supported.* --set",
        ),
        ("meta-llama/Llama-2-7b", {}, r"did you mean llama\? Names of checkpoints"),
        ("llama", {"num_hiden_layers": 2}, "did you mean num_hidden_layers"),
        ("gpt2", {"sequence": 4096}, "from 1 to 1024"),
        ("gpt2", {"optimizer": "lion"}, "adamw"),
        ("gpt2", {"lr": -1.0}, "lr must be a finite number above 0, or None, not -1.0"),
        ("clip_text_model", {}, "pass the module to pipefit.Task"),
        (
            "moonshine",
            {},
            "samples cannot be generated .*max_source_positions.* your own batch function",
        ),
        ("esm", {}, "set the missing values"),
        ("gemma4_assistant", {}, "hidden_size_per_layer_input must be 0"),
    ],
)
def test_a_refusal_of_a_name_or_setting_says_what_would_do(
    name: str, settings: dict[str, object], words: str
) -> None:
    """The message names the nearest known name or setting, or valid values."""
    with pytest.raises(UsageError, match=words):
        hf(name, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["xlnet", "mamba", "bloom"])
def test_positions_without_a_limit(name: str) -> None:
    """A model without a limit on tokens gets the usual number, or the number that the user sets."""
    assert hf(name).batch(1)[0]["input_ids"].shape == (1, 512)
    assert hf(name, sequence=700).batch(1)[0]["input_ids"].shape == (1, 700)


def test_words_of_a_model_of_several() -> None:
    """If a configuration has several models, samples hold tokens of the text model."""
    tokens = hf("gemma3", sequence=4096).batch(4)[0]["input_ids"]
    words = sys.modules["transformers"].Gemma3Config().text_config.vocab_size
    assert words // 2 < int(tokens.max()) < words


def test_a_missing_extra_is_named_with_the_command_that_installs_it() -> None:
    """The missing extra is named, with the command that installs it."""
    with (
        mock.patch.dict(sys.modules, {"transformers": None}),
        pytest.raises(UsageError, match=r"pip install pipefit\[hf\]"),
    ):
        hf("gpt2")
