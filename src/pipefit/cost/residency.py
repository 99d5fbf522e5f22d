"""A residency: which storages of one microbatch are in its stage's memory at a moment, and what holds each of them.

    residency, effect = flights.apply(residency, action)

This is the one model of when a storage is allocated and freed. A storage exists as long as something holds it: a layer
that saved it for its backward; the forward that will read it next; a message that sends it; a run of layers that keeps
its inputs to run again. Actions add and remove holders: a storage is allocated with its first holder and freed with its
last. What is held does not depend on the microbatch's number, but only on what has been done with it, so all
microbatches of a stage pass through the same few residencies. A residency therefore remembers what each action makes of
it, and a ledger looks up nearly all of a million actions.

A second forward makes new storages, and those of the first may still exist: the output of a recomputed run may wait for
the next layer while the run is recomputed. What is held are therefore instances of storages. In a stage of n storages,
instance s is storage s of the first forward, and n + s that of the second.

What each action holds and drops:

    LOAD, RECV_F          holds the inputs (and targets) for the first forward; of several receives, the first does
    F[a:b]                every layer holds what it saves, and drops what only it read
    N[a:b]                holds the inputs and copies of buffers that feed back, to run again, and saves nothing
    R[a:b]                runs forward from those, and from copies of the other buffers; saves, and drops its outputs
    B[a:b]                every layer, from the last to the first, drops what it saved; then the copies go
    WAIT_SEND_F, _B       drops the outputs or gradients that were sent; of several, the last does
    WAIT_OFFLOAD, RELOAD  frees or allocates bytes; the holders stay
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from pipefit.actions import Kind
from pipefit.cost.effects import Effect
from pipefit.cost.storages import StageStorages
from pipefit.places import Place
from pipefit.rows import Rows

# Of an action: its kind, whether it is a WAIT, its rows, where None is all of them, and the device that it names
Done = tuple[Kind, bool, Rows | None, Place | None]

_PART = 8  # all that is held is kept where at least one of so many instances has changed since


class Piece(NamedTuple):
    """Positions `first` to `end - 1`, whose forward was one action, and the instances of its inputs."""

    first: int
    end: int
    keeps_inputs: bool  # its forward was an N: it must be recomputed before its backward
    inputs: tuple[int, ...]
    again: bool = False  # it has been recomputed


class Whereabouts(StrEnum):
    """Where a storage is between its forward and its backward, in the words of errors."""

    HERE = "on the device"
    LEAVING = "on its way out"
    AWAY = "away"
    RETURNING = "on its way back"


class Away(NamedTuple):
    """A storage that is moved: where it is, and the other place."""

    state: Whereabouts
    place: Place | None


class Held:
    """The instances that exist, on the device or away, with their holders (`Holders`): what was held before an action,
    and what the action has changed.

    Of many only the changes are kept, so that a stage whose thousand runs of layers are actions of their own takes
    memory for what these do, and not for all that there is after each.
    """

    __slots__ = ("_before", "_changes", "_count", "_since", "_whole")

    def __init__(self) -> None:
        self._before: Held | None = None
        self._changes: dict[int, int] = {}  # 0 where nothing holds an instance any more
        self._since = 0  # changes since all was kept
        self._whole: dict[int, int] | None = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def after(self, now: dict[int, int], touched: Iterable[int]) -> Held:
        """What is held `now`, which differs in no other instances than those that were `touched`."""
        found, changes = Held(), {instance: now.get(instance, 0) for instance in touched}
        found._count, found._since, found._whole = len(now), self._since + len(changes), None
        if found._since * _PART >= found._count:
            found._since, found._whole = 0, now
        else:
            found._before, found._changes = self, changes
        return found

    def mapping(self) -> dict[int, int]:
        """All instances with their holders, as a dictionary that may be changed."""
        later, one = list[dict[int, int]](), self
        while one._whole is None:
            assert one._before is not None
            later.append(one._changes)
            one = one._before
        found = dict(one._whole)
        for changes in reversed(later):
            for instance, holders in changes.items():
                if holders:
                    found[instance] = holders
                else:
                    found.pop(instance, None)
        return found


class Residency:
    """One microbatch in one stage at one moment. Compared by identity: `Flights` makes each only once for a stage.

    `held` has the instances that exist. `at` is the boundary that the forward has reached, and `values` the instances
    there; `back` is the boundary that the backward has reached, None before it begins. `done` has the loads, sends,
    receives and their joins so far. `away` has the instances that are moved, until they are back.
    """

    __slots__ = ("at", "away", "back", "categories", "done", "held", "known", "pieces", "values")

    def __init__(
        self,
        *,
        held: Held,
        at: int,
        values: tuple[int, ...],
        pieces: tuple[Piece, ...],
        back: int | None,
        done: frozenset[Done],
        away: dict[int, Away],
        categories: tuple[int, int],
    ) -> None:
        self.held, self.at, self.values, self.pieces = held, at, values, pieces
        self.back, self.done, self.away = back, done, away
        self.categories = categories  # bytes of the activations and of the boundary buffers on the device
        self.known: dict[object, tuple[Residency, Effect | None]] = {}  # the answers for actions

    def key(self) -> object:
        """Equal for residencies with equal fields. What is held follows from the others: from what was done."""
        return self.at, self.values, self.pieces, self.back, self.done, frozenset(self.away.items())

    def rows(self, kind: Kind, *, wait: bool, samples: int) -> int:
        """How many of the slice's `samples` actions of this kind, or their WAITs, have had so far."""
        parts = [part for done, waited, part, _ in self.done if done is kind and waited is wait]
        return sum(samples if part is None else part[1] - part[0] for part in parts)

    def changed(self, **fields: object) -> Residency:
        """Another residency, with some fields changed."""
        names = ("held", "at", "values", "pieces", "back", "done", "away", "categories")
        return Residency(**{name: fields.get(name, getattr(self, name)) for name in names})  # type: ignore[arg-type]


def begin() -> Residency:
    """The residency of a microbatch that has not reached the stage yet."""
    return Residency(held=Held(), at=0, values=(), pieces=(), back=None, done=frozenset(), away={}, categories=(0, 0))


class Holders:
    """All that may hold an instance, each as one bit of a whole number."""

    def __init__(self, storages: StageStorages) -> None:
        self._count = storages.count
        self.value = 1 << self._count  # the forward that reads it next
        self.sending = 1 << self._count + 1
        self.target = 1 << self._count + 2
        self.activations = ~(self.value | self.sending | self.target)  # saved, or kept to be recomputed from

    def saved(self, position: int) -> int:
        """The layer at a position, which saved it."""
        return 1 << position

    def kept(self, position: int) -> int:
        """The run that begins at a position, which keeps its inputs until its backward has ended."""
        return 1 << self._count + 3 + position
