"""The training: the batch, its microbatches, the schedule and the precision."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from pipefit.errors import UsageError
from pipefit.schema.validation import check_types
from pipefit.texts import counted, shortened

ENDLESS = ("pipedream", "pipedream-2bw")  # schedules that leave microbatches in flight between steps
MOST_SAMPLES = 1 << 32  # of a batch; its divisors are searched up to its square root
MOST_MICROBATCHES = 1 << 16  # a program lists the actions of each; this many takes seconds

Versions = Literal["weights", "everything"]
Precision = Literal[
    "float32", "bfloat16", "float16", "float64",
    "mixed-bfloat16", "mixed-float16", "master-bfloat16", "master-float16",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One optimizer step: `batch_size` samples in `microbatches` equal parts, under `schedule`.

    `schedule` is one of `lowering.SCHEDULES`, or an asynchronous one of `ENDLESS`; under `pipedream` every
    microbatch has a separate update. `precision` is the dtype of the layers; the mixed ones keep float32
    parameters and compute under `torch.autocast`; the master ones have half-precision parameters and
    gradients, and an optimizer that works on float32 copies. mixed-float16 and master-float16 scale the loss.
    `versions` says what a weight version holds under an asynchronous schedule: the weights alone, or room for
    gradients and optimizer state too, as PipeDream's own implementation keeps for each microbatch in flight.
    `clip_norm` limits the norm of all gradients together. Recomputation and offloading are not part of a
    training: they are decisions of a plan (`schema.decisions.Decision`).

    Raises:
        UsageError: a number that is not positive, a batch that does not divide into its microbatches, too
            many samples or
        microbatches, or a setting that synchronizes all stages under an asynchronous schedule.
    """

    batch_size: int
    microbatches: int
    schedule: str = "1f1b"
    precision: Precision = "float32"
    clip_norm: float | None = None
    versions: Versions = "weights"

    def __post_init__(self) -> None:
        check_types(self)
        if self.batch_size < 1 or self.microbatches < 1:
            raise UsageError(
                f"batch size and microbatches must be positive, not {self.batch_size} and {self.microbatches}"
            )
        if self.microbatches > MOST_MICROBATCHES:
            raise UsageError(
                f"{self.microbatches} microbatches exceed the limit of {MOST_MICROBATCHES} in a step: use "
                "larger microbatches"
            )
        if self.batch_size > MOST_SAMPLES:
            raise UsageError(
                f"a batch of {shortened(str(self.batch_size))} samples exceeds the limit of {MOST_SAMPLES} "
                "in a step: use a smaller batch"
            )
        if self.clip_norm is not None and not 0 < self.clip_norm < inf:
            raise UsageError(
                f"gradients can be clipped only to a finite, positive norm, not to {self.clip_norm}: omit "
                "it to disable clipping"
            )
        if self.endless:
            self._check_endless()
        elif self.versions != "weights":
            raise UsageError(
                f"schedule {self.schedule} does not keep weight versions, so it cannot hold "
                f"{self.versions}: use {' or '.join(ENDLESS)}"
            )
        if self.microbatches > self.batch_size:
            raise UsageError(
                f"a batch of {self.batch_size} samples is too small for {self.microbatches} microbatches: "
                "each needs at least one sample"
            )
        if self.batch_size % self.microbatches:
            raise UsageError(
                f"a batch of {self.batch_size} does not divide into {self.microbatches} equal microbatches: "
                f"use {self.batch_size - self.batch_size % self.microbatches} samples, or "
                f"{self.batch_size + -self.batch_size % self.microbatches}"
            )

    def _check_endless(self) -> None:
        """Check that stages have nothing to agree on before an update."""
        why = f"schedule {self.schedule} updates every stage separately and never waits for all stages"
        if self.clip_norm is not None:
            raise UsageError(
                f"gradients cannot be clipped to a common norm, because {why}: clip in the optimizer, stage "
                "by stage, or use schedule 1f1b"
            )
        if self.scales_loss:
            raise UsageError(
                f"precision {self.precision} scales the loss and skips an update on all stages after an "
                f"overflow, but {why}: use {self.precision.replace('float16', 'bfloat16')}, or schedule "
                "1f1b"
            )

    @property
    def endless(self) -> bool:
        """True if the schedule is asynchronous.

        Microbatches then stay in flight between steps, so stages update at different times.
        """
        return self.schedule in ENDLESS

    @property
    def dtype(self) -> str:
        """The dtype in which most operations compute."""
        return self.precision.removeprefix("mixed-").removeprefix("master-")

    @property
    def scales_loss(self) -> bool:
        """True if the loss is scaled, because gradients are float16."""
        return self.precision in ("mixed-float16", "master-float16")

    @property
    def agrees(self) -> bool:
        """True if the stages must agree before an update: on the norm of all gradients, or on an overflow."""
        return self.clip_norm is not None or self.scales_loss

    @property
    def microbatch_size(self) -> int:
        """Samples in one microbatch."""
        return self.batch_size // self.microbatches

    @property
    def accumulated_share(self) -> float:
        """The part of all microbatches whose gradients are added to those of earlier ones, from 0 to 1."""
        return 0.0 if self.schedule == "pipedream" else 1 - 1 / self.microbatches

    @property
    def phrases(self) -> tuple[str, ...]:
        """The settings that a stage's memory depends on, as phrases for the comparison of trainings."""
        return (
            self.schedule
            if self.versions == "weights"
            else f"{self.schedule} with versions of {self.versions}",
            f"{counted(self.microbatches, 'microbatch')} of {self.microbatch_size}",
            self.precision,
            "unclipped gradients" if self.clip_norm is None else "clipped gradients",
        )

    def differences(self, other: Training) -> list[str]:
        """Describe how this training differs from `other`, as phrases such as "gpipe, not 1f1b"."""
        return [
            f"{one}, not {two}" for one, two in zip(self.phrases, other.phrases, strict=True) if one != two
        ]
