"""Devices that a dry run executes, and the accounts of all devices that follow from them.

Equal devices have one account, measured on the first of them. Of more than two kin that own different layers,
two are run: one as if it owned every layer, and one as if it owned none. The accounts of all kin are composed
from these two.

The events of all layers follow from those of the layers that are executed. An omitted execution of repeated
layers has the events of the execution that stands for it, with the names of its own storages and of those of
its neighbours. An action within one execution has an own list of events; of an action on a whole repeat, the
events that happen in the stand-in are repeated for every omitted execution, in the direction in which the
action passes through the repeat. The events of the stand-in must be those of the execution before it. This
costs a few microseconds per event of all layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple, Protocol

from pipefit.memory import Arena, Excerpt, ReplicaShare, StageStorages, lent_bytes, owners, share_of
from pipefit.runtime.dry_run.layers import KEPT, RepeatedMeter, Shortened
from pipefit.runtime.dry_run.lives import Execution, LifeEvent, LivesMeter, OwningMeter, StorageName
from pipefit.runtime.dry_run.microbatches import ALL_LAYERS, Bytes, BytesChange, StandIn, numbered, plus
from pipefit.runtime.dry_run.reserved import overheads
from pipefit.runtime.engine.assembly import tells_norms
from pipefit.schema.actions import Action
from pipefit.schema.devices import Member
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program, UncheckedProgram
from pipefit.schema.trace import CATEGORIES, Category, MemorySample

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
        """Return whether an action passes through a run's repeat from the first execution to the last."""
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
        own = event.at and Execution(event.at.repeat, self._renumbered(event.at, at, number))
        return LifeEvent((what, about, count), layer, event.deltas, event.taken, lives, own)

    def _name(self, name: StorageName, at: Execution | None, number: int) -> StorageName:
        maker = name.maker
        if maker is None:
            return name
        return StorageName(Execution(maker.repeat, self._renumbered(maker, at, number)), name.rest)

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


# ---- Dry runs of all replicas that shard a stage's state, composed from two
# Memory on a replica depends on the layers that it owns, and on each of them separately: parameters,
# gradients and optimizer state exist or not. So one run that owns every layer and one that owns none contain
# all events. They have the same events except those about layers' state; of these, a replica has those of the
# first run for its own layers, and those of the second for the others. So an action has equal effects on all
# replicas that own the same of the layers whose state it touches.
#
# If the runs differ in events that are not about a layer's state, or in the order of events, replicas are run
# one by one. Costs two runs, and microseconds for each action and replica.

_WORKSPACE = CATEGORIES.index(Category.WORKSPACE)


class _Choice(NamedTuple):
    """An event of a layer's owner, or of all other replicas; of every replica if `layer` is None."""

    layer: int | None
    owned: bool
    event: LifeEvent


class ReplicaEffect(NamedTuple):
    """The effect of an action, or of a part of it, on some replicas."""

    change: BytesChange
    lives: tuple[Excerpt, ...]


class _Merged:
    """An action, or a part of it, on any replica: all its events, with their replicas.

    `parts` are the events of one execution of repeated layers after the other, of which a replica that owns
    some layers shares the others with all replicas. `names` maps names of lives to numbers, in order of
    appearance; workspaces have fixed numbers.
    """

    def __init__(self, choices: Sequence[_Choice], names: dict[Hashable, int]) -> None:
        self._parts = [
            _Part(list(part), names) for _, part in groupby(choices, key=lambda choice: choice.event.at)
        ]
        self._of_layer = defaultdict[int, list[int]](list)
        for number, part in enumerate(self._parts):
            for layer in part.touched:
                self._of_layer[layer].append(number)
        self._known: dict[frozenset[int], ReplicaEffect] = {}

    def on(self, owned: frozenset[int]) -> ReplicaEffect:
        """Return the action's effect on a replica that owns these layers."""
        key = owned.intersection(self._of_layer)
        if key not in self._known:
            effects = [*self._on_others]
            for number in {number for layer in key for number in self._of_layer[layer]}:
                effects[number] = self._parts[number].on(key)
            lives = tuple(excerpt for effect in effects for excerpt in effect.lives)
            self._known[key] = ReplicaEffect(_joined(effect.change for effect in effects), lives)
        return self._known[key]

    @cached_property
    def _on_others(self) -> list[ReplicaEffect]:
        """The effects of all parts on a replica that owns nothing."""
        return [part.on(frozenset()) for part in self._parts]


