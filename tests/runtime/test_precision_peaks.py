"""Peaks of norms in every precision: with wider weights, CPU kernels keep wider statistics."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipefit.capture import Task
from support.random_trainings import accounts, plan_for

WIDTH = 8


def norms() -> nn.Module:
    """Build linear layers with layer norms between them."""
    parts = (part for _ in range(2) for part in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()))
    return nn.Sequential(*parts, nn.Linear(WIDTH, 4))


def group_norms() -> nn.Module:
    """Build linear layers with group norms between them, over channels of two numbers."""
    parts = (part for _ in range(2) for part in (nn.Linear(WIDTH, WIDTH), nn.GroupNorm(2, WIDTH), nn.GELU()))
    return nn.Sequential(*parts, nn.Linear(WIDTH, 4))


def small_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a loss whose scaled gradients do not overflow, so that every step updates."""
    return 1e-4 * F.mse_loss(outputs.float(), targets.float())


@pytest.mark.sample(1)
@pytest.mark.parametrize("module", [norms, group_norms])
@pytest.mark.parametrize("precision", ["mixed-bfloat16", "mixed-float16", "bfloat16"])
def test_peaks_of_norms(module: Any, precision: Any) -> None:
    """Simulator, dry run and allocator agree to the byte, and no kernel is unknown."""
    task = Task(
        module,
        batch=lambda size: (torch.randn(size, WIDTH), torch.randn(size, 4)),
        loss=small_loss,
        precision=precision,
    )
    case = plan_for(task, Random(0))
    assert not case.plan.profile.kernels.unknown
    for account in accounts(case):
        assert account.simulated_bytes == account.dry_run_bytes == account.oracle_bytes, str(case)
