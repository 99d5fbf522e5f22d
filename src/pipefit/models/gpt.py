"""GPT, a decoder of equal blocks.

Embedding and head make it uneven, and the logits are mostly its largest tensor.

layers + 3 layers: embedding, blocks, final norm, head. The head has its own weights unless they are `tied` to
the embedding's, as in GPT-2. With V tokens, S positions, hidden size H, intermediate size 4 H and L blocks: 2
V H + S H + L (12 H^2 + 13 H) + 2 H parameters, V H less if tied; 163,037,184 by default, which is GPT-2 small
untied. (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019: pre-norm, residual
projections initially scaled by 1 / sqrt(2 L).)
"""

from __future__ import annotations

import sysconfig
from collections import OrderedDict
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.models.settings import (
    Depth,
    OptimizerName,
    Rate,
    Share,
    Size,
    check_heads,
    checked,
    optimizer_of,
)
from pipefit.models.transformer import (
    AttentionKind,
    FeedForward,
    SelfAttention,
    Sizes,
    initialise,
    token_loss,
    token_sequences,
)


@checked
def gpt(
    *,
    layers: Depth = 12,
    hidden: Size = 768,
    heads: Size = 12,
    vocabulary: Size = 50257,
    sequence: Size = 1024,
    intermediate: Size | None = None,
    dropout: Share = 0.1,
    attention: AttentionKind = "sdpa",
    tied: bool = False,
    optimizer: OptimizerName = "adamw",
    lr: Rate | None = None,
) -> Task:
    """GPT on tokens (batch, sequence), predicting each next one: logits (batch, sequence, vocabulary).

    `intermediate` None means 4 x hidden; `lr` None means the optimizer's usual rate.

    Raises:
        UsageError: a setting has a wrong value, or hidden does not divide among the heads.
    """
    check_heads("gpt", hidden, heads)
    sizes = Sizes(
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocabulary=vocabulary,
        sequence=sequence,
        intermediate=intermediate or 4 * hidden,
        dropout=dropout,
        attention=attention,
        tied=tied,
    )
    return Task(
        partial(_chain, sizes),
        batch=partial(_batch, sequence=sequence, vocabulary=vocabulary),
        loss=token_loss,
        optimizer=optimizer_of(optimizer, lr),
        name="gpt",
    )


class Embedding(nn.Module):
    """Tokens (batch, sequence) to hidden states: token embedding plus position embedding, then dropout."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.position = nn.Embedding(sizes.sequence, sizes.hidden)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, sequence) to (batch, sequence, hidden)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: Tensor = self.dropout(self.token(tokens) + self.position(places))
        return embedded


class Block(nn.Module):
    """A pre-norm block: attention and feed-forward each read a normalised copy and add to their input."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(sizes.hidden)
        self.attention = SelfAttention(sizes, causal=True)
        self.norm2 = nn.LayerNorm(sizes.hidden)
        self.feedforward = FeedForward(sizes, nn.GELU("tanh"))
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, sequence, hidden) to the same shape."""
        hidden = hidden + self.dropout(self.attention(self.norm1(hidden)))
        summed: Tensor = hidden + self.dropout(self.feedforward(self.norm2(hidden)))
        return summed


def _chain(sizes: Sizes) -> nn.Sequential:
    chain: OrderedDict[str, nn.Module] = OrderedDict()
    embedding = chain["embedding"] = Embedding(sizes)
    for place in range(sizes.layers):
        chain[f"block{place}"] = Block(sizes)
    chain["norm"] = nn.LayerNorm(sizes.hidden)
    head = chain["head"] = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
    if sizes.tied:
        head.weight = embedding.token.weight
    model = nn.Sequential(chain)
    initialise(model)
    _scale_residuals(model, sizes.layers)
    return model


def _scale_residuals(model: nn.Module, layers: int) -> None:
    """Scale down the 2 x layers projections onto the residual stream, so that activations do not grow with
    depth.
    """
    for block in model.modules():
        if isinstance(block, Block):
            for projection in (block.attention.out, block.feedforward.down):
                nn.init.normal_(projection.weight, std=0.02 / (2 * layers) ** 0.5)


def _batch(size: int, *, sequence: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return tokens and, for each, the next one: two tensors (size, sequence), each with a separate
    storage.
    """
    tokens = token_sequences(size, length=sequence + 1, vocabulary=vocabulary)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


# ---- Real text on every machine: the sources of Python's standard library, byte by byte, for a small GPT.
#
# About a million bytes of its larger modules. A model without knowledge has a loss of ln 256 = 5.5 nats per
# byte; one that knows the frequency of each byte, about 3.2.

_BYTES = 256
_LARGEST_MODULES = 24


@checked
def gpt_stdlib(
    *,
    layers: Depth = 8,
    hidden: Size = 128,
    heads: Size = 4,
    sequence: Size = 128,
    dropout: Share = 0.0,
    optimizer: OptimizerName = "adamw",
    lr: Rate | None = 2e-3,
) -> Task:
    """A byte-level GPT that learns Python's standard library: bytes (batch, sequence) and, for each, the next
    one.

    Raises:
        UsageError: a setting has a wrong value, or this Python lacks library sources.
    """
    task = gpt(
        layers=layers, hidden=hidden, heads=heads, vocabulary=_BYTES, sequence=sequence, dropout=dropout,
        optimizer=optimizer, lr=lr,
    )  # fmt: skip
    return replace(task, batch=partial(_stdlib_text_batch, sequence=sequence), name="gpt-stdlib")


def _stdlib_text_batch(size: int, *, sequence: int) -> tuple[Tensor, Tensor]:
    """Return windows of the text at random places."""
    text = _text()
    starts = torch.randint(0, len(text) - sequence - 1, (size, 1))
    windows = text[starts + torch.arange(sequence + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@cache
def _text() -> Tensor:
    """Return the largest modules of the library, largest first, as bytes."""
    library = Path(sysconfig.get_path("stdlib"))
    modules = sorted(library.glob("*.py"), key=lambda path: (-path.stat().st_size, path.name))[
        :_LARGEST_MODULES
    ]
    if not modules:
        raise UsageError(
            f"this Python does not have sources in {library}: use zoo:gpt, which uses synthetic data"
        )
    text = b"".join(path.read_bytes() for path in modules)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


# ---- The family of the MPress paper by size

GptSize = Literal["5.3B", "10.3B", "15.4B", "20.4B", "25.5B"]

GPT_LAYERS: dict[GptSize, int] = {"5.3B": 25, "10.3B": 50, "15.4B": 75, "20.4B": 100, "25.5B": 125}


@checked
def mpress_gpt(
    *,
    size: GptSize = "5.3B",
    dropout: Share = 0.1,
    attention: AttentionKind = "eager",
    optimizer: OptimizerName = "adam",
    lr: Rate | None = None,
) -> Task:
    """Return a GPT of the MPress paper: blocks of hidden size 4096, 32 heads, 25 at a time, and a tied head.

    The paper gives the parameters of its models and their memory on 8 devices, and the shapes follow from
    both; counts are 0.2 to 1.1 per cent below the names. It computes attention by plain operations, and
    trains in half precision with an optimizer that keeps float32 copies (`--precision master-float16`).
    (Zhou et al., "MPress", HPCA 2023.)

    Raises:
        UsageError: a setting has a wrong value.
    """
    task = gpt(
        layers=GPT_LAYERS[size],
        hidden=4096,
        heads=32,
        tied=True,
        dropout=dropout,
        attention=attention,
        optimizer=optimizer,
        lr=lr,
    )
    return replace(task, name=f"gpt-{size}")
