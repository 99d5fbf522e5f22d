"""The caller's surroundings: gradient modes around a call, gradients in tensors and parameters, state of a
module.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.measure.cpu import Meter
from pipefit.profiler import profile
from pipefit.profiler.training_runs.profilers import LoneStages
from pipefit.profiler.training_runs.profilers import train as train_once
from pipefit.runtime import Trainer, certify, train
from pipefit.simulator import simulate
from support.small_tasks import alone, batch_of, plan_of, task_of


class Block(nn.Module):
    """A block outside a Sequential, so that it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))


def layers() -> list[nn.Module]:
    return [nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 4)]


def by_hand() -> Task:
    return task_of(layers)


def traced() -> Task:
    return replace(by_hand(), module=Block)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# ---------------------------------------------------------------- gradients that the batch requires


@pytest.mark.sample(2)
@pytest.mark.parametrize("make", [by_hand, traced])
@pytest.mark.parametrize("which", [0, 1])
def test_a_batch_that_waits_for_gradients_is_refused(make: Callable[[], Task], which: int) -> None:
    """A batch that requires gradients is refused: each entry point names the tensor and the remedy, and
    leaves no gradient in it.
    """
    task, batches = make(), []

    def waiting(size: int) -> tuple[Tensor, Tensor]:
        batch = torch.randn(size, 8), torch.randn(size, 4)
        batch[which].requires_grad_()
        batches.append(batch)
        return batch

    plan, asking = plan_of(task, [...]), replace(task, batch=waiting)
    trainer = Trainer(task, plan)
    calls: list[Callable[[], Any]] = [
        lambda: profile(asking, microbatch_size=2),
        lambda: certify(asking, plan),
        lambda: Trainer(asking, plan),
        lambda: trainer.step(waiting(4)),
    ]
    for call in calls:
        with pytest.raises(
            UsageError, match=rf"^{('inputs', 'targets')[which]} of a batch of tiny requires .*detach"
        ):
            call()
    assert all(tensor.grad is None for batch in batches for tensor in batch)


def test_the_tensor_that_waits_is_named() -> None:
    """The message names the dictionary key of a tensor that requires gradients."""
    task = replace(by_hand(), batch=lambda size: ({"x": torch.randn(size, 8, requires_grad=True)}, None))
    with pytest.raises(UsageError, match=r"^inputs\['x'\] of a batch"):
        profile(task, microbatch_size=2)


def test_an_evaluation_takes_a_batch_that_waits() -> None:
    """An evaluation accepts a batch that requires gradients, and leaves none in the tensor."""
    task = by_hand()
    plan = plan_of(task, [2, 2])
    x, y = batch_of(task, plan)
    trainer = Trainer(task, plan)
    wanted = trainer.evaluate((x, y))
    assert trainer.evaluate((x.requires_grad_(), y)) == wanted
    assert x.grad is None


# ---------------------------------------------------------------- modes around a call


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [by_hand, traced])
def test_gradients_turned_off_around_a_call_change_nothing(make: Callable[[], Task]) -> None:
    """Profile, certificate and training inside `torch.no_grad()` equal those outside; the caller's mode is
    restored.
    """
    task = make()
    plan = plan_of(task, [1, ...])
    wanted_losses, wanted = alone(task, plan, steps=2)
    with torch.no_grad():
        assert profile(task, microbatch_size=2, threads=torch.get_num_threads()) == plan.profile
        assert certify(task, plan).peak_bytes == simulate(plan, steps=2).peak_bytes
        torch.manual_seed(0)
        trainer = Trainer(task, plan)
        losses = [trainer.step(batch_of(task, plan, step)) for step in range(2)]
        assert not torch.is_grad_enabled()
    assert losses == pytest.approx(wanted_losses)
    assert_same(trainer.state_dict(), wanted)
    assert trainer.trace.peak_bytes == simulate(plan, steps=2).peak_bytes


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (torch.inference_mode, "inside torch.inference_mode.*leave it"),
        (partial(torch.autocast, "cpu", torch.bfloat16), "inside torch.autocast.*leave autocast"),
        (torch.autograd.graph.save_on_cpu, "inside hooks on saved tensors.*leave the hooks"),
        (partial(torch.device, "meta"), "with a default device other than the CPU"),
        (FakeTensorMode, "inside a FakeTensorMode.*leave it"),
        (partial(FakeTensorMode, allow_non_fake_inputs=True), "inside a FakeTensorMode.*leave it"),
    ],
)
def test_a_mode_that_training_cannot_honour_is_refused(
    mode: Callable[[], AbstractContextManager[Any]], said: str
) -> None:
    """Modes that training cannot honour are refused by name before training: inference mode (no graph),
    autocast, saved-tensor hooks and another default device (outside the plan), fake tensors (no numbers).
    """
    task = by_hand()
    plan = plan_of(task, [2, 2])
    trainer = Trainer(task, plan)
    before = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    batch = batch_of(task, plan)
    calls: list[Callable[[], Any]] = [
        lambda: profile(task, microbatch_size=2),
        lambda: certify(task, plan),
        lambda: Trainer(task, plan),
        lambda: trainer.step(batch),
    ]
    if "device" in said or "Fake" in said:
        calls.append(lambda: trainer.evaluate(batch))
    for call in calls:
        with mode(), pytest.raises(UsageError, match=said):
            call()
    assert_same(trainer.state_dict(), before)


