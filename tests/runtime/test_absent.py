"""Gradients that depend on values: parameters without one stay as in plain training, wherever stages end."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.runtime import Trainer
from pipefit.runtime.comm.collectives import mark, received, to_send, unmark
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Sharding, Stage
from pipefit.schema.layer_costs import KernelMemory, Value
from pipefit.schema.plan import Plan
from pipefit.schema.training import Training
from pipefit.simulator import simulate
from support.known_profiles import profile
from support.local_batches import sliced_plan

WIDTH, SIZE, COUNT = 8, 2, 2
CPU = torch.device("cpu")
Targets = dict[str, Tensor]

pytestmark = [
    pytest.mark.filterwarnings("ignore:peaks do not include"),
    pytest.mark.usefixtures("one_thread"),
]


class Heads(nn.Module):
    """A trunk with two heads in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.near, self.far = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.first(x))
        near = self.near(x)
        return near, self.far(torch.tanh(self.second(x)))


def batch(size: int, choice: int = 1) -> tuple[Tensor, Targets]:
    """Return made-up data; all samples of a batch make the same choice."""
    return torch.randn(size, WIDTH), {"y": torch.randn(size, WIDTH), "choice": torch.full((size,), choice)}


def chosen(outputs: tuple[Tensor, Tensor], targets: Targets) -> Tensor:
    """Return the loss of one head."""
    return F.mse_loss(outputs[int(targets["choice"][0])], targets["y"])


def besides(outputs: tuple[Tensor, Tensor], targets: Targets) -> Tensor:
    """Return the loss of the last head, sometimes plus that of the other one."""
    loss = F.mse_loss(outputs[1], targets["y"])
    return loss + F.mse_loss(outputs[0], targets["y"]) if bool(targets["choice"].any()) else loss


def task_of(loss: Callable[..., Tensor], optimizer: Any = None) -> Task:
    """Return a task with an existing module."""
    torch.manual_seed(1)
    return Task(Heads(), batch=batch, loss=loss, optimizer=optimizer or MOMENTUM, name="heads")


def plan_of(task: Task, edges: tuple[int, ...]) -> Plan:
    """Return a plan with stages between these layers."""
    found = profile(task, microbatch_size=SIZE)
    ends = (0, *edges, len(found.layers))
    return Plan(
        profile=found,
        cluster=Cluster.emulated((4, 1 << 30)),
        training=Training(batch_size=SIZE * COUNT, microbatches=COUNT),
        stages=tuple(
            Stage(start=start, stop=stop, grid=Grid.of(n)) for n, (start, stop) in enumerate(pairwise(ends))
        ),
    )


MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01)


