"""Events on all layers of a device, from those on the layers that a dry run executes.

An omitted execution of repeated layers has the events of the execution that stands for it, with the names of
its own storages and of those of its neighbours. An action within one execution has an own list of events; of
an action on a whole repeat, the events that happen in the stand-in are repeated for every omitted execution,
in the direction in which the action passes through the repeat. The events of the stand-in must be those of
the execution before it. Costs a few microseconds per event of all layers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from pipefit.runtime.dry_run.layers import KEPT, Shortened
from pipefit.runtime.dry_run.lives import Execution, LifeEvent, OwningMeter, StorageName
from pipefit.runtime.dry_run.microbatches import numbered
from pipefit.schema.actions import Action

_LAST, _STAND_IN, _TWIN = KEPT - 1, KEPT - 2, KEPT - 3


class _Repeated(NamedTuple):
    """The executions of a repeat among all layers: the last number, the first layer, and layers of each."""

    last: int
    start: int
    period: int


class AllLayers:
    """The events of a run of all layers, from a run of fewer.

    `alike` turns False if the executions of repeated layers differ.
    """

    def __init__(self, meter: OwningMeter, short: Shortened) -> None:
        self.alike = True
        self._meter, self._stand = meter, short.stand
        self._repeats = [_Repeated(repeat.count - 1, repeat.start, repeat.period) for repeat in short.repeats]
        self._kept = short.kept
        self._executions = {
            layer: Execution(copy.repeat, copy.number)
            for layer, copy in enumerate(short.copies)
            if copy is not None
        }

    def settled(self) -> list[LifeEvent]:
        """Return the storages present before the first step as births, on all layers."""
        return list(self._whole(self._meter.settled()))

    def events(self, actions: Sequence[Action]) -> list[list[LifeEvent]]:
        """Return the events before a step, and in each of its `actions` on all layers."""
        self._meter.changes()
        before, *seen = self._meter.events()
        left, every = iter(seen), list(numbered(actions))
        known = {key: next(left) for key in every if self._stand.instead(key[0]) is None}
        result = [list(self._whole(before))]
        for action, occurrence in every:
            instead, twin = self._stand.instead(action), self._stand.twin(action)
            number, own = self._stand.execution(action), known[instead or action, occurrence]
            if twin is not None:
                other = known[twin, occurrence]
                self.alike &= self._seen_from(self._of(own), own) == self._seen_from(self._of(other), other)
            if number is None:
                result.append(list(self._whole(own)))
            else:
                result.append([self._moved(event, self._of(own), number) for event in own])
        return result

    def layer_of(self, name: Hashable) -> int | None:
        """Return the layer of a storage that has been state of one."""
        at = name.maker if isinstance(name, StorageName) else None
        if at is None:
            layer = self._meter.layer_of.get(name)
            return None if layer is None else self._kept[layer]
        assert isinstance(name, StorageName)
        last = self._repeats[at.repeat].last
        executed = at._replace(number=_LAST if at.number == last else min(at.number, _STAND_IN))
        layer = self._meter.layer_of.get(name._replace(maker=executed))
        return None if layer is None else self._layer(layer, executed, at.number)

    # ---------------------------------------------------------------- one action

    def _whole(self, events: Sequence[LifeEvent]) -> Iterator[LifeEvent]:
        """Yield the events of an executed action on all layers."""
        runs = [(at, list(run)) for at, run in groupby(events, key=lambda event: event.at)]
        if self._repeats:
            self._compare(runs)
        for place, (at, run) in enumerate(runs):
            numbers: Sequence[int] = [0 if at is None else self._number(at)]
            if at is not None and at.number == _STAND_IN:
                numbers = range(_STAND_IN, self._repeats[at.repeat].last)
                if not self._rises(runs, place):
                    numbers = numbers[::-1]
            for number in numbers:
                for event in run:
                    yield self._moved(event, at, number)

    def _compare(self, runs: Sequence[tuple[Execution | None, list[LifeEvent]]]) -> None:
        """Compare the events of every stand-in with those of its twin."""
        for repeat in range(len(self._repeats)):
            own, other = (
                [self._seen_from(at, run) for at, run in runs if at == Execution(repeat, number)]
                for number in (_STAND_IN, _TWIN)
            )
            self.alike &= own == other

    def _rises(self, runs: Sequence[tuple[Execution | None, object]], place: int) -> bool:
        """Return whether an action passes through the repeat of a run from the first execution to the last."""
        at, _ = runs[place]
        before = next((execution for execution, _ in reversed(runs[:place]) if execution is not None), None)
        return before is None or at is None or before == Execution(at.repeat, _TWIN)

    def _of(self, events: Sequence[LifeEvent]) -> Execution | None:
        """Return the execution of an action within one."""
        return next((event.at for event in events if event.at is not None), None)

    # ---------------------------------------------------------------- names

    def _number(self, execution: Execution) -> int:
        """Return the number of an executed execution among all."""
        number = execution.number
        return self._repeats[execution.repeat].last if number == _LAST else number

    def _moved(self, event: LifeEvent, at: Execution | None, number: int) -> LifeEvent:
        """Return an event that happens in execution `at`, as it happens in execution `number` of all."""
        if not self._repeats:
            return event
        what, about, count = event.name
        if isinstance(about, StorageName):
            about = self._name(about, at, number)
        lives = tuple(
            ((self._name(life[0], at, number), life[1]), nbytes)
            if isinstance(life, tuple)
            else (life, nbytes)
            for life, nbytes in event.lives
        )
        layer = event.layer
        if layer is not None:
            layer = self._layer(layer, at, number)
        own = event.at and event.at._replace(number=self._renumbered(event.at, at, number))
        return LifeEvent((what, about, count), layer, event.deltas, event.taken, lives, own)

    def _name(self, name: StorageName, at: Execution | None, number: int) -> StorageName:
        maker = name.maker
        if maker is None:
            return name
        return name._replace(maker=maker._replace(number=self._renumbered(maker, at, number)))

    def _layer(self, layer: int, at: Execution | None, number: int) -> int:
        """Return the number of an executed layer among all, as seen from execution `number` of all."""
        execution = self._executions.get(layer)
        if execution is None:
            return self._kept[layer]
        _, start, period = self._repeats[execution.repeat]
        place = (self._kept[layer] - start) % period
        return start + self._renumbered(execution, at, number) * period + place

    def _renumbered(self, execution: Execution, at: Execution | None, number: int) -> int:
        """Return the number among all of an execution, for an event in `at` as it happens in `number`.

        Only neighbours are seen alike from all executions of a repeat, and only its ends from elsewhere.
        """
        if at is None or execution.repeat != at.repeat:
            self.alike &= at is None or execution.number in (0, _LAST)
            return self._number(execution)
        distance = execution.number - at.number
        self.alike &= abs(distance) <= 1
        return number + distance

    def _seen_from(self, at: Execution | None, events: Sequence[LifeEvent]) -> list[Hashable]:
        """Return events with names and layers relative to an execution."""

        def seen(execution: Execution | None) -> Hashable:
            if at is None or execution is None or execution.repeat != at.repeat:
                return execution
            return execution.number - at.number

        def named(name: Hashable) -> Hashable:
            return (seen(name.maker), name.rest) if isinstance(name, StorageName) else name

        def placed(layer: int | None) -> Hashable:
            execution = None if layer is None else self._executions.get(layer)
            if layer is None or execution is None:
                return layer
            _, start, period = self._repeats[execution.repeat]
            return seen(execution), (self._kept[layer] - start) % period

        return [
            (
                (what, named(about), count),
                placed(event.layer),
                event.deltas,
                event.taken,
                [
                    (named(life[0]), *life[1:], n) if isinstance(life, tuple) else (life, n)
                    for life, n in event.lives
                ],
            )
            for event in events
            for what, about, count in (event.name,)
        ]
