"""Commands without torch: their output, their files, and --json with JSON only."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
import torch

import pipefit
from pipefit import processes
from pipefit.cli import app, doctor, main, options
from pipefit.cli.train import lines_of_metrics
from pipefit.errors import FileError, UsageError
from pipefit.lowering import ENDLESS, SCHEDULES, lower
from pipefit.lowering.passes.recomputation import RECOMPUTE, recompute_decisions
from pipefit.planner import PLANNERS
from pipefit.runtime.options import StepReport, TrainOptions
from pipefit.schema import profile as profiles
from pipefit.schema import training
from pipefit.schema.cluster import Cluster
from pipefit.schema.json_io import dumps, load, save
from pipefit.schema.layer_costs import Kernel, KernelMemory
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.trace import Trace
from pipefit.simulator import simulate
from support.pipelines import make_plan, random_profile

PLAN = make_plan(random_profile(6), (2, 4))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a current folder with a profile, a plan, a program and a trace."""
    monkeypatch.chdir(tmp_path)
    save(PLAN.profile, "profile.json")
    save(PLAN, "plan.json")
    save(lower(PLAN), "program.json")
    save(simulate(PLAN), "trace.json")
    return tmp_path


def test_planning_saves_a_plan_and_explains_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`plan -o` saves a plan of the profile on the cluster, with the number of microbatches that the batch
    needs.
    """
    arguments = [
        "plan",
        "profile.json",
        "--cluster",
        "emulated:2x1GiB",
        "--batch-size",
        "4",
        "-o",
        "mine.json",
    ]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    made = load("mine.json", Plan)
    assert made.profile == load("profile.json", ModelProfile)
    assert made.cluster == Cluster.emulated((2, 1 << 30))
    assert made.training.batch_size == 4
    assert "stage" in out
    assert "mine.json" in err


def test_what_plan_and_simulate_predict_says_where_it_holds(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence names the processor, torch and threads of the profile, and one the unmeasured kernels: in
    the printed plan, and next to the simulated trace. JSON on stdout stays JSON.
    """
    assumed = replace(PLAN.profile.assumptions, cpu="Some CPU", capability="AVX9", torch="7.1")
    unknown = Kernel(operation="aten.sort", peak_bytes=None, reason="it is too large")
    profile = replace(PLAN.profile, assumptions=assumed, kernels=KernelMemory(kernels=(unknown,)))
    save(profile, "elsewhere.json")
    assert (
        main(["plan", "elsewhere.json", "-c", "emulated:2x1GiB", "--batch-size", "4", "-o", "theirs.json"])
        == 0
    )
    planned = "".join(capsys.readouterr())
    assert main(["simulate", "theirs.json"]) == 0
    simulated = "".join(capsys.readouterr())
    for told in (" ".join(planned.split()), " ".join(simulated.split())):
        assert told.count("Some CPU with AVX9, torch 7.1 and 1 thread: ") == 1
        assert (
            told.count("eaks do not include the memory that kernels need inside aten.sort: it is too large")
            == 1
        )
    assert main(["simulate", "theirs.json", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)
    assert "aten.sort" in err


def test_help_names_every_planner_and_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    """The help of `plan` lists the values of `--planner` and `--schedule`."""
    assert main(["plan", "--help"]) == 0
    words = capsys.readouterr().out.replace(",", " ").replace(".", " ").split()
    assert {*PLANNERS, *SCHEDULES, *ENDLESS} <= set(words)


@pytest.mark.parametrize("command", ["", *(str(known.name) for known in app.registered_commands)])
def test_help_fits_a_terminal_of_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All lines fit, and every sentence about a command is complete."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command.split(), "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines[1:] if len(line) > 80 or line.endswith("...")] == []


def test_planning_what_does_not_fit_exits_with_3(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An infeasible plan exits with 3, names the device that is short, and writes no file."""
    arguments = ["plan", "profile.json", "--cluster", "emulated:2x1B", "--batch-size", "4", "-o", "mine.json"]
    assert main([*arguments, "--planner", "exact"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "device" in err
    assert not (here / "mine.json").exists()


def test_planning_takes_how_the_model_is_trained(here: Path) -> None:
    """`plan --recompute` becomes decisions of the plan, and `--clip-norm` reaches its training."""
    line = (
        "plan profile.json --cluster emulated:2x1GiB --batch-size 4 --recompute except_last --clip-norm 0.5"
    )
    assert main([*line.split(), "-o", "mine.json"]) == 0
    made = load("mine.json", Plan)
    assert (made.training.clip_norm, made.training.batch_size) == (0.5, 4)
    count = made.training.microbatches
    expected = recompute_decisions(
        made.stages, made.profile.edges, "except_last", made.training.schedule, count
    )
    assert made.decisions == expected != ()


def test_simulating_saves_the_trace_of_the_simulator(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`simulate -o` saves the result of `simulate()`, and prints every device's peak."""
    assert main(["simulate", "plan.json", "--steps", "3", "-o", "mine.json"]) == 0
    assert load("mine.json", Trace) == simulate(PLAN, steps=3)
    assert "simulated: 3 steps" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["profile", "plan", "program", "trace"])
