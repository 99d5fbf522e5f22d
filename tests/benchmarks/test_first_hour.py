"""The script for the first hour on a GPU, in its dry mode: every part runs on a CPU, and its claims hold
there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from support.gallery_samples import sampled
from support.process_tree import is_running

HERE = Path(__file__).parents[2] / "benchmarks" / "gpu"
sys.path.insert(0, str(HERE))

import first_hour  # noqa: E402 - the script's folder is on the path from here on
import parts  # noqa: E402
from first_hour import alone, concluded, main, one_part, run_part, shown  # noqa: E402
from machines import Cpu, Gpu  # noqa: E402
from parts import PARTS, Row  # noqa: E402

CLAIMED = [name for name in PARTS if name not in ("constants", "seconds")]  # those need a GPU's own figures


def check(name: str) -> None:
    """Check that a part measures its rows and its claims about bytes hold to the byte."""
    rows = list(run_part(name, Cpu(), "dry"))
    assert rows
    assert all(row.holds is not False for row in rows)
    assert any(row.holds for row in rows) == (name in CLAIMED)


@pytest.mark.parametrize("name", ["constants", "peaks-gpt"])
def test_a_part_runs_dry(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process memory, unmeasured on a CPU, and the peaks of a GPT in float32 run dry."""
    monkeypatch.setattr(parts, "PRECISIONS", ("float32",))
    check(name)


@pytest.mark.gallery
@pytest.mark.parametrize("name", PARTS)
def test_every_part_runs_dry(name: str) -> None:
    """All models and precisions, layers, histories, limits, seconds, and the collection of the tests for GPUs
    run dry.
    """
    check(name)


@pytest.mark.gallery
@pytest.mark.parametrize("name", sampled(["peaks-gpt", "largest", "seconds"], often=["peaks-gpt"]))
def test_nothing_is_expected_after_a_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a backward in the same process, profiling or certifying for CUDA would lose the GPU, so nothing
    is expected.
    """
    monkeypatch.setattr(parts, "MODELS", {"gpt": parts.MODELS["gpt"], "bert": parts.MODELS["bert"]})
    called = []
    for word in ("profile", "certify", "Trainer"):
        real = getattr(parts, word)
        monkeypatch.setattr(
            parts, word, lambda *a, real=real, word=word, **b: (called.append(word), real(*a, **b))[1]
        )
    check(name)
    assert called.count("Trainer") > 1
    assert "Trainer" not in called[: -called.count("Trainer")]


def test_what_is_measured_on_a_gpu_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is named by torch, for any build: a figure without its GPU would be lost."""
    properties = SimpleNamespace(name="some GPU", total_memory=1 << 34, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    named = Gpu().named()
    assert (named["gpu"], named["capability"], named["nccl"]) == ("some GPU", "9.0", "2.29.7")


def test_a_part_that_fails_leaves_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed part keeps its measured rows."""

    def failing(machine: object, scale: str) -> Iterator[Row]:
        yield Row(what="a", expected=1, found=1)
        raise RuntimeError("of the GPU")

    monkeypatch.setitem(PARTS, "failing", failing)
    path = tmp_path / "part.json"
    with pytest.raises(RuntimeError, match="of the GPU"):
        one_part(Namespace(part="failing", json=path, scale="dry"))
    assert [row["what"] for row in json.loads(path.read_text())["rows"]] == ["a"]


def test_a_claim_that_does_not_hold_is_shown() -> None:
    """A false claim is shown as such, with both figures; unmeasured claims are undecided."""
    assert shown(Row(what="a", expected=1 << 20, found=1 << 21, within=0.1)).endswith(
        "1.00 MiB        2.00 MiB  DIFFERS"
    )
    assert shown(Row(what="a", expected=1.0, found=1.05, unit="seconds", within=0.1)).endswith("ok")
    assert Row(what="a", expected=1, found=None, within=0.0).holds is None


@pytest.mark.gallery
def test_parts_run_in_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The JSON has the machine and the rows of each part; the exit code is 0 if all is as expected."""
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1] / "src"))
    path = tmp_path / "hour.json"
    assert main(["--dry", "--only", "constants", "largest", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert [part["part"] for part in document["parts"]] == ["constants", "largest"]
    assert all(part["rows"] and part["failure"] is None for part in document["parts"])
    assert document["machine"]["torch"]


def test_no_part_takes_ten_minutes_and_all_no_more_than_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Endless parts are ended and reported: parts that have not begun are named, on paper and in the JSON."""
    clock, limits = [1e6], list[float]()

    class Endless(subprocess.Popen[bytes]):
        """A process that never ends."""

        def __init__(self, line: list[str], **_: object) -> None:
            super().__init__([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:  # it has been killed
                return super().wait(60)
            limits.append(timeout)
            clock[0] += timeout
            raise subprocess.TimeoutExpired("part", timeout)

    monkeypatch.setattr(subprocess, "Popen", Endless)
    monkeypatch.setattr(first_hour, "described", dict)  # it runs other programs
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    path = tmp_path / "hour.json"
    assert main(["--dry", "--json", str(path), "--minutes", "25"]) == 1
    assert limits == [600, 600, 300]
    document = json.loads(path.read_text())
    assert [part["failure"] for part in document["parts"]] == [
        "longer than 600 s", "longer than 600 s", "longer than 300 s, which were left"
    ]  # fmt: skip
    assert [part["part"] for part in document["parts"]] + document["not_begun"] == list(PARTS)
    assert f"not begun: {', '.join(list(PARTS)[3:])}\n" in capsys.readouterr().out


def test_what_is_ended_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ended part keeps its rows and ends its child processes, so that the GPU is free."""
    row = {"what": "a", "expected": 1, "found": 1, "holds": True}
    script, child = tmp_path / "part.py", tmp_path / "child"
    script.write_text(
        "import json, pathlib, subprocess, sys, time\n"
        "started = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        f"pathlib.Path({str(child)!r}).write_text(str(started.pid))\n"
        f"told = pathlib.Path(sys.argv[sys.argv.index('--json') + 1])\n"
        f"(told.parent / 'new').write_text(json.dumps({{'rows': [{row!r}]}}))\n"
        "(told.parent / 'new').rename(told)\n"
        "time.sleep(1000)\n"
    )
    real = subprocess.Popen.wait

    def wait(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is None:
            return real(process, 60)
        told = Path(process.args[process.args.index("--json") + 1])  # type: ignore[index,union-attr]
        while not told.exists():
            time.sleep(0.01)
        raise subprocess.TimeoutExpired("part", timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    monkeypatch.setattr(first_hour, "__file__", str(script))
    done = alone("constants", Namespace(kind="hgx-h100", scale="dry"), 1.5)
    assert done["rows"] == [row]
    assert done["failure"] == "longer than 2 s, which were left"
    deadline = time.monotonic() + 60
    while is_running(int(child.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert concluded([done], []) == 1


def test_every_test_for_a_gpu_belongs_to_a_part() -> None:
    """Each test file runs in one part, none twice, without those of the emulation."""
    named = {file.name for file in parts.marked()}
    assert {"test_gpu.py", "test_gpu_moving.py", "test_target.py"} <= named
    assert not any("emulated" in name or "nccl" in name for name in named)
    assert len([name for name in PARTS if name.startswith("tests-")]) == len(named)
