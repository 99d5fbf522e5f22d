"""State that a trace keeps in addition to its operations, and state that it refuses by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

import pipefit
from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.profiler import profile
from pipefit.runtime import Trainer
from pipefit.schema.cluster import Cluster
from pipefit.schema.training import Training
from support import untraceable_models
from support.gallery_samples import sampled
from support.small_tasks import alone, batch_of, plan_of
from support.untraceable_models import task_of


def trained(task: Task, steps: int = 2) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and the state after some steps on one device, without comparisons during training."""
    plan = plan_of(task, [...])
    torch.manual_seed(0)
    trainer = Trainer(task, plan, numbers=False)
    losses = [trainer.step(batch_of(task, plan, step)) for step in range(steps)]
    return losses, trainer.state_dict()


@pytest.mark.parametrize(
    ("model", "reason", "way_out"),
    [
        (untraceable_models.Counting, r"changes the attribute 'calls' in every call", "a buffer"),
        (untraceable_models.Annealing, r"changes the attribute 'temperature' in every call", "a buffer"),
        (
            untraceable_models.PythonDraws,
            r"draws random numbers from Python's or numpy's generator",
            "torch.rand",
        ),
        (
            untraceable_models.NumpyDraws,
            r"draws random numbers from Python's or numpy's generator",
            "torch.rand",
        ),
        (
            untraceable_models.Hiding,
            r"untraceable_models.py:\d+.* a parameter that is not registered in its modules",
            "freeze it",
        ),
        (
            untraceable_models.PuttingData,
            r"untraceable_models.py:\d+.* replaces the data of a tensor",
            "copy_",
        ),
        (untraceable_models.OwnGenerator, r"not a tensor, such as its own torch.Generator", "pipefit.chain"),
    ],
)
def test_what_a_trace_would_repeat_or_lose_is_refused(
    model: type[nn.Module], reason: str, way_out: str
) -> None:
    """The message gives the reason, the line if known, and the remedy; a profile refuses the model already,
    and leaves the generators unchanged.
    """
    states = random.getstate(), np.random.get_state()[1].tolist()
    for task in (task_of(model), task_of(model())):  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=rf"forgetful cannot be cut into layers.*{reason}.*{way_out}"):
            profile(task, microbatch_size=2)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states


def test_a_hidden_module_may_be_frozen() -> None:
    """Networks that only judge other networks never train, in plain training and here."""

    def frozen() -> nn.Module:
        model = untraceable_models.Hiding()
        model.hidden[0].requires_grad_(False)
        return model

    torch.manual_seed(3)
    task = task_of(frozen())  # type: ignore[arg-type]
    assert same_as_plain(task)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "model",
    [
        untraceable_models.ReadingData,
        untraceable_models.Settling,
        untraceable_models.doubled,
        untraceable_models.hooked,
    ],
)
def test_what_a_trace_keeps_trains_as_a_plain_loop_does(model: Callable[[], nn.Module]) -> None:
    """A traced model trains as in a plain loop with data read and changed through `.data`, a number set to
    the same value in each call, and a Sequential with a custom forward or hook.
    """
    assert same_as_plain(task_of(model))


@pytest.mark.parametrize(
    "model", [untraceable_models.OverItself, untraceable_models.Patched, untraceable_models.Collecting]
)
@pytest.mark.parametrize("called", sampled([False, True], often=[True]))
def test_functions_that_hold_the_module_reach_the_copy_that_is_traced(
    model: Callable[[], nn.Module], called: bool
) -> None:
    """A lambda over self, a replaced forward, and hooks that write into the module's containers train as in a
    plain loop, and the module itself is unchanged.
    """
    torch.manual_seed(3)
    module = model()
    if called:
        module(torch.randn(2, untraceable_models.WIDTH))
    assert same_as_plain(task_of(module))  # type: ignore[arg-type]
    assert not getattr(module, "kept", None) and not getattr(module, "seen", None)


@pytest.mark.parametrize("held", [lambda table: table, lambda table: [table]])
def test_an_attribute_may_hold_a_registered_buffer(held: Callable[[torch.Tensor], object]) -> None:
    """A traced model trains as in a plain loop if its forward reaches a buffer by a plain attribute too."""

    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.linspace(0, 1, untraceable_models.WIDTH))
            self.held = held(self.table)
            self.body = nn.Linear(untraceable_models.WIDTH, untraceable_models.WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            table = self.held[0] if isinstance(self.held, list) else self.held
            shifted: torch.Tensor = self.body(x + table)
            return shifted

    torch.manual_seed(3)
    assert same_as_plain(task_of(Holding()))  # type: ignore[arg-type]


def same_as_plain(task: Task) -> bool:
    """Return whether two steps equal those of a plain loop, which shares no code with pipefit."""
    plan = plan_of(task, [...])
    module = task.module
    before = (
        {name: tensor.clone() for name, tensor in module.state_dict().items()} if is_module(module) else {}
    )
    wanted_losses, wanted = alone(task, plan, steps=2)
    wanted = {name: tensor.clone() for name, tensor in wanted.items()}
    if is_module(module):
        module.load_state_dict(before)
    losses, state = trained(task)
    assert losses == pytest.approx(wanted_losses, rel=1e-6)
    return all(torch.equal(state[name], wanted[name]) for name in wanted)


def is_module(module: object) -> bool:
    return isinstance(module, nn.Module)


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", [None, "mixed-bfloat16"])
def test_a_model_that_asks_for_the_precision_is_answered_as_it_will_be(precision: str | None) -> None:
    """Types and products equal those of plain training under autocast, also if a part turns autocast off."""
    task = task_of(untraceable_models.AskingForPrecision, precision=precision)
    costs = profile(task, microbatch_size=2)
    training = Training(batch_size=4, microbatches=2, precision=task.precision or "float32")
    plan = pipefit.plan(costs, Cluster.emulated((1, 1 << 30)), training, recompute="never")
    torch.manual_seed(0)
    module, inputs = untraceable_models.AskingForPrecision(), batch_of(task, plan)
    with torch.autocast("cpu", torch.bfloat16) if precision else nullcontext():
        wanted = [task.loss(module(x), y) for x, y in zip(*(part.split(2) for part in inputs), strict=True)]  # type: ignore[misc]
    torch.manual_seed(0)
    assert Trainer(task, plan, numbers=False).step(inputs) == pytest.approx(
        torch.stack(wanted).mean().item(), rel=1e-6
    )
