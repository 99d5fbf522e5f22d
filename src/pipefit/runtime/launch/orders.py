"""Orders that all workers of a training share: first and last step, seed, start, and checkpoints."""

from __future__ import annotations

import os
import pathlib
from dataclasses import dataclass, replace

from pipefit.checkpoints import Candidates, Checkpoint, Owner, load_weights
from pipefit.errors import UsageError
from pipefit.runtime.checkpoint.restoring import check_task
from pipefit.runtime.options import TrainOptions
from pipefit.schema.plan import Plan
from pipefit.schema.validation import whole
from pipefit.texts import counted, printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Train steps `first` to `steps - 1`, with random draws by `seed`, by the `options` of `train`.

    `resume` is the folder of the checkpoint after `first` steps, `weights` a safetensors file or sharded
    model from which the training starts. `owner` is the run that trains.
    """

    steps: int
    seed: int
    options: TrainOptions = TrainOptions()
    first: int = 0
    resume: str | None = None
    weights: str | None = None
    owner: Owner | None = None

    @property
    def absolute(self) -> Orders:
        """These orders with absolute paths, for workers whose task may change their working directory.

        Raises:
            OSError: the working directory has been removed.
        """
        saving, resume, weights = self.options.saving, self.resume, self.weights
        saving = saving and replace(saving, directory=_absolute(saving.directory))
        return replace(
            self,
            options=replace(self.options, saving=saving),
            resume=resume and _absolute(resume),
            weights=weights and _absolute(weights),
        )

    def after(self, checkpoint: Checkpoint) -> Orders:
        """Return these orders, continued from a checkpoint."""
        return replace(self, first=checkpoint.manifest.step, resume=str(checkpoint.folder), weights=None)


def _absolute(path: str) -> str:
    return os.fspath(pathlib.Path(path).absolute())


def orders(
    plan: Plan, options: TrainOptions, *, steps: int, resume: Candidates | None, owner: Owner
) -> Orders:
    """Return the orders of a training by `plan`, which continues from `resume`.

    `owner` is the run of a new training; one that continues from a checkpoint gets that checkpoint's
    training.

    Raises:
        FileError: the checkpoint is missing or of another task, or the weights are missing.
        UsageError: a number is out of range, or differs from that of the checkpoint.
    """
    whole("steps", steps, 1)
    weights = options.weights
    if weights is not None:
        load_weights(weights, ())  # reads no tensor, but reports a missing file before a worker starts
    checkpoint = None if resume is None else _resumed(resume, plan, steps, options.seed)
    seed = (options.seed or 0) if checkpoint is None else checkpoint.manifest.seed
    owner = owner if checkpoint is None else replace(owner, training=checkpoint.manifest.owner.training)
    ordered = Orders(
        steps=steps,
        seed=seed,
        options=replace(options, resume=None, weights=None),
        weights=None if weights is None else os.fspath(weights),
        owner=owner,
    )
    return ordered if checkpoint is None else ordered.after(checkpoint)


def _resumed(candidates: Candidates, plan: Plan, steps: int, seed: int | None) -> Checkpoint:
    """Return the newest checkpoint of `candidates`, from which training continues to `steps` steps."""
    checkpoint = candidates.take()
    check_task(checkpoint, plan.profile)
    checkpoint.check_headers()  # before anything starts; workers read the bytes and check their hashes
    manifest, named = checkpoint.manifest, printable(str(checkpoint.folder))
    if manifest.step >= steps:
        raise UsageError(
            f"{named} already has {counted(manifest.step, 'step')}, but the training should end after "
            f"{steps}: give a larger number of steps (--steps)"
        )
    if seed is not None and seed != manifest.seed:
        raise UsageError(
            f"{named} was trained with seed {manifest.seed}, which determines all further random draws, by "
            f"training {manifest.owner}: omit seed {seed}"
        )
    return checkpoint
