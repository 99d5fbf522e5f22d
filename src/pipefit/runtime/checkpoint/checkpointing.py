"""Checkpoints of a trainer: saving and loading the state of one process, as one of several workers or
alone.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from pipefit.checkpoints import (
    Candidates,
    Checkpoint,
    Manifest,
    Part,
    ScaleState,
    joined_settings,
    load_weights,
    new_owner,
    restarted_since,
    utc,
    whole,
)
from pipefit.errors import (
    DamagedCheckpoint,
    FileError,
    OutOfMemory,
    PeerLost,
    PipefitError,
    PipefitWarning,
    SaveFailed,
    UsageError,
    in_one_line,
    no_memory,
)
from pipefit.lowering import whole_run
from pipefit.memory import arenas_of, snapshot_shortage
from pipefit.runtime.checkpoint.background_saver import Saver, SaveReport, Target, finish_writing
from pipefit.runtime.checkpoint.restoring import (
    Snapshot,
    check_task,
    check_weight,
    read_for,
    restore,
    snapshot,
    stage_state_of,
    whole_likes,
)
from pipefit.runtime.hardware import free_bytes
from pipefit.runtime.options import Supervision
from pipefit.runtime.state import Names, Ranks, StageState, TrainedDevice, TrainedPart, gathered
from pipefit.schema.file_access import path_of
from pipefit.schema.json_text import adapter
from pipefit.schema.plan import Plan
from pipefit.schema.trace import Category
from pipefit.schema.validation import whole as whole_number
from pipefit.texts import printable
from pipefit.units import format_bytes


class Checkpointing:
    """Saves and loads the trained state of a process.

    Of replicas, the first one's state is stored; of ZeRO-sharded state, each shard owner's; all replicas load
    it. Tensors that are divided among tensor-parallel ranks are stored whole, by the first rank.

    Args:
        runners: runners of the devices of this process.
        names: names under which tensors are stored.
        workers: number of processes that train together.
        rank: rank of this process.
        supervision: called during saves and loads, and when a checkpoint was not written.
    """

    def __init__(
        self,
        plan: Plan,
        runners: Sequence[TrainedDevice],
        names: Names,
        *,
        workers: int,
        rank: int,
        supervision: Supervision,
    ) -> None:
        self.plan, self.runners, self.names = plan, runners, names
        self._all = [stage for runner in runners for stage in runner.stages.values()]
        self._ranks = _by_replica(runners)
        self._alone = workers == 1
        device = self._all[0].device if workers > 1 else torch.device("cpu")
        self._rank, self._saver = rank, Saver(rank, workers, device, supervision.on_save)
        self._on_failed_save = supervision.on_failed_save or _warn
        self._on_load = supervision.on_weights
        self.owner = supervision.owner or new_owner(plan.headline)
        self._held = None if supervision.held is None else path_of(supervision.held)
        self._first, self._damaged = 0, list[Path]()  # steps before this run; damaged checkpoints
        self._stands_still = False  # whether the warning about missing room for copies was given
        self._beside = (
            int(os.environ.get("LOCAL_WORLD_SIZE", workers)) if workers > 1 else 1
        )  # workers on this host

    @property
    def saved(self) -> SaveReport | None:
        """The last save that has begun."""
        return self._saver.last

    def save(
        self, directory: str | os.PathLike[str], step: int, *, keep: int | None, background: bool
    ) -> None:
        """Begin to save the state after `step` batches.

        With `background`, training goes on while it is written.

        Raises:
            FileError: this worker or another cannot begin the checkpoint.
            UsageError: part of the trained state cannot be written; names it.
        """
        if keep is not None:
            whole_number("keep", keep, 1)
        devices = {number: stage.devices[0] for number, stage in enumerate(self.plan.stages)}
        scale = self._scale()
        seed = self._all[0].seed
        folder = path_of(directory)
        target = Target(
            directory=folder,
            step=step,
            keep=keep,
            owner=self.owner,
            first=self._first,
            aside=self._damaged,
            held=self._held == folder,
        )
        self._saver.save(
            target,
            lambda: snapshot(self._ranks, self.names, devices, self._rank, once=True),
            self._shortage,
            lambda parts: self._manifest(parts, step, seed, scale),
            background=background,
        )
        if self.saved is not None and self.saved.shortage and not self._stands_still:
            self._stands_still = True
            warnings.warn(self.saved.shortage, PipefitWarning, stacklevel=3)

    def wait(self) -> None:
        """Wait until the last checkpoint is whole, or has failed; all workers call it together."""
        self._saver.wait()

    def tell_failures(self) -> None:
        """Report the saves that have failed since the last call."""
        for failure in self._saver.failures():
            self._on_failed_save(failure)

    def release(self) -> None:
        """Release the folders of this training for other trainings."""
        self._saver.release()

    def resume(self, directory: Path) -> int | None:
        """Hold a folder for this training and load its newest checkpoint.

        Return the number of batches trained, None without a checkpoint. All workers call it together.

        Raises:
            FileError: another training holds the folder, or worker 0 could not hold it; or as `load`.
            OutOfMemory: the optimizer's state does not fit a device.
            UsageError: the checkpoint was trained with another seed.
        """
        self.wait()
        error, steps = None, 0
        if self._rank == 0 and self._held != directory:
            try:
                self._saver.hold(directory, self.owner)
                steps = len(whole(directory))
            except FileError as failed:
                error = failed
        if self._saver.which(error is not None, self._on_load):
            raise error or FileError(
                f"worker 0 cannot lock {printable(directory)}; its output shows the reason"
            )
        there = self._saver.which(bool(steps), self._on_load)
        return self.load(directory, seed=self._all[0].seed) if there else None

    def load(self, path: str | os.PathLike[str], *, seed: int | None = None) -> int:
        """Load the checkpoint in `path`, or the newest whole one of a folder.

        Return the number of batches trained.

        Raises:
            FileError: there is no checkpoint; it is damaged, or of another task, or of a training that took
                the folder while torchrun restarted this one.
            OutOfMemory: the optimizer's state does not fit a device.
            UsageError: it was trained with another seed than `seed`, if given.
        """
        self.wait()
        if self._alone:
            finish_writing()  # another trainer's last save too
        candidates = Candidates(path)
        checkpoint, tensors = self._read(candidates, seed)
        manifest = checkpoint.manifest
        try:
            restore(checkpoint, tensors, self._all, self.names)
        except Exception as error:  # any error of an optimizer or scheduler on values of another one
            if isinstance(error, PipefitError | torch.OutOfMemoryError) or no_memory(error):
                raise
            raise FileError(
                f"{printable(checkpoint.folder)} cannot be loaded: its settings differ from those of "
                f"this task's optimizer and scheduler ({in_one_line(error)})"
            ) from error
        for runner in self.runners:
            _count(runner)
        self.owner = replace(self.owner, training=manifest.owner.training)
        self._first, self._damaged = manifest.step, candidates.damaged
        return manifest.step

    def _read(self, candidates: Candidates, seed: int | None) -> tuple[Checkpoint, dict[str, Tensor]]:
        """Return the newest checkpoint that all workers can read, and the tensors that this worker needs."""
        while True:
            checkpoint = candidates.take()
            step = checkpoint.manifest.step
            steps = self._saver.exchanged(step, self._on_load)
            if step > min(steps):
                candidates.pass_over(DamagedCheckpoint(f"worker {steps.index(min(steps))} cannot read it"))
            if max(steps) > min(steps):
                continue
            try:
                check_task(checkpoint, self.plan.profile)
                self._check_run(checkpoint)
                _check_seed(checkpoint, seed)
                error, tensors = None, read_for(checkpoint, self._all, self.names)
            except DamagedCheckpoint as damage:
                error, tensors = damage, {}
            failed = self._saver.which(error is not None, self._on_load)
            if not failed:
                return checkpoint, tensors
            if error is None and candidates.named:
                raise PeerLost(
                    f"worker {failed[0]} cannot read {printable(checkpoint.folder)}; its output shows "
                    "the reason"
                )
            candidates.pass_over(error or DamagedCheckpoint(f"worker {failed[0]} cannot read it"))

    def _check_run(self, checkpoint: Checkpoint) -> None:
        """Check that a restart by torchrun does not load a checkpoint saved meanwhile by another training.

        Raises:
            FileError: it does.
        """
        manifest, since = checkpoint.manifest, restarted_since()
        if (
            self._rank
            or since is None
            or manifest.owner.run == self.owner.run
            or manifest.saved_seconds < since
        ):
            return
        raise FileError(
            f"{printable(checkpoint.folder)} belongs to another training, {manifest.owner}, which "
            f"saved it at {utc(manifest.saved_seconds)}, after this training had begun: use a separate "
            "folder for each training"
        )

    def state(self) -> StageState:
        """Return the state of this process's stages; of several replicas here, the stored one.

        Workers of a tensor group call it together.
        """
        return gathered([ranks for _, ranks in self._ranks], once=self._alone)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that this process would store, by their keys.

        Workers of a tensor group call it together.
        """
        devices = {number: 0 for number, _ in self._ranks}
        return dict(snapshot(self._ranks, self.names, devices, self._rank, once=self._alone).tensors)

    def load_weights(self, path: str | os.PathLike[str]) -> None:
        """Load parameters and buffers from a safetensors file or a sharded model, cast to the model's dtypes.

        Raises:
            FileError: there is no such file, it is damaged, or its tensors do not fit the model.
        """
        needed = {name: like for stage in self._all for name, like in whole_likes(stage).tensors.items()}
        own = {self.names.stored[name] for name in needed}
        result = load_weights(path, [name for name, stored in self.names.stored.items() if stored in own])
        known = {self.names.stored[name]: tensor for name, tensor in result.items()}
        for name, into in needed.items():
            check_weight(path, name, known.get(self.names.stored[name]), into)
        self.take_up(known)

    def take_up(self, tensors: Mapping[str, Tensor]) -> None:
        """Load tensors by the keys of `tensors`, or parameters and buffers alone, by any of their names.

        Raises:
            UsageError: a tensor is missing, or has another shape.
        """
        self.load_state(stage_state_of(tensors, self.names))

    def load_state(self, state: StageState, *, replace: bool = False) -> None:
        """Load a state of whole tensors; with `replace`, delete optimizer state that `state` lacks.

        Raises:
            UsageError: a tensor is missing, or has another shape.
        """
        state.load_into(self._all, replace=replace)
        for runner in self.runners:
            _count(runner)

    def _shortage(self, found: Snapshot) -> str:
        """Return why the plan's hosts, or the free memory of this host, lack room for a copy of the state.

        The text is empty if there is room.
        """
        needed, free = found.nbytes * self._beside, free_bytes()
        missing = self._plan_shortage or (
            f"this host has {format_bytes(free)} of memory left, but the copies of its workers' state need "
            f"up to {format_bytes(needed)}"
            if needed > free
            else ""
        )
        return missing and f"{missing}: training pauses while a checkpoint is written"

    @cached_property
    def _plan_shortage(self) -> str:
        return snapshot_shortage(self.plan, arenas_of(self.plan, whole_run(self.plan)))

    def _scale(self) -> ScaleState | None:
        scales = (stage.agreement.scale for stage in self._all if stage.agreement is not None)
        scale = next(iter(scales), None)
        return None if scale is None else ScaleState(value=scale.value, quiet=scale.quiet)

    @cached_property
    def _plan_digest(self) -> str:
        return sha256(adapter(Plan).dump_json(self.plan)).hexdigest()

    def _manifest(self, parts: Sequence[Part], step: int, seed: int, scale: ScaleState | None) -> Manifest:
        return Manifest(
            pipefit_version=version("pipefit"),
            torch_version=str(torch.__version__),
            owner=self.owner,
            saved_seconds=time.time(),
            step=step,
            seed=seed,
            model=self.plan.profile.fingerprint,
            plan=self._plan_digest,
            schedule=self.plan.training.schedule,
            stages=tuple(sorted((s for part in parts for s in part.stages), key=lambda stage: stage.start)),
            loss_scale=scale,
            shards=tuple(part.shard for part in parts),
            tensors=tuple(tensor for part in parts for tensor in part.tensors),
            aliases=self.names.aliases,
            groups=tuple(group for part in parts for group in part.groups),
            numbers=tuple(numbers for part in parts for numbers in part.numbers),
            scheduler=joined_settings([part.scheduler for part in parts if part.scheduler is not None]),
        )


