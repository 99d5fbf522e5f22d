"""Faults of workers and files, and training's message for each: docs/faults.md is the table of these tests."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipefit.checkpoints.manifest import Manifest, dumps, loads
from pipefit.cli import main
from pipefit.errors import FileError, PipefitWarning, WorkerFailed
from pipefit.runtime import Trainer, train
from pipefit.runtime.launch import launch
from pipefit.runtime.launch.launch import Sighting
from pipefit.runtime.options import Saving
from pipefit.schema.json_io import save
from support.counted_sleep import counted
from support.gallery_samples import sampled
from support.resumed_tasks import SEED, named, plan_for, slow_link, undisturbed
from support.worker_faults import (
    EVERY,
    EXCHANGES,
    FAULTS,
    KILLS,
    PAGE,
    PLACES,
    SPLIT,
    START,
    STEP,
    TIMEOUT,
    TITLE,
    assert_named,
    assert_survived,
    plan_on,
)


@pytest.fixture(autouse=True)
def _sleep_is_counted(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count only the time in which workers sleep: slow workers on a loaded machine are not faulty."""
    counted(monkeypatch, tmp_path_factory.mktemp("faults") / "asleep")


SAMPLE = [("raises", "B1", 0), ("is killed (signal 9)", "save", 1), ("stands still (SIGSTOP)", "F1", 1)]
OTHERS = [case for f in FAULTS for p in PLACES for w in (0, 1) if (case := (f, p, w)) not in SAMPLE]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("fault", "place", "worker"), SAMPLE)
def test_the_culprit_the_step_and_what_is_saved_are_told(
    fault: str, place: str, worker: int, tmp_path: Path
) -> None:
    """Any failure of a worker ends with one sentence on the culprit, the step and the saved state, and
    without processes.
    """
    assert_named(tmp_path, fault, place, worker)


@pytest.mark.gallery
@pytest.mark.parametrize(("fault", "place", "worker"), OTHERS)
def test_the_culprit_is_told_wherever_it_is(fault: str, place: str, worker: int, tmp_path: Path) -> None:
    """Every fault of every worker in every phase names the culprit."""
    assert_named(tmp_path, fault, place, worker)


KILLED = "is killed (signal 9)"
GRIDS = ((1, 2), (2, 1), (2, 2))
IN_GRIDS = [(KILLED, place, worker, grid) for grid in GRIDS for place in PLACES for worker in (0, 1)]
IN_GRIDS += [
    (f, place, 1, grid) for grid in GRIDS[:2] for f in FAULTS if f != KILLED for place in ("F1", "STEP")
]
SHARDED = (KILLED, "B1", 1, (1, 2))


@pytest.mark.parametrize(
    ("fault", "place", "worker", "grid"),
    [SHARDED, *(pytest.param(*case, marks=pytest.mark.gallery) for case in IN_GRIDS if case != SHARDED)],
)
def test_the_culprit_among_replicas_and_shards_is_told(
    fault: str, place: str, worker: int, grid: tuple[int, int], tmp_path: Path
) -> None:
    """The culprit is named also if the others wait for it inside a layer, or in a sum of gradients."""
    assert_named(tmp_path, fault, place, worker, plan_on(*grid))


DEATHS = [(name, phase, worker) for name in EXCHANGES for phase in KILLS for worker in (0, 1)]


@pytest.mark.parametrize(("name", "phase", "worker"), sampled(DEATHS, [("replicas", "exchange", 1)]))
def test_replicas_and_asynchronous_schedules_survive(
    name: str, phase: str, worker: int, tmp_path: Path
) -> None:
    """Replicas and asynchronous schedules survive a killed worker in any phase: losses are bitwise those of
    undisturbed training.
    """
    assert_survived(tmp_path, name, phase, worker)


# -------------------------------------------------------------------- links

LINKS = [(0, "0SEND_F1", "[01]WAIT_(SEND|RECV)_F1"), (1, "1SEND_B0", "[01]WAIT_(SEND|RECV)_B0")]
SLOW = (
    r"has waited [34] s at {0} for device [01], which has started the same transfer: "
    r"the link between them is slow. Training continues"
)


