"""`pipefit train` on failures: it restarts, plans again, and reports non-finite losses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pipefit.cli import main
from pipefit.schema.json_io import save
from support.resumed_tasks import SEED, plan_for, undisturbed

STEPS = 9


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the plan of a task with dropout, on two devices."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    save(plan_for("dropout", "1f1b", (3, 3)), path)
    return path


def line(plan: Path, model: str, *more: str, steps: int = STEPS) -> list[str]:
    return ["train", str(plan), model, "--no-numbers", "--seed", str(SEED), "--steps", str(steps), *more]


def test_a_killed_worker_costs_a_restart(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `--restarts` the command resumes automatically, with a line of metrics for every step, and reports
    the failure; with `--cluster` it plans for the remaining devices.
    """
    deaths, metrics = tmp_path / "deaths", tmp_path / "metrics.jsonl"
    deaths.mkdir()
    model = ["support.resumed_tasks:mortal", "--set", f"folder='{deaths}'", "--json"]
    assert main(line(plan, *model)) == 0
    expected = json.loads(capsys.readouterr().out)["losses"]
    (deaths / "0-7-0F0").touch()
    saved = ["--save", str(tmp_path / "runs"), "--every", "3", "--metrics", str(metrics)]
    assert main(line(plan, *model, *saved, "--restarts", "1", "--cluster", "emulated:3x1GiB")) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["losses"] == expected
    rows = [json.loads(row) for row in metrics.read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == list(enumerate(expected))
    assert "pipefit: planned again for emulated:3x1GiB" in err
    assert "pipefit: worker 0 (device 0, " in err and "restart 1 of 1 continues after step" in err


def test_a_loss_that_is_no_number_is_told_once(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message appears at its step, and the JSON stays JSON; the training continues."""
    assert main(line(plan, "support.resumed_tasks:poisoned", "--set", "step=2", "--json", steps=5)) == 0
    out, err = capsys.readouterr()
    losses = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["losses"]
    assert losses[2:] == ["nan"] * 3 and all(isinstance(loss, float) for loss in losses[:2])
    assert err.count("the loss of step 2 is nan") == 1
    assert err.count("the loss of step") == 1


def test_a_loss_that_is_no_number_may_end_the_training(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--on-nan stop` exits with 7 and saves nothing of that step; it does not trigger a restart."""
    runs = str(tmp_path / "runs")
    more = ["--save", runs, "--every", "1", "--on-nan", "stop", "--restarts", "3"]
    assert main(line(plan, "support.resumed_tasks:poisoned", "--set", "step=2", *more)) == 7
    out, err = capsys.readouterr()
    assert out == ""
    assert "the loss of step 2 is nan: lower the learning rate" in err
    assert re.search(f"; steps done: 3, last saved: [12]; resume with --resume {runs}", err)
    assert "restart" not in err


@pytest.mark.parametrize(
    "option", ["--every 2", "--keep 2", "--on-failed-save stop", "--save-in-foreground", "--restarts 2"]
)
def test_options_about_checkpoints_need_a_folder_for_them(
    option: str, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without `--save` the options are refused by name, not ignored."""
    name, *value = option.split()
    assert main(line(plan, "zoo:mlp", name, *value)) == 2
    assert f"{name} needs a folder for checkpoints (--save DIR)" in capsys.readouterr().err


def test_a_folder_with_checkpoints_of_another_training_is_refused(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints of earlier steps are refused too: two trainings in one folder would remove each other's."""
    model, runs = ["support.resumed_tasks:named", "--set", "name=dropout"], str(tmp_path / "runs")
    assert main(line(plan, *model, "--save", runs, steps=1)) == 0
    assert main([*line(plan, *model, "--save", str(tmp_path / "other"), steps=2), "--seed", "5"]) == 0
    capsys.readouterr()
    more = ["--resume", str(tmp_path / "other"), "--save", runs]
    assert main(["train", str(plan), *model, "--no-numbers", "--steps", "3", *more]) == 2
    assert re.search(
        "has checkpoints of another training, .*, started .*: save to another", capsys.readouterr().err
    )


def test_a_damaged_checkpoint_costs_steps_and_no_line_of_metrics(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The workers detect it: the training resumes from the previous checkpoint, and the file has one line for
    every step.
    """
    model, runs, metrics = (
        ["support.resumed_tasks:named", "--set", "name=dropout"],
        tmp_path / "runs",
        tmp_path / "metrics.jsonl",
    )
    more = [*model, "--save", str(runs), "--every", "2", "--metrics", str(metrics)]
    assert main(line(plan, *more, steps=6)) == 0
    shard = runs / "step-00000006" / "worker-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(bytes(content))
    assert main(line(plan, *more, "--resume", str(runs), steps=8)) == 0
    assert re.search(
        r"00000006 is skipped: .*SHA-256 differs from the saved one; .*00000004 is used",
        capsys.readouterr().err,
    )
    rows = [json.loads(row) for row in metrics.read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == list(enumerate(undisturbed(8)))
