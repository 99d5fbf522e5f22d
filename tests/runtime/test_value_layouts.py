"""Values between layers with unusual layouts: transposed, sliced, expanded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from support.known_profiles import profile
from support.small_tasks import alone, batch_of, plan_of, task_of, trainer_of
from support.step_peaks import step_peaks, too_low

ROWS, WIDTH, SIZE = 6, 16, 4


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def normalised(x: Tensor) -> Tensor:
    """Build a batch norm: the CPU kernel returns contiguous values, unlike torch's rule for fake tensors."""
    return F.batch_norm(x, None, None, training=True)


def convolved(x: Tensor) -> Tensor:
    """Build a convolution, whose kernel needs other memory if strides are channels-last."""
    return F.conv2d(x, x.new_ones(8, 1, 3, 3), padding=1)


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "transposed": (lambda x: x.transpose(1, 2), lambda x: x.transpose(1, 2).contiguous().tanh()),
    "transposed and kept so": (lambda x: x.transpose(1, 2), lambda x: x.exp().transpose(1, 2)),
    "every other row": (lambda x: x[:, ::2], lambda x: x.contiguous().repeat(1, 2, 1)),
    "a slice": (lambda x: x[:, :, 4:], lambda x: torch.cat([x.tanh(), x[:, :, :4].sin()], 2)),
    "expanded": (lambda x: x[:, :1].expand(x.shape), lambda x: x.cos()),
    "one channel, last in memory": (
        lambda x: x.unsqueeze(-1).permute(0, 3, 1, 2),
        lambda x: convolved(x).mean(1),
    ),
    "made contiguous by a kernel": (
        lambda x: normalised(x.transpose(1, 2)),
        lambda x: x.transpose(1, 2).contiguous(),
    ),
}


def task_with(name: str) -> Task:
    """Return a task with a value of that layout between its second and third layer."""
    return task_of_layers(*LAYOUTS[name])


def task_of_layers(before: Callable[[Tensor], Tensor], behind: Callable[[Tensor], Tensor]) -> Task:
    """Return a task with these two layers between two linear layers."""
    ends = [nn.Linear(WIDTH, WIDTH), Apply(before), Apply(behind), nn.Linear(WIDTH, WIDTH)]
    batches = replace(
        task_of(list),
        batch=lambda size: (torch.randn(size, ROWS, WIDTH), torch.randn(size, ROWS, WIDTH)),
    )
    return replace(batches, module=nn.Sequential(*ends))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_peaks_are_exact_wherever_a_stage_ends(name: str) -> None:
    """Peaks are exact in one stage and with such a value, or its gradient, sent: simulator, dry run and meter
    equal the allocator.
    """
    found = profile(task_with(name), microbatch_size=SIZE, threads=torch.get_num_threads())
    for split in ([4], [2, 2], [1, 3]):
        peaks = step_peaks(task_with(name), plan_of(task_with(name), split, size=SIZE, profiled=found))
        assert peaks.dry == peaks.metered == peaks.allocated, split
        assert peaks.simulated == peaks.allocated, split


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("split", [[4], [2, 2]])
def test_numbers_are_plain_trainings(name: str, split: list[int]) -> None:
    """Loss and weights after a step equal plain training, up to the order in which a kernel sums."""
    torch.manual_seed(0)
    task = task_with(name)
    trainer = trainer_of(task, split, size=SIZE)
    loss = trainer.step(batch_of(task, trainer.plan))
    torch.manual_seed(0)
    (expected,), state = alone(task_with(name), trainer.plan)
    found = trainer.state_dict()
    torch.testing.assert_close(loss, expected)
    assert all(torch.allclose(found[key], tensor, atol=1e-6) for key, tensor in state.items())


def test_a_layer_may_view_what_a_kernel_made_contiguous() -> None:
    """A view of a contiguous kernel result, which torch's rule for fake tensors would not allow, is
    supported, and no peak exceeds the simulator's.
    """
    task = task_of_layers(lambda x: x.transpose(1, 2), lambda x: normalised(x).view(-1, ROWS, WIDTH))
    found = profile(task, microbatch_size=SIZE, threads=torch.get_num_threads())
    assert not too_low(task, plan_of(task, [2, 2], size=SIZE, profiled=found))
