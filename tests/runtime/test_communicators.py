"""How many communicators a worker is reckoned to make: as many as it makes."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from unittest import mock

import pytest
import torch

from pipefit.lowering import lower
from pipefit.memory.arenas import communicators
from pipefit.models import build
from pipefit.profiler import profile
from pipefit.runtime.comm import transport
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from tiny import plan_of
from wide import wide, wide_profile


@pytest.fixture(scope="module")
def found() -> ModelProfile:
    """What the layers of `wide` cost on a GPU."""
    return wide_profile()


def made(plan: Plan, device: int) -> int:
    """The groups of `torch.distributed` that the worker of a device makes and is in, and the one of all workers."""
    groups: list[list[int]] = []
    rank = [plan.stages[stages[0]].device for stages in plan.ranks].index(device)
    with (
        mock.patch.object(transport.dist, "new_group", lambda members, **_: groups.append(members)),
        mock.patch.object(transport.dist, "get_rank", return_value=rank),
        mock.patch.object(transport, "check_members"),  # there are none to talk to
        mock.patch.object(transport.Network, "warm_up"),
    ):
        transport.connect(plan, lower(plan), torch.device("cpu"), timedelta(seconds=1))
    return sum(rank in members for members in groups) + 1


@pytest.mark.parametrize("split", [(2, 2, 2), (3, 3), (1, 4, 1), (1, 1, 1, 3)])
def test_communicators_are_those_that_a_worker_makes(found: ModelProfile, split: tuple[int, ...]) -> None:
    """Two for each neighbour and one for all; ends have one neighbour."""
    plan = plan_of(wide(), split, size=700, microbatches=2, profiled=found)
    counted = [communicators(plan, lower(plan), device) for device in range(len(split))]
    assert counted == [made(plan, device) for device in range(len(split))]
    assert counted == [2 * (device > 0) + 2 * (device + 1 < len(split)) + 1 for device in range(len(split))]


def test_a_norm_of_all_gradients_takes_one_more(found: ModelProfile) -> None:
    """Stages that agree before an update add up over a communicator of their own."""
    plan = plan_of(wide(), [3, 3], size=700, microbatches=2, profiled=found)
    clipped = replace(plan, training=replace(plan.training, clip_norm=1.0))
    assert (
        communicators(clipped, lower(clipped), 0)
        == communicators(plan, lower(plan), 0) + 1
        == made(clipped, 0)
    )


def test_a_parameter_on_two_stages_takes_one_more() -> None:
    """Its gradients are added up over a communicator of the stages that hold it, and of no others."""
    task = build("gpt", layers=2, hidden=16, heads=2, vocabulary=20, sequence=8, tied=True)
    plan = plan_of(task, [2, 1, 2], profiled=profile(task, microbatch_size=2, target="cuda"))
    counted = [communicators(plan, lower(plan), device) for device in range(3)]
    assert counted == [made(plan, device) for device in range(3)] == [2 + 1 + 1, 4 + 1, 2 + 1 + 1]


def test_one_device_needs_none(found: ModelProfile) -> None:
    """Without another worker there is nobody to talk to."""
    plan = plan_of(wide(), [6], size=700, profiled=found)
    assert communicators(plan, lower(plan), 0) == 0
