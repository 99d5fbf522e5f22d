"""Saves checkpoints during training.

A snapshot is taken between two steps, and a thread writes it during the next steps. Several workers save
together. Each writes its own shard and then its part of the manifest; the first worker waits for all parts
and makes the checkpoint whole. The workers exchange a few numbers before a save, so that all of them or none
begin it, and again before the next save, so that a failure of one ends the attempt everywhere. A failed write
costs the checkpoint, not the training: it is reported at the end of the next step, and the caller decides.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.checkpoints import Hold, Manifest, Owner, Part, check_holder, folders, write_shard
from pipefit.errors import FileError, PeerLost, PipefitError, SaveFailed, all_lines, in_one_line
from pipefit.runtime.checkpoint.restoring import Snapshot, copied
from pipefit.texts import printable

_PAUSE_SECONDS = 0.02  # between two polls for the parts of other workers
_THREAD = "pipefit-checkpoint"
_LEAVING_SECONDS = 30.0  # grace period for the parts of other workers when the process ends

Join = Callable[[list[Part]], Manifest]
OnSave = Callable[[bool], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Target of a save: the folder of all checkpoints, the batches trained, and the checkpoints to keep.

    `owner` is the run that saves, which began after `first` steps and skipped the damaged checkpoints
    `aside`. `held` says that another process holds the folder for it.
    """

    directory: Path
    step: int
    keep: int | None
    owner: Owner
    first: int = 0
    aside: Collection[Path] = ()
    held: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """A save as this process saw it.

    `nbytes` of tensors were saved, `snapshot_bytes` of them copied to host memory, and training stood still
    for `still_seconds`. `shortage` says why this process had no room for copies.
    """

    step: int
    nbytes: int
    snapshot_bytes: int
    still_seconds: float
    shortage: str = ""


def finish_writing() -> None:
    """Wait until this process has written all its checkpoints; it is the only worker of its trainings."""
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join()


class Saver:
    """The saves of one process.

    Args:
        rank: rank of this worker; the first makes checkpoints whole.
        workers: number of workers that save together.
        device: device of the numbers that they exchange.
        on_save: called with whether this process waits for others, as a part of a save begins, and repeatedly
            while it makes progress.
    """

    def __init__(self, rank: int, workers: int, device: torch.device, on_save: OnSave) -> None:
        self.rank, self.workers, self.device, self.on_save = rank, workers, device, on_save
        self.last: SaveReport | None = None
        self._writing: _Writing | None = None
        self._untold: list[SaveFailed] = []
        self._holds: dict[Path, Hold] = {}  # of the first worker, from its first save to `release`

    def save(
        self,
        target: Target,
        take: Callable[[], Snapshot],
        shortage: Callable[[Snapshot], str],
        join: Join,
        *,
        background: bool,
    ) -> None:
        """Begin to write the snapshot that `take` returns to `target`; all workers call it together.

        With `background`, copies are written while training goes on, if `shortage` returns an empty text on
        every worker. Otherwise all workers write the tensors themselves before the call returns. If another
        worker cannot begin, it reports the error and nothing is saved.

        Raises:
            PipefitError: this worker cannot begin: its state cannot be written, or the folder cannot be made.
        """
        self.wait()
        began = time.perf_counter()
        self.on_save(False)
        error: PipefitError | None = None
        short = ""
        partial = folders.folder_of(target.directory, target.step).with_suffix(".partial")
        try:
            result = take()
            short = shortage(result) if background else ""
            if self.rank == 0:
                partial = self._begun(target)
        except PipefitError as failed:
            error = failed
        failures = self.which(error is not None)
        at_once = not background or bool(self.which(bool(short)))
        if error is not None:
            raise error
        if failures:
            return
        nbytes = result.nbytes
        tensors = result.tensors if at_once else copied(result.tensors, lambda: self.on_save(False))
        self._writing = _Writing(self, target, partial, tensors, replace(result, tensors={}), join)
        self._busy(target.directory, busy=True)
        self._writing.start()
        if at_once:  # the next step would change the tensors
            self.wait()
        self.last = SaveReport(
            step=target.step,
            nbytes=nbytes,
            snapshot_bytes=0 if at_once else nbytes,
            still_seconds=time.perf_counter() - began,
            shortage=short,
        )

    def wait(self) -> None:
        """Wait until the last checkpoint is whole, or has failed; all workers call it together."""
        writing = self._writing
        if writing is None:
            return
        self.on_save(False)
        self._join(writing, writing.done)
        failures = self.which(writing.failure is not None)
        if failures and writing.failure is None:
            writing.give_up(f"{_workers(failures)} could not write")
        self._join(writing, writing.ended)
        self.which(False)  # until worker 0, which completes the checkpoint, has ended too
        if self.rank == 0 and (failures or writing.failure is not None):
            folders.clear(writing.partial)
        self._busy(writing.target.directory, busy=False)
        self.look()
        self._writing = None

    def hold(self, directory: Path, owner: Owner) -> Hold:
        """Hold a folder for `owner`, until `release` or the end of the process.

        Raises:
            FileError: another training holds it.
        """
        known = self._holds.get(directory)
        if known is None or known.released:
            known = self._holds[directory] = Hold(directory, owner)
        return known

    def release(self) -> None:
        """Release all folders that this process holds."""
        while self._holds:
            self._holds.popitem()[1].release()

    def _begun(self, target: Target) -> Path:
        """Make the partial folder of a checkpoint, in a folder that this training holds.

        Raises:
            FileError: another training holds it, or has saved there; or it cannot be made.
        """
        anew = target.directory not in self._holds
        if target.held:
            check_holder(target.directory, target.owner)
        else:
            self.hold(target.directory, target.owner).check()
        try:
            return folders.begin(
                target.directory, target.step, target.owner, first=target.first, aside=target.aside
            )
        except FileError:
            if anew and (hold := self._holds.pop(target.directory, None)):
                hold.release()  # as it has no checkpoint of this training
            raise

    def _busy(self, directory: Path, *, busy: bool) -> None:
        if hold := self._holds.get(directory):
            hold.busy = busy

    def look(self) -> None:
        """Note whether the checkpoint that is being written has failed."""
        writing = self._writing
        if writing is not None and writing.failure is not None and not writing.told:
            writing.told = True
            self._untold.append(writing.failure)

    def failures(self) -> list[SaveFailed]:
        """Return the saves that have failed since the last call."""
        self.look()
        result, self._untold = self._untold, []
        return result

    def _join(self, writing: _Writing, event: threading.Event) -> None:
        before = -1
        while not event.wait(0.5):
            if writing.written_bytes != before or writing.done.is_set():
                self.on_save(False)
            before = writing.written_bytes

    def which(self, this_one: bool, tell: OnSave | None = None) -> list[int]:
        """Return the ranks of workers that pass True; all workers call it together."""
        return [rank for rank, number in enumerate(self.exchanged(int(this_one), tell)) if number]

    def exchanged(self, number: int, tell: OnSave | None = None) -> list[int]:
        """Return the numbers that all workers pass, in order of rank; all workers call it together.

        `tell` is called instead of `on_save`.

        Raises:
            PeerLost: another worker is gone.
        """
        tell = tell or self.on_save
        numbers = torch.zeros(self.workers, dtype=torch.float64, device=self.device)
        numbers[self.rank] = float(number)
        if self.workers > 1:
            tell(True)
            try:
                dist.all_reduce(numbers)
            except RuntimeError as error:
                raise PeerLost(
                    f"another worker ended while a checkpoint was saved or loaded ({all_lines(error)})"
                ) from error
            tell(False)
        return [int(number) for number in numbers.tolist()]