def test_a_batch_without_numbers_is_refused_outside_of_its_mode_too() -> None:
    """A batch without numbers is refused outside of its mode too, before the model changes."""
    task = by_hand()
    plan = plan_of(task, [2, 2])
    trainer = Trainer(task, plan)
    before = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    with FakeTensorMode():
        batch = batch_of(task, plan)
    for call in (trainer.step, trainer.evaluate):
        with pytest.raises(UsageError, match=r"tensor 0 of the inputs of this batch is .*fake"):
            call(batch)
    assert_same(trainer.state_dict(), before)


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("make", [by_hand, traced])
def test_a_search_for_anomalies_changes_nothing(make: Callable[[], Task]) -> None:
    """`torch.autograd.detect_anomaly()` does not change training. It checks gradients for NaN only if they
    have numbers, which profiles and dry runs do not.
    """
    task = make()
    plan = plan_of(task, [1, ...])
    wanted_losses, wanted = alone(task, plan, steps=2)
    with torch.autograd.detect_anomaly():
        assert profile(task, microbatch_size=2, threads=torch.get_num_threads()) == plan.profile
        assert certify(task, plan).peak_bytes == simulate(plan, steps=2).peak_bytes
        torch.manual_seed(0)
        trainer = Trainer(task, plan)
        losses = [trainer.step(batch_of(task, plan, step)) for step in range(2)]
        assert torch.is_anomaly_enabled()
    assert losses == pytest.approx(wanted_losses)
    assert_same(trainer.state_dict(), wanted)


@pytest.mark.parametrize("part", ["weight", "running_mean"])
def test_a_module_made_in_inference_mode_is_refused(part: str) -> None:
    """A module made in inference mode is refused before a worker trains, with the name of its first such
    parameter or buffer.
    """
    task, module = by_hand(), nn.Sequential(*layers())
    plan = plan_of(task, [4])
    with torch.inference_mode():
        for place in module:
            if part in place._parameters:
                place.weight = nn.Parameter(place.weight.clone())
            if part in place._buffers:
                place.running_mean = place.running_mean.clone()
    with pytest.raises(UsageError, match=rf"^\d\.{part} of tiny was created inside torch.inference_mode"):
        Trainer(replace(task, module=module), plan)


@pytest.mark.sample(2)
@pytest.mark.parametrize("make", [by_hand, traced])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_may_be_inside_of_them(make: Callable[[], Task], mode: Callable[[], Any]) -> None:
    """An evaluation may run under `with torch.inference_mode()`; training continues after it."""
    task = make()
    plan = plan_of(task, [1, ...])
    trainer, other = Trainer(task, plan), Trainer(task, plan)
    batch = batch_of(task, plan)
    with mode():
        found = trainer.evaluate(batch)
    assert found == other.evaluate(batch)
    assert trainer.step(batch) == other.step(batch)
    assert_same(trainer.state_dict(), other.state_dict())


# ---------------------------------------------------------------- gradients that parameters have already


