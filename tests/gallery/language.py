"""Models of texts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gallery.model import ADAM, TIED, Model

WORDS, LENGTH = 40, 10


def tokens(size: int, length: int = LENGTH) -> Tensor:
    """Draw random words."""
    return torch.randint(WORDS, (size, length))


def next_words(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the cross entropy of every word."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class RotaryBlock(nn.Module):
    """A block of RMS norms, rotary positions, one key head for two query heads, a gated MLP (Touvron et al.,
    2023).
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width // 2, bias=False)
        self.value, self.out = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 24, bias=False), nn.Linear(width, 24, bias=False)
        self.down = nn.Linear(24, width, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (self.query(h), self.key(h), self.value(h))
        )
        k, v = (t.repeat_interleave(2, 1) for t in (rotated(k, turn), v))
        x = x + self.out(
            F.scaled_dot_product_attention(rotated(q, turn), k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate pairs of numbers."""
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * turn.cos() - b * turn.sin(), a * turn.sin() + b * turn.cos()], -1).flatten(-2)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.blocks = nn.ModuleList(RotaryBlock() for _ in range(3))
        self.norm, self.head = nn.RMSNorm(16), nn.Linear(16, WORDS, bias=False)
        self.register_buffer("speeds", 100.0 ** -(torch.arange(4) / 4), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        turn = torch.arange(words.shape[1])[:, None] * self.speeds
        x = self.embed(words)
        for block in self.blocks:
            x = block(x, turn)
        return self.head(self.norm(x))


class SlopedAttention(nn.Module):
    """Attention whose scores fall with distance, with another slope in each head (Press et al., 2022)."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.drop, self.heads = nn.LayerNorm(width), nn.Dropout(0.1), heads
        self.slopes = [2.0 ** -(4 * head + 1) for head in range(heads)]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        place = torch.arange(x.shape[1], device=x.device)
        away = (place[:, None] - place).to(x.dtype)
        scores = q @ k.mT / 8**0.5 - torch.tensor(self.slopes, device=x.device)[:, None, None] * away
        weights = self.drop(scores.masked_fill(away < 0, float("-inf")).softmax(-1))
        return x + self.drop(self.out((weights @ v).transpose(1, 2).flatten(2)))


def sloped() -> nn.Module:
    """Build a chain of such attentions."""
    return nn.Sequential(
        nn.Embedding(WORDS, 16), *(SlopedAttention() for _ in range(4)), nn.Linear(16, WORDS)
    )


class RelativeAttention(nn.Module):
    """Attention from one sequence to another, with a bias from the caller (Raffel et al., 2020)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.query = nn.RMSNorm(width), nn.Linear(width, width, bias=False)
        self.memory, self.out = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, source: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        h = self.norm(x)
        q = self.query(h).unflatten(-1, (2, -1)).transpose(1, 2)
        k, v = self.memory(h if source is None else source).unflatten(-1, (2, 2, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT if bias is None else q @ k.mT + bias
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class EncoderDecoder(nn.Module):
    """One table of position biases for all layers of a side; every decoder layer gets the
    encoder's result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.encoder = nn.ModuleList(RelativeAttention() for _ in range(2))
        self.decoder = nn.ModuleList(RelativeAttention() for _ in range(2))
        self.cross = nn.ModuleList(RelativeAttention() for _ in range(2))
        self.far, self.back = nn.Embedding(2 * LENGTH, 2), nn.Embedding(2 * LENGTH, 2)

    def forward(self, source: Tensor, target: Tensor, past: Tensor | None = None) -> Tensor:
        place = torch.arange(LENGTH)
        away = place - place[:, None] + LENGTH
        bias, later = self.far(away).permute(2, 0, 1), torch.where(away > LENGTH, -1e9, 0.0)
        x = self.embed(source)
        for layer in self.encoder:
            x = layer(x, bias=bias)
        y, back = self.embed(target), self.back(away).permute(2, 0, 1) + later
        for own, cross in zip(self.decoder, self.cross, strict=True):
            y = cross(own(y, bias=back), source=x)
        return F.linear(y, self.embed.weight) if past is None else y + past


class CharacterConvolutions(nn.Module):
    """Convolutions of several widths over letters, the two highest values of each (Kim, 2014; Kalchbrenner,
    2014).
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(8, 6, width, padding="same") for width in (2, 3, 5))
        self.norm, self.head = nn.BatchNorm1d(36), nn.Linear(36, 4)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.embed(letters).mT
        found = [F.relu(conv(x)).topk(2, 2).values.flatten(1) for conv in self.convs]
        return self.head(F.dropout(self.norm(torch.cat(found, 1)), 0.2, self.training))


class Tagger(nn.Module):
    """A bidirectional LSTM with tags scored as a path; the loss sums over all paths (Huang et al., 2015)."""

    def __init__(self, tags: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 12)
        self.lstm = nn.LSTM(12, 8, batch_first=True, bidirectional=True)
        self.score = nn.Linear(16, tags)
        self.moves, self.begin = nn.Parameter(torch.randn(tags, tags)), nn.Parameter(torch.randn(tags))

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        scores = self.score(self.lstm(self.embed(words))[0])
        total = self.begin + scores[:, 0]
        path = self.begin[tags[:, 0]] + scores[:, 0].gather(1, tags[:, :1])[:, 0]
        for step in range(1, words.shape[1]):
            total = torch.logsumexp(total[:, :, None] + self.moves, 1) + scores[:, step]
            path = (
                path
                + self.moves[tags[:, step - 1], tags[:, step]]
                + scores[:, step].gather(1, tags[:, step, None])[:, 0]
            )
        return (torch.logsumexp(total, 1) - path).mean()


class BagOfWords(nn.Module):
    """A mean over the words, and a second bag weighted by the importance of words (Joulin et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.weighted = nn.EmbeddingBag(WORDS, 12), nn.EmbeddingBag(WORDS, 12, mode="sum")
        self.hidden, self.head = nn.Linear(24, 16), nn.Linear(16, 4)

    def forward(self, words: Tensor, weights: Tensor) -> Tensor:
        both = torch.cat([self.mean(words), self.weighted(words, per_sample_weights=weights)], 1)
        return self.head(torch.tanh(self.hidden(both)))


class LinearAttention(nn.Module):
    """Attention as a running sum of outer products (Katharopoulos et al., 2020)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            nn.LayerNorm(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        sums = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(1)
        above = torch.einsum("btd,btde->bte", q, sums)
        return x + self.out(above / (torch.einsum("btd,btd->bt", q, k.cumsum(1)).unsqueeze(-1) + 1e-6))


def linear_attention() -> nn.Module:
    """Build a chain of such attentions."""
    return nn.Sequential(
        nn.Embedding(WORDS, 16), *(LinearAttention() for _ in range(3)), nn.Linear(16, WORDS)
    )


class MaskedWords(nn.Module):
    """A predictor of hidden words; most positions are outside the loss. An optional padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place, self.kind = (
            nn.Embedding(WORDS, 16),
            nn.Embedding(LENGTH, 16),
            nn.Embedding(2, 16),
        )
        self.norm = nn.LayerNorm(16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2)
        )
        self.transform, self.bias = nn.Linear(16, 16), nn.Parameter(torch.zeros(WORDS))

    def forward(
        self, words: Tensor, kinds: Tensor, labels: Tensor, padding: Tensor | None = None
    ) -> dict[str, Tensor]:
        x = self.norm(self.embed(words) + self.place.weight + self.kind(kinds))
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        logits = F.linear(F.gelu(self.transform(x)), self.embed.weight, self.bias)
        return {
            "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100),
            "logits": logits,
        }


def hidden_words(size: int) -> tuple[dict[str, Tensor | None], None]:
    """Draw texts with every third word hidden."""
    labels = tokens(size).where(torch.arange(LENGTH) % 3 == 0, -100)
    return {
        "words": tokens(size),
        "kinds": torch.randint(2, (size, LENGTH)),
        "labels": labels,
        "padding": None,
    }, None


def same_words(size: int) -> tuple[Tensor, Tensor]:
    """Draw words in and out."""
    return tokens(size), tokens(size)


LANGUAGE = (
    Model(
        name="rotary decoder", special="rotary positions from a buffer outside the state, grouped queries, RMS norms",
        module=Rotary, batch=same_words, loss=next_words, optimizer=ADAM,
    ),
    Model(
        name="sloped attention", special="eager causal attention with dropout and distances, written as a chain",
        module=sloped, batch=same_words, loss=next_words, optimizer=ADAM,
    ),
    Model(
        name="encoder decoder",
        special="cross attention to every decoder layer, one position table for all layers, tied embeddings, None",
        module=EncoderDecoder, batch=lambda size: ((tokens(size), tokens(size)), tokens(size)), loss=next_words,
        rounded=TIED,
    ),
    Model(
        name="character convolutions", special="several widths of convolution, the highest values kept by topk",
        module=CharacterConvolutions,
        batch=lambda size: (torch.randint(30, (size, 14)), torch.randint(4, (size,))), loss=F.cross_entropy,
    ),
    Model(
        name="tagger", special="the loss of a conditional random field, a loop over time inside the model",
        module=Tagger, batch=lambda size: ((tokens(size), torch.randint(5, (size, LENGTH))), None), loss=None,
    ),
    Model(
        name="bag of words", special="EmbeddingBag, with weights for each sample too",
        module=BagOfWords,
        batch=lambda size: ((tokens(size), torch.rand(size, LENGTH)), torch.randint(4, (size,))),
        loss=F.cross_entropy,
    ),
    Model(
        name="linear attention", special="cumulative sums of outer products, einsum",
        module=linear_attention, batch=same_words, loss=next_words, optimizer=ADAM,
    ),
    Model(
        name="masked words", special="a dictionary with None in it, own loss that ignores most words, tied embeddings",
        module=MaskedWords, batch=hidden_words, loss=None, optimizer=ADAM, rounded=TIED,
    ),
)  # fmt: skip
