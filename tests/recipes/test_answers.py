"""Answers about other trainers' files: the plan that the file describes, and lines that make it fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import pipefit
from pipefit.capture import Task
from pipefit.cli import main
from pipefit.errors import UsageError
from pipefit.profiler import OnDemand
from pipefit.recipes import RecipeAnswer, answer, answers, describe, read
from pipefit.recipes.answers import task_of
from pipefit.recipes.readers import Recipe
from pipefit.schema.cluster import Cluster
from pipefit.schema.json_io import load_cluster
from pipefit.tables import plain
from pipefit.units import KIB

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 128,
}  # fmt: skip
FILE = {
    "sequence_len": 64,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "bf16": True,
    "optimizer": "adamw_torch",
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's folder."""
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


@pytest.fixture
def file(llama: Path, tmp_path: Path) -> Path:
    """An axolotl file of the checkpoint."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"base_model": str(llama), **FILE}))
    return path


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let answers about equal models share their traces and profiles."""
    make, on_demand = answers.task_of, answers.OnDemand

    def task_once(recipe: Recipe) -> Task:
        parts = (
            recipe.model,
            recipe.settings,
            recipe.sequence,
            recipe.optimizer,
            recipe.adapters,
            recipe.precision,
        )
        return TASKS.setdefault(repr(parts), make(recipe))

    def profiled_once(task: Task, **options: Any) -> OnDemand:
        key = id(task), repr(options)
        if key not in PROFILES:
            PROFILES[key] = on_demand(task, **options)
        return PROFILES[key]

    monkeypatch.setattr(answers, "task_of", task_once)
    monkeypatch.setattr(answers, "OnDemand", profiled_once)


TASKS: dict[str, Task] = {}
PROFILES: dict[tuple[int, str], OnDemand] = {}
ANSWERS: dict[tuple[str, int], RecipeAnswer] = {}


def answered(file: Path, count: int) -> RecipeAnswer:
    """Return the answer about a file on devices with ample memory, the same for every test that asks."""
    key = file.read_text(), count
    if key not in ANSWERS:
        ANSWERS[key] = answer(read(str(file)), devices(count, 1024))
    return ANSWERS[key]


def devices(count: int, mebibytes: int) -> Cluster:
    """Return emulated devices with this memory each."""
    return load_cluster(f"emulated:{count}x{mebibytes}MiB")


def test_a_file_is_the_plan_that_its_trainer_runs(file: Path) -> None:
    """Two replicas, by a plan of the same options; and a dry run of it has the same peak."""
    found = answered(file, 2)
    task = task_of(read(str(file)))
    profile = pipefit.profile(task, microbatch_size=(4, 2))
    plan = pipefit.plan(
        profile, devices(2, 1024), batch_size=4, microbatches=1, planner="uniform", stages=1, data=2
    )
    assert found.written.fits and not found.changed
    assert plan.prediction is not None
    assert found.written.need_bytes == max(plan.prediction.peak_bytes)
    assert found.written.need_bytes == max(pipefit.certify(task, found.written.plan).peak_bytes)
    assert "Fits as written" in " ".join(plain(describe(found, "config.yaml"), 80).split())


def test_lines_of_an_answer_written_into_the_file_make_it_fit(file: Path) -> None:
    """With the bytes and the seconds that the answer said, and the same samples in a step.

    The fastest come first; each slower one needs less memory, and what is not shown is beaten by one that is.
    """
    whole = answered(file, 2).written
    cluster = load_cluster(f"emulated:2x{int(0.8 * whole.need_bytes / KIB)}KiB")
    found = answer(read(str(file)), cluster)
    assert not found.written.fits and found.fitting
    needs = [one.need_bytes for one in found.fitting]
    assert len(needs) > 1 and needs == sorted(needs, reverse=True)
    for one in found.changed:
        shown = one in found.fitting or not one.fits
        assert shown or any(
            other.step_seconds <= one.step_seconds and other.need_bytes <= one.need_bytes
            for other in found.fitting
        )
    for one in found.fitting[:1]:
        changed = yaml.safe_load(file.read_text()) | {
            key: value for line in one.changes for key, value in yaml.safe_load(line).items()
        }
        (file.parent / "changed.yaml").write_text(yaml.safe_dump(changed))
        again = answer(read(str(file.parent / "changed.yaml")), cluster).written
        assert again.fits
        assert (again.need_bytes, again.step_seconds) == (one.need_bytes, one.step_seconds)
        assert again.plan.training.batch_size == found.written.plan.training.batch_size


