"""Complex parameters and buffers stay complex in every precision, as under `module.double()` and `half()`."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.runtime import Trainer, certify
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.training import Precision, Training
from pipefit.simulator import simulate
from support.known_profiles import profile

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STEPS = 2


class Turned(nn.Module):
    """Pairs of numbers, rotated by a fixed angle and multiplied by a trained complex factor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.factor = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, x: Tensor) -> Tensor:
        real, imaginary = self.linear(x).chunk(2, 1)
        turned = torch.complex(real.float(), imaginary.float()) * self.turn * self.factor
        return torch.cat([turned.real, turned.imag], 1).to(x.dtype)


def build() -> nn.Module:
    """Return two such layers."""
    return nn.Sequential(Turned(), nn.Tanh(), Turned())


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return rows of numbers."""
    return torch.randn(size, 8), torch.randn(size, 8)


def plain(
    given: list[tuple[Tensor, Tensor]], dtype: torch.dtype, master: torch.dtype | None
) -> dict[str, Tensor]:
    """Train without pipefit on these batches of two microbatches each; return the trained state."""
    torch.manual_seed(0)
    model = build()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                module._parameters[name] = nn.Parameter(parameter.detach().to(dtype))
    trained = list(model.parameters())
    updated = [
        nn.Parameter(p.detach().to(master))
        if master and p.is_floating_point()
        else nn.Parameter(p.detach().clone())
        for p in trained
    ]
    optimizer = SGD(updated)
    for inputs, targets in given:
        for x, y in zip(inputs.to(dtype).split(2), targets.to(dtype).split(2), strict=True):
            (F.mse_loss(model(x), y) / 2).backward()
        with torch.no_grad():
            for parameter, copy in zip(trained, updated, strict=True):
                assert parameter.grad is not None
                copy.grad, parameter.grad = parameter.grad.to(copy.dtype), None
            optimizer.step()
            for parameter, copy in zip(trained, updated, strict=True):
                parameter.copy_(copy)
    return dict(model.state_dict())


def plan_for(task: Task, precision: Precision, clip_norm: float | None = None) -> Plan:
    """Return a plan with one layer on the first device and two on the second."""
    return Plan(
        profile=profile(task, microbatch_size=2),
        cluster=Cluster.emulated((2, 1 << 30)),
        training=Training(batch_size=4, microbatches=2, precision=precision, clip_norm=clip_norm),
        stages=(Stage(start=0, stop=1, grid=Grid.of(0)), Stage(start=1, stop=3, grid=Grid.of(1))),
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("precision", "dtype", "master"),
    [
        ("float64", torch.float64, None),
        ("bfloat16", torch.bfloat16, None),
        ("master-bfloat16", torch.bfloat16, torch.float32),
    ],
)
def test_complex_numbers_keep_their_imaginary_parts(
    precision: Precision, dtype: torch.dtype, master: torch.dtype | None
) -> None:
    """Trained values are bitwise those of a plain loop, and bytes those simulated."""
    task = Task(build, batch=batch, loss=F.mse_loss, optimizer=SGD, precision=precision)
    plan = plan_for(task, precision)
    given = [batch(4) for _ in range(STEPS)]
    trainer = Trainer(task, plan)
    for both in given:
        trainer.step(both)
    expected, found = plain(given, dtype, master), trainer.state_dict()
    assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in expected.items()}
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
    assert simulate(plan).peak_bytes == certify(task, plan).peak_bytes == trainer.trace.peak_bytes


def test_they_are_scaled_and_clipped_like_others() -> None:
    """Gradients of a scaled loss under autocast, clipped by the norm of both parts, are those of a plain
    loop.
    """
    task = Task(build, batch=batch, loss=F.mse_loss, optimizer=SGD, precision="mixed-float16")
    plan, given = plan_for(task, "mixed-float16", clip_norm=0.1), batch(4)
    trainer = Trainer(task, plan)
    trainer.step(given)
    torch.manual_seed(0)
    model = build()
    for x, y in zip(given[0].split(2), given[1].split(2), strict=True):
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(x), y)
        (loss * (2**16 / 2)).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= 2**16
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    SGD(model.parameters()).step()
    found = trainer.state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)
