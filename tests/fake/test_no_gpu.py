"""Profiling, planning and certifying do not use a GPU, and give the same results with one.

Tested in a process that appears to have a GPU, and fails on using it.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # keeps a table of torch's functions, which are replaced below
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.planner import plan
from pipefit.profiler import profile
from pipefit.runtime import certify, certify_numbers
from pipefit.schema.cluster import Cluster
from pipefit.simulator import simulate
from support.separate_process import printed

WIDTH = 16


class Traced(nn.Module):
    """A model that draws, normalises and attends; makes one more copy if there is a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.norm(self.up(x)), 0.1)
        if torch.cuda.is_available():
            hidden = hidden.clone()
        heads = hidden.view(len(x), 1, 2, -1)
        found: Tensor = self.down(F.scaled_dot_product_attention(heads, heads, heads).flatten(1))
        return found


def by_hand() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4))


def found() -> list[Any]:
    """Return the measured, planned, simulated and certified results."""
    answers: list[Any] = []
    for module, target in ((Traced, "cuda"), (by_hand, "cuda"), (by_hand, "cpu")):
        task = Task(
            module,
            batch=lambda size: (torch.randn(size, WIDTH), torch.randn(size, 4)),
            loss=F.mse_loss,
            precision="mixed-bfloat16",
            name="model",
        )
        profiled = profile(task, microbatch_size=2, target=target)
        planned = plan(profiled, Cluster.emulated((2, 1 << 30)), batch_size=4, stages=2, planner="uniform")
        assert not certify_numbers(task, planned).differences
        answers.append(
            [repr(profiled.measurements), certify(task, planned).peak_bytes, simulate(planned).peak_bytes]
        )
    return answers


def touched(*_: Any, **__: Any) -> Any:
    raise AssertionError("a GPU was touched")


def with_a_gpu() -> list[Any]:
    """Return the same from a process with one visible GPU, every use of which is an error."""
    with ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "device_count", lambda: 1),
            (torch.cuda, "_lazy_init", touched),
            (torch._C, "_cuda_init", touched),
            (torch.cuda, "_lazy_call", touched),
            (torch.cuda, "manual_seed_all", touched),
            (torch.cuda, "get_rng_state", touched),
            (torch.cuda, "get_device_properties", touched),
            (torch.cuda, "is_bf16_supported", touched),
        ):
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        return found()


def in_another_process() -> Any:
    program = "import json; from fake.test_no_gpu import with_a_gpu; print(json.dumps(with_a_gpu()))"
    return json.loads("".join(printed(program)))


def test_no_gpu_is_touched_and_all_is_as_without_one() -> None:
    """Profiles, peaks and numbers are equal with and without a GPU; no context is made, nothing drawn or
    seeded.
    """
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert in_another_process() == json.loads(json.dumps(found()))
    assert torch.get_rng_state().equal(before)
