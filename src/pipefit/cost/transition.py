"""An action applied to the residency of a microbatch: what the functions for the kinds of action work with.

Such a function changes `working`, and returns `left(...)`: the next residency, and the action's effect on the memory of
the device. It refuses an action that uses what does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from pipefit.actions import Action, Kind, Subject
from pipefit.cost.effects import Effect
from pipefit.cost.messages import Sent
from pipefit.cost.passes import Working
from pipefit.cost.residency import Done, Residency
from pipefit.cost.storages import StageStorages
from pipefit.errors import UsageError
from pipefit.texts import layers_text


def rows_sent(storages: StageStorages, sent: Sent) -> dict[Kind, int]:
    """The rows that all sends of a microbatch have together, in each direction."""
    return {
        Kind.SEND_FORWARD: sent.forward * storages.samples,
        Kind.SEND_BACKWARD: sent.backward * storages.samples,
    }


Answer = tuple[Residency, Effect | None]
Handler = Callable[["Transition"], Answer]


class Transition:
    """One action applied to one residency. `working` is the copy of the residency that the action changes."""

    def __init__(
        self,
        storages: StageStorages,
        residency: Residency,
        action: Action,
        moved: Sequence[Subject],
        is_first: bool | frozenset[int],
        sent: Sent,
    ) -> None:
        self.storages, self.residency, self.action = storages, residency, action
        self.moved, self.is_first, self.sent = moved, is_first, sent
        self.working = Working(storages, residency)
        self.holders = self.working.holders

    def bears(self, position: int) -> bool:
        """Whether a backward allocates the gradients of the layer at a position; the loss goes with the last one."""
        if isinstance(self.is_first, bool):
            return self.is_first
        return self.layer(position) in self.is_first

    def refuse(self, reason: str) -> NoReturn:
        """Refuse the action.

        Raises:
            UsageError: always; the action's text and the reason.
        """
        raise UsageError(f"{self.action} {reason}")

    def waits_for(self, kind: Kind) -> str:
        """The text of the WAIT of that kind for the action's stage and microbatch."""
        return f"{self.action.stage}WAIT_{kind.value}{self.action.microbatch}"

    def left(self, *, gradients: int = 0, boundary: int = 0, **fields: Any) -> Answer:
        """The next residency, with these fields changed, and the action's effect.

        `gradients` are the bytes by which the gradients of parameters have changed; `boundary` those of values.
        """
        found = self.working.after(**fields)
        return found, self.working.effect(found, gradients=gradients, boundary=boundary)

    def once(self) -> frozenset[Done]:
        """What has been done with the microbatch after this action, which must not have been done before."""
        own = self.action.kind, self.action.wait, self.action.part, self.action.place
        if own in self.residency.done or self.rows_before + self._own_rows > self._all_rows:
            self.refuse("happens twice")
        return self.residency.done | {own}

    @property
    def rows_before(self) -> int:
        """How many rows of the slice earlier actions of the same kind have had."""
        return self.residency.rows(self.action.kind, wait=self.action.wait, samples=self.storages.samples)

    @property
    def completes(self) -> bool:
        """Whether no row of the slice is left for other actions of the same kind."""
        return self.rows_before + self._own_rows == self._all_rows

    @property
    def _all_rows(self) -> int:
        """How many rows all actions of the same kind have together."""
        return rows_sent(self.storages, self.sent).get(self.action.kind, self.storages.samples)

    @property
    def _own_rows(self) -> int:
        part = self.action.part
        return self.storages.samples if part is None else part[1] - part[0]

    def has_joined(self, kind: Kind) -> bool:
        """Whether all receives or sends of that kind have been joined."""
        samples = self.storages.samples
        return self.residency.rows(kind, wait=True, samples=samples) == samples

    def layers(self) -> tuple[int, int]:
        """The positions that a compute action covers; with the model's last layer, the loss too."""
        storages, given = self.storages, self.action.layers
        if given is None:
            return 0, storages.count
        first, end = given
        if not storages.start <= first < end <= storages.stop:
            self.refuse(f"is outside its stage, which holds {layers_text(storages.start, storages.stop)}")
        return first - storages.start, storages.position(end)

    def layer(self, position: int) -> int:
        """The layer of the model at a position; the loss counts as the last."""
        return min(self.storages.start + position, self.storages.stop - 1)
