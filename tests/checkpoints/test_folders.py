"""Folders of checkpoints: whole or absent, the newest found, old ones removed, foreign files left alone."""

from __future__ import annotations

import errno
import os
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipefit.checkpoints import Candidates, find, folders, load_state_dict, shards
from pipefit.checkpoints.folders import MANIFEST, folder_of
from pipefit.errors import FileError, PipefitWarning, UnreadableCheckpoint
from support.synthetic_checkpoints import OWNER, manifest_of, part_of, tensors_of, write


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """The manifest and every tensor are read as they were written, bit by bit, each tensor from its shard."""
    folder = write(tmp_path, 5)
    found = find(folder)
    expected = [
        part_of(tmp_path / "again", rank) for rank in (0, 1) if not (tmp_path / "again").mkdir(exist_ok=True)
    ]
    assert found.manifest == manifest_of(expected, 5)
    tensors = found.read(found.manifest.tensors)
    assert tensors.keys() == (tensors_of(0) | tensors_of(1)).keys()
    assert all(
        torch.equal(tensors[key], tensor) for rank in (0, 1) for key, tensor in tensors_of(rank).items()
    )
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json", "worker-00000.safetensors", "worker-00001.safetensors",
    ]  # fmt: skip


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    """The newest whole checkpoint is found, without partial ones and those without a manifest; the path may
    also name one directly.
    """
    old, new = write(tmp_path, 5), write(tmp_path, 12)
    folders.begin(tmp_path, 30, OWNER)
    (tmp_path / "step-00000040").mkdir()
    with pytest.warns(
        PipefitWarning, match=r"step-00000040 is skipped: it does not contain manifest.json; .*12 is used"
    ):
        assert find(tmp_path).folder == new
    assert find(old).manifest.step == 5
    assert [step for step, _ in folders.whole(tmp_path)] == [5, 12]


@pytest.mark.parametrize("name", ["", "nowhere", "a file", "\0", "x" * 300, "x/" * 3000])
def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    """A folder without a checkpoint (empty, absent, a file, an invalid name) is refused in one sentence."""
    (tmp_path / "a file").touch()
    with pytest.raises(FileError, match=r"does not contain a complete checkpoint|cannot be read"):
        find(tmp_path / name)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    """`keep` removes older whole checkpoints of ours; partial ones, foreign folders and their files stay."""
    for step in (5, 6, 7, 8):
        write(tmp_path, step)
    (tmp_path / "step-00000006" / "notes.txt").write_text("mine")
    (tmp_path / "step-best").mkdir()
    (tmp_path / "step-00000002").mkdir()
    folders.remove_old(tmp_path, 2, OWNER.training)
    assert [step for step, _ in folders.whole(tmp_path)] == [7, 8]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000002", "step-00000006.partial", "step-00000007", "step-00000008", "step-best",
    ]  # fmt: skip
    assert os.listdir(tmp_path / "step-00000006.partial") == ["notes.txt"]


def test_links_are_not_followed_when_removing(tmp_path: Path) -> None:
    """A link with the name of an old or partial checkpoint is left alone, and so is its target."""
    elsewhere = write(tmp_path / "elsewhere", 1)
    here = tmp_path / "here"
    write(here, 8)
    (here / "step-00000001").symlink_to(elsewhere)
    (here / "step-00000003.partial").symlink_to(elsewhere)
    folders.remove_old(here, 1, OWNER.training)
    folders.begin(here, 9, OWNER)
    assert find(elsewhere).manifest.step == 1
    find(elsewhere).verify()
    assert (here / "step-00000001").is_symlink()
    assert (here / "step-00000003.partial").is_symlink()


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    """A second checkpoint of a step is refused before anything is written."""
    write(tmp_path, 5)
    with pytest.raises(FileError, match="step-00000005 already exists: remove it"):
        folders.begin(tmp_path, 5, OWNER)


def test_what_a_broken_save_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    """Partial checkpoints of ours are removed when the next save begins."""
    partial = folders.begin(tmp_path, 5, OWNER)
    folders.write_part(partial, 0, part_of(partial, 0))
    folders.begin(tmp_path, 6, OWNER)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000006.partial"]


def test_only_shards_that_are_needed_are_read(tmp_path: Path) -> None:
    """Only the needed shards are read: others may be missing."""
    folder = write(tmp_path, 5)
    (folder / "worker-00001.safetensors").unlink()
    found = find(folder)
    tensors = found.read([tensor for tensor in found.manifest.tensors if tensor.name.startswith("0.")])
    assert len(tensors) == 3
    with pytest.raises(FileError, match=r"worker-00001.safetensors is missing"):
        found.read(found.manifest.tensors)