def test_what_a_parameter_has_as_gradient_does_not_enter_an_update() -> None:
    """Gradients from before the trainer or between two steps do not enter an update: training starts from
    zero gradients.
    """
    module = nn.Sequential(*layers())
    task = replace(task_of(layers), module=module)
    plan = plan_of(task, [2, 2])
    _, wanted = alone(replace(task, module=lambda: nn.Sequential(*layers())), plan, steps=2)
    torch.manual_seed(0)
    module.load_state_dict(nn.Sequential(*layers()).state_dict())
    for step in range(2):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        if not step:
            trainer = Trainer(task, plan)
        trainer.step(batch_of(task, plan, step))
    assert_same(dict(module.state_dict()), wanted)
    assert trainer.trace.peak_bytes == simulate(plan, steps=2).peak_bytes


def test_batches_that_make_an_update_together_keep_their_gradients() -> None:
    """Gradients are dropped before the first of `accumulate` batches and not between them."""
    task = by_hand()
    plan = plan_of(task, [2, 2])
    twice, once = Trainer(task, plan, accumulate=2), Trainer(task, plan)
    batch = batch_of(task, plan)
    for _ in range(2):
        twice.step(batch)
    once.step(batch)
    assert all(
        torch.allclose(a, b) for a, b in zip(weights(twice), weights(once), strict=True)
    )  # the mean of two equal gradients


def weights(trainer: Trainer) -> list[Tensor]:
    return [p.detach() for stage in trainer.stages for p in stage.parameters]


# ---------------------------------------------------------------- a profile leaves everything as it was


class Odd(nn.Module):
    """A module with every kind of mutable state: a replaced buffer, a new one, a Python counter, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = self.seen + 1
        return F.dropout(x, 0.5, self.training)


def touched() -> nn.Sequential:
    """Return a module in use: gradients on all parameters but one, a frozen one, and a part in evaluation
    mode.
    """
    module = nn.Sequential(nn.Linear(8, 8), Odd(), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    F.mse_loss(module(torch.randn(6, 8)), torch.randn(6, 4)).backward()
    module[4].bias.grad = None
    module[0].bias.requires_grad_(False)
    module[2].eval()
    return module


def whole_state(module: nn.Module) -> dict[str, Any]:
    """Return every user-visible attribute: identities, values, gradients, modes."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state().tolist()}
    for name, part in module.named_modules():
        found[f"{name} mode"] = part.training
        found[f"{name} calls"] = getattr(part, "calls", None)
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                grad = tensor.grad
                found[f"{name}.{key}"] = id(tensor), tensor.tolist(), tensor.dtype, tensor.requires_grad
                found[f"{name}.{key} grad"] = None if grad is None else (id(grad), grad.tolist())
    return found


class Pushy(torch.optim.SGD):
    """An optimizer that moves weights at any learning rate."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(1.0)


@pytest.mark.sample(4)
@pytest.mark.parametrize("device", ["fake", "cpu"])
@pytest.mark.parametrize("precision", [None, "bfloat16", "mixed-bfloat16"])
@pytest.mark.parametrize("mode", [True, False])
def test_a_profile_leaves_the_module_as_it_was(device: str, precision: Any, mode: bool) -> None:
    """A profile changes no weights, gradients, buffers, dtypes, modes, Python attributes or random state."""
    module = touched().train(mode)
    task = Task(
        module,
        batch=lambda n: (torch.randn(n, 8), torch.randn(n, 4)),
        loss=F.mse_loss,
        optimizer=partial(Pushy, lr=1.0),
        precision=precision,
    )
    before = whole_state(module)
    profile(task, microbatch_size=2, device=device)
    assert whole_state(module) == before


@pytest.mark.parametrize("device", ["fake", "cpu"])
def test_a_profile_of_a_factory_draws_nothing_of_the_callers(device: str) -> None:
    """A factory's weights and its layers' dropout do not draw from the caller's generator during a profile."""
    task = task_of(lambda: [nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4)])
    before = torch.get_rng_state()
    profile(task, microbatch_size=2, device=device)
    assert torch.equal(torch.get_rng_state(), before)


