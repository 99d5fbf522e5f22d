"""Networks of Fourier layers: products of complex numbers, whose conjugates kernels copy in the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from support.gallery_samples import sampled
from support.known_profiles import profile
from support.random_layer_chains import Whole
from support.small_tasks import plan_of
from support.step_peaks import step_peaks

WIDTH, MODES, SIDE = 6, 4, 16


class OnALine(nn.Module):
    """Lowest frequencies of a line, mixed by `einsum` over channels (Li et al., "Fourier Neural Operator")."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, MODES, dtype=torch.complex64) / WIDTH)
        self.beside = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = torch.fft.rfft(x)
        low = torch.zeros_like(high)
        low[..., :MODES] = torch.einsum("bix,iox->box", high[..., :MODES], self.weight)
        return F.gelu(torch.fft.irfft(low, n=SIDE) + self.beside(x))


class Mixed(nn.Module):
    """All frequencies of a line, with channels mixed by a complex linear layer, as in AFNO."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = F.linear(torch.fft.fft(x.transpose(1, 2), dim=1, norm="ortho"), self.weight, self.bias)
        return x + torch.fft.ifft(spectrum, dim=1, norm="ortho").real.transpose(1, 2)


class Filtered(nn.Module):
    """Products of frequencies and an equally long filter's, as in GFNet and Hyena, and the remaining power."""

    def __init__(self) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.randn(WIDTH, SIDE))

    def forward(self, x: Tensor) -> Tensor:
        ours, theirs = torch.fft.rfft(x, n=2 * SIDE), torch.fft.rfft(self.taps, n=2 * SIDE)
        power = (ours * ours.conj()).real.mean(-1, keepdim=True)
        return torch.fft.irfft(ours * theirs, n=2 * SIDE)[..., :SIDE] / (1 + power)


def task(layers: Sequence[Callable[[], nn.Module]], *, traced: bool) -> Task:
    """Return a task of such layers: one traced module, or a chain."""

    def build() -> nn.Module:
        parts = [nn.Conv1d(WIDTH, WIDTH, 1), *(make() for make in layers), nn.Conv1d(WIDTH, WIDTH, 1)]
        return Whole(parts) if traced else nn.Sequential(*parts)

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, WIDTH, SIDE), torch.randn(size, WIDTH, SIDE)

    return Task(
        build, batch=batch, loss=F.mse_loss, optimizer=partial(torch.optim.Adam, lr=1e-3), name="fourier"
    )


CASES = [
    (layers, traced)
    for layers in ((OnALine, OnALine), (Mixed, Mixed), (Filtered, Mixed))
    for traced in (False, True)
]


@pytest.mark.sample(1)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("layers", "traced"), sampled(CASES, often=[CASES[0], CASES[3]]))
def test_peaks_are_those_of_the_allocator(layers: Sequence[Callable[[], nn.Module]], traced: bool) -> None:
    """Simulator, dry run, trainer and allocator events agree on the peaks."""
    made = task(layers, traced=traced)
    found = profile(made, microbatch_size=2, threads=1)
    count = len(found.layers)
    for split in ([count], [2, count - 2]):
        peaks = step_peaks(made, plan_of(made, split, size=2, microbatches=2, profiled=found))
        assert peaks.simulated == peaks.dry == peaks.metered == peaks.allocated
