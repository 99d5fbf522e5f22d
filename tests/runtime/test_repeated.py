"""Folded dry runs: four of many equal layers give the memory of all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.capture.sample import sample
from pipefit.fake_cuda.chain import fake_chain
from pipefit.fake_cuda.target import FakeTarget
from pipefit.lowering import SCHEDULES, lower
from pipefit.lowering.passes.recomputation import RECOMPUTE, recompute_decisions
from pipefit.models import build
from pipefit.models.hugging_face import hf
from pipefit.runtime import certify
from pipefit.runtime.dry_run import certify as dry_run
from pipefit.runtime.dry_run.layers import Shortened
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Microbatches, Run, What
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from support.gallery_samples import sampled
from support.huggingface_models import TINY
from support.known_profiles import profile


class Residual(nn.Module):
    """x + f(x), with a factor that autograd keeps."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        """Take any shape."""
        passed: Tensor = x + self.parts(x) * 0.5
        return passed


class Carrying(nn.Module):
    """A layer that passes on a second value unchanged, and uses it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, values: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Take and return two values of shape (batch, width)."""
        x, carried = values
        return torch.tanh(self.linear(x)) * carried, carried


class Split(nn.Module):
    """A layer that makes two values from one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (batch, width) twice."""
        return x * 2.0, torch.sigmoid(x)


class First(nn.Module):
    """A layer that makes one value from two."""

    def forward(self, values: tuple[Tensor, Tensor]) -> Tensor:
        """Return the first value."""
        return values[0] + 1.0


class Shift(nn.Module):
    """A layer that adds its parameter, which its backward does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, 8)."""
        return x + self.bias


class Turns(nn.Module):
    """A linear layer; every other instance makes a large temporary, by a setting that equals the others'."""

    made = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self._zero = 0.0 if next(self.made) % 2 else -0.0

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, 8)."""
        found: Tensor = self.linear(x)
        if math.copysign(1.0, self._zero) < 0:
            x.detach().repeat(64, 1)
        return found


class AtOnce(torch.optim.Optimizer):
    """An optimizer that shrinks each parameter independently, and makes all updates in one call."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update once."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter in parameters:
            parameter.mul_(0.99)
        torch._foreach_sub_(parameters, torch._foreach_mul([p.grad for p in parameters], 0.1))


def stack(block: Callable[[], list[nn.Module]], count: int = 10) -> Callable[[], nn.Module]:
    """Return `count` copies of the layers of `block`, between others."""

    def build() -> nn.Module:
        middle = [layer for _ in range(count) for layer in block()]
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), *middle, nn.Linear(8, 4))

    return build


BLOCKS: dict[str, Callable[[], list[nn.Module]]] = {
    "residual": lambda: [
        Residual(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Dropout(0.1))
    ],
    "buffers": lambda: [Residual(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))],
    "three together": lambda: [nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8)],
    "plain": lambda: [nn.Linear(8, 8)],
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "at once": AtOnce,
}


def task_of(module: Callable[[], nn.Module], optimizer: str = "adamw", **settings: Any) -> Task:
    """Return a task with rows of 8 numbers."""

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 8), torch.randn(size, 4)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output.float(), target.float())

    return Task(module, batch=batch, loss=loss, optimizer=OPTIMIZERS[optimizer], name="stack", **settings)


def carrying(count: int = 10) -> nn.Module:
    """Return layers that pass on a tuple."""
    return nn.Sequential(
        nn.Linear(8, 8), Split(), *(Carrying(8) for _ in range(count)), First(), nn.Linear(8, 4)
    )


def folds(task: Task, plan: Plan, *, whole: bool = False) -> bool:
    """Return whether the folded dry run of a plan equals the unfolded one in every sample.

    It must not run all layers; with `whole`, it must fall back to running them all.
    """
    everything = dry_run.Rehearsal._everything
    with mock.patch.object(dry_run.Rehearsal, "_everything", autospec=True, side_effect=everything) as again:
        trace = certify(task, plan)
    assert executed(task, plan) < len(plan.profile.layers)
    return trace == certify(task, plan, fold=False) and again.called == whole


