"""Restarts after a worker's failure: they are reported, and the losses are those of an undisturbed run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import pipefit
from pipefit.checkpoints import folders
from pipefit.errors import InfeasibleError, PipefitWarning, UsageError, WorkerFailed
from pipefit.lowering import lower
from pipefit.runtime import Trainer, train
from pipefit.runtime.options import Saving
from pipefit.schema.cluster import Cluster
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.texts import counted
from support.known_profiles import profile
from support.process_tree import children, environment
from support.resumed_tasks import SEED, mortal, named, plan_for, undisturbed

SPLIT = (3, 3)
ROOT = Path(__file__).parents[2]


def disturbed(folder: Path, deaths: list[str], steps: int, **options: Any) -> tuple[list[float], list[str]]:
    """Return losses and messages of a training that saves after every third step and whose workers die at
    these actions.

    A checkpoint is certainly whole once the next one has begun.
    """
    (folder / "deaths").mkdir()
    for death in deaths:
        (folder / "deaths" / death).touch()
    saving = Saving(directory=str(folder / "runs"), every=3, keep=2)
    plan = options.pop("plan", None) or plan_for("dropout", "1f1b", SPLIT)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", PipefitWarning)
        losses, _ = train(
            partial(mortal, str(folder / "deaths")),
            plan,
            steps=steps,
            seed=SEED,
            saving=saving,
            numbers=False,
            **options,
        )
    assert list((folder / "deaths").iterdir()) == []
    return losses, [str(warning.message) for warning in warned]


def random_deaths(count: int, steps: int) -> list[str]:
    """Draw random workers at random actions of different steps."""
    random, program = Random(7), lower(plan_for("dropout", "1f1b", SPLIT))
    return [
        f"{worker}-{step}-{random.choice(program.actions[worker])}"
        for step in random.sample(range(steps), count)
        for worker in [random.randrange(len(SPLIT))]
    ]


def test_killed_workers_change_no_loss(tmp_path: Path) -> None:
    """Two killed workers in twelve steps, one before the first save, change no loss; each restart names the
    failed worker and the steps.
    """
    told_steps = list[int]()
    losses, told = disturbed(
        tmp_path,
        ["1-1-1F2", "0-7-0B0"],
        12,
        restarts=2,
        on_step=lambda report: told_steps.append(report.step),
    )
    assert losses == undisturbed(12)
    first, second = told
    saved = 6 if "last saved: 6" in second else 3
    assert told_steps == [0, *range(7), *range(saved, 12)]
    assert first.startswith("worker 1 (device 1, ") and " failed at 1F2: killed by signal 9" in first
    assert (
        "; steps done: 1, last saved: none; restart 1 of 2 continues after step 0, with 2 workers on "
        in first
    )
    assert second.startswith("worker 0 (device 0, ") and " failed at 0B0: killed by signal 9" in second
    assert (
        f"; steps done: 7, last saved: {saved}; restart 2 of 2 continues after step {saved}, with 2 "
        in second
    )


@pytest.mark.gallery
@pytest.mark.timeout(900)
def test_twenty_killed_workers_change_no_loss(tmp_path: Path) -> None:
    """Twenty workers, killed at random actions in two hundred steps, change no loss."""
    losses, told = disturbed(tmp_path, random_deaths(20, 200), 200, restarts=20)
    assert losses == undisturbed(200)
    assert len(told) == 20


def test_a_failure_too_many_ends_the_training(tmp_path: Path) -> None:
    """After the last allowed restart, a failure ends the training, with the command that continues it."""
    with pytest.raises(
        WorkerFailed, match=r"failed at 0F0: .*; steps done: 7, last saved: [36]; resume with --resume"
    ):
        disturbed(tmp_path, ["1-1-1F0", "0-7-0F0"], 9, restarts=1)


def test_with_a_device_less_it_plans_again_and_goes_on(tmp_path: Path) -> None:
    """If a device is gone after a worker's death, training is planned again on the other two of three devices
    and has the losses of all three.
    """
    clusters = iter([Cluster.emulated((3, 1 << 20)), Cluster.emulated((2, 1 << 20))])
    plan = replace(plan_for("dropout", "1f1b", (2, 2, 2)), cluster=Cluster.emulated((3, 1 << 20)))
    plans = list[Plan]()

    def replan(plan: Plan) -> Plan:
        plans.append(pipefit.plan_again(plan, next(clusters)))
        return plans[-1]

    losses, (told,) = disturbed(tmp_path, ["2-7-2F1"], 9, plan=plan, restarts=1, replan=replan)
    assert losses == undisturbed(9)
    assert plans[0] is plan
    assert len(plans[1].cluster.devices) == 2
    workers = counted(len(plans[1].workers), "worker")
    assert re.search(f"restart 1 of 1 continues after step [36], with {workers} on emulated:2x1MiB$", told)


@cache
def sliced() -> ModelProfile:
    """Return the profile of a task without random draws, with local batches and shards."""
    return profile(named("adamw"), microbatch_size=(2, 1), tensor=(1, 2), threads=torch.get_num_threads())


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("asked", "left", "degrees"),
    [
        ({"stages": 2, "data": 2}, 3, {(2, 1)}),
        ({"stages": 2, "data": 2}, 1, {(1, 1)}),
        ({"stages": 2, "tensor": 2}, 3, {(1, 2)}),
        ({"data": 2, "tensor": 2}, 3, {(1, 2)}),
        ({"tensor": 2}, 1, {(1, 1)}),
    ],
)
def test_grids_are_planned_again_for_what_is_left(
    asked: Any, left: int, degrees: set[tuple[int, int]]
) -> None:
    """With fewer devices, the new plan drops stages first, then replicas, then shards."""
    before = pipefit.plan(sliced(), Cluster.emulated((4, 1 << 30)), batch_size=8, microbatches=4, **asked)
    after = pipefit.plan_again(before, Cluster.emulated((left, 1 << 30)))
    assert {(stage.grid.data, stage.grid.tensor) for stage in after.stages} == degrees
    assert len(after.workers) <= left
    assert after.training.microbatches == 4


@pytest.mark.gallery
@pytest.mark.parametrize("asked", [{"stages": 2, "data": 2}, {"data": 2, "tensor": 2}])
def test_a_grid_with_a_device_less_goes_on(asked: Any, tmp_path: Path) -> None:
    """A grid of four workers loses a worker and its device, and has the losses of one undisturbed process."""
    plan = pipefit.plan(sliced(), Cluster.emulated((4, 1 << 30)), batch_size=8, microbatches=4, **asked)
    clusters = iter([plan.cluster, Cluster.emulated((3, 1 << 30))])
    (tmp_path / "deaths").mkdir()
    (tmp_path / "deaths" / "3-5-1F1" if asked.get("stages") else tmp_path / "deaths" / "3-5-0F1").touch()
    with pytest.warns(
        PipefitWarning, match=r"^worker 3 .* restart 1 of 1 continues after step [24], with 2 workers"
    ):
        losses, _ = train(
            partial(mortal, str(tmp_path / "deaths"), "adamw"),
            plan,
            steps=8,
            seed=SEED,
            numbers=False,
            saving=Saving(directory=str(tmp_path / "runs"), every=2),
            restarts=1,
            replan=lambda plan: pipefit.plan_again(plan, next(clusters)),
        )
    whole = Trainer(named("adamw"), plan_for("adamw", "1f1b", (6,)), seed=SEED, numbers=False)
    expected = []
    for step in range(8):
        torch.manual_seed(SEED + step)
        expected.append(whole.step(whole.task.batch(8)))
    assert losses == pytest.approx(expected, rel=1e-5)


def test_where_nothing_fits_any_more_it_says_so(tmp_path: Path) -> None:
    """If nothing fits on the remaining devices, one sentence names the failure, the saved steps, the device
    and its missing bytes.
    """
    replies = iter([Cluster.emulated((2, 1 << 30)), Cluster.emulated((2, 1 << 10))])
    with pytest.raises(
        InfeasibleError, match=r"killed by signal 9.*last saved: [36]; training does not restart: .*1\.00 KiB"
    ):
        disturbed(
            tmp_path, ["1-7-1F0"], 9, restarts=3, replan=lambda plan: pipefit.plan_again(plan, next(replies))
        )


def test_a_folder_with_older_checkpoints_of_another_training_is_refused(tmp_path: Path) -> None:
    """A folder with older checkpoints of another training is refused, even for the same model and seed,
    because a restart and `keep` could not tell their steps apart.
    """
    task, plan = partial(named, "dropout"), plan_for("dropout", "1f1b", SPLIT)
    for name, steps in (("old", 2), ("other", 3)):
        train(
            task, plan, steps=steps, seed=SEED, saving=Saving(directory=str(tmp_path / name)), numbers=False
        )
    with pytest.raises(
        UsageError, match=r"old has checkpoints of another training, .*, process \d+ on .*: save to"
    ):
        train(task, plan, steps=6, resume=tmp_path / "other", saving=Saving(directory=str(tmp_path / "old")))
    assert [step for step, _ in folders.whole(tmp_path / "old")] == [2]


def test_restarts_need_checkpoints() -> None:
    """Restarts without checkpoints are refused before any worker starts."""
    plan = plan_for("dropout", "1f1b", SPLIT)
    with pytest.raises(UsageError, match="say where they are saved"):
        train(partial(named, "dropout"), plan, steps=1, restarts=1)
    with pytest.raises(UsageError, match="restarts must be a whole number of at least 0"):
        train(partial(named, "dropout"), plan, steps=1, restarts=-1)


@pytest.mark.gallery
@pytest.mark.timeout(300)
def test_a_script_of_ones_own_is_started_again_by_torchrun(tmp_path: Path) -> None:
    """torchrun restarts the example script: worker 1 is killed after the twelfth step, and the losses are
    those of one process.
    """
    script = [str(ROOT / "examples" / "restarting_loop.py"), "--steps", "20", "--every", "5"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    alone = subprocess.run(
        [sys.executable, *script, tmp_path / "alone"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command = [*torchrun, "--max-restarts", "1", *script, str(tmp_path / "together")]
    printed = list[str]()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            printed.append(line)
            if (
                line.startswith("step 12:")
                and len([one for one in printed if one.startswith("step 12:")]) == 1
            ):
                os.kill(worker_of(run.pid, "1"), signal.SIGKILL)
    assert run.returncode == 0
    losses = {line.partition(":")[0]: line for line in printed}
    assert "".join(losses.values()) == alone.stdout
    assert len(printed) > 20


def worker_of(torchrun: int, rank: str) -> int:
    """Return the process of torchrun's worker of that rank."""
    for child in children(torchrun):
        if f"RANK={rank}" in environment(child):
            return child
    raise AssertionError("there is none")
