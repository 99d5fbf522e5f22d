"""The devices that a dry run executes, and what they tell of all.

Devices that do the same have one account, measured on the first of them. Of more than two kin that own different
layers, two are run, as if one of them owned every layer and the other none, and the accounts of all are put together
from theirs (`pipefit.runtime.dry_run.devices`); each is run where layers stand for others there, or state moves, of
which slots are counted for what is owned.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pipefit.memory.arenas import Arena, lent_bytes
from pipefit.memory.model_state import Share, owners, share_of
from pipefit.memory.storages import StageStorages
from pipefit.runtime.dry_run.layers import RepeatedMeter, Shortened
from pipefit.runtime.dry_run.lives import Event, Lives, LivesMeter, OwningMeter
from pipefit.runtime.dry_run.microbatches import Bytes, Change
from pipefit.runtime.dry_run.reserved import overheads
from pipefit.runtime.engine.assembly import tells_norms
from pipefit.schema.actions import Action, Kind
from pipefit.schema.devices import Member
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program
from pipefit.schema.trace import CATEGORIES, Category, MemorySample

# ----------------------------------------------------------------------------------------------------
# The dry runs of all replicas that divide a stage's state, put together from two of them.
#
# What happens on a replica depends on the layers that it owns, and of each of them by itself: its parameters,
# gradients and optimizer state are there or not. So one run that owns every layer and one that owns none have
# seen all of it. They tell the same story but for the events about layers' state that only one of them has,
# or both in other ways; of these, a replica has those of the first run for its own layers, and those of the
# second for the others. So an action does the same on all replicas that own the same of the layers whose
# state it touches.
#
# Where the stories differ in what is no layer's state, or tell it in another order, they are not `alike`, and
# replicas are run one by one. Costs two runs, and microseconds for each action and replica.

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


# ----------------------------------------------------------------------------------------------------
# Representatives: a dry run executes some of all devices, whose memory stands for the others.
#
# A device's memory follows from its own program, not from who is at the other end of a message or a sum: what
# it needs for these it allocates and frees itself. So devices do the same if their stages and actions are
# equal but for the names of members, and their rows but for the first one; if they lend as much, and report
# to an agreement or not. Such devices are kin. Kin that divide the state of a stage differ in the layers that
# they own as well.

Kin = tuple[int, ...]  # devices


def kin(plan: Plan, programs: Sequence[Program], arenas: Sequence[Arena]) -> list[Kin]:
    """All devices of a plan, together with those that do the same but for the layers that they own."""
    found = dict[Hashable, list[int]]()
    for device in plan.workers:
        lent = lent_bytes(arenas, Member.device(device))
        key = _place(plan, device), lent, overheads(plan, device), _actions(plan, programs, device)
        found.setdefault(key, []).append(device)
    return list(map(tuple, found.values()))


def owned_layers(plan: Plan) -> dict[int, frozenset[int]]:
    """For every device the layers that it owns of stages whose state replicas divide."""
    found = dict.fromkeys(plan.workers, frozenset[int]())
    for number, stage in enumerate(plan.stages):
        if stage.grid.shard != "none":
            of_layers = list(enumerate(owners(StageStorages.of(plan, number), stage.grid), start=stage.start))
            for device in stage.devices:
                replica = stage.grid.replica_of(device)
                found[device] |= {layer for layer, owner in of_layers if owner == replica}
    return found


def kept_layers(plan: Plan) -> dict[int, frozenset[int]]:
    """For every device the layers of its stages of which it keeps the parameters between steps."""
    owned = owned_layers(plan)
    found = dict.fromkeys(plan.workers, frozenset[int]())
    for stage in plan.stages:
        layers = frozenset(range(stage.start, stage.stop))
        for device in stage.devices:
            found[device] |= layers & owned[device] if stage.grid.shard == "parameters" else layers
    return found


def _place(plan: Plan, device: int) -> Hashable:
    """What the stages of a device are to it."""
    stages = plan.stages_of(device)
    agrees = plan.training.agrees
    return tuple((n, plan.stages[n].grid.shard_of(device), agrees and tells_norms(plan, n, device)) for n in stages)


def _actions(plan: Plan, programs: Sequence[Program], device: int) -> Hashable:
    """The actions of a device, without the names of members, and with its rows counted from its own first one."""
    plain = _plain(plan, device)
    return tuple(tuple(map(plain, program.actions[device])) for program in programs)


def _plain(plan: Plan, device: int) -> Callable[[Action], Hashable]:
    """A function that makes of each of a device's actions what it is of any device."""
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


# ----------------------------------------------------------------------------------------------------

