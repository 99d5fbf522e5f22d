"""The dry runs of all replicas that divide a stage's state, put together from two of them.

What happens on a replica depends on the layers that it owns, and of each of them by itself: its parameters, gradients
and optimizer state are there or not. So one run that owns every layer and one that owns none have seen all of it. They
tell the same story but for the events about layers' state that only one of them has, or both in other ways; of these, a
replica has those of the first run for its own layers, and those of the second for the others. So an action does the
same on all replicas that own the same of the layers whose state it touches.

Where the stories differ in what is no layer's state, or tell it in another order, they are not `alike`, and replicas
are run one by one. Costs two runs, and microseconds for each action and replica.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from pipefit.runtime.folding import Bytes, Change
from pipefit.runtime.lives import Lives
from pipefit.runtime.owning_meter import Event, OwningMeter
from pipefit.trace import CATEGORIES, Category

_WORKSPACE = CATEGORIES.index(Category.WORKSPACE)


class _Choice(NamedTuple):
    """An event of a layer's owner, or of all others; of everyone where `layer` is None."""

    layer: int | None
    owned: bool
    event: Event


class Effect(NamedTuple):
    """What an action does on some replicas."""

    change: Change
    lives: Lives


class _Merged:
    """An action on any replica: all its events, and whose they are. `names` are those of lives, as numbers."""

    def __init__(self, choices: Sequence[_Choice], names: dict[Hashable, int]) -> None:
        self._choices, self._names = choices, names
        self._touched = frozenset(one.layer for one in choices if one.layer is not None)
        self._known: dict[frozenset[int], Effect] = {}

    def on(self, owned: frozenset[int]) -> Effect:
        """What it does on a replica that owns these layers."""
        key = owned & self._touched
        if key not in self._known:
            chosen = [one.event for one in self._choices if one.layer is None or (one.layer in key) == one.owned]
            self._known[key] = Effect(_change(chosen), self._lives(chosen))
        return self._known[key]

    def _lives(self, events: Iterable[Event]) -> Lives:
        return tuple((self._number(name), nbytes) for event in events for name, nbytes in event.lives)

    def _number(self, name: Hashable) -> int:
        """A workspace has a number; storages are numbered as they come."""
        return name if isinstance(name, int) else self._names.setdefault(name, len(self._names))


class Ownership:
    """What two runs of a stage have told, step after step, of which the first owns all layers and the second none."""

    def __init__(self, all_owned: OwningMeter, none_owned: OwningMeter) -> None:
        self.alike = True
        self._runs = all_owned, none_owned
        self._names: dict[Hashable, int] = {}
        self._step: list[_Merged] = []
        self._rest = all_owned.settled(), none_owned.settled()

    def rest(self, owned: frozenset[int]) -> Bytes:
        """The bytes of every category before the first step, on a replica that owns these layers."""
        return self._merged(*self._rest).on(owned).change.after

    def learn(self) -> None:
        """Take what both tell of the step that they have ended."""
        for run in self._runs:
            run.changes()
        told = [run.events() for run in self._runs]
        if not self._step:
            for events, rest in zip(told, self._rest, strict=True):
                events[0] = [*rest, *events[0]]
        self._step = [self._merged(*both) for both in zip(*told, strict=True)]

    def effects(self, owned: frozenset[int]) -> list[Effect]:
        """What was before the step's first action, and what every action of it did, on such a replica."""
        return [action.on(owned) for action in self._step]

    def _merged(self, ones: Sequence[Event], others: Sequence[Event]) -> _Merged:
        """An action in both runs."""
        return _Merged(self._choices(ones, others), self._names)

    def _choices(self, ones: Sequence[Event], others: Sequence[Event]) -> list[_Choice]:
        """The events of an action in both runs, in their common order."""
        of_one, of_other = ({event.name for event in events} for events in (ones, others))
        found, left, right = list[_Choice](), list(reversed(ones)), list(reversed(others))
        while left or right:
            if left and left[-1].name not in of_other:
                found.append(self._of_some(left.pop(), owned=True))
            elif right and right[-1].name not in of_one:
                found.append(self._of_some(right.pop(), owned=False))
            elif left[-1].name != right[-1].name:  # it comes at another time where a layer is owned
                name = next((e.name for e in (left[-1], right[-1]) if self._layer(e) is not None), None)
                if name is None:
                    self.alike = False
                    return found
                of_one.remove(name)
                of_other.remove(name)
            else:
                one, other = left.pop(), right.pop()
                if one[2:] == other[2:]:
                    found.append(_Choice(None, True, one))
                else:
                    self.alike &= self._layer(one) == self._layer(other)
                    found += self._of_some(one, owned=True), self._of_some(other, owned=False)
        return found

    def _of_some(self, event: Event, *, owned: bool) -> _Choice:
        """An event that some replicas alone have; it has to be about the state of one layer."""
        layer = self._layer(event)
        self.alike &= layer is not None
        return _Choice(layer, owned, event)

    def _layer(self, event: Event) -> int | None:
        """The layer that an event is about, as far as one of the runs knows."""
        _, about, _ = event.name
        found = {event.layer, *(run.layer_of.get(about) for run in self._runs)} - {None}
        return found.pop() if len(found) == 1 else None


def _change(events: Iterable[Event]) -> Change:
    """What these events do to the bytes of every category, at their peak and in the end."""
    level = [0] * len(CATEGORIES)
    peak, highest, total = tuple(level), 0, 0
    for event in events:
        for position, nbytes in event.deltas:
            level[position] += nbytes
            total += nbytes
        if total + event.taken > highest:
            highest = total + event.taken
            taken = [event.taken * (position == _WORKSPACE) for position in range(len(level))]
            peak = tuple(a + b for a, b in zip(level, taken, strict=True))
    return Change(peak, tuple(level))