def through_a_link(worker: int, message: str, arrives: Path, timeout_seconds: float) -> list[float]:
    """Return the losses of a training in which a message arrives only once a file exists."""
    task, plan = partial(slow_link, worker, message, STEP, str(arrives)), plan_for("dropout", "1f1b", SPLIT)
    return train(task, plan, steps=7, seed=SEED, numbers=False, timeout_seconds=timeout_seconds)[0]


@pytest.mark.parametrize(
    ("worker", "message", "place"), [LINKS[0], pytest.param(*LINKS[1], marks=pytest.mark.gallery)]
)
def test_a_slow_link_is_told_and_training_goes_on(
    worker: int, message: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow link is reported after half of an action's timeout, with both ends and the message; losses are
    unchanged.
    """
    arrives, usual = tmp_path / "arrives", launch._Supervisor._look_at_link

    def look(self: launch._Supervisor, seen: Sighting) -> None:
        usual(self, seen)
        if self.slow:
            arrives.touch()

    monkeypatch.setattr(launch._Supervisor, "_look_at_link", look)
    with pytest.warns(PipefitWarning, match=SLOW.format(place)):
        assert through_a_link(worker, message, arrives, 6) == undisturbed(7)


def test_a_link_that_loses_a_message_is_named(tmp_path: Path) -> None:
    """A link that loses a message is named next to the waiting worker, which may itself have stopped."""
    hangs = (
        r"^worker ([01]) \(device .*\), or its link with device (?!\1)[01], hangs at "
        r"[01]WAIT_(SEND|RECV)_F1: no sign"
    )
    with (
        pytest.warns(PipefitWarning, match="the link between them is slow"),
        pytest.raises(WorkerFailed, match=hangs),
    ):
        through_a_link(0, "0SEND_F1", tmp_path / "never", TIMEOUT)


# -------------------------------------------------------------------- files


def line(folder: Path, *more: str) -> list[str]:
    """Return a command line that trains with a plan in the folder."""
    save(plan_for("dropout", "1f1b", SPLIT), folder / "plan.json")
    model = ["support.resumed_tasks:named", "--set", "name=dropout"]
    return [
        "train",
        str(folder / "plan.json"),
        *model,
        "--no-numbers",
        "--seed",
        str(SEED),
        "--steps",
        "6",
        *more,
    ]


def test_a_full_disk_under_the_metrics_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk under the metrics is reported with the step and the saved state; the exit code is that of
    file errors.
    """
    monkeypatch.setattr("pipefit.schema.json_io.check_target", lambda path: None)  # it lets no device pass
    assert (
        main(line(tmp_path, "--save", str(tmp_path / "runs"), "--every", "1", "--metrics", "/dev/full")) == 6
    )
    err = capsys.readouterr().err
    said = "/dev/full cannot be written: No space left on device; step 0 is the last line; steps done: 1, last saved: "
    assert said in err


def test_a_full_disk_under_the_result_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk under the result loses nothing: the result is printed before it is saved."""
    command = line(tmp_path, "--json", "-o", str(tmp_path / "trace.json"))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(command) == 6
    out, err = capsys.readouterr()
    assert len(json.loads(out)["losses"]) == 6
    assert "trace.json cannot be written: No space left on device" in err
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_full_disk_under_the_last_checkpoint_loses_nothing(
    as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk under the last checkpoint loses nothing: the losses of all steps are printed before the
    failure.
    """
    command = line(tmp_path, "--save", str(tmp_path / "runs"), "--on-failed-save", "stop", "--steps", "2")
    command[2:5] = ["support.resumed_tasks:limited", "--set", "worker=1", "--set", "nbytes=2000"]
    assert main([*command, *(["--json"] if as_json else [])]) == 6
    out, err = capsys.readouterr()
    said = r"checkpoint 2 cannot be saved to .*: File too large; .*; steps done: 2, last saved: none$"
    assert re.search(said, err.strip()), err
    if as_json:
        found = json.loads(out)
        assert found["losses"] == undisturbed(2) and found["exit_code"] == 6
    else:
        first, last = undisturbed(2)
        assert out.startswith(f"loss {first:.4f} in the first step, {last:.4f} in the last\n\n")
        assert "does not contain a checkpoint of this" in out


def flipped(shard: Path) -> None:
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(bytes(content))


SHARDS = {
    "a bit of a shard is flipped": (flipped, "is damaged"),
    "a shard is missing": (Path.unlink, "missing"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", SHARDS)
def test_a_damaged_shard_is_named_with_the_checkpoint_before(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged shard is named with the previous checkpoint when training resumes; a partial checkpoint is
    not trained from.
    """
    damage, word = SHARDS[what]
    task, plan, runs = partial(named, "dropout"), plan_for("dropout", "1f1b", SPLIT), tmp_path / "runs"
    train(task, plan, steps=4, seed=SEED, numbers=False, saving=Saving(directory=str(runs), every=2))
    shard = runs / "step-00000004" / "worker-00001.safetensors"
    damage(shard)
    if word == "missing":  # detected before a worker starts; the workers read the bytes
        monkeypatch.setattr("pipefit.runtime.launch.restarts.launch", None)
    with pytest.raises(FileError) as caught:
        train(task, plan, steps=6, numbers=False, resume=shard.parent)
    said = str(caught.value)
    assert str(shard) in said and word in said
    assert said.endswith(f"the checkpoint before it is {runs}/step-00000002")


# -------------------------------------------------------------------- the page


def rows() -> list[str]:
    """Return the rows of the table of workers' faults."""
    said = [f"{text.format(where='...', silent=TIMEOUT)}" for text in FAULTS.values()]
    return [
        f"| {fault} | worker 1 (device 1, layers 3 to 5) {text} |"
        for fault, text in zip(FAULTS, said, strict=True)
    ]


def test_the_page_has_the_faults_of_these_tests() -> None:
    """The page lists each fault with its message, and each phase."""
    page = PAGE.read_text()
    assert [row for row in rows() if row not in page] == []
    assert [
        row
        for place, where in PLACES.values()
        if (row := f"| {place} | {where.format(worker=1)} |") not in page
    ] == []


def test_the_page_has_seconds_and_steps_for_each() -> None:
    """The page has seconds and lost steps, measured by `python -m faults`: every fault ends soon and costs
    the unsaved steps.
    """
    lines = PAGE.read_text().partition(f"<!-- {TITLE} -->")[2].partition("<!-- end")[0].strip().splitlines()
    cells = {fault: rest for fault, *rest in ([c.strip() for c in line.split("|")[1:-1]] for line in lines)}
    assert cells["a worker"] == [words for words, _ in PLACES.values()]
    for fault in FAULTS:
        silent = START if fault == "stands still (SIGSTOP)" else 0
        found = [re.fullmatch(r"(\d+\.\d) s, (\d)", cell) for cell in cells[fault]]
        assert [
            one is not None and float(one[1]) < silent + 10 and int(one[2]) <= 2 * EVERY for one in found
        ] == [True] * len(PLACES)


# -------------------------------------------------------------------- manifests edited by a user


HAND_MADE: list[dict[str, Any]] = [
    {"lr": "fast"}, {"lr": True}, {"betas": 3}, {"betas": (0.9,)}, {"eps": "x"}, {"amsgrad": 7},
]  # fmt: skip


def test_a_manifest_made_by_hand_is_refused_as_a_file(tmp_path: Path) -> None:
    """An edited manifest with the right digest but other options is refused as a file error, not a worker's."""
    trainer = Trainer(named("dropout"), plan_for("dropout", "1f1b", SPLIT), seed=SEED)
    trainer.save(tmp_path)
    trainer.finish()
    path = tmp_path / "step-00000000" / "manifest.json"
    manifest = loads(path.read_bytes(), Manifest, "it")
    assert isinstance(manifest, Manifest)
    for options in HAND_MADE:
        groups = tuple(replace(group, options=dict(group.options) | options) for group in manifest.groups)
        path.write_text(dumps(replace(manifest, groups=groups)))
        with pytest.raises(FileError, match=f"as the optimizer's {next(iter(options))}, but the task has"):
            trainer.load(tmp_path)
