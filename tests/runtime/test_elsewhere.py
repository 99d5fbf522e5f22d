"""Profiles used on another machine: a warning, and unchanged figures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from pipefit.cli import main
from pipefit.errors import PipefitWarning
from pipefit.measure import kernels
from pipefit.measure.kernels import threads_of
from pipefit.models import build
from pipefit.planner import plan as make_plan
from pipefit.runtime import Trainer, certify
from pipefit.schema.cluster import Cluster
from pipefit.schema.json_io import save
from pipefit.schema.layer_costs import Kernel, KernelMemory
from pipefit.schema.plan import Plan
from pipefit.simulator import simulate
from support.known_profiles import profile
from support.random_trainings import accounts, random_case

SETTINGS = {"widths": (8, 16, 16, 4)}
MODEL = ["zoo:mlp", "--set", "widths=(8, 16, 16, 4)"]


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Return a plan for this machine, with one thread."""
    found = profile(build("mlp", **SETTINGS), microbatch_size=2)
    return make_plan(found, Cluster.emulated((2, 1 << 30)), batch_size=8, microbatches=4, planner="exact")


def assuming(plan: Plan, **assumed: Any) -> Plan:
    """Return the plan with other facts about its profile's machine."""
    return replace(
        plan, profile=replace(plan.profile, assumptions=replace(plan.profile.assumptions, **assumed))
    )


@pytest.mark.parametrize(
    ("assumed", "words"),
    [
        ({"cpu": "Other CPU"}, r"made on Other CPU with .+, not .+: "),
        ({"capability": "NONE"}, r"made on .+ with NONE, not .+: "),
        ({"processor": "0123"}, r"made on another .+ with different features: "),
        ({"torch": "1.0"}, r"made with torch 1\.0, not \d.+: "),
        ({"cpu": "Other CPU", "torch": "1.0"}, r"made with torch 1\.0, not .+, on Other CPU .+: "),
    ],
)
def test_another_machine_is_told_in_one_sentence(plan: Plan, assumed: dict[str, str], words: str) -> None:
    """Certifying and training on another machine each warn once, with the difference and its consequence."""
    task, other = build("mlp", **SETTINGS), assuming(plan, **assumed)
    with pytest.warns(PipefitWarning) as certified:
        certify(task, other)
    with threads_of(1), pytest.warns(PipefitWarning) as trained:
        Trainer(task, other)
    for told, meaning in (
        (certified, "certified peaks are those of the profile"),
        (trained, "may need more or less memory than planned"),
    ):
        (message,) = [str(w.message) for w in told if issubclass(w.category, PipefitWarning)]
        assert re.search(words, message)
        assert meaning in message
        assert "\n" not in message


def test_another_number_of_threads_is_told_where_it_matters(plan: Plan) -> None:
    """A trainer computes with this process's threads and warns of another number; a dry run uses the
    profile's.
    """
    task = build("mlp", **SETTINGS)
    with (
        threads_of(2),
        pytest.warns(PipefitWarning, match=r"made for 1 thread, not 2 \(.+\): this run may need"),
    ):
        Trainer(task, plan)
    with threads_of(2), warnings.catch_warnings():
        warnings.simplefilter("error", PipefitWarning)
        certify(task, plan)


def test_where_it_was_made_nothing_is_said(plan: Plan) -> None:
    """The profile's own machine gives no warning. A profile of CUDA kernels gives none on another processor,
    since it does not measure the CPU's.
    """
    task = build("mlp", **SETTINGS)
    cuda = make_plan(
        profile(task, microbatch_size=2, target="cuda"),
        plan.cluster,
        batch_size=8,
        microbatches=4,
        planner="exact",
    )
    with threads_of(1), warnings.catch_warnings():
        warnings.simplefilter("error", PipefitWarning)
        certify(task, plan)
        Trainer(task, plan)
        certify(task, assuming(cuda, cpu="Other CPU"))
    assert not cuda.profile.kernels.kernels
    assert not cuda.profile.assumptions.cpu


