"""Mixed precision with CUDA's kernels, without a GPU: simulator and dry run agree to the byte in both of two
steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.models import build
from pipefit.models.hugging_face import hf
from pipefit.planner import plan
from pipefit.runtime import certify
from pipefit.runtime.engine.replicas import (
    Retracing,
    Specialization,
    Specializations,
    Specialized,
    boundaries,
)
from pipefit.schema.cluster import Cluster
from pipefit.schema.plan import Plan
from pipefit.schema.trace import Trace
from pipefit.schema.training import Precision
from pipefit.simulator import simulate
from support.gallery_samples import sampled
from support.huggingface_models import TINY
from support.known_profiles import profile

PRECISIONS: tuple[Precision, ...] = ("mixed-bfloat16", "mixed-float16")


def images() -> nn.Module:
    """Return convolutions with every kind of norm, some of it in place, and a head."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.LogSigmoid()),
        nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(32, 10)),
    )


def cnn() -> Task:
    return Task(
        images,
        batch=lambda size: (torch.randn(size, 3, 16, 16), torch.randint(10, (size,))),
        loss=F.cross_entropy,
        name="images",
    )


SMALL: dict[str, Any] = {"hidden": 64, "heads": 4, "vocabulary": 64, "sequence": 32}
MODELS: dict[str, Callable[[], Task]] = {
    "cnn": cnn,
    "gpt": lambda: build("gpt", layers=3, **SMALL),
    "gpt eager": lambda: build("gpt", layers=3, attention="eager", tied=True, **SMALL),
    "bert": lambda: build("bert", layers=3, **SMALL),
    "resnet101": lambda: build("resnet101"),
    "vgg11": lambda: build("vgg11"),
    "unet": lambda: build("unet"),
    "vit": lambda: hf("vit", **TINY["vit"]),
    "llama": lambda: hf("llama", **TINY["llama"]),
    "gpt2": lambda: hf("gpt2", **TINY["gpt2"]),
}


def planned(task: Task, precision: Precision, recompute: Any) -> tuple[Task, Plan]:
    task = replace(task, precision=precision)
    profiled = profile(task, microbatch_size=2, target="cuda")
    return task, plan(profiled, Cluster.emulated((2, 1 << 36)), batch_size=8, stages=2, recompute=recompute)


def peaks(trace: Trace) -> list[list[int]]:
    """Return the highest bytes of every device in every step."""
    return [
        [max(sample.total_bytes for sample in device.memory if sample.step == step) for step in range(2)]
        for device in trace.devices
    ]


EVERY = [(name, precision) for name in MODELS for precision in PRECISIONS]


@pytest.mark.parametrize(("name", "precision"), sampled(EVERY, often=[("gpt", PRECISIONS[1])]))
def test_simulator_and_dry_run_are_equal(name: str, precision: Precision) -> None:
    """Simulator and dry run are equal from profile to plan, certificate and simulation, without recomputation
    and with all layers recomputed.
    """
    for recompute in ("never", "always"):
        task, found = planned(MODELS[name](), precision, recompute)
        assert peaks(simulate(found, steps=2)) == peaks(certify(task, found, steps=2))


def test_boundaries_have_the_types_that_travel() -> None:
    """Boundaries have CUDA's dtypes: under autocast a layer norm returns float32, and a linear layer does
    not.
    """
    parts = [nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)]
    task = Task(
        lambda: nn.Sequential(*parts),
        batch=lambda size: (torch.randn(size, 8), torch.randn(size, 4)),
        loss=F.mse_loss,
        precision="mixed-bfloat16",
    )
    (measurement,) = profile(task, microbatch_size=2, target="cuda").measurements
    found = [cost.outputs[0].dtype for cost in measurement.costs]
    assert found == ["bfloat16", "float32", "bfloat16", "bfloat16", "bfloat16"]
    assert measurement.loss.outputs[0].dtype == "float32"


class Normed(nn.Module):
    """Alternating linear layers and norms, for tracing."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part for _ in range(2) for part in (nn.Linear(8, 8), nn.LayerNorm(8)))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.sample(1)
@pytest.mark.parametrize("module", [Normed, lambda: nn.Sequential(*Normed().parts)])
def test_smaller_microbatches_have_the_types_of_the_plan(module: Callable[[], nn.Module]) -> None:
    """The last batch of an epoch, and an evaluation, cross between GPUs in the profile's dtypes."""
    task = Task(
        module,
        batch=lambda size: (torch.randn(size, 8), torch.randn(size, 8)),
        loss=F.mse_loss,
        precision="mixed-bfloat16",
        granularity="layers",
    )
    found = plan(profile(task, microbatch_size=2, target="cuda"), Cluster.preset("4x-rtx-4090"), batch_size=8)
    expected = [[value.dtype for value in values] for values in boundaries(found.measurement)]
    assert ["float32"] in expected[1:]
    assert ["bfloat16"] in expected
    usual = Specialization(stages={0: Specialized((), None)}, boundaries={}, samples={})
    smaller = Specializations(Retracing(task, found), usual, traced=False).of(1, training=True)
    assert [[value.dtype for value in values] for values in smaller.boundaries[0]] == expected
