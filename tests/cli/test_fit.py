"""`pipefit fit`: output, files, exit codes, and user mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipefit.cli import main
from pipefit.schema.json_io import load
from pipefit.schema.plan import Plan

MODEL = "zoo:mlp --set widths=(64,32,16) --set inputs=20"
ASKED = f"fit {MODEL} --cluster emulated:2x44KiB --microbatches 2"
SMALL = f"fit {MODEL} --cluster emulated:2x1KiB --microbatches 2 --tensor 1"

TABLE: list[tuple[str, int, list[str]]] = [
    ("fit", 2, ["MODEL"]),
    ("fit zoo:mlp --grow layers", 2, ["--cluster"]),
    (f"{ASKED} --grow wings", 2, ["does not have a setting 'wings'", "widths"]),
    (f"{ASKED} --grow optimizer", 2, ["optimizer must be"]),
    (f"{ASKED} --grow inputs", 2, ["--set inputs and --grow inputs exclude each other", "--from"]),
    (f"{ASKED} --grow a-b", 2, ["--grow a-b", "name of a setting"]),
    (f"{ASKED} --grow batch -b 4", 2, ["--microbatch-size", "--from"]),
    (f"fit {MODEL} -c emulated:2x96KiB --grow batch --batch-size 4", 2, ["--batch-size", "--from"]),
    (f"{ASKED} --batch-size 4", 2, ["--batch-size", "--grow"]),
    (f"{ASKED} --tensor 2", 2, ["--tensor", "--grow"]),
    (f"{ASKED} --grow classes --data 3", 2, ["a stage of 3 replicas", "there are 2: use fewer"]),
    (f"{ASKED} --grow batch --from 0", 2, ["--from 0", "1 or more"]),
    (f"{ASKED} --grow batch --to many", 2, ["--to many", "whole number"]),
    (f"{ASKED} --grow batch --to {'0' * 19}1{'9' * 9000}", 2, ["is not a size", "whole number"]),
    (f"{ASKED} --grow batch --from 9 --to 8", 2, ["--from 9 to --to 8", "is empty"]),
    (f"{ASKED} --grow batch --step -1", 2, ["--step"]),
    (f"{ASKED} --grow batch --step {'9' * 5000}", 2, ["--step"]),
    (f"{ASKED} --grow memory --step 1furlong", 2, ["1furlong", "not a size"]),
    (f"{ASKED} --grow batch --schedule zigzag", 2, ["zigzag"]),
    (f"{ASKED} --grow batch --planner oracle", 2, ["oracle", "exact"]),
    (f"{ASKED} --grow batch --recompute sometimes", 2, ["--recompute", "always"]),
    (f"{ASKED} --grow devices --from 99", 2, ["7 layers, too few for 99 devices"]),
    (f"{ASKED} --grow batch -o none/plan.json", 6, ["create"]),
    (f"{ASKED} --grow batch --plot none/plot.html", 6, ["create"]),
    (
        f"fit {MODEL} -c emulated:2x1KiB --grow classes --microbatches 2 --tensor 1",
        3,
        ["classes=1 does not fit: layer", "needs at least"],
    ),
    (
        f"fit {MODEL} -c emulated:2x18KiB --grow classes --microbatches 2 --tensor 1 --planner exact",
        3,
        ["no plan was found for classes=1: in the leanest plan tried, device", "Tried: splits"],
    ),
    (
        f"fit {MODEL} -c emulated:2x1KiB --grow devices --microbatches 2 --tensor 1",
        3,
        ["devices=7 does not fit: layer", "needs at least"],
    ),
]


@pytest.mark.parametrize(("line", "code", "words"), TABLE, ids=[line[:90] for line, *_ in TABLE])
def test_a_mistake_has_its_sentence_and_its_code(
    line: str,
    code: int,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One sentence on stderr with the words; stdout is empty and nothing is written."""
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pipefit: ") and err.count("\n") == 1
    assert not [word for word in words if word not in err], err
    assert list(tmp_path.iterdir()) == []


