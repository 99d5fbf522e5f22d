"""`--json`: stdout is one JSON document for every command, and a failure is an object with its exit code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from pipefit.cli import app, main
from pipefit.errors import FileError
from pipefit.planner import plan
from pipefit.schema.cluster import Cluster
from pipefit.schema.json_io import ANSWERS, load, save
from pipefit.schema.profile import ModelProfile
from pipefit.simulator import simulate
from support.pipelines import make_plan, random_profile

COMMANDS = [str(known.name) for known in app.registered_commands]
PLAN = make_plan(random_profile(6), (2, 4))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a current folder with a profile, a plan and a trace."""
    monkeypatch.chdir(tmp_path)
    save(PLAN.profile, "profile.json")
    save(PLAN, "plan.json")
    save(simulate(PLAN), "trace.json")
    return tmp_path


def told(words: str, capsys: pytest.CaptureFixture[str], code: int) -> Any:
    """Return the document that a line prints before it exits with this code."""
    capsys.readouterr()
    assert main(words.split()) == code, words
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_fails_in_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All commands have the option, and report an unknown word as on stderr, with the exit code."""
    found = told(f"{command} --json --no-such-option", capsys, 2)
    assert found["exit_code"] == 2
    assert "--no-such-option" in found["error"] or "No such option" in found["error"]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("show none.json", 6),
        ("plan profile.json --cluster emulated:2x1B --batch-size 4 --planner exact --data 1", 3),
        ("simulate plan.json -o /proc/trace.json", 6),
        ("report plan.json -o /proc/page.html", 6),
        ("models os.path:join", 2),
        ("export plan.json --to megatron", 2),
        ("checkpoint nowhere", 6),
        ("train plan.json zoo:mlp --save /proc/runs", 6),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_failure_is_an_object_with_its_code(
    line: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence equals the one on stderr."""
    assert main(f"{line} --json".split()) == code
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["exit_code"] == code and found["error"] and f"pipefit: {found['error']}\n" in err


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        ("report plan.json", {"page"}),
        ("export plan.json --to pipelining", {"tool", "text"}),
        ("export plan.json --to perfetto -o events.json", {"tool", "file"}),
        ("diff plan.json plan.json", {"asked", "changes", "devices"}),
        ("clusters", {"dgx1-v100"}),
        ("show plan.json", {"pipefit", "version"}),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_result_is_one_document(line: str, keys: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Commands that write files name them; others print their result."""
    assert keys <= told(f"{line} --json", capsys, 0).keys()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("line", "code", "kind"),
    [
        ("diff plan.json plan.json", 0, "diff"),
        ("diff plan.json other.json", 0, "diff"),
        ("compare trace.json trace.json", 0, "compare"),
        ("plan profile.json --cluster emulated:2x1B --batch-size 4 --planner exact --data 1", 3, "error"),
        (
            "fit zoo:mlp --set widths=(8,) --set inputs=4 --cluster emulated:1x64KiB --microbatches 1",
            0,
            "fit",
        ),
        (
            "fit zoo:mlp --set inputs=4 -c emulated:1x64MiB --microbatches 1 --grow batch --to 2 --planner uniform",
            0,
            "fit-grow",
        ),
    ],
)
@pytest.mark.usefixtures("folder")
def test_an_answer_is_what_its_schema_says(
    line: str, code: int, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer has exactly the fields of its schema, with their types."""
    save(make_plan(PLAN.profile, (3, 3)), "other.json")
    found = told(f"{line} --json", capsys, code)
    assert TypeAdapter(ANSWERS[kind]).validate_json(json.dumps(found), strict=True) == found


@pytest.mark.usefixtures("folder")
def test_what_cannot_be_saved_is_in_the_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk is full when the result is ready, the single document is the error, with the result."""

    def full(*_: object) -> None:
        raise FileError("no space left")

    monkeypatch.setattr("pipefit.schema.json_io.save", full)
    found = told("simulate plan.json --json -o made.json", capsys, 6)
    assert found["error"] == "no space left" and found["result"]["pipefit"] == "trace"


@pytest.mark.usefixtures("folder")
def test_a_plan_that_is_certified_not_to_fit_has_its_trace_in_the_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With exit code 4 the dry run's peaks are still printed."""
    line = "zoo:mlp --set widths=(8,) --set inputs=4"
    assert main(f"profile {line} -b 2 -o mlp.json".split()) == 0
    made = plan(load("mlp.json", ModelProfile), Cluster.emulated((1, 1 << 20)), batch_size=4, planner="exact")
    save(replace(made, cluster=Cluster.emulated((1, 512)), prediction=None), "small.json")
    found = told(f"certify small.json {line} --json", capsys, 4)
    assert found["result"]["devices"][0]["budget_bytes"] == 512
