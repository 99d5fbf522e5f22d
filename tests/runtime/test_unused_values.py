"""Values computed from parameters without an influence on the loss: they get no gradient."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.lowering.passes.recomputation import Recompute
from pipefit.runtime import Trainer
from pipefit.runtime.engine.in_flight import cut
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.training import Training
from support.known_profiles import profile
from support.small_tasks import alone, batch_of, plan_of, task_of, trainer_of
from support.step_peaks import step_peaks

WIDTH, SIZE = 16, 4
DECAYING = partial(torch.optim.SGD, lr=0.1, weight_decay=0.5)


class Beside(nn.Module):
    """A layer that returns a value, and a second one from another weight."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.aside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.main(x), torch.tanh(self.aside(x))


class First(nn.Module):
    """A layer that processes the first value and passes on the others."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (self.layer(values[0]), *values[1:])


class Sometimes(nn.Module):
    """A layer that uses the second value if a script says so, after the profile."""

    uses = False

    def forward(self, values: tuple[Tensor, Tensor]) -> Tensor:
        return values[0] + values[1] if self.uses else values[0]


def first_alone(outputs: Any, target: Tensor) -> Tensor:
    return F.mse_loss(outputs[0], target)


def beside() -> list[nn.Module]:
    """Build three layers with two values, and a weight that only the second value depends on."""
    return [nn.Linear(WIDTH, WIDTH), Beside(), First(nn.Tanh()), First(nn.Linear(WIDTH, 4))]


def task() -> Task:
    """Return a task whose optimizer changes every weight that has a gradient, even a zero one."""
    return task_of(beside, inputs=WIDTH, loss=first_alone, optimizer=DECAYING)


@pytest.mark.sample(3)
@pytest.mark.parametrize("recompute", ["never", "stages"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("split", [[4], [2, 2], [3, 1]])
def test_they_need_what_was_foretold(split: list[int], schedule: str, recompute: Recompute) -> None:
    """Unused values need the predicted memory: for any split, simulator, dry run and meter equal the
    allocator in every step.
    """
    found = profile(task(), microbatch_size=SIZE, threads=torch.get_num_threads())
    options = {"microbatches": 3, "schedule": schedule, "recompute": recompute}
    peaks = step_peaks(task(), plan_of(task(), split, size=SIZE, profiled=found, **options))
    assert peaks.simulated == peaks.dry == peaks.metered == peaks.allocated


@pytest.mark.parametrize("split", [[5], [3, 2]])
def test_what_they_alone_need_is_freed_at_once(split: list[int]) -> None:
    """A tensor that only the backward of an unused value needs is freed with the forward of its layer."""

    def layers() -> list[nn.Module]:
        return [
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(),
            Beside(),
            First(nn.Flatten()),
            First(nn.Linear(WIDTH, 4)),
        ]

    odd = task_of(layers, inputs=WIDTH, loss=first_alone, optimizer=DECAYING)
    found = profile(odd, microbatch_size=SIZE, threads=torch.get_num_threads())
    assert not any(
        tensor.operation == "Tanh" for cost in found.measurements[0].costs for tensor in cost.saved
    )
    peaks = step_peaks(odd, plan_of(odd, split, size=SIZE, profiled=found, schedule="gpipe", microbatches=3))
    assert peaks.simulated == peaks.dry == peaks.metered == peaks.allocated


@pytest.mark.parametrize("split", [[4], [2, 2], [1, 3]])
def test_weights_behind_them_alone_stay(split: list[int]) -> None:
    """Weights used only by unused values do not change: after two steps they equal plain training, which
    skips weights without a gradient.
    """
    trainer = trainer_of(task(), split, size=SIZE)
    for step in range(2):
        trainer.step(batch_of(task(), trainer.plan, step))
    _, expected = alone(task(), trainer.plan, steps=2)
    found = trainer.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


class Doubled(torch.autograd.Function):
    """A function whose backward would get zeros for absent gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