def test_adapters_are_trained_and_the_rest_is_frozen(file: Path) -> None:
    """Only the float32 adapters of peft have gradients and state."""
    pytest.importorskip("peft")
    text = file.read_text() + "adapter: lora\nlora_r: 4\nlora_target_modules: [q_proj, v_proj]\n"
    file.write_text(text)
    found = answered(file, 1).written.plan.measurement
    trained = 2 * 4 * ((64 + 64) + (64 + 32))  # blocks, rank, widths of queries and values
    assert sum(cost.gradient_bytes for cost in found.costs) == 4 * trained
    assert sum(cost.state_bytes for cost in found.costs) >= 8 * trained
    assert sum(cost.state_bytes for cost in found.costs) < 9 * trained


def test_groups_of_replicas_need_what_one_group_needs(file: Path) -> None:
    """Two groups of two train twice the samples in the same time."""
    divided = file.read_text() + "fsdp: full_shard\n"
    file.write_text(divided)
    one = answer(read(str(file)), devices(2, 1024))
    file.write_text(divided + "dp_replicate_size: 2\n")
    two = answer(read(str(file)), devices(4, 1024))
    assert two.written.need_bytes == one.written.need_bytes
    shown = [" ".join(plain(describe(found, "config.yaml"), 80).split()) for found in (one, two)]
    assert "in 2 such groups" in shown[1] and "leaves out the sum of gradients between groups" in shown[1]
    rates = [float(text.partition(" are left; ")[2].partition(" ")[0].replace(",", "")) for text in shown]
    assert rates[1] == pytest.approx(2 * rates[0], rel=0.01)


def test_torchtitan_has_autocast_on_one_device(llama: Path, file: Path) -> None:
    """Only shards have half-precision copies of single-precision weights."""
    (file.parent / "t.toml").write_text("[training]\nlocal_batch_size = 2\nseq_len = 64\n")
    recipe = read(str(file.parent / "t.toml"), str(llama))
    found = [answer(recipe, devices(count, 1024)).written.plan.training.precision for count in (1, 2)]
    assert found == ["mixed-bfloat16", "master-bfloat16"]


def test_dropped_inputs_of_adapters_are_kept(file: Path) -> None:
    """A share of dropout adds their copies and masks."""
    pytest.importorskip("peft")
    text = file.read_text() + "adapter: lora\nlora_r: 4\nlora_target_modules: [q_proj, v_proj]\n"
    file.write_text(text)
    without = answered(file, 1).written.need_bytes
    file.write_text(text + "lora_dropout: 0.05\n")
    assert answer(read(str(file)), devices(1, 1024)).written.need_bytes > without


def test_devices_that_a_file_needs_are_counted(file: Path) -> None:
    """A pipeline of two stages with two ranks each needs four."""
    recipe = replace(read(str(file)), stages=2, tensor=2)
    with pytest.raises(UsageError, match=r"needs 4 devices, but .* has 2"):
        answer(recipe, devices(2, 1024))
    found = answer(recipe, devices(4, 1024)).written.plan
    assert [stage.grid.tensor for stage in found.stages] == [2, 2]


def test_the_command_says_whether_a_file_fits(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As text and as JSON; with exit code 3 if no change fits either."""
    assert main(["fit", str(file), "--cluster", "emulated:2x1GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"]["fits"] is True
    assert main(["fit", str(file), "--cluster", "emulated:1x1MiB"]) == 3
    captured = capsys.readouterr()
    assert (
        "a configuration of axolotl" in " ".join(captured.out.split())
        and "as written, nor with any change tried" in captured.err
    )


@pytest.mark.parametrize(
    "options", [["--set", "layers=2"], ["--precision", "bfloat16"], ["--microbatches", "2"]]
)
def test_options_that_a_file_decides_are_refused(
    file: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Options of a model have no effect on a file, nor --base on a model."""
    assert main(["fit", str(file), "--cluster", "emulated:2x1GiB", *options]) == 2
    assert f"{options[0]} has no effect" in capsys.readouterr().err
    assert main(["fit", "zoo:mlp", "--cluster", "emulated:2x1GiB", "--base", "gpt2"]) == 2
    assert "--base needs another trainer's file" in capsys.readouterr().err
