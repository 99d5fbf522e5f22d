"""BERT, an encoder whose layers hand on a pair: the hidden states, and the mask that every block needs.

layers + 3 layers: embedding, blocks, transform (the masked-language head's dense, GELU and norm), head (its decoder,
with its own weights; the original ties them to the embedding). With V tokens, S positions, hidden size H, intermediate
size 4 H and L blocks: V H + S H + 4 H + L (12 H^2 + 13 H) + H^2 + 3 H + V H + V parameters; 132,955,194 by default,
which is BERT base untied. (Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2019: post-norm.)
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import torch
from torch import Tensor, nn

from pipefit.capture.task import Task
from pipefit.zoo.optimizers import OptimizerName, optimizer_of
from pipefit.zoo.settings import Rate, Share, Size, check_heads, checked
from pipefit.zoo.transformer import AttentionKind, FeedForward, SelfAttention, initialise, token_loss, token_sequences

Values = Tensor | tuple[Tensor, Tensor]  # tokens or hidden states, without or with the mask

_NORM_EPSILON = 1e-12
_SEGMENTS = 2
_HIDDEN_TOKENS = 0.15  # share of tokens that the model must guess
_HIDDEN_TOKEN = 0  # the token that stands for them


@checked
def bert(
    *,
    layers: Size = 12,
    hidden: Size = 768,
    heads: Size = 12,
    vocabulary: Size = 30522,
    sequence: Size = 512,
    intermediate: Size | None = None,
    dropout: Share = 0.1,
    mask: bool = True,
    attention: AttentionKind = "sdpa",
    optimizer: OptimizerName = "adamw",
    lr: Rate | None = None,
) -> Task:
    """BERT on tokens (batch, sequence), some of them hidden, restoring all: logits (batch, sequence, vocabulary).

    With `mask`, the inputs are the pair of tokens and a boolean mask (batch, sequence), True where there is text and
    False in the padding, and the layers pass (hidden, mask) on; without, all are plain tensors. `intermediate` None
    is 4 x hidden; `lr` None is the optimizer's usual rate.

    Raises:
        UsageError: a setting has a wrong value, or hidden does not divide among the heads.
    """
    check_heads("bert", hidden, heads)
    chain = partial(
        _chain,
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocabulary=vocabulary,
        sequence=sequence,
        intermediate=intermediate or 4 * hidden,
        dropout=dropout,
        attention=attention,
    )
    return Task(
        chain,
        batch=partial(_batch, sequence=sequence, vocabulary=vocabulary, mask=mask),
        loss=token_loss,
        optimizer=optimizer_of(optimizer, lr),
        name="bert",
    )


def _apart(values: Values) -> tuple[Tensor, Tensor | None]:
    return values if isinstance(values, tuple) else (values, None)


def _together(hidden: Tensor, mask: Tensor | None) -> Values:
    return hidden if mask is None else (hidden, mask)


class Embedding(nn.Module):
    """Tokens to hidden states: token plus position plus segment (all text is of the first), norm, dropout."""

    def __init__(self, *, vocabulary: int, sequence: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)
        self.position = nn.Embedding(sequence, hidden)
        self.segment = nn.Embedding(_SEGMENTS, hidden)
        self.norm = nn.LayerNorm(hidden, eps=_NORM_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: Values) -> Values:
        """Tokens (batch, sequence), maybe with a mask, to hidden states (batch, sequence, hidden), with it if so."""
        tokens, mask = _apart(values)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        embedded = self.token(tokens) + (self.position(places) + self.segment.weight[0])
        return _together(self.dropout(self.norm(embedded)), mask)


class Block(nn.Module):
    """Post-norm: attention and the feed-forward pair each add to their input, and the sum is normalised."""

    def __init__(self, *, hidden: int, heads: int, intermediate: int, dropout: float, attention: AttentionKind) -> None:
        super().__init__()
        self.attention = SelfAttention(hidden=hidden, heads=heads, dropout=dropout, causal=False, kind=attention)
        self.norm1 = nn.LayerNorm(hidden, eps=_NORM_EPSILON)
        self.feedforward = FeedForward(hidden=hidden, intermediate=intermediate, gelu="none")
        self.norm2 = nn.LayerNorm(hidden, eps=_NORM_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: Values) -> Values:
        """Hidden states (batch, sequence, hidden), maybe with a mask, to the same."""
        hidden, mask = _apart(values)
        hidden = self.norm1(hidden + self.dropout(self.attention(hidden, mask)))
        hidden = self.norm2(hidden + self.dropout(self.feedforward(hidden)))
        return _together(hidden, mask)


class Transform(nn.Module):
    """The masked-language head before its decoder: dense, GELU, norm. The mask, needed no more, ends here."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden, hidden)
        self.gelu = nn.GELU()
        self.norm = nn.LayerNorm(hidden, eps=_NORM_EPSILON)

    def forward(self, values: Values) -> Tensor:
        """Hidden states, maybe with a mask, to hidden states alone (batch, sequence, hidden)."""
        hidden, _ = _apart(values)
        transformed: Tensor = self.norm(self.gelu(self.dense(hidden)))
        return transformed


def _chain(
    *,
    layers: int,
    hidden: int,
    heads: int,
    vocabulary: int,
    sequence: int,
    intermediate: int,
    dropout: float,
    attention: AttentionKind,
) -> nn.Sequential:
    chain: OrderedDict[str, nn.Module] = OrderedDict()
    chain["embedding"] = Embedding(vocabulary=vocabulary, sequence=sequence, hidden=hidden, dropout=dropout)
    for place in range(layers):
        chain[f"block{place}"] = Block(
            hidden=hidden, heads=heads, intermediate=intermediate, dropout=dropout, attention=attention
        )
    chain["transform"] = Transform(hidden)
    chain["head"] = nn.Linear(hidden, vocabulary)
    model = nn.Sequential(chain)
    initialise(model)
    return model


def _batch(size: int, *, sequence: int, vocabulary: int, mask: bool) -> tuple[Values, Tensor]:
    """Texts with some tokens hidden, and the texts; with `mask`, each is padding from half its length on or later."""
    targets = token_sequences(size, length=sequence, vocabulary=vocabulary)
    tokens = targets.masked_fill(torch.rand(size, sequence) < _HIDDEN_TOKENS, _HIDDEN_TOKEN)
    if not mask:
        return tokens, targets
    lengths = torch.randint((sequence + 1) // 2, sequence + 1, (size, 1))
    return (tokens, torch.arange(sequence) < lengths), targets
