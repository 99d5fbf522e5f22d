"""Folders of checkpoints.

`step-00000800` is a whole checkpoint, `step-00000800.partial` one that is being written. A checkpoint becomes
whole by one rename, after all of its files are on the disk, so that the end of a process or a machine never
leaves half of one. Only folders with these names are touched, only files with a checkpoint's names in them
are removed, and links are not followed. A folder holds the checkpoints of one training (`checkpoints.hold`).
"""

from __future__ import annotations

import os
import re
import stat
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch import Tensor

from pipefit.checkpoints.hold import Owner
from pipefit.checkpoints.manifest import Manifest, Part, StoredTensor, dumps, loads
from pipefit.checkpoints.shards import check_header, check_shard, read_shard, regular_file
from pipefit.errors import DamagedCheckpoint, FileError, PipefitWarning, UnreadableCheckpoint
from pipefit.schema.file_access import obstacle, path_of
from pipefit.texts import printable
from pipefit.units import format_bytes

MANIFEST = "manifest.json"
_WHOLE = re.compile(r"step-(\d{8,18})")
_PARTIAL = re.compile(r"step-\d{8,18}\.partial")
_OURS = re.compile(r"worker-\d{5}\.(safetensors|json)|manifest\.json")
_LARGEST_MANIFEST = 512 << 20
_BEFORE = "; the checkpoint before it is "


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint: its folder and its manifest."""

    folder: Path
    manifest: Manifest

    def read(self, wanted: Sequence[StoredTensor]) -> dict[str, Tensor]:
        """Read the tensors `wanted` by their keys.

        Only the shards that hold them are read, and each is verified.

        Raises:
            DamagedCheckpoint: a shard is missing or damaged; names the previous checkpoint, if there is one.
        """
        result: dict[str, Tensor] = {}
        for number, shard in enumerate(self.manifest.shards):
            here = [tensor for tensor in wanted if tensor.shard == number]
            with _damage(self.folder):
                result |= read_shard(self.folder, shard, here) if here else {}
        return result

    def verify(self) -> None:
        """Check that all shards are as they were saved.

        Raises:
            DamagedCheckpoint: one is missing or damaged; names the previous checkpoint, if there is one.
        """
        for shard in self.manifest.shards:
            with _damage(self.folder):
                check_shard(self.folder, shard)

    def check_headers(self) -> None:
        """Check that all shards have their sizes and tensors; only headers are read.

        Raises:
            DamagedCheckpoint: one is missing or damaged; names the previous checkpoint, if there is one.
        """
        for number, shard in enumerate(self.manifest.shards):
            with _damage(self.folder):
                check_header(self.folder, shard, [t for t in self.manifest.tensors if t.shard == number])


class Candidates:
    """The checkpoints that `path` may mean: the one at this path, or those of a training in this folder.

    `take` returns the newest readable one. A checkpoint that turns out to be damaged is skipped for the
    previous one, unless `path` names it directly.

    Args:
        run: only checkpoints that this run has saved.
        above: only checkpoints after more steps.
    """

    def __init__(self, path: str | os.PathLike[str], *, run: str | None = None, above: int = -1) -> None:
        self.path = path_of(path)
        self.passed = list[tuple[Path, str]]()  # folders, and why they are skipped
        self.damaged = list[Path]()  # the damaged ones of them
        self.named = _is_checkpoint(self.path)  # whether the path is that of one checkpoint
        self._told, self._run, self._training = 0, run, ""
        self._current: Checkpoint | None = None
        self._left = [] if self.named else [entry for entry in survey(self.path) if entry.step > above]

    def take(self) -> Checkpoint:
        """Return the newest checkpoint that was not skipped; warn once about each skipped one.

        Raises:
            FileError: there is none; or the named one cannot be read.
        """
        if self._current is None:
            self._current = _opened(self.path) if self.named else self._next()
        self.tell(f"{printable(self._current.folder)} is used instead")
        return self._current

    def tell(self, instead: str) -> None:
        """Warn about each checkpoint skipped since the last call, with the action taken `instead`."""
        for folder, reason in self.passed[self._told :]:
            warnings.warn(
                f"{printable(folder)} is skipped: {reason}; {instead}", PipefitWarning, stacklevel=4
            )
        self._told = len(self.passed)

    def pass_over(self, error: FileError) -> None:
        """Skip the checkpoint that was taken, because it is damaged.

        Raises:
            FileError: the path names it directly, without alternatives.
        """
        assert self._current is not None
        if self.named:
            raise error
        self._note(self._current.folder, error)
        self._current = None

    def _next(self) -> Checkpoint:
        while self._left:
            entry = self._left.pop()
            try:
                if entry.obstacle:
                    raise DamagedCheckpoint(entry.obstacle)
                result = _opened(entry.folder)
                if self._is_of_another(result.manifest.owner):
                    self.passed.append(
                        (entry.folder, f"it belongs to another training, {result.manifest.owner}")
                    )
                    continue
                result.check_headers()
            except DamagedCheckpoint as error:
                self._note(entry.folder, error)
            else:
                return result
        why = "name a folder with saved checkpoints"
        if self.passed:
            folder, reason = self.passed[0]
            why = f"{printable(folder)} cannot be used: {reason}"
        raise FileError(f"{printable(self.path)} does not contain a complete checkpoint: {why}")

    def _is_of_another(self, owner: Owner) -> bool:
        """Return whether the owner is neither the newest readable training nor the requested run."""
        if self._run is not None:
            return owner.run != self._run
        self._training = self._training or owner.training
        return owner.training != self._training

    def _note(self, folder: Path, error: FileError) -> None:
        self.passed.append((folder, str(error).partition(_BEFORE)[0]))
        self.damaged.append(folder)


def find(path: str | os.PathLike[str]) -> Checkpoint:
    """Return the checkpoint in `path`: the folder of one, or the newest whole one of a folder of them.

    Warns about each newer one that cannot be read.

    Raises:
        FileError: there is none, or its manifest cannot be used.
    """
    return Candidates(path).take()


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderEntry:
    """An entry of a folder with the name of a checkpoint; `obstacle` says why it is not one, or is empty."""

    step: int
    folder: Path
    obstacle: str


def survey(directory: Path) -> list[FolderEntry]:
    """Return all entries of `directory` with the name of a whole checkpoint, the newest last.

    The list is empty if `directory` does not exist.

    Raises:
        FileError: the folder cannot be read.
    """
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:
        raise FileError(
            f"{printable(directory)} cannot be read: {getattr(error, 'strerror', error)}"
        ) from None
    result = [(int(match[1]), match[0]) for match in map(_WHOLE.fullmatch, names) if match]
    return [
        FolderEntry(step=step, folder=directory / name, obstacle=_obstacle(directory / name))
        for step, name in sorted(result)
    ]


def whole(directory: Path) -> list[tuple[int, Path]]:
    """Return steps and folders of the whole checkpoints in `directory`, the newest last.

    The list is empty if `directory` does not exist.

    Raises:
        FileError: the folder cannot be read.
    """
    return [(entry.step, entry.folder) for entry in survey(directory) if not entry.obstacle]


def _obstacle(folder: Path) -> str:
    """Return why an entry with the name of a checkpoint is not one, without reading its content.

    The text is empty if it may be one.

    Raises:
        UnreadableCheckpoint: access is denied.
    """
    try:
        mode = os.lstat(folder).st_mode
        if stat.S_ISLNK(mode):
            return "it is a symbolic link, which pipefit does not follow"
        if not stat.S_ISDIR(mode):
            return "it is not a folder"
        return (
            ""
            if stat.S_ISREG(os.lstat(folder / MANIFEST).st_mode)
            else f"its {MANIFEST} is not a regular file"
        )
    except FileNotFoundError:
        return f"it does not contain {MANIFEST}"
    except OSError as error:
        raise UnreadableCheckpoint(f"{printable(folder)} cannot be read: {error.strerror}") from None


def _is_checkpoint(folder: Path) -> bool:
    """Return whether a path is that of one checkpoint, by its name or by its content.

    Raises:
        FileError: access is denied.
    """
    try:
        if _WHOLE.fullmatch(folder.name) and folder.is_symlink():
            return True
        os.lstat(folder / MANIFEST)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null character in the name
        return False
    except OSError as error:
        raise FileError(f"{printable(folder)} cannot be read: {error.strerror}") from None
    return True


def _opened(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder, with its manifest read.

    Raises:
        DamagedCheckpoint: it cannot be used.
        UnreadableCheckpoint: it cannot be read here.
    """
    match = _WHOLE.fullmatch(folder.name)
    with _damage(folder):
        if match and folder.is_symlink():
            raise FileError(
                f"{printable(folder)} is a symbolic link, which pipefit does not follow: name its target"
            )
        manifest = cast("Manifest", loads(_read(folder / MANIFEST), Manifest, printable(folder / MANIFEST)))
        if match and folder.name != folder_of(folder.parent, manifest.step).name:
            raise FileError(
                f"{printable(folder)} holds the checkpoint of step {manifest.step}, so it has been renamed: "
                f"restore its name {folder_of(folder.parent, manifest.step).name}"
            )
    return Checkpoint(folder=folder, manifest=manifest)


