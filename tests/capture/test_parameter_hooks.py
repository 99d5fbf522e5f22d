"""Hooks on the gradients of parameters: their results are trained, and their memory is planned."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.profiler import profile
from pipefit.runtime import Trainer
from pipefit.schema.plan import Plan
from support.random_trainings import Case, accounts
from support.small_tasks import alone, batch_of, plan_of

WIDTH = 16


# Kernels use their measured workspace
pytestmark = pytest.mark.usefixtures("one_thread")


class Blocks(nn.Module):
    """A model of three linear layers; the last has the weight of the first if they are `tied`."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        if tied:
            self.blocks[2].weight = self.blocks[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.001, 0.001)


def double(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2.0)


def written() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def traced() -> nn.Module:
    return Blocks()


def hooked(module: Callable[[], nn.Module]) -> nn.Module:
    """Return the module with a hook on the gradient of its first weight, and a post-accumulate hook on its
    second.
    """
    torch.manual_seed(5)
    made = module()
    first, second = [parameter for parameter in made.parameters() if parameter.ndim == 2][:2]
    first.register_hook(clamped)
    second.register_post_accumulate_grad_hook(double)
    return made


def task_of(module: nn.Module | Callable[[], nn.Module], **options: object) -> Task:
    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, WIDTH), torch.randn(size, WIDTH)

    return Task(module, batch=batch, loss=F.mse_loss, name="hooked", **options)  # type: ignore[arg-type]


def in_two(task: Task, **options: Any) -> Plan:
    """Place the first block of the model on one device, the others on another."""
    costs = profile(task, microbatch_size=2, threads=torch.get_num_threads())
    return plan_of(task, [costs.edges[1], costs.edges[-1] - costs.edges[1]], profiled=costs, **options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("module", [written, traced])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_hooks_of_parameters_train_as_in_a_plain_loop(
    module: Callable[[], nn.Module], recompute: str
) -> None:
    """Each microbatch's gradient passes the hook, on every stage, with and without recomputation."""
    task = task_of(hooked(module), optimizer=partial(torch.optim.SGD, lr=0.1))
    plan = in_two(task, recompute=recompute)
    _, wanted = alone(task_of(hooked(module), optimizer=task.optimizer), plan, steps=2)
    trainer = Trainer(task, plan)
    for step in range(2):
        trainer.step(batch_of(task, plan, step))
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in trainer.state_dict().items())


@pytest.mark.parametrize("made", [hooked, lambda module: partial(hooked, module)], ids=["module", "factory"])
def test_what_a_hook_takes_is_planned(made: Callable[[Callable[[], nn.Module]], nn.Module]) -> None:
    """A hook that creates another gradient briefly holds both: simulator, dry run and allocator agree on
    it.
    """
    for module in (written, traced):
        task = task_of(made(module), optimizer=torch.optim.SGD)  # whose update takes less than the hook
        case = Case(name="hooked", settings={}, task=task, plan=in_two(task))
        found = [(a.simulated_bytes - a.oracle_bytes, a.dry_run_difference) for a in accounts(case)]
        assert found == [(0, 0)] * 4


@pytest.mark.parametrize("hooked_layer", [0, 4])
def test_a_layer_with_a_hook_costs_what_no_other_layer_costs(hooked_layer: int) -> None:
    """If one of seven equal layers has a hook, the costs of that layer and of the others stay separate."""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(7)))
    module[hooked_layer].weight.register_hook(
        lambda gradient: torch.stack([gradient] * 9).sum(0)
    )  # takes much
    task = task_of(module, optimizer=torch.optim.SGD)
    case = Case(name="hooked", settings={}, task=task, plan=plan_of(task, [7]))
    found = [(a.simulated_bytes - a.oracle_bytes, a.dry_run_difference) for a in accounts(case)]
    assert found == [(0, 0)] * 2


def test_hooks_of_a_parameter_that_several_layers_use_are_refused() -> None:
    """On two stages a hook would clamp each part of the gradient instead of the sum: the hook is refused by
    name.
    """
    module = Blocks(tied=True)
    module.blocks[0].weight.register_hook(clamped)
    reason = r"blocks\.0\.weight of hooked has hooks.*\(blocks\.0, blocks\.2\).*register_step_pre_hook"
    with pytest.raises(UsageError, match=reason):
        profile(task_of(module), microbatch_size=2)


def test_the_way_out_for_a_shared_parameter_trains() -> None:
    """A hook before the optimizer's step sees the sum of all layers' gradients on every stage, as in plain
    training.
    """

    def optimizer(groups: object) -> torch.optim.Optimizer:
        made = torch.optim.SGD(groups, lr=0.1)  # type: ignore[arg-type]

        def clamp(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.clamp_(-0.001, 0.001)

        made.register_step_pre_hook(clamp)
        return made

    def tied() -> nn.Module:
        torch.manual_seed(5)
        return Blocks(tied=True)

    task = task_of(tied(), optimizer=optimizer)
    plan = in_two(task, microbatches=1)
    _, wanted = alone(task_of(tied(), optimizer=optimizer), plan, steps=2)
    trainer = Trainer(task, plan)
    for step in range(2):
        trainer.step(batch_of(task, plan, step))
    assert all(torch.allclose(tensor, wanted[name]) for name, tensor in trainer.state_dict().items())
