"""`pipefit report` and `pipefit export`: new files from plans and traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipefit.cli import main
from pipefit.planner import plan
from pipefit.schema.cluster import Cluster
from pipefit.schema.json_io import save
from pipefit.simulator import simulate
from support.pipelines import random_profile


@pytest.fixture(autouse=True)
def documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create a profile, a plan of it and its trace in a new folder."""
    monkeypatch.chdir(tmp_path)
    made = plan(random_profile(6), Cluster.emulated((3, 1 << 30)), microbatches=4, planner="exact")
    save(made.profile, "profile.json")
    save(made, "plan.json")
    save(simulate(made), "trace.json")


@pytest.mark.parametrize("words", ["plan.json", "trace.json", "plan.json trace.json"])
def test_a_page_is_written_beside_the_document(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a name the page has the document's, and stderr says where it is."""
    assert main(["report", *words.split()]) == 0
    target = Path(words.split(maxsplit=1)[0]).with_suffix(".html")
    assert target.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert capsys.readouterr().err.endswith(f"saved to {target}\n")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("report profile.json", 2, "is not a plan, trace or post-mortem"),
        ("report missing.json", 6, "missing.json"),
        ("report .", 6, "is a folder"),
        ("report /", 6, "is a folder"),
        ("report plan.json -o none/page.html", 6, "create"),
        ("report plan.json profile.json", 6, "profile"),
        ("export profile.json --to perfetto", 2, "is not a plan or a trace"),
        ("export trace.json --to pipelining", 2, "is not a plan"),
        ("export plan.json --to megatron", 2, "Megatron"),
        ("export plan.json", 2, "--to"),
    ],
)
def test_what_cannot_be_written_is_refused(
    words: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each mistake has its exit code and a word of the sentence; no page is left."""
    assert main(words.split()) == code
    assert said in capsys.readouterr().err
    assert not list(Path().glob("*.html"))


def test_exports_go_to_stdout_or_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    """Perfetto's events of a plan equal those of its trace; the CSV has a row for each device."""
    assert main(["export", "plan.json", "--to", "perfetto"]) == 0
    of_plan = json.loads(capsys.readouterr().out)
    assert main(["export", "trace.json", "--to", "perfetto", "-o", "events.json"]) == 0
    assert json.loads(Path("events.json").read_text(encoding="utf-8")) == of_plan
    assert main(["export", "plan.json", "--to", "pipelining"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