class Added(torch.autograd.Function):
    """A function that adds the gradient of its own loss, as some mixtures of experts balance their load."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient + 0.5, None


class Through(Beside):
    """A layer with a custom function before both values, or after the second."""

    def __init__(self, function: Any, *, before: bool) -> None:
        super().__init__()
        self.function, self.before = function, before

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        main, aside = super().forward(self.function.apply(x, 2.0) if self.before else x)
        return main, aside if self.before else self.function.apply(aside, 2.0)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("function", "before"), [(Doubled, False), (Added, False), (Added, True)])
def test_custom_functions_behind_them_are_not_called(function: Any, before: bool) -> None:
    """A custom function at the end of a stage has its backward called only if plain training calls it."""

    def layers() -> list[nn.Module]:
        parts = nn.Linear(WIDTH, WIDTH), Through(function, before=before)
        return [*parts, First(nn.Tanh()), First(nn.Linear(WIDTH, 4))]

    odd = task_of(layers, inputs=WIDTH, loss=first_alone, optimizer=DECAYING)
    found = profile(odd, microbatch_size=SIZE, threads=torch.get_num_threads())
    for split in ([2, 2], [1, 1, 2]):
        plan = plan_of(odd, split, size=SIZE, profiled=found)
        trainer, (losses, expected) = Trainer(odd, plan), alone(odd, plan, steps=2)
        assert [trainer.step(batch_of(odd, plan, step)) for step in range(2)] == losses
        taken = trainer.state_dict()
        assert all(torch.equal(taken[name], tensor) for name, tensor in expected.items())
        peaks = step_peaks(odd, plan)
        assert peaks.simulated == peaks.dry == peaks.metered == peaks.allocated


class Two(nn.Module):
    """A layer that returns two values, from weights that ranks can divide."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.aside, self.last = nn.Linear(WIDTH, 64), nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.first(x))
        aside = self.aside(hidden)
        return self.last(hidden), aside


def test_weights_that_ranks_divide_stay_behind_them() -> None:
    """Tensor-parallel ranks, too, have no gradient for a weight whose value does not influence the loss."""
    two = replace(task_of(list, inputs=WIDTH, loss=first_alone, optimizer=DECAYING), module=Two)
    found = profile(two, microbatch_size=SIZE, tensor=2)
    cut = found.layers.index("last")
    stages = (
        Stage(start=0, stop=cut, grid=Grid(devices=(0, 1), tensor=2)),
        Stage(start=cut, stop=len(found.layers), grid=Grid.of(2)),
    )
    training = Training(batch_size=SIZE, microbatches=1)
    plan = Plan(profile=found, cluster=Cluster.emulated((3, 1 << 30)), training=training, stages=stages)
    trainer = Trainer(two, plan)
    before = trainer.state_dict()["aside.weight"].clone()
    trainer.step(two.batch(SIZE))
    assert torch.equal(trainer.state_dict()["aside.weight"], before)


@pytest.mark.parametrize("split", [[1, 2], [3]])
def test_a_gradient_that_nobody_expects_is_refused(split: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that uses such a value in training but not in its profile is refused at run time."""
    layers = [Beside, Sometimes, partial(nn.Linear, WIDTH, 4)]
    odd = task_of(lambda: [make() for make in layers], inputs=WIDTH)
    trainer = trainer_of(odd, split, size=SIZE)
    monkeypatch.setattr(Sometimes, "uses", True)
    with pytest.raises(
        UsageError, match=r"has a gradient for a value of shape .* when the model was profiled"
    ):
        trainer.step(batch_of(odd, trainer.plan))


@pytest.mark.parametrize(
    ("zeros", "number", "refused"), [(True, 0.0, False), (True, 1.0, True), (False, 0.0, True)]
)
def test_zeros_arrive_for_unused_values_of_divided_layers(zeros: bool, number: float, refused: bool) -> None:
    """FSDP2 gives all inputs of a layer a gradient; a gradient that is not zero is refused all the same."""
    anchor = torch.empty(0, requires_grad=True)
    (value,) = cut((torch.ones(2),), [True], anchor, "first", zeros=zeros)
    with pytest.raises(UsageError, match="the layer after first") if refused else nullcontext():
        value.backward(torch.full((2,), number))
