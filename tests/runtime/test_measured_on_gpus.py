"""Traces of training on GPUs, without one: their meter over CPU tensors, with made-up figures."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from pipefit.measure.cuda import CudaMeter
from pipefit.runtime import Trainer
from pipefit.runtime.hardware import Hardware
from pipefit.schema.plan import Plan
from pipefit.schema.trace import Category, Trace
from support.offloaded_state import away
from support.small_tasks import batch_of, plan_of, task_of

PEAK = 1 << 30
FIGURES: Mapping[str, Any] = {
    **{
        f"{what}_bytes": {"all": {"current": PEAK, "peak": PEAK}}
        for what in ("requested", "allocated", "reserved")
    },
    "num_alloc_retries": 0,
}
KNOWN = Category.PARAMETERS, Category.OPTIMIZER, Category.VERSIONS


TASK = task_of(
    lambda: [layer for _ in range(4) for layer in (nn.Linear(60, 60), nn.Tanh())],
    inputs=60,
    outputs=60,
    optimizer=torch.optim.Adam,
)


def trained(plan: Plan, **patched: Any) -> Trace:
    """Return the trace of three steps."""
    with mock.patch.multiple(torch.cuda, **patched) if patched else nullcontext():
        one = Trainer(TASK, plan)
        for step in range(3):
            one.step(batch_of(TASK, plan, step))
        one.finish()
        return one.trace


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ["pipedream", "state", "plain"])
def test_a_gpu_holds_what_an_emulated_device_holds(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's parameters, versions and optimizer state are those of an emulated device, at most and at least:
    unneeded weights and offloaded state are not counted. The trace has the allocator's peaks.
    """
    schedule = "pipedream" if case == "pipedream" else "1f1b"
    plan = plan_of(TASK, [4, 4], microbatches=4, schedule=schedule)
    if case == "state":
        plan = replace(plan, decisions=(away(0, 0, 1), away(1, 4, 5, kind="parameters")))
    emulated = trained(plan)
    monkeypatch.setattr(Hardware, "meter", lambda *_, **__: CudaMeter(torch.device("cpu")))
    found = trained(
        plan, memory_stats_as_nested_dict=lambda device: FIGURES, reset_peak_memory_stats=lambda device: None
    )
    for one, other in zip(found.devices, emulated.devices, strict=True):
        for category in KNOWN:
            counted = [
                [sample.by_category.get(category, 0) for sample in device.memory] for device in (one, other)
            ]
            assert max(counted[0]) == max(counted[1]), category
            assert min(counted[0]) == min(counted[1]), category
        assert one.allocator is not None and one.allocator.reserved_bytes == PEAK
        assert other.allocator is None
