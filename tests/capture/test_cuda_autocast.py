"""Traces and comparisons under CUDA autocast have the types that autocast produces on a GPU."""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.capture.cuda_autocast import casting_for
from pipefit.capture.model import capture
from pipefit.capture.sample import sample
from pipefit.errors import UsageError
from pipefit.fake_cuda.chain import fake_chain
from pipefit.fake_cuda.target import FakeTarget
from pipefit.planner import plan
from pipefit.profiler import profile
from pipefit.runtime import Trainer, certify_numbers
from pipefit.schema.cluster import Cluster
from pipefit.schema.profile import Target

BF16, FLOAT = torch.bfloat16, torch.float32
WIDTH = 8


class Typed(nn.Module):
    """A module that reads the type of a norm's result and turns autocast for `cuda` off for one part."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.up(x)
        normed = self.norm(hidden)
        kept = hidden.to(normed.dtype)
        with torch.autocast("cuda", enabled=False):
            kept = kept + kept @ self.norm.weight.to(kept.dtype)[:, None]
        found: Tensor = self.down(kept).to(torch.exp(hidden).dtype)
        return found


def task_of(module: Any = Typed) -> Task:
    return Task(
        module,
        batch=lambda size: (torch.randn(size, WIDTH), torch.randn(size, 4)),
        loss=F.mse_loss,
        precision="mixed-bfloat16",
        name="typed",
    )


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_trace_has_the_types_of_its_target(target: Target) -> None:
    """Values between traced layers, and the result, have the types that the module produces on the target."""
    task = task_of()
    with FakeTarget(target) as fake:
        chain = fake_chain(task, fake, sample(task, 2))
        values: tuple[Tensor, ...] = (torch.empty(2, WIDTH, device=fake.device),)
        for layer in chain.layers:
            values = layer(values)
        module = Typed().to(fake.device)
        with torch.autocast(fake.device.type, BF16), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of autocast for CUDA on the CPU
            whole = module(torch.empty(2, WIDTH, device=fake.device))
    assert values[0].dtype == whole.dtype == (FLOAT if target == "cuda" else BF16)


def test_a_trace_for_cuda_computes_what_its_module_computes() -> None:
    """Module and chain, both on the CPU under CUDA's casts, have equal numbers; under the CPU's casts they
    would differ.
    """
    task = task_of()
    profiled = profile(task, microbatch_size=2, target="cuda")
    assert not certify_numbers(task, plan(profiled, Cluster.emulated((1, 1 << 30)), batch_size=4)).differences
    whole, inputs = task.build(), torch.randn(2, WIDTH)
    chain = capture(task_of(whole), inputs, target="cuda")
    with casting_for("cuda"), torch.autocast("cpu", BF16):
        expected = whole(inputs)
        values: tuple[Tensor, ...] = (inputs,)
        for layer in chain.layers:
            values = layer(values)
    assert values[0].dtype == expected.dtype == FLOAT
    assert values[0].equal(expected)


def test_the_cpus_casts_come_back() -> None:
    """Afterwards autocast on the CPU is torch's own, even if contexts were nested or left by an exception."""
    x = torch.ones(4, 4)

    def types() -> tuple[torch.dtype, ...]:
        with torch.autocast("cpu", BF16):
            return (x @ x).dtype, F.layer_norm(x @ x, (4,)).dtype, torch.softmax(x @ x, 0).dtype

    before = types()
    with casting_for("cuda"):
        assert types() == (BF16, FLOAT, FLOAT)
        with casting_for("cuda"):
            assert types() == (BF16, FLOAT, FLOAT)
        assert types() == (BF16, FLOAT, FLOAT)
    with pytest.raises(ZeroDivisionError), casting_for("cuda"):
        raise ZeroDivisionError
    assert types() == before == (BF16, BF16, BF16)


@pytest.mark.parametrize(
    ("positional", "named"),
    [
        (("cuda", BF16, True, False), {}),
        ((), {"device_type": "cuda", "dtype": BF16, "enabled": True, "cache_enabled": False}),
        (("cuda",), {"dtype": BF16}),
    ],
)
def test_autocast_is_called_as_torch_allows(positional: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Autocast accepts positional and named arguments, as a context or a decorator, for CUDA and for the
    CPU.
    """
    x = torch.ones(4, 4)
    taken = list(inspect.signature(torch.autocast.__init__).parameters)
    assert taken == ["self", "device_type", "dtype", "enabled", "cache_enabled"]
    for target, expected in (("cuda", BF16), ("cpu", FLOAT)):
        with casting_for(target):  # type: ignore[arg-type]
            with torch.autocast(*positional, **named):
                assert (x @ x).dtype == expected
            assert torch.autocast(*positional, **named)(lambda: x @ x)().dtype == expected
            with torch.autocast(device_type="cpu", dtype=torch.float16):
                assert (x @ x).dtype == torch.float16


@pytest.mark.parametrize(("target", "enabled"), [("cpu", False), ("cuda", True)])
def test_autocast_for_cuda_inside_a_model(target: Target, enabled: bool) -> None:
    """A model that turns on autocast for `cuda` has it in traces for CUDA, but not in traces for the CPU."""

    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cuda", BF16):
                return super().forward(x).sum(1)

    task = Task(
        partial(Own, WIDTH, 4),
        batch=lambda size: (torch.randn(size, WIDTH), None),
        loss=lambda y, _: y.sum(),
        name="own",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (measurement,) = profile(task, microbatch_size=2, target=target).measurements
    assert any(saved.dtype == "bfloat16" for cost in measurement.costs for saved in cost.saved) == enabled


def test_a_plan_with_casts_of_another_target_is_not_trained() -> None:
    """A plan with the casts of another target is refused, with the remedy, because its types would differ."""
    task = task_of()
    profiled = profile(task, microbatch_size=2, target="cuda")
    with pytest.raises(UsageError, match="profile with --target cpu and plan again"):
        Trainer(task, plan(profiled, Cluster.emulated((1, 1 << 30)), batch_size=4))
