"""Copies of a chain over fake tensors, as for replicas of a stage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipefit.capture import Chain, Task
from pipefit.capture.sample import sample
from pipefit.fake_cuda.chain import chain_again, fake_chain
from pipefit.fake_cuda.target import FakeTarget
from pipefit.schema.profile import Target
from support.saved_tensor_models import TARGETS


class Tied(nn.Module):
    """Two layers with one weight, a batch norm, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.scale = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.norm(self.first(x) * self.scale))
        return found


def by_hand() -> nn.Module:
    """Build an untraced model with a batch norm that counts its batches."""
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 4))


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return rows of four numbers."""
    return torch.randn(size, 4), torch.randn(size, 4)


def tensors(chain: Chain) -> list[tuple[str, object]]:
    """Return every tensor of a chain in order: its name and properties, and the first name of the same
    tensor.
    """
    named = [
        (f"{number}.{name}", tensor)
        for number, layer in enumerate(chain.layers)
        for name, tensor in (
            *layer.module.named_parameters(remove_duplicate=False),
            *layer.module.named_buffers(remove_duplicate=False),
        )
    ]
    first = {id(tensor): name for name, tensor in reversed(named)}
    return [
        (name, (type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad, first[id(t)]))
        for name, t in named
    ]


def numbers(chain: Chain) -> list[int]:
    """Return the number of batches seen by each batch norm of a chain, if known."""
    buffers = (buffer for layer in chain.layers for buffer in layer.module.buffers())
    return [int(one.constant) for one in buffers if getattr(one, "constant", None) is not None]


def storages(chain: Chain) -> set[int]:
    """Return the storages of a chain's tensors."""
    parts = [layer.module for layer in chain.layers]
    return {t.untyped_storage()._cdata for part in parts for t in (*part.parameters(), *part.buffers())}


@pytest.mark.sample(2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("build", [Tied, by_hand])
def test_a_copy_is_like_a_chain_that_is_made_again(target: Target, build: type[nn.Module]) -> None:
    """The copy has equal tensors, shared by the same layers, and the same known numbers; none is the
    original's.
    """
    task = Task(build, batch=batch, loss=nn.functional.mse_loss)
    with FakeTarget(target) as fake:
        given, other = (fake_chain(task, fake, sample(task, 2)) for _ in range(2))
        copy = chain_again(given, fake)
    assert tensors(copy) == tensors(other)
    assert numbers(copy) == numbers(other) == [0] * (build is by_hand)
    assert len(copy.shared) == len(other.shared) == (build is Tied)
    assert not storages(copy) & storages(given)
