"""Frozen parameters: their gradients are not made, summed, sent or kept, and the numbers are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.lowering import lower
from pipefit.lowering.passes.recomputation import Recompute
from pipefit.runtime import Trainer, certify
from pipefit.schema.actions import Kind
from pipefit.schema.plan import Plan
from pipefit.simulator import simulate
from support.allocator_events import measured_peaks
from support.gallery_samples import sampled
from support.known_profiles import profile
from support.small_tasks import alone, batch_of, plan_of, task_of
from support.step_peaks import step_peaks

STEPS = 2


class Adapted(nn.Module):
    """A frozen weight that all layers share, plus a trained one of low rank."""

    def __init__(self, base: nn.Parameter) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.base) + self.up(self.down(x)))


class Unembedding(nn.Module):
    """A head whose weight is an embedding's."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.weight = table.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def frozen(module: nn.Module) -> nn.Module:
    """Return the module with all parameters frozen."""
    return module.requires_grad_(False)


def adapted() -> list[nn.Module]:
    """Return five layers around one frozen weight."""
    base = nn.Parameter(torch.randn(32, 32) * 0.1, requires_grad=False)
    return [Adapted(base) for _ in range(5)]


def tied() -> list[nn.Module]:
    """Return a frozen embedding, also the head's weight, around trained layers."""
    table = nn.Embedding(40, 16)
    frozen(table)
    return [table, nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), Unembedding(table)]


def tied_ends() -> list[nn.Module]:
    """Return a frozen embedding around layers with only the middle one trained."""
    table = nn.Embedding(40, 16)
    frozen(table)
    return [
        table,
        frozen(nn.Linear(16, 16)),
        nn.Linear(16, 16),
        frozen(nn.Linear(16, 16)),
        Unembedding(table),
    ]


def feature_extractor() -> list[nn.Module]:
    """Return frozen layers before trained ones."""
    return [
        frozen(nn.Linear(32, 32)),
        nn.Tanh(),
        frozen(nn.Linear(32, 32)),
        nn.Linear(32, 16),
        nn.Linear(16, 32),
    ]


def frozen_end() -> list[nn.Module]:
    """Return frozen layers after trained ones."""
    return [nn.Linear(32, 32), nn.Tanh(), frozen(nn.Linear(32, 32)), nn.Tanh(), frozen(nn.Linear(32, 32))]


def tokens(layers: Callable[[], Sequence[nn.Module]]) -> Task:
    """Return a task over tokens of a vocabulary of 40."""
    return Task(
        lambda: nn.Sequential(*layers()),
        batch=lambda size: (torch.randint(0, 40, (size, 6)), torch.randint(0, 40, (size, 6))),
        loss=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        name="tokens",
    )


def rows(layers: Callable[[], Sequence[nn.Module]]) -> Task:
    """Return a task over rows of 32 numbers."""
    return task_of(layers, inputs=32, outputs=32, optimizer=partial(torch.optim.Adam, lr=0.01))


TASKS: dict[str, Callable[[], Task]] = {
    "adapters around one weight": lambda: rows(adapted),
    "tied embedding": lambda: tokens(tied),
    "tied embedding, frozen ends": lambda: tokens(tied_ends),
    "feature extractor": lambda: rows(feature_extractor),
    "frozen end": lambda: rows(frozen_end),
}
SPLITS = ([5], [2, 3], [1, 3, 1])


def plans(task: Task, recompute: Recompute) -> Iterator[Plan]:
    """Return plans of one, two and three stages, each on a separate device."""
    profiled = profile(task, microbatch_size=4, threads=1)
    for split in SPLITS:
        yield plan_of(task, split, size=4, microbatches=2, recompute=recompute, profiled=profiled)


RECOMPUTED = [(name, recompute) for name in TASKS for recompute in ("never", "always")]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "recompute"), sampled(RECOMPUTED, often=(*RECOMPUTED[::4], *RECOMPUTED[3::4]))
)
def test_frozen_parameters_take_their_own_bytes_alone(name: str, recompute: Recompute) -> None:
    """Frozen parameters only take their own bytes: on every split, simulator, dry run and meter equal the
    allocator in every step.
    """
    task = TASKS[name]()
    for plan in plans(task, recompute):
        found = step_peaks(task, plan, steps=STEPS)
        assert found.simulated == found.dry == found.metered == found.allocated, plan.split


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "recompute"), sampled(RECOMPUTED, often=(*RECOMPUTED[1::4], *RECOMPUTED[2::4]))
)
def test_frozen_parameters_change_no_number(name: str, recompute: Recompute) -> None:
    """On every split, losses and parameters are bitwise plain training's. Afterwards no frozen parameter has
    a gradient or optimizer state, and stages do not all-reduce one.
    """
    task = TASKS[name]()
    for plan in plans(task, recompute):
        torch.manual_seed(0)
        trainer = Trainer(task, plan)
        losses, wanted = alone(task, plan, STEPS)
        assert [trainer.step(batch_of(task, plan, step)) for step in range(STEPS)] == losses
        found = trainer.state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
        assert_untrained(trainer)
        assert not [a for actions in lower(plan).actions for a in actions if a.kind is Kind.REDUCE]


def assert_untrained(trainer: Trainer) -> None:
    """Check that frozen parameters are without gradients and unknown to their stage's optimizer."""
    stages = [stage for runner in trainer.runners for stage in runner.stages.values()]
    still = [(stage, p) for stage in stages for p in stage.parameters if not p.requires_grad]
    assert still
    assert all(p.grad is None for _, p in still)
    assert not any(stage.optimizer and p in stage.optimizer.state for stage, p in still)


def test_stages_of_one_device_may_share_a_frozen_parameter() -> None:
    """Stages of one device may share a frozen parameter: each has a copy, without summed gradients."""
    task = TASKS["tied embedding"]()
    plan = plan_of(task, [2, 3], schedule="gpipe", devices=1)
    dry = certify(task, plan, steps=STEPS).devices[0]
    simulated = simulate(plan, steps=STEPS).devices[0]
    wanted = measured_peaks(task, plan, steps=STEPS)[0]
    assert [dry.step_peak_bytes(step) for step in range(STEPS)] == wanted
    assert [simulated.step_peak_bytes(step) for step in range(STEPS)] == wanted


def test_what_is_unfrozen_later_is_refused() -> None:
    """A parameter unfrozen after planning is refused, since neither plan nor optimizer includes it; frozen
    again for the step it trains.
    """
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    module[0].requires_grad_(False)
    task = Task(
        module,
        batch=lambda size: (torch.randn(size, 8), torch.randn(size, 4)),
        loss=F.mse_loss,
        optimizer=torch.optim.SGD,
    )
    trainer = Trainer(task, plan := plan_of(task, [1, 2]))
    trainer.step(batch_of(task, plan))
    module[0].requires_grad_(True)
    with pytest.raises(
        UsageError, match=r"parameter 0\.weight was frozen when the plan was made.* plan again"
    ):
        trainer.step(batch_of(task, plan))
    module[0].requires_grad_(False)
    trainer.step(batch_of(task, plan))
