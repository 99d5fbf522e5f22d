"""What of one microbatch is on its device, and what an action makes of it: the one model of a storage's life.

    residency, effect = apply(storages, residency, action)

A storage is there as long as somebody holds it: a layer that saved it, until its backward; the next forward, which
will read it; a message; a run that keeps its inputs to go forward again. An action adds and removes holders, and bytes
come and go with the first and the last of them. Which bytes are held does not depend on the microbatch, only on what
has been done with it: all microbatches of a stage pass through the same few residencies. So a residency remembers what
each action makes of it, and a ledger over a million actions looks nearly all of them up.

A forward that runs again makes other storages than the first one did, and both may be there at once: the output of a
recomputed run waits for its reader while the run goes forward again. So what is held are instances: the storage's
number, moved up by the number of storages for those that a second forward makes (`AGAIN`), and once more for copies
that a forward without a graph works on in place (`COPY`).

What each action holds and drops:

    LOAD, RECV_F          the inputs (and targets) come, for the first forward
    F[a:b]                every layer drops what only it read, and holds what it saves
    N[a:b]                the inputs are held to go forward again; nothing is saved
    R[a:b]                the forward again, from those inputs, with copies of the buffers; its outputs are dropped
    B[a:b]                every layer, from the last, drops what it saved; gradients of the values go and come
    WAIT_SEND_F, _B       outputs and gradients that were sent are dropped
    WAIT_OFFLOAD, RELOAD  bytes go and come, holders stay
"""

from __future__ import annotations

from typing import NamedTuple

from pipefit.cost.effects import Effect
from pipefit.cost.storages import StageStorages
from pipefit.places import Place

AGAIN, COPY = 1, 2  # times the number of storages: what moves the number of an instance up


class Piece(NamedTuple):
    """Positions `first` to `end - 1`, which went forward in one action, from inputs that lived in these instances."""

    first: int
    end: int
    keeps_inputs: bool  # an N: it must go forward again before its backward
    inputs: tuple[int, ...]
    again: bool = False  # it has gone forward again


class Away(NamedTuple):
    """Where a storage is that is not simply there."""

    state: str
    place: Place | None


class Residency:
    """One microbatch in one stage, at one moment. Compared by identity; `of` makes each only once for a stage.

    `held` are the instances that are there or away, with their holders as bits (`Holders`). `at` is the boundary that
    the forward has reached, with the values there; `back` the one that the backward has reached, None before it begins.
    `done` are the messages and loads so far.
    """

    __slots__ = ("at", "away", "back", "done", "held", "known", "pieces", "values")

    def __init__(
        self,
        *,
        held: dict[int, int],
        at: int,
        values: tuple[int, ...],
        pieces: tuple[Piece, ...],
        back: int | None,
        done: frozenset[str],
        away: dict[int, Away],
    ) -> None:
        self.held, self.at, self.values, self.pieces = held, at, values, pieces
        self.back, self.done, self.away = back, done, away
        self.known: dict[object, tuple[Residency, Effect | None]] = {}  # what actions make of it

    def key(self) -> object:
        """Equal for residencies that are the same."""
        away = frozenset(self.away.items())
        held = frozenset(self.held.items())
        return held, self.at, self.values, self.pieces, self.back, self.done, away

    def changed(self, **fields: object) -> Residency:
        """Another residency, like this one but for some fields."""
        names = ("held", "at", "values", "pieces", "back", "done", "away")
        return Residency(**{name: fields.get(name, getattr(self, name)) for name in names})  # type: ignore[arg-type]


def begin() -> Residency:
    """Nothing is there yet."""
    return Residency(held={}, at=0, values=(), pieces=(), back=None, done=frozenset(), away={})


class Holders:
    """Who may hold an instance, as bits: the layers that save it, by position, and what else is in flight."""

    def __init__(self, storages: StageStorages) -> None:
        self._count = storages.count
        self.value = 1 << self._count  # the next forward reads it
        self.sending = 1 << self._count + 1
        self.target = 1 << self._count + 2
        self.activations = ~(self.value | self.sending | self.target)  # saved, or kept to go forward again

    def saved(self, position: int) -> int:
        """The layer at a position saves it."""
        return 1 << position

    def kept(self, position: int) -> int:
        """The run that begins at a position keeps it, to go forward again or while it has done so."""
        return 1 << self._count + 3 + position
