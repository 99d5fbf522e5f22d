"""The check that a program ends under NCCL's rules for messages, and that every receive gets its own message.

NCCL ignores tags. The operations of two devices on one communicator are paired first in, first out: the next one that
either device has started is paired with the next one of the other. Two paired sends never complete, nor does anything
after them; a send that is paired with the receive of another message delivers the wrong data. Therefore each direction
of a boundary between two devices is a `Channel` with a communicator of its own, and the rules are:

    start of a message      takes the next place in the queue of its channel; it is complete when the other end has
                            started the operation at the same place
    start of a collective   is complete when all its members have started it; collectives of the same members share a
                            communicator, on which all of them must start the same ones in the same order
    join                    holds the device until the start is complete: on the CPU it blocks the process, on a GPU
                            it blocks every later computation and message of that device

Every `Program` is checked when it is made, and the transport chooses its process groups by the same `channel`. So no
program that would hang can be launched. Tests on gloo, which by itself pairs messages by tags, use NCCL's order too.

The check is one pass: a device advances until a join holds it, and the start that completes an operation releases the
devices that wait for it. Linear in the number of actions, about half a microsecond for each. (PyTorch issue 132852 on
tags, pull request 186173 on a communicator for each direction.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pipefit.actions import (
    COLLECTIVE,
    MESSAGES,
    SENDS,
    Action,
    Actions,
    Kind,
    Placement,
    collective,
    message_of,
    message_partner,
)
from pipefit.errors import UsageError

_ORDERED = MESSAGES | COLLECTIVE


class Channel(NamedTuple):
    """All messages from stage `sender` to stage `receiver` between two of their devices: first in, first out."""

    sender: int
    receiver: int
    source: int
    target: int


ChannelOf = Callable[[int, Action, Placement], Hashable | None]


def channel(device: int, action: Action, placement: Placement) -> Channel | None:
    """The channel of a send or receive on `device`; None between two stages of it, which need no communicator."""
    message = message_of(device, action, placement)
    sender = action.stage if action.kind in SENDS else action.neighbour
    source, target = message.source, message.target
    return None if source == target else Channel(sender, message.receiver, source, target)


def channels(actions: Actions, placement: Placement) -> tuple[Channel, ...]:
    """All channels that these actions use, in the order in which every worker makes their communicators."""
    found = {
        channel(device, action, placement)
        for device, own in enumerate(actions)
        for action in own
        if action.kind in MESSAGES and not action.wait
    }
    return tuple(sorted(name for name in found if name is not None))


def check_order(
    actions: Actions, placement: Placement, *, carried_in: Actions = (), channel_of: ChannelOf = channel
) -> None:
    """Follow the actions of all devices by these rules to their end.

    Args:
        actions: of every device; every start has its join, and every message both ends.
        placement: the devices of every stage.
        carried_in: for every device, if any: the starts of the body before that it joins.
        channel_of: the communicator of a message; another function checks another arrangement.

    Raises:
        UsageError: the program would hang, or a receive would get the data of another message; says which devices
            wait at which actions, and what to change.
    """
    _Follower(actions, placement, carried_in, channel_of).to_the_end()


# -------------------------------------------------------------------- queues


_Participant = tuple[int, int]  # a device and one of its stages, in a collective or at an end of a queue


class _End(NamedTuple):
    """One end of a queue: a stage's sends in one direction, its receives, or its part in a collective."""

    queue: _Queue
    member: _Participant  # distinguishes the ends of the queue
    operation: Hashable  # the same at all ends that may be paired
    sends: bool | None  # None in a collective


@dataclass(slots=True)
class _Queue:
    """The operations of one communicator, in their order."""

    size: int  # how many ends an operation has
    first: list[Action] = field(default_factory=list)  # by place, the first start
    ends: list[_End] = field(default_factory=list)  # by place, the end of that start
    started: list[int] = field(default_factory=list)  # by place, how many ends have started
    places: dict[_Participant, int] = field(default_factory=dict)  # by member, the place of its next start
    done: int = 0  # number of complete places
    waiting: list[int] = field(default_factory=list)  # devices that wait for this queue

    def start(self, end: _End, action: Action) -> int:
        """The place that this start takes."""
        place = self.places.get(end.member, 0)
        self.places[end.member] = place + 1
        if place == len(self.first):
            self.first.append(action)
            self.ends.append(end)
            self.started.append(0)
        else:
            _check_same(self.ends[place], self.first[place], end, action)
        self.started[place] += 1
        self.done += self.started[place] == self.size
        return place


