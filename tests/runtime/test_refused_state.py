"""Refusals by name of optimizers in plans that offload state or update on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipefit.errors import InfeasibleError, UsageError
from pipefit.planner import plan
from pipefit.runtime import Trainer
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import State, What
from pipefit.schema.training import Training
from pipefit.simulator import simulate
from support.offloaded_state import away, one_stage, task_named
from support.small_tasks import batch_of, plan_of, profile_of, task_of


class Counting(torch.optim.SGD):
    """An optimizer that counts its steps in an attribute."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


class Hooked(torch.optim.SGD):
    """An optimizer with a step hook."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_step_post_hook(lambda *_: None)


class Groupless(torch.optim.SGD):
    """An optimizer that reads its own list instead of its groups."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.mine = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.mine:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad)


class Joining(torch.optim.SGD):
    """An optimizer that puts all parameters into one group."""

    def __init__(self, groups: Any, **options: Any) -> None:
        super().__init__([p for group in groups for p in group["params"]], lr=0.1, **options)


class Starting(torch.optim.SGD):
    """An optimizer with a one-time action in its first step, as 8-bit optimizers place their tables."""

    started = False

    def step(self, closure: Any = None) -> Any:
        self.started = True
        return super().step(closure)


class Tabled(torch.optim.SGD):
    """An optimizer that keeps a table for all parameters in the state of each."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.table = torch.arange(8.0)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["table"] = self.table
        return super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (Counting, "Counting changes its attribute 'steps' in its step"),
        (Hooked, "Hooked has hooks on its steps"),
        (Groupless, "Groupless changes parameters outside its groups"),
        (Joining, "Joining has put parameters of several layers into one group"),
        (Starting, "Starting changes its attribute 'started' in its step"),
    ],
)
@pytest.mark.parametrize("what", [What.OFFLOAD, What.UPDATE])
def test_an_optimizer_that_is_more_than_its_groups_is_refused(
    optimizer: Callable[..., torch.optim.Optimizer], words: str, what: What
) -> None:
    """An optimizer with state outside its groups is refused at the first step, with the reason and a fix,
    because partial steps would train other numbers.
    """
    task = task_of(lambda: [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)], optimizer=optimizer)
    plan = replace(plan_of(task, [3], devices=2), decisions=(away(0, 1, 2, what),))
    with pytest.raises(UsageError, match=f"optimizer {words}, so it cannot update a stage in parts: keep"):
        Trainer(task, plan).step(batch_of(task, plan))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, Counting, Hooked, Groupless, Joining, Starting, Tabled]
)
def test_planners_leave_state_where_such_an_optimizer_updates_it(
    optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    """Planners do not offload the state of such an optimizer: a model that fits with plain SGD does not fit
    with it.
    """
    layers = [nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 4)]
    task = task_of(lambda: layers, optimizer=lambda groups: optimizer(groups, momentum=0.9))
    made = profile_of(task, 2)
    asked = Training(batch_size=4, microbatches=2)
    (whole,) = simulate(plan(made, Cluster.emulated((1, 1 << 30)), asked)).peak_bytes
    tight = Cluster.emulated((1, whole - sum(cost.parameter_bytes for cost in made.at(2).costs) // 2))
    if optimizer is torch.optim.SGD:
        found = plan(made, tight, asked)
        assert any(isinstance(decision.subject, State) for decision in found.decisions)
        Trainer(task, found).step(batch_of(task, found))
    else:
        with pytest.raises(
            InfeasibleError,
            match=r"; state cannot be offloaded, because the optimizer .* updates all layers at once",
        ):
            plan(made, tight, asked)
        half = plan(made, tight, asked, allow_infeasible=True)
        assert ("State is not offloaded, because the optimizer " in str(half.provenance)) == bool(
            half.decisions
        )


def test_a_tensor_that_is_kept_for_several_layers_is_not_moved_with_one() -> None:
    """A state tensor shared by several layers is refused after the first update, because offloading it with
    one layer would free the memory of the others.
    """
    task = task_of(lambda: [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)], optimizer=Tabled)
    plan = replace(plan_of(task, [3], devices=2), decisions=(away(0, 1, 2),))
    with pytest.raises(
        UsageError, match="optimizer Tabled shares one tensor between several parameters, so it cannot"
    ):
        Trainer(task, plan).step(batch_of(task, plan))


class Hoarding(torch.optim.SGD):
    """An optimizer that keeps a copy of every gradient outside its state."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.hoard: dict[Any, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["at"] = 1
                self.hoard[parameter] = parameter.grad.clone()
                parameter.sub_(parameter.grad)


def test_state_that_is_not_where_it_belongs_is_refused() -> None:
    """Tensors that an optimizer keeps outside its state are found by the bytes on the device and refused."""
    task = task_of(lambda: [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)], optimizer=Hoarding)
    plan = replace(plan_of(task, [3], devices=2), decisions=(away(0, 1, 2),))
    words = r"0OFFLOAD\[1.optimizer\]@host: 0 bytes for the optimizer state of layer 1, but 288 by the plan"
    with pytest.raises(UsageError, match=words):
        Trainer(task, plan).step(batch_of(task, plan))


def test_an_array_of_a_parameter_is_in_the_way_only_where_its_memory_is_freed() -> None:
    """Weights that are numpy arrays cannot be offloaded, but the host may update them."""
    plain = task_named("adamw")

    def build() -> nn.Module:
        model = plain.build()
        for parameter in model.parameters():
            parameter.data = torch.from_numpy(parameter.detach().numpy().copy())
        return model

    task = replace(plain, module=build)
    with pytest.raises(
        UsageError, match="the plan offloads the parameters of layer 0: its memory does not belong to torch"
    ):
        Trainer(task, one_stage(away(0, 0, 1, kind="parameters")))
    one, other = (Trainer(task, one_stage(*decisions)) for decisions in ((away(0, 0, 1, What.UPDATE),), ()))
    for step in range(2):
        assert one.step(batch_of(task, one.plan, step)) == other.step(batch_of(task, one.plan, step))


def test_another_host_is_refused() -> None:
    """A device may update its layers only on its own host."""
    plan = one_stage()
    host = plan.cluster.hosts[0]
    plan = replace(plan, cluster=replace(plan.cluster, hosts=(host, host)))
    with pytest.raises(UsageError, match="to host1 on another host, which only the simulator supports"):
        Trainer(task_named("adamw"), replace(plan, decisions=(away(0, 0, 1, What.UPDATE, place="host1"),)))