class _Part:
    """Events of an action that are all of one execution of repeated layers, or of none."""

    def __init__(self, choices: Sequence[_Choice], names: dict[Hashable, int]) -> None:
        self._choices = choices
        self._lives = [
            [
                (name if isinstance(name, int) else names.setdefault(name, len(names)), nbytes)
                for name, nbytes in choice.event.lives
            ]
            for choice in choices
        ]
        self.touched = frozenset(choice.layer for choice in choices if choice.layer is not None)
        self._known: dict[frozenset[int], ReplicaEffect] = {}

    def on(self, owned: frozenset[int]) -> ReplicaEffect:
        """Return the effect on a replica that owns these layers."""
        key = owned & self.touched
        if key not in self._known:
            chosen = [
                number
                for number, choice in enumerate(self._choices)
                if choice.layer is None or (choice.layer in key) == choice.owned
            ]
            change = _change(self._choices[number].event for number in chosen)
            lives = [life for number in chosen for life in self._lives[number]]
            self._known[key] = ReplicaEffect(change, (Excerpt(lives),) if lives else ())
        return self._known[key]


class Events(Protocol):
    """The events of a run of all layers. `alike` turns False if some layers were unlike others."""

    alike: bool

    def settled(self) -> list[LifeEvent]:
        """Return the storages present before the first step as births."""

    def events(self, actions: Sequence[Action]) -> list[list[LifeEvent]]:
        """Return the events before a step, and in each of its `actions`."""

    def layer_of(self, name: Hashable) -> int | None:
        """Return the layer of a storage that has been state of one."""


class Ownership:
    """One run of a stage, step after step, or two: the first owns all layers and the second none."""

    def __init__(self, *runs: Events) -> None:
        self.alike = True
        self._runs = runs
        self._names: dict[Hashable, int] = {}
        self._step: list[_Merged] = []
        self._settled = [run.settled() for run in runs]
        self._rest = self._merged(*self._settled)

    def rest(self, owned: frozenset[int]) -> Bytes:
        """Return the bytes of every category before the first step, on a replica that owns these layers."""
        return self._rest.on(owned).change.after

    def learn(self, of_runs: Sequence[Sequence[Action]]) -> None:
        """Read the events of all runs in the step that they have ended, which has these actions."""
        told = [run.events(actions) for run, actions in zip(self._runs, of_runs, strict=True)]
        if not self._step:
            for events, rest in zip(told, self._settled, strict=True):
                events[0] = [*rest, *events[0]]
        self._step = [self._merged(*both) for both in zip(*told, strict=True)]
        self.alike &= all(run.alike for run in self._runs)

    def effects(self, owned: frozenset[int]) -> list[ReplicaEffect]:
        """Return the effects before the step's first action, and of every action of it, on such a replica."""
        return [action.on(owned) for action in self._step]

    def _merged(self, *of_runs: Sequence[LifeEvent]) -> _Merged:
        """Merge an action of all runs."""
        if len(of_runs) == 1:
            return _Merged([_Choice(None, True, event) for event in of_runs[0]], self._names)
        return _Merged(self._choices(*of_runs), self._names)

    def _choices(self, ones: Sequence[LifeEvent], others: Sequence[LifeEvent]) -> list[_Choice]:
        """Return the events of an action in both runs, in their common order."""
        of_one, of_other = ({event.key for event in events} for events in (ones, others))
        result, left, right = list[_Choice](), list(reversed(ones)), list(reversed(others))
        while left or right:
            if left and left[-1].key not in of_other:
                result.append(self._of_some(left.pop(), owned=True))
            elif right and right[-1].key not in of_one:
                result.append(self._of_some(right.pop(), owned=False))
            elif left[-1].key != right[-1].key:  # its time depends on the owner of a layer
                key = next((e.key for e in (left[-1], right[-1]) if self._layer(e) is not None), None)
                if key is None:
                    self.alike = False
                    return result
                of_one.remove(key)
                of_other.remove(key)
            else:
                life_event, other = left.pop(), right.pop()
                if life_event[2:] == other[2:]:
                    result.append(_Choice(None, True, life_event))
                else:
                    self.alike &= self._layer(life_event) == self._layer(other)
                    result += self._of_some(life_event, owned=True), self._of_some(other, owned=False)
        return result

    def _of_some(self, event: LifeEvent, *, owned: bool) -> _Choice:
        """Return an event of some replicas only; it must be about the state of one layer."""
        layer = self._layer(event)
        self.alike &= layer is not None
        return _Choice(layer, owned, event)

    def _layer(self, event: LifeEvent) -> int | None:
        """Return the layer that an event is about, if one of the runs knows it."""
        _, about, _ = event.name
        result = {event.layer, *(run.layer_of(about) for run in self._runs)} - {None}
        return result.pop() if len(result) == 1 else None


def _change(events: Iterable[LifeEvent]) -> BytesChange:
    """Return the change of these events to the bytes of every category, at their peak and at the end."""
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
    return BytesChange(peak, tuple(level))


