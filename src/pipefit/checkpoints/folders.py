"""Folders of checkpoints: `step-00000800` is a whole checkpoint, `step-00000800.partial` one that is being written.

A checkpoint becomes whole by one rename, after all of its files are on the disk, so that nothing that ends a process or
a machine leaves half of one behind. Only folders with our names are touched, only files with our names in them are
removed, and links are not followed.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch import Tensor

from pipefit.checkpoints.manifest import Manifest, Part, StoredTensor, dumps, loads
from pipefit.checkpoints.regular_files import regular_file
from pipefit.checkpoints.shards import check_header, check_shard, read_shard
from pipefit.errors import FileError
from pipefit.readable import path_of
from pipefit.texts import printable
from pipefit.units import format_bytes
from pipefit.writable import obstacle

MANIFEST = "manifest.json"
_WHOLE = re.compile(r"step-(\d{8,18})")
_PARTIAL = re.compile(r"step-\d{8,18}\.partial")
_OURS = re.compile(r"worker-\d{5}\.(safetensors|json)|manifest\.json")
_LARGEST_MANIFEST = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint: its folder, and what its manifest says."""

    folder: Path
    manifest: Manifest

    def read(self, wanted: Sequence[StoredTensor]) -> dict[str, Tensor]:
        """The tensors `wanted` by their keys; only the shards that hold them are read, and each is verified.

        Raises:
            FileError: a shard is missing or damaged; names the checkpoint before, if there is one.
        """
        found: dict[str, Tensor] = {}
        for number, shard in enumerate(self.manifest.shards):
            here = [tensor for tensor in wanted if tensor.shard == number]
            with _offering_the_one_before(self.folder):
                found |= read_shard(self.folder, shard, here) if here else {}
        return found

    def verify(self) -> None:
        """Check that all shards are as they were saved.

        Raises:
            FileError: one is missing or damaged; names the checkpoint before, if there is one.
        """
        for shard in self.manifest.shards:
            with _offering_the_one_before(self.folder):
                check_shard(self.folder, shard)

    def check_headers(self) -> None:
        """Check that all shards have their sizes and tensors, in no more time than it takes to read their headers.

        Raises:
            FileError: one is missing or damaged; names the checkpoint before, if there is one.
        """
        for number, shard in enumerate(self.manifest.shards):
            with _offering_the_one_before(self.folder):
                check_header(self.folder, shard, [t for t in self.manifest.tensors if t.shard == number])


