"""Folders of checkpoints: whole or not there, the newest found, old ones removed, strangers' files left alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from made_checkpoints import manifest_of, part_of, tensors_of, write
from pipefit.checkpoints import find, folders
from pipefit.errors import FileError


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """The manifest comes back as it was, and so does every tensor, bit by bit, from the shard that holds it."""
    folder = write(tmp_path, 5)
    found = find(folder)
    expected = [part_of(tmp_path / "again", rank) for rank in (0, 1) if not (tmp_path / "again").mkdir(exist_ok=True)]
    assert found.manifest == manifest_of(expected, 5)
    tensors = found.read(found.manifest.tensors)
    assert tensors.keys() == (tensors_of(0) | tensors_of(1)).keys()
    assert all(torch.equal(tensors[key], tensor) for rank in (0, 1) for key, tensor in tensors_of(rank).items())
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json", "worker-00000.safetensors", "worker-00001.safetensors",
    ]  # fmt: skip


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    """One that is being written, or that has lost its manifest, does not count; a folder may also name one itself."""
    old, new = write(tmp_path, 5), write(tmp_path, 12)
    folders.begin(tmp_path, 30)
    (tmp_path / "step-00000040").mkdir()
    assert find(tmp_path).folder == new
    assert find(old).manifest.step == 5
    assert [step for step, _ in folders.whole(tmp_path)] == [5, 12]


@pytest.mark.parametrize("name", ["", "nowhere", "a file", "\0", "x" * 300, "x/" * 3000])
def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    """An empty folder, none, a file or a name that cannot be: one sentence."""
    (tmp_path / "a file").touch()
    with pytest.raises(FileError, match=r"there is no whole checkpoint in|cannot be read"):
        find(tmp_path / name)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    """Whole checkpoints of ours beyond `keep` go; half ones, strangers' folders and their files stay."""
    for step in (5, 6, 7, 8):
        write(tmp_path, step)
    (tmp_path / "step-00000006" / "notes.txt").write_text("mine")
    (tmp_path / "step-best").mkdir()
    (tmp_path / "step-00000002").mkdir()
    folders.remove_old(tmp_path, 2)
    assert [step for step, _ in folders.whole(tmp_path)] == [7, 8]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000002", "step-00000006.partial", "step-00000007", "step-00000008", "step-best",
    ]  # fmt: skip
    assert os.listdir(tmp_path / "step-00000006.partial") == ["notes.txt"]


def test_links_are_not_followed_when_removing(tmp_path: Path) -> None:
    """A link with the name of an old checkpoint, or of a half one, is left alone, and so is what it leads to."""
    elsewhere = write(tmp_path / "elsewhere", 1)
    here = tmp_path / "here"
    write(here, 8)
    (here / "step-00000001").symlink_to(elsewhere)
    (here / "step-00000003.partial").symlink_to(elsewhere)
    folders.remove_old(here, 1)
    folders.begin(here, 9)
    assert find(elsewhere).manifest.step == 1
    find(elsewhere).verify()
    assert (here / "step-00000001").is_symlink()
    assert (here / "step-00000003.partial").is_symlink()


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    """The same step again is refused before anything is written."""
    write(tmp_path, 5)
    with pytest.raises(FileError, match="step-00000005 is there already: remove it"):
        folders.begin(tmp_path, 5)


def test_what_a_broken_save_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    """Half checkpoints of ours are removed as the next one begins."""
    partial = folders.begin(tmp_path, 5)
    folders.write_part(partial, 0, part_of(partial, 0))
    folders.begin(tmp_path, 6)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000006.partial"]


def test_only_shards_that_are_needed_are_read(tmp_path: Path) -> None:
    """A worker that needs tensors of one shard does not look at another, which may be gone."""
    folder = write(tmp_path, 5)
    (folder / "worker-00001.safetensors").unlink()
    found = find(folder)
    tensors = found.read([tensor for tensor in found.manifest.tensors if tensor.name.startswith("0.")])
    assert len(tensors) == 3
    with pytest.raises(FileError, match=r"worker-00001.safetensors is missing"):
        found.read(found.manifest.tensors)
