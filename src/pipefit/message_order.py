"""The order of messages: does a program come to its end where NCCL carries them, and does every receive get its own?

NCCL ignores tags. What two devices send each other over one communicator happens first in, first out: the next
operation that one of them started meets the next one that the other started. Two sends that meet wait for ever, and
everything behind them waits too; a send that meets the receive of another message delivers the wrong data. Therefore
each direction of a boundary between two devices is a `Channel`, with a communicator of its own, and the rules are:

    a start of a message    takes the next place in the line of its channel; it is complete when the start that has the
                            same place at the other end is there too
    a start of a sum        is complete when all its stages have started it; sums over the same stages share a
    or an agreement         communicator, on which all of them must start the same ones in the same order
    a join                  holds the device until its start is complete: on the CPU it blocks the process, on a GPU
                            every later computation and message of that device waits

Every `Program` is checked when it is made, and the transport finds its process groups by the same `channel`. So no
program that would hang can be launched, and gloo, which would pair messages by their tags, gets them in NCCL's order.

The check is one pass: a device runs until a join holds it, and the start that completes a message lets go of the
devices that wait for it. Linear in the number of actions, about half a microsecond for each. (PyTorch issue 132852 on
tags, pull request 186173 on a communicator for each direction.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pipefit.errors import UsageError
from pipefit.program import COLLECTIVE, MESSAGES, SENDS, Action, Kind, Placement, message_end, message_partner

if TYPE_CHECKING:
    from pipefit.program import Program

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
    _, receiver, _, _, source, target = message_end(device, action, placement)
    sender = action.stage if action.kind in SENDS else action.neighbour
    return None if source == target else Channel(sender, receiver, source, target)


def channels(program: Program) -> tuple[Channel, ...]:
    """All channels that a program uses, in the order in which every worker makes their communicators."""
    found = {
        channel(device, action, program.placement)
        for device, actions in enumerate(program.actions)
        for action in actions
        if action.kind in MESSAGES and not action.wait
    }
    return tuple(sorted(name for name in found if name is not None))


def check_order(program: Program, *, channel_of: ChannelOf = channel) -> None:
    """Follow `program` by the rules above, to its end.

    Args:
        program: every start has its join, and every message its two ends.
        channel_of: which communicator a message uses, where another arrangement is to be judged.

    Raises:
        UsageError: the program would hang, or a receive would get the data of another message. Says which devices
            stand at which actions, and what to change.
    """
    _Run(program, channel_of).to_the_end()


# -------------------------------------------------------------------- lines


Member = tuple[int, int]  # a device and one of its stages


class _End(NamedTuple):
    """One end of a line: a stage's sends in one direction, its receives, or its part in a sum."""

    line: _Line
    member: Member  # tells the ends of the line apart
    operation: Hashable  # the same at all ends that may meet
    sends: bool | None  # None in a collective


@dataclass(slots=True)
class _Line:
    """The operations of one communicator, in their order."""

    size: int  # how many ends an operation has
    first: list[Action] = field(default_factory=list)  # for every place, the start that came first
    ends: list[_End] = field(default_factory=list)  # for every place, the end of that start
    started: list[int] = field(default_factory=list)  # for every place, how many ends have started it
    places: dict[Member, int] = field(default_factory=dict)  # of every member, the place of its next start
    done: int = 0  # places that are complete
    waiting: list[int] = field(default_factory=list)  # devices that this line holds

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
    """Two starts of one place are parts of one operation.

    Raises:
        UsageError: they are not: they hang, or mix their data.
    """
    if one_end.operation == other_end.operation and _content(one) == _content(other):
        return
    if one_end.sends is None:
        raise UsageError(_mixed(one, other))
    ends = [f"{action} of device {end.member[0]}" for end, action in ((one_end, one), (other_end, other))]
    raise UsageError(_clash(*ends) if one_end.sends is other_end.sends else _misdelivered(*ends, sends=one_end.sends))


def _content(action: Action) -> tuple[int | None, tuple[int, int] | None]:
    """What tells the operations of one line apart."""
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