def _check_same(one_end: _End, one: Action, other_end: _End, other: Action) -> None:
    """Check that two starts at one place belong to the same operation.

    Raises:
        UsageError: they do not: they would hang, or mix their data.
    """
    if one_end.operation == other_end.operation and _content(one) == _content(other):
        return
    if one_end.sends is None:
        raise UsageError(_mixed(one, other))
    ends = [f"{action} of device {end.member[0]}" for end, action in ((one_end, one), (other_end, other))]
    raise UsageError(_clash(*ends) if one_end.sends is other_end.sends else _misdelivered(*ends, sends=one_end.sends))


def _content(action: Action) -> tuple[int | None, tuple[int, int] | None]:
    """What distinguishes the operations of one queue."""
    return action.microbatch, action.part


def _clash(one: str, other: str) -> str:
    return (
        f"the program would hang: {one} and {other} meet on one communicator, on which neither completes; give each "
        "direction one of its own"
    )


def _misdelivered(one: str, other: str, *, sends: bool) -> str:
    send, receive = (one, other) if sends else (other, one)
    return (
        f"{receive} would get what {send} sends: messages of one direction arrive in the order of the sends, whatever "
        "microbatch a receive names; start the receives in the order of the sends"
    )


def _mixed(first: Action, second: Action) -> str:
    return (
        f"{second} would be added to {first}: sums over the same stages happen in the order in which each stage starts "
        f"them; start them in the same order on stages {first.stage} and {second.stage}"
    )


# -------------------------------------------------------------------- devices


