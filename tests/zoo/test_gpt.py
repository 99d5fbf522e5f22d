"""GPT matches its closed form, torch's own encoder layer, and causality."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipefit import models

SMALL: dict[str, Any] = {
    "layers": 3,
    "hidden": 24,
    "heads": 4,
    "vocabulary": 31,
    "sequence": 10,
    "dropout": 0.0,
}


def chain_of(**settings: Any) -> nn.Sequential:
    torch.manual_seed(1)
    chain = models.build("gpt", **(SMALL | settings)).build()
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
    """The model has 2 V H + S H + L (12 H^2 + 13 H) + 2 H parameters in L + 3 layers."""
    chain = chain_of(layers=layers, hidden=hidden, vocabulary=vocabulary, sequence=sequence)
    block = 12 * hidden**2 + 13 * hidden
    assert parameters(chain) == 2 * vocabulary * hidden + sequence * hidden + layers * block + 2 * hidden
    assert len(chain) == layers + 3


def test_published_parameter_count() -> None:
    """The default is GPT-2 small: its 124,439,808 parameters, and a separate head."""
    with torch.device("meta"):
        chain = models.gpt().build()
    assert isinstance(chain, nn.Sequential)
    assert parameters(chain[:-1]) == 124_439_808
    assert parameters(chain[-1]) == 50257 * 768


def test_a_tied_head_is_the_embedding() -> None:
    """With `tied` the default has the 124,439,808 parameters of GPT-2 small, and one weight gets both
    gradients.
    """
    with torch.device("meta"):
        assert parameters(models.gpt(tied=True).build()) == 124_439_808
    chain = chain_of(tied=True)
    assert chain.get_parameter("head.weight") is chain.get_parameter("embedding.token.weight")
    assert chain.get_parameter("head.weight").std() < 0.05


def test_intermediate_sets_the_width_of_the_feed_forward_pair() -> None:
    """`intermediate` sets the feed-forward width: 2 H + 1 parameters per unit and block."""
    wide, narrow = chain_of(intermediate=50), chain_of(intermediate=20)
    assert parameters(wide) - parameters(narrow) == 3 * 30 * (2 * 24 + 1)


def test_layers_are_named_after_their_part_and_place() -> None:
    """The layers are the embedding, numbered blocks, the norm and the head."""
    assert [name for name, _ in chain_of().named_children()] == [
        "embedding",
        "block0",
        "block1",
        "block2",
        "norm",
        "head",
    ]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_block_is_a_prenorm_encoder_layer(attention: str) -> None:
    """A block's output and input gradient are those of torch's own pre-norm layer, causally masked, same
    weights.
    """
    block = chain_of(attention=attention).get_submodule("block1")
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    torch_layer = nn.TransformerEncoderLayer(
        24, 4, 96, dropout=0.0, activation=nn.GELU("tanh"), batch_first=True, norm_first=True
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
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    results = []
    for run in (block, lambda x: torch_layer(x, src_mask=causal, is_causal=True)):
        x = hidden.clone().requires_grad_()
        out = run(x)
        out.square().sum().backward()
        results.append((out.detach(), x.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_no_token_sees_the_future(attention: str) -> None:
    """Changing a token leaves the logits before it as they were and changes those from it on."""
    chain = chain_of(attention=attention)
    tokens = torch.randint(31, (2, 10))
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 31
    before, after = chain(tokens), chain(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6], rtol=0, atol=1e-6)
    assert ((before[:, 6:] - after[:, 6:]).abs().amax(-1) > 1e-6).all()


def test_both_attentions_agree() -> None:
    """The two ways to attend give the same logits from the same weights."""
    tokens = torch.randint(31, (2, 10))
    torch.testing.assert_close(chain_of(attention="sdpa")(tokens), chain_of(attention="eager")(tokens))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_drops_only_in_training(attention: str) -> None:
    """Attention's internal dropout is on in training and off in evaluation."""
    attend = chain_of(attention=attention, dropout=0.5).get_submodule("block0.attention")
    hidden = torch.randn(2, 10, 24)
    assert not torch.equal(attend(hidden), attend(hidden))
    attend.eval()
    assert torch.equal(attend(hidden), attend(hidden))


def test_a_token_has_another_embedding_at_another_place() -> None:
    """The same token at two places gets two embeddings."""
    embedded = chain_of().get_submodule("embedding")(torch.full((1, 10), 5))
    assert not torch.equal(embedded[0, 0], embedded[0, 1])


def test_targets_are_the_next_tokens() -> None:
    """Each target is the token that follows, and counting on from two tokens predicts all the others."""
    inputs, targets = models.build("gpt", **SMALL).batch(8)
    assert inputs.shape == targets.shape == (8, 10)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    step = (targets[:, :1] - inputs[:, :1]) % 31
    assert torch.equal((inputs + step) % 31, targets)
    assert inputs.is_contiguous() and targets.is_contiguous()


def test_loss_of_microbatches() -> None:
    """The mean of the losses of equal microbatches is the loss of the batch; uniform logits lose log V."""
    task = models.build("gpt", **SMALL)
    chain = chain_of()
    inputs, targets = task.batch(6)
    parts = [task.loss(chain(i), t) for i, t in zip(inputs.split(2), targets.split(2), strict=True)]
    torch.testing.assert_close(torch.stack(parts).mean(), task.loss(chain(inputs), targets))
    torch.testing.assert_close(task.loss(torch.zeros(6, 10, 31), targets), torch.tensor(31.0).log())


def test_biases_start_at_zero() -> None:
    """Every bias starts at zero, so that the first output depends on weights alone."""
    biases = [value for name, value in chain_of().named_parameters() if name.endswith("bias")]
    assert biases
    assert not any(bias.any() for bias in biases)


def test_start_is_calm() -> None:
    """The projections that add to the stream start 1 / sqrt(2 L) as large as the other weights."""
    chain = chain_of(layers=8, hidden=96)
    block = chain.get_submodule("block7").state_dict()
    for calm, plain in (("attention.out", "attention.query"), ("feedforward.down", "feedforward.up")):
        ratio = block[f"{calm}.weight"].std() / block[f"{plain}.weight"].std()
        assert ratio == pytest.approx(0.25, rel=0.1)
