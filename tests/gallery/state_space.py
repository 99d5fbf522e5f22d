"""Models with a state along the sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gallery.model import ADAM, Model

WORDS, LENGTH, WIDTH, STATE = 30, 10, 12, 4


class SelectiveScan(nn.Module):
    """Input-dependent memory; a plain loop over time (Gu and Dao, 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inward = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.choose, self.step = nn.Linear(WIDTH, 2 * STATE + 2, bias=False), nn.Linear(2, WIDTH)
        self.decay = nn.Parameter(torch.arange(1.0, STATE + 1).log().repeat(WIDTH, 1))
        self.direct, self.out = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = self.inward(self.norm(x)).chunk(2, -1)
        inner = F.silu(self.conv(inner.mT)[..., : x.shape[1]].mT)
        write, read, step = self.choose(inner).split([STATE, STATE, 2], -1)
        step = F.softplus(self.step(step)).unsqueeze(-1)
        keep, add = torch.exp(-step * self.decay.exp()), step * write.unsqueeze(2) * inner.unsqueeze(-1)
        state, found = torch.zeros_like(add[:, 0]), []
        for time in range(x.shape[1]):
            state = keep[:, time] * state + add[:, time]
            found.append((state * read[:, time, None]).sum(-1))
        return x + self.out((torch.stack(found, 1) + self.direct * inner) * F.silu(gate))


class Diagonal(nn.Module):
    """A sequence-long kernel of decaying exponentials, applied by Fourier transforms (Gu et al., 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.turn = (
            nn.Parameter(torch.rand(WIDTH, STATE)),
            nn.Parameter(torch.randn(WIDTH, STATE)),
        )
        self.weight, self.direct = nn.Parameter(torch.randn(WIDTH, STATE)), nn.Parameter(torch.randn(WIDTH))
        self.mix, self.norm, self.drop = nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        length, inner = x.shape[1], self.norm(x).mT
        time = torch.arange(length, device=x.device)
        waves = torch.exp(-self.decay.exp()[..., None] * time) * torch.cos(self.turn[..., None] * time)
        kernel = (self.weight[..., None] * waves).sum(1)
        found = torch.fft.irfft(
            torch.fft.rfft(inner, 2 * length) * torch.fft.rfft(kernel, 2 * length), 2 * length
        )
        found = F.gelu(found[..., :length] + self.direct[:, None] * inner).mT
        return x + self.drop(F.glu(self.mix(found), -1))


class TimeMix(nn.Module):
    """A weighted mean over the past with a separate decay in each channel (Peng et al., 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixes = nn.ParameterList(torch.rand(WIDTH) for _ in range(3))
        self.linears = nn.ModuleDict(
            {name: nn.Linear(WIDTH, WIDTH, bias=False) for name in ("k", "v", "r", "o")}
        )
        self.decay, self.bonus = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        before = F.pad(h, (0, 0, 1, -1))
        k, v, r = (
            self.linears[name](torch.lerp(before, h, mix))
            for name, mix in zip("kvr", self.mixes, strict=True)
        )
        keep, above, below, found = (
            torch.exp(-self.decay.exp()),
            torch.zeros_like(k[:, 0]),
            torch.zeros_like(k[:, 0]),
            [],
        )
        for time in range(x.shape[1]):
            now = k[:, time].clamp(max=20)
            own = (self.bonus + now).exp()
            found.append((above + own * v[:, time]) / (below + own))
            above, below = keep * above + now.exp() * v[:, time], keep * below + now.exp()
        return x + self.linears["o"](torch.stack(found, 1) * r.sigmoid())


class Retention(nn.Module):
    """Products with the past, weighted by a power of the distance; heads normed apart (Sun et al., 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate, self.out = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.norm, self.heads = nn.LayerNorm(WIDTH), nn.GroupNorm(2, WIDTH)
        self.register_buffer("powers", torch.tensor([0.9, 0.7]).log())

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = self.qkv(h).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        time = torch.arange(x.shape[1], device=x.device)
        away = (time[:, None] - time).float()
        decay = torch.exp(away * self.powers[:, None, None]).masked_fill(away < 0, 0.0)
        found = ((q @ k.mT) * decay @ v).transpose(1, 2).flatten(2)
        found = self.heads(found.flatten(0, 1)).view_as(x)
        return x + self.out(F.silu(self.gate(h)) * found)


class LongConvolution(nn.Module):
    """Long convolutions with kernels from a small network, and gates (Poli et al., 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.out, self.norm = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        )
        self.short = nn.Conv1d(3 * WIDTH, 3 * WIDTH, 3, padding=2, groups=3 * WIDTH)
        self.kernel = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        time = torch.linspace(0, 1, LENGTH)[:, None]
        self.register_buffer("time", torch.cat([time, torch.sin(6 * time), torch.cos(6 * time)], 1))

    def forward(self, x: Tensor) -> Tensor:
        a, b, v = self.short(self.inward(self.norm(x)).mT)[..., :LENGTH].chunk(3, 1)
        kernel = (self.kernel(self.time) * torch.exp(-3 * self.time[:, :1])).mT
        mixed = F.conv1d(F.pad(a * v, (LENGTH - 1, 0)), kernel.flip(-1).unsqueeze(1), groups=WIDTH)
        return x + self.out((b * mixed).mT)


class Words(nn.Module):
    """Words in and out around such layers."""

    def __init__(self, layer: type[nn.Module], count: int = 3) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(layer() for _ in range(count))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def words(size: int) -> tuple[Tensor, Tensor]:
    """Draw words in and out."""
    return torch.randint(WORDS, (size, LENGTH)), torch.randint(WORDS, (size, LENGTH))


def of(name: str, special: str, layer: type[nn.Module]) -> Model:
    """Build a model of such layers."""
    return Model(
        name=name,
        special=special,
        module=lambda: Words(layer),
        batch=words,
        loss=lambda outputs, targets: F.cross_entropy(outputs.mT, targets),
        optimizer=ADAM,
    )


STATE_SPACE = (
    of(
        "selective scan",
        "a loop over time inside every layer, whose steps depend on the input",
        SelectiveScan,
    ),
    of("diagonal", "kernels made of exponentials, Fourier transforms, complex numbers inside", Diagonal),
    of("time mix", "a list of parameters, two states in a loop over time", TimeMix),
    of("retention", "attention without softmax, decaying by powers that are buffers", Retention),
    of(
        "long convolution", "kernels made by a network of their own, as long as the sequence", LongConvolution
    ),
)
