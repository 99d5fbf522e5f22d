"""BERT matches its closed form, torch's own encoder layer, and the meaning of the mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipefit import models
from pipefit.errors import UsageError

SMALL: dict[str, Any] = {
    "layers": 2,
    "hidden": 24,
    "heads": 4,
    "vocabulary": 31,
    "sequence": 10,
    "dropout": 0.0,
}


def chain_of(**settings: Any) -> nn.Sequential:
    torch.manual_seed(1)
    chain = models.build("bert", **(SMALL | settings)).build()
    assert isinstance(chain, nn.Sequential)
    return chain


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("layers", "hidden", "vocabulary", "sequence"), [(1, 4, 1, 1), (3, 24, 31, 10), (2, 64, 7, 99)]
)
def test_parameters_are_those_of_the_closed_form(
    layers: int, hidden: int, vocabulary: int, sequence: int
) -> None:
    """The model has V H + S H + 4 H + L (12 H^2 + 13 H) + H^2 + 3 H + V H + V parameters in L + 3 layers."""
    chain = chain_of(layers=layers, hidden=hidden, vocabulary=vocabulary, sequence=sequence)
    ends = (
        vocabulary * hidden + sequence * hidden + 4 * hidden,
        hidden**2 + 3 * hidden,
        vocabulary * (hidden + 1),
    )
    assert parameters(chain) == sum(ends) + layers * (12 * hidden**2 + 13 * hidden)
    assert len(chain) == layers + 3


def test_published_parameter_count() -> None:
    """The default is BERT base: 109,514,298 parameters with a tied decoder, so a vocabulary x hidden more
    untied.
    """
    with torch.device("meta"):
        chain = models.bert().build()
    assert isinstance(chain, nn.Module)
    assert parameters(chain) == 109_514_298 + 30522 * 768


def test_a_tied_head_is_the_embedding() -> None:
    """With `tied` the default has the 109,514,298 parameters of BERT base, and one weight for both."""
    with torch.device("meta"):
        assert parameters(models.bert(tied=True).build()) == 109_514_298
    chain = chain_of(tied=True)
    assert chain.get_parameter("head.weight") is chain.get_parameter("embedding.token.weight")


def test_a_span_head_has_two_scores_a_token() -> None:
    """H^2 + 3 H + V H + V parameters of the other head become 2 H + 2, in one layer less; tying it is
    refused.
    """
    usual, span = chain_of(), chain_of(head="span")
    assert parameters(usual) - parameters(span) == 24**2 + 3 * 24 + 31 * 24 + 31 - (2 * 24 + 2)
    assert [name for name, _ in span.named_children()] == ["embedding", "block0", "block1", "head"]
    with pytest.raises(UsageError, match="omit tied"):
        models.bert(head="span", tied=True)


@pytest.mark.parametrize("mask", [True, False])
def test_an_answer_stands_between_hidden_tokens(mask: bool) -> None:
    """Targets are the places of hidden tokens in the text, in order; the loss is the mean of both cross
    entropies.
    """
    task = models.build("bert", **SMALL, head="span", mask=mask)
    inputs, places = task.batch(40)
    tokens = inputs[0] if mask else inputs
    assert not tokens.gather(1, places).any()
    assert places.shape == (40, 2) and (places[:, 0] <= places[:, 1]).all()
    if mask:
        assert inputs[1].gather(1, places).all()
    logits = chain_of(head="span")(inputs)
    assert logits.shape == (40, 10, 2)
    each = [nn.functional.cross_entropy(logits[..., end], places[:, end]) for end in range(2)]
    torch.testing.assert_close(task.loss(logits, places), (each[0] + each[1]) / 2)


def test_layers_are_named_after_their_part_and_place() -> None:
    """The layers are the embedding, numbered blocks, the head's transform and the head."""
    assert [name for name, _ in chain_of().named_children()] == [
        "embedding",
        "block0",
        "block1",
        "transform",
        "head",
    ]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("masked", [True, False])
