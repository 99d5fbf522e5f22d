"""Models of sound."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gallery.model import ADAM, SENT, Model


class Conformer(nn.Module):
    """Half a feed-forward, attention, gated convolutions over time, another half (Gulati et al., 2020)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.before, self.after = (
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 32), nn.SiLU(), nn.Dropout(0.1), nn.Linear(32, width)
            )
            for _ in range(2)
        )
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.gate, self.out = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.depthwise = nn.Conv1d(width, width, 5, padding=2, groups=width)
        self.batch_norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.before(x)
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        h = self.depthwise(F.glu(self.gate(self.norm2(x).mT), 1))
        x = x + self.out(F.silu(self.batch_norm(h))).mT
        return self.norm3(x + 0.5 * self.after(x))


def conformer() -> nn.Module:
    """Build a chain of conformer blocks over frames of sound."""
    return nn.Sequential(nn.Linear(8, 16), *(Conformer() for _ in range(3)), nn.Linear(16, 12))


class Listener(nn.Module):
    """Two convolutions that shorten, a bidirectional GRU (Amodei et al., 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 4, 3, 2, 1),
            nn.BatchNorm2d(4),
            nn.Hardtanh(0, 20, inplace=True),
            nn.Conv2d(4, 4, 3, (1, 2), 1),
        )
        self.gru = nn.GRU(8, 10, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.head = nn.Linear(20, 7)

    def forward(self, sound: Tensor) -> Tensor:
        x = self.conv(sound.unsqueeze(1)).transpose(1, 2).flatten(2)
        return self.head(self.gru(x)[0]).log_softmax(-1).transpose(0, 1)


class Waves(nn.Module):
    """Convolutions over raw sound; hidden frames are found among others by similarity (Baevski
    et al., 2020).
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv1d(1, 12, 10, 5, bias=False), nn.GroupNorm(12, 12)
        self.conv2, self.place = nn.Conv1d(12, 12, 3, 2), nn.Conv1d(12, 12, 4, padding=2, groups=3)
        self.hidden = nn.Parameter(torch.rand(12))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(12, 2, 24, 0.0, batch_first=True) for _ in range(2)
        )
        self.guess, self.truth = nn.Linear(12, 8), nn.Linear(12, 8)

    def forward(self, sound: Tensor, hidden: Tensor, others: Tensor) -> Tensor:
        frames = F.gelu(self.conv2(F.gelu(self.norm(self.conv1(sound.unsqueeze(1)))))).mT
        x = torch.where(hidden[..., None], self.hidden, frames)
        x = x + F.gelu(self.place(x.mT)[..., :-1]).mT
        for layer in self.layers:
            x = layer(x)
        guess, truth = self.guess(x), self.truth(frames)
        index = others.flatten(1)[..., None].expand(-1, -1, truth.shape[-1])
        wrong = truth.gather(1, index).view(*others.shape, -1)
        choices = torch.cat([truth[:, :, None], wrong], 2)
        scores = F.cosine_similarity(guess[:, :, None], choices, dim=-1) / 0.1
        losses = -scores.log_softmax(-1)[..., 0]
        return (losses * hidden).sum() / hidden.sum()


def raw_sound(size: int) -> tuple[tuple[Tensor, Tensor, Tensor], None]:
    """Draw sound of eleven frames, some hidden, with three distractors for each."""
    hidden = torch.rand(size, 11) < 0.4
    hidden[:, 0] = True
    return (torch.randn(size, 120), hidden, torch.randint(11, (size, 11, 3))), None


