"""Settings of how `train` saves: folder, interval, and the reaction to a checkpoint that cannot be
written.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipefit.checkpoints import Owner, check_writable, find, survey, whole
from pipefit.errors import OutOfMemory, UsageError
from pipefit.lowering import whole_run
from pipefit.memory import arenas_of, snapshot_shortage
from pipefit.schema.plan import Plan
from pipefit.schema.validation import check_types
from pipefit.schema.validation import whole as whole_number
from pipefit.texts import printable


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
        whole_number("every", self.every, 1)
        if self.keep is not None:
            whole_number("keep", self.keep, 1)

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
                    f"{printable(str(entry.folder))} is an incomplete checkpoint ({entry.obstacle}): remove "
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
        return next(iter(whole(Path(self.directory))[-1:]), None)

    @property
    def way_on(self) -> str:
        """Hint for the message of a training that has ended and can be resumed; empty if nothing is saved."""
        return f"; resume with --resume {printable(self.directory)}" if self.newest else ""

    def reached(self, steps_done: int) -> str:
        """Return a message with the steps done and the last saved step."""
        return f"steps done: {steps_done}, last saved: {self.newest[0] if self.newest else 'none'}"
