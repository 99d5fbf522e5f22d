"""`plan --engine torch`: plans that keep their budgets on torch's engine, by the dry run of its own code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Adam

import pipefit
from pipefit.cli import main
from pipefit.errors import InfeasibleError
from pipefit.memory import receives_ahead
from pipefit.schema.json_io import load, save
from pipefit.schema.plan import Plan
from support.known_profiles import profile
from support.small_tasks import profile_of, task_of

ahead = pytest.mark.skipif(
    not receives_ahead(), reason="torch since 2.15 has no receive buffers between steps"
)
MICROBATCHES = {"batch_size": 128, "microbatches": 16}


def deep() -> pipefit.Task:
    """Return a task whose receive buffers are larger than its weights."""

    def layers() -> list[nn.Module]:
        return [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.ReLU())]

    return task_of(layers, inputs=128, outputs=128)


@ahead
def test_budgets_are_kept_on_torch_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fastest plan for pipefit's runtime exceeds budgets there. `pipefit plan --engine torch` finds one that
    keeps them, and prints what that engine holds, device by device.
    """
    task, cluster, file = deep(), pipefit.load_cluster("emulated:3x550KiB"), tmp_path / "plan.json"
    ours = pipefit.plan(profile_of(task, 8), cluster, **MICROBATCHES)
    save(profile_of(task, 8), tmp_path / "profile.json")
    command = ["plan", str(tmp_path / "profile.json"), "--cluster", "emulated:3x550KiB", "--engine", "torch"]
    assert main([*command, "--batch-size", "128", "--microbatches", "16", "-o", str(file)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "torch's engine holds 128.00 KiB of receive buffers on device" in told
    assert "Planned again, because on torch's engine device" in told
    for plan, keeps in ((ours, False), (load(file, Plan), True)):
        peaks = [device.peak_bytes for device in pipefit.certify_pipeline(task, plan).devices]
        assert (max(peaks) <= 550 << 10) is keeps
        assert plan.cluster == cluster


@ahead
def test_no_plan_is_found() -> None:
    """The message names the device, the receive buffers and the ways out; it does not claim impossibility."""
    cluster = pipefit.load_cluster("emulated:3x450KiB")
    said = r"receive buffers on device \d\. No plan was found that fits there.*fewer microbatches"
    with pytest.raises(InfeasibleError, match=said):
        pipefit.plan(profile_of(deep(), 8), cluster, engine="torch", **MICROBATCHES)


def test_the_plan_of_a_task_is_verified() -> None:
    """A task is profiled, planned and run dry on that engine; without peers, sharding and tensor parallelism."""
    cluster = pipefit.load_cluster("emulated:2x700KiB")
    plan = pipefit.plan(deep(), cluster, engine="torch", microbatch_size=8, batch_size=64)
    peaks = [device.peak_bytes for device in pipefit.certify_pipeline(deep(), plan).devices]
    assert max(peaks) <= 700 << 10


def test_replicas_divide_optimizer_state_if_nothing_else_fits() -> None:
    """Whole state is planned if it fits; the plan of a smaller budget divides it, and keeps the budget there."""
    task = task_of(lambda: [nn.Linear(128, 128) for _ in range(6)], inputs=128, outputs=128, optimizer=Adam)
    profiled = profile(task, microbatch_size=(4, 8))
    for kib, shard in ((1700, "none"), (1450, "optimizer")):
        cluster = pipefit.load_cluster(f"emulated:2x{kib}KiB")
        plan = pipefit.plan(profiled, cluster, engine="torch", stages=1, batch_size=16, recompute="never")
        assert plan.stages[0].grid.shard == shard
        assert max(d.peak_bytes for d in pipefit.certify_pipeline(task, plan).devices) <= kib << 10


def test_replicas_divide_gradients_if_nothing_else_fits() -> None:
    """Owners of whole layers may have unequal parts of the state; FSDP2 divides each layer equally."""
    task = task_of(lambda: [nn.Linear(128, 128) for _ in range(3)], inputs=128, outputs=128, optimizer=Adam)
    question = {"stages": 1, "batch_size": 16, "microbatch_size": 8, "recompute": "never", "engine": "torch"}
    cluster = pipefit.load_cluster("emulated:2x766KiB")
    plan = pipefit.plan(task, cluster, **question)
    assert plan.stages[0].grid.shard == "gradients"
    assert max(d.peak_bytes for d in pipefit.certify_pipeline(task, plan).devices) <= 766 << 10
    profiled = profile(task, microbatch_size=(4, 8), threads=torch.get_num_threads())
    by_ledger = pipefit.plan(
        profiled, cluster, **{n: v for n, v in question.items() if n != "microbatch_size"}
    )
    assert by_ledger.stages[0].grid.shard == "gradients"
    with pytest.raises(InfeasibleError):
        pipefit.plan(task, cluster, shard="optimizer", **question)


def test_replicas_divide_a_layer_that_none_can_own() -> None:
    """FSDP2 divides a layer that is larger than all others, which replicas of whole layers assign to one of them."""
    task = task_of(lambda: [nn.Linear(64, 1024), nn.Linear(1024, 8)], inputs=64, outputs=8, optimizer=Adam)
    question = {"stages": 1, "data": 2, "batch_size": 16, "microbatch_size": 8, "recompute": "never"}
    plan = pipefit.plan(task, "emulated:2x1500KiB", engine="torch", **question)
    assert plan.stages[0].grid.divides_gradients
    assert max(d.peak_bytes for d in pipefit.certify_pipeline(task, plan).devices) <= 1500 << 10
