"""Optimizer numbers on the host, which take no GPU memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pipefit.profiler import profile
from pipefit.runtime import certify
from pipefit.simulator import simulate
from support.small_tasks import plan_of, task_of

NUMBERS, PARAMETERS = 8 * 8 + 8 + 8 * 4 + 4, 4


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "counters_are_here"),
    [({}, False), ({"foreach": False}, False), ({"fused": True}, True), ({"capturable": True}, True)],
)
def test_counters_of_steps(options: dict[str, Any], counters_are_here: bool) -> None:
    """AdamW's two moments are on the GPU; its counters of four bytes only with `fused` or `capturable`, as
    torch documents. Simulator and dry run agree to the byte.
    """
    layers = [nn.Linear(8, 8), nn.Linear(8, 4)]
    task = task_of(lambda: layers, optimizer=partial(torch.optim.AdamW, **options))
    found = profile(task, microbatch_size=2, target="cuda")
    state = sum(cost.state_bytes for cost in found.measurements[0].costs)
    assert state == 2 * 4 * NUMBERS + 4 * PARAMETERS * counters_are_here
    plan = plan_of(task, [1, 1], profiled=found)
    assert simulate(plan).peak_bytes == certify(task, plan).peak_bytes
