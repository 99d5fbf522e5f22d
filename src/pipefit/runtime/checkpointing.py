"""The checkpoints of a trainer: what it saves, as one of several workers or alone, and what it goes on from."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from hashlib import sha256

import torch
from torch import Tensor

from pipefit import __version__
from pipefit.checkpoints.folders import find
from pipefit.checkpoints.manifest import Manifest, Part, ScaleState, joined_settings
from pipefit.checkpoints.plain import load_weights
from pipefit.errors import FileError, OutOfMemory, PipefitError, PipefitWarning, in_one_line
from pipefit.pieces import adapter
from pipefit.plans import Plan
from pipefit.readable import path_of
from pipefit.runtime.host import free_bytes
from pipefit.runtime.naming import Names
from pipefit.runtime.restoring import check_task, check_weight, restore, state_of, whole_likes
from pipefit.runtime.runner import DeviceRunner
from pipefit.runtime.saver import OnSave, Saved, Saver, Target
from pipefit.runtime.snapshot import Snapshot, snapshot
from pipefit.runtime.stage import StageRunner
from pipefit.runtime.state import StageState
from pipefit.runtime.told import Ranks, Told
from pipefit.schedule import whole_run
from pipefit.schedule.arenas import arenas_of
from pipefit.schedule.room import snapshot_shortage
from pipefit.texts import printable
from pipefit.trace import Category
from pipefit.units import format_bytes
from pipefit.validation import whole

OnFailedSave = Callable[[FileError], None]


class Checkpointing:
    """Saves and loads what a process trains. Of replicas the first one's state is stored, of what they divide each
    owner's, and all take it up. Tensors that the ranks of a tensor group divide are stored whole, by the first of them.

    Args:
        runners: of the devices that this process runs.
        names: under which tensors are stored.
        workers: how many processes train together.
        rank: of this one.
        on_save: called with whether this process waits for others, again and again in a save.
        on_failed_save: called with what kept a checkpoint from being written; unless given, it is told in a warning.
    """

    def __init__(
        self,
        plan: Plan,
        runners: Sequence[DeviceRunner],
        names: Names,
        *,
        workers: int,
        rank: int,
        on_save: OnSave,
        on_failed_save: OnFailedSave | None,
    ) -> None:
        self.plan, self.runners, self.names = plan, runners, names
        self._all = [stage for runner in runners for stage in runner.stages.values()]
        self._ranks = _by_replica(runners)
        self._alone = workers == 1
        device = self._all[0].device if workers > 1 else torch.device("cpu")
        self._rank, self._saver = rank, Saver(rank, workers, device, on_save)
        self._on_failed_save = on_failed_save or _warn
        self._stands_still = False  # whether it has been told that there is no room for copies
        self._beside = int(os.environ.get("LOCAL_WORLD_SIZE", workers)) if workers > 1 else 1  # workers on this host

    @property
    def saved(self) -> Saved | None:
        """The last save that has begun."""
        return self._saver.last

    def save(self, directory: str | os.PathLike[str], step: int, *, keep: int | None, background: bool) -> None:
        """Begin to save the state after `step` batches; `background` lets training go on while it is written.

        Raises:
            FileError: the checkpoint cannot be begun, on this worker or another.
            UsageError: something that is trained cannot be written; names it.
        """
        if keep is not None:
            whole("keep", keep, 1)
        devices = {number: stage.devices[0] for number, stage in enumerate(self.plan.stages)}
        scale = self._scale()
        seed = self._all[0].seed
        self._saver.save(
            Target(directory=path_of(directory), step=step, keep=keep),
            lambda: snapshot(self._ranks, self.names, devices, self._rank, once=True),
            self._shortage,
            lambda parts: self._manifest(parts, step, seed, scale),
            background=background,
        )
        if self.saved is not None and self.saved.shortage and not self._stands_still:
            self._stands_still = True
            warnings.warn(self.saved.shortage, PipefitWarning, stacklevel=3)

    def wait(self) -> None:
        """Return when the last checkpoint is whole, or has failed; all workers call it together."""
        self._saver.wait()

    def tell_failures(self) -> None:
        """Tell which saves have failed since the last call."""
        for failure in self._saver.failures():
            self._on_failed_save(failure)

    def load(self, path: str | os.PathLike[str]) -> int:
        """Take up the checkpoint in `path`, or the newest whole one of a folder; how many batches it has taken.

        Raises:
            FileError: there is none; it is damaged, or of another task.
            OutOfMemory: the optimizer's state does not fit a device.
        """
        self.wait()
        checkpoint = find(path)
        check_task(checkpoint, self.plan.profile)
        try:
            restore(checkpoint, self._all, self.names)
        except (PipefitError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever an optimizer or scheduler makes of values that it has not written
            raise FileError(
                f"{printable(str(checkpoint.folder))} cannot be taken up: its settings are not those of this task's "
                f"optimizer and scheduler ({in_one_line(error)})"
            ) from error
        for runner in self.runners:
            _count(runner)
        return checkpoint.manifest.step

    def state(self) -> StageState:
        """The state of this process's stages; of replicas that it runs, what is stored. Workers of a tensor group ask
        together.
        """
        return Told.of([ranks for _, ranks in self._ranks], once=self._alone).state

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that this process would store, by their keys; workers of a tensor group ask together."""
        devices = {number: 0 for number, _ in self._ranks}
        return dict(snapshot(self._ranks, self.names, devices, self._rank, once=self._alone).tensors)

    def load_weights(self, path: str | os.PathLike[str]) -> None:
        """Take up the parameters and buffers in a safetensors file or a sharded model, cast to those of the model.

        Raises:
            FileError: there is no such file, it is damaged, or its tensors are not those of the model.
        """
        needed = {name: like for stage in self._all for name, like in whole_likes(stage).tensors.items()}
        own = {self.names.stored[name] for name in needed}
        found = load_weights(path, [name for name, stored in self.names.stored.items() if stored in own])
        known = {self.names.stored[name]: tensor for name, tensor in found.items()}
        for name, into in needed.items():
            check_weight(path, name, known.get(self.names.stored[name]), into)
        self.take_up(known)

    def take_up(self, tensors: Mapping[str, Tensor]) -> None:
        """Load tensors by their keys, as `tensors` has them, or parameters and buffers alone, by any of their names.

        Raises:
            UsageError: one is missing, or has another shape.
        """
        state = state_of(tensors, self.names)
        state.load_into(self._all)
        for runner in self.runners:
            _count(runner)

    def _shortage(self, found: Snapshot) -> str:
        """Why there is no room for a copy of what is saved: in the plan's hosts, or in this one's memory just now."""
        needed, free = found.nbytes * self._beside, free_bytes()
        missing = self._plan_shortage or (
            f"this host has {format_bytes(free)} of memory left, and copies of what its workers save take up to "
            f"{format_bytes(needed)}"
            if needed > free
            else ""
        )
        return missing and f"{missing}: training stands still while a checkpoint is written"

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
            pipefit_version=__version__,
            torch_version=str(torch.__version__),
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


def _warn(failure: FileError) -> None:
    warnings.warn(str(failure), PipefitWarning, stacklevel=4)


def _by_replica(runners: Sequence[DeviceRunner]) -> list[tuple[int, Ranks]]:
    """For every replica of a stage that is here, the number of the stage and those of its ranks that are here."""
    found: dict[tuple[int, int], list[StageRunner]] = {}
    for runner in runners:
        for number, stage in runner.stages.items():
            found.setdefault((number, stage.replica), []).append(stage)
    return [(number, ranks) for (number, _), ranks in found.items()]


def _count(runner: DeviceRunner) -> None:
    """Count the optimizer's state that has been loaded on the runner's device."""
    if runner.meter is None:
        return
    try:
        for stage in runner.stages.values():
            runner.meter.tag(stage.optimizer_state(), Category.OPTIMIZER)
    except torch.OutOfMemoryError as error:
        named = "; ".join(runner.plan.profile.named(s.start, s.stop) for s in runner.stages.values())
        raise OutOfMemory(f"{error} (a checkpoint's optimizer state, {named})") from error
