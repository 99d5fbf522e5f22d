"""How `train` saves: where, how often, and what becomes of a training whose checkpoint cannot be written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipefit.checkpoints.folders import check_writable, whole
from pipefit.errors import UsageError
from pipefit.texts import printable
from pipefit.validation import check_types
from pipefit.validation import whole as whole_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Checkpoints go to `directory` after every `every` steps and after the last one; the newest `keep` stay.

    `on_failure` says whether a checkpoint that cannot be written stops the training, or is told in a warning.

    Raises:
        UsageError: a number that cannot be.
    """

    directory: str
    every: int = 100
    keep: int | None = None
    on_failure: Literal["warn", "stop"] = "warn"

    def __post_init__(self) -> None:
        check_types(self)
        whole_number("every", self.every, 1)
        if self.keep is not None:
            whole_number("keep", self.keep, 1)

    def after(self, step: int, last: int) -> bool:
        """Whether there is a checkpoint after so many steps, of `last` in all."""
        return step % self.every == 0 or step == last

    def check(self, first: int) -> None:
        """Check that `directory` can be written to, and has no checkpoint of a later step than the training's `first`.

        Raises:
            FileError: it cannot be written to.
            UsageError: it does, and nobody could say later which checkpoints are of which training.
        """
        check_writable(Path(self.directory))
        newest = whole(Path(self.directory))[-1:]
        if newest and newest[0][0] > first:
            raise UsageError(
                f"{printable(self.directory)} holds a checkpoint of step {newest[0][0]} already, and this training "
                f"begins at {first}: go on from there (--resume), or save to another folder"
            )

    def told(self, steps_done: int) -> str:
        """How far the training came, and what is left of it."""
        newest = whole(Path(self.directory))[-1:]
        if not newest:
            return f"steps done: {steps_done}, last saved: none"
        return f"steps done: {steps_done}, last saved: {newest[0][0]}; go on with --resume {printable(self.directory)}"
