"""Losses that change their state, such as a centre: trained as plainly, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.lowering import lower
from pipefit.planner import plan as plan_of_profile
from pipefit.runtime import Trainer, certify
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from support.known_profiles import profile
from support.small_tasks import batch_of, plan_of, task_of


class Centred(nn.Module):
    """The distance from targets and a centre that follows the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.ones(4))

    def follow(self, outputs: Tensor) -> None:
        """Move the centre in place."""
        self.centre.lerp_(outputs.detach().mean(0), 0.5)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.follow(outputs)
        return (outputs - self.centre - targets).square().mean()


class Replacing(Centred):
    """A loss that replaces its centre by another tensor, as in DINO."""

    def follow(self, outputs: Tensor) -> None:
        """Move the centre out of place."""
        self.centre = 0.5 * self.centre + 0.5 * outputs.detach().mean(0)


class Scaled(Centred):
    """A loss whose centre is a saved factor; autograd does not see its changes."""

    def follow(self, outputs: Tensor) -> None:
        """Move the centre without autograd's knowledge."""
        self.centre.data.lerp_(outputs.detach().mean(0), 0.5)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.follow(outputs)
        return (outputs * self.centre - targets).square().mean()


def closed() -> Callable[[Any, Any], Tensor]:
    """Return a function with a centre in its closure."""
    centre = torch.ones(4)

    def distance(outputs: Tensor, targets: Tensor) -> Tensor:
        centre.lerp_(outputs.detach().mean(0), 0.5)
        return (outputs - centre - targets).square().mean()

    return distance


def following() -> Callable[[Any, Any], Tensor]:
    """Replace the centre by another tensor."""
    kept = {"centre": torch.ones(4)}

    def distance(outputs: Tensor, targets: Tensor) -> Tensor:
        kept["centre"] = 0.5 * kept["centre"] + 0.5 * outputs.detach().mean(0)
        return (outputs - kept["centre"] - targets).square().mean()

    return distance


class Warming(nn.Module):
    """A loss whose weight rises from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.weights = 0, [1.0]

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        self.weights.append(self.calls / 10)
        return (outputs - targets).square().mean() * sum(self.weights)


def noting() -> Callable[[Any, Any], Tensor]:
    """Return a loss that records values without computing with them."""
    kept = {"last": torch.zeros(())}

    def distance(outputs: Tensor, targets: Tensor) -> Tensor:
        kept["last"] = (outputs - targets).square().mean()
        return kept["last"]

    return distance


def task(loss: Callable[[], Callable[[Any, Any], Any]]) -> Task:
    """Return two layers with this loss."""
    return task_of(lambda: [nn.Linear(8, 8), nn.Linear(8, 4)], loss=loss())


@cache
def profiled(loss: Callable[[], Callable[[Any, Any], Any]]) -> ModelProfile:
    return profile(task(loss), microbatch_size=(4, 2), threads=torch.get_num_threads())


def planned(loss: Callable[[], Callable[[Any, Any], Any]], **training: Any) -> Plan:
    return plan_of(task(loss), (1, 1), size=4, microbatches=3, profiled=profiled(loss), **training)


LOSSES = {
    Centred: "'centre' in every forward",
    Replacing: "'centre' in every forward",
    closed: "a tensor in every forward",
    following: "a tensor in every forward",
    Warming: "'calls', which is not a buffer",
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("loss", [*LOSSES, noting])
def test_the_centre_follows_as_plainly(loss: Callable[[], Any]) -> None:
    """The centre follows plain training over two steps of three microbatches in flight, after a dry run,
    which leaves the loss unchanged.
    """
    plan = planned(loss, schedule="gpipe")
    trained = task(loss)
    certify(trained, plan)
    trainer = Trainer(trained, plan)
    ours = [trainer.step(batch_of(trained, plan, step)) for step in range(2)]
    torch.manual_seed(0)
    plain = task(loss)
    module, theirs = plain.build(), []
    optimizer = plain.optimizer(module.parameters())
    for step in range(2):
        found = []
        for inputs, targets in zip(*(part.chunk(3) for part in batch_of(plain, plan, step)), strict=True):
            found.append(plain.loss(module(inputs), targets))
            (found[-1] / 3).backward()
        theirs.append(float(torch.stack(found).detach().mean()))
        optimizer.step()
        optimizer.zero_grad()
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert all(
        torch.allclose(trainer.state_dict()[name], tensor) for name, tensor in module.state_dict().items()
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("loss", LOSSES)
def test_it_is_neither_recomputed_nor_in_replicas(loss: Callable[[], Any]) -> None:
    """A loss with state is refused by name for recomputation and replicas, and planners leave it alone."""
    what = LOSSES[loss]
    with pytest.raises(UsageError, match=f"cannot recompute the loss, which changes {what}"):
        lower(planned(loss, recompute="always"))
    plan = planned(loss)
    twofold = replace(plan.stages[1], grid=Grid(devices=(1, 2), data=2))
    with pytest.raises(UsageError, match=f"2 replicas, but the loss changes {what}"):
        lower(replace(plan, stages=(plan.stages[0], twofold), cluster=Cluster.emulated((3, 1 << 30))))
    with pytest.raises(UsageError, match=f"the loss changes {what}"):
        plan_of_profile(
            profiled(loss), Cluster.emulated((4, 1 << 30)), batch_size=16, planner="exact", data=2
        )
    found = plan_of_profile(profiled(loss), Cluster.emulated((2, 1 << 30)), batch_size=16)
    assert found.stages[-1].grid.data == 1


def test_what_nobody_computes_with_may_change() -> None:
    """State that does not enter the computation may change, recomputed and in replicas."""
    lower(planned(noting, recompute="always"))
    assert plan_of_profile(profiled(noting), Cluster.emulated((2, 1 << 30)), batch_size=16, data=2)


@pytest.mark.compares_plans
def test_a_change_that_autograd_does_not_see_is_refused() -> None:
    """A loss that saves a tensor and changes it unseen by autograd is refused at the start, if several
    microbatches are in flight.
    """
    with pytest.raises(UsageError, match="differently by this plan than plainly"):
        Trainer(task(Scaled), planned(Scaled, schedule="gpipe"))