def _check_seed(checkpoint: Checkpoint, seed: int | None) -> None:
    """Check that a restarted script continues with its own seed, which also draws its batches.

    Raises:
        UsageError: the checkpoint was trained with another seed.
    """
    trained = checkpoint.manifest.seed
    if seed not in (None, trained):
        raise UsageError(
            f"{printable(checkpoint.folder)} was trained with seed {trained}, by training "
            f"{checkpoint.manifest.owner}, but this training has seed {seed}: resume with seed {trained} "
            "(Trainer.load uses the checkpoint's seed), or save to another folder"
        )


def _warn(failure: SaveFailed) -> None:
    warnings.warn(str(failure), PipefitWarning, stacklevel=4)


def _by_replica(runners: Sequence[TrainedDevice]) -> list[tuple[int, Ranks]]:
    """Return the number of the stage and the ranks of every replica of a stage in this process."""
    result: dict[tuple[int, int], list[TrainedPart]] = {}
    for runner in runners:
        for number, stage in runner.stages.items():
            result.setdefault((number, stage.replica), []).append(stage)
    return [(number, ranks) for (number, _), ranks in result.items()]


def _count(runner: TrainedDevice) -> None:
    """Count loaded optimizer state in the memory meter of the runner's device."""
    if runner.meter is None:
        return
    try:
        for stage in runner.stages.values():
            runner.meter.tag(stage.optimizer_state(), Category.OPTIMIZER)
    except torch.OutOfMemoryError as error:
        named = "; ".join(runner.plan.profile.named(s.start, s.stop) for s in runner.stages.values())
        raise OutOfMemory(f"{error} (a checkpoint's optimizer state, {named})") from error
