"""Training by workers with saves: the cost of failures, and unchanged numbers."""

from __future__ import annotations

import functools
import multiprocessing as mp
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pipefit.checkpoints import find, folders
from pipefit.errors import FileError, NotSaved, PipefitWarning, UsageError, WorkerFailed
from pipefit.lowering import lower, lower_drain
from pipefit.runtime import Trainer, train
from pipefit.runtime.checkpoint.background_saver import SaveReport
from pipefit.runtime.launch import launch
from pipefit.runtime.launch.forks import forks, start
from pipefit.runtime.launch.worker import SAVES_TOGETHER, SAVING, Heartbeat, Orders
from pipefit.runtime.options import Saving
from support.resumed_tasks import (
    SEED,
    crowded,
    full_for_a_while,
    killed,
    killed_while_it_writes,
    limited,
    limited_all,
    named,
    plan_for,
    remembered,
    unwritable,
)


def trained(directory: Path | None, split: tuple[int, ...] = (3, 3), **options: Any) -> list[float]:
    """Return the losses of six steps of the task with dropout, or of the steps after a checkpoint; save after
    every second step.
    """
    schedule, task = options.pop("schedule", "1f1b"), options.pop("task", partial(named, "dropout"))
    failure = options.pop("on_failure", "warn")
    saving = (
        None if directory is None else Saving(directory=str(directory), every=2, keep=2, on_failure=failure)
    )
    if "resume" not in options:
        options["seed"] = SEED
    return train(
        task, plan_for("dropout", schedule, split), saving=saving, numbers=False, **{"steps": 6} | options
    )[0]


@functools.cache
def expected(schedule: str = "1f1b", directory: Path | None = None, *, steps: int = 6) -> list[float]:
    """Return the losses of `steps` steps in one process; with a directory, save after every second step."""
    trainer, losses = (
        Trainer(named("dropout"), plan_for("dropout", schedule, (3, 3)), seed=SEED),
        list[float](),
    )
    for step in range(steps):
        torch.manual_seed(SEED + step)
        losses.append(trainer.step(trainer.task.batch(8)))
        if directory is not None and step % 2:
            trainer.save(directory)
    return [*losses[trainer.late :], *trainer.finish()]


def steps_in(directory: Path) -> list[int]:
    return [step for step, _ in folders.whole(directory)]


def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    """A killed worker costs the steps since the last checkpoint.

    The error names the last step and the saved one; training resumes on more workers under another schedule,
    with the losses of an undisturbed training. The checkpoint of step 6, in progress then, is whole or
    absent, and the one of step 4 is whole.
    """
    with pytest.raises(WorkerFailed, match="killed by signal 9") as caught:
        trained(tmp_path, task=partial(killed, 1, 7), steps=8)
    last = steps_in(tmp_path)[-1]
    assert last in (4, 6)
    assert str(caught.value).endswith(f"; steps done: 7, last saved: {last}; resume with --resume {tmp_path}")
    rest = trained(tmp_path, (2, 2, 2), resume=tmp_path, schedule="gpipe", steps=8)
    assert rest == expected(steps=8)[last:]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000006", "step-00000008"]


def test_a_pipeline_that_never_flushes_drains_to_save(tmp_path: Path) -> None:
    """An asynchronous pipeline drains to save: a failure between two saves changes no loss of an undisturbed
    run with the same saves.
    """
    trained(tmp_path / "broken", schedule="pipedream", steps=4)
    rest = trained(tmp_path / "broken", schedule="pipedream", resume=tmp_path / "broken")
    assert rest == expected("pipedream", tmp_path / "unbroken")[4:]


@pytest.mark.sample(1)
@pytest.mark.parametrize("worker", [0, 1])
def test_a_worker_that_cannot_write_costs_the_checkpoints_alone(tmp_path: Path, worker: int) -> None:
    """A worker that cannot write loses checkpoints but not the training.

    Each failure is reported once, and no partial checkpoint remains. A training that should leave a
    checkpoint ends with the last failure, and its losses are part of the error.
    """
    saves: list[SaveReport] = []
    with (
        pytest.warns(PipefitWarning) as warned,
        pytest.raises(
            NotSaved,
            match=r"^checkpoint 6 cannot be saved to .*File too large; there is no complete checkpoint yet; steps done",
        ) as caught,
    ):
        trained(tmp_path, task=partial(limited, worker, 2000), on_saved=saves.append)
    assert caught.value.losses == expected()
    assert caught.value.exit_code == 6
    told = [str(warning.message) for warning in warned if "checkpoint" in str(warning.message)]
    assert [text.partition(" cannot be saved")[0] for text in told] == [
        f"checkpoint {step}" for step in (2, 4)
    ]
    assert all("File too large; there is no complete checkpoint yet" in text for text in told)
    assert list(tmp_path.iterdir()) == []
    assert len(saves) == 6