Owned = frozenset[int]  # layers


class Account(Protocol):
    """The memory of devices that do the same. `rest` are the bytes of every category before the first step.

    `changes` are what the actions of the last step did. Where lives are told, `before` are those in front of these
    actions, and `lives` those in each.
    """

    rest: Bytes
    changes: list[Change]
    before: Lives
    lives: list[Lives]

    def learn(self) -> None:
        """A step has ended."""


class Measured:
    """The account of a device that is run."""

    def __init__(self, meter: RepeatedMeter) -> None:
        self._meter, self.rest = meter, meter.level
        self.changes, self.before, self.lives = list[Change](), Lives(), list[Lives]()

    def learn(self) -> None:
        """A step has ended."""
        self.changes = self._meter.changes()
        if isinstance(self._meter, LivesMeter):
            self.before, self.lives = self._meter.take()


class PutTogether:
    """The account of a device that owns these layers, from that of all layers and that of none, which learn before."""

    def __init__(self, ownership: Ownership, owned: Owned) -> None:
        self._ownership, self._owned, self.rest = ownership, owned, ownership.rest(owned)
        self.changes, self.before, self.lives = list[Change](), Lives(), list[Lives]()

    def learn(self) -> None:
        """A step has ended."""
        before, *actions = self._ownership.effects(self._owned)
        self.changes, self.before = [one.change for one in actions], before.lives
        self.lives = [one.lives for one in actions]


@dataclass(frozen=True, slots=True)
class Cast:
    """Devices by the layers that they own, and those that are run for them: one, or one that owns all and one none."""

    run: tuple[int, ...]
    devices: Mapping[Owned, tuple[int, ...]]

    @property
    def is_put_together(self) -> bool:
        """Whether accounts are put together from two."""
        return len(self.run) == 2

    def shares(self, short: Shortened) -> Iterator[tuple[tuple[int, int], Share]]:
        """By stage and device, the shares of devices that are run as if they owned other layers."""
        for device, all_layers in zip(self.run, (True, False), strict=False) if self.is_put_together else ():
            for stage in short.plan.stages_of(device):
                share = share_of(short.plan, stage, device)
                if share is not None:
                    yield (stage, device), share.owning(all_layers=all_layers)


def casts(short: Shortened, together: Sequence[Kin]) -> Iterator[Cast]:
    """Which devices are run for those that are kin."""
    owned = owned_layers(short.plan)
    for devices in together:
        kinds = dict.fromkeys(owned[device] for device in devices)
        by_owned = {one: tuple(device for device in devices if owned[device] == one) for one in kinds}
        if len(by_owned) > 2 and _may_own_others(short, devices[0]):
            yield Cast(devices[:2], by_owned)
        else:
            yield from (Cast(own[:1], {one: own}) for one, own in by_owned.items())


def _may_own_others(short: Shortened, device: int) -> bool:
    """Whether a device can be run as if it owned other layers than it does."""
    stages = [short.plan.stages[stage] for stage in short.plan.stages_of(device)]
    stand_ins = any(copy is not None for stage in stages for copy in short.copies[stage.start : stage.stop])
    actions = short.program.actions[device]
    moves = any(one.moves_state or (one.kind is Kind.STEP and one.place is not None) for one in actions)
    return not stand_ins and not moves


class Company:
    """The accounts of all devices, from the meters of those that are run."""

    def __init__(self, every: Sequence[Cast], meters: Mapping[int, RepeatedMeter]) -> None:
        self._meters, self._ownerships = meters.values(), list[Ownership]()
        self.devices_of: dict[Account, tuple[int, ...]] = {}
        for cast in every:
            if cast.is_put_together:
                one, other = (meters[device] for device in cast.run)
                assert isinstance(one, OwningMeter)
                assert isinstance(other, OwningMeter)
                self._ownerships.append(ownership := Ownership(one, other))
                self.devices_of |= {PutTogether(ownership, owned): own for owned, own in cast.devices.items()}
            else:
                (devices,) = cast.devices.values()
                self.devices_of[Measured(meters[cast.run[0]])] = devices

    def learn(self) -> None:
        """A step has ended."""
        for ownership in self._ownerships:
            ownership.learn()
        for account in self.devices_of:
            account.learn()

    @property
    def no_samples(self) -> dict[int, list[MemorySample]]:
        """For every device the samples of its memory, none as yet."""
        return {device: [] for devices in self.devices_of.values() for device in devices}

    @property
    def alike(self) -> bool:
        """Whether whatever stood for others was like them so far."""
        return all(meter.alike for meter in self._meters) and all(one.alike for one in self._ownerships)
