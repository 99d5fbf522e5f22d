"""Exclusive checkpoint folders: two and three trainings on one folder, started, killed and restarted in any
order.

No training loads another's steps, and none ends with code 0 and another's losses.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pipefit.checkpoints import find, folders, hold
from pipefit.checkpoints.hold import LOCK, Hold, check_holder, new_owner
from pipefit.cli import main
from pipefit.errors import DamagedCheckpoint, FileError, NotSaved, PipefitWarning, UsageError
from pipefit.runtime import train
from pipefit.runtime.options import Saving, StepReport
from support.gallery_samples import sampled
from support.resumed_tasks import (
    SEED,
    batches_of,
    elsewhere,
    mortal,
    named,
    plan_for,
    trainer_for,
    undisturbed,
)
from support.separate_trainings import EVERY, ROOT, SECONDS, STEPS, Training

NEXT = SEED + 50  # the seed of another training
Begin = Callable[..., Training]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Return a function that starts trainings which save to one folder."""
    made = list[Training]()

    def training(name: str, seed: int, **options: Any) -> Training:
        made.append(Training(tmp_path / name, tmp_path / "runs", seed, **options))
        return made[-1]

    yield training
    for one in made:
        one.close()


def trainings_in(runs: Path) -> set[str]:
    """Return the trainings that have checkpoints in a folder."""
    return {find(folder).manifest.owner.training for _, folder in folders.whole(runs)}


def assert_right(training: Training, code: int, losses: list[float], seed: int) -> None:
    """Assert that losses with exit code 0 are those of an undisturbed training."""
    assert code or losses == undisturbed(training.steps, seed)[-len(losses) :] != []


