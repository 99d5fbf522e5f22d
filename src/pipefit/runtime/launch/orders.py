"""Orders that all workers of a training share: first and last step, seed, start, and checkpoints."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal, get_args

from pipefit.checkpoints.folders import Candidates, Checkpoint
from pipefit.checkpoints.hold import Owner
from pipefit.checkpoints.plain import load_weights
from pipefit.errors import UsageError
from pipefit.runtime.checkpoint.restoring import check_task
from pipefit.runtime.checkpoint.saving import Saving
from pipefit.schema.plan import Plan
from pipefit.schema.validation import seed_number, whole
from pipefit.texts import counted, printable, shortened

Path = str | os.PathLike[str]
OnNan = Literal["warn", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Train steps `first` to `steps - 1`, with random draws by `seed`.

    `numbers` compares a traced model with its chain at the start, `share_device` runs all workers on one GPU,
    `cap` limits the memory that GPUs reserve to the plan's memory per device, and `on_nan` is the reaction to
    an infinite or nan loss. `resume` is the folder of the checkpoint after `first` steps, `weights` a
    safetensors file or sharded model from which the training starts. `owner` is the run that trains.
    """

    steps: int
    seed: int
    numbers: bool
    share_device: bool = False
    cap: bool = True
    on_nan: OnNan = "warn"
    first: int = 0
    resume: str | None = None
    weights: str | None = None
    saving: Saving | None = None
    owner: Owner | None = None

    def after(self, checkpoint: Checkpoint) -> Orders:
        """Return these orders, continued from a checkpoint."""
        return replace(self, first=checkpoint.manifest.step, resume=str(checkpoint.folder), weights=None)


def orders(
    plan: Plan,
    *,
    steps: int,
    seed: int | None,
    numbers: bool,
    share_device: bool,
    cap: bool,
    on_nan: OnNan,
    resume: Candidates | None,
    weights: Path | None,
    saving: Saving | None,
    owner: Owner,
) -> Orders:
    """Return the orders of a training by `plan`; default of `seed`: that of the checkpoint, or 0.

    `owner` is the run of a new training; one that continues from a checkpoint gets that checkpoint's
    training.

    Raises:
        FileError: the checkpoint is missing or of another task, or the weights are missing.
        UsageError: a number is out of range, or differs from that of the checkpoint.
    """
    whole("steps", steps, 1)
    if seed is not None:
        seed_number(seed)
    if on_nan not in get_args(OnNan):
        raise UsageError(f"on_nan is warn or stop, not {shortened(repr(on_nan))}")
    if resume is not None and weights is not None:
        raise UsageError(
            "a checkpoint has weights of its own: give either a checkpoint or weights to start from"
        )
    if weights is not None:
        load_weights(weights, ())  # reads no tensor, but reports a missing file before a worker starts
    checkpoint = None if resume is None else _resumed(resume, plan, steps, seed)
    seed = (seed or 0) if checkpoint is None else checkpoint.manifest.seed
    owner = owner if checkpoint is None else replace(owner, training=checkpoint.manifest.owner.training)
    ordered = Orders(
        steps=steps,
        seed=seed,
        numbers=numbers,
        share_device=share_device,
        cap=cap,
        on_nan=on_nan,
        weights=None if weights is None else os.fspath(weights),
        saving=saving,
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
            f"{named} has {counted(manifest.step, 'step')}, and {steps} are wanted in all: give more "
            "(--steps)"
        )
    if seed is not None and seed != manifest.seed:
        raise UsageError(
            f"{named} was trained with seed {manifest.seed}, by which all that follows is drawn, by training "
            f"{manifest.owner}: leave seed {seed} out"
        )
    return checkpoint
