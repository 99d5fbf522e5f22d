"""Memory of master weights: 16 bytes a parameter under AdamW, equal in every account."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.models import build
from pipefit.runtime import Trainer, certify
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.trace import CATEGORIES, Category, MemorySample
from pipefit.schema.training import Training
from pipefit.simulator import simulate
from support.allocator_events import measured_peaks
from support.gallery_samples import sampled
from support.known_profiles import profile

PRECISIONS = ("master-bfloat16", "master-float16")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
}
STEPS, WIDTH = 2, 24


# Kernels' temporary memory depends on the threads; profiles assume one
pytestmark = pytest.mark.usefixtures("one_thread")


class Scale(nn.Module):
    """A layer that multiplies every feature by a weight for each place, and adds another."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.weight, self.shift = (
            nn.Parameter(torch.ones(places, WIDTH)),
            nn.Parameter(torch.zeros(places, WIDTH)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return a result of the shape of `x`."""
        return x * self.weight[: x.shape[0]] + self.shift[: x.shape[0]]


class Frozen(Scale):
    """A layer with a frozen weight."""

    def __init__(self, places: int) -> None:
        super().__init__(places)
        self.weight.requires_grad_(False)


def network() -> nn.Sequential:
    """Return an embedding and layers of different sizes."""
    return nn.Sequential(nn.Embedding(50, WIDTH), Scale(64), nn.Tanh(), Frozen(32), Scale(16))


class Head(nn.Module):
    """A product with the weight of an embedding."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """Return a result of the shape of `x`."""
        return x * self.weight[: x.shape[0]]


def tied() -> nn.Sequential:
    """Return an embedding whose weight the last layer uses too."""
    embedding = nn.Embedding(50, WIDTH)
    return nn.Sequential(embedding, Scale(64), Head(embedding.weight))


def parameters(module: nn.Module, trainable: bool) -> list[int]:
    """Return the number of trained elements, or of frozen ones."""
    return [parameter.numel() for parameter in module.parameters() if parameter.requires_grad is trainable]


def words(size: int) -> tuple[Tensor, Tensor]:
    """Return made-up tokens and values."""
    return torch.randint(0, 50, (size,)), torch.randn(size, WIDTH) * 1e-3


def product(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a scalar loss whose kernels need no temporary memory."""
    return torch.dot(outputs.flatten(), targets.flatten())


def task_of(precision: Any, optimizer: str = "adamw", **settings: Any) -> Task:
    """Return a task of `network` with master weights."""
    return Task(
        network, batch=words, loss=product, optimizer=OPTIMIZERS[optimizer], precision=precision, **settings
    )


def plan_of(found: ModelProfile, split: Sequence[int], *, microbatches: int = 2, **training: Any) -> Plan:
    """Return a plan whose stage s holds `split[s]` layers on device s."""
    size, edges = found.measurements[0].microbatch_size, [0, *itertools.accumulate(split)]
    precision = found.assumptions.precision
    return Plan(
        profile=found,
        cluster=Cluster.emulated((len(split), 1 << 30)),
        training=Training(
            batch_size=size * microbatches, microbatches=microbatches, precision=precision, **training
        ),
        stages=tuple(
            Stage(start=a, stop=b, grid=Grid.of(k)) for k, (a, b) in enumerate(itertools.pairwise(edges))
        ),
    )


def held(sample: MemorySample) -> dict[Category, int]:
    """Return the bytes by category at the highest moment of an action."""
    return dict(zip(CATEGORIES, sample.bytes, strict=True))


def trained(task: Task, plan: Plan) -> Trainer:
    """Return a trainer that has made the steps."""
    trainer = Trainer(task, plan)
    for _ in range(STEPS):
        trainer.step(task.batch(plan.training.batch_size))
    return trainer


AGREEING = dict.fromkeys(("simulated", "dry run", "measured"), True)


def accounts(task: Task, plan: Plan) -> dict[str, list[list[int]]]:
    """Return the peaks of every device in every step: simulated, in the dry run, and by a real run's meter."""
    traces = (simulate(plan, steps=STEPS), certify(task, plan, steps=STEPS), trained(task, plan).trace)
    return {
        trace.source: [
            [trace.devices[stage.device].step_peak_bytes(step) for step in range(STEPS)]
            for stage in plan.stages
        ]
        for trace in traces
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_sixteen_bytes_a_parameter(precision: str) -> None:
    """An update holds two bytes a parameter, two for its gradient, four for the copy and eight for AdamW's
    moments; AdamW's step counts take four bytes a tensor. A frozen parameter only takes its two bytes.
    """
    task, trainable, frozen = task_of(precision), parameters(network(), True), parameters(network(), False)
    plan = plan_of(profile(task, microbatch_size=4), (5,))
    for trace in (simulate(plan, steps=STEPS), certify(task, plan, steps=STEPS), trained(task, plan).trace):
        (update,) = [s for s in trace.devices[0].memory if s.action == "0STEP" and s.step == STEPS - 1]
        found = held(update)
        assert found[Category.PARAMETERS] == 2 * sum(trainable) + 2 * sum(frozen), trace.source
        assert found[Category.GRADIENTS] == 2 * sum(trainable), trace.source
        assert found[Category.OPTIMIZER] == 12 * sum(trainable) + 4 * len(trainable), trace.source


def test_gradients_in_single_precision_are_one_layers_at_a_time() -> None:
    """Under SGD without state, an update takes four bytes for each parameter of the largest layer, even if
    its parameters are in two groups.
    """
    options = lambda name, parameter: {"weight_decay": 0.0} if name.endswith("shift") else {}  # noqa: E731
    task = task_of("master-bfloat16", "sgd", groups=options)
    largest = max(sum(parameters(layer, True)) for layer in network())
    plan = plan_of(profile(task, microbatch_size=4), (5,))
    for trace in (simulate(plan, steps=STEPS), certify(task, plan, steps=STEPS), trained(task, plan).trace):
        updates = [sample for sample in trace.devices[0].memory if sample.action == "0STEP"]
        assert [held(update)[Category.TEMPORARY] for update in updates] == [4 * largest] * STEPS, trace.source


def test_the_profile_knows_the_copies() -> None:
    """A layer's copies exist before the first step, for all trained parameters, and the profile counts them."""
    (found,) = profile(task_of("master-bfloat16"), microbatch_size=4).measurements
    for cost, layer in zip(found.costs, network(), strict=True):
        sizes = parameters(layer, True)
        assert cost.parameter_bytes == 2 * sum(sizes) + 2 * sum(parameters(layer, False))
        assert cost.gradient_bytes == 2 * sum(sizes)
        assert cost.early_state_bytes == 4 * sum(sizes)
        assert cost.state_bytes == 12 * sum(sizes) + 4 * len(sizes)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("precision", "clip_norm", "split"),
    [("master-float16", None, (2, 3)), ("master-bfloat16", 1.0, (5,)), ("master-float16", 1.0, (1, 2, 2))],
)
def test_all_accounts_agree_where_stages_do(
    precision: str, clip_norm: float | None, split: tuple[int, ...]
) -> None:
    """Exchanges between stages, to skip an update or clip by a common norm, leave no memory on a device, in
    all accounts.
    """
    task = task_of(precision)
    plan = plan_of(profile(task, microbatch_size=4), split, clip_norm=clip_norm)
    measured = measured_peaks(task, plan, steps=STEPS)
    assert {source: found == measured for source, found in accounts(task, plan).items()} == AGREEING


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("optimizer", "split"),
    [
        ("adamw", (5,)),
        ("adamw", (2, 3)),
        ("adamw", (1, 2, 2)),
        ("sgd", (2, 3)),
        ("momentum", (2, 3)),
        ("adagrad", (2, 3)),
    ],
)
def test_all_accounts_agree(optimizer: str, split: tuple[int, ...]) -> None:
    """Simulator, dry run, a real run's meter and the allocator's events have the same peak of every device,
    to the byte, in the first step and a later one.
    """
    task = task_of("master-bfloat16", optimizer)
    plan = plan_of(profile(task, microbatch_size=4), split)
    measured = measured_peaks(task, plan, steps=STEPS)
    assert {source: found == measured for source, found in accounts(task, plan).items()} == AGREEING