def test_a_block_is_a_postnorm_encoder_layer(attention: str, masked: bool) -> None:
    """A block's output and input gradient are those of torch's own post-norm layer, same padding, same
    weights.
    """
    block = chain_of(attention=attention).get_submodule("block1")
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    torch_layer = nn.TransformerEncoderLayer(
        24, 4, 96, dropout=0.0, activation="gelu", batch_first=True, layer_norm_eps=1e-12
    )
    ours = block.state_dict()
    torch_layer.load_state_dict(
        {
            "self_attn.in_proj_weight": torch.cat(
                [ours[f"attention.{part}.weight"] for part in ("query", "key", "value")]
            ),
            "self_attn.in_proj_bias": torch.cat(
                [ours[f"attention.{part}.bias"] for part in ("query", "key", "value")]
            ),
            **{f"self_attn.out_proj.{kind}": ours[f"attention.out.{kind}"] for kind in ("weight", "bias")},
            **{f"linear1.{kind}": ours[f"feedforward.up.{kind}"] for kind in ("weight", "bias")},
            **{f"linear2.{kind}": ours[f"feedforward.down.{kind}"] for kind in ("weight", "bias")},
            **{
                f"norm{place}.{kind}": ours[f"norm{place}.{kind}"]
                for place in (1, 2)
                for kind in ("weight", "bias")
            },
        }
    )
    hidden = torch.randn(2, 7, 24)
    mask = torch.arange(7) < torch.tensor([[4], [7]])
    x, y = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    out = block((x, mask))[0] if masked else block(x)
    expected = torch_layer(y, src_key_padding_mask=~mask if masked else None)
    weights = torch.randn(2, 7, 24)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)


def test_all_text_is_of_the_first_segment() -> None:
    """A batch's gradient reaches the first segment's embedding and not the second's."""
    task = models.build("bert", **SMALL)
    chain = chain_of()
    inputs, targets = task.batch(3)
    task.loss(chain(inputs), targets).backward()
    gradient = chain.get_submodule("embedding.segment").weight.grad
    assert gradient[0].any()
    assert not gradient[1].any()


def test_the_mask_travels_untouched() -> None:
    """Every layer up to the transform passes on (hidden, mask), the mask being the very tensor that came
    in.
    """
    chain = chain_of()
    (tokens, mask), _ = models.build("bert", **SMALL).batch(3)
    values: Any = (tokens, mask)
    for name, layer in chain.named_children():
        values = layer(values)
        if name in ("transform", "head"):
            assert isinstance(values, torch.Tensor)
        else:
            hidden, passed = values
            assert hidden.shape == (3, 10, 24)
            assert passed is mask
    assert values.shape == (3, 10, 31)


def test_without_mask_all_are_tensors() -> None:
    """With `mask=False` the inputs and the outputs of every layer are plain tensors."""
    task = models.build("bert", **SMALL, mask=False)
    values, _ = task.batch(3)
    for layer in chain_of(mask=False):
        assert isinstance(values, torch.Tensor)
        values = layer(values)
    assert values.shape == (3, 10, 31)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_nothing_reads_the_padding(attention: str) -> None:
    """Changing tokens in the padding leaves the text's logits as they were; changing the text changes them
    all.
    """
    chain = chain_of(attention=attention)
    tokens = torch.randint(31, (2, 10))
    mask = torch.arange(10) < torch.tensor([[5], [8]])
    padded = torch.where(mask, tokens, (tokens + 1) % 31)
    before = chain((tokens, mask))
    torch.testing.assert_close(before[mask], chain((padded, mask))[mask], rtol=0, atol=1e-6)
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 31
    assert ((before - chain((changed, mask))).abs().amax(-1)[mask] > 1e-6).all()


def test_a_mask_of_all_text_is_no_mask() -> None:
    """A mask that is True everywhere gives the logits of the plain model."""
    chain = chain_of()
    tokens = torch.randint(31, (2, 10))
    torch.testing.assert_close(chain((tokens, torch.ones(2, 10, dtype=torch.bool))), chain(tokens))


def test_a_batch_hides_tokens_and_pads() -> None:
    """About 15 % of tokens are replaced, the rest equal their targets; text is a prefix of at least half the
    length.
    """
    torch.manual_seed(0)
    (tokens, mask), targets = models.build("bert", vocabulary=1000, sequence=101).batch(200)
    replaced = tokens != targets
    assert 0.13 < replaced.float().mean() < 0.17
    assert (tokens[replaced] == 0).all()
    assert mask.dtype == torch.bool
    lengths = mask.sum(1)
    assert torch.equal(mask, torch.arange(101) < lengths[:, None])
    assert lengths.min() >= 51
    assert lengths.max() <= 101
    assert lengths.unique().numel() > 10


def test_loss_counts_every_token() -> None:
    """The loss is the mean over all tokens, masked or not, so equal microbatches average to their batch."""
    task = models.build("bert", **SMALL)
    chain = chain_of()
    (tokens, mask), targets = task.batch(6)
    whole = task.loss(chain((tokens, mask)), targets)
    per_token = nn.functional.cross_entropy(chain((tokens, mask)).transpose(1, 2), targets, reduction="none")
    torch.testing.assert_close(whole, per_token.mean())
    parts = [
        task.loss(chain((t, m)), g)
        for t, m, g in zip(tokens.split(3), mask.split(3), targets.split(3), strict=True)
    ]
    torch.testing.assert_close(torch.stack(parts).mean(), whole)