def test_profiles_by_training_runs_leave_the_module_as_it_was() -> None:
    """Profiles by training runs train a copy, whole or in parts, and leave the module as it was."""
    module = touched()
    task = replace(by_hand(), module=module)
    plan = plan_of(task, [2, 3])
    before = whole_state(module)
    train_once(task, plan)
    LoneStages(task, 2).train(plan, 1, device=torch.device("cpu"), meter=Meter(0))
    assert whole_state(module) == before


@pytest.mark.parametrize("training", [True, False])
def test_a_module_is_timed_in_its_own_mode(training: bool) -> None:
    """A profile measures a module in the training mode that its owner set."""
    modes: list[bool] = []

    class Told(Block):
        def forward(self, x: Tensor) -> Tensor:
            modes.append(self.training)
            return super().forward(x)

    task = replace(by_hand(), module=Told().train(training))
    profile(task, microbatch_size=2, device="cpu")
    assert set(modes) == {training}


# ---------------------------------------------------------------- numbers of steps, seeds and seconds


@pytest.mark.parametrize("seed", [1.0, True, "0", 1 << 64, -(1 << 64)])
def test_a_seed_that_torch_cannot_take_is_refused(seed: Any) -> None:
    """A seed that is not a whole number of 64 bits is refused by name."""
    task = by_hand()
    plan = plan_of(task, [4])
    for call in (partial(Trainer, task, plan), partial(train, by_hand, plan, steps=1)):
        with pytest.raises(UsageError, match="seed must be a whole number from"):
            call(seed=seed)  # type: ignore[operator]


@pytest.mark.parametrize("seed", [-(1 << 63), (1 << 63) - 1])
def test_the_outermost_seeds_train(seed: int) -> None:
    """The smallest and largest valid seeds train, in all places that add to them."""
    task = task_of(lambda: [nn.Linear(8, 4), nn.Dropout(0.5)])
    plan = plan_of(task, [2])
    Trainer(task, plan, seed=seed).step(batch_of(task, plan))


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "2", None])
def test_counts_are_whole_numbers(value: Any) -> None:
    """Counts of steps, threads, microbatches and accumulated batches are positive whole numbers; others are
    refused by name. For predictions None means all distinct steps.
    """
    task = by_hand()
    plan = plan_of(task, [4])
    for name, call in (
        *(
            [("steps", partial(certify, task, plan)), ("steps", partial(simulate, plan))]
            if value is not None
            else []
        ),
        ("steps", partial(train, by_hand, plan)),
        ("accumulate", partial(Trainer, task, plan)),
        ("microbatch_size", partial(profile, task)),
        ("threads", partial(profile, task, microbatch_size=2)),
    ):
        with pytest.raises(
            UsageError, match=f"{name} must be a whole number (of at least 1|from 1 to 10(24|00)), not "
        ):
            call(**{name: value})


@pytest.mark.parametrize("value", [0, -1.0, True, "60", None, float("nan"), float("inf")])
def test_seconds_are_numbers_above_zero(value: Any) -> None:
    """A timeout that is not a positive number of seconds is refused by name."""
    task = by_hand()
    plan = plan_of(task, [4])
    for name, call in (
        ("timeout_seconds", partial(train, by_hand, plan, steps=1)),
        ("start_seconds", partial(train, by_hand, plan, steps=1)),
        ("timeout_seconds", partial(Trainer, task, plan)),
    ):
        with pytest.raises(UsageError, match=f"{name} must be a number above 0"):
            call(**{name: value})


# -------------------------------------------------------- parameters that layers of the caller's module share


def test_a_module_with_tied_weights_stays_tied() -> None:
    """After training over two stages the caller's module has one shared weight, the trained one, and can be
    planned again.
    """
    first, last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    last.weight = first.weight
    module = nn.Sequential(first, nn.Tanh(), last)
    before = first.weight.detach().clone()
    task = Task(module, batch=lambda n: (torch.randn(n, 8), torch.randn(n, 8)), loss=F.mse_loss)
    plan = plan_of(task, (2, 1))
    trainer = Trainer(task, plan)
    trainer.step(task.batch(plan.training.batch_size))
    assert last.weight is first.weight
    assert not torch.equal(first.weight, before)
    certify(task, plan)
    trainer.step(task.batch(plan.training.batch_size))
    assert_same(trainer.state_dict(), state_of(module))
