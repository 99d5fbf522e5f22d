"""Offloaded state and host updates on a CUDA device. Skipped without one."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from pipefit.capture import Task
from pipefit.models import build
from pipefit.runtime import Trainer, certify, train
from pipefit.schema.decisions import Decision, What
from pipefit.schema.devices import parse_place
from pipefit.schema.plan import Plan
from support.known_profiles import profile
from support.offloaded_state import away
from support.separate_process import elsewhere
from support.small_tasks import batch_of, plan_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
STEPS = 3
GPT: Mapping[str, Any] = {
    "layers": 4,
    "hidden": 256,
    "heads": 8,
    "vocabulary": 5000,
    "sequence": 256,
    "dropout": 0.0,
}
make = partial(build, "gpt", **GPT)
MOVED: Mapping[str, tuple[Decision, ...]] = {
    "optimizer": (away(0, 0, 2, ahead=1), away(0, 3, 5, ahead=1)),
    "parameters": (away(0, 1, 2, kind="parameters", ahead=1), away(0, 4, 5, kind="parameters")),
    "gradients": (away(0, 1, 3, kind="gradients"),),
    "all": (away(0, 0, 2), away(0, 1, 2, kind="parameters", ahead=1), away(0, 3, 5, kind="gradients")),
}
UPDATED = away(0, 0, 2, What.UPDATE), away(0, 3, 4, What.UPDATE)


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """Free the memory of earlier tests."""
    for moment in range(2):
        gc.collect()
        torch.cuda.empty_cache()
        if not moment:
            yield


def on_gpus(task: Task, split: list[int], *decisions: Decision) -> Plan:
    """Return stages with these decisions on GPUs that reach each other and the host."""
    found = elsewhere(profile, task, microbatch_size=8, target="cuda")
    plan = plan_of(task, split, size=8, microbatches=4, memory_bytes=1 << 34, profiled=found)
    devices = plan.cluster.devices * (2 if len(split) == 1 else 1)
    link = replace(plan.cluster.links[0], members=parse_place("device0*1+device1*1+host0*1").members)
    cluster = replace(plan.cluster, backend="cuda", devices=devices, links=(link,))
    return replace(plan, cluster=cluster, decisions=decisions)


def trained(plan: Plan, steps: int = STEPS) -> tuple[list[float], dict[str, Tensor], int]:
    """Return the losses, the state on the host, and the allocator's peak in the last step above its starting
    level.
    """
    gc.collect()
    base = int(torch.cuda.memory_stats(DEVICE).get("requested_bytes.all.current", 0))
    trainer = Trainer(make(), plan)
    losses = [trainer.step(batch_of(make(), plan, step)) for step in range(steps)]
    torch.cuda.synchronize(DEVICE)
    high = trainer.trace.devices[0].step_peak_bytes(steps - 1) - base
    return losses, {name: tensor.cpu() for name, tensor in trainer.state_dict().items()}, high


@pytest.mark.parametrize("name", MOVED)
def test_state_that_is_moved_comes_back(name: str) -> None:
    """With offloaded state, losses and parameters are bitwise those of the plan without moves; the
    allocator's peaks are lower, and within 1 % of the certificate.
    """
    still = on_gpus(make(), [len(list(make().build().children()))])
    moved = replace(still, decisions=MOVED[name])
    trained(still, 1)  # libraries allocate their lasting workspaces
    (losses, state, high), (others, other, low) = trained(still), trained(moved)
    assert losses == others
    assert all(torch.equal(state[name], tensor) for name, tensor in other.items())
    peaks = [
        elsewhere(certify, make(), plan, target="cuda").devices[0].step_peak_bytes(1)
        for plan in (still, moved)
    ]
    assert [high, low] == [pytest.approx(peak, rel=0.01) for peak in peaks]
    assert low < high


def test_layers_that_the_host_updates_train_nearly_the_same() -> None:
    """With layers updated on the host, the first loss is equal and later ones nearly; their state stays off
    the GPU.
    """
    still = on_gpus(make(), [len(list(make().build().children()))])
    plan = replace(still, decisions=UPDATED)
    trained(still, 1)
    (losses, _, high), (others, _, low) = trained(still), trained(plan)
    assert losses[0] == others[0]
    assert others == pytest.approx(losses, rel=1e-4)
    assert low == pytest.approx(
        elsewhere(certify, make(), plan, target="cuda").devices[0].step_peak_bytes(1), rel=0.01
    )
    assert low < high


def test_two_processes_move_state_on_one_gpu() -> None:
    """Two workers on the one GPU that offload state to the host and to each other have the losses of a plan
    without moves, or nearly so for layers updated on the host.
    """
    layers = len(list(make().build().children()))
    still = on_gpus(make(), [layers // 2, layers - layers // 2])
    moved = (
        away(0, 0, 1, place="device1*1+host*1", ahead=1),
        away(1, layers - 2, layers - 1, place="device0"),
    )
    expected, _ = train(make, still, steps=STEPS, share_device=True)
    assert train(make, replace(still, decisions=moved), steps=STEPS, share_device=True)[0] == expected
    updated = (away(0, 1, 2, What.UPDATE), away(1, layers - 1, layers, What.UPDATE))
    losses, _ = train(make, replace(still, decisions=updated), steps=STEPS, share_device=True)
    assert losses[0] == expected[0] and losses == pytest.approx(expected, rel=1e-4)
