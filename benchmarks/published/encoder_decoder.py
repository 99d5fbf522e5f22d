"""T5 as Megatron Core builds it with local layers: learned positions, pre-norm, GELU, attention that keeps scores.

A sample is the encoder's tokens and then the decoder's. Values of the chain are pairs: what the encoder has, and the
decoder.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from models import Attention, FeedForward, Shape, Style, norm_of
from rows import Inexpressible, Row
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit import Task

Pair = tuple[Tensor, Tensor]
VOCABULARY = 28996 + 100  # of the cased BERT, and T5's sentinels


class Visible(Attention):
    """Self-attention to all tokens."""

    def masked(self, scores: Tensor) -> Tensor:
        """Return the scores as they are."""
        return scores


class Across(nn.Module):
    """Attention of the decoder's tokens to the encoder's."""

    def __init__(self, shape: Shape, style: Style) -> None:
        super().__init__()
        self.query, self.pair = (
            nn.Linear(shape.hidden, shape.hidden),
            nn.Linear(shape.hidden, 2 * shape.hidden),
        )
        self.out, self.size, self.dropout = (
            nn.Linear(shape.hidden, shape.hidden),
            shape.head_size,
            style.dropout,
        )

    def forward(self, hidden: Tensor, memory: Tensor) -> Tensor:
        """Map (batch, sequence, hidden) to the same shape."""

        def heads(tokens: Tensor) -> Tensor:
            return tokens.view(*tokens.shape[:2], -1, self.size).transpose(1, 2)

        key, value = map(heads, self.pair(memory).chunk(2, dim=-1))
        scores = heads(self.query(hidden)) @ (key * self.size**-0.5).transpose(-2, -1)
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        return self.out((weights @ value).transpose(1, 2).reshape(hidden.shape))


class CodingBlock(nn.Module):
    """A block of the encoder, or of the decoder, which also attends across."""

    def __init__(self, shape: Shape, style: Style, *, decodes: bool) -> None:
        super().__init__()
        kind = Attention if decodes else Visible
        self.attention, self.feedforward = kind(shape, style, None), FeedForward(shape, style, None)
        self.across = Across(shape, style) if decodes else None
        self.norms = nn.ModuleList(norm_of(style, shape.hidden) for _ in range(2 + decodes))
        self.dropout = style.dropout

    def forward(self, pair: Pair) -> Pair:
        """Map what the encoder and the decoder have to the same, with one of them a block further."""
        memory, hidden = pair if self.across else pair[::-1]
        hidden = hidden + self.drop(self.attention(self.norms[0](hidden)))
        if self.across:
            hidden = hidden + self.drop(self.across(self.norms[2](hidden), memory))
        hidden = hidden + self.drop(self.feedforward(self.norms[1](hidden)))
        return (memory, hidden) if self.across else (hidden, memory)

    def drop(self, hidden: Tensor) -> Tensor:
        """Apply dropout."""
        return F.dropout(hidden, self.dropout, self.training)


class Embeddings(nn.Module):
    """Embeds the encoder's tokens and the decoder's with the same weights."""

    def __init__(self, shape: Shape, style: Style) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(shape.vocab, shape.hidden),
            nn.Embedding(shape.seq, shape.hidden),
        )
        self.length, self.dropout = shape.seq, style.dropout

    def forward(self, tokens: Tensor) -> Pair:
        """Map (batch, tokens of both) to two hidden states."""
        first, second = map(self.embedded, (tokens[:, : self.length], tokens[:, self.length :]))
        return first, second

    def embedded(self, tokens: Tensor) -> Tensor:
        """Embed tokens (batch, sequence)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return F.dropout(self.tokens(tokens) + self.positions(places), self.dropout, self.training)


class Ends(nn.Module):
    """The norm after the encoder, or after the decoder, which alone is kept."""

    def __init__(self, shape: Shape, style: Style, *, decodes: bool) -> None:
        super().__init__()
        self.norm, self.decodes = norm_of(style, shape.hidden), decodes

    def forward(self, pair: Pair) -> Pair | Tensor:
        """Map the pair to itself with a part normalised, or to the decoder's part."""
        return self.norm(pair[1]) if self.decodes else (self.norm(pair[0]), pair[1])


def model(shape: Shape, style: Style) -> nn.Sequential:
    """Return the chain: embeddings, encoder, norm, decoder, norm, head; the head's weights are the embedding's."""
    chain: OrderedDict[str, nn.Module] = OrderedDict()
    chain["embeddings"] = embeddings = Embeddings(shape, style)
    for decodes in (False, True):
        for number in range(shape.layers):
            chain[f"block{number + shape.layers * decodes}"] = CodingBlock(shape, style, decodes=decodes)
        chain[f"norm{int(decodes)}"] = Ends(shape, style, decodes=decodes)
    chain["head"] = head = nn.Linear(shape.hidden, shape.vocab)
    head.weight = embeddings.tokens.weight
    return nn.Sequential(chain)


def batch(size: int, *, shape: Shape, decoded: int) -> Pair:
    """Return random tokens (size, tokens of both) and targets (size, the decoder's tokens)."""
    return torch.randint(shape.vocab, (size, shape.seq + decoded)), torch.randint(
        shape.vocab, (size, decoded)
    )


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over all tokens of the decoder."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def task_of(
    row: Row, optimizer: Callable[..., torch.optim.Optimizer]
) -> tuple[object, Callable[[], Task], Shape]:
    """Return a key, the function that makes the task, and the decoder's sizes, of a row of Megatron's T5.

    Raises:
        Inexpressible: another model or framework, or unequal numbers of layers.
    """
    found = re.fullmatch(r"(\d+)\+\1", row.layers)
    length = re.search(r"--decoder-seq-length=(\d+)", row.remarks)
    if not (found and length and row.framework.startswith("Megatron-LM") and row.hidden and row.heads):
        raise Inexpressible("encoder and decoder")
    each = 128 * (row.tp or 1)
    vocab = -(-(row.vocab or VOCABULARY) // each) * each
    shape = Shape(
        layers=int(found[1]), hidden=row.hidden, heads=row.heads, kv_heads=row.heads, seq=row.seq or 512,
        ffn=row.ffn or 4 * row.hidden, vocab=vocab, head_size=row.hidden // row.heads,
    )  # fmt: skip
    style = Style(attention="scores", dropout=0.1, tied=True, loss="half")

    def make() -> Task:
        return Task(
            partial(model, shape, style),
            batch=partial(batch, shape=shape, decoded=int(length[1])),
            loss=loss,
            optimizer=optimizer,
            name="T5",
        )

    return ("t5", shape, length[1]), make, replace(shape, seq=int(length[1]))