class Statistics(nn.Module):
    """The mean and the deviation over time."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x.mean(2), x.std(2)], 1)


def speaker() -> nn.Module:
    """Build dilated convolutions and statistics over time (Snyder et al., 2018)."""
    parts = []
    for inward, outward, width, dilation in ((8, 16, 5, 1), (16, 16, 3, 2), (16, 16, 3, 3)):
        parts += [
            nn.Conv1d(inward, outward, width, dilation=dilation),
            nn.ReLU(),
            nn.BatchNorm1d(outward, affine=False),
        ]
    return nn.Sequential(*parts, Statistics(), nn.Linear(32, 12), nn.BatchNorm1d(12), Margin(12, 6))


class Margin(nn.Module):
    """Cosines between directions."""

    def __init__(self, width: int, speakers: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(speakers, width))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(x), F.normalize(self.weight))


def additive_margin(cosines: Tensor, targets: Tensor) -> Tensor:
    """Compute a loss that wants the right speaker nearer than the others by a margin (Wang et al., 2018)."""
    margin = torch.zeros_like(cosines).scatter_(1, targets[:, None], 0.2)
    return F.cross_entropy(10 * (cosines - margin), targets)


class GatedDilated(nn.Module):
    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.conv, self.aside = nn.Conv1d(8, 16, 2, dilation=dilation), nn.Conv1d(4, 16, 1, bias=False)
        self.stay, self.skip = nn.Conv1d(8, 8, 1), nn.Conv1d(8, 8, 1)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        both = self.conv(F.pad(x, (self.dilation, 0))) + self.aside(condition)
        inner = both[:, :8].tanh() * both[:, 8:].sigmoid()
        return x + self.stay(inner), self.skip(inner)


class WaveNet(nn.Module):
    """Layers whose results all reach the end (van den Oord et al., 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Conv1d(1, 8, 1), nn.ModuleList(GatedDilated(2**n) for n in range(5))
        self.last = nn.Sequential(
            nn.ReLU(inplace=True), nn.Conv1d(8, 8, 1), nn.ReLU(inplace=True), nn.Conv1d(8, 6, 1)
        )

    def forward(self, sound: Tensor, condition: Tensor) -> Tensor:
        x, total = self.first(sound), None
        for layer in self.layers:
            x, skip = layer(x, condition)
            total = skip if total is None else total + skip
        return self.last(total)


class Upsampling(nn.Module):
    """A transposed convolution, then the mean of branches of other dilations (Kong et al., 2020)."""

    def __init__(self, inward: int, outward: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(inward, outward, 4, 2, 1)
        self.branches = nn.ModuleList(
            nn.Conv1d(outward, outward, 3, dilation=d, padding=d) for d in (1, 2, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.up(x), 0.1, inplace=True)
        return sum(x + branch(F.leaky_relu(x, 0.1)) for branch in self.branches) / 3


class Vocoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(6, 12, 7, padding=3), nn.Conv1d(6, 1, 7, padding=3)
        self.ups = nn.ModuleList([Upsampling(12, 8), Upsampling(8, 6)])

    def forward(self, frames: Tensor) -> Tensor:
        x = self.first(frames)
        for up in self.ups:
            x = up(x)
        return self.last(x).tanh().squeeze(1)


def spectral(ours: Tensor, theirs: Tensor) -> Tensor:
    """Compute distances of the sound and of its spectrum's magnitudes."""
    pair = [torch.fft.rfft(sound.unfold(1, 8, 4)).abs() for sound in (ours, theirs)]
    return F.l1_loss(*pair) + F.mse_loss(ours, theirs)


def keywords() -> nn.Module:
    """Build depthwise separable convolutions (Zhang et al., 2017)."""
    parts = [
        nn.Unflatten(1, (1, -1)),
        nn.Conv2d(1, 8, (5, 3), 2, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
    ]
    for _ in range(2):
        parts += [
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 1),
        ]
    return nn.Sequential(*parts, nn.Dropout2d(0.2), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(8, 5))


SPEECH = (
    Model(
        name="conformer", special="attention and gated depthwise convolutions by turns, dropout, batch norm over time",
        module=conformer, batch=lambda size: (torch.randn(size, 9, 8), torch.randint(12, (size, 9))),
        loss=lambda outputs, targets: F.cross_entropy(outputs.mT, targets), optimizer=ADAM,
    ),
    Model(
        name="listener", special="a bidirectional GRU of two layers with dropout between, time first in the output",
        module=Listener, batch=lambda size: (torch.randn(size, 20, 8), torch.randint(7, (size, 10))),
        loss=lambda outputs, targets: F.nll_loss(outputs.flatten(0, 1), targets.t().flatten()),
    ),
    Model(
        name="waves", special="raw sound, grouped convolutions, a contrastive loss that gathers wrong frames",
        module=Waves, batch=raw_sound, loss=None, rounded=SENT,
    ),
    Model(
        name="speaker", special="dilated convolutions, deviations over time, a margin on cosines",
        module=speaker, batch=lambda size: (torch.randn(size, 8, 24), torch.randint(6, (size,))),
        loss=additive_margin, size=3,
    ),
    Model(
        name="wavenet", special="every layer has a way to the end, a condition goes to every layer",
        module=WaveNet,
        batch=lambda size: ((torch.randn(size, 1, 20), torch.randn(size, 4, 20)), torch.randint(6, (size, 20))),
        loss=F.cross_entropy,
    ),
    Model(
        name="vocoder", special="transposed convolutions, sums of branches, a loss on a Fourier spectrum",
        module=Vocoder, batch=lambda size: (torch.randn(size, 6, 8), torch.rand(size, 32)), loss=spectral,
        optimizer=ADAM,
    ),
    Model(
        name="keywords", special="depthwise separable convolutions written as a chain, whole channels dropped",
        module=keywords, batch=lambda size: (torch.randn(size, 20, 10), torch.randint(5, (size,))),
        loss=F.cross_entropy,
    ),
)  # fmt: skip