def drawn(found: ModelProfile, rng: Random) -> Plan:
    """Return any split over up to two devices, under any schedule, with up to four microbatches and any
    recomputation.
    """
    layers, count, number = len(found.layers), rng.choice([1, 1, 2]), rng.randint(1, 4)
    cuts = [0, *sorted(rng.sample(range(1, layers), count - 1)), layers]
    stages = tuple(
        Stage(start=start, stop=stop, grid=Grid.of(device))
        for device, (start, stop) in enumerate(itertools.pairwise(cuts))
    )
    schedule = rng.choice(sorted(SCHEDULES))
    size = found.measurements[0].microbatch_size
    decisions = (
        recompute_decisions(stages, found.edges, rng.choice(RECOMPUTE), schedule, number)
        if rng.random() < 0.4
        else ()
    )
    if rng.random() < 0.4:
        start = rng.randint(0, layers - 1)
        stage = next(n for n, s in enumerate(stages) if s.start <= start < s.stop)
        run = Run(start=start, stop=rng.randint(start + 1, stages[stage].stop))
        share = Microbatches(rng.randint(1, 3), 3, rng.randint(0, 2))
        decisions = (Decision(stage=stage, subject=run, what=What.RECOMPUTE, microbatches=share),)
    return Plan(
        profile=found,
        cluster=Cluster.emulated((2, 1 << 30)),
        training=Training(
            batch_size=size * number,
            microbatches=number,
            schedule=schedule,
        ),
        stages=stages,
        decisions=decisions,
    )


def in_one_stage(found: ModelProfile, microbatches: int = 2, clip_norm: float | None = None) -> Plan:
    """Place all layers on one device."""
    return Plan(
        profile=found,
        cluster=Cluster.emulated((1, 1 << 30)),
        training=Training(
            batch_size=2 * microbatches,
            microbatches=microbatches,
            precision=found.assumptions.precision,
            clip_norm=clip_norm,
        ),
        stages=(Stage(start=0, stop=len(found.layers), grid=Grid.of(0)),),
    )


def executed(task: Task, plan: Plan) -> int:
    """Return the number of layers that a dry run executes."""
    with FakeTarget("cpu") as fake:
        chain = fake_chain(task, fake, sample(task, plan.training.microbatch_size))
        return len(Shortened.of(task, plan, lower(plan), chain).chain.layers)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("target", "seeds"), [("cpu", (5,)), ("cuda", (8,))])
@pytest.mark.parametrize("block", sorted(BLOCKS))
def test_a_folded_dry_run_tells_what_a_whole_one_does(
    block: str, target: Any, seeds: tuple[int, ...]
) -> None:
    """A folded dry run equals a whole one in every sample of every action, by category, under any plan."""
    task = task_of(stack(BLOCKS[block]))
    found = profile(task, microbatch_size=2, target=target)
    for seed in seeds:
        assert folds(task, drawn(found, Random(seed)))


