"""The devices that a dry run executes, and what they tell of all.

Devices that do the same have one account, measured on the first of them. Of more than two kin that own different
layers, two are run, as if one of them owned every layer and the other none, and the accounts of all are put together
from theirs (`pipefit.runtime.ownership`); each is run where layers stand for others there, or state moves, of which
slots are counted for what is owned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pipefit.actions import Kind
from pipefit.cost.shares import Share, share_of
from pipefit.runtime.folding import Bytes, Change
from pipefit.runtime.lives import Lives, LivesMeter
from pipefit.runtime.ownership import Ownership
from pipefit.runtime.owning_meter import OwningMeter
from pipefit.runtime.repeated import Shortened
from pipefit.runtime.repeated_meter import RepeatedMeter
from pipefit.runtime.representatives import Kin, owned_layers
from pipefit.trace import MemorySample

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
