"""Commands with torch: predicted, certified and measured peaks are one number."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pipefit.cli import main
from pipefit.schema.json_io import load, save
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.trace import Trace

MODEL = ["zoo:mlp", "--set", "widths=(64,32,16)", "--set", "inputs=20"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with a profile and a plan, by the commands."""
    here = tmp_path_factory.mktemp("folder")
    assert main(["profile", *MODEL, "--microbatch-size", "4", "-o", str(here / "profile.json")]) == 0
    line = [
        "plan",
        str(here / "profile.json"),
        "--cluster",
        "emulated:2x64MiB",
        "--batch-size",
        "16",
        "--stages",
        "2",
    ]
    assert main([*line, "-o", str(here / "plan.json")]) == 0
    return here


def test_profiling_saves_a_profile_of_the_model(folder: Path) -> None:
    """The profile has the layers requested by `--set`, at the requested microbatch size."""
    profile = load(folder / "profile.json", ModelProfile)
    assert profile.layers[0] == "linear0"
    assert len(profile.layers) == 7
    assert [m.microbatch_size for m in profile.measurements] == [4]


def test_three_readers_agree(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """simulate, certify and train give the same peaks to the byte, and compare reports this."""
    names = [str(folder / f"{name}.json") for name in ("simulated", "certified", "measured")]
    plan = str(folder / "plan.json")
    assert main(["simulate", plan, "-o", names[0]]) == 0
    assert main(["certify", plan, *MODEL, "-o", names[1]]) == 0
    assert main(["train", plan, *MODEL, "--steps", "2", "-o", names[2]]) == 0
    assert "loss" in capsys.readouterr().out
    for name in names[:2]:
        assert main(["compare", name, names[2], "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["devices"]
        assert [row["difference_bytes"] for row in rows] == [0, 0]


def test_three_numbers_are_certified_for_a_gpu(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For target cuda requested, allocated and reserved bytes are printed and saved, for the settings of the
    environment or of the command line; unsimulated settings are refused, and so are settings for a CPU.
    """
    line = ["certify", str(folder / "plan.json"), *MODEL, "--target", "cuda"]
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert main([*line, "-o", str(folder / "three.json")]) == 0
    assert (
        "most memory that a GPU holds (caching allocator: expandable_segments:True" in capsys.readouterr().out
    )
    for device in load(folder / "three.json", Trace).devices:
        assert device.allocator is not None
        assert device.allocator.requested_bytes == device.peak_bytes
        assert device.allocator.reserved_bytes == 2 << 20
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.8")
    assert main(line) == 2
    assert "PYTORCH_CUDA_ALLOC_CONF: the allocator setting garbage" in capsys.readouterr().err
    assert main([*line, "--alloc-conf", ""]) == 0
    assert "caching allocator: default settings" in capsys.readouterr().out
    assert main([*line[:-1], "cpu", "--alloc-conf", "expandable_segments:True"]) == 2
    assert "--alloc-conf is for target cuda" in capsys.readouterr().err


def test_training_as_json_has_losses_and_trace(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`train --json` prints a loss for each step and the measured trace."""
    assert main(["train", str(folder / "plan.json"), *MODEL, "--steps", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["losses"]) == 2
    assert found["trace"]["source"] == "measured"


def test_training_writes_a_line_for_each_step(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`train --metrics` writes a line of JSON per step, with the losses of `--json`."""
    lines = tmp_path / "steps.jsonl"
    assert (
        main(["train", str(folder / "plan.json"), *MODEL, "--steps", "3", "--metrics", str(lines), "--json"])
        == 0
    )
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["loss"] for row in rows] == json.loads(capsys.readouterr().out)["losses"]
    assert all(row["seconds"] > 0 for row in rows)
    predicted = load(folder / "plan.json", Plan).prediction
    assert predicted is not None
    for row in rows[1:]:  # the first one creates the optimizer's state
        assert [row["peak_bytes"][str(device)] for device in range(2)] == [*predicted.peak_bytes]
        assert row["samples_per_second"] > 0 and row["mfu"] is None


def test_training_logs_a_line_for_each_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines on stderr have loss, rates and the fullest device; `--log-every` counts steps; the last step is
    always logged.
    """
    line = ["train", str(folder / "plan.json"), *MODEL, "--steps", "5", "--log-every", "2"]
    assert main(line) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert [line.split("  ")[0] for line in lines] == [f"step {number} of 5" for number in (2, 4, 5)]
    assert all(
        re.search(r"loss [\d.]+  [\d,.]+ samples/s  \S+ TFLOP/s  device [01]: .* of 64.00 MiB$", line)
        for line in lines
    )
    assert main([*line, "--json"]) == 0
    assert "step " not in capsys.readouterr().err


def test_a_certificate_is_refused_to_a_plan_that_does_not_fit(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Certify exits with 4 and names the device; the trace is saved, as evidence."""
    text = (folder / "plan.json").read_text().replace(str(64 << 20), "1000")
    (tmp_path / "plan.json").write_text(text)
    assert main(["certify", str(tmp_path / "plan.json"), *MODEL, "-o", str(tmp_path / "trace.json")]) == 4
    assert "1000 B" in capsys.readouterr().err
    assert max(load(tmp_path / "trace.json", Trace).peak_bytes) > 1000


def test_numbers_are_certified_when_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`certify --numbers` prints the comparison before the peaks; with --json stdout has only the trace."""
    assert main(["certify", str(folder / "plan.json"), *MODEL, "--numbers"]) == 0
    assert (
        "computes the same numbers as a chain and as a module: 2 microbatches of 4, losses"
        in capsys.readouterr().out
    )
    assert main(["certify", str(folder / "plan.json"), *MODEL, "--numbers", "--json"]) == 0
    told = capsys.readouterr()
    assert "as a module" in told.err
    assert json.loads(told.out)["source"] == "dry run"


def test_a_chain_of_other_numbers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model with state that a trace loses exits with 2, and one sentence names the number that differs;
    without --numbers its peaks are certified. With --no-numbers it trains all the same.
    """
    model, paths = (
        "support.untraceable_models:remembering",
        [str(tmp_path / name) for name in ("profile.json", "plan.json")],
    )
    assert main(["profile", model, "--microbatch-size", "2", "-o", paths[0]]) == 0
    assert main(["plan", paths[0], "--cluster", "emulated:1x1MiB", "--batch-size", "4", "-o", paths[1]]) == 0
    assert main(["certify", paths[1], model]) == 0
    capsys.readouterr()
    assert main(["certify", paths[1], model, "--numbers"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert "the loss of microbatch 2 is" in told.err
    assert main(["train", paths[1], model, "--steps", "1", "--no-numbers"]) == 0


def test_a_model_of_several_dtypes_is_certified_and_trained_as_it_is(tmp_path: Path) -> None:
    """A frozen bfloat16 model with float32 adapters is not cast to either."""
    paths = [str(tmp_path / name) for name in ("profile.json", "plan.json")]
    assert main(["profile", "support.two_dtypes:adapted", "--microbatch-size", "2", "-o", paths[0]]) == 0
    assert main(["plan", paths[0], "--cluster", "emulated:1x1MiB", "--batch-size", "4", "-o", paths[1]]) == 0
    assert load(paths[1], Plan).training.precision == "bfloat16"
    assert main(["certify", paths[1], "support.two_dtypes:adapted"]) == 0
    assert main(["train", paths[1], "support.two_dtypes:adapted", "--steps", "1"]) == 0


def test_a_plan_for_another_model_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan and a model that do not match exit with 6, before anything runs."""
    save(load(folder / "plan.json", Plan), folder / "again.json")
    for command in ("certify", "train"):
        assert main([command, str(folder / "again.json"), "zoo:mlp"]) == 6
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("pipefit: ")
        assert "Traceback" not in err


@pytest.mark.parametrize("runs", ["incremental", pytest.param("trimmed", marks=pytest.mark.gallery)])
def test_training_runs_make_the_additive_planner_possible(
    runs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`profile --runs` adds two numbers a layer, keeps its runs and reuses them, and `plan` uses them for the
    default training. Other settings are refused by both.
    """
    store, made = tmp_path / "runs.json", tmp_path / "profile.json"
    line = ["profile", *MODEL, "--microbatch-size", "4", "--runs", runs, "--cluster", "emulated:3x1MiB"]
    line += ["--store", str(store), "-o", str(made)]
    assert main(line) == 0
    before = store.read_text()
    found = load(made, ModelProfile)
    assert found.additive is not None and len(found.additive.mem_isolated) == 7
    assert main(line) == 0
    assert store.read_text() == before and load(made, ModelProfile) == found
    ask = ["plan", str(made), "--cluster", "emulated:3x1MiB", "--planner", "additive", "--schedule", "gpipe"]
    assert main([*ask, "-o", str(tmp_path / "plan.json")]) == 0
    planned = load(tmp_path / "plan.json", Plan)
    assert planned.profile.additive == found.additive and planned.training == found.additive.training
    assert main([*ask, "--clip-norm", "1"]) == 2
    assert "unclipped gradients, not clipped gradients: plan for that training" in capsys.readouterr().err
    assert main([*line, "--clip-norm", "1"]) == 6
    assert "runs made for unclipped gradients, not clipped gradients" in capsys.readouterr().err


def test_training_runs_need_devices_and_devices_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Each alone is a usage error, before any work."""
    for alone in (["--runs", "trimmed"], ["--cluster", "emulated:3x1MiB"]):
        assert main(["profile", *MODEL, "--microbatch-size", "4", *alone]) == 2
        assert "--runs and --cluster go together" in capsys.readouterr().err


def test_a_model_is_planned_in_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command profiles the model for the cluster's kernels; the plan equals that of the profile."""
    profile, plans = (
        str(tmp_path / "profile.json"),
        [str(tmp_path / name) for name in ("one.json", "two.json")],
    )
    model = ["zoo:mlp", "--set", "widths=(64, 32, 16, 8)"]
    ask = ["--cluster", "4x-titan-rtx", "--stages", "2", "--batch-size", "16", "--data", "1"]
    assert main(["profile", *model, "--microbatch-size", "4", "--target", "cuda", "-o", profile]) == 0
    assert main(["plan", profile, *ask, "-o", plans[0]]) == 0
    assert main(["plan", *model, "--microbatch-size", "4", *ask, "-o", plans[1]]) == 0
    one, two = (load(Path(path), Plan) for path in plans)
    assert (one.stages, one.decisions, one.profile) == (two.stages, two.decisions, two.profile)
    capsys.readouterr()
    assert main(["plan", profile, "--target", "cuda", *ask]) == 2
    assert "are for a MODEL to profile" in capsys.readouterr().err


GPUS = """
name = "gpus"
backend = "cuda"

[kinds.gpu]
flops = { float32 = 1e13 }
memory_bandwidth = "1TB/s"
context = "10MiB"
communicator = "0"
cublas_workspace = "1MiB"

[[devices]]
count = 2
kind = "gpu"
memory = "MEMORY"

[[hosts]]
memory = "1GiB"

[[links]]
members = ["device*", "host0"]
bytes_per_second = "10GB/s"
"""


def test_a_plan_for_gpus_is_held_against_what_their_processes_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that fits only by its tensors is refused with 3, and the certificate of such a plan with 4.

    Without a dry run the plan says so, and keeps the reserve of its kind of GPU or of the command.
    """
    for name, memory in (("small.toml", "13.5MiB"), ("large.toml", "1GiB")):
        (tmp_path / name).write_text(GPUS.replace("MEMORY", memory))
    model, out = ["zoo:mlp", "--set", "widths=(64, 32, 16, 8)"], str(tmp_path / "plan.json")
    small, large = (["--cluster", str(tmp_path / name), "-o", out] for name in ("small.toml", "large.toml"))
    assert main(["plan", *model, *large]) == 0
    assert "By a dry run, the process of device" in capsys.readouterr().out
    assert main(["plan", *model, *small]) == 3
    assert "the process of device 0 needs" in capsys.readouterr().err
    assert main(["plan", *model, *small, "--no-certify"]) == 0
    told = capsys.readouterr().out
    assert "Budgets reserve 12.00 MiB of a device" in told  # a context and two workspaces
    assert "was not checked" in told
    assert main(["certify", out, *model]) == 4
    assert "over its 13.50 MiB" in capsys.readouterr().err
    for reserve, nbytes in (("25%", 1 << 28), ("100MiB", 100 << 20)):
        assert main(["plan", *model, *large, "--reserve", reserve, "--no-certify"]) == 0
        assert set(load(Path(out), Plan).cluster.reserves) == {nbytes}
    for wrong in ("100%", "2GiB", "some"):
        assert main(["plan", *model, *large, "--reserve", wrong]) == 2


def test_training_that_is_resumed_has_the_losses_of_one_that_was_not(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--save`, `--every`, `--keep` and `--resume` report the saved step, the resumed step, and the remaining
    steps.
    """
    line, runs = ["train", str(folder / "plan.json"), *MODEL], str(tmp_path / "runs")
    told = tmp_path / "metrics.jsonl"
    metrics = ["--metrics", str(told)]
    assert main([*line, "--steps", "5", "--json", *metrics]) == 0
    whole = json.loads(capsys.readouterr().out)["losses"]
    told.write_text("".join(told.read_text().splitlines(keepends=True)[:-1]))  # as after four steps
    assert main([*line, "--steps", "3", "--save", runs, "--every", "2", "--keep", "1"]) == 0
    assert f"1 checkpoint of 32.20 KiB in {runs}, the newest of step 3;" in capsys.readouterr().out
    assert [path.name for path in Path(runs).iterdir()] == ["step-00000003"]
    assert main([*line, "--steps", "5", "--resume", runs, "--json", *metrics]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["losses"] == whole[3:]
    assert f"resuming from {runs}/step-00000003, after step 3" in err
    rows = [json.loads(row) for row in told.read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == list(enumerate(whole))
    assert main([*line, "--steps", "3", "--resume", runs]) == 2
    assert "3 steps, but the training should end after 3" in capsys.readouterr().err


def test_a_checkpoint_is_verified_shown_and_exported(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`pipefit checkpoint` shows its content, writes its weights, and names a damaged shard."""
    runs, weights = tmp_path / "runs", tmp_path / "model.safetensors"
    line = ["train", str(folder / "plan.json"), *MODEL, "--steps", "2"]
    assert main([*line, "--save", str(runs)]) == 0
    capsys.readouterr()
    assert main(["checkpoint", str(runs), "-o", str(weights)]) == 0
    assert "step 2, seed 0, 2 shards, all intact" in capsys.readouterr().out
    assert main(["checkpoint", str(runs), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    numbers = 20 * 64 + 64 + 64 * 32 + 32 + 32 * 16 + 16 + 16 * 10 + 10
    assert figures["bytes"]["model"] == 4 * numbers
    assert main([*line, "--weights", str(weights), "--json"]) == 0
    capsys.readouterr()
    shard = runs / "step-00000002" / "worker-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main(["checkpoint", str(runs)]) == 6
    assert str(shard) in capsys.readouterr().err


def test_a_stop_by_ctrl_c_tells_what_is_saved(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is 130, and a line gives the progress of training and the checkpoint to resume from."""
    from pipefit.cli import progress

    def interrupt(self: object, done: int, total: int, what: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(progress._Lines, "report", interrupt)
    runs = str(tmp_path / "runs")
    assert (
        main(["train", str(folder / "plan.json"), *MODEL, "--steps", "50", "--save", runs, "--every", "1"])
        == 130
    )
    assert "steps done: 3, last saved: " in capsys.readouterr().err
