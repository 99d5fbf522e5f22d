"""The lives of storages under an endless schedule, of all microbatches from those of a few.

Actions with one label (`pipefit.runtime.endless_folding`) allocate the same storages in the same order, and free those
of others. Which these are is told by where they were born: in an earlier action of the same microbatch; or in another
one, by what that was and by how many such have come since, as for an older version of the weights. So what an action
does is told without names, is the same in all microbatches, and can be repeated for those that were not run.

The first actions with a label may differ from later ones: what was there from the beginning is freed once. And where
some of the microbatches are treated in another way, what they leave to others is not the same in each. Of a label that
comes more often than it was run, the last turns that were run, of actions as many as come until all shares of the
microbatches have been taken, have to agree. Where they do not, or what is repeated cannot be, the lives are not
`consistent`. Costs about a microsecond for each birth and death.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from pipefit.runtime.endless_folding import Label, Labelled
from pipefit.runtime.lives import Lives
from pipefit.runtime.reserved import Event

_SETTING_UP = Labelled(Label(-1, (), None), None)


class _Where(NamedTuple):
    """Where a storage was born, as seen from the action in which it dies, and the number of its birth there.

    An action of another microbatch is told by what it is in itself (`Label.own`), and by which of these it is, counted
    from 1 for the latest; one of the same microbatch, for which `own` is None, by its number among the actions of that.
    """

    own: object
    action: int
    place: int


_Deed = tuple[int, _Where | int]  # a birth: its bytes, and the name of a workspace or 0; a death: 0, and of what
_Deeds = tuple[_Deed, ...]


class _Birth(NamedTuple):
    """An action in which a storage was born, its number among such ones and among those of its microbatch, and the
    number of the birth in it.
    """

    action: Labelled
    of_own: int
    of_flight: int
    place: int


class EndlessLives:
    """The lives of one device's storages in steps of an endless schedule, from those that were seen in fewer ones."""

    def __init__(self) -> None:
        self.consistent = True
        self.events: list[Event] = []
        self._born: dict[int, _Birth] = {}  # of what lives, by its name
        self._told = defaultdict[Label, list[_Deeds]](list)  # by label, of the actions that were run one by one
        self._counts = Counter[object]()  # of actions by what they are in themselves, and of those of every microbatch

    # ---------------------------------------------------------------- what was seen

    def learn(self, of_actions: Sequence[Labelled], before: Lives, seen: Sequence[Lives]) -> None:
        """Take note of the lives in the actions of a step that was executed, and `before` it."""
        if not self._told:
            self._learn(_SETTING_UP, before)
        elif before:
            self.consistent = False
        for one, lives in zip(of_actions, seen, strict=True):
            self._learn(one, lives)

    def _learn(self, one: Labelled, lives: Lives) -> None:
        births, deeds, own = 0, list[_Deed](), one.label.own
        self._counts.update((own, one.flight))
        for name, nbytes in lives:
            if not nbytes:
                deeds.append((0, self._where(self._born.pop(name), one)))
            elif name < 0:
                deeds.append((nbytes, name))
            else:
                self._born[name] = _Birth(one, self._counts[own] - 1, self._counts[one.flight] - 1, births)
                deeds.append((nbytes, 0))
                births += 1
        self._told[one.label].append(tuple(deeds))

    def _where(self, birth: _Birth, now: Labelled) -> _Where:
        if birth.action.flight == now.flight is not None:
            return _Where(None, birth.of_flight, birth.place)
        own = birth.action.label.own
        return _Where(own, self._counts[own] - birth.of_own, birth.place)

    # ---------------------------------------------------------------- what follows

    def unfold(self, steps: Iterable[Sequence[Labelled]], turns: Mapping[Label, int]) -> None:
        """Tell the events of these steps, up to one that cannot be. `turns` are those of their labels."""
        first = defaultdict[object, list[int]](list)  # the name of every action's first birth, by the same as counts
        seen, living, born = Counter[Label](), set[int](), 0
        for one in chain([_SETTING_UP], *steps):
            deeds = self._deeds(one.label, seen[one.label], turns.get(one.label, 1))
            seen[one.label] += 1
            for kept in (one.label.own, one.flight):
                first[kept].append(born)
            for nbytes, what in deeds or ():
                if isinstance(what, _Where):
                    name = _name(what, first[one.flight if what.own is None else what.own])
                    deeds = deeds if name in living else None
                    living.discard(name)
                elif what:
                    name = what
                else:
                    name, born = born, born + 1
                    living.add(name)
                self.events.append((name, nbytes))
            if deeds is None:
                self.consistent = False
                return

    def _deeds(self, label: Label, number: int, turn: int) -> _Deeds | None:
        """What an action of this number among those with its label does; None where nobody knows."""
        known = self._told[label]
        if number < len(known):
            return known[number]
        agree = len(known) >= 2 * turn and known[-turn:] == known[-2 * turn : -turn]
        return known[len(known) - turn + (number - len(known)) % turn] if agree else None


def _name(what: _Where, first: Sequence[int]) -> int:
    """The name of a storage that was born in one of some actions, of which each one's `first` birth is named; -1 where
    they are fewer.
    """
    number = what.action if what.own is None else len(first) - what.action
    return first[number] + what.place if 0 <= number < len(first) else -1
