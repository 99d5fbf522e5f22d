"""Readable documents that cannot be executed: every command reports a fault of the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

from pipefit.cli import main
from pipefit.schema.json_io import save
from pipefit.simulator import simulate
from support.pipelines import make_plan, random_profile

RECOMPUTED = {"stage": 0, "what": "recompute", "subject": {"start": 0, "stop": 1}}
UPDATED = {
    "stage": 0,
    "what": "update",
    "subject": {"start": 0, "stop": 2, "kind": "optimizer"},
    "place": "host",
}
AS_PROGRAM = ["simulate", "report", "export", "diff first", "diff second", "certify", "train"]
AS_TIMES = AS_PROGRAM[:5]  # commands that need the duration of a step
LINES = {
    "simulate": "simulate bad.json",
    "report": "report bad.json -o page.html",
    "export": "export bad.json --to perfetto -o events.json",
    "diff first": "diff bad.json plan.json",
    "diff second": "diff plan.json bad.json",
    "certify": "certify bad.json nowhere:make",
    "train": "train bad.json nowhere:make",
}


def _twice(plan: dict[str, Any]) -> None:
    plan["stages"][1]["grid"] = plan["stages"][0]["grid"]


def _unknown(plan: dict[str, Any]) -> None:
    plan["training"]["schedule"] = "1f1c"


def _again(plan: dict[str, Any]) -> None:
    plan["decisions"] = [RECOMPUTED, RECOMPUTED]


def _apart(plan: dict[str, Any]) -> None:
    plan["cluster"]["links"] = []


def _hostless(plan: dict[str, Any]) -> None:
    plan["decisions"] = [UPDATED]


@pytest.mark.parametrize(
    ("damage", "words", "lines"),
    [
        (_twice, "1f1b supports one stage on each device, not 2", AS_PROGRAM),
        (_unknown, "unknown schedule '1f1c': did you mean 1f1b?", AS_PROGRAM),
        (_again, "layer 0 is already recomputed", AS_PROGRAM),
        (_apart, "device0 and host0 are not connected", AS_TIMES),
        (_hostless, "give the host a memory_bandwidth", AS_TIMES),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_a_bad_file(
    damage: Callable[[dict[str, Any]], None],
    words: str,
    lines: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command exits with 6 and a sentence that names the file, before it reads a model, which is missing
    here.
    """
    monkeypatch.chdir(tmp_path)
    save(make_plan(random_profile(6), (2, 4)), "plan.json")
    plan = json.loads(Path("plan.json").read_text())
    damage(plan)
    Path("bad.json").write_text(json.dumps(plan))
    for name in lines:
        assert main(LINES[name].split()) == 6, name
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("pipefit: bad.json cannot be used: "), name
        assert words in last, name


def test_a_trace_of_no_actions_is_a_bad_file_alone_and_beside_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence names the invalid trace; if two traces do not match, the question is wrong, code 2."""
    monkeypatch.chdir(tmp_path)
    plan = make_plan(random_profile(6), (2, 4))
    save(plan, "plan.json")
    save(simulate(plan), "trace.json")
    save(simulate(make_plan(random_profile(6), (6,))), "other.json")
    trace = json.loads(Path("trace.json").read_text())
    trace["devices"][0]["events"][0]["action"] = "1e9LOAD3"
    Path("bad.json").write_text(json.dumps(trace))
    for files in ("bad.json", "plan.json bad.json", "trace.json bad.json", "bad.json trace.json"):
        assert main(["report", *files.split(), "-o", "page.html"]) == 6
        assert "bad.json cannot be used: '1e9LOAD3' is not an action" in capsys.readouterr().err
    assert main(["report", "plan.json", "other.json", "-o", "page.html"]) == 2
    assert "different devices" in capsys.readouterr().err


@pytest.mark.parametrize(
    "path",
    [("training", "schedule"), ("cluster", "devices", 0, "kind", "name"), ("profile", "model")],
    ids=str,
)
@pytest.mark.parametrize("more", [[], ["--json"]], ids=str)
def test_no_sentence_repeats_a_name_of_ten_thousand_letters(
    path: tuple[str | int, ...],
    more: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The name is cut, on stderr and in the object that --json prints; the rest of the sentence is
    complete.
    """
    monkeypatch.chdir(tmp_path)
    save(make_plan(random_profile(6), (2, 4)), "plan.json")
    plan = json.loads(Path("plan.json").read_text())
    inner: Any = plan
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = "N" * 10_000
    plan["cluster"]["devices"][0]["kind"]["operation_seconds"] = -7 if "kind" in path else 0
    plan["profile"]["measurements"] *= 1 + ("profile" in path)
    Path("bad.json").write_text(json.dumps(plan))
    assert main(["simulate", "bad.json", *more]) == 6
    out, err = capsys.readouterr()
    assert "NNNN..." in err
    assert len(out + err) < 2000
    assert ("choose one of gpipe" in err) == ("schedule" in path)


@pytest.mark.parametrize("figure", [5e-324, 1e-200, 1e200, 1.7e308])
def test_a_rate_or_delay_that_cannot_be_is_a_bad_file(
    figure: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An impossible figure of a cluster is refused by its place, or the plan's time is finite and
    positive.
    """
    monkeypatch.chdir(tmp_path)
    plan = make_plan(random_profile(6), (2, 4))
    save(plan.profile, "profile.json")
    hosts = tuple(replace(host, memory_bandwidth=1e10) for host in plan.cluster.hosts)
    save(replace(plan.cluster, hosts=hosts), "cluster.json")
    whole = json.loads(Path("cluster.json").read_text())
    for part, name in (
        (lambda data: data["links"][0], "bytes_per_second"),
        (lambda data: data["links"][0], "latency_seconds"),
        (lambda data: data["links"][0], "efficiency"),
        (lambda data: data["hosts"][0], "memory_bandwidth"),
        (lambda data: data["devices"][0]["kind"], "memory_bandwidth"),
        (lambda data: data["devices"][0]["kind"], "bandwidth_reached"),
        (lambda data: data["devices"][0]["kind"], "operation_seconds"),
        (lambda data: data["devices"][0]["kind"]["flops"], "float32"),
        (lambda data: data["devices"][0]["kind"]["flops_reached"], "float32"),
    ):
        data = deepcopy(whole)
        part(data)[name] = figure
        Path("bad.json").write_text(json.dumps(data))
        code = main(["plan", "profile.json", "--cluster", "./bad.json", "--planner", "uniform", "--json"])
        out, err = capsys.readouterr()
        if code == 0:
            assert figure < 1 and name in ("latency_seconds", "operation_seconds"), name
            assert isfinite(json.loads(out)["prediction"]["step_seconds"])
        else:
            assert code == 6, (name, err)
            assert "./bad.json is not valid: " in err, (name, err)
