"""Parameters with several users on one stage: the simulator is never too low."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.lowering.passes.recomputation import Recompute
from support.gallery_samples import sampled
from support.known_profiles import profile
from support.small_tasks import plan_of, task_of
from support.step_peaks import step_peaks

WIDTH = 64


class Two(nn.Module):
    """A layer with a product with its own weight, and one with a weight that other layers use too."""

    def __init__(self, shared: nn.Parameter, *, shared_first: bool = False) -> None:
        super().__init__()
        self.own, self.shared, self.shared_first = nn.Linear(WIDTH, WIDTH, bias=False), shared, shared_first

    def forward(self, x: Tensor) -> Tensor:
        if self.shared_first:
            return self.own(torch.tanh(F.linear(x, self.shared)))
        return F.linear(torch.tanh(self.own(x)), self.shared)


class Idle(nn.Linear):
    """A layer that has another layer's weight and does not use it."""

    def __init__(self, unused: nn.Parameter) -> None:
        super().__init__(WIDTH, WIDTH)
        self.unused = unused


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False)


def ends() -> list[nn.Module]:
    first, last = linear(), linear()
    last.weight = first.weight
    return [first, nn.Tanh(), last]


def thrice() -> list[nn.Module]:
    first = linear()
    return [first, Two(first.weight), nn.Tanh(), Two(first.weight, shared_first=True)]


def late(*, shared_first: bool) -> list[nn.Module]:
    first = linear()
    return [first, linear(), Two(first.weight, shared_first=shared_first)]


def early(*, shared_first: bool) -> list[nn.Module]:
    last = linear()
    return [Two(last.weight, shared_first=shared_first), linear(), last]


def idle() -> list[nn.Module]:
    first = linear()
    return [first, nn.Tanh(), Idle(first.weight)]


def idle_first() -> list[nn.Module]:
    last = linear()
    return [Idle(last.weight), nn.Tanh(), last]


CHAINS: dict[str, Callable[[], list[nn.Module]]] = {
    "both ends": ends,
    "three users": thrice,
    "last user, shared last": partial(late, shared_first=False),
    "last user, shared first": partial(late, shared_first=True),
    "first user, shared last": partial(early, shared_first=False),
    "first user, shared first": partial(early, shared_first=True),
    "an idle user": idle,
    "an idle user first": idle_first,
}


RECOMPUTED = [(name, recompute) for name in CHAINS for recompute in ("never", "always")]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "recompute"), sampled(RECOMPUTED, often=(*RECOMPUTED[::4], *RECOMPUTED[3::4]))
)
def test_peaks_with_several_users_on_a_stage_are_never_too_low(name: str, recompute: Recompute) -> None:
    """The dry run is exact, and the simulator at least as high in every step; with few rows gradients make
    the peak, with many activations.
    """
    for optimizer, size in ((torch.optim.SGD, 16), (torch.optim.SGD, 32), (torch.optim.Adam, 128)):
        task = task_of(CHAINS[name], inputs=WIDTH, outputs=WIDTH, optimizer=partial(optimizer, lr=0.1))
        profiled = profile(task, microbatch_size=size, threads=1)
        found = step_peaks(
            task, plan_of(task, [len(profiled.layers)], size=size, recompute=recompute, profiled=profiled)
        )
        assert found.dry == found.metered == found.allocated
        assert all(told >= seen for told, seen in zip(found.simulated[0], found.allocated[0], strict=True)), (
            size
        )