@pytest.mark.sample(1)
@pytest.mark.parametrize("edges", [(3,), (2, 4, 5)])
@pytest.mark.parametrize(("loss", "optimizer"), [(chosen, ADAMW), (besides, MOMENTUM)])
def test_parameters_without_a_gradient_stay_as_in_plain_training(
    loss: Callable[..., Tensor], optimizer: Any, edges: tuple[int, ...]
) -> None:
    """All parameters are bitwise plain training's after steps with different choices; no device exceeds its
    planned peak.
    """
    task = task_of(loss, optimizer)
    assert isinstance(task.module, nn.Module)
    plain, plan = copy.deepcopy(task.module), plan_of(task, edges)
    trainer, update = Trainer(task, plan), optimizer(plain.parameters())
    for choice in (1, 0, 0, 1):
        x, y = batch(SIZE * COUNT, choice)
        trainer.step((x, y))
        for part in range(0, len(x), SIZE):
            own = slice(part, part + SIZE)
            (loss(plain(x[own]), {name: value[own] for name, value in y.items()}) / COUNT).backward()
        update.step()
        update.zero_grad()
        found = trainer.state_dict()
        assert [
            name for name, value in plain.state_dict().items() if not torch.equal(found[name], value)
        ] == []
    told = simulate(plan, steps=4).peak_bytes
    assert all(one <= other for one, other in zip(trainer.trace.peak_bytes, told, strict=True))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("shard", "optimizer"), [("none", ADAMW), ("optimizer", ADAMW), ("parameters", MOMENTUM)]
)
def test_replicas_agree_that_a_parameter_has_no_gradient(shard: Sharding, optimizer: Any) -> None:
    """A head that no replica's samples chose keeps its weights; if some replicas chose it, the sum is plain
    training's.
    """
    task = task_of(chosen, optimizer)
    assert isinstance(task.module, nn.Module)
    plain, found = copy.deepcopy(task.module).double(), profile(task, microbatch_size=(SIZE, 1))
    trainer = Trainer(
        task, sliced_plan(found, [0, len(found.layers)], [2], microbatches=COUNT, shard=[shard])
    )
    update = optimizer(plain.parameters())
    for choices in ([1, 1], [0, 0], [0, 1], [1, 1], [0, 0]):
        x, y = batch(SIZE * COUNT)
        y["choice"] = torch.tensor(choices * COUNT)
        trainer.step((x, y))
        for part in range(SIZE * COUNT):
            own = slice(part, part + 1)
            targets = {name: value[own].double() for name, value in y.items()}
            (chosen(plain(x[own].double()), targets) / (SIZE * COUNT)).backward()
        update.step()
        update.zero_grad()
        state = trainer.state_dict()
        assert [
            n for n, v in plain.state_dict().items() if not torch.allclose(state[n].double(), v, atol=1e-5)
        ] == []


def test_a_gradient_that_is_there_stays() -> None:
    """Zero gradients of either sign count as gradients for momentum and decay; a sum without any gradient is
    None.
    """
    reached, left, other = (nn.Parameter(torch.ones(2)) for _ in range(3))
    reached.grad, other.grad = torch.full((2,), -0.0), torch.zeros(2)
    mark([reached, left, other])
    unmark([reached, left, other])
    assert [p.grad is None for p in (reached, left, other)] == [False, True, False]


def test_where_no_value_decides_it_is_refused() -> None:
    """A script's flag that removes the loss's dependence on a value is refused, with the value's shape and
    the remedy.
    """
    both = [True]

    def loss(outputs: tuple[Tensor, Tensor], targets: Targets) -> Tensor:
        return F.mse_loss(outputs[1], targets["y"]) + (outputs[0].mean() if both[0] else 0.0)

    task = task_of(loss)
    trainer = Trainer(task, plan_of(task, (3,)))
    trainer.step(batch(SIZE * COUNT))
    both[0] = False
    with pytest.raises(UsageError, match=r"value of shape \(2, 8\), .* multiply the value by zero"):
        trainer.step(batch(SIZE * COUNT))


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_numbers_that_operations_make_are_gradients(dtype: str) -> None:
    """NaN gradients count too. If only some replicas sent gradients, the parts of the others are zeros."""
    known = profile(task_of(chosen), microbatch_size=SIZE)
    nan = torch.zeros(4, 3, dtype=getattr(torch, dtype)) / torch.zeros(4, 3, dtype=getattr(torch, dtype))
    value = Value(shape=(4, 3), dtype=dtype, nbytes=nan.nbytes, requires_grad=True)
    (sent,) = to_send([None], [value], known, CPU)
    assert sent.shape == value.shape and received([sent.clone()], [value], known) == [None]
    for gradient in (nan, sent * 1, -sent, torch.ones_like(nan)):
        assert received([gradient], [value], known)[0] is gradient
    mixed = torch.cat([torch.ones_like(nan)[:2], sent[2:]])
    (made,) = received([mixed], [value], known)
    assert made is not None and made.real.sum(1).tolist() == [3, 3, 0, 0]
    assert received([sent], [value], replace(known, kernels=KernelMemory())) == [sent]