def find(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint in `path`: the folder of one, or the newest whole one of a folder of them.

    Raises:
        FileError: there is none, or its manifest cannot be used.
    """
    folder = path_of(path)
    if not _has_manifest(folder):
        known = whole(folder)
        if not known:
            raise FileError(f"there is no whole checkpoint in {_named(folder)}: name a folder that was saved to")
        folder = known[-1][1]
    with _offering_the_one_before(folder):
        manifest = cast("Manifest", loads(_read(folder / MANIFEST), Manifest, _named(folder / MANIFEST)))
    return Checkpoint(folder=folder, manifest=manifest)


def whole(directory: Path) -> list[tuple[int, Path]]:
    """Steps and folders of the whole checkpoints in `directory`, the newest last; none if it does not exist.

    Raises:
        FileError: the folder cannot be read.
    """
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:
        raise FileError(f"{_named(directory)} cannot be read: {getattr(error, 'strerror', error)}") from None
    found = [(int(match[1]), directory / match[0]) for match in map(_WHOLE.fullmatch, names) if match]
    return sorted((step, folder) for step, folder in found if _has_manifest(folder))


def _has_manifest(folder: Path) -> bool:
    """Whether a folder has the file that makes a checkpoint of it.

    Raises:
        FileError: nobody may look, or there can be no such name.
    """
    try:
        return (folder / MANIFEST).is_file()
    except OSError as error:
        raise FileError(f"{_named(folder)} cannot be read: {error.strerror}") from None


@contextmanager
def _offering_the_one_before(folder: Path) -> Iterator[None]:
    """Inside, a checkpoint is read; where that cannot be done the sentence says what to load instead."""
    try:
        yield
    except FileError as error:
        known = [other for _, other in whole(folder.parent)]
        before = known[: known.index(folder)] if folder in known else []
        raise FileError(f"{error}{f'; the checkpoint before it is {_named(before[-1])}' if before else ''}") from None


def folder_of(directory: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` batches."""
    return directory / f"step-{step:08d}"


def check_writable(directory: Path) -> None:
    """Check that checkpoints can be saved to a folder, or that it can be made, as far as that shows beforehand.

    Raises:
        FileError: it is no folder, or nothing can be written there.
    """
    there = next((path for path in (directory, *directory.absolute().parents) if os.path.lexists(path)), directory)
    if not os.path.isdir(there):
        raise FileError(f"{_named(directory)} cannot hold checkpoints: {_named(there)} is no folder; name another")
    if reason := obstacle(there):
        raise FileError(
            f"{_named(directory)} cannot hold checkpoints: nothing can be written to {_named(there)} ({reason}); name "
            "another folder"
        )


class Hold:
    """The right to save to a folder, which one training has at a time: two would remove and join each other's files.

    The system takes it back from a process that ends, however that ends, and nothing of it is in the folder. Where the
    file system has no locks, everybody gets it.

    Raises:
        FileError: another training is saving there, or the folder cannot be made; or this is Windows.
    """

    def __init__(self, directory: Path) -> None:
        if not hasattr(os, "O_DIRECTORY"):
            raise FileError(
                "checkpoints are not saved on Windows, whose folders cannot be held: train without, or on Linux"
            )
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise FileError(f"{_named(directory)} cannot be made: {error.strerror}; save to another folder") from None
        self._give_up = weakref.finalize(self, _unlocked, self._folder)
        try:
            _lock(self._folder)
        except BlockingIOError:
            self.release()
            raise FileError(f"another training is saving to {_named(directory)}: save to another folder") from None
        except OSError:
            pass  # no locks here

    def release(self) -> None:
        """Let others save there."""
        self._give_up()


def _lock(folder: int) -> None:
    import fcntl  # not on Windows, where checkpoints are read and none is saved

    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _unlocked(folder: int) -> None:
    """Unlock explicitly, as processes that were forked meanwhile may have the folder open too."""
    import fcntl

    with suppress(OSError):
        fcntl.flock(folder, fcntl.LOCK_UN)
    os.close(folder)


def begin(directory: Path, step: int) -> Path:
    """Make the folder into which the checkpoint after `step` batches is written; what earlier ones left is removed.

    Whoever calls it has the `Hold` of `directory`, until the checkpoint is whole or cleared away.

    Raises:
        FileError: the checkpoint, or one of a later step, is there already, or the folder cannot be made.
    """
    target = folder_of(directory, step)
    if os.path.lexists(target):
        raise FileError(f"{_named(target)} is there already: remove it, or save to another folder")
    later = [other for number, other in whole(directory) if number > step]
    if later:  # as the newest it would be loaded instead of this one, and `remove_old` would remove this one
        raise FileError(
            f"{_named(later[-1])} is there already, of a later step than {step}: go on from there, or save to another "
            "folder"
        )
    partial = target.with_name(f"{target.name}.partial")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in filter(_PARTIAL.fullmatch, os.listdir(directory)):
            _remove(directory / name)
        partial.mkdir()
    except OSError as error:
        raise FileError(f"{_named(partial)} cannot be made: {error.strerror}; save to another folder") from None
    return partial


def write_part(partial: Path, rank: int, part: Part) -> None:
    """Leave what worker `rank` contributes, for the first worker to find; it appears as a whole.

    Raises:
        OSError: the system does not let us.
    """
    hidden = partial / f".worker-{rank:05d}.json"
    hidden.write_text(dumps(part), encoding="utf-8")
    hidden.rename(_part_file(partial, rank))


def has_part(partial: Path, rank: int) -> bool:
    """Whether worker `rank` has written all that it contributes."""
    return _part_file(partial, rank).exists()


def read_part(partial: Path, rank: int) -> Part:
    """What worker `rank` contributes.

    Raises:
        FileError: it cannot be used.
    """
    path = _part_file(partial, rank)
    return cast("Part", loads(_read(path), Part, _named(path)))


def complete(partial: Path, manifest: Manifest) -> Path:
    """Write the manifest, and make the checkpoint a whole one; its folder.

    Raises:
        OSError: the system does not let us.
    """
    with (partial / MANIFEST).open("x", encoding="utf-8") as file:
        file.write(dumps(manifest))
        file.flush()
        os.fsync(file.fileno())
    for rank in range(len(manifest.shards)):
        _part_file(partial, rank).unlink()
    _flush(partial)
    target = partial.with_suffix("")
    partial.rename(target)
    _flush(target.parent)
    return target


def clear(partial: Path) -> None:
    """Remove what is left of a checkpoint that could not be written, as far as the system lets us."""
    with suppress(OSError):
        _remove(partial)


def remove_old(directory: Path, keep: int) -> None:
    """Remove all but the newest `keep` whole checkpoints, as far as the system lets us."""
    for _, folder in whole(directory)[:-keep]:
        partial = folder.with_name(f"{folder.name}.partial")
        with suppress(OSError):
            if not folder.is_symlink():
                folder.rename(partial)  # no longer whole, whatever happens to us now
                _remove(partial)


def _remove(partial: Path) -> None:
    """Remove a folder with our files. Others stay, and the folder with them."""
    if partial.is_symlink():
        return
    for name in os.listdir(partial):
        if _OURS.fullmatch(name.removeprefix(".")):
            (partial / name).unlink()
    with suppress(OSError):
        partial.rmdir()


def _part_file(partial: Path, rank: int) -> Path:
    return partial / f"worker-{rank:05d}.json"


def _flush(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _read(path: Path) -> bytes:
    """The bytes of a regular file of reasonable size."""
    with regular_file(path) as (file, nbytes):
        if nbytes > _LARGEST_MANIFEST:
            raise FileError(
                f"{_named(path)} has {format_bytes(nbytes)}; manifests have at most {format_bytes(_LARGEST_MANIFEST)}"
            )
        return file.read()


def _named(path: Path) -> str:
    return printable(os.fspath(path))
