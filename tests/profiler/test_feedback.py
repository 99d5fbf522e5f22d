"""Buffers of a layer that feed back, and layers that cannot be recomputed for another reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.planner import plan
from pipefit.profiler import profile
from pipefit.schema.cluster import Cluster
from pipefit.schema.profile import ModelProfile
from support.buffer_feedback import FEEDING_BACK, WIDTH, Average, task_with


class Constant(nn.Module):
    """A layer that adds a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.shift


NO_TRACE = ("batch norm, cumulative",)  # reads a tensor's value into Python
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "average for later": lambda: Average(reads=False),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "batch norm, cumulative": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "batch norm, frozen": lambda: nn.BatchNorm1d(WIDTH).eval(),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    ),
    "constant": Constant,
    "none": lambda: nn.Linear(WIDTH, WIDTH),
}


def fed_back(found: ModelProfile) -> list[str]:
    """Return the names of all buffers that feed back, without the prefixes of a traced model."""
    names = [name for cost in found.measurements[0].costs for name in cost.fed_back]
    return [name.removeprefix("part.") for name in names]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("name", "by_hand"), [(n, way) for n, (_, _, ways) in FEEDING_BACK.items() for way in ways]
)
def test_buffers_that_feed_back(name: str, by_hand: bool) -> None:
    """A buffer feeds back if a forward changes it in any way and its outputs or gradients depend on it."""
    build, expected, _ = FEEDING_BACK[name]
    found = profile(task_with(build, by_hand=by_hand), microbatch_size=3)
    storages = [buffer.untyped_storage() for path, buffer in build().named_buffers() if path in expected]
    local = fed_back(found)
    assert len(local) == len(expected)
    assert all(any(path.endswith(name) for path in expected) for name in local)
    assert sum(cost.fed_back_bytes for cost in found.measurements[0].costs) == sum(
        {storage._cdata: storage.nbytes() for storage in storages}.values()
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "by_hand"), [(n, way) for n in OTHERS for way in (False, True) if way or n not in NO_TRACE]
)
def test_buffers_that_do_not_feed_back(name: str, by_hand: bool) -> None:
    """Constants, and statistics unused in training, do not feed back; their layers can be recomputed."""
    found = profile(task_with(OTHERS[name], by_hand=by_hand), microbatch_size=3)
    assert fed_back(found) == []
    plan(found, Cluster.emulated((2, 1 << 30)), batch_size=6, recompute="always")


# -------------------------------------------------------------------- layers that cannot run twice


class Linear(nn.Linear):
    """The base class of the layers."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.prepare()

    def prepare(self) -> None:
        """Add the changed attribute."""


class Counting(Linear):
    """A layer that warms up over its first calls."""

    def prepare(self) -> None:
        """Set the initial state."""
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * min(1.0, self.calls / 10)


class Alternating(Linear):
    """A layer that changes sign with each call."""

    def prepare(self) -> None:
        """Set the initial state."""
        self.options = {"negative": False}

    def forward(self, x: Tensor) -> Tensor:
        self.options["negative"] = not self.options["negative"]
        return -super().forward(x) if self.options["negative"] else super().forward(x)


class Starting(Linear):
    """A layer with a different first call."""

    def prepare(self) -> None:
        """Set the initial state."""
        self._started = False

    def forward(self, x: Tensor) -> Tensor:
        factor, self._started = 1.0 if self._started else 0.5, True
        return super().forward(x) * factor


class Watching(Linear):
    """A layer that counts in a separate object."""

    def prepare(self) -> None:
        """Set the initial state."""
        self.helper: Any = type("Helper", (), {})()
        self.helper.seen = []

    def forward(self, x: Tensor) -> Tensor:
        self.helper.seen.append(len(x))
        return super().forward(x)


class Table(Linear):
    """A layer with an average outside its buffers."""

    def prepare(self) -> None:
        """Set the initial state."""
        self.table = [torch.zeros(WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.table[0].lerp_(x.detach().mean(0), 0.1)
        return x - self.table[0]


class Clipped(Linear):
    """A layer that clips its weight before use."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.3, 0.3)
        return super().forward(x)


class Noisy(Linear):
    """A layer that draws from a generator other than torch's default."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(x.shape, generator=GENERATOR)


GENERATOR = torch.Generator()


UNREPEATABLE = {
    Counting: "changes 'calls', which is not a buffer",
    Alternating: "changes 'options', which is not a buffer",
    Starting: "changes '_started', which is not a buffer",
    Watching: "changes 'helper', which is not a buffer",
    Table: "changes 'table', which is not a buffer",
    Clipped: "changes 'weight', which is not a buffer",
    Noisy: "draws from a private generator",
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("build", UNREPEATABLE)
def test_what_no_copy_helps_against_is_refused(build: type[nn.Module]) -> None:
    """A layer with a second forward that may differ because of state outside its buffers is planned without
    recomputation; the error names it.
    """
    found = profile(task_with(build, by_hand=True), microbatch_size=3)
    plan(found, Cluster.emulated((2, 1 << 30)), batch_size=6, recompute="never")
    with pytest.raises(UsageError, match=rf"cannot recompute layer 2 \(2\), which {UNREPEATABLE[build]}"):
        plan(found, Cluster.emulated((2, 1 << 30)), batch_size=6, recompute="always")


class Late(nn.Module):
    """A layer whose first forward creates an average."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", None)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        self.average = mean if self.average is None else self.average * 0.9 + mean * 0.1
        return x - self.average


class Growing(Late):
    """A layer with a growing buffer of all inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.average = torch.cat([self.average, x.detach().mean(0, keepdim=True)])
        return x - self.average.mean(0)


@pytest.mark.parametrize("build", [Late, Growing])
def test_a_buffer_that_changes_its_size_is_refused(build: type[nn.Module]) -> None:
    """A buffer that changes its size has unknown cost; the error names it and the remedy."""
    with pytest.raises(
        UsageError, match=r"changes the shape or dtype of the buffer 'average'.*register it with a tensor"
    ):
        profile(task_with(build, by_hand=True), microbatch_size=3)


class Annealed(nn.Module):
    """A loss that grows with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(output, target) * self.calls

    def method(self, output: Tensor, target: Tensor) -> Tensor:
        """Compute the loss in a method."""
        return self(output, target)


@pytest.mark.parametrize("way", ["module", "method"])
def test_a_loss_that_counts_is_refused_too(way: str) -> None:
    """The loss runs again with the last layer, so a loss with state is refused too, also in a method's
    object.
    """
    loss = Annealed()
    task = Task(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        batch=lambda n: (torch.randn(n, 4), torch.randn(n, 4)),
        loss=loss if way == "module" else loss.method,
    )
    found = profile(task, microbatch_size=3)
    with pytest.raises(
        UsageError, match="cannot recompute the loss, which changes 'calls', which is not a buffer"
    ):
        plan(found, Cluster.emulated((2, 1 << 30)), batch_size=6, recompute="always")
