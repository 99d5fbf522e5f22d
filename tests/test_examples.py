"""The examples run unchanged, and the plain loop and pipefit's print the same losses."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from pipefit.checkpoints import find

EXAMPLES = Path(__file__).parent.parent / "examples"


def losses(script: str, capsys: pytest.CaptureFixture[str]) -> list[float]:
    """Return the losses that a script prints, run like `python` but in this process, which has imported
    torch.
    """
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return [float(found) for found in re.findall(r"loss ([0-9.]+)", capsys.readouterr().out)]


def test_five_lines_make_a_plain_loop_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    """Fifty steps on three devices give the losses of the plain loop, except for rounding of means over
    microbatches.
    """
    plain, piped = losses("plain_loop.py", capsys), losses("pipefit_loop.py", capsys)
    assert len(plain) == len(piped) == 50
    assert piped == pytest.approx(plain, rel=1e-3, abs=2e-5)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("script", "count"),
    [
        ("budget_loop.py", 50),
        ("fsdp_budget.py", 8),
        ("gan_budget.py", 8),
        ("lightning_budget.py", 8),
        ("trainer_budget.py", 30),
        ("vision_budget.py", 8),
    ],
)
def test_three_lines_keep_a_budget(
    script: str, count: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A budget below the loop's need changes no loss."""
    if script == "fsdp_budget.py":  # as torchrun sets them
        for name, value in ("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", 0):
            monkeypatch.setenv(name, str(value))
    planned = losses(script, capsys)
    monkeypatch.setattr("pipefit.apply", lambda *_, **__: "no plan")
    assert losses(script, capsys) == planned
    assert len(planned) == count
    assert sum(line.endswith(f"  # {n}") for line in text_of(script) for n in (1, 2, 3)) == 3


def text_of(script: str) -> list[str]:
    return (EXAMPLES / script).read_text().splitlines()


def test_the_restarting_loop_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After three steps, two of them saved, a run of five repeats the third step with the same loss, on three
    devices.
    """
    printed = []
    for steps in ("3", "5"):
        monkeypatch.setattr("sys.argv", ["it", str(tmp_path), "--steps", steps, "--every", "2"])
        printed.append(losses("restarting_loop.py", capsys))
    assert [len(one) for one in printed] == [3, 3]
    assert printed[0][2] == printed[1][0]
    assert [stage.device for stage in find(tmp_path).manifest.stages] == [0, 1, 2]


def test_five_lines_is_five_lines() -> None:
    """The pipefit loop adds five numbered lines to the plain one, and the step itself."""
    plain = set((EXAMPLES / "plain_loop.py").read_text().splitlines())
    piped = (EXAMPLES / "pipefit_loop.py").read_text().partition('"""\n\n')[2].splitlines()
    new = [line for line in piped if line not in plain]
    assert sum(bool(re.search(r"  # [1-5]$", line)) for line in new) == 5
    assert [line.strip() for line in new if not re.search(r"  # [1-5]$", line)] == [
        "loss = trainer.step(make_batch(32))"
    ]
