"""A model whose tensors are in both pools of CUDA's caching allocator."""

from __future__ import annotations

import functools
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from pipefit.capture import Task
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from support.known_profiles import profile
from support.small_tasks import task_of


def wide() -> Task:
    """Build tensors of both pools, some kept for the backward, dropout, and an optimizer with state only on
    the device.
    """
    return task_of(
        lambda: (
            nn.Linear(600, 700), nn.Tanh(), nn.Dropout(0.3), nn.Linear(700, 900), nn.GELU(), nn.Linear(900, 40)
        ),
        inputs=600,
        outputs=40,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    )  # fmt: skip


def on_gpus(plan: Plan) -> Plan:
    """Return the same plan for GPUs with the same memory."""
    return replace(plan, cluster=replace(plan.cluster, backend="cuda"))


@functools.cache
def wide_profile() -> ModelProfile:
    """Return the profile of its layers on a GPU."""
    return profile(wide(), microbatch_size=700, target="cuda")
