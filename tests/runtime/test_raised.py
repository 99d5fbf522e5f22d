"""Exceptions of a model's code in a worker: reported with worker or device, and an exit code."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

import pipefit
from pipefit.cli import main
from pipefit.schema.plan import Plan
from support import raising_tasks

PLACES = {
    "factory": "while it started",
    "batch": "while it (built its layers|made its batch)",
    "loss": "(while it built its layers|at 1F0)",
    "forward": "(while it built its layers|at 1F0)",
    "backward": "(while it built its layers|at 1B0)",
    "optimizer": "while it built its layers",
    "step": "(while it built its layers|at 1STEP)",
}
CHECKED = ("batch", "loss", "optimizer")  # before the first step, where exceptions are mistakes of the model
MISTAKES = re.compile(r"\w*Error|Wordless|ExceptionGroup")
SAMPLE = [("factory", 0), ("factory", 15), ("loss", 15), ("forward", 3), ("step", 15)]
ALL = [(phase, number) for phase, number in product(raising_tasks.PHASES, range(len(raising_tasks.HAPPENS)))]


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Return a plan of two stages of two layers."""
    profile = pipefit.profile(raising_tasks.make(), microbatch_size=2)
    return pipefit.plan(profile, pipefit.load_cluster("emulated:2x1MiB"), batch_size=4, planner="uniform")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("phase", "number"),
    [*SAMPLE, *(pytest.param(*case, marks=pytest.mark.gallery) for case in ALL if case not in SAMPLE)],
)
def test_what_a_models_own_code_raises_in_a_worker_is_told(
    phase: str, number: int, plan: Plan, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An exception of the model's code in a worker is reported in one sentence without a traceback.

    Any exception: the worker with its device, layers and phase, code 5; out of memory: device and phase, code
    4; a failed check before the first step: the fault of the model, code 2.
    """
    path, what = tmp_path / "plan.json", list(raising_tasks.HAPPENS)[number]
    pipefit.save(plan, path)
    model = f"support.raising_tasks:make --set phase={phase} --set number={number}"
    line = f"train {path} {model} --steps 1 --no-numbers --timeout 100"
    code, where = main(line.split()), PLACES[phase]
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("pipefit:")][-1]
    if what.startswith("ran out"):
        assert code == 4
        assert re.search(
            f"^pipefit: device 1 {what.strip()} {where}: .*(MemoryError|can't allocate)", said
        ), said
    elif phase in CHECKED and MISTAKES.fullmatch(what.partition(":")[0]):
        assert code == 2
        assert re.search(r"^pipefit: the (batch function|loss|optimizer) of ", said), said
    else:
        assert code == 5
        expected = rf"^pipefit: worker 1 \(device 1, layers 2 to 3\) failed {where}: {re.escape(what)}"
        assert re.search(expected, said), said
