"""`pipefit train --engine torch`: losses and checkpoints of pipefit's runtime, peaks of the engine's dry run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipefit.cli import main
from pipefit.errors import OutOfMemory, UsageError
from pipefit.models import build
from pipefit.schema.json_io import load, save
from pipefit.schema.plan import Plan
from pipefit.schema.post_mortem import PostMortem
from pipefit.schema.trace import Trace
from support.small_tasks import plan_of

MODEL = ["zoo:mlp", "--set", "widths=(16,8)"]


@pytest.fixture
def plan(tmp_path: Path) -> str:
    """Save a plan for two emulated devices; return its path."""
    return saved(plan_of(build("mlp", widths=(16, 8)), (2, 3)), tmp_path / "plan.json")


def saved(plan: Plan, path: Path) -> str:
    """Save a plan; return its path."""
    save(plan, path)
    return str(path)


def train(plan: str, *arguments: str) -> int:
    """Run the command."""
    return main(["train", plan, *MODEL, "--no-numbers", *arguments])


def test_losses_and_peaks(plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both engines train to the same losses; measured peaks are those of the engine's dry run."""
    results = {}
    for engine in ("pipefit", "torch"):
        assert train(plan, "--steps", "3", "--engine", engine, "--json") == 0
        results[engine] = json.loads(capsys.readouterr().out)
    assert results["torch"]["losses"] == pytest.approx(results["pipefit"]["losses"], rel=1e-6)
    certified = str(tmp_path / "certified.json")
    assert main(["certify", plan, *MODEL, "--engine", "torch", "-o", certified]) == 0
    measured = results["torch"]["trace"]["devices"]
    for device, dry in zip(measured, load(Path(certified), Trace).devices, strict=True):
        assert [sum(sample["bytes"]) for sample in device["memory"] if sample["step"] < 2] == [
            sample.total_bytes for sample in dry.memory
        ]
        assert [event["action"][1] for event in device["events"] if event["step"] == 2].count("B") == 2


def test_checkpoints_continue_on_either_engine(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A training that changes its engine twice has the losses of one that does not."""
    assert train(plan, "--steps", "3", "--json") == 0
    losses, changed = json.loads(capsys.readouterr().out)["losses"], []
    folder = str(tmp_path / "runs")
    for steps, engine in enumerate(("torch", "pipefit", "torch"), start=1):
        resumed = ["--resume", folder] if steps > 1 else []
        saving = ["--save", folder, "--steps", str(steps), *resumed]
        assert train(plan, "--engine", engine, "--json", *saving) == 0
        changed += json.loads(capsys.readouterr().out)["losses"]
    assert changed == pytest.approx(losses, rel=1e-6)


def test_a_device_without_room(tmp_path: Path) -> None:
    """The error names the device and the action; the post-mortem has the memory at that moment."""
    tight = plan_of(build("mlp", widths=(16, 8)), (2, 3), memory_bytes=200_000)
    small = saved(tight, tmp_path / "plan.json")
    told = tmp_path / "died.json"
    assert train(small, "--engine", "torch", "--post-mortem", str(told)) == OutOfMemory.exit_code
    died = load(told, PostMortem)
    assert died.lack_bytes > 0
    assert f"device {died.device}" in died.sentence


def test_a_plan_for_another_engine_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plans that torch's engine cannot run are refused before workers start."""
    endless = plan_of(build("mlp", widths=(16, 8)), (2, 3), schedule="pipedream")
    assert train(saved(endless, tmp_path / "plan.json"), "--engine", "torch") == UsageError.exit_code
    assert "ends every step with an empty pipeline" in capsys.readouterr().err
