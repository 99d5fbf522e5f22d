"""The measured profiler: seconds on a real device, with unchanged bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gallery
from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.models import build
from pipefit.profiler import profile
from pipefit.schema.layer_costs import LayerCost
from pipefit.schema.profile import ModelProfile


class Placed(nn.Linear):
    """A layer that notes each move to a device."""

    places: ClassVar[list[int]] = []

    def __init__(self, number: int) -> None:
        super().__init__(4, 4)
        self.number = number

    def to(self, *args: Any, **kwargs: Any) -> Placed:
        self.places.append(self.number)
        return super().to(*args, **kwargs)


def test_the_device_holds_one_layer_at_a_time() -> None:
    """Each layer goes to the device and returns to the host before the next one."""
    task = Task(
        lambda: nn.Sequential(*map(Placed, range(3))),
        batch=lambda size: (torch.randn(size, 4), torch.randn(size, 4)),
        loss=F.mse_loss,
    )
    Placed.places.clear()
    profile(task, microbatch_size=2, device="cpu")
    assert Placed.places == [0, 0, 1, 1, 2, 2]


def without_seconds(found: ModelProfile) -> ModelProfile:
    """Return the profile without its seconds."""

    def bare(cost: LayerCost) -> LayerCost:
        works = {
            name: replace(getattr(cost, name), seconds=None) for name in ("forward", "backward", "update")
        }
        return replace(cost, **works)

    measurements = tuple(
        replace(m, kinds=tuple(map(bare, m.kinds)), loss=bare(m.loss)) for m in found.measurements
    )
    return replace(found, measurements=measurements, assumptions=replace(found.assumptions, device="fake"))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "task",
    [
        build("mlp", widths=(64, 32), dropout=0.1),
        build("vgg11", width=3, image_size=32, num_classes=10),
        build("bert", layers=1, hidden=32, heads=4, vocabulary=64, sequence=16),
        gallery.task("strided"),
        gallery.task("skips"),
    ],
    ids=lambda task: task.name,
)
def test_seconds_are_added_and_nothing_else_changes(task: Task) -> None:
    """Every kind of layer and the loss get positive seconds for each pass; all bytes are the
    fake profile's.
    """
    found = profile(task, microbatch_size=2, device="cpu")
    (measurement,) = found.measurements
    for cost in (*measurement.kinds, measurement.loss):
        assert all(work.seconds is not None for work in (cost.forward, cost.backward, cost.update))
        assert cost.forward.seconds > 0  # type: ignore[operator]
        assert cost.backward.seconds >= 0  # type: ignore[operator]
        assert bool(cost.update.seconds > 1e-6) >= bool(cost.gradient_bytes)  # type: ignore[operator]
    assert found.assumptions.device == "cpu"
    assert without_seconds(found) == profile(task, microbatch_size=2)


def test_a_larger_layer_takes_longer() -> None:
    """A product of a thousand times the work takes longer, forward and backward."""
    layers = nn.Sequential(nn.Linear(16, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 16), nn.Linear(16, 16))
    task = Task(layers, batch=lambda size: (torch.randn(size, 16), torch.randn(size, 16)), loss=F.mse_loss)
    costs = profile(task, microbatch_size=64, device="cpu").measurements[0].costs
    for large, small in ((costs[1].forward, costs[3].forward), (costs[1].backward, costs[3].backward)):
        assert large.flops == 4096 * small.flops
        assert large.seconds > small.seconds  # type: ignore[operator]


def test_a_measured_module_is_left_alone() -> None:
    """Measuring a user's module leaves parameters, statistics, gradients, mode and threads unchanged."""
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    task = Task(
        module,
        batch=lambda size: (torch.randn(size, 8), torch.randn(size, 4)),
        loss=F.mse_loss,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.5, momentum=0.9, weight_decay=0.1),
    )
    threads = torch.get_num_threads()
    profile(task, microbatch_size=4, device="cpu", threads=1 + threads % 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not any(part.training for part in module.modules())
    assert torch.get_num_threads() == threads


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_measuring_on_a_missing_gpu_is_refused() -> None:
    """Measuring on a missing GPU is refused with an alternative."""
    with pytest.raises(UsageError, match=r"does not have a CUDA device .* --device fake"):
        profile(build("mlp", widths=(8,)), microbatch_size=1, device="cuda")
