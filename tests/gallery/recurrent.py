"""Models that read a sequence step by step."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gallery.model import ADAM, SENT, SGD, SHARED, TIED, Model

WORDS, LENGTH = 30, 8


class TimeMajor(nn.Module):
    """A GRU with time-major output: a non-contiguous view."""

    def __init__(self, inward: int, outward: int) -> None:
        super().__init__()
        self.gru = nn.GRU(inward, outward, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0].transpose(0, 1)


class Speaker(nn.Module):
    """Three LSTMs with dropout between them, and the embedding as the head (Merity et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 12)
        self.layers = nn.ModuleList([nn.LSTM(12, 16, batch_first=True), nn.LSTM(16, 12, batch_first=True)])
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(12, WORDS)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.drop(self.embed(words))
        for layer in self.layers:
            x = self.drop(layer(x)[0])
        return self.head(x)


class Translator(nn.Module):
    """A cell that attends to the source before every word (Bahdanau et al., 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, 8), nn.Embedding(WORDS, 8)
        self.encoder, self.cell = nn.GRU(8, 8, batch_first=True, bidirectional=True), nn.GRUCell(24, 12)
        self.begin, self.look, self.key = nn.Linear(16, 12), nn.Linear(12, 10), nn.Linear(16, 10, bias=False)
        self.score, self.head = nn.Linear(10, 1, bias=False), nn.Linear(12, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, last = self.encoder(self.source(source))
        keys, given = self.key(memory), self.target(target)
        state = self.begin(last.transpose(0, 1).flatten(1)).tanh()
        found = []
        for time in range(target.shape[1]):
            weights = self.score((keys + self.look(state)[:, None]).tanh()).softmax(1)
            state = self.cell(torch.cat([given[:, time], (weights * memory).sum(1)], 1), state)
            found.append(self.head(state))
        return torch.stack(found, 2)


class Pictures(nn.Module):
    """An LSTM with convolutions for products (Shi et al., 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.last = nn.Conv2d(9, 32, 3, padding=1), nn.Conv2d(8, 1, 1)

    def forward(self, frames: Tensor) -> Tensor:
        state = memory = frames.new_zeros(len(frames), 8, 6, 6)
        for frame in frames.unbind(1):
            i, f, o, g = self.gates(torch.cat([frame, state], 1)).chunk(4, 1)
            memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
            state = o.sigmoid() * memory.tanh()
        return self.last(state)


class QuasiRecurrent(nn.Module):
    """Gates by convolutions, a state by a loop over time, in place on a table (Bradbury et al., 2017)."""

    def __init__(self, inward: int, outward: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inward, 3 * outward, 2)

    def forward(self, x: Tensor) -> Tensor:
        z, f, o = self.conv(F.pad(x.mT, (1, 0))).chunk(3, 1)
        keep, new = f.sigmoid(), z.tanh()
        table = torch.zeros_like(new)
        table[:, :, 0] = (1 - keep[:, :, 0]) * new[:, :, 0]
        for time in range(1, x.shape[1]):
            table[:, :, time] = (
                keep[:, :, time] * table[:, :, time - 1].clone() + (1 - keep[:, :, time]) * new[:, :, time]
            )
        return (table * o.sigmoid()).mT


class Echo(nn.Module):
    """A frozen recurrent layer with a trained readout (Jaeger, 2001)."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(3, 20, nonlinearity="tanh", batch_first=True)
        self.rnn.requires_grad_(False)
        self.read = nn.Linear(20, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.rnn(x)[0])


class Pondering(nn.Module):
    """A cell run three times on the same input, an answer after each time (Graves, 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head, self.halt = nn.LSTMCell(6, 10), nn.Linear(10, 3), nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        state: tuple[Tensor, Tensor] | None = None
        answer, left = torch.zeros(len(x), 3), torch.ones(len(x), 1)
        for _ in range(3):
            state = self.cell(x, state)
            stop = self.halt(state[0]).sigmoid() * left
            answer, left = answer + stop * self.head(state[0]), left - stop
        return answer


def words(size: int) -> Tensor:
    """Draw random words."""
    return torch.randint(WORDS, (size, LENGTH))


def next_words(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the cross entropy of every word."""
    return F.cross_entropy(outputs.mT, targets)


RECURRENT = (
    Model(
        name="time major", special="a GRU written as a chain, whose values are views that are not contiguous",
        module=lambda: nn.Sequential(nn.Embedding(50, 16), TimeMajor(16, 24), nn.LayerNorm(24), nn.Linear(24, 50)),
        batch=lambda size: (torch.randint(50, (size, 12)), torch.randint(50, (size, 12))),
        loss=lambda outputs, targets: F.cross_entropy(outputs.flatten(0, 1), targets.t().flatten()),
        optimizer=lambda given: SGD(given, nesterov=True, weight_decay=1e-3),
    ),
    Model(
        name="speaking LSTM", special="fused LSTMs, dropout between them, the embedding tied to the head",
        module=Speaker, batch=lambda size: (words(size), words(size)), loss=next_words, rounded=TIED,
    ),
    Model(
        name="translator", special="a bidirectional GRU, a cell in a loop, attention before every word",
        module=Translator, batch=lambda size: ((words(size), words(size)), words(size)), loss=F.cross_entropy,
        optimizer=ADAM, rounded=TIED, above=SHARED,
    ),
    Model(
        name="pictures", special="convolutions over frames one after the other, with the same weights",
        module=Pictures, batch=lambda size: (torch.randn(size, 4, 1, 6, 6), torch.randn(size, 1, 6, 6)),
        loss=F.mse_loss, rounded=TIED, above=SHARED,
    ),
    Model(
        name="quasi recurrent", special="a loop that writes into a table in place, written as a chain",
        module=lambda: nn.Sequential(
            nn.Embedding(WORDS, 8), QuasiRecurrent(8, 12), QuasiRecurrent(12, 12), nn.Linear(12, WORDS)
        ),
        batch=lambda size: (words(size), words(size)), loss=next_words, rounded=SENT,
    ),
    Model(
        name="echo", special="a frozen recurrent layer, Rprop",
        module=Echo, batch=lambda size: (torch.randn(size, 10, 3), torch.randn(size, 10, 2)), loss=F.mse_loss,
        optimizer=torch.optim.Rprop,
    ),
    Model(
        name="pondering", special="a cell run three times on the same input, state None at the start",
        module=Pondering, batch=lambda size: (torch.randn(size, 6), torch.randint(3, (size,))), loss=F.cross_entropy,
        rounded=TIED, above=SHARED,
    ),
)  # fmt: skip
