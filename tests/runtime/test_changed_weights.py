"""Parameters that a forward changes, such as an embedding with a largest norm: trained as plainly, or
refused.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.lowering import lower
from pipefit.planner import plan as plan_of_profile
from pipefit.planner.memory_choices import Menu, Menus, Recipe, StageChoice, decisions_of
from pipefit.planner.problem import Question
from pipefit.runtime import Trainer
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, State, StateKind, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Grid
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from support.gallery_samples import sampled
from support.known_profiles import profile
from support.small_tasks import alone, batch_of, plan_of

SIZE = 4


class Follower(nn.Module):
    """A layer with an untrained weight that tracks another layer's weight and multiplies by it."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8)
        self.slow = nn.Parameter(self.own.weight.detach().clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.slow.lerp_(self.own.weight, 0.1)
        return self.own(x) - F.linear(x, self.slow)


def task(front: type[nn.Module] | None = None) -> Task:
    """Return a task over words, whose vectors are rescaled on lookup, or over rows through `front`."""

    def build() -> nn.Module:
        words = nn.Embedding(12, 8, max_norm=0.5), nn.Flatten(), nn.Linear(24, 8)
        return nn.Sequential(*(words if front is None else [front()]), nn.Tanh(), nn.Linear(8, 4))

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randint(0, 12, (size, 3)) if front is None else torch.randn(size, 8), torch.randn(
            size, 4
        )

    return Task(build, batch=batch, loss=F.mse_loss, optimizer=partial(torch.optim.SGD, lr=0.5, momentum=0.9))


@cache
def profiled(front: type[nn.Module] | None = None) -> ModelProfile:
    return profile(task(front), microbatch_size=(SIZE, SIZE // 2))


def planned(front: type[nn.Module] | None = None) -> Plan:
    return plan_of(task(front), (3, 2) if front is None else (1, 2), size=SIZE, profiled=profiled(front))


def deciding(plan: Plan, kind: StateKind, what: What = What.OFFLOAD) -> Plan:
    """Return the plan with one state of the first layer on the host."""
    state = State(start=0, stop=1, kind=kind)
    return replace(plan, decisions=(Decision(stage=0, subject=state, what=what, place=parse_place("host")),))


def twofold(plan: Plan) -> Plan:
    """Return the plan with two replicas of the first stage."""
    first, *others = plan.stages
    later = [replace(stage, grid=Grid.of(2)) for stage in others]
    stages = (replace(first, grid=Grid(devices=(0, 1), data=2)), *later)
    return replace(plan, stages=stages, cluster=Cluster.emulated((3, 1 << 30)))


def under(plan: Plan, schedule: str) -> Plan:
    return replace(plan, training=replace(plan.training, schedule=schedule))


@pytest.mark.parametrize("moves", [False, True], ids=["stays", "optimizer state moves"])
def test_the_change_is_plain_trainings(moves: bool) -> None:
    """Losses and weights of three steps are bitwise those of a plain loop."""
    plan = planned()
    chosen, trained = deciding(plan, "optimizer") if moves else plan, task()
    trainer, (losses, expected) = Trainer(trained, chosen), alone(task(), plan, steps=3)
    assert [trainer.step(batch_of(trained, plan, step)) for step in range(3)] == losses
    assert all(torch.equal(trainer.state_dict()[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (lambda: under(planned(), "pipedream"), "schedule pipedream has several versions of it"),
        (lambda: deciding(planned(), "optimizer", What.UPDATE), r"elsewhere too \(stage 0: update optimizer"),
        (lambda: deciding(planned(), "parameters"), r"elsewhere too \(stage 0: offload parameters"),
        (lambda: deciding(planned(Follower), "parameters"), r"elsewhere too \(stage 0: offload parameters"),
    ],
)
def test_what_has_another_copy_is_refused(plan, why: str) -> None:  # type: ignore[no-untyped-def]
    """A plan with a second copy of the parameter is refused by name, since that copy would miss the change."""
    with pytest.raises(
        UsageError, match=f"changes its parameter .*, but .*{why}.*, which would miss the change"
    ):
        lower(plan())


def test_float32_copies_are_refused() -> None:
    """float32 master copies are refused: an update would overwrite the forward's change."""
    trained = replace(
        task(), precision="master-bfloat16", loss=lambda out, y: F.mse_loss(out.float(), y.float())
    )
    plan = plan_of(trained, (5,), size=SIZE, profiled=profile(trained, microbatch_size=SIZE))
    with pytest.raises(
        UsageError, match=r"master-bfloat16 updates a float32 copy of it.*use precision mixed-bfloat16"
    ):
        lower(plan)


class Shrinking(nn.Linear):
    """A linear layer that shrinks its weight before it computes with it."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)


def test_half_precision_copies_are_refused() -> None:
    """Half-precision copies are refused: autocast would cast the changed weight, a shared copy has the old
    one.
    """
    trained = replace(task(Shrinking), precision="mixed-bfloat16")
    plan = plan_of(trained, (3,), size=SIZE, profiled=profile(trained, microbatch_size=SIZE))
    with pytest.raises(
        UsageError, match=r"mixed-bfloat16 computes with a half-precision copy .*use precision float32"
    ):
        lower(plan)


def test_what_is_not_trained_has_one_version() -> None:
    """An untrained tensor that a forward changes has one version under an asynchronous schedule, and is
    allowed.
    """
    assert lower(under(planned(Follower), "pipedream"))


class Counting(nn.Module):
    """A layer that multiplies by the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


@pytest.mark.parametrize("front", [None, Follower, Counting])
def test_replicas_are_refused(front: type[nn.Module] | None) -> None:
    """Replicas are refused: each would change its copy of the parameter or number, trained or not."""
    with pytest.raises(UsageError, match=r"changes '\w+', which is not a buffer, with different results in"):
        lower(twofold(planned(front)))


class Centred(nn.Embedding):
    """An embedding whose vectors are centred by a mean that follows the looked-up words."""

    def __init__(self) -> None:
        super().__init__(64, 64)
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, words: Tensor) -> Tensor:
        found = super().forward(words)
        self.mean.lerp_(found.detach().mean((0, 1)), 0.1)
        return found - self.mean


FRONTS = {"scaled": partial(nn.Embedding, 64, 64, max_norm=1), "mean": Centred}


@pytest.mark.parametrize("name", sampled(FRONTS, often=list(FRONTS)[:1]))
def test_planners_choose_no_replicas_of_it(name: str) -> None:
    """Planners choose replicas for plain layers, but hold a layer that changes its weights once."""

    def build() -> nn.Module:
        return nn.Sequential(FRONTS[name](), *(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 4))

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randint(0, 64, (size, 32)), torch.randn(size, 32, 4)

    found = profile(Task(build, batch=batch, loss=F.mse_loss), microbatch_size=(8, 4))
    plan = plan_of_profile(found, Cluster.emulated((2, 400_000)), batch_size=32)
    assert [stage.grid.data for stage in plan.stages] == [1, 1]


def test_planners_leave_it_on_its_device() -> None:
    """If the host updates blocks, only this layer's optimizer state is offloaded; its parameters stay on the
    device.
    """
    usual, other = (Menu(n, n + 1, (Recipe(),), (), ((n, n + 1),)) for n in (0, 1))
    choice = StageChoice.keep(2)._replace(states=frozenset({0, 1}), updates=frozenset({0}))

    def chosen(menu: Menu, **changed: Any) -> list[str]:
        return [
            str(one)
            for one in decisions_of(0, choice._replace(**changed), [menu, other], parse_place("host"))
        ]

    moved = "stage 0: offload optimizer of layer 1 to host"
    assert chosen(usual) == ["stage 0: update optimizer of layer 0 on host", moved]
    stays = usual._replace(stays=True)
    assert chosen(stays) == ["stage 0: offload optimizer of layer 0 to host", moved]
    away = {"updates": frozenset[int](), "states": frozenset[int](), "parameters": 2}
    assert len(chosen(usual, **away)) == 2
    assert chosen(stays, **away) == ["stage 0: offload parameters of layer 1 to host"]
    plan = planned()
    menus = Menus(Question(profile=plan.profile, cluster=plan.cluster, training=plan.training)).blocks
    assert [menu.stays for menu in menus] == [True, False, False, False, False]
