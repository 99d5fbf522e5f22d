"""The simulator's ledger of torch's engine: its peaks are those of the dry run of that engine's own code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipefit
from pipefit.cli import main
from pipefit.errors import UsageError
from pipefit.memory import StageStorages, receive_buffers, receives_ahead
from pipefit.schema.json_io import save
from pipefit.schema.plan import Plan
from support.small_tasks import plan_of, task_of
from support.torch_engine_cases import engine_case


def some_layers() -> pipefit.Task:
    """Return a task of single operations."""

    def layers() -> list[nn.Module]:
        return [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.GELU()]

    return task_of(layers, inputs=64, outputs=64)


def certified_and_simulated(task: pipefit.Task, plan: Plan) -> list[tuple[int, int]]:
    """Return the peaks of every device of a plan, in the first step and in a later one."""
    dry, ledger = pipefit.certify_pipeline(task, plan), pipefit.simulate(plan, engine="torch")
    return [
        (dry.devices[device].step_peak_bytes(step), ledger.devices[device].step_peak_bytes(step))
        for device in plan.workers
        for step in range(2)
    ]


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("split", "schedule", "microbatches", "recompute"),
    [
        ((2, 2, 2), "1f1b", 5, "never"),
        ((1, 1, 2, 2), "1f1b", 4, "never"),
        ((1, 1, 2, 2), "1f1b", 9, "never"),
        ((2, 2, 2), "1f1b", 2, "never"),
        ((2, 4), "gpipe", 3, "never"),
        ((2, 2, 2), "gpipe", 4, "stages"),
        ((2, 2, 2), "1f1b", 5, "always"),
        ((2, 2, 2), "eager-1f1b", 4, "never"),
        ((1, 2, 3), "torchgpipe", 3, "never"),
        ((6,), "1f1b", 3, "never"),
    ],
)
def test_equal_to_the_byte(split: tuple[int, ...], schedule: str, microbatches: int, recompute: str) -> None:
    """Layers of one operation: the ledger knows every storage of the engine."""
    plan = plan_of(
        some_layers(), split, size=8, schedule=schedule, microbatches=microbatches, recompute=recompute
    )
    assert all(dry == ledger for dry, ledger in certified_and_simulated(some_layers(), plan))


def pictures(size: int) -> tuple[Tensor, Tensor]:
    """Draw pictures and targets."""
    return torch.randn(size, 3, 16, 16), torch.randn(size, 4)


def convolutions() -> nn.Sequential:
    """Return two convolutions with a pool between them."""
    first = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1)
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(512, 4))


@pytest.mark.parametrize("recompute", ["always", "stages"])
def test_recomputation_is_that_of_torch(recompute: str) -> None:
    """It ends with the last saved tensor, and keeps the inputs of a run until the run's backward has ended."""
    task = pipefit.Task(convolutions, batch=pictures, loss=F.mse_loss, name="convolutions")
    plan = plan_of(task, (4, 2), microbatches=2, schedule="gpipe", size=8, recompute=recompute)
    assert all(dry == ledger for dry, ledger in certified_and_simulated(task, plan))


NORMS = 512  # bytes of gradient norms, and of loss scaling


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [*range(1, 11), *range(12, 40)])  # 11 has no plan
def test_random_plans(seed: int) -> None:
    """Steady peaks of random plans without decisions.

    They are equal, but for a last layer of several operations, which was measured without the gradients of its
    outputs in a buffer. There the ledger may be above, by at most these gradients.
    """
    task, plan = engine_case(seed)
    plan = replace(plan, decisions=())
    peaks = certified_and_simulated(task, plan)[1::2]
    for device, (dry, ledger) in zip(plan.workers, peaks, strict=True):
        places = {number: plan.stages[number] for number in plan.stages_of(device)}
        buffered = sum(
            StageStorages(plan.measured(n), place.start, place.stop, buffered=True).buffered_gradient_bytes
            for n, place in places.items()
        )
        assert -NORMS <= ledger - dry <= buffered + NORMS


def test_receive_buffers() -> None:
    """One buffer for every microbatch and direction: inputs of later stages, gradients of earlier ones.

    Since torch 2.15 there are none between steps.
    """
    plan = plan_of(some_layers(), (2, 2, 2), size=8, microbatches=5)
    narrow, wide = 8 * 64 * 4, 8 * 96 * 4
    ahead = {0: 5 * narrow, 1: 5 * (narrow + wide), 2: 5 * wide}
    assert receive_buffers(plan) == (ahead if receives_ahead() else dict.fromkeys(range(3), 0))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`pipefit simulate --engine torch` says what that engine holds; it refuses plans that the engine cannot run."""
    plan = plan_of(some_layers(), (2, 2, 2), size=8, microbatches=5)
    save(plan, tmp_path / "plan.json")
    assert main(["simulate", str(tmp_path / "plan.json"), "--engine", "torch"]) == 0
    told = "torch's engine holds 25.00 KiB of receive buffers on device 1" in capsys.readouterr().out
    assert told is receives_ahead()
    endless = replace(plan, training=replace(plan.training, schedule="pipedream"))
    with pytest.raises(UsageError, match="ends every step with an empty pipeline"):
        pipefit.simulate(endless, engine="torch")