def test_the_answer_is_printed_saved_and_plotted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan that `-o` saves is the answer's, passes `certify` with its setting and fails with the next."""
    monkeypatch.chdir(tmp_path)
    assert (
        main(f"{ASKED} --grow classes --planner exact --tensor 1 -o plan.json --plot plot.html".split()) == 0
    )
    out, err = capsys.readouterr()
    answer = int(out.split()[0].removeprefix("classes="))
    assert f"No plan was found for classes={answer + 1}: in the leanest plan tried, device" in out
    assert "saved to plan.json" in err and "saved to plot.html" in err
    made = load("plan.json", Plan)
    assert made.prediction is not None and max(made.prediction.peak_bytes) <= 44 << 10
    model = [*MODEL.split(), "--set"]
    assert main(["certify", "plan.json", *model, f"classes={answer}"]) == 0
    assert main(["certify", "plan.json", *model, f"classes={answer + 1}"]) == 6
    assert "<svg" in Path("plot.html").read_text(encoding="utf-8")


def test_json_is_the_whole_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """Both neighbours are certified, every value tried has its peaks, and stdout contains only the answer."""
    assert main([*ASKED.split(), "--grow", "batch", "--planner", "exact", "--tensor", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert (found["grow"], found["sense"], found["microbatches"]) == ("batch", "largest", 2)
    assert (
        found["value"] == found["microbatch_size"] == found["best"]["value"] == found["beyond"]["value"] - 1
    )
    assert found["best"]["certified"] and found["beyond"]["certified"]
    assert found["best"]["fits"] and not found["beyond"]["fits"]
    assert found["best"]["over_bytes"] <= 0 < found["beyond"]["over_bytes"]
    values = [row["value"] for row in found["tried"]]
    assert values == sorted(values)
    assert all((row["value"] <= found["value"]) == row["fits"] for row in found["tried"])
    assert found["impossible"] == {} and found["searched"].startswith("Tried: splits")


def test_the_kernels_are_those_of_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a cluster of GPUs the plan assumes CUDA's kernels, or the given ones."""
    monkeypatch.chdir(tmp_path)
    for cluster, more, expected in (
        ("4x-titan-rtx", "", "cuda"),
        ("4x-titan-rtx", "--target cpu", "cpu"),
    ):
        line = (
            f"fit {MODEL} -c {cluster} -b 1 --tensor 1 --grow classes --to 2 --no-certify -o plan.json {more}"
        )
        assert main(line.split()) == 0
        assert load("plan.json", Plan).profile.assumptions.target == expected


@pytest.mark.parametrize("grow", ["devices --planner exact", "memory --step 1KiB --planner exact"])
def test_the_smallest_cluster(grow: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The smallest value fits, and one step less does not."""
    line = f"fit {MODEL} --cluster emulated:2x36KiB --microbatches 2 --tensor 1 --no-certify --json --grow {grow}"
    assert main(line.split()) == 0
    found = json.loads(capsys.readouterr().out)
    step = 1024 if found["grow"] == "memory" else 1
    assert found["sense"] == "smallest"
    assert found["beyond"]["value"] == found["value"] - step
    assert found["best"]["fits"] and not found["beyond"]["fits"]
    assert not found["best"]["certified"]


@pytest.mark.gallery
def test_the_answer_says_how_devices_share_stages(capsys: pytest.CaptureFixture[str]) -> None:
    """All devices are used in the requested number of replicas or shards."""
    line = f"fit {MODEL} --cluster emulated:2x64KiB --batch-size 4 --grow classes --to 1 --no-certify --planner exact"
    assert main(f"{line} --data 2".split()) == 0
    assert "Stage 0 has 2 replicas" in capsys.readouterr().out
    assert main(f"{line} --tensor 2".split()) == 0
    assert "Stage 0 has 2 shards" in capsys.readouterr().out
