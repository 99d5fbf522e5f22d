"""Master weights from the command line: every command takes the precision, and every document keeps it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipefit.cli import main
from pipefit.schema.json_io import load
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from support.gallery_samples import sampled

GPT = ["zoo:gpt", "--set", "layers=1", "--set", "hidden=16", "--set", "heads=2", "--set", "vocabulary=32"]
GPT += ["--set", "sequence=8", "--set", "dropout=0.0"]


@pytest.mark.gallery
@pytest.mark.parametrize(
    "precision", sampled(["master-bfloat16", "master-float16"], often=["master-bfloat16"])
)
def test_every_command_takes_it(precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A profile, its plan and the training agree on the precision; the profile's layers are in half
    precision, with four bytes a parameter of copies.
    """
    profile, plan, trace = (str(tmp_path / f"{name}.json") for name in ("profile", "plan", "trace"))
    assert main(["profile", *GPT, "--precision", precision, "--microbatch-size", "2", "-o", profile]) == 0
    assert main(["plan", profile, "--cluster", "emulated:2x64MiB", "--batch-size", "4", "-o", plan]) == 0
    assert main(["certify", plan, *GPT]) == 0
    if precision == "master-bfloat16":  # workers take seconds to start
        assert main(["train", plan, *GPT, "--steps", "1", "-o", trace]) == 0
    assert precision in capsys.readouterr().out
    known, made = load(profile, ModelProfile), load(plan, Plan)
    assert (known.assumptions.precision, made.training.precision) == (precision, precision)
    trained = [cost for cost in known.measurements[0].costs if cost.parameters]
    assert trained
    for cost in trained:
        assert {parameter.dtype for parameter in cost.parameters} == {precision.removeprefix("master-")}
        assert cost.early_state_bytes == 2 * cost.parameter_bytes


def test_fit_counts_the_copies(capsys: pytest.CaptureFixture[str]) -> None:
    """The smallest device that fits has room for eight bytes more a parameter than without master weights:
    half of them for the copy, and half because AdamW's state is in float32.
    """
    line = ["fit", "zoo:mlp", "--set", "widths=(64,64)", "--set", "optimizer=adamw", "--set", "inputs=20"]
    line += [
        "--cluster",
        "emulated:1x1MiB",
        "--microbatches",
        "2",
        "--grow",
        "memory",
        "--step",
        "1KiB",
        "--json",
    ]
    line += ["--planner", "exact"]  # joint would free memory by recomputation and offloading
    needed = {}
    for precision in ("bfloat16", "master-bfloat16"):
        assert main([*line, "--precision", precision]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["best"]["certified"]
        needed[precision] = found["best"]["peak_bytes"][0]
    assert needed["master-bfloat16"] - needed["bfloat16"] >= 8 * found["parameters"]