class _Follower:
    """Follows all devices of a program to their ends, or until each waits for another."""

    def __init__(self, actions: Actions, placement: Placement, carried_in: Actions, channel_of: ChannelOf) -> None:
        self._actions, self._placement, self._carried, self._channel_of = actions, placement, carried_in, channel_of
        self._members = _members(actions, placement)
        self._queues: dict[Hashable, _Queue] = {}
        self._ends: dict[tuple[object, ...], _End] = {}
        self._held: dict[int, tuple[Action, _Queue]] = {}  # device -> the join at which it waits
        self._free = list(range(len(actions)))

    def to_the_end(self) -> None:
        """Let every device advance as far as it can.

        Raises:
            UsageError: some device does not reach its end.
        """
        open_starts = self._carried_in() if self._carried else [{} for _ in self._free]
        devices = [self._device(device, starts) for device, starts in enumerate(open_starts)]
        while self._free:
            next(devices[self._free.pop()], None)
        if self._held:
            raise UsageError(self._hangs())

    def _carried_in(self) -> list[_Starts]:
        """What the body before has started: complete if all ends have started it, else at its place in its queue."""
        starts = ((n, a) for n, actions in enumerate(self._actions) for a in actions)
        here = {self._operation(n, a) for n, a in starts if a.kind in _ORDERED and not a.wait}
        found: list[_Starts] = []
        for device, actions in enumerate(self._carried):
            found.append({})
            for action in actions:
                if action.kind in _ORDERED:
                    end = self._end(device, action)
                    waits = self._operation(device, action) in here
                    found[device][action[:-1]] = end.queue, end.queue.start(end, action) if waits else -1
        return found

    def _operation(self, device: int, action: Action) -> Hashable:
        """What is the same at all starts of one operation."""
        return self._end(device, action).operation, _content(action)

    def _device(self, device: int, open_starts: _Starts) -> Iterator[None]:
        """Follow one device through its actions; yields when a join holds it."""
        ends = self._ends
        for action in self._actions[device]:
            if action.kind not in _ORDERED:
                continue
            if action.wait:
                queue, place = open_starts.pop(action[:-1])
                while queue.done <= place:
                    queue.waiting.append(device)
                    self._held[device] = action, queue
                    yield
                    del self._held[device]
            else:
                key = device, action.kind, action.stage, action.subject, action.place, action.layers
                end = ends.get(key) or self._end(device, action)
                queue = end.queue
                done = queue.done
                open_starts[action[:-1]] = queue, queue.start(end, action)
                if queue.done > done and queue.waiting:
                    self._free += queue.waiting
                    queue.waiting.clear()

    def _end(self, device: int, action: Action) -> _End:
        """The end of a queue at which `action` starts. Messages inside a device have a queue for each microbatch."""
        member = device, action.stage
        if action.kind in COLLECTIVE:
            operation: Hashable = collective(action)
            members = self._members[operation]
            queue = self._queue(("sum", tuple(_counted(members, one) for one in members)), len(members))
            end = _End(queue, _counted(members, member), operation, None)
        else:
            message = message_of(device, action, self._placement)
            operation, sends = message._replace(microbatch=None, part=None), action.kind in SENDS
            name = self._channel_of(device, action, self._placement)
            if name is None:
                return _End(self._queue(message, 2), member, operation, sends)
            end = _End(self._queue(name, 2), (device, -1), operation, sends)
        return self._ends.setdefault(
            (device, action.kind, action.stage, action.subject, action.place, action.layers), end
        )

    def _queue(self, name: Hashable, size: int) -> _Queue:
        return self._queues.setdefault(name, _Queue(size))

    # ---------------------------------------------------------------- a program that would hang

    def _hangs(self) -> str:
        """The devices that wait for each other, found by going from one that waits to the one it waits for."""
        way: dict[int, tuple[int, Action]] = {}  # device -> the other device, and its start that is missing
        device = min(self._held)
        while device in self._held and device not in way:
            way[device] = self._needed(device)
            device = way[device][0]
        passed = list(way)
        circle = passed[passed.index(device) :] if device in way else passed[-1:]
        stand = "; ".join(
            f"device {one} stands at {self._held[one][0]} until device {other} starts {start}"
            for one in circle
            for other, start in (way[one],)
        )
        return f"the program would hang: {stand}. {self._remedy([way[one] for one in circle])}"

    def _needed(self, device: int) -> tuple[int, Action]:
        """The other device for which `device` waits, and its missing start."""
        _, queue = self._held[device]
        end, first = queue.ends[queue.done], queue.first[queue.done]
        if end.sends is None:
            members = self._members[end.operation]
            missing = (one for one in members if queue.places.get(_counted(members, one), 0) <= queue.done)
            other, stage = next(missing)
            return other, first._replace(stage=stage)
        message = message_of(end.member[0], first, self._placement)
        return message.target if end.sends else message.source, message_partner(first)

    def _remedy(self, needed: list[tuple[int, Action]]) -> str:
        other, start = needed[-1]
        if other not in self._held:
            return f"Device {other} ends without it: start {start} there, or nowhere"
        orders = (f"start {start} before {self._held[other][0]}" for other, start in needed)
        return f"To end, {', or '.join(orders)}"


_Starts = dict[tuple[object, ...], tuple[_Queue, int]]  # the open starts of a device: their queues and places


def _counted(members: tuple[_Participant, ...], member: _Participant) -> _Participant:
    """Whose starts are counted: a device's, on the communicator of these devices; or a stage's, where a device takes
    part with several.
    """
    return member if len({device for device, _ in members}) < len(members) else (member[0], -1)


def _members(actions: Actions, placement: Placement) -> dict[Hashable, tuple[_Participant, ...]]:
    """The members of every collective: those that start it; an agreement has one on every device."""
    found: dict[Hashable, dict[_Participant, None]] = {}
    for device, own in enumerate(actions):
        for action in own:
            if action.kind in COLLECTIVE:
                found.setdefault(collective(action), {})[device, action.stage] = None
    agreed = found.get(collective(Action(Kind.AGREE, 0)))
    if agreed is not None:
        known = {device for device, _ in agreed}
        for stage, devices in enumerate(placement):
            missing = [device for device in devices if device not in known]
            agreed.update(dict.fromkeys((device, stage) for device in missing))
            known.update(missing)
    return {key: tuple(sorted(members)) for key, members in found.items()}
