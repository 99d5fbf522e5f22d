"""Which layers compute with a buffer that they update, and that these are not recomputed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from pipefit.capture import Task
from pipefit.capture.model import chain
from pipefit.cluster import Cluster
from pipefit.errors import UsageError
from pipefit.planner import plan
from pipefit.profiler import profile


class Average(nn.Module):
    """Subtracts a moving average of what it has seen."""

    def __init__(self, *, replaces: bool = False, reads: bool = True) -> None:
        super().__init__()
        self.linear, self.replaces, self.reads = nn.Linear(4, 4), replaces, reads
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        mean = x.detach().mean(0)
        if self.replaces:
            self.average = 0.9 * self.average + 0.1 * mean
        else:
            self.average.lerp_(mean, 0.1)
        return x - self.average if self.reads else x


class Constant(nn.Module):
    """Adds a buffer that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.shift


class Wrapped(nn.Module):
    """A model that is traced, with one part in the middle."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(4, 4), part, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(self.first(x)))


NO_TRACE = ("batch norm, cumulative",)  # reads a tensor's value into Python
PARTS = {
    "average": (Average, True),
    "replaced average": (lambda: Average(replaces=True), True),
    "average for later": (lambda: Average(reads=False), False),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 4)), True),
    "batch norm": (lambda: nn.BatchNorm1d(4), False),
    "batch norm, cumulative": (lambda: nn.BatchNorm1d(4, momentum=None), False),
    "batch norm, frozen": (lambda: nn.BatchNorm1d(4).eval(), False),
    "constant": (Constant, False),
    "none": (lambda: nn.Linear(4, 4), False),
}


CASES = [(name, by_hand) for name in PARTS for by_hand in (False, True) if by_hand or name not in NO_TRACE]


@pytest.mark.parametrize(("name", "by_hand"), CASES)
def test_which_layers_feed_back(name: str, by_hand: bool) -> None:
    """Those whose outputs depend on a buffer that changes, traced or not; only they cannot be recomputed."""
    build, expected = PARTS[name]
    part = build()
    module = chain([nn.Linear(4, 4), part, nn.Linear(4, 4)]) if by_hand else Wrapped(part)
    task = Task(module, batch=lambda n: (torch.randn(n, 4), torch.randn(n, 4)), loss=F.mse_loss)
    found = profile(task, microbatch_size=3)
    assert [cost.feeds_back for cost in found.measurements[0].costs] == [
        expected and number == 1 for number in range(len(found.layers))
    ]
    plan(found, Cluster.emulated((2, 1 << 30)), batch_size=6, recompute="never")
    if expected:
        with pytest.raises(UsageError, match=r"cannot recompute layer 1 \(.*\), which computes with a buffer"):
            plan(found, Cluster.emulated((2, 1 << 30)), batch_size=6, recompute="always")
    else:
        plan(found, Cluster.emulated((2, 1 << 30)), batch_size=6, recompute="always")
