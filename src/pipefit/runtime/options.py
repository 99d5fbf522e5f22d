"""Options of a training, and the callbacks that it reports to.

The options are those of one worker's `Trainer`, those of `train`, how `train` saves, and the hooks of a
supervisor. A callback is called with a report after every step:

Trainer(task, plan, callbacks=[JsonLines("metrics.jsonl"), print])
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self, TypedDict, get_args

from pipefit.checkpoints import Candidates, Owner, check_writable, find, survey
from pipefit.checkpoints import whole as whole_checkpoints
from pipefit.errors import OutOfMemory, SaveFailed, UsageError
from pipefit.lowering import whole_run
from pipefit.memory import arenas_of, snapshot_shortage
from pipefit.schema.plan import Plan
from pipefit.schema.validation import LONGEST_SECONDS, check_names, check_types, number, seed_number, whole
from pipefit.texts import printable, shortened


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Settings for saving to `directory` after every `every` steps and after the last.

    The newest `keep` stay. `on_failure` says whether a checkpoint that cannot be written stops the training
    or raises a warning. With `in_foreground`, training stands still while a checkpoint is written, which
    takes no host memory for copies.

    Raises:
        UsageError: a number is out of range.
    """

    directory: str
    every: int = 100
    keep: int | None = None
    on_failure: Literal["warn", "stop"] = "warn"
    in_foreground: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        whole("every", self.every, 1)
        if self.keep is not None:
            whole("keep", self.keep, 1)

    def after(self, step: int, last: int) -> bool:
        """Return whether a checkpoint follows step `step` of `last`."""
        return step % self.every == 0 or step == last

    def check_owner(self, first: int, owner: Owner) -> None:
        """Check that `directory` has no checkpoint of another training, or of a step later than `first`.

        `owner` holds the directory.

        Raises:
            FileError: its newest checkpoint cannot be read.
            UsageError: it has one: later the checkpoints of both trainings would be mixed, and `keep` would
                remove both.
        """
        for entry in reversed(survey(Path(self.directory))):
            if entry.step > first and entry.obstacle:
                raise UsageError(
                    f"{printable(entry.folder)} is an incomplete checkpoint ({entry.obstacle}): remove "
                    "it, or save to another folder"
                )
        newest = self.newest
        if newest is None:
            return
        step, other = newest[0], find(newest[1]).manifest.owner
        if step > first:
            raise UsageError(
                f"{printable(self.directory)} already has a checkpoint of step {step}, but this training "
                f"starts at step {first}: resume from it (--resume), or save to another folder"
            )
        if other.training != owner.training:
            raise UsageError(
                f"{printable(self.directory)} has checkpoints of another training, {other}: save to another "
                "folder"
            )

    def check(self, plan: Plan) -> None:
        """Check that `directory` is writable, and that hosts have room for copies, unless `in_foreground`.

        Raises:
            OutOfMemory: a host has too little memory.
            FileError: the directory cannot be written to.
        """
        check_writable(Path(self.directory))
        missing = "" if self.in_foreground else snapshot_shortage(plan, arenas_of(plan, whole_run(plan)))
        if missing:
            raise OutOfMemory(
                f"{missing}: pause training while a checkpoint is written (--save-in-foreground), or "
                "offload less to the host"
            )

    @property
    def newest(self) -> tuple[int, Path] | None:
        """Step and folder of the newest whole checkpoint; None if there is none."""
        return next(iter(whole_checkpoints(Path(self.directory))[-1:]), None)

    @property
    def way_on(self) -> str:
        """Hint for the message of a training that has ended and can be resumed; empty if nothing is saved."""
        return f"; resume with --resume {printable(self.directory)}" if self.newest else ""

    def reached(self, steps_done: int) -> str:
        """Return a message with the steps done and the last saved step."""
        return f"steps done: {steps_done}, last saved: {self.newest[0] if self.newest else 'none'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One training step, as one worker saw it. The loss is the same on all workers.

    `peak_bytes` maps every device to its peak in the step, 0 if no meter counts. `gradient_norm` is None
    unless gradients are clipped or the loss is scaled.
    """

    step: int
    loss: float
    seconds: float
    samples_per_second: float
    learning_rate: float | None
    peak_bytes: dict[int, int]
    gradient_norm: float | None = None
    loss_scale: float | None = None
    skipped: bool = False


Callback = Callable[[StepReport], None]


class JsonLines:
    """Appends every report to a file as one line of JSON."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __call__(self, report: StepReport) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(report)) + "\n")


class TensorBoard:
    """Writes every report to TensorBoard; needs the `tensorboard` extra.

    Raises:
        UsageError: tensorboard is not installed.
    """

    def __init__(self, directory: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError("TensorBoard is not installed: pip install 'pipefit[tensorboard]'") from error
        self._writer = SummaryWriter(str(directory))

    def __call__(self, report: StepReport) -> None:
        for name in ("loss", "samples_per_second", "learning_rate", "gradient_norm", "loss_scale"):
            value = getattr(report, name)
            if value is not None:
                self._writer.add_scalar(f"train/{name}", value, report.step)
        for device, nbytes in report.peak_bytes.items():
            self._writer.add_scalar(f"memory/device{device}", nbytes, report.step)
        self._writer.flush()


PathName = str | os.PathLike[str]
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
    resume: PathName | Candidates | None
    weights: PathName | None
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
    resume: PathName | Candidates | None = None
    weights: PathName | None = None
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
    held: PathName | None = None