def _joined(changes: Iterable[BytesChange]) -> BytesChange:
    """Return the change of one part of an action after the other."""
    level = peak = (0,) * len(CATEGORIES)
    for change in changes:
        peak = max(peak, plus(level, change.at_peak), key=sum)
        level = plus(level, change.after)
    return BytesChange(peak, level)


# ---- Representative devices
# A device's memory follows from its own program, not from its peers in messages and collectives: it allocates
# and frees its own buffers. So devices are equal if their stages and actions are equal up to names of members
# and the first row of their parts, if they lend equal bytes, and if both or neither report to an agreement.
# Such devices are kin. Kin that shard the state of a stage may differ in the layers that they own.

Kin = tuple[int, ...]  # devices


def kin(plan: Plan, programs: Sequence[Program], arenas: Sequence[Arena]) -> list[Kin]:
    """Group the devices of a plan that are equal up to the layers that they own."""
    result = dict[Hashable, list[int]]()
    for device in plan.workers:
        lent = lent_bytes(arenas, Member.device(device))
        key = _place(plan, device), lent, overheads(plan, device), _actions(plan, programs, device)
        result.setdefault(key, []).append(device)
    return list(map(tuple, result.values()))


def owned_layers(plan: Plan) -> dict[int, frozenset[int]]:
    """Map every device to the layers that it owns, in stages whose state replicas shard."""
    result = dict.fromkeys(plan.workers, frozenset[int]())
    for number, stage in enumerate(plan.stages):
        if stage.grid.shard != "none":
            of_layers = list(enumerate(owners(StageStorages.of(plan, number), stage.grid), start=stage.start))
            for device in stage.devices:
                replica = stage.grid.replica_of(device)
                result[device] |= {layer for layer, owner in of_layers if owner == replica}
    return result


def kept_layers(plan: Plan) -> dict[int, frozenset[int]]:
    """Map every device to the layers of its stages whose parameters it keeps between steps."""
    owned = owned_layers(plan)
    result = dict.fromkeys(plan.workers, frozenset[int]())
    for stage in plan.stages:
        layers = frozenset(range(stage.start, stage.stop))
        for device in stage.devices:
            result[device] |= layers & owned[device] if stage.grid.shard == "parameters" else layers
    return result


def _place(plan: Plan, device: int) -> Hashable:
    """Return the roles of a device in its stages."""
    stages = plan.stages_of(device)
    agrees = plan.training.agrees
    return tuple(
        (n, plan.stages[n].grid.shard_of(device), agrees and tells_norms(plan, n, device)) for n in stages
    )


def _actions(plan: Plan, programs: Sequence[Program], device: int) -> Hashable:
    """Return the actions of a device without names of members, with rows relative to its own first one."""
    plain = _plain(plan, device)
    return tuple(tuple(map(plain, program.actions[device])) for program in programs)


