"""Changes and reads of tensors that autograd does not track: trained as plainly, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.runtime import Trainer
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from support.buffer_feedback import WIDTH, Average, task_with
from support.known_profiles import profile
from support.small_tasks import batch_of, plan_of

MICROBATCHES, STEPS = 3, 2


def mean(x: Tensor) -> Tensor:
    return x.detach().mean(0)


class ByData(Average):
    """A layer that multiplies by an average after it changes the average through `.data`."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.average.data.lerp_(mean(x), 0.5)
        return x * self.average


class Afterwards(Average):
    """A layer that changes the average after it was saved, which plain autograd would refuse if detected."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        result = x * self.average
        self.average.data[1:].add_(mean(x)[1:])
        return result


class Preserved(Average):
    """A layer that hides the change with torch's own context manager."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        with torch.autograd._unsafe_preserve_version_counter(self.average), torch.no_grad():
            self.average.lerp_(mean(x), 0.5)
        return x * self.average


class OtherData(Average):
    """A layer that replaces the average's storage."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.average.data = self.average.data * 0.5 + mean(x)
        return x * self.average


class Shrinking(Average):
    """A layer that changes a weight which is saved for the gradient of the input."""

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data.mul_(0.9)
        found: Tensor = self.linear(x)
        return found


class InAList(Average):
    """A layer with an average in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [torch.ones(WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.held[0].data.lerp_(mean(x), 0.5)
        return x * self.held[0]


class Toggling(nn.Module):
    """A batch norm that alternates: it uses the statistics in one microbatch and changes them in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.norm.train(not self.norm.training)
        found: Tensor = self.norm(self.linear(x))
        return found


class BothModes(nn.Module):
    """A batch norm in training, with another use of its saved statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        assert self.norm.running_mean is not None
        return self.norm(x) + x * self.norm.running_mean


class OnTheContext(torch.autograd.Function):
    """A function that multiplies by a tensor kept as an attribute of its context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Any) -> Tensor:
        ctx.factor = factor
        return x * getattr(factor, "average", factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * getattr(ctx.factor, "average", ctx.factor), None


class Saving(torch.autograd.Function):
    """A function that saves the tensor with `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


class Keeping(Average):
    """A layer that multiplies by its average through a function that keeps it."""

    def multiplied(self, x: Tensor) -> Tensor:
        """Pass the average as an attribute."""
        found: Tensor = OnTheContext.apply(x, self.average)
        return found

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.update(mean(x))
        return self.multiplied(x)


class KeepingItself(Keeping):
    """A layer whose function keeps the whole module."""

    def multiplied(self, x: Tensor) -> Tensor:
        """Pass the module as an attribute."""
        found: Tensor = OnTheContext.apply(x, self)
        return found


class Hooked(Keeping):
    """A layer with a hook that multiplies the gradient."""

    def multiplied(self, x: Tensor) -> Tensor:
        """Multiply in the backward alone."""
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * self.average)
        return x


class KeptWell(Keeping):
    """A layer whose function keeps a clone."""

    def multiplied(self, x: Tensor) -> Tensor:
        """Pass the clone as an attribute."""
        found: Tensor = OnTheContext.apply(x, self.average.clone())
        return found


class SavedWell(Keeping):
    """A layer that lets autograd save the average."""

    def multiplied(self, x: Tensor) -> Tensor:
        """Multiply, so that autograd checks the average."""
        found: Tensor = Saving.apply(x, self.average)
        return found


class Following(Average):
    """A layer whose backward changes the average that its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(lambda own, _, gradients: own.update(gradients[0].mean(0)))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) - self.average


class Noting(Average):
    """A layer whose backward changes a tensor that its forward does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(lambda own, _, gradients: own.update(gradients[0].mean(0)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        return found


class Input(Average):
    """A layer that changes its input."""

    def forward(self, x: Tensor) -> Tensor:
        x.data.mul_(0.5)
        found: Tensor = self.linear(x)
        return found


class ClonedInput(Average):
    """A layer that changes a clone of its input."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x.data.mul_(0.5)
        found: Tensor = self.linear(x)
        return found


class Cloning(Average):
    """A layer that changes its average through `.data`, and computes with a clone."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.average.data.lerp_(mean(x), 0.5)
        return x * self.average.clone()


def plainly(task: Task, plan: Plan) -> tuple[list[float], dict[str, Tensor]]:
    """Train without pipefit, with the backward of each microbatch before the next forward."""
    torch.manual_seed(0)
    module = task.build()
    optimizer, losses, count = task.optimizer(module.parameters()), [], plan.training.microbatches
    for step in range(STEPS):
        found = []
        for inputs, targets in zip(*(part.chunk(count) for part in batch_of(task, plan, step)), strict=True):
            loss = task.loss(module(inputs.clone()), targets)
            (loss / count).backward()
            found.append(loss.detach())
        losses.append(float(torch.stack(found) @ torch.full((count,), 1 / count)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, module.state_dict()


@cache
def profiled(build: Callable[[], nn.Module], by_hand: bool = True) -> ModelProfile:
    return profile(task_with(build, by_hand=by_hand), microbatch_size=2, threads=torch.get_num_threads())


def planned(build: Callable[[], nn.Module], by_hand: bool = True, **training: Any) -> tuple[Task, Plan]:
    """Train all layers in one stage, by default under GPipe with three microbatches in flight."""
    training = {"microbatches": MICROBATCHES, "schedule": "gpipe"} | training
    found = profiled(build, by_hand)
    task = task_with(build, by_hand=by_hand)
    return task, plan_of(task, [len(found.layers)], size=2, profiled=found, **training)


def check(task: Task, plan: Plan) -> None:
    """Assert that losses and weights equal the plain loop's bit by bit."""
    losses, state = plainly(task, plan)
    trainer = Trainer(task, plan)
    assert [trainer.step(batch_of(task, plan, step)) for step in range(STEPS)] == losses
    trained = trainer.state_dict()
    assert [name for name, tensor in state.items() if not torch.equal(trained[name], tensor)] == []


UNSEEN = [ByData, Afterwards, Preserved, OtherData, Shrinking, InAList, Toggling, BothModes]


@pytest.mark.sample(4)
@pytest.mark.parametrize("build", UNSEEN)
def test_several_in_flight_are_refused(build: type[nn.Module]) -> None:
    """With several microbatches in flight, such a layer is refused by name, because backwards would use
    another microbatch's numbers.
    """
    task, plan = planned(build)
    with pytest.raises(UsageError, match=r"microbatch 0 cannot go backward .*have been changed in place"):
        Trainer(task, plan).step(batch_of(task, plan))


@pytest.mark.sample(4)
@pytest.mark.parametrize("build", UNSEEN)
def test_one_in_flight_trains_as_plainly(build: type[nn.Module]) -> None:
    """With one microbatch in flight, as in the last stage under 1F1B, such a layer trains as in plain
    training.
    """
    check(*planned(build, schedule="1f1b"))


@pytest.mark.parametrize("build", [ByData, Afterwards, OtherData])
def test_recomputed_it_trains_as_plainly(build: type[nn.Module]) -> None:
    """A recomputed layer trains as in plain training with several microbatches in flight, because each has
    its own copy.
    """
    check(*planned(build, recompute="always"))


def norm() -> nn.Module:
    return nn.BatchNorm1d(WIDTH)


@pytest.mark.sample(3)
@pytest.mark.parametrize("build", [Cloning, KeptWell, ClonedInput, Noting, norm])
def test_the_way_out_is_one(build: Callable[[], nn.Module]) -> None:
    """The proposed fix, a clone, trains as in plain training, and so do layers that only look similar."""
    check(*planned(build))


def test_what_autograd_saves_is_its_own_to_refuse() -> None:
    """A change that autograd detects is refused by name in the backward, unless the layer is recomputed."""
    task, plan = planned(SavedWell)
    with pytest.raises(UsageError, match="have been changed in place"):
        Trainer(task, plan).step(batch_of(task, plan))
    check(*planned(SavedWell, recompute="always"))


@pytest.mark.compares_plans
@pytest.mark.parametrize("build", [Keeping, KeepingItself, Hooked, Following])
def test_what_autograd_cannot_check_is_refused_at_the_start(build: type[nn.Module]) -> None:
    """A backward that reads or changes a tensor outside autograd is refused by name before anything is
    trained, if several microbatches in flight would give other numbers than plain training; otherwise it
    trains as plainly.
    """
    task, several = planned(build)
    with pytest.raises(UsageError, match=r"trains differently by this plan than plainly: .*on device 0"):
        Trainer(task, several)
    check(*planned(build, schedule="1f1b"))


def test_a_traced_layer_that_keeps_its_average_is_refused() -> None:
    """The chain is compared with the module, whatever the plan."""
    task, plan = planned(Keeping, by_hand=False, schedule="1f1b")
    with pytest.raises(
        UsageError, match=r"computes different numbers as a chain than as a module: the gradient"
    ):
        Trainer(task, plan)


def test_an_input_changed_unseen_is_refused() -> None:
    """A layer that changes its input where autograd does not see it is refused by the profiler."""
    with pytest.raises(UsageError, match=r"layer .*its forward changes its input without autograd"):
        profiled(Input)
