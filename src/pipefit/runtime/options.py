"""Options of a training: those of one worker's `Trainer`, those of `train`, and the hooks of a supervisor."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self, TypedDict, get_args

from pipefit.checkpoints import Candidates, Owner
from pipefit.errors import SaveFailed, UsageError
from pipefit.runtime.checkpoint.saving import Saving
from pipefit.schema.validation import LONGEST_SECONDS, check_names, number, seed_number, whole
from pipefit.texts import shortened

Path = str | os.PathLike[str]
OnNan = Literal["warn", "stop"]


class TrainerArguments(TypedDict, total=False):
    """Keyword arguments of `Trainer`: the fields of `TrainerOptions`, for type checkers."""

    seed: int
    timeout_seconds: float
    accumulate: int
    numbers: bool
    share_device: bool
    cap: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """Options of a `Trainer`.

    Args:
        seed: seed of the factory's initialisation and of all random layers.
        timeout_seconds: how long a worker waits for another before it gives up; on GPUs NCCL's ten minutes
            apply.
        accumulate: number of batches whose gradients are added up before an update.
        numbers: compare a traced model with its chain at the start, two steps of the plan with plain
            training, and tensor-parallel layers with whole layers, if the host has spare memory and the
            comparison takes only seconds (`runtime.checks.comparison`). With several workers, the first
            worker compares, and the first one with tensor shards; there `not_compared` gives the reason for a
            skipped comparison.
        share_device: run all devices of the plan on this machine's first GPU, which then holds the memory of
            all.
        cap: limit the memory that GPUs reserve to the plan's memory per device; False leaves all of the GPU's
            memory.

    Raises:
        UsageError: a number is out of range.
    """

    seed: int = 0
    timeout_seconds: float = 60.0
    accumulate: int = 1
    numbers: bool = True
    share_device: bool = False
    cap: bool = True

    def __post_init__(self) -> None:
        seed_number(self.seed)
        number("timeout_seconds", self.timeout_seconds, below=LONGEST_SECONDS)
        whole("accumulate", self.accumulate, 1)

    @classmethod
    def named(cls, given: TrainerArguments) -> Self:
        """Return the options with these keyword arguments of `Trainer`.

        Raises:
            UsageError: an argument is unknown or out of range.
        """
        check_names("Trainer", given, cls, {})
        return cls(**given)


class TrainArguments(TypedDict, total=False):
    """Keyword arguments of `train`: the fields of `TrainOptions`, for type checkers."""

    seed: int | None
    timeout_seconds: float
    start_seconds: float
    numbers: bool
    share_device: bool
    cap: bool
    on_nan: OnNan
    saving: Saving | None
    resume: Path | Candidates | None
    weights: Path | None
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of `train`.

    Args:
        seed: seed of weights, data and dropout; default: that of the checkpoint, or 0.
        timeout_seconds: limit for a worker to execute one action, or to make a batch. Waiting for others does
            not count. A GPU's work is queued, so there it is the limit for a whole step.
        start_seconds: limit for a worker to start, and to build its layers.
        numbers: worker 0 compares a traced model with its chain, and the plan with plain training, before
            training, as a `Trainer` does.
        share_device: all workers compute on this machine's first GPU, with messages through the host.
        cap: limit the memory that GPUs reserve to the plan's memory per device; False leaves all of the GPU's
            memory.
        on_nan: reaction to an infinite or nan loss: a warning (`warn`), or the end of the training (`stop`).
        saving: folder and interval of checkpoints; None for none. The folder belongs to this training while
            it runs.
        resume: a checkpoint, or a folder whose newest whole checkpoint is meant, to continue from. In a
            folder, damaged checkpoints are skipped with a warning.
        weights: a safetensors file, or a folder with a sharded model, with initial parameters and buffers.
        restarts: maximum number of restarts from the last checkpoint after a worker has failed. Each restart
            raises a warning. The trace is that of the last start.

    Raises:
        UsageError: a number is out of range, or options exclude each other.
    """

    seed: int | None = None
    timeout_seconds: float = 60.0
    start_seconds: float = 120.0
    numbers: bool = True
    share_device: bool = False
    cap: bool = True
    on_nan: OnNan = "warn"
    saving: Saving | None = None
    resume: Path | Candidates | None = None
    weights: Path | None = None
    restarts: int = 0

    def __post_init__(self) -> None:
        for what in ("timeout_seconds", "start_seconds"):
            number(what, getattr(self, what), below=LONGEST_SECONDS)
        if self.on_nan not in get_args(OnNan):
            raise UsageError(f"on_nan is warn or stop, not {shortened(repr(self.on_nan))}")
        if self.seed is not None:
            seed_number(self.seed)
        if whole("restarts", self.restarts, 0) and self.saving is None:
            raise UsageError(
                "a restart goes on from a checkpoint: say where they are saved (saving; --save DIR)"
            )
        if self.resume is not None and self.weights is not None:
            raise UsageError(
                "a checkpoint has weights of its own: give either a checkpoint or weights to start from"
            )

    @classmethod
    def named(cls, given: TrainArguments) -> Self:
        """Return the options with these keyword arguments of `train`.

        Raises:
            UsageError: an argument is unknown or out of range; or options exclude each
                other.
        """
        check_names("train", given, cls, {})
        return cls(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """Hooks through which a supervisor follows a worker, and its claim on the checkpoints.

    `on_action` is called with the number of each action as it begins, and with their count at the end;
    `on_save` repeatedly during a save, and `on_weights` while the first worker sends weights or a checkpoint
    is loaded, with whether this worker waits for others. `on_failed_save` is called at the end of the next
    step with the error of a checkpoint that was not written; default: warn. `owner` is the run that owns the
    checkpoints, by default that of a new training, and `held` their folder, if another process holds it for
    this run.
    """

    on_action: Callable[[int], None] | None = None
    on_save: Callable[[bool], None] = lambda waits: None
    on_weights: Callable[[bool], None] = lambda waits: None
    on_failed_save: Callable[[SaveFailed], None] | None = None
    owner: Owner | None = None
    held: Path | None = None
