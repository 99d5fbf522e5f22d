"""How `train` saves: where, how often, and what becomes of a training whose checkpoint cannot be written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipefit.checkpoints.folders import check_writable, find, survey, whole
from pipefit.checkpoints.hold import Owner
from pipefit.errors import OutOfMemory, UsageError
from pipefit.lowering import whole_run
from pipefit.memory.arenas import arenas_of, snapshot_shortage
from pipefit.schema.plan import Plan
from pipefit.schema.validation import check_types
from pipefit.schema.validation import whole as whole_number
from pipefit.texts import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Checkpoints go to `directory` after every `every` steps and after the last one; the newest `keep` stay.

    `on_failure` says whether a checkpoint that cannot be written stops the training, or is told in a warning.
    `in_foreground` lets training stand still while one is written: it takes no memory of hosts then.

    Raises:
        UsageError: a number that cannot be.
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
        """Whether there is a checkpoint after so many steps, of `last` in all."""
        return step % self.every == 0 or step == last

    def check_owner(self, first: int, owner: Owner) -> None:
        """Check that `directory`, which `owner` holds, has no checkpoint of another training, nor of a later step than
        the training's `first`.

        Raises:
            FileError: its newest checkpoint cannot be read.
            UsageError: it has: nobody could say later which are of which training, and `keep` would remove both.
        """
        for entry in reversed(survey(Path(self.directory))):
            if entry.step > first and entry.obstacle:
                raise UsageError(
                    f"{printable(str(entry.folder))} is no whole checkpoint ({entry.obstacle}): remove it, or save to "
                    "another folder"
                )
        newest = self.newest
        if newest is None:
            return
        step, other = newest[0], find(newest[1]).manifest.owner
        if step > first:
            raise UsageError(
                f"{printable(self.directory)} holds a checkpoint of step {step} already, and this training begins at "
                f"{first}: go on from there (--resume), or save to another folder"
            )
        if other.training != owner.training:
            raise UsageError(
                f"{printable(self.directory)} holds checkpoints of another training, {other}: save to another folder"
            )

    def check(self, plan: Plan) -> None:
        """Check that `directory` can be written to, and that hosts have room for copies of what is saved, unless it is
        written `in_foreground`.

        Raises:
            OutOfMemory: a host has too little.
            FileError: it cannot be written to.
        """
        check_writable(Path(self.directory))
        missing = "" if self.in_foreground else snapshot_shortage(plan, arenas_of(plan, whole_run(plan)))
        if missing:
            raise OutOfMemory(
                f"{missing}: let training stand still while a checkpoint is written (--save-in-foreground), or move "
                "less there"
            )

    @property
    def newest(self) -> tuple[int, Path] | None:
        """Step and folder of the newest whole checkpoint; None where there is none."""
        return next(iter(whole(Path(self.directory))[-1:]), None)

    @property
    def way_on(self) -> str:
        """What to add where the training has ended and can go on; empty where nothing is saved."""
        return f"; go on with --resume {printable(self.directory)}" if self.newest else ""

    def reached(self, steps_done: int) -> str:
        """How far the training came, and what is left of it."""
        return f"steps done: {steps_done}, last saved: {self.newest[0] if self.newest else 'none'}"