@contextmanager
def _damage(folder: Path) -> Iterator[None]:
    """Report errors of reading a checkpoint in the context as damage, and name the previous checkpoint."""
    try:
        yield
    except UnreadableCheckpoint:
        raise
    except FileError as error:
        known = [other for _, other in whole(folder.parent)]
        before = known[: known.index(folder)] if folder in known else []
        offer = f"{_BEFORE}{printable(before[-1])}" if before else ""
        raise DamagedCheckpoint(f"{error}{offer}") from None


def folder_of(directory: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` batches."""
    return directory / f"step-{step:08d}"


def check_writable(directory: Path) -> None:
    """Check that checkpoints can probably be saved to a folder, or that it can be made.

    Raises:
        FileError: it is not a folder, or not writable.
    """
    there = next(
        (path for path in (directory, *directory.absolute().parents) if os.path.lexists(path)), directory
    )
    if not os.path.isdir(there):
        raise FileError(
            f"{printable(directory)} cannot hold checkpoints: {printable(there)} is not a folder; "
            "name another"
        )
    if reason := obstacle(there):
        raise FileError(
            f"{printable(directory)} cannot hold checkpoints: {printable(there)} is not writable ({reason}); "
            "name another folder"
        )


def begin(directory: Path, step: int, owner: Owner, *, first: int = 0, aside: Collection[Path] = ()) -> Path:
    """Make the folder into which the checkpoint after `step` batches is written.

    Leftovers of earlier ones are removed. The caller has the `Hold` of `directory`, until the checkpoint is
    whole or cleared. The run of `owner` began after `first` steps; the damaged folders `aside`, which it
    skipped then, are renamed.

    Raises:
        FileError: the checkpoint, or one of a later step or of another training, exists already, or the
            folder cannot be made.
    """
    set_aside(directory, aside)
    target = folder_of(directory, step)
    if os.path.lexists(target):
        raise FileError(f"{printable(target)} already exists: remove it, or save to another folder")
    later = [other for number, other in whole(directory) if number > step]
    if later:  # as the newest it would be loaded instead of this one, and `remove_old` would remove this one
        raise FileError(
            f"{printable(later[-1])} already exists and is of a later step than {step}: resume from it, or "
            "save to another folder"
        )
    check_owner(directory, owner, first)
    partial = target.with_name(f"{target.name}.partial")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in filter(_PARTIAL.fullmatch, os.listdir(directory)):
            _remove(directory / name)
        partial.mkdir()
    except OSError as error:
        raise FileError(
            f"{printable(partial)} cannot be created: {error.strerror}; save to another folder"
        ) from None
    return partial


def check_owner(directory: Path, owner: Owner, first: int) -> None:
    """Check that the newest readable checkpoint in `directory` belongs to this training.

    It is of this run, or of an earlier run of the training and not after `first` steps, when this run began.

    Raises:
        FileError: it is of another; names it.
    """
    for step, folder in reversed(whole(directory)):
        try:
            other = _opened(folder).manifest.owner
        except FileError:
            continue
        if other.training != owner.training or (other.run != owner.run and step > first):
            raise FileError(
                f"{printable(folder)} belongs to another training, {other}: save to another folder"
            )
        return


def set_aside(directory: Path, folders: Collection[Path]) -> None:
    """Rename damaged checkpoints to names with `.damaged`, as far as the system allows.

    Only those in `directory` are renamed; their content stays, and training may save there again.
    """
    for folder in folders:
        with suppress(OSError):
            if os.path.samefile(folder.parent, directory):
                names = (f"{folder.name}.damaged{f'-{n}' if n > 1 else ''}" for n in range(1, 1000))
                free = next(name for name in names if not os.path.lexists(directory / name))
                (directory / folder.name).rename(directory / free)


def write_part(partial: Path, rank: int, part: Part) -> None:
    """Write the part of worker `rank` for the first worker; it appears atomically.

    Raises:
        OSError: the system refuses.
    """
    hidden = partial / f".worker-{rank:05d}.json"
    hidden.write_text(dumps(part), encoding="utf-8")
    hidden.rename(_part_file(partial, rank))


def has_part(partial: Path, rank: int) -> bool:
    """Return whether worker `rank` has written its part."""
    return _part_file(partial, rank).exists()


def read_part(partial: Path, rank: int) -> Part:
    """Return the part of worker `rank`.

    Raises:
        FileError: it cannot be used.
    """
    path = _part_file(partial, rank)
    return cast("Part", loads(_read(path), Part, printable(path)))


def complete(partial: Path, manifest: Manifest) -> Path:
    """Write the manifest, and make the checkpoint whole; return its folder.

    Raises:
        OSError: the system refuses.
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
    """Remove the remains of a checkpoint that could not be written, as far as the system allows."""
    with suppress(OSError):
        _remove(partial)


def remove_old(directory: Path, keep: int, training: str) -> None:
    """Remove all but the newest `keep` whole checkpoints, if of this training, as far as the system
    allows.
    """
    for _, folder in whole(directory)[:-keep]:
        partial = folder.with_name(f"{folder.name}.partial")
        with suppress(OSError, FileError):
            if _opened(folder).manifest.owner.training == training:
                folder.rename(partial)  # no longer whole, even if the removal fails
                _remove(partial)


def _remove(partial: Path) -> None:
    """Remove a folder's checkpoint files. Other files stay, and the folder with them."""
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
    """Return the bytes of a regular file of at most `_LARGEST_MANIFEST` bytes."""
    with regular_file(path) as (file, nbytes):
        if nbytes > _LARGEST_MANIFEST:
            raise FileError(
                f"{printable(path)} has {format_bytes(nbytes)}, but manifests have at most "
                f"{format_bytes(_LARGEST_MANIFEST)}"
            )
        return file.read()
