"""The families of the MPress paper: parameter counts by closed form, compared with the paper's names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipefit import models
from pipefit.models.bert import BERT_SHAPES
from pipefit.models.gpt import GPT_LAYERS


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def named(size: str) -> float:
    """Return the number of parameters in a name."""
    return float(size.removesuffix("B")) * 1e9


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", GPT_LAYERS)
def test_gpt_has_the_papers_parameters(size: str) -> None:
    """V H + S H + L (12 H^2 + 13 H) + 2 H parameters, with blocks in steps of 25, are within 1.1 per cent of
    the name.
    """
    with torch.device("meta"):
        chain = models.build("mpress-gpt", size=size).build()
    assert isinstance(chain, nn.Sequential)
    layers, hidden = len(chain) - 3, 4096
    assert layers % 25 == 0
    assert parameters(chain) == (50257 + 1024 + 2) * hidden + layers * (12 * hidden**2 + 13 * hidden)
    assert abs(parameters(chain) / named(size) - 1) < 0.011


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", BERT_SHAPES)
def test_bert_has_the_papers_parameters(size: str) -> None:
    """V H + S H + 4 H + L (12 H^2 + 13 H) + 2 H + 2 parameters are within 1 per cent of the name, BERT large
    within 5.
    """
    with torch.device("meta"):
        chain = models.build("mpress-bert", size=size).build()
    assert isinstance(chain, nn.Sequential)
    layers, hidden, heads = BERT_SHAPES[size]  # type: ignore[index]
    assert hidden // heads == 64
    assert len(chain) == layers + 2
    assert parameters(chain) == (30522 + 512 + 4 + 2) * hidden + 2 + layers * (12 * hidden**2 + 13 * hidden)
    assert abs(parameters(chain) / named(size) - 1) < (0.05 if size == "0.35B" else 0.01)


def test_the_smallest_bert_is_bert_large() -> None:
    """The model has 24 blocks of hidden size 1024 with 16 heads, and Hugging Face's count without the pooler:
    334,094,338.
    """
    with torch.device("meta"):
        assert parameters(models.mpress_bert().build()) == 334_094_338
    assert models.mpress_bert().name == "bert-0.35B"


def test_settings_reach_the_model() -> None:
    """Plain operations, dropout and attention follow the settings."""
    with torch.device("meta"):
        bert = models.mpress_bert(unfused=True, dropout=0.3).build()
        gpt = models.mpress_gpt(attention="sdpa", dropout=0.2).build()
    assert not any(isinstance(module, nn.LayerNorm) for module in bert.modules())
    assert bert.get_submodule("block3.dropout").p == 0.3
    assert gpt.get_submodule("block3.attention").kind == "sdpa"
    assert gpt.get_submodule("block3.dropout").p == 0.2