def _plain(plan: Plan, device: int) -> Callable[[Action], Hashable]:
    """Return a function that normalises a device's actions, so that equal devices have equal ones."""
    names, host = dict[Member, int](), plan.cluster.devices[device].host
    grids = {n: plan.stages[n].grid for n in plan.stages_of(device)}
    size = plan.training.microbatch_size
    first = {n: grid.replica_of(device) * (size // grid.data) for n, grid in grids.items()}

    def plain(action: Action) -> Hashable:
        kind, stage, microbatch, layers, subject, place, part, wait = action
        if part is not None:
            part = part[0] - first[stage], part[1] - first[stage]
        if place is None:
            return kind, stage, microbatch, layers, subject, part, wait
        members = [(member.at(host), parts) for member, parts in place]
        there = tuple((one.kind, names.setdefault(one, len(names)), parts) for one, parts in members)
        return kind, stage, microbatch, layers, subject, part, wait, there

    return plain


# ---- Accounts

Owned = frozenset[int]  # layers


class Account(Protocol):
    """The memory of equal devices. `rest` are the bytes of every category before the first step.

    Accounts of equal `run`, the devices that are run for them, have equal actions.
    `changes` are the effects of the last step's actions: of all its actions, or of those that are executed
    and for which `stand` has others. With lives, `before` are those before these actions, and `lives` those
    in each.
    """

    run: tuple[int, ...]
    rest: Bytes
    stand: StandIn
    changes: list[BytesChange]
    before: Sequence[Excerpt]
    lives: list[Sequence[Excerpt]]

    def learn(self) -> None:
        """Read the results of a finished step."""


class Measured:
    """The account of a device that is run."""

    def __init__(self, run: tuple[int, ...], meter: RepeatedMeter, stand: StandIn) -> None:
        self.run, self._meter, self.rest, self.stand = run, meter, meter.level, stand
        self.changes, self.lives = list[BytesChange](), list[Sequence[Excerpt]]()
        self.before: Sequence[Excerpt] = ()

    def learn(self) -> None:
        """Read the results of a finished step."""
        self.changes = self._meter.changes()
        if isinstance(self._meter, LivesMeter):
            before, lives = self._meter.take()
            self.before, self.lives = (Excerpt(before),), [(Excerpt(one),) for one in lives]


class PutTogether:
    """The account of a device that owns these layers, composed from one or two runs, which learn first."""

    def __init__(self, run: tuple[int, ...], ownership: Ownership, owned: Owned) -> None:
        self.run, self._ownership, self._owned, self.rest = run, ownership, owned, ownership.rest(owned)
        self.changes, self.lives = list[BytesChange](), list[Sequence[Excerpt]]()
        self.before: Sequence[Excerpt] = ()
        self.stand = ALL_LAYERS

    def learn(self) -> None:
        """Read the results of a finished step."""
        before, *actions = self._ownership.effects(self._owned)
        self.changes, self.before = [action.change for action in actions], before.lives
        self.lives = [action.lives for action in actions]


@dataclass(frozen=True, slots=True)
class Cast:
    """Devices by the layers that they own, and their representatives.

    There is one representative, or two that own all layers and none.
    """

    run: tuple[int, ...]
    devices: Mapping[Owned, tuple[int, ...]]

    @property
    def is_put_together(self) -> bool:
        """True if accounts are composed from two runs."""
        return len(self.run) == 2

    def shares(self, short: Shortened) -> Iterator[tuple[tuple[int, int], ReplicaShare]]:
        """Yield by stage and device the shares of representatives that own other layers than by the plan."""
        for device, all_layers in zip(self.run, (True, False), strict=False) if self.is_put_together else ():
            for stage in short.plan.stages_of(device):
                share = share_of(short.plan, stage, device)
                if share is not None:
                    yield (stage, device), share.owning(all_layers=all_layers)


def casts(short: Shortened, together: Sequence[Kin]) -> Iterator[Cast]:
    """Yield the representatives of each group of kin."""
    owned = owned_layers(short.whole)
    for devices in together:
        kinds = dict.fromkeys(owned[device] for device in devices)
        by_owned = {kind: tuple(device for device in devices if owned[device] == kind) for kind in kinds}
        owns_some = any(by_owned) and bool(short.repeats)  # others than in the shortened plan
        if (len(by_owned) > 2 or owns_some) and len(devices) > 1:
            yield Cast(devices[:2], by_owned)
        else:
            yield from (Cast(own[:1], {one: own}) for one, own in by_owned.items())


def unlike_layers(plan: Plan, every: Sequence[Kin]) -> frozenset[int]:
    """Return the layers of sharded stages with a device of no kin, which cannot run as if it owned others."""
    alone = {devices[0] for devices in every if len(devices) == 1}
    return frozenset(
        layer
        for stage in plan.stages
        if stage.grid.shard != "none" and not alone.isdisjoint(stage.devices)
        for layer in range(stage.start, stage.stop)
    )


class Company:
    """The accounts of all devices, from the meters of those that are run."""

    def __init__(self, every: Sequence[Cast], meters: Mapping[int, RepeatedMeter], short: Shortened) -> None:
        self._meters, self._ownerships = meters.values(), dict[tuple[int, ...], Ownership]()
        self.devices_of: dict[Account, tuple[int, ...]] = {}
        for cast in every:
            owning = [meter for device in cast.run if isinstance(meter := meters[device], OwningMeter)]
            if owning:
                ownership = Ownership(*(AllLayers(meter, short) for meter in owning))
                self._ownerships[cast.run] = ownership
                self.devices_of |= {
                    PutTogether(cast.run, ownership, owned): own for owned, own in cast.devices.items()
                }
            else:
                (devices,) = cast.devices.values()
                self.devices_of[Measured(cast.run, meters[cast.run[0]], short.stand)] = devices

    def learn(self, program: UncheckedProgram) -> None:
        """Read the results of a finished step, whose actions on all layers `program` has."""
        for run, ownership in self._ownerships.items():
            ownership.learn([program.actions[device] for device in run])
        for account in self.devices_of:
            account.learn()

    @property
    def no_samples(self) -> dict[int, list[MemorySample]]:
        """An empty list of memory samples for every device."""
        return {device: [] for devices in self.devices_of.values() for device in devices}

    @property
    def alike(self) -> bool:
        """True if all representatives were equal to the represented layers and devices so far."""
        return all(meter.alike for meter in self._meters) and all(
            ownership.alike for ownership in self._ownerships.values()
        )