@pytest.mark.parametrize("precision", sampled(PRECISIONS, often=["master-bfloat16"]))
def test_all_accounts_agree_on_a_transformer(precision: Any) -> None:
    """All accounts agree on a transformer, whose matrix products, attention and norms take temporary memory
    in half precision.
    """
    gpt = build("gpt", layers=1, hidden=32, heads=4, vocabulary=64, sequence=16, optimizer="adamw")
    task = replace(gpt, precision=precision)
    found = profile(task, microbatch_size=2)
    plan = plan_of(found, (2, len(found.layers) - 2))
    measured = measured_peaks(task, plan, steps=STEPS)
    assert {source: found == measured for source, found in accounts(task, plan).items()} == AGREEING


def test_simulator_and_dry_run_agree_on_the_kernels_of_cuda() -> None:
    """Simulator and dry run agree on CUDA's kernels; its optimizers update all tensors of a layer at once and
    allocate for all.
    """
    task = task_of("master-bfloat16")
    plan = plan_of(profile(task, microbatch_size=4, target="cuda"), (2, 3))
    traces = (simulate(plan, steps=STEPS), certify(task, plan, steps=STEPS))
    first, second = (
        [[d.step_peak_bytes(s) for s in range(STEPS)] for d in trace.devices] for trace in traces
    )
    assert first == second


@pytest.mark.parametrize("split", [(3,), (2, 1)])
def test_all_accounts_agree_on_shared_parameters(split: tuple[int, ...]) -> None:
    """All accounts agree on shared parameters: two layers of one stage share one copy; each of two stages has
    a copy.
    """
    task = Task(tied, batch=words, loss=product, precision="master-bfloat16")
    plan = plan_of(profile(task, microbatch_size=4), split)
    measured = measured_peaks(task, plan, steps=STEPS)
    assert {source: found == measured for source, found in accounts(task, plan).items()} == AGREEING