def test_a_failure_of_all_workers_is_told_once(tmp_path: Path) -> None:
    """A failure of all workers, such as a full disk, is reported in one sentence for each checkpoint."""
    with (
        pytest.warns(PipefitWarning) as warned,
        pytest.raises(NotSaved, match="checkpoint 6 cannot be saved"),
    ):
        trained(tmp_path, task=partial(limited_all, 2000))
    told = [str(warning.message) for warning in warned if "checkpoint" in str(warning.message)]
    assert [text.partition(" cannot be saved")[0] for text in told] == [
        f"checkpoint {step}" for step in (2, 4)
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("worker", "error"), [(0, TypeError("no shard")), (1, KeyboardInterrupt())])
def test_a_save_fails_whatever_the_writing_raises(worker: int, error: BaseException, tmp_path: Path) -> None:
    """Any exception of the writer fails the save: the other worker does not wait for the missing part, and
    the training does not end as saved.
    """
    with (
        pytest.warns(PipefitWarning, match=f"checkpoint 2 cannot be saved .*: {type(error).__name__}"),
        pytest.raises(
            NotSaved,
            match=f"checkpoint 6 cannot be saved .*: {type(error).__name__}.*no complete checkpoint yet",
        ),
    ):
        trained(tmp_path, task=partial(unwritable, worker, error), timeout_seconds=60)
    assert steps_in(tmp_path) == []


def test_a_checkpoint_that_is_lost_on_the_way_is_a_warning(tmp_path: Path) -> None:
    """A lost checkpoint is only a warning if later ones, including the last, are whole."""
    with pytest.warns(
        PipefitWarning, match="checkpoint 4 cannot be saved .*the last complete checkpoint is 2"
    ):
        assert trained(tmp_path, task=partial(full_for_a_while, 4)) == expected()
    assert steps_in(tmp_path) == [2, 6]


def test_a_worker_that_cannot_write_may_stop_the_training(tmp_path: Path) -> None:
    """With `on_failure="stop"`, a worker that cannot write ends the training with that failure."""
    with pytest.raises(
        FileError, match=r"checkpoint 2 cannot be saved .*; steps done: [2-5], last saved: none"
    ):
        trained(tmp_path, task=partial(limited, 1, 2000), on_failure="stop")


def test_a_worker_without_parameters_saves_with_the_others(tmp_path: Path) -> None:
    """A worker without parameters (a Tanh alone) saves an empty shard, and training continues."""
    assert trained(tmp_path, (1, 1, 4), steps=4) == expected()[:4]
    assert steps_in(tmp_path) == [2, 4]
    assert trained(tmp_path, resume=tmp_path) == expected()[4:]


def test_a_worker_without_room_for_copies_makes_all_write_at_once(tmp_path: Path) -> None:
    """If one worker lacks room for copies, all workers write in the foreground, so that none waits for
    another.
    """
    saves: list[SaveReport] = []
    with pytest.warns(PipefitWarning, match="training pauses") as told:
        assert trained(tmp_path, task=partial(crowded, 1), on_saved=saves.append) == expected()
    said = r"this host has 0 B of memory left, but the copies of its workers' state need up to \S+ KiB: training pauses"
    assert [bool(re.match(said, str(one.message))) for one in told] == [True]
    assert {saved.snapshot_bytes for saved in saves} == {0}
    assert steps_in(tmp_path) == [4, 6]


def test_what_no_checkpoint_can_hold_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """A scheduler with a set in it, which no checkpoint can hold, is refused before the first step."""
    steps: list[int] = []
    with pytest.raises(UsageError, match="the scheduler Remembered's history is a set"):
        trained(tmp_path, task=remembered, on_step=lambda report: steps.append(report.step))
    assert steps == []