def test_kernels_of_cuda_measure_nothing_here(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiling, planning and certifying for CUDA measure no CPU kernel."""

    def refuse(operation: str, *_: object, **__: object) -> None:
        raise AssertionError(f"{operation} was measured")

    monkeypatch.setattr(kernels, "measured", refuse)
    task = build("mlp", **SETTINGS)
    found = profile(task, microbatch_size=2, target="cuda")
    made = make_plan(found, plan.cluster, batch_size=8, microbatches=4, planner="exact")
    peaks = certify(task, made).peak_bytes
    assert min(peaks) > 0
    assert certify(task, plan, target="cuda").peak_bytes == peaks


def test_a_dry_run_names_what_could_not_be_measured(plan: Plan) -> None:
    """A dry run names unmeasured kernels, even if the profile has named them, since certified peaks omit
    them.
    """
    (taken, *others) = plan.profile.kernels.kernels
    unknown = Kernel(operation=taken.operation, peak_bytes=None, reason="it is too large")
    other = replace(plan, profile=replace(plan.profile, kernels=KernelMemory(kernels=(unknown, *others))))
    with pytest.warns(
        PipefitWarning, match="do not include the memory that kernels need inside .+: it is too large"
    ) as told:
        certify(build("mlp", **SETTINGS), other)
    assert len(told) == 1
    with pytest.warns(
        PipefitWarning, match="do not include the memory that kernels need inside .+: it is too large"
    ):
        simulate(other)


def test_a_dry_run_elsewhere_certifies_what_the_profile_says(plan: Plan) -> None:
    """A dry run certifies the profile's kernel memory, such as a mebibyte, on any machine."""
    grown = tuple(
        kernel if kernel.peak_bytes is None else replace(kernel, peak_bytes=kernel.peak_bytes + (1 << 20))
        for kernel in plan.profile.kernels.kernels
    )
    other = replace(plan, profile=replace(plan.profile, kernels=KernelMemory(kernels=grown)))
    task = build("mlp", **SETTINGS)
    found, usual = certify(task, other).peak_bytes, certify(task, plan).peak_bytes
    assert all(1 << 20 <= ours < usual[device] + (1 << 20) + 1 for device, ours in enumerate(found))
    assert min(found) > max(usual)


@pytest.mark.parametrize("command", [["certify"], ["train", "--steps", "1"]])
def test_commands_print_it_to_stderr(
    plan: Plan, tmp_path: Path, capfd: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """Commands print one warning to stderr in the common format, and the workers of `train` print none."""
    save(assuming(plan, cpu="Other CPU", torch="1.0"), tmp_path / "plan.json")
    assert main([command[0], str(tmp_path / "plan.json"), *MODEL, *command[1:]]) == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if "Other CPU" in line]
    assert len(lines) == 1
    assert lines[0].startswith(
        f"pipefit: the profile was made with torch 1.0, not {torch.__version__}, on Other CPU"
    )


LESSER = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "2"}
COMPARED = """
import sys
from random import Random
sys.path[:0] = [{tests!r}]
import gallery
from support.random_trainings import accounts, plan_for
for account in accounts(plan_for(gallery.task("strided"), Random(7))):
    print(account.dry_run_bytes, account.oracle_bytes, account.simulated_bytes)
"""


@pytest.mark.gallery
def test_peaks_are_exact_on_a_lesser_processor() -> None:
    """On a common laptop's instruction set and two threads, dry run, simulator and allocator agree to the
    byte.
    """
    script = COMPARED.format(tests=str(Path(__file__).parent.parent))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **LESSER},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows
    assert all(len(set(row)) == 1 for row in rows)


def test_two_threads_are_exact_too() -> None:
    """A profile for two threads, and training on two, are exact too."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for account in accounts(random_case(Random(5), model="mlp")):
            assert account.dry_run_bytes == account.oracle_bytes == account.simulated_bytes
    finally:
        torch.set_num_threads(before)
