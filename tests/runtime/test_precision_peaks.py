"""Peaks of norms in every precision: with wider weights the CPU's kernels keep wider statistics."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipefit.capture import Task
from random_cases import accounts, plan_for

WIDTH = 8


def norms() -> nn.Module:
    """Linear layers with layer norms between."""
    parts = (part for _ in range(2) for part in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()))
    return nn.Sequential(*parts, nn.Linear(WIDTH, 4))


@pytest.mark.parametrize("precision", ["mixed-bfloat16", "bfloat16"])
def test_peaks_of_norms(precision: Any) -> None:
    """Simulator, dry run and allocator agree to the byte, and no kernel is unknown."""
    task = Task(
        norms,
        batch=lambda size: (torch.randn(size, WIDTH), torch.randn(size, 4)),
        loss=F.mse_loss,
        precision=precision,
    )
    case = plan_for(task, Random(0))
    assert not case.plan.profile.kernels.unknown
    for account in accounts(case):
        assert account.simulated_bytes == account.dry_run_bytes == account.oracle_bytes, str(case)
