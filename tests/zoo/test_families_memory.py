"""Peaks of the convolutional families over three stages: allocator, dry run and simulator agree."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any

import pytest

from pipefit.capture import Task
from pipefit.lowering.passes.recomputation import RECOMPUTE, Recompute, recompute_decisions
from pipefit.models import build
from pipefit.runtime import certify
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import simulate
from support.gallery_samples import sampled
from support.known_profiles import profile
from support.random_trainings import Account, Case, accounts

AMOEBANET: dict[str, Any] = {"layers": 3, "filters": 16, "num_classes": 5, "image_size": 64}
UNET: dict[str, Any] = {"depth": 2, "width": 4, "convolutions": 2, "num_classes": 3, "image_size": 16}
RESNET: dict[str, Any] = {"blocks": (1, 2), "width": 4, "num_classes": 5, "image_size": 33}


def accounts_of(
    name: str,
    settings: dict[str, Any],
    *,
    split: tuple[int, ...] | None = None,
    size: int = 2,
    schedule: str = "1f1b",
) -> list[Account]:
    """Run two steps of three microbatches, over three equal stages without a given split."""
    task = build(name, **settings)
    found = profile(task, microbatch_size=size)
    layers = len(found.layers)
    cuts = [0, *itertools.accumulate(split)] if split else [0, layers // 3, 2 * layers // 3, layers]
    plan = Plan(
        profile=found,
        cluster=Cluster.emulated((4, 1 << 34)),
        training=Training(batch_size=3 * size, microbatches=3, schedule=schedule),
        stages=tuple(
            Stage(start=start, stop=stop, grid=Grid.of(device))
            for device, (start, stop) in enumerate(itertools.pairwise(cuts))
        ),
    )
    return list(accounts(Case(name=name, settings=settings, task=task, plan=plan)))


FAMILIES: list[tuple[str, dict[str, Any], str]] = [
    ("amoebanet", AMOEBANET, "1f1b"),
    ("unet", UNET, "gpipe"),
    ("resnet", RESNET | {"inplace": False, "optimizer": "adamw"}, "1f1b"),
    ("unet", UNET | {"dropout": 0.0, "optimizer": "adamw"}, "1f1b"),
    ("resnet", RESNET, "gpipe"),
]


@pytest.mark.parametrize(("name", "settings", "schedule"), sampled(FAMILIES, often=FAMILIES[1:2]))
def test_three_accounts_agree(name: str, settings: dict[str, Any], schedule: str) -> None:
    """The dry run's peak of every device in every step is the allocator's to the byte, the simulator's to 0.1
    %.
    """
    found = accounts_of(name, settings, schedule=schedule)
    assert len(found) == 6
    assert [account.dry_run_bytes for account in found] == [account.oracle_bytes for account in found]
    assert max(abs(account.simulator_error) for account in found) <= 0.001


@lru_cache
def amoebanet() -> tuple[Task, ModelProfile]:
    """Return a small AmoebaNet and its costs."""
    task = build("amoebanet", **AMOEBANET)
    return task, profile(task, microbatch_size=2)


def is_exact_when_cut(ends: list[int], recompute: Recompute) -> bool:
    """Return whether the simulator's peaks equal the dry run's, to the byte, with stages between these
    ends.
    """
    task, found = amoebanet()
    stages = tuple(
        Stage(start=start, stop=stop, grid=Grid.of(number))
        for number, (start, stop) in enumerate(itertools.pairwise(ends))
    )
    plan = Plan(
        profile=found,
        cluster=Cluster.emulated((len(stages), 1 << 34)),
        training=Training(batch_size=6, microbatches=3, schedule="gpipe"),
        stages=stages,
        decisions=recompute_decisions(stages, found.edges, recompute, "gpipe", 3),
    )
    return certify(task, plan).peak_bytes == simulate(plan, steps=2).peak_bytes


@pytest.mark.gallery
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_the_simulator_is_exact_where_every_layer_is_a_stage(recompute: Recompute) -> None:
    """Batch norm's buffers are copied and freed as counted, at every boundary of a stage; the last layer, the
    classifier, uses one of two values.
    """
    assert is_exact_when_cut([*range(len(amoebanet()[1].layers) + 1)], recompute)


@pytest.mark.gallery
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_the_simulator_is_exact_wherever_and_however(recompute: Recompute) -> None:
    """Every layer except the first is once a stage between longer ones, and the classifier is one."""
    layers = len(amoebanet()[1].layers)
    ends = [sorted({0, cut, min(cut + 1, layers - 1), layers - 1, layers}) for cut in range(1, layers)]
    assert [one for one in ends if not is_exact_when_cut(one, recompute)] == []


PASSING: dict[str, Any] = UNET | {"depth": 3, "width": 2, "channels": 1, "dropout": 0.0}


def test_the_dry_run_follows_gradients_that_pass_by() -> None:
    """A skip's gradient, part of a larger one, crosses the layers inside: the dry run counts the storage that
    it keeps alive.
    """
    found = accounts_of("unet", PASSING, split=(12, 3, 6), size=1, schedule="gpipe")
    assert [account.dry_run_bytes for account in found] == [account.oracle_bytes for account in found]


@pytest.mark.gallery
def test_the_simulator_follows_gradients_that_pass_by() -> None:
    """The simulator, too, counts the whole larger gradient as long as a part of it is in use."""
    found = accounts_of("unet", PASSING, split=(12, 3, 6), size=1, schedule="gpipe")
    assert max(abs(account.simulator_error) for account in found) <= 0.001
