"""BERT, an encoder whose layers pass on a pair: the hidden states, and the mask that every block needs.

layers + 3 layers: embedding, blocks, transform (the masked-language head's dense, GELU and norm), head (its
decoder, with its own weights unless they are `tied` to the embedding's, as in the original). With V tokens, S
positions, hidden size H, intermediate size 4 H and L blocks: V H + S H + 4 H + L (12 H^2 + 13 H) + H^2 + 3 H
+ V H + V parameters, V H less if tied; 132,955,194 by default, which is BERT base untied. With head "span",
which finds the answer to a question in a text (SQuAD), layers + 2 layers, and 2 H + 2 parameters in place of
H^2 + 3 H + V H + V. (Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2019:
post-norm.)
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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

# ---- Layer norm and GELU of plain operations, as before PyTorch 1.2 had kernels for them
#
# Every operation saves the tensors for its backward. For an input of n bytes, GELU saves 3 n instead of
# `nn.GELU`'s n, and layer norm 3 n and a number per row instead of `nn.LayerNorm`'s n and two. Values are
# equal up to rounding. (Hugging Face's first PyTorch BERT, 2018, and NVIDIA's and PipeDream's models derived
# from it.)


class UnfusedGELU(nn.Module):
    """GELU, x / 2 times 1 + erf(x / sqrt 2), operation by operation."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Map any shape to the same shape."""
        return hidden * 0.5 * (1.0 + torch.erf(hidden / math.sqrt(2.0)))


class UnfusedLayerNorm(nn.Module):
    """Layer norm over the last dimension, with the parameters and the values of `nn.LayerNorm`."""

    def __init__(self, hidden: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden))
        self.bias = nn.Parameter(torch.zeros(hidden))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (..., hidden) to the same shape."""
        mean = hidden.mean(-1, keepdim=True)
        variance = (hidden - mean).pow(2).mean(-1, keepdim=True)
        normal = (hidden - mean) / torch.sqrt(variance + self.eps)
        return self.weight * normal + self.bias


# ---- The model

HeadKind = Literal["tokens", "span"]
Values = Tensor | tuple[Tensor, Tensor]  # tokens or hidden states, without or with the mask

_NORM_EPSILON = 1e-12
_SEGMENTS = 2
_HIDDEN_TOKENS = 0.15  # share of tokens that are hidden
_HIDDEN_TOKEN = 0  # replaces hidden tokens


@checked
def bert(
    *,
    layers: Depth = 12,
    hidden: Size = 768,
    heads: Size = 12,
    vocabulary: Size = 30522,
    sequence: Size = 512,
    intermediate: Size | None = None,
    dropout: Share = 0.1,
    mask: bool = True,
    attention: AttentionKind = "sdpa",
    head: HeadKind = "tokens",
    tied: bool = False,
    unfused: bool = False,
    optimizer: OptimizerName = "adamw",
    lr: Rate | None = None,
) -> Task:
    """BERT on tokens (batch, sequence), some of them hidden, restoring all: logits (batch, sequence,
    vocabulary).

    Head "span" finds the begin and end of an answer instead: logits (batch, sequence, 2). With `unfused`,
    GELU and layer norm are of plain operations, as before PyTorch 1.2, and save three times the bytes.

    With `mask`, the inputs are the pair of tokens and a boolean mask (batch, sequence), True for text and
    False for padding, and the layers pass (hidden, mask) on; without, all are plain tensors. `intermediate`
    None means 4 x hidden; `lr` None means the optimizer's usual rate.

    Raises:
        UsageError: a setting has a wrong value, hidden does not divide among the heads, or a head that is not
        a
            decoder of tokens is tied.
    """
    check_heads("bert", hidden, heads)
    if tied and head != "tokens":
        raise UsageError("bert: head='span' lacks weights to tie to the embedding: omit tied")
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
    batch = _batch if head == "tokens" else _questions
    return Task(
        partial(_chain, sizes, head, unfused=unfused),
        batch=partial(batch, sequence=sequence, vocabulary=vocabulary, mask=mask),
        loss=token_loss if head == "tokens" else span_loss,
        optimizer=optimizer_of(optimizer, lr),
        name="bert",
    )


def _apart(values: Values) -> tuple[Tensor, Tensor | None]:
    return values if isinstance(values, tuple) else (values, None)


def _together(hidden: Tensor, mask: Tensor | None) -> Values:
    return hidden if mask is None else (hidden, mask)


class Embedding(nn.Module):
    """Tokens to hidden states: token plus position plus segment (all text is of the first), norm, dropout."""

    def __init__(self, sizes: Sizes, *, unfused: bool) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.position = nn.Embedding(sizes.sequence, sizes.hidden)
        self.segment = nn.Embedding(_SEGMENTS, sizes.hidden)
        self.norm = _norm(sizes.hidden, unfused=unfused)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, values: Values) -> Values:
        """Map tokens (batch, sequence) to hidden states (batch, sequence, hidden).

        A mask, if any, is passed on.
        """
        tokens, mask = _apart(values)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        embedded = self.token(tokens) + (self.position(places) + self.segment.weight[0])
        return _together(self.dropout(self.norm(embedded)), mask)


class Block(nn.Module):
    """A post-norm block: attention and the feed-forward pair each add to their input, and the sum is
    normalised.
    """

    def __init__(self, sizes: Sizes, *, unfused: bool) -> None:
        super().__init__()
        self.attention = SelfAttention(sizes, causal=False)
        self.norm1 = _norm(sizes.hidden, unfused=unfused)
        self.feedforward = FeedForward(sizes, _gelu(unfused=unfused))
        self.norm2 = _norm(sizes.hidden, unfused=unfused)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, values: Values) -> Values:
        """Map hidden states (batch, sequence, hidden), with or without a mask, to the same."""
        hidden, mask = _apart(values)
        hidden = self.norm1(hidden + self.dropout(self.attention(hidden, mask)))
        hidden = self.norm2(hidden + self.dropout(self.feedforward(hidden)))
        return _together(hidden, mask)


class Transform(nn.Module):
    """The masked-language head before its decoder: dense, GELU, norm. The mask ends here."""

    def __init__(self, hidden: int, *, unfused: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden, hidden)
        self.gelu = _gelu(unfused=unfused)
        self.norm = _norm(hidden, unfused=unfused)

    def forward(self, values: Values) -> Tensor:
        """Map hidden states, with or without a mask, to hidden states only (batch, sequence, hidden)."""
        hidden, _ = _apart(values)
        transformed: Tensor = self.norm(self.gelu(self.dense(hidden)))
        return transformed


class Span(nn.Module):
    """Scores of every token as the first and as the last of an answer. The mask ends here."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.scores = nn.Linear(hidden, 2)

    def forward(self, values: Values) -> Tensor:
        """Map hidden states, with or without a mask, to logits (batch, sequence, 2)."""
        hidden, _ = _apart(values)
        scores: Tensor = self.scores(hidden)
        return scores