def test_values_that_pass_through_the_layers_are_nobodys() -> None:
    """Layers that take and return several values, one of them unchanged, are folded."""
    task = task_of(carrying)
    found = profile(task, microbatch_size=2)
    for seed in (0, 5):
        assert folds(task, drawn(found, Random(seed)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adagrad"])
def test_updates_of_equal_layers_are_folded(optimizer: str) -> None:
    """Updates of equal layers are folded: without state, with state from the first update, and with state
    from the start.
    """
    task = task_of(stack(BLOCKS["residual"]), optimizer)
    assert folds(task, in_one_stage(profile(task, microbatch_size=2, target="cuda")))


@pytest.mark.parametrize(
    "precision",
    sampled(
        ["bfloat16", "mixed-bfloat16", "mixed-float16", "master-bfloat16", "master-float16"],
        often=["master-float16"],
    ),
)
def test_stages_that_agree_are_folded_in_every_precision(precision: Any) -> None:
    """Stages are folded in every precision: with global gradient norms, also of folded layers, loss scaling
    and master weights.
    """
    task = task_of(stack(BLOCKS["residual"]), precision=precision)
    assert folds(task, in_one_stage(profile(task, microbatch_size=2), clip_norm=1.0))


@pytest.mark.gallery
@pytest.mark.parametrize(
    "make",
    [
        partial(build, "gpt", layers=5, hidden=32, heads=2, sequence=8, vocabulary=32),
        pytest.param(
            partial(hf, "gpt2", **{**TINY["gpt2"], "n_layer": 5}, sequence=8), marks=pytest.mark.gallery
        ),
        pytest.param(
            partial(hf, "llama", **{**TINY["llama"], "num_hidden_layers": 5}, sequence=8),
            marks=pytest.mark.gallery,
        ),
    ],
    ids=["gpt", "gpt2", "llama"],
)
def test_transformers_are_folded(make: Callable[[], Task]) -> None:
    """Transformers are folded: four of five blocks are run, in models of the zoo with modules as layers and
    in two traced models of Hugging Face with a dozen layers a block; llama shares buffers.
    """
    task = make()
    costs = profile(task, microbatch_size=2, target="cuda")
    plan = in_one_stage(costs, microbatches=1)
    assert folds(task, plan)
    inside = max(block.layers for block in costs.blocks) if costs.blocks else 1
    assert executed(task, plan) == len(costs.layers) - inside


def test_parts_of_a_block_are_folded_together() -> None:
    """A repeated block may consist of several layers: here four."""
    task = task_of(stack(BLOCKS["three together"], 50))
    assert executed(task, in_one_stage(profile(task, microbatch_size=2))) == 2 + 4 * 3 + 1


def test_the_layers_that_are_run_do_not_grow_with_the_model() -> None:
    """Four hundred equal layers execute no more layers than fifty."""
    counts = []
    for number in (50, 400):
        task = task_of(stack(BLOCKS["plain"], number))
        counts.append(executed(task, in_one_stage(profile(task, microbatch_size=2))))
    assert counts == [2 + 4 + 1] * 2


def test_a_repeat_ends_where_what_is_recomputed_does() -> None:
    """A repeat ends at the boundary of a recomputed run: of the equal layers 2 to 11, four each of 2 to 6 and
    of 7 to 11 are executed.
    """
    task = task_of(stack(BLOCKS["plain"], 10))
    plan = in_one_stage(profile(task, microbatch_size=2))
    decision = Decision(stage=0, subject=Run(start=7, stop=12), what=What.RECOMPUTE)
    plan = replace(plan, decisions=(decision,))
    assert executed(task, plan) == 2 + 4 + 4 + 1
    assert folds(task, plan)


def test_what_can_be_told_apart_is_not_folded() -> None:
    """A layer with a hook, a shared parameter or another optimizer option, here the sixth of eleven, is not
    folded.
    """

    def hooked() -> nn.Sequential:
        model = stack(BLOCKS["plain"], 11)()
        model[7].register_forward_hook(lambda *_: None)
        return model

    def tied() -> nn.Sequential:
        model = stack(BLOCKS["plain"], 11)()
        model[7].weight = model[0].weight
        return model

    def options(name: str, _: nn.Parameter) -> dict[str, Any]:
        return {"weight_decay": 0.0} if name.startswith("7.") else {}

    for task in (task_of(hooked), task_of(tied), task_of(stack(BLOCKS["plain"], 11), groups=options)):
        plan = in_one_stage(profile(task, microbatch_size=2))
        assert executed(task, plan) == 4 + 1 + 4 + 3
        assert folds(task, plan)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "task",
    [
        task_of(stack(lambda: [Shift()])),
        task_of(stack(lambda: [Turns()], 8)),
        task_of(stack(BLOCKS["plain"]), "at once"),
    ],
    ids=["no parameter in the backward", "other values than its neighbour", "one update of all layers"],
)
def test_layers_that_turn_out_unlike_are_all_run(task: Task) -> None:
    """Layers that differ only while they run trigger a second, unfolded dry run with the right samples."""
    plan = in_one_stage(profile(task, microbatch_size=2))
    assert folds(task, plan, whole=True)
