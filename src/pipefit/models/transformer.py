"""Shared parts of GPT and BERT: attention, feed-forward, generated token sequences and the loss.

Attention is Vaswani et al., "Attention Is All You Need" (2017), section 3.2. Query, key and value are
separate linear layers, so that a tensor-parallel worker can own whole heads. For b sequences of s tokens,
`eager` keeps three (b, heads, s, s) tensors for the backward (softmax, dropout mask, dropped softmax); `sdpa`
leaves the choice to `scaled_dot_product_attention`, whose fused kernels keep none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

AttentionKind = Literal["sdpa", "eager"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a transformer of `layers` blocks. If `tied`, embedding and head share their weights."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    intermediate: int
    dropout: float
    attention: AttentionKind
    tied: bool


class SelfAttention(nn.Module):
    """Multi-head self-attention, causal or not, over hidden states (batch, sequence, hidden)."""

    def __init__(self, sizes: Sizes, *, causal: bool) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.head_size = hidden // sizes.heads
        self.dropout = sizes.dropout
        self.causal = causal
        self.kind = sizes.attention
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend. `mask` (batch, sequence) is True for tokens that may be attended to; None means all."""
        query, key, value = (self._heads(linear(hidden)) for linear in (self.query, self.key, self.value))
        visible = None if mask is None else mask[:, None, None, :]
        attend = self._fused if self.kind == "sdpa" else self._eager
        mixed: Tensor = self.out(attend(query, key, value, visible).transpose(1, 2).flatten(2))
        return mixed

    def _heads(self, flat: Tensor) -> Tensor:
        """View (batch, sequence, hidden) as (batch, heads, sequence, head size), for any number of heads."""
        return flat.view(*flat.shape[:-1], -1, self.head_size).transpose(1, 2)

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, dropout_p=dropout, is_causal=self.causal
        )

    def _eager(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
        if self.causal:
            length = query.shape[-2]
            visible = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        scores = query @ key.transpose(-2, -1) * self.head_size**-0.5
        if visible is not None:
            scores = scores.masked_fill(~visible, float("-inf"))
        return F.dropout(scores.softmax(-1), self.dropout, self.training) @ value


class FeedForward(nn.Module):
    """Two linear layers with GELU between them, applied to each token."""

    def __init__(self, sizes: Sizes, gelu: nn.Module) -> None:
        super().__init__()
        self.up = nn.Linear(sizes.hidden, sizes.intermediate)
        self.gelu = gelu
        self.down = nn.Linear(sizes.intermediate, sizes.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, sequence, hidden) to the same shape."""
        lowered: Tensor = self.down(self.gelu(self.up(hidden)))
        return lowered


def initialise(model: nn.Module) -> None:
    """Initialise weights of linear and embedding layers from N(0, 0.02), biases zero, as both papers' code
    does.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def token_sequences(size: int, *, length: int, vocabulary: int) -> Tensor:
    """Return `size` sequences (int64) that count upwards modulo the vocabulary, from any token, in steps of 1
    to 4.
    """
    first = torch.randint(vocabulary, (size, 1))
    step = torch.randint(1, 5, (size, 1))
    return (first + step * torch.arange(length)) % vocabulary


def token_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over all tokens of logits (batch, sequence, vocabulary).

    It is computed in float32 also for half precision.

    Every token counts, so the mean over equal microbatches is the mean over their batch.
    """
    return F.cross_entropy(output.float().flatten(0, 1), targets.flatten())