def test_a_second_training_is_refused_while_the_first_one_lives(
    begin: Begin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second training on a folder in use is refused by the first one's name, even before its first save.

    A killed worker of the first training costs a restart from its own steps, with the losses of an
    undisturbed training.
    """
    first, second = begin("first", SEED), begin("second", NEXT)
    first.waits_at(1)
    first.dies_at("1-5-1F0")
    pid = first.start("--restarts", "1").pid
    first.until_at(1)
    assert main(second.command()) == 6
    who = (
        rf"another training, \w{{8}} \(.*2 stages on .*\), process {pid} on .+, started .* UTC, is saving to "
    )
    assert re.search(who, capsys.readouterr().err)
    first.goes_on(1)
    code, losses, said = first.end()
    assert (code, losses) == (0, undisturbed(STEPS)), said
    assert "restart 1 of 1 continues after step" in said
    assert len(trainings_in(tmp_path / "runs")) == 1
    assert not (tmp_path / "runs" / LOCK).exists()


@pytest.fixture
def leaving(begin: Begin, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Training]:
    """Return a training whose workers each leave a process; it ends with the test."""
    yield begin("first", SEED, task=("support.resumed_tasks:leaving", "--set", f"left='{request.param}'"))
    for left in (tmp_path / "first").glob("left-*"):
        os.kill(int(left.name.partition("-")[2]), signal.SIGKILL)


LEFT = pytest.mark.parametrize(
    "leaving", ["a fork", pytest.param("a program", marks=pytest.mark.gallery)], indirect=True
)


@pytest.mark.gallery
@LEFT
def test_a_process_that_a_worker_leaves_holds_no_folder(leaving: Training, tmp_path: Path) -> None:
    """The folder of a killed training is free although processes that its model has started still run, as a
    data loader's do for a while.
    """
    leaving.waits_at(1)
    leaving.start()
    leaving.until_at(1)
    leaving.processes[-1].kill()
    until = time.monotonic() + SECONDS
    while refused(tmp_path / "runs"):
        assert time.monotonic() < until, "the folder stays held"
        time.sleep(0.05)


@LEFT
def test_the_death_of_a_worker_that_leaves_processes_is_noticed(leaving: Training, tmp_path: Path) -> None:
    """A worker that is killed is named at once although processes that its model has started keep its files
    open.
    """
    leaving.dies_at("1-5-1F0")
    process = leaving.start("--timeout", "200")
    process.wait(SECONDS)
    out, said = (
        os.read(file.fileno(), 1 << 16).decode() for file in (process.stdout, process.stderr) if file
    )
    assert process.returncode == 5 and "steps done: 5" in out
    assert re.search(r"^pipefit: worker 1 \(.*\) failed at 1F0: killed by signal 9", said, re.MULTILINE), said


def refused(runs: Path) -> bool:
    """Return whether a folder is held, by holding it for a moment."""
    try:
        Hold(runs, new_owner("a plan")).release()
    except FileError:
        return True
    return False


WHAT_HAPPENS = ("ends", "worker killed", "killed", "killed and resumed")
WHEN = ("before its first save", "after its first save", "after its end")
HOW = ("fresh", "resumes", "resumes with its seed")


def second_start(second: Training, how: str) -> None:
    more = [] if how == "fresh" else ["--resume", str(second.runs)]
    second.start(*more, "--restarts", "1", seed=how != "resumes")


@pytest.mark.gallery
@pytest.mark.parametrize(("what", "when", "how"), list(product(WHAT_HAPPENS, WHEN, HOW)))
def test_any_order_of_starts_and_kills(what: str, when: str, how: str, begin: Begin, tmp_path: Path) -> None:
    """Exit code 0 means the losses of the training whose steps are in the folder, in any order of starts and
    kills.

    The first training ends, loses a worker, or is killed with or without a resume; the second one starts
    before or after the first save or the end, from scratch or by a resume; then a third starts.
    """
    first, second, third = begin("first", SEED), begin("second", NEXT), begin("third", NEXT + 50)
    step = {"before its first save": 1, "after its first save": 5, "after its end": 5}[when]
    first.waits_at(step)
    if what == "worker killed":
        first.dies_at("0-6-0B1")
    first.start("--restarts", "1")
    first.until_at(step)
    if when != "after its end":
        second_start(second, how)
        code, losses, said = second.end()
        assert (
            code == (2 if (when, how) == ("after its first save", "resumes with its seed") else 6)
            and not losses
        )
        if how == "fresh" or when == "after its first save":
            assert f"process {first.processes[-1].pid} on" in said
    if what.startswith("killed"):
        first.kill()
        if when == "after its end":
            second_start(second, how)
            code, losses, _ = second.end()
            assert_right(second, code, losses, SEED if how == "resumes" else NEXT)
            assert (code == 0) == (how == "resumes")
        if what == "killed and resumed":
            first.goes_on(step)
            first.start(
                "--restarts", "1", *(["--resume", str(first.runs)] if folders.whole(first.runs) else [])
            )
            code, losses, _ = first.end()
            assert_right(first, code, losses, SEED)
            assert code == 0 or (when, how) == ("after its end", "resumes")
    else:
        first.goes_on(step)
        code, losses, said = first.end()
        assert code == 0, said
        assert_right(first, code, losses, SEED)
        if when == "after its end":
            second_start(second, how)
            assert second.end()[0] == 2
    before = folders.whole(tmp_path / "runs")
    third.start()
    code, losses, _ = third.end()
    assert code == (2 if before else 0)
    assert_right(third, code, losses, third.seed)
    assert len(trainings_in(tmp_path / "runs")) == 1


# -------------------------------------------------------------------- restarts from own steps only


def test_a_restart_goes_on_from_no_step_of_another(tmp_path: Path) -> None:
    """A restart does not resume from another training's step.

    Without a lock, another training's checkpoints are reported, skipped and left untouched; later saves fail
    and name that training, so that this one does not end as successful.
    """
    plan, runs, deaths = plan_for("dropout", "1f1b", (3, 3)), tmp_path / "runs", tmp_path / "deaths"
    other, batch = trainer_for("dropout", plan, seed=NEXT), batches_of("dropout")[0]
    for _ in range(4):
        other.step(batch)
    other.save(tmp_path / "theirs", background=False)
    deaths.mkdir()
    for name in ("wait-5", "1-5-1F0"):
        (deaths / name).touch()

    def comes(report: StepReport) -> None:
        if report.step == 4 and (deaths / "wait-5").exists():
            until = time.monotonic() + SECONDS
            while not (runs / "step-00000003").exists() and time.monotonic() < until:
                time.sleep(0.02)  # it is saved in the background
            (tmp_path / "theirs" / "step-00000004").rename(runs / "step-00000004")
            (deaths / "wait-5").unlink()

    with (
        pytest.warns(PipefitWarning) as told,
        pytest.raises(NotSaved, match="00000004 belongs to another train") as caught,
    ):
        train(
            partial(mortal, str(deaths)),
            plan,
            steps=STEPS,
            seed=SEED,
            numbers=False,
            saving=Saving(directory=str(runs), every=EVERY),
            restarts=1,
            on_step=comes,
        )
    said = "\n".join(str(one.message) for one in told)
    assert caught.value.losses == undisturbed(STEPS)
    assert re.search(
        r"step-00000004 is skipped: it belongs to another training, .*; .*step-00000003 is used", said
    )
    assert "restart 1 of 1 continues after step 3" in said
    assert find(runs / "step-00000004").manifest.owner == other.owner


def flip(shard: Path) -> None:
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(bytes(content))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit of a shard is flipped": lambda folder: flip(folder / "worker-00001.safetensors"),
    "a shard is missing": lambda folder: (folder / "worker-00001.safetensors").unlink(),
}


@pytest.mark.parametrize("damage", sampled(DAMAGES, often=list(DAMAGES)[:1]))
def test_a_training_goes_on_from_the_newest_whole_checkpoint(damage: str, tmp_path: Path) -> None:
    """A training resumes from the newest whole checkpoint: a damaged newer one is reported and set aside, and
    the steps since the previous one are trained again.
    """
    task, plan, runs = partial(named, "dropout"), plan_for("dropout", "1f1b", (3, 3)), tmp_path / "runs"
    saving = Saving(directory=str(runs), every=2)
    train(task, plan, steps=6, seed=SEED, numbers=False, saving=saving)
    DAMAGES[damage](runs / "step-00000006")
    with pytest.warns(PipefitWarning, match=r"step-00000006 is skipped: .*; .*step-00000004 is used instead"):
        losses, _ = train(task, plan, steps=8, numbers=False, saving=saving, resume=runs)
    assert losses == undisturbed(8)[4:]
    assert sorted(path.name for path in runs.iterdir()) == [
        *(f"step-{step:08d}" for step in (2, 4, 6)), "step-00000006.damaged", "step-00000008",
    ]  # fmt: skip
    with pytest.raises(DamagedCheckpoint, match="damaged/"):
        train(task, plan, steps=8, numbers=False, resume=runs / "step-00000006.damaged")


@pytest.mark.parametrize("damaged", [(6,), pytest.param((3, 6), marks=pytest.mark.gallery)])
def test_a_restart_passes_over_its_own_damaged_steps(damaged: tuple[int, ...], tmp_path: Path) -> None:
    """A restart skips its own damaged steps with a message, starts at an earlier checkpoint or the beginning,
    and reaches the losses of an undisturbed run.
    """
    runs, deaths = tmp_path / "runs", tmp_path / "deaths"
    deaths.mkdir()
    for name in ("wait-7", "1-7-1F0"):
        (deaths / name).touch()

    def damage(report: StepReport) -> None:
        if report.step == 6 and (deaths / "wait-7").exists():
            while not folders.whole(runs)[-1:] or folders.whole(runs)[-1][0] < 6:
                time.sleep(0.02)
            for step in damaged:
                flip(runs / f"step-{step:08d}" / "worker-00001.safetensors")
            (deaths / "wait-7").unlink()

    with pytest.warns(PipefitWarning) as told:
        losses, _ = train(
            partial(mortal, str(deaths)),
            plan_for("dropout", "1f1b", (3, 3)),
            steps=STEPS,
            seed=SEED,
            numbers=False,
            saving=Saving(directory=str(runs), every=EVERY),
            restarts=1,
            on_step=damage,
        )
    said = "\n".join(str(one.message) for one in told)
    instead = (
        "step-00000003 is used instead"
        if damaged == (6,)
        else "training starts from the beginning, after step 0"
    )
    assert losses == undisturbed(STEPS), said
    assert re.search(
        rf"step-0000000{damaged[0]} is skipped: .*SHA-256 differs from the saved one; .*{instead}", said
    ), said
    assert [step for step, _ in folders.whole(runs)] == [3, 6, 9]
    assert len(list(runs.glob("*.damaged"))) == len(damaged)


def test_workers_that_change_their_directory_save_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths of checkpoints are those of the caller, although a task changes its worker's directory."""
    monkeypatch.chdir(tmp_path)
    task, plan, saving = (
        partial(elsewhere, "dropout"),
        plan_for("dropout", "1f1b", (3, 3)),
        Saving(directory="runs"),
    )
    losses, _ = train(task, plan, steps=2, seed=SEED, numbers=False, saving=saving)
    more, _ = train(task, plan, steps=4, numbers=False, saving=saving, resume="runs")
    assert [*losses, *more] == undisturbed(4)
    assert [step for step, _ in folders.whole(tmp_path / "runs")] == [2, 4]


# -------------------------------------------------------------------- trainers in user scripts


def test_a_trainer_saves_behind_its_own_steps_alone(tmp_path: Path) -> None:
    """A trainer saves only after its own steps: without a resume it is refused, and after one it owns the
    folder, so that the previous owner is refused.
    """
    first, second, third = (trainer_for("dropout", plan_for("dropout", "1f1b", (3, 3))) for _ in range(3))
    batches = batches_of("dropout")
    for trainer in (first, second, second):
        trainer.step(batches[0])
    first.save(tmp_path, background=False)
    with pytest.raises(
        FileError, match=r"step-00000001 belongs to another training, .*: save to another folder"
    ):
        second.save(tmp_path)
    assert third.load(tmp_path) == 1
    assert third.owner.training == first.owner.training != second.owner.training
    third.step(batches[1])
    third.save(tmp_path)
    third.finish()
    first.step(batches[1])
    first.step(batches[1])
    with pytest.raises(FileError, match=r"step-00000002 belongs to another training"):
        first.save(tmp_path)
    assert [step for step, _ in folders.whole(tmp_path)] == [1, 2]


def test_a_script_holds_its_folder_from_its_first_line(tmp_path: Path) -> None:
    """`resume` on an empty folder holds the folder until the script ends."""
    trainer = trainer_for("dropout", plan_for("dropout", "1f1b", (3, 3)))
    assert trainer.resume(tmp_path) == 0
    check_holder(tmp_path, trainer.owner)
    trainer.step(batches_of("dropout")[0])
    trainer.save(tmp_path)
    assert trainer.resume(tmp_path) == 1
    assert (tmp_path / LOCK).exists()
    trainer.finish()
    assert not (tmp_path / LOCK).exists()


def test_a_script_with_another_seed_goes_on_from_no_step(tmp_path: Path) -> None:
    """A script with another seed is refused by `resume`, because it would mix weights of one seed with
    batches of the other; `load` takes the checkpoint's seed.
    """
    plan, batch = plan_for("dropout", "1f1b", (3, 3)), batches_of("dropout")[0]
    first, second, third = (trainer_for("dropout", plan, seed=seed) for seed in (SEED, NEXT, SEED))
    first.step(batch)
    first.save(tmp_path)
    first.finish()
    with pytest.raises(
        UsageError,
        match=rf"step-00000001 was trained with seed {SEED}, by .*, but this training has seed {NEXT}",
    ):
        second.resume(tmp_path)
    assert second.load(tmp_path) == 1
    assert third.resume(tmp_path) == 1


def test_a_trainer_passes_over_a_damaged_checkpoint(tmp_path: Path) -> None:
    """A trainer skips a damaged checkpoint with a message, resumes from the previous one, and saves at the
    same step again.
    """
    trainer, batches = trainer_for("dropout", plan_for("dropout", "1f1b", (3, 3))), batches_of("dropout")
    expected = list[float]()
    for batch in batches[:4]:
        expected.append(trainer.step(batch))
        trainer.save(tmp_path, background=False)
    trainer.finish()
    flip(tmp_path / "step-00000004" / "worker-00000.safetensors")
    again = trainer_for("dropout", plan_for("dropout", "1f1b", (3, 3)), seed=99)
    with pytest.warns(
        PipefitWarning, match=r"step-00000004 is skipped: .*SHA-256 differs.*00003 is used instead"
    ):
        assert again.load(tmp_path) == 3
    assert again.step(batches[3]) == expected[3]
    again.save(tmp_path, background=False)
    again.finish()
    assert find(tmp_path).manifest.step == 4
    assert (tmp_path / "step-00000004.damaged").exists()


def test_workers_that_torchrun_starts_again_take_no_steps_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers restarted by torchrun refuse steps that another training has saved since they started; they
    take their own and older ones.
    """
    plan, batch = plan_for("dropout", "1f1b", (3, 3)), batches_of("dropout")[0]
    other = trainer_for("dropout", plan, seed=NEXT)
    other.step(batch)
    other.save(tmp_path / "theirs")
    other.finish()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    own = trainer_for("dropout", plan)
    own.step(batch)
    own.save(tmp_path / "ours")
    own.finish()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert trainer_for("dropout", plan).load(tmp_path / "ours") == 1
    with pytest.raises(
        FileError,
        match=r"belongs to another training, .*, which saved it at .*, after this training had begun",
    ):
        trainer_for("dropout", plan).load(tmp_path / "theirs")
    began = find(tmp_path / "theirs").manifest.saved_seconds + 1
    monkeypatch.setattr(hold, "process_start", lambda pid: began)
    assert trainer_for("dropout", plan).load(tmp_path / "theirs") == 1


@pytest.mark.gallery
@pytest.mark.timeout(600)
def test_two_trainings_by_torchrun_on_one_folder(tmp_path: Path) -> None:
    """Of two torchrun trainings on one folder, started together with restarts left, one ends with its own
    losses, and the other fails at every start without printing a foreign step.
    """
    script = [str(ROOT / "examples" / "restarting_loop.py"), "--steps", "12", "--every", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    runs = [
        subprocess.Popen(
            [*torchrun, "--max-restarts", "2", *script, "--seed", str(seed), str(tmp_path / "runs")],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for seed in (0, 1)
    ]  # fmt: skip
    said = [run.communicate() for run in runs]
    alone = [
        subprocess.run(
            [sys.executable, *script, "--seed", str(seed), str(tmp_path / f"alone{seed}")],
            env=environment, capture_output=True, text=True, check=True,
        ).stdout
        for seed in (0, 1)
    ]  # fmt: skip
    codes = [run.returncode for run in runs]
    assert sorted(map(bool, codes)) == [False, True], said
    winner = codes.index(0)
    assert said[winner][0] == alone[winner]
    assert said[1 - winner][0] == ""
    assert "is saving to" in said[1 - winner][1] or "after this training had begun" in said[1 - winner][1]