def test_showing_a_document_as_json_prints_the_document(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`show --json` prints exactly the file's content."""
    assert main(["show", f"{name}.json", "--json"]) == 0
    out, err = capsys.readouterr()
    assert out == (here / f"{name}.json").read_text()
    assert err == ""


def test_every_result_can_be_json_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json, plan, simulate and compare print one JSON value on stdout and nothing on stderr."""
    for line in (
        "plan profile.json --cluster emulated:2x1GiB --batch-size 4 --json",
        "simulate plan.json --json",
        "compare trace.json trace.json --json",
        "show hgx-h200 --json",
    ):
        assert main(line.split()) == 0
        out, err = capsys.readouterr()
        assert isinstance(json.loads(out), dict)
        assert err == ""


def test_showing_says_what_matters(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output for each kind of document has specific words: layers, actions, peaks, link rates."""
    expected = {
        "profile.json": ["layer0", "saved for backward", "(loss)"],
        "program.json": ["2 stages and 4 microbatches", "device 0: 0LOAD0 0F0"],
        "trace.json": ["simulated", "peak", "budget"],
        "dgx1-v100": ["v100", "31.75 GiB", "10.39*", "device7"],
    }
    for name, words in expected.items():
        assert main(["show", name]) == 0
        out = capsys.readouterr().out
        assert not [word for word in words if word not in out], out


def test_comparing_a_trace_with_itself_finds_no_difference(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same trace twice differs by zero bytes and zero per cent."""
    assert main(["compare", "trace.json", "trace.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["difference_bytes"] for row in found["devices"]] == [0, 0]
    assert found["measured"]["step_seconds"] == found["predicted"]["step_seconds"]


def test_the_doctor_tells_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    """The doctor's JSON has this interpreter, its torch and the available features; its text agrees."""
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert (
        found["torch"].partition("+")[0] == found["packages"]["torch"].partition("+")[0]
    )  # one may name its build
    assert found["memory_bytes"] > 0
    assert any(found["abilities"].values())
    assert main(["doctor"]) == 0
    assert found["torch"] in capsys.readouterr().out


def test_the_doctor_counts_gpus_of_a_kind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight equal GPUs are one line of a terminal; another kind has a separate count."""
    gpus = [{"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 79 << 30}] * 8
    facts: dict[str, Any] = {"torch": "2.13.0", "threads": 1, "gloo": True, "nccl": True, "gpus": gpus}
    monkeypatch.setattr(doctor, "_torch_facts", lambda: facts)
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert "gpus           8 x NVIDIA H100 80GB HBM3, 79.00 GiB\n" in told
    assert "yes  train on 8 GPUs" in told
    assert max(map(len, told.splitlines())) <= 80
    facts["gpus"] = [*gpus, gpus[0] | {"name": "other"}]
    assert main(["doctor"]) == 0
    assert "8 x NVIDIA H100 80GB HBM3, 79.00 GiB; 1 x other, 79.00 GiB\n" in capsys.readouterr().out


def test_the_doctor_tells_of_gpus_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor reports GPUs that torch counts although their driver is too old or broken."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", mock.Mock(side_effect=RuntimeError("driver too old"))
    )
    assert main(["doctor", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["gpus"] == []
    assert "GPUs cannot be used: driver too old" in said.err


def test_the_version_and_help_need_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`pipefit` alone shows help; `--version` the version; `-h` is `--help`."""
    assert main([]) == main(["-h"]) == main(["--version"]) == 0
    out = capsys.readouterr().out
    assert out.count("Exit codes") == 2
    assert pipefit.__version__ in out


def test_garbage_is_looked_for_less_often_in_a_process_of_its_own() -> None:
    """A command's imports and objects are frozen, and the interpreter does not collect them at exit. A
    process that calls `main` with arguments keeps its settings.
    """
    script = """
        import gc, sys
        from pipefit.cli import main
        known, frozen = gc.get_threshold(), gc.get_freeze_count()
        assert main(["fit", "-h"]) == 0
        assert (gc.get_threshold(), gc.get_freeze_count(), gc.isenabled()) == (known, frozen, True)
        for command, looked_for in (("fit", True), ("plan", False)):
            sys.argv[1:] = [command, "-h"]
            assert main() == 0
            assert gc.get_threshold()[0] > known[0] and gc.get_freeze_count() > frozen
            assert gc.isenabled() is looked_for, command
        sys.modules["triton"] = sys
        gc.unfreeze()
        assert main() == 0
        assert gc.get_freeze_count() == 0  # triton would take all that for leaks
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False, timeout=300,
        env=os.environ | {"PYTHONPATH": str(Path(pipefit.__file__).parents[1])},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("reader", ["head -c 1", "true"])
def test_a_reader_that_leaves_early_is_not_an_error(reader: str, here: Path) -> None:
    """`pipefit simulate --json | head` ends with an empty stderr, with more output than a pipe holds."""
    big = make_plan(random_profile(60), (30, 30), microbatches=200)
    save(big, "big.json")
    assert len(dumps(simulate(big))) > 1 << 17
    command = f"'{sys.executable}' -m pipefit simulate big.json --json | {reader}"
    environment = os.environ | {"PYTHONPATH": str(Path(pipefit.__file__).parents[1])}
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=300, check=True, env=environment
    )
    assert done.stdout in ("{", "")
    words = [
        line for line in done.stderr.splitlines() if not line.startswith("pipefit: simulating, ")
    ]  # if it is slow
    assert words == []


def test_an_interrupt_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends a command with 130 and a message on stderr."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "pipefit: stopped\n"


LIMITS = [
    (MemoryError(), 4, "(ulimit -v), and this command needs more (MemoryError)"),
    (
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        4,
        "(ulimit -v), and this command needs more",
    ),
    (
        ImportError("PLEASE READ THIS\n\nlibx.so: failed to map segment\n"),
        4,
        "needs more (libx.so: failed to map segment)",
    ),
    (
        OSError(errno.EMFILE, "Too many open files"),
        1,
        "a process may open 7 files here (ulimit -n), and this command needs",
    ),
    (RuntimeError("can't start new thread"), 1, "this user may have 7 processes and threads (ulimit -u)"),
    (GeneratorExit(), 1, "unexpected GeneratorExit; this is a defect"),
    (BaseExceptionGroup("all", [KeyboardInterrupt()]), 1, "unexpected BaseExceptionGroup: all"),
]


@pytest.mark.parametrize(("error", "code", "said"), LIMITS)
def test_a_limit_of_the_system_is_named(
    error: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In any command, and with any other exception, the result is one sentence, with code 4 if memory ran
    out.
    """

    def fail() -> None:
        raise error

    monkeypatch.setattr(processes, "_soft", lambda name: 7)
    monkeypatch.setattr(processes, "_of_control_groups", list)
    monkeypatch.setattr(doctor, "examine", fail)
    assert main(["doctor"]) == code
    err = capsys.readouterr().err
    assert said in err and err.startswith("pipefit: ") and err.count("\n") == 1


@pytest.mark.parametrize(("given", "seconds"), [([], (60, 120)), (["--timeout", "7"], (7, 7))])
def test_the_timeout_holds_for_the_start_too(
    given: list[str], seconds: tuple[float, float], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A given timeout applies to the start too, whose default is longer than an action's."""
    asked = []

    def train(*_: object, **options: object) -> None:
        limits = {name: value for name, value in options.items() if name.endswith("_seconds")}
        chosen = TrainOptions(**limits)
        asked.append((chosen.timeout_seconds, chosen.start_seconds))
        raise UsageError("enough")

    monkeypatch.setattr("pipefit.runtime.train", train)
    monkeypatch.setattr("pipefit.cli.train.resolve", lambda *_: None)
    assert main(["train", "plan.json", "zoo:mlp", *given]) == 2
    assert asked == [seconds]


def test_a_termination_is_told_and_cleared_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM, which schedulers send, ends a command with 143 and a message on stderr, and cleans up, even if
    it comes twice. Afterwards SIGTERM has its previous handler.
    """
    cleared = []

    def terminated() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            cleared.append(True)

    monkeypatch.setattr(doctor, "examine", terminated)
    assert main(["doctor"]) == 143
    assert capsys.readouterr().err == "pipefit: stopped by SIGTERM\n"
    assert cleared == [True]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_options_offer_all_that_there_is() -> None:
    """The choices of an option match the code, which help must not import."""
    (offered, _) = get_args(options.Recompute)
    assert get_args(offered) == RECOMPUTE
    assert set(get_args(options.Precision)) == set(get_args(training.Precision))
    assert get_args(options.Target) == get_args(profiles.Target)


def test_a_full_disk_is_a_sentence() -> None:
    """If output does not fit, the command ends with 6 and a remedy, whatever the interpreter still has to
    write.
    """
    path = str(Path(pipefit.__file__).parents[1])
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pipefit", "show", "dgx1-v100"],
            env={"PYTHONPATH": path}, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=300,
        )  # fmt: skip
    sentence = (
        "pipefit: the output cannot be written: No space left on device; "
        "free some space, or write it elsewhere\n"
    )
    assert (done.returncode, done.stderr) == (6, sentence)


def test_metrics_on_a_full_disk_name_the_file() -> None:
    """A failed write of a metrics line names the file and the step."""
    with (
        lines_of_metrics(Path("/dev/full"), 0) as note,
        pytest.raises(FileError, match=r"^/dev/full cannot .*: No space .* step 3"),
    ):
        note(
            StepReport(
                step=3, loss=1.0, seconds=1.0, samples_per_second=1.0, learning_rate=None, peak_bytes={}
            ),
            {},
        )
