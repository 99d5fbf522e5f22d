"""Configurations of other tools as models of the zoo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipefit.cli.model import built_with, resolve
from pipefit.errors import FileError, UsageError
from pipefit.recipes.shapes import CONFIGURATIONS, megatron

GPT = """
#!/bin/bash is a comment
--num-layers 3 --hidden-size 64 --num-attention-heads 4
--seq-length 16 --max-position-embeddings=16 --vocab-size 200
--micro-batch-size 2 --lr 1e-4 --bf16 --tensor-model-parallel-size 2
"""
LLAMA = (
    GPT
    + """
--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
--hidden-dropout 0 --attention-dropout 0 --untie-embeddings-and-output-weights
--group-query-attention --num-query-groups 2 --ffn-hidden-size 96
"""
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create an empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parameters(model: str) -> int:
    """Return a model's number of parameters, from tensors without bytes."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in resolve(model, []).build().parameters())


def test_megatrons_gpt_has_the_parameters_of_its_formula(here: Path) -> None:
    """The model has V H + S H + L (12 H^2 + 13 H) + 2 H parameters with the head tied, and V padded to a
    multiple of 128 for each rank.
    """
    (here / "gpt.args").write_text(GPT)
    hidden, words = 64, 256
    assert (
        parameters("megatron:gpt.args")
        == words * hidden + 16 * hidden + 3 * (12 * hidden**2 + 13 * hidden) + 2 * hidden
    )
    assert "layers=3" in built_with("megatron:gpt.args", [])
    assert "optimizer=sgd" in built_with("megatron:gpt.args", ["optimizer=sgd"])
    assert resolve("megatron:gpt.args", ["layers=1"]).batch(2)[0].shape == (2, 16)


def test_megatrons_llama_has_the_parameters_of_its_formula(here: Path) -> None:
    """Two matrices of words and, in a block, queries, keys and values of two groups, the output, three of
    SwiGLU, and norms add up.
    """
    (here / "llama.args").write_text(LLAMA)
    hidden, words, inner = 64, 256, 96
    block = hidden * (hidden + 2 * hidden // 2) + hidden**2 + 3 * hidden * inner + 2 * hidden
    assert parameters("megatron:llama.args") == 2 * words * hidden + 3 * block + hidden
    assert "num_key_value_heads=2" in built_with("megatron:llama.args", [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GPT + "--num-experts 8", "the effect of --num-experts on a model is unknown"),
        (GPT.replace("--vocab-size 200", ""), "lacks --vocab-size"),
        (GPT + "--swiglu", "neither a GPT nor a Llama"),
        (GPT.replace("embeddings=16", "embeddings=32"), "equal numbers of positions and tokens"),
        (GPT + "--hidden-dropout 0", "one dropout"),
        (
            LLAMA.replace("--hidden-dropout 0", "--hidden-dropout 0.1"),
            "does not use dropout on hidden states",
        ),
        (
            GPT.replace("--num-layers 3", "--num-layers three"),
            "--num-layers must be a whole number, 1 or more, not 'three'",
        ),
        (
            GPT + "--make-vocab-size-divisible-by 0",
            "--make-vocab-size-divisible-by must be a whole number, 1 or more",
        ),
        (
            GPT + "--tensor-model-parallel-size 0",
            "--tensor-model-parallel-size must be a whole number, 1 or more",
        ),
        (
            GPT.replace("--num-layers 3", "--num-layers 2.5"),
            "--num-layers must be a whole number, 1 or more, not 2.5",
        ),
        (GPT + f"--vocab-size {'9' * 5000}", "--vocab-size must be a whole number, 1 or more, not inf"),
        (LLAMA + "--hidden-size inf", "--hidden-size must be a whole number, 1 or more, not inf"),
        (
            GPT + "--hidden-dropout nan --attention-dropout nan",
            "--hidden-dropout must be a number from 0 to 1, not nan",
        ),
        (GPT + "--optimizer muon", "--optimizer muon is not supported here"),
        ("num-layers 3", "wrong.args has no arguments: they start with --"),
        ("--num-layers '3", "No closing quotation"),
    ],
)
def test_what_is_no_decoder_of_ours_is_refused(text: str, words: str, here: Path) -> None:
    """The message names the argument."""
    (here / "wrong.args").write_text(text)
    with pytest.raises(UsageError, match=words):
        megatron("wrong.args")


def test_a_missing_file_and_a_missing_tool_are_sentences() -> None:
    """Neither ends in a traceback."""
    with pytest.raises(FileError, match=r"nowhere\.args does not exist"):
        megatron("nowhere.args")
    with pytest.raises(FileError, match="/dev/zero is not a regular file"):
        megatron("/dev/zero")
    with pytest.raises(UsageError, match="needs a torchtitan with this model"):
        CONFIGURATIONS["torchtitan"]("nothing.nothing_8b")


def test_a_plans_own_arguments_say_part_of_it(here: Path) -> None:
    """The output of `pipefit export --to megatron` is read too; it lacks the model's width."""
    (here / "plan.args").write_text(
        "--num-layers 4\n--pipeline-model-parallel-layout 'Et|t|ttL'\n--clip-grad 0.0\n--seq-length 64\n"
    )
    with pytest.raises(UsageError, match="lacks --hidden-size"):
        megatron("plan.args")


@pytest.mark.parametrize("name", ["llama3_debugmodel", "llama3_8b", "llama3_70b"])
def test_torchtitans_llama_has_its_parameters(name: str) -> None:
    """The number equals that of torchtitan's own model, if it is installed."""
    registry = pytest.importorskip("torchtitan.models.llama3.config_registry", exc_type=ImportError)
    with torch.device("meta"):
        whole = getattr(registry, name)().model_spec.model.build()
    assert parameters(f"torchtitan:llama3.{name}") == sum(one.numel() for one in whole.parameters())
