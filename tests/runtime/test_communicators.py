"""The predicted number of a worker's communicators equals the real one."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from unittest import mock

import pytest
import torch

from pipefit.lowering import lower
from pipefit.memory.arenas import communicators
from pipefit.models import build
from pipefit.runtime.comm import transport
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from support.known_profiles import profile
from support.small_tasks import plan_of
from support.two_pool_model import wide, wide_profile


@pytest.fixture(scope="module")
def found() -> ModelProfile:
    """Return the profile of `wide` on a GPU."""
    return wide_profile()


def made(plan: Plan, device: int) -> int:
    """Return the `torch.distributed` groups of a device's worker, and the group of all workers."""
    groups: list[list[int]] = []
    rank = [plan.stages[stages[0]].device for stages in plan.ranks].index(device)
    with (
        mock.patch.object(transport.dist, "new_group", lambda members, **_: groups.append(members)),
        mock.patch.object(transport.dist, "get_rank", return_value=rank),
        mock.patch.object(transport, "check_members"),  # a single worker has no peers
        mock.patch.object(transport.Network, "warm_up"),
    ):
        transport.connect(plan, lower(plan), torch.device("cpu"), timedelta(seconds=1))
    return sum(rank in members for members in groups) + 1


@pytest.mark.parametrize("split", [(2, 2, 2), (3, 3), (1, 4, 1), (1, 1, 1, 3)])
def test_communicators_are_those_that_a_worker_makes(found: ModelProfile, split: tuple[int, ...]) -> None:
    """A worker makes two communicators for each neighbour and one for all; end stages have one neighbour."""
    plan = plan_of(wide(), split, size=700, microbatches=2, profiled=found)
    counted = [communicators(plan, lower(plan), device) for device in range(len(split))]
    assert counted == [made(plan, device) for device in range(len(split))]
    assert counted == [2 * (device > 0) + 2 * (device + 1 < len(split)) + 1 for device in range(len(split))]


def test_a_norm_of_all_gradients_takes_one_more(found: ModelProfile) -> None:
    """Stages that clip by a common norm sum it over one more communicator."""
    plan = plan_of(wide(), [3, 3], size=700, microbatches=2, profiled=found)
    clipped = replace(plan, training=replace(plan.training, clip_norm=1.0))
    assert (
        communicators(clipped, lower(clipped), 0)
        == communicators(plan, lower(plan), 0) + 1
        == made(clipped, 0)
    )


def test_a_parameter_on_two_stages_takes_one_more() -> None:
    """A parameter on two stages takes one more communicator, of exactly the stages that hold it."""
    task = build("gpt", layers=2, hidden=16, heads=2, vocabulary=20, sequence=8, tied=True)
    plan = plan_of(task, [2, 1, 2], profiled=profile(task, microbatch_size=2, target="cuda"))
    counted = [communicators(plan, lower(plan), device) for device in range(3)]
    assert counted == [made(plan, device) for device in range(3)] == [2 + 1 + 1, 4 + 1, 2 + 1 + 1]


def test_one_device_needs_none(found: ModelProfile) -> None:
    """One device without other workers needs no communicator."""
    plan = plan_of(wide(), [6], size=700, profiled=found)
    assert communicators(plan, lower(plan), 0) == 0