# -------------------------------------------------------------------- skipped checkpoints and their owners


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def put_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def put_link(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


def put_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


def of(training: str, run: str) -> Callable[[Path], None]:
    """Return a function that makes a checkpoint one of another training."""

    def put(folder: Path) -> None:
        manifest = find(folder).manifest
        owner = replace(OWNER, training=training, run=run)
        (folder / MANIFEST).write_text(folders.dumps(replace(manifest, owner=owner)))

    return put


PASSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "without a manifest": (lambda folder: (folder / MANIFEST).unlink(), "it does not contain manifest.json"),
    "with a pipe as its manifest": (
        lambda folder: put_fifo(folder / MANIFEST),
        "its manifest.json is not a regular",
    ),
    "with a pipe as a shard": (
        lambda folder: put_fifo(folder / "worker-00001.safetensors"),
        "is not a regular file",
    ),
    "without a shard": (
        lambda folder: (folder / "worker-00001.safetensors").unlink(),
        "worker-00001.safetensors is mi",
    ),
    "with a damaged manifest": (
        lambda folder: flip(folder / MANIFEST),
        "manifest.json is damaged|is not JSON|is not",
    ),
    "with another bit in a shard": (
        lambda folder: flip(folder / "worker-00001.safetensors"),
        "SHA-256 differs",
    ),
    "that is a link": (put_link, "it is a symbolic link, which pipefit does not follow"),
    "that is a file": (put_file, "it is not a folder"),
}


@pytest.mark.parametrize("damage", PASSED)
def test_a_newest_that_cannot_be_read_is_passed_over_and_told(damage: str, tmp_path: Path) -> None:
    """An unreadable newest checkpoint is skipped with one sentence: its name, the reason and its replacement,
    the previous one.
    """
    write(tmp_path, 4)
    expected = load_state_dict(tmp_path)
    do, words = PASSED[damage]
    do(write(tmp_path, 8))
    with pytest.warns(PipefitWarning) as told:
        found = load_state_dict(tmp_path)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    (said,) = (str(one.message) for one in told)
    folder = re.escape(str(tmp_path))
    assert re.search(
        rf"^{folder}/step-00000008 is skipped: .*({words}).*; {folder}/step-00000004 is used", said
    )
    assert "the checkpoint before it" not in said


def test_where_nothing_is_left_the_newest_is_named(tmp_path: Path) -> None:
    """If no checkpoint is readable, the error names the newest with its damage."""
    for step in (4, 8):
        (write(tmp_path, step) / "worker-00001.safetensors").unlink()
    with pytest.raises(
        FileError, match=r"does not contain a complete checkpoint: .*step-00000008 cannot .*is missing$"
    ):
        find(tmp_path)


