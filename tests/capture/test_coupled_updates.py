"""A model whose optimizer combines several parameters is one layer, so that one worker has all parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipefit.capture.parameter_groups import couples
from pipefit.capture.task import Task
from pipefit.errors import InfeasibleError, UsageError
from pipefit.planner import plan
from pipefit.profiler import profile
from pipefit.runtime import Trainer, certify
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Sharding, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.training import Training
from pipefit.simulator import simulate
from support.small_tasks import batch_of, task_of


class Normed(torch.optim.SGD):
    """An optimizer that divides by the norm of all gradients: per group, or per parameter."""

    def __init__(self, groups: Any, *, each: bool) -> None:
        super().__init__(groups, lr=0.1)
        self.each = each

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        of_groups = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        for own in of_groups if self.each else [[p for of_group in of_groups for p in of_group]]:
            norm = torch.stack([p.grad.norm() for p in own]).norm()  # type: ignore[union-attr]
            for parameter in own:
                parameter.sub_(0.1 * parameter.grad / norm)  # type: ignore[operator]


class Langevin(torch.optim.SGD):
    """An optimizer that adds noise to every weight."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)


def layers() -> list[nn.Module]:
    """Return layers of trained vectors and matrices."""
    return [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)]


class Traced(nn.Sequential):
    """The same layers with a custom forward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


TASKS = {
    "by hand": lambda each: task_of(layers, optimizer=partial(Normed, each=each)),
    "traced": lambda each: replace(
        task_of(layers, optimizer=partial(Normed, each=each)), module=lambda: Traced(*layers())
    ),
}


def same_as_plain(task: Task, made: Plan, microbatches: int) -> None:
    """Assert that two steps of a plan equal a plain loop with one optimizer for all parameters, bit by bit
    and to the byte.
    """
    trainer = Trainer(task, made)
    torch.manual_seed(0)
    module = task.build()
    optimizer = task.optimizer(module.parameters())  # type: ignore[arg-type]
    for step in range(2):
        inputs, targets = batch_of(task, made, step)
        trainer.step((inputs, targets))
        for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            (task.loss(module(x), y) / microbatches).backward()  # type: ignore[misc]
        optimizer.step()
        optimizer.zero_grad()
    found = trainer.state_dict()
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
    assert simulate(made).peak_bytes == certify(task, made).peak_bytes == trainer.trace.peak_bytes


@pytest.mark.sample(2)
@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize("way", TASKS)
def test_a_common_number_is_that_of_plain_training(way: str, each: bool) -> None:
    """On any single device, all parameters are in one group, unless the user requests groups."""
    task = TASKS[way](each)
    profiled = profile(task, microbatch_size=2)
    assert len(profiled.layers) == 1
    made = plan(profiled, Cluster.emulated((2, 1 << 30)), batch_size=4)
    assert [stage.devices for stage in made.stages] == [(0,)]
    same_as_plain(task, made, 2)


def test_more_stages_are_refused_with_the_reason() -> None:
    """Two stages are refused, because they would have two optimizers."""
    profiled = profile(TASKS["by hand"](False), microbatch_size=2)
    with pytest.raises(UsageError, match=r"one number from several parameters.*too few for 2 stages"):
        plan(profiled, Cluster.emulated((2, 1 << 30)), batch_size=4, stages=2)
    with pytest.raises(InfeasibleError, match=r"one block, because the optimizer computes one number"):
        plan(profiled, Cluster.emulated((2, 600)), batch_size=4)
    made = plan(profiled, Cluster.emulated((2, 1 << 30)), batch_size=4)
    assert made.provenance is not None
    assert any("one block, because the optimizer" in remark for remark in made.provenance.remarks)


@pytest.mark.sample(1)
@pytest.mark.parametrize("shard", ["none", "optimizer", "parameters"])
def test_replicas_have_it_too(shard: Sharding) -> None:
    """Each replica has all parameters, or one replica owns them all."""
    task = TASKS["traced"](False)
    profiled = profile(task, microbatch_size=(2, 1))
    stages = (Stage(start=0, stop=1, grid=Grid(devices=(0, 1), data=2, shard=shard)),)
    training = Training(batch_size=4, microbatches=2)
    cluster = Cluster.emulated((2, 1 << 30))
    same_as_plain(task, Plan(profile=profiled, cluster=cluster, training=training, stages=stages), 4)


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.AdamW,
        torch.optim.Adafactor,
        torch.optim.Rprop,
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
        Langevin,
    ],
)
def test_an_optimizer_of_single_parameters_is_not(optimizer: Callable[..., Optimizer]) -> None:
    """Optimizers that treat each parameter separately, or draw at random, are not coupled; random numbers are
    unchanged.
    """
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    assert len(profile(task_of(layers, optimizer=optimizer), microbatch_size=2).layers) == 3
    assert torch.rand(1) == expected


def test_parameters_of_others_stay_as_they_are() -> None:
    """An optimizer that ignores its argument and takes the module's parameters makes no step and gives no
    message.
    """
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    task = replace(
        task_of(layers, optimizer=lambda groups: torch.optim.SGD(module.parameters(), lr=0.1)), module=module
    )
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.tolist() for parameter in module.parameters()]
    assert not couples(task, module)
    assert [parameter.tolist() for parameter in module.parameters()] == before


def test_a_class_with_fixed_options_is_tried_once() -> None:
    """Further models with a class and options that are known are not tried again; with other options, other
    kinds of parameters or a function, which may depend on anything, they are.
    """
    made = list[object]()

    class Counting(torch.optim.SGD):
        def __init__(self, *args: Any, **options: Any) -> None:
            made.append(self)
            super().__init__(*args, **options)

    def asked(optimizer: Callable[..., Optimizer], chain: Callable[[], list[nn.Module]] = layers) -> bool:
        made.clear()
        task = task_of(chain, optimizer=optimizer)
        assert not couples(task, task.build())
        return bool(made)

    assert asked(partial(Counting, lr=0.1))
    assert not asked(partial(Counting, lr=0.1))
    assert asked(partial(Counting, lr=0.2))
    assert asked(partial(Counting, lr=0.1), lambda: [nn.Conv1d(8, 4, 1)])
    assert [asked(lambda groups: Counting(groups, lr=0.1)) for _ in range(2)] == [True, True]