def _norm(hidden: int, *, unfused: bool) -> nn.Module:
    return (UnfusedLayerNorm if unfused else nn.LayerNorm)(hidden, eps=_NORM_EPSILON)


def _gelu(*, unfused: bool) -> nn.Module:
    return UnfusedGELU() if unfused else nn.GELU()


def _chain(sizes: Sizes, head: HeadKind, *, unfused: bool) -> nn.Sequential:
    chain: OrderedDict[str, nn.Module] = OrderedDict()
    embedding = chain["embedding"] = Embedding(sizes, unfused=unfused)
    for place in range(sizes.layers):
        chain[f"block{place}"] = Block(sizes, unfused=unfused)
    if head == "span":
        chain["head"] = Span(sizes.hidden)
    else:
        chain["transform"] = Transform(sizes.hidden, unfused=unfused)
        decoder = chain["head"] = nn.Linear(sizes.hidden, sizes.vocabulary)
        if sizes.tied:
            decoder.weight = embedding.token.weight
    model = nn.Sequential(chain)
    initialise(model)
    return model


def _batch(size: int, *, sequence: int, vocabulary: int, mask: bool) -> tuple[Values, Tensor]:
    """Return texts with some tokens hidden, and the texts; with `mask`, each is padded from its half or later
    on.
    """
    targets = token_sequences(size, length=sequence, vocabulary=vocabulary)
    tokens = targets.masked_fill(torch.rand(size, sequence) < _HIDDEN_TOKENS, _HIDDEN_TOKEN)
    return _together(tokens, _padding(size, sequence) if mask else None), targets


def _questions(size: int, *, sequence: int, vocabulary: int, mask: bool) -> tuple[Values, Tensor]:
    """Return texts with hidden tokens before and after an answer, and the places of both (size, 2)."""
    tokens = token_sequences(size, length=sequence, vocabulary=vocabulary)
    places, _ = torch.randint((sequence + 1) // 2, (size, 2)).sort(dim=1)
    tokens = tokens.scatter(1, places, _HIDDEN_TOKEN)
    return _together(tokens, _padding(size, sequence) if mask else None), places


def _padding(size: int, sequence: int) -> Tensor:
    """Return a mask of text, which covers at least the first half."""
    lengths = torch.randint((sequence + 1) // 2, sequence + 1, (size, 1))
    return torch.arange(sequence) < lengths


def span_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of the first and last places of answers, from logits (batch, sequence,
    2).
    """
    return F.cross_entropy(output.float(), targets)


# ---- The family of the MPress paper by size

BertSize = Literal["0.35B", "0.64B", "1.67B", "4.0B", "6.2B"]

BERT_SHAPES: dict[BertSize, tuple[int, int, int]] = {  # layers, hidden size, heads
    "0.35B": (24, 1024, 16), "0.64B": (48, 1024, 16),
    "1.67B": (32, 2048, 32), "4.0B": (78, 2048, 32), "6.2B": (122, 2048, 32),
}  # fmt: skip


@checked
def mpress_bert(
    *,
    size: BertSize = "0.35B",
    unfused: bool = False,
    dropout: Share = 0.1,
    attention: AttentionKind = "eager",
    optimizer: OptimizerName = "adam",
    lr: Rate | None = None,
) -> Task:
    """Return a Bert of the MPress paper; `unfused` with GELU and layer norm of plain operations.

    It is BERT large, a model of twice its blocks, or larger ones of hidden size 2048, over 512 tokens. The
    shapes follow from the paper's numbers of parameters and its memory on 8 devices: logits over the
    vocabulary would need more on the last device than it says, so the head finds a span of text (SQuAD).
    Counts are within 1 per cent of the names, except for 0.35B: BERT large has 0.334B. The paper trains it
    in float32, with attention by plain operations. (Zhou et al., "MPress", HPCA 2023.)

    Raises:
        UsageError: a setting has a wrong value.
    """
    layers, hidden, heads = BERT_SHAPES[size]
    task = bert(
        layers=layers,
        hidden=hidden,
        heads=heads,
        head="span",
        unfused=unfused,
        dropout=dropout,
        attention=attention,
        optimizer=optimizer,
        lr=lr,
    )
    return replace(task, name=f"bert-{size}")
