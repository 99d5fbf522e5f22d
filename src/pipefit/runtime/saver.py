"""Saves checkpoints beside the training: a snapshot between two steps, which a thread writes while the next ones run.

Several workers save together. Each writes its own shard, and then its part of the manifest; the first waits for all
parts, and makes the checkpoint whole. The workers exchange a few numbers before a save, so that all of them begin it or
none does, and again before the next one, so that a failure of any ends the attempt everywhere. A failed write costs the
checkpoint, not the training: it is told at the end of the next step, and whoever is told decides.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.checkpoints import folders
from pipefit.checkpoints.manifest import Manifest, Part
from pipefit.checkpoints.shards import write_shard
from pipefit.errors import FileError, PeerLost, PipefitError, all_lines, in_one_line
from pipefit.runtime.snapshot import Snapshot, copied
from pipefit.texts import printable

_PAUSE_SECONDS = 0.02  # between two looks for the parts of other workers
_LEAVING_SECONDS = 30.0  # how long a process that wants to end waits for them

Join = Callable[[list[Part]], Manifest]
OnSave = Callable[[bool], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a checkpoint goes: the folder of all of them, the batches taken so far, and how many are kept."""

    directory: Path
    step: int
    keep: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A save as this process saw it: `nbytes` of tensors, of which `snapshot_bytes` were copied in the host's memory,
    and `still_seconds` in which training stood still. `shortage` says why this process had no room for copies.
    """

    step: int
    nbytes: int
    snapshot_bytes: int
    still_seconds: float
    shortage: str = ""


class Saver:
    """The saves of one process.

    Args:
        rank: of this worker; the first makes checkpoints whole.
        workers: how many save together.
        device: of the numbers that they exchange.
        on_save: called with whether this process waits for others, as a part of a save begins, and again and again as
            long as it makes progress.
    """

    def __init__(self, rank: int, workers: int, device: torch.device, on_save: OnSave) -> None:
        self.rank, self.workers, self.device, self.on_save = rank, workers, device, on_save
        self.last: Saved | None = None
        self._writing: _Writing | None = None
        self._untold: list[FileError] = []

    def save(
        self,
        target: Target,
        take: Callable[[], Snapshot],
        shortage: Callable[[Snapshot], str],
        join: Join,
        *,
        background: bool,
    ) -> None:
        """Begin to write what `take` finds to `target`; all workers call it together.

        In the `background` copies are written while training goes on, if no worker has a `shortage` of room for them,
        in words. Otherwise all write the tensors themselves before the call returns. Where another worker cannot begin,
        which tells why, nothing is saved.

        Raises:
            PipefitError: this worker cannot begin: what is trained cannot be written, or the folder not be made.
        """
        self.wait()
        began = time.perf_counter()
        self.on_save(False)
        error: PipefitError | None = None
        short = ""
        hold: folders.Hold | None = None
        partial = folders.folder_of(target.directory, target.step).with_suffix(".partial")
        try:
            found = take()
            short = shortage(found) if background else ""
            if self.rank == 0:
                hold = folders.Hold(target.directory)
                partial = folders.begin(target.directory, target.step)
        except PipefitError as failed:
            error = failed
        failures = self._which(error is not None)
        at_once = not background or bool(self._which(bool(short)))
        if hold is not None and failures:
            hold.release()
        if error is not None:
            raise error
        if failures:
            return
        nbytes = found.nbytes
        tensors = found.tensors if at_once else copied(found.tensors, lambda: self.on_save(False))
        self._writing = _Writing(self, target, partial, hold, tensors, replace(found, tensors={}), join)
        self._writing.start()
        if at_once:  # the tensors are those that the next step changes
            self.wait()
        self.last = Saved(
            step=target.step,
            nbytes=nbytes,
            snapshot_bytes=0 if at_once else nbytes,
            still_seconds=time.perf_counter() - began,
            shortage=short,
        )

    def wait(self) -> None:
        """Return when the last checkpoint is whole, or has failed; all workers call it together."""
        writing = self._writing
        if writing is None:
            return
        self.on_save(False)
        self._join(writing, writing.done)
        failures = self._which(writing.failure is not None)
        if failures and writing.failure is None:
            writing.give_up(f"{_workers(failures)} could not write")
        self._join(writing, writing.ended)
        if self.rank == 0 and (failures or writing.failure is not None):
            folders.clear(writing.partial)
        writing.release()
        self.look()
        self._writing = None

    def look(self) -> None:
        """Note whether the checkpoint that is being written has failed."""
        writing = self._writing
        if writing is not None and writing.failure is not None and not writing.told:
            writing.told = True
            self._untold.append(writing.failure)

    def failures(self) -> list[FileError]:
        """Saves that have failed since the last call."""
        self.look()
        found, self._untold = self._untold, []
        return found

    def _join(self, writing: _Writing, event: threading.Event) -> None:
        before = -1
        while not event.wait(0.5):
            if writing.written_bytes != before or writing.done.is_set():
                self.on_save(False)
            before = writing.written_bytes

    def _which(self, this_one: bool) -> list[int]:
        """The workers that call it with True; all of them call it together."""
        numbers = torch.zeros(self.workers, dtype=torch.float64, device=self.device)
        numbers[self.rank] = float(this_one)
        if self.workers > 1:
            self.on_save(True)
            try:
                dist.all_reduce(numbers)
            except RuntimeError as error:
                raise PeerLost(f"another worker is gone while a checkpoint is saved ({all_lines(error)})") from error
            self.on_save(False)
        return [rank for rank, number in enumerate(numbers.tolist()) if number]


@dataclass
class _Writing:
    """One checkpoint on its way to the disk, in a thread of its own."""

    saver: Saver
    target: Target
    partial: Path
    hold: folders.Hold | None  # of the first worker
    tensors: Mapping[str, Tensor] | None
    snapshot: Snapshot  # without its tensors
    join: Join
    written_bytes: int = 0
    failure: FileError | None = None
    told: bool = False
    done: threading.Event = field(default_factory=threading.Event)  # this worker's part is written, or has failed
    ended: threading.Event = field(default_factory=threading.Event)
    given_up: str = ""

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name="pipefit-checkpoint")

    def start(self) -> None:
        """Begin to write."""
        try:
            self.thread.start()
        except RuntimeError as error:  # the system has no thread left for us
            self._end(FileError(self._sentence(error)))

    def give_up(self, why: str) -> None:
        """Wait for other workers no longer."""
        self.given_up = why

    def release(self) -> None:
        """Let other trainings save to the folder."""
        if self.hold is not None:
            self.hold.release()

    def _run(self) -> None:
        failure = None
        try:
            self._write_part()
            self.done.set()
            if self.saver.rank == 0:
                self._complete()
        except (OSError, PipefitError, ValueError, RuntimeError, MemoryError) as error:
            failure = FileError(self._sentence(error))
        finally:
            self._end(failure)

    def _end(self, failure: FileError | None) -> None:
        self.failure, self.tensors = failure, None
        self.done.set()
        self.ended.set()

    def _write_part(self) -> None:
        assert self.tensors is not None
        rank = self.saver.rank
        shard = write_shard(self.partial / f"worker-{rank:05d}.safetensors", self.tensors, self._progress)
        self.tensors = None
        folders.write_part(self.partial, rank, self.snapshot.part(shard))

    def _complete(self) -> None:
        """Make the checkpoint whole, when every worker has written its part."""
        if not self._others():
            if self.given_up:
                return  # the worker that failed tells it
            raise FileError("the program ended before all workers had written their parts")
        parts = [folders.read_part(self.partial, rank) for rank in range(self.saver.workers)]
        folders.complete(self.partial, self.join(parts))
        if self.target.keep is not None:
            folders.remove_old(self.target.directory, self.target.keep)
        self.release()

    def _others(self) -> bool:
        """Wait for the parts of all workers; whether they have come."""
        left = None
        while not all(folders.has_part(self.partial, rank) for rank in range(self.saver.workers)):
            if not self.partial.is_dir():
                raise FileError("somebody has removed the folder")
            if not threading.main_thread().is_alive():
                left = left or time.monotonic() + _LEAVING_SECONDS
            if self.given_up or (left is not None and time.monotonic() > left):
                return False
            time.sleep(_PAUSE_SECONDS)
        return True

    def _progress(self, nbytes: int) -> None:
        self.written_bytes += nbytes

    def _sentence(self, error: BaseException) -> str:
        """What failed, and what there is to go on with."""
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else _reason(error)
        known = [step for step, _ in folders.whole(self.target.directory)]
        last = f"the last whole one is {known[-1]}" if known else "there is no whole one yet"
        return f"checkpoint {self.target.step} cannot be saved to {printable(str(self.partial))}: {reason}; {last}"


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, PipefitError) else in_one_line(error)


def _workers(ranks: list[int]) -> str:
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