@dataclass
class _Writing:
    """One checkpoint that is being written, in its own thread."""

    saver: Saver
    target: Target
    partial: Path
    tensors: Mapping[str, Tensor] | None
    snapshot: Snapshot  # without its tensors
    join: Join
    written_bytes: int = 0
    failure: SaveFailed | None = None
    told: bool = False
    done: threading.Event = field(default_factory=threading.Event)  # own part is written, or has failed
    ended: threading.Event = field(default_factory=threading.Event)
    given_up: str = ""

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name=_THREAD)

    def start(self) -> None:
        """Start the thread."""
        try:
            self.thread.start()
        except RuntimeError as error:  # the system has no thread left
            self._end(SaveFailed(self._sentence(error), self.target.step))

    def give_up(self, why: str) -> None:
        """Stop waiting for other workers."""
        self.given_up = why

    def _run(self) -> None:
        failure = None
        try:
            self._write_part()
            self.done.set()
            if self.saver.rank == 0:
                self._complete()
        except BaseException as error:  # noqa: BLE001 - a silent end would pass for success
            failure = SaveFailed(self._sentence(error), self.target.step)
        finally:
            self._end(failure)

    def _end(self, failure: SaveFailed | None) -> None:
        self.failure, self.tensors = failure, None
        self.done.set()
        self.ended.set()

    def _write_part(self) -> None:
        assert self.tensors is not None
        rank = self.saver.rank
        shard = write_shard(self.partial / f"worker-{rank:05d}.safetensors", self.tensors, self._progress)
        self.tensors = None
        folders.write_part(self.partial, rank, self.snapshot.part(shard=shard))

    def _complete(self) -> None:
        """Make the checkpoint whole after every worker has written its part."""
        if not self._others():
            if self.given_up:
                return  # the worker that failed reports it
            raise FileError("the program ended before all workers had written their files")
        parts = [folders.read_part(self.partial, rank) for rank in range(self.saver.workers)]
        folders.complete(self.partial, self.join(parts))
        if self.target.keep is not None:
            folders.remove_old(self.target.directory, self.target.keep, self.target.owner.training)

    def _others(self) -> bool:
        """Wait for the parts of all workers; return whether all have arrived."""
        left = None
        while not all(folders.has_part(self.partial, rank) for rank in range(self.saver.workers)):
            if not self.partial.is_dir():
                raise FileError("the folder has been removed")
            if not threading.main_thread().is_alive():
                left = left or time.monotonic() + _LEAVING_SECONDS
            if self.given_up or (left is not None and time.monotonic() > left):
                return False
            time.sleep(_PAUSE_SECONDS)
        return True

    def _progress(self, nbytes: int) -> None:
        self.written_bytes += nbytes

    def _sentence(self, error: BaseException) -> str:
        """Return a message about the failure and the last whole checkpoint."""
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else _reason(error)
        known = [step for step, _ in folders.whole(self.target.directory)]
        last = (
            f"the last complete checkpoint is {known[-1]}" if known else "there is no complete checkpoint yet"
        )
        return f"checkpoint {self.target.step} cannot be saved to {printable(self.partial)}: {reason}; {last}"


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, PipefitError) else in_one_line(error)


def _workers(ranks: list[int]) -> str:
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