def test_a_folder_that_cannot_hold_checkpoints_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """A folder that cannot hold checkpoints (a file, a folder inside one, a device) is refused by name before
    a worker starts, though failed saves only warn.
    """
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "runs", Path("/dev/null")):
        with pytest.raises(FileError, match=r"cannot hold checkpoints: .* is not a folder; name another"):
            Saving(directory=str(place)).check(plan_for("dropout", "1f1b", (3, 3)))
    Saving(directory=str(tmp_path / "new" / "runs")).check(plan_for("dropout", "1f1b", (3, 3)))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("folder", ["/proc/runs", "/proc/new/runs"])
def test_a_folder_in_which_nothing_can_be_made_is_refused(folder: str) -> None:
    """A folder that accepts no files is refused before the first step, whatever its permissions: root has all
    of them, and /proc accepts no files.
    """
    with pytest.raises(FileError, match=r"/proc is not writable \(.+\); name another folder"):
        Saving(directory=folder).check(plan_for("dropout", "1f1b", (3, 3)))


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"steps": 2}, UsageError, "already has a checkpoint of step 4, but this training starts at step 0"),
    ({"steps": 4, "resume": True}, UsageError, "already has 4 steps, but the training should end after 4"),
    ({"seed": 5, "resume": True}, UsageError, f"was trained with seed {SEED}"),
    (
        {"resume": True, "weights": "model.safetensors"},
        UsageError,
        "give either a checkpoint or weights to start from",
    ),
    ({"resume": "nowhere"}, FileError, "nowhere does not contain a complete checkpoint"),
    ({"task": partial(named, "norm"), "resume": True}, FileError, "does not belong to this task"),
]


def test_what_cannot_go_on_is_refused_before_or_by_the_workers(tmp_path: Path) -> None:
    """A folder of another training, no steps left, another seed, both or no starts, and another task are
    refused in one sentence each, by the parent or by the workers.
    """
    trained(tmp_path, steps=4)
    for options, error, words in REFUSED:
        given = {**options, "resume": tmp_path} if options.get("resume") is True else options
        with pytest.raises(error, match=words):
            trained(tmp_path, **given)
    assert steps_in(tmp_path) == [2, 4]


def test_a_process_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """A process killed during a write leaves the previous checkpoint: a partial one is never loaded, and the
    next save removes it.
    """
    process = forks().Process(target=killed_while_it_writes, args=(tmp_path,))
    start(process)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000001", "step-00000002.partial", "training.lock",
    ]  # fmt: skip
    assert find(tmp_path).manifest.step == 1
    find(tmp_path).verify()
    folders.begin(tmp_path, 2, find(tmp_path).manifest.owner)
    assert list((tmp_path / "step-00000002.partial").iterdir()) == []


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_the_parent_knows_at_which_action_a_worker_is(schedule: str) -> None:
    """The parent knows the action of a worker: in the first step of a pipeline, in later ones and in a drain,
    also after a save.
    """
    plan = plan_for("dropout", schedule, (2, 2, 2))
    orders = Orders(steps=9, seed=0)
    supervisor = launch._Supervisor(plan, orders, None, None)
    heartbeat = Heartbeat(mp.get_context())
    supervisor.workers.append(launch._Worker(None, None, heartbeat))  # type: ignore[arg-type]
    endless = plan.training.endless
    for step in (0, 1, 4):
        heartbeat.enter(step)
        for number, action in enumerate(lower(plan, entered=4 * step if endless else 0).actions[0]):
            heartbeat.at(number)
            assert supervisor._place(0) == f"at {action}"
    heartbeat.enter(1, empties=True)
    for number, action in enumerate(lower_drain(plan, entered=4).actions[0] if endless else ()):
        heartbeat.at(number)
        assert supervisor._place(0) == f"at {action}"
    heartbeat.at(SAVING)
    assert (supervisor._place(0), supervisor._waits(0)) == ("while it saved a checkpoint", False)
    heartbeat.at(SAVES_TOGETHER)
    assert (supervisor._place(0), supervisor._waits(0)) == (
        "while it waited for the other workers to save",
        True,
    )