def test_what_is_older_than_what_is_taken_is_nobodys_business(tmp_path: Path) -> None:
    """Checkpoints older than the chosen one are not read."""
    (write(tmp_path, 4) / MANIFEST).unlink()
    new = write(tmp_path, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find(tmp_path).folder == new


def test_a_checkpoint_under_another_steps_name_is_refused(tmp_path: Path) -> None:
    """A checkpoint renamed or copied to another step's name is refused, with its true step."""
    folder = write(tmp_path, 6).rename(tmp_path / "step-00000003")
    with pytest.raises(
        FileError, match=r"step-00000003 holds the checkpoint of step 6, .* its name step-00000006"
    ):
        find(folder)
    with pytest.raises(FileError, match="step-00000003 holds the checkpoint of step 6"):
        find(tmp_path)
    best = folder.rename(tmp_path / "best")
    assert find(best).manifest.step == 6  # a name that says nothing of a step


@pytest.mark.parametrize("name", ["step-000000002", "step-0000000\N{ARABIC-INDIC DIGIT TWO}"])
def test_a_step_has_one_name(name: str, tmp_path: Path) -> None:
    """A copy of a checkpoint under another spelling of its step is skipped with a message: training would
    save at the same step again.
    """
    for step in (1, 2):
        write(tmp_path, step)
    shutil.copytree(tmp_path / "step-00000002", tmp_path / name)
    with pytest.raises(FileError, match="it has been renamed: restore its name step-00000002"):
        find(tmp_path / name)
    shutil.rmtree(tmp_path / "step-00000002")
    with pytest.warns(PipefitWarning, match=f"{name} is skipped: .* renamed"):
        assert find(tmp_path).manifest.step == 1


def test_a_step_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    """A link named as a step is not followed, even if it is the given path; a link of another name is."""
    folder = write(tmp_path / "elsewhere", 8)
    (tmp_path / "step-00000008").symlink_to(folder)
    with pytest.raises(FileError, match="step-00000008 is a symbolic link, which pipefit does not follow"):
        find(tmp_path / "step-00000008")
    (tmp_path / "latest").symlink_to(folder)
    assert find(tmp_path / "latest").manifest.step == 8


def test_what_was_hashed_is_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes read are those that were hashed, even if another file takes the shard's name in between."""
    folder = write(tmp_path, 4)
    checkpoint, usual = find(folder), shards._check_bytes
    expected = {key: tensor.clone() for key, tensor in checkpoint.read(checkpoint.manifest.tensors).items()}

    def swap(file: Any, nbytes: int, shard: Any, source: str) -> None:
        usual(file, nbytes, shard, source)
        path = folder / shard.file
        other = bytes(len(path.read_bytes()))
        path.unlink()
        path.write_bytes(other)

    monkeypatch.setattr(shards, "_check_bytes", swap)
    found = checkpoint.read(checkpoint.manifest.tensors)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_only_checkpoints_of_one_training_are_candidates(tmp_path: Path) -> None:
    """Only checkpoints of the training that saved the newest one are candidates, and only those of one run in
    its restarts.
    """
    for step, training, run in ((2, "a", "1"), (4, "b", "2"), (6, "a", "1"), (8, "a", "3")):
        of(training, run)(write(tmp_path / "all", step))
        (tmp_path / "all" / f"step-{step:08d}").rename(tmp_path / f"step-{step:08d}")
    (tmp_path / "step-00000008" / "worker-00000.safetensors").unlink()
    candidates = Candidates(tmp_path)
    with pytest.warns(PipefitWarning, match="step-00000008 is skipped: .*step-00000006 is used instead"):
        assert candidates.take().manifest.step == 6
    candidates.pass_over(FileError("it is"))
    with pytest.warns(PipefitWarning) as told:
        assert candidates.take().manifest.step == 2
    assert "step-00000006 is skipped: it is; " in str(told[0].message)
    assert re.search(r"step-00000004 is skipped: it belongs to another training, b \(", str(told[1].message))
    with pytest.warns(PipefitWarning, match="is skipped"):
        assert Candidates(tmp_path, run="1").take().manifest.step == 6
    with pytest.raises(FileError, match="does not contain a complete checkpoint"):
        Candidates(tmp_path, run="1", above=6).take()


@pytest.mark.parametrize(
    ("training", "run", "refused"),
    [(OWNER.training, OWNER.run, False), (OWNER.training, "another", True), ("another", "another", True)],
)
def test_a_training_saves_behind_its_own_steps_alone(
    training: str, run: str, refused: bool, tmp_path: Path
) -> None:
    """A training saves only after steps of its run, or after older steps of its training."""
    of(training, run)(write(tmp_path, 4))
    for first in (0, 4):
        if refused and (first < 4 or training != OWNER.training):
            with pytest.raises(
                FileError, match=r"step-00000004 belongs to another training, .*: save to another folder"
            ):
                folders.begin(tmp_path, 6, OWNER, first=first)
        else:
            folders.begin(tmp_path, 6, OWNER, first=first)
    assert ([path.name for path in tmp_path.glob("*.partial")] == []) == (training != OWNER.training)


def test_checkpoints_of_others_are_not_removed(tmp_path: Path) -> None:
    """Foreign checkpoints are not removed."""
    for step, training in ((2, "another"), (4, OWNER.training), (6, OWNER.training)):
        write(tmp_path / "one", step).rename(tmp_path / f"step-{step:08d}")
        of(training, "run")(tmp_path / f"step-{step:08d}")
    folders.remove_old(tmp_path, 1, OWNER.training)
    assert [step for step, _ in folders.whole(tmp_path)] == [2, 6]


def test_what_was_passed_over_is_set_aside_and_not_lost(tmp_path: Path) -> None:
    """A skipped checkpoint is renamed and kept, and checkpoints elsewhere stay."""
    before, damaged = write(tmp_path, 4), write(tmp_path, 8)
    elsewhere = write(tmp_path / "other", 8)
    for _ in range(2):
        folders.set_aside(tmp_path, [damaged, elsewhere])
        damaged.mkdir(exist_ok=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "other", "step-00000004", "step-00000008", "step-00000008.damaged", "step-00000008.damaged-2",
    ]  # fmt: skip
    assert (folder_of(tmp_path, 4), elsewhere.exists()) == (before, True)
    assert (tmp_path / "step-00000008.damaged" / MANIFEST).exists()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE])
def test_what_may_be_whole_is_not_passed_over(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that may be whole is not skipped, if the process lacks the permission or has too many open
    files.
    """
    write(tmp_path, 4)
    write(tmp_path, 8)
    usual = os.open

    def refused(path: Any, *arguments: Any) -> int:
        if str(path).endswith("step-00000008/worker-00001.safetensors"):
            raise OSError(number, os.strerror(number))
        return usual(path, *arguments)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(
        UnreadableCheckpoint, match=r"step-00000008/worker-00001.safetensors cannot be read: "
    ):
        load_state_dict(tmp_path)


def test_a_later_version_is_not_passed_over(tmp_path: Path) -> None:
    """A checkpoint of a later version is not skipped, because another pipefit can read it."""
    write(tmp_path, 4)
    path = write(tmp_path, 8) / MANIFEST
    path.write_text(path.read_text().replace('"version": 2', '"version": 3', 1))
    with pytest.raises(UnreadableCheckpoint, match="is not of version 2, which this pipefit reads"):
        load_state_dict(tmp_path)