class _Run:
    """The devices of a program on their way through it."""

    def __init__(self, program: Program, channel_of: ChannelOf) -> None:
        self._program, self._channel_of = program, channel_of
        self._members = _members(program)
        self._lines: dict[Hashable, _Line] = {}
        self._ends: dict[tuple[object, ...], _End] = {}
        self._held: dict[int, tuple[Action, _Line]] = {}  # device -> the join that it stands at
        self._free = list(range(len(program.actions)))

    def to_the_end(self) -> None:
        """Let every device run while it can.

        Raises:
            UsageError: not all come to the end.
        """
        open_starts = self._carried_in() if self._program.carried_in else [{} for _ in self._free]
        devices = [self._device(device, starts) for device, starts in enumerate(open_starts)]
        while self._free:
            next(devices[self._free.pop()], None)
        if self._held:
            raise UsageError(self._hangs())

    def _carried_in(self) -> list[_Starts]:
        """What the body before has started: complete where all ends have, and in its line where one starts it here."""
        starts = ((n, a) for n, actions in enumerate(self._program.actions) for a in actions)
        here = {self._whole(n, a) for n, a in starts if a.kind in _ORDERED and not a.wait}
        found: list[_Starts] = []
        for device, actions in enumerate(self._program.carried_in):
            found.append({})
            for action in actions:
                if action.kind in _ORDERED:
                    line = self._end(device, action).line
                    place = line.start(self._end(device, action), action) if self._whole(device, action) in here else -1
                    found[device][action[:-1]] = line, place
        return found

    def _whole(self, device: int, action: Action) -> Hashable:
        """The operation of which a start is a part."""
        return self._end(device, action).operation, _content(action)

    def _device(self, device: int, open_starts: _Starts) -> Iterator[None]:
        """One device's way; yields when a join holds it."""
        ends = self._ends
        for action in self._program.actions[device]:
            if action.kind not in _ORDERED:
                continue
            if action.wait:
                line, place = open_starts.pop(action[:-1])
                while line.done <= place:
                    line.waiting.append(device)
                    self._held[device] = action, line
                    yield
                    del self._held[device]
            else:
                key = device, action.kind, action.stage, action.subject, action.place
                end = ends.get(key) or self._end(device, action)
                line = end.line
                done = line.done
                open_starts[action[:-1]] = line, line.start(end, action)
                if line.done > done and line.waiting:
                    self._free += line.waiting
                    line.waiting.clear()

    def _end(self, device: int, action: Action) -> _End:
        """The end of a line at which `action` starts; one for all microbatches, but for messages inside a device."""
        member = device, action.stage
        if action.kind in COLLECTIVE:
            operation: Hashable = _collective(action)
            members = self._members[operation]
            end = _End(self._line(("sum", members), len(members)), member, operation, None)
        else:
            forward, stage, *content, source, target = message_end(device, action, self._program.placement)
            operation, sends = (forward, stage, source, target), action.kind in SENDS
            name = self._channel_of(device, action, self._program.placement)
            if name is None:
                return _End(self._line((operation, *content), 2), member, operation, sends)
            end = _End(self._line(name, 2), (device, -1), operation, sends)
        return self._ends.setdefault((device, action.kind, action.stage, action.subject, action.place), end)

    def _line(self, name: Hashable, size: int) -> _Line:
        return self._lines.setdefault(name, _Line(size))

    # ---------------------------------------------------------------- what holds whom

    def _hangs(self) -> str:
        """Which devices hold each other, found by going from one that is held to the one that it waits for."""
        way: dict[int, tuple[int, Action]] = {}  # device -> the device and its start that would let go of it
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
        """The device, and its start, that would let go of `device`."""
        _, line = self._held[device]
        end, first = line.ends[line.done], line.first[line.done]
        if end.sends is None:
            members = self._members[end.operation]
            other, stage = next(member for member in members if line.places.get(member, 0) <= line.done)
            return other, first._replace(stage=stage)
        *_, source, target = message_end(end.member[0], first, self._program.placement)
        return target if end.sends else source, message_partner(first)

    def _remedy(self, needed: list[tuple[int, Action]]) -> str:
        other, start = needed[-1]
        if other not in self._held:
            return f"Device {other} ends without it: start {start} there, or nowhere"
        orders = (f"start {start} before {self._held[other][0]}" for other, start in needed)
        return f"To end, {', or '.join(orders)}"


_Starts = dict[tuple[object, ...], tuple[_Line, int]]  # what is open on a device: its line, and its place there


def _collective(action: Action) -> Hashable:
    """Which sum, agreement or exchange a start is a part of; rows are exchanged inside a stage."""
    return action.kind, action.subject, action.stage if action.kind is Kind.GATHER_FORWARD else None


def _members(program: Program) -> dict[Hashable, tuple[Member, ...]]:
    """The members of every collective: those that start it; an agreement has one on every device."""
    found: dict[Hashable, dict[Member, None]] = {}
    for device, actions in enumerate(program.actions):
        for action in actions:
            if action.kind in COLLECTIVE:
                found.setdefault(_collective(action), {})[device, action.stage] = None
    agreed = found.get((Kind.AGREE, None, None))
    if agreed is not None:
        known = {device for device, _ in agreed}
        for stage, devices in enumerate(program.placement):
            missing = [device for device in devices if device not in known]
            agreed.update(dict.fromkeys((device, stage) for device in missing))
            known.update(missing)
    return {key: tuple(sorted(members)) for key, members in found.items()}
