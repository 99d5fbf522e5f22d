"""Tensors outside a loss or layer that it computes with: class weights, weights of a module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.measure import MemoryMeter
from pipefit.profiler import profile
from pipefit.runtime import Trainer, certify, trainer
from pipefit.runtime.engine.assembly import assemble
from pipefit.runtime.engine.runner import DeviceRunner
from pipefit.runtime.engine.stage import Site
from pipefit.schema.grids import Grid, Stage
from pipefit.simulator import simulate
from support.random_trainings import Case, accounts
from support.small_tasks import alone, batch_of, plan_of

WIDTH, CLASSES = 6, 3
WEIGHTS = torch.tensor([1.0, 2.0, 3.0])
Loss = Callable[[Tensor, Tensor], Tensor]


# Kernels take the device they were measured on
pytestmark = pytest.mark.usefixtures("one_thread")


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def task_of(module: nn.Module | Callable[[], nn.Module], loss: Loss = F.cross_entropy) -> Task:
    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, WIDTH), torch.randint(CLASSES, (size,))

    return Task(module, batch=batch, loss=loss, optimizer=partial(torch.optim.SGD, lr=0.1), name="mine")


LOSSES: dict[str, Loss] = {
    "closure": lambda outputs, targets: F.cross_entropy(outputs, targets, weight=WEIGHTS),
    "partial": partial(F.cross_entropy, weight=WEIGHTS),
    "module": nn.CrossEntropyLoss(weight=WEIGHTS),
    "arithmetic": lambda outputs, targets: (F.log_softmax(outputs, -1) * WEIGHTS)[:, 0].exp().mean(),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_tensors_of_its_own(name: str) -> None:
    """Losses and parameters are those of plain training, and all accounts of memory are equal."""
    task = task_of(layers, LOSSES[name])
    plan = plan_of(task, [1, 2])
    wanted_losses, wanted = alone(task, plan, steps=2)
    torch.manual_seed(0)
    trainer = Trainer(task, plan)
    losses = [trainer.step(batch_of(task, plan, step)) for step in range(2)]
    assert losses == pytest.approx(wanted_losses, rel=1e-6)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in trainer.state_dict().items())
    found = [
        (account.simulated_bytes - account.oracle_bytes, account.dry_run_difference)
        for account in accounts(Case(name=name, settings={}, task=task, plan=plan))
    ]
    assert found == [(0, 0)] * 4


def test_those_of_a_module_go_where_the_last_stage_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training on another device, here one without memory, moves the loss's module there; a dry run leaves it
    alone.
    """
    loss = nn.CrossEntropyLoss(weight=WEIGHTS)
    task = task_of(layers, loss)
    certify(task, plan_of(task, [1, 2], profiled=profile(task, microbatch_size=2, target="cuda")))
    assert loss.weight is WEIGHTS
    sites = list[Site]()

    def noted(site: Site, number: int, *, device: torch.device, meter: MemoryMeter | None) -> DeviceRunner:
        sites.append(site)
        return assemble(site, number, device=device, meter=meter)

    monkeypatch.setattr(trainer, "assemble", noted)
    Trainer(task, plan_of(task, [1, 2]))
    for number, expected in enumerate(("cpu", "meta")):
        assemble(sites[number], number, device=torch.device("meta"), meter=None)
        assert loss.weight.device.type == expected


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["module", "arithmetic"])
def test_ranks_of_a_tensor_group_have_them_too(name: str) -> None:
    """Every rank has all outside tensors: losses are plain training's, and dry run and meter agree."""
    task = task_of(
        lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, CLASSES)), LOSSES[name]
    )
    found = profile(task, microbatch_size=2, tensor=2, threads=torch.get_num_threads())
    whole = plan_of(task, [3], devices=2, profiled=found)
    plan = replace(whole, stages=(Stage(start=0, stop=3, grid=Grid(devices=(0, 1), tensor=2)),))
    trainer, (wanted, _) = Trainer(task, plan), alone(task, plan, steps=2)
    assert [trainer.step(batch_of(task, plan, step)) for step in range(2)] == pytest.approx(wanted, rel=1e-5)
    assert certify(task, plan).peak_bytes == trainer.trace.peak_bytes == simulate(plan).peak_bytes


@pytest.mark.parametrize("name", LOSSES)
def test_they_may_be_asked_about_for_a_gpu(name: str) -> None:
    """Without a GPU, stand-ins for the tensors are on the requested device."""
    assert profile(task_of(layers, LOSSES[name]), microbatch_size=2, target="cuda").layers


def with_penalty(module: nn.Module) -> Loss:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + 0.01 * sum(p.square().sum() for p in module.parameters())

    return loss


def test_a_loss_that_reaches_parameters_is_refused() -> None:
    """Penalties on weights would cover only their device's weights, for existing and for built modules."""
    module, made = layers(), list[nn.Module]()

    def factory() -> nn.Module:
        made.append(layers())
        return made[-1]

    def penalty(outputs: Tensor, targets: Tensor) -> Tensor:
        return with_penalty(made[-1])(outputs, targets)

    for task in (task_of(module, with_penalty(module)), task_of(factory, penalty)):
        with pytest.raises(UsageError, match=r"the loss of mine .* a parameter of another module.*loss=None"):
            profile(task, microbatch_size=2)


class Borrowing(nn.Module):
    """A layer that adds another layer's output; nn.Module knows that layer only if it is registered."""

    def __init__(self, other: nn.Linear, *, registered: bool) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.other = other if registered else [other]

    def forward(self, x: Tensor) -> Tensor:
        other: nn.Linear = self.other if isinstance(self.other, nn.Linear) else self.other[0]
        return self.own(x) + other(x)


def borrowing(*, registered: bool) -> nn.Module:
    first = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(first, Borrowing(first, registered=registered), nn.Linear(WIDTH, CLASSES))


def test_a_layer_that_reaches_parameters_of_another_is_refused() -> None:
    """On another device the layer would use a stale copy; registered in both layers, it is allowed."""
    with pytest.raises(
        UsageError,
        match=r"layer 1 \(Borrowing\) cannot be planned.*of another module.*register the parameter",
    ):
        profile(task_of(borrowing(registered=False)), microbatch_size=2)
    task = task_of(lambda: borrowing(registered=True))
    plan = plan_of(task, [1, 2], microbatches=1)
    _, wanted = alone(task, plan, steps=2)
    torch.manual_seed(0)
    trainer = Trainer(task, plan)
    for step in range(2):
        trainer.step(batch_of(task, plan, step))
    assert all(torch.allclose(tensor, wanted[name]) for name, tensor in trainer.state_dict().items())


def test_muon_is_an_optimizer_like_others() -> None:
    """Muon takes only matrices, so a trial with a vector would fail."""
    task = Task(
        lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))),
        batch=lambda size: (torch.randn(size, WIDTH), torch.randn(size, WIDTH)),
        loss=F.mse_loss,
        optimizer=torch.optim.Muon,
    )
    assert profile(task, microbatch_size=2).measurements[0].costs[0].state_bytes == 4 * WIDTH * WIDTH
