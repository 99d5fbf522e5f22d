"""The program: for every device, the ordered list of its actions in one step.

    device 0: 0LOAD0 0F0 0SEND_F0 0WAIT_SEND_F0 0RECV_B0 0WAIT_RECV_B0 0B0 0STEP
    device 1: 1RECV_F0 1WAIT_RECV_F0 1LOAD0 1F0 1B0 1SEND_B0 1WAIT_SEND_B0 1STEP

The simulator, the dry run and the runtime follow it. `schema.actions` explains the words. A program may be
the body of an asynchronous schedule. It then joins actions that the previous body started (`carried_in`) and
leaves actions for the next body to join (`carried_out`). Microbatches are counted from the first one of this
body; earlier ones have negative numbers. The program that fills the pipeline carries nothing in; the program
that drains it carries nothing out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipefit.errors import UsageError
from pipefit.schema.actions import (
    BACKGROUND,
    COLLECTIVE,
    MESSAGES,
    SENDS,
    SPLIT_BACKWARD,
    STATES,
    Action,
    Actions,
    Kind,
    Message,
    Placement,
    Subject,
    collective,
    message_of,
    message_partner,
    parse_action,
)
from pipefit.schema.devices import Member, Place, Share
from pipefit.texts import counted

# ---- Message order: a program ends under NCCL's rules, and every receive gets its own message
#
# NCCL ignores tags. It pairs the operations of two devices on one communicator first in, first out. Two
# paired sends never complete, nor does any later operation; a send that is paired with the receive of another
# message delivers the wrong data. Therefore each direction of a boundary between two devices is a `Channel`
# with a separate communicator:
#
#     start of a message      takes the next place in the queue of its channel; it is complete when the other
# end has
#                             started the operation at the same place
#     start of a collective   is complete when all its members have started it; collectives of the same
# members share a
#                             communicator, on which all of them must start the same ones in the same order
#     join                    holds the device until the start is complete: on the CPU it blocks the process,
# on a GPU
#                             it blocks every later computation and message of that device
#
# Every `Program` is checked at construction, and the transport chooses its process groups by the same
# `channel`, so a program that would hang is never launched. (PyTorch issue 132852 on tags, pull request
# 186173 on a communicator for each direction.)

_ORDERED = MESSAGES | COLLECTIVE


class Channel(NamedTuple):
    """The ordered messages from stage `sender` to stage `receiver` between devices `source` and `target`."""

    sender: int
    receiver: int
    source: int
    target: int


ChannelOf = Callable[[int, Action, Placement], Hashable | None]


def channel(device: int, action: Action, placement: Placement) -> Channel | None:
    """Return the channel of a send or receive on `device`.

    Returns None if both stages are on this device: no communicator is needed.
    """
    message = message_of(device, action, placement)
    sender = action.stage if action.kind in SENDS else action.neighbour
    source, target = message.source, message.target
    return None if source == target else Channel(sender, message.receiver, source, target)


def channels(actions: Actions, placement: Placement) -> tuple[Channel, ...]:
    """Return all channels that the actions use, in the order of creation on every worker."""
    result = {
        channel(device, action, placement)
        for device, own in enumerate(actions)
        for action in own
        if action.kind in MESSAGES and not action.wait
    }
    return tuple(sorted(name for name in result if name is not None))


def check_order(
    actions: Actions, placement: Placement, *, carried_in: Actions = (), channel_of: ChannelOf = channel
) -> None:
    """Check that the program ends and delivers every message, by following the actions of all devices.

    Takes one pass, linear in the number of actions: a device advances until a join holds it, and the start
    that completes an operation releases the devices that wait for it.

    Args:
        actions: of every device; every start has its join, and every message both ends.
        placement: the devices of every stage.
        carried_in: for every device, if any: starts of the previous body that this one joins.
        channel_of: returns the communicator of a message; pass another function to check another arrangement.

    Raises:
        UsageError: the program would hang, or a receive would get the data of another message; says which
            devices wait at
        which actions, and what to change.
    """
    _Follower(actions, placement, carried_in, channel_of).to_the_end()


# -------------------------------------------------------------------- queues


_Participant = tuple[
    int, int
]  # a device and one of its stages: a member of a collective, or an end of a queue


class _End(NamedTuple):
    """One end of a queue: a stage's sends in one direction, its receives, or its part in a collective."""

    queue: _Queue
    member: _Participant  # distinguishes the ends of the queue
    operation: Hashable  # equal for all ends that may be paired
    sends: bool | None  # None for a collective


@dataclass(slots=True)
class _Queue:
    """The ordered operations of one communicator."""

    size: int  # number of ends of an operation
    first: list[Action] = field(default_factory=list)  # the first start at each place
    ends: list[_End] = field(default_factory=list)  # the end that made that start
    started: list[int] = field(default_factory=list)  # number of ends that have started, by place
    places: dict[_Participant, int] = field(default_factory=dict)  # the place of each member's next start
    done: int = 0  # number of complete places
    waiting: list[int] = field(default_factory=list)  # devices that wait for this queue

    def start(self, end: _End, action: Action) -> int:
        """Add a start to the queue and return its place."""
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
        UsageError: they belong to different operations: they would hang, or mix their data.
    """
    if one_end.operation == other_end.operation and _content(one) == _content(other):
        return
    if one_end.sends is None:
        raise UsageError(_mixed(one, other))
    ends = [f"{action} of device {end.member[0]}" for end, action in ((one_end, one), (other_end, other))]
    raise UsageError(
        _clash(*ends) if one_end.sends is other_end.sends else _misdelivered(*ends, sends=one_end.sends)
    )


def _content(action: Action) -> tuple[int | None, tuple[int, int] | None]:
    """Return the microbatch and rows, which distinguish the operations of one queue."""
    return action.microbatch, action.part


def _clash(one: str, other: str) -> str:
    return (
        f"the program would hang: {one} and {other} use the same communicator, so neither completes; give "
        "each direction its own communicator"
    )


def _misdelivered(one: str, other: str, *, sends: bool) -> str:
    send, receive = (one, other) if sends else (other, one)
    return (
        f"{receive} would get the message of {send}, because messages of one direction arrive in the order "
        "of the sends: start the receives in the same order"
    )


def _mixed(first: Action, second: Action) -> str:
    return (
        f"{second} would be added to {first}, because all-reduces over the same stages match in the order "
        f"in which each stage starts them: start them in the same order on stages {first.stage} and "
        f"{second.stage}"
    )


# -------------------------------------------------------------------- devices


class _Follower:
    """Follows all devices of a program to their ends, or until they wait for each other."""

    def __init__(
        self, actions: Actions, placement: Placement, carried_in: Actions, channel_of: ChannelOf
    ) -> None:
        self._actions, self._placement, self._carried, self._channel_of = (
            actions,
            placement,
            carried_in,
            channel_of,
        )
        self._members = _members(actions, placement)
        self._queues: dict[Hashable, _Queue] = {}
        self._collectives: dict[Hashable, _Queue] = {}  # by operation
        self._ends: dict[tuple[object, ...], _End] = {}
        self._held: dict[int, tuple[Action, _Queue]] = {}  # device -> the join at which it waits
        self._free = list(range(len(actions)))

    def to_the_end(self) -> None:
        """Advance every device as far as possible.

        Raises:
            UsageError: a device does not reach its end.
        """
        open_starts = self._carried_in() if self._carried else [{} for _ in self._free]
        devices = [self._device(device, starts) for device, starts in enumerate(open_starts)]
        while self._free:
            next(devices[self._free.pop()], None)
        if self._held:
            raise UsageError(self._hangs())

    def _carried_in(self) -> list[_Starts]:
        """Return the open starts of every device from the previous body.

        A start is complete (place -1) if no other end starts in this body; else it has its place in the
        queue.
        """
        starts = ((n, a) for n, actions in enumerate(self._actions) for a in actions)
        here = {self._operation(n, a) for n, a in starts if a.kind in _ORDERED and not a.wait}
        result: list[_Starts] = []
        for device, actions in enumerate(self._carried):
            result.append({})
            for action in actions:
                if action.kind in _ORDERED:
                    end = self._end(device, action)
                    waits = self._operation(device, action) in here
                    result[device][action[:-1]] = end.queue, end.queue.start(end, action) if waits else -1
        return result

    def _operation(self, device: int, action: Action) -> Hashable:
        """Return the key that all starts of one operation share."""
        return self._end(device, action).operation, _content(action)

    def _device(self, device: int, open_starts: _Starts) -> Iterator[None]:
        """Follow one device through its actions; yield whenever a join holds it."""
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
        """Return the queue end at which `action` starts. Every message inside a device has a separate
        queue.
        """
        member = device, action.stage
        if action.kind in COLLECTIVE:
            operation: Hashable = collective(action)
            if operation not in self._collectives:
                counted = self._members[operation]
                self._collectives[operation] = self._queue(("sum", tuple(counted.values())), len(counted))
            end = _End(self._collectives[operation], self._members[operation][member], operation, sends=None)
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
        """Describe the devices that wait for each other, following each to the device that it waits for."""
        way: dict[int, tuple[int, Action]] = {}  # device -> the other device, and its start that is missing
        device = min(self._held)
        while device in self._held and device not in way:
            way[device] = self._needed(device)
            device = way[device][0]
        passed = list(way)
        circle = passed[passed.index(device) :] if device in way else passed[-1:]
        stand = "; ".join(
            f"device {one} waits at {self._held[one][0]} until device {other} starts {start}"
            for one in circle
            for other, start in (way[one],)
        )
        return f"the program would hang: {stand}. {self._remedy([way[one] for one in circle])}"

    def _needed(self, device: int) -> tuple[int, Action]:
        """Return the device that `device` waits for, and its missing start."""
        _, queue = self._held[device]
        end, first = queue.ends[queue.done], queue.first[queue.done]
        if end.sends is None:
            members = self._members[end.operation].items()
            missing = (one for one, counted in members if queue.places.get(counted, 0) <= queue.done)
            other, stage = next(missing)
            return other, first._replace(stage=stage)
        message = message_of(end.member[0], first, self._placement)
        return message.target if end.sends else message.source, message_partner(first)

    def _remedy(self, needed: list[tuple[int, Action]]) -> str:
        other, start = needed[-1]
        if other not in self._held:
            return f"Device {other} ends without it: start {start} there, or remove it everywhere"
        orders = (f"start {start} before {self._held[other][0]}" for other, start in needed)
        return f"To end the wait, {', or '.join(orders)}"


_Starts = dict[
    tuple[object, ...], tuple[_Queue, int]
]  # open starts of a device, each with its queue and place


def _members(actions: Actions, placement: Placement) -> dict[Hashable, dict[_Participant, _Participant]]:
    """Return the members that start each collective, with the participants whose starts are counted.

    These are the devices (with stage -1), or, if a device takes part with several stages, the stages. An
    agreement has one member on every device.
    """
    result: dict[Hashable, dict[_Participant, None]] = {}
    for device, own in enumerate(actions):
        for action in own:
            if action.kind in COLLECTIVE:
                result.setdefault(collective(action), {})[device, action.stage] = None
    agreed = result.get(collective(Action(Kind.AGREE, 0)))
    if agreed is not None:
        known = {device for device, _ in agreed}
        for stage, devices in enumerate(placement):
            missing = [device for device in devices if device not in known]
            agreed.update(dict.fromkeys((device, stage) for device in missing))
            known.update(missing)
    counted = dict[Hashable, dict[_Participant, _Participant]]()
    for key, members in result.items():
        once = len({device for device, _ in members}) == len(members)
        counted[key] = {(device, n): (device, -1 if once else n) for device, n in sorted(members)}
    return counted


# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UncheckedProgram:
    """The actions of all or some devices in one step. `placement[stage]` are the devices that hold the
    stage.
    """

    placement: Placement
    microbatches: int
    actions: Actions  # by device of the cluster; empty for unused devices
    bundles: tuple[tuple[Subject, ...], ...] = ()
    carried_in: Actions = ()  # by device, or empty: starts of the previous body that this one joins
    carried_out: Actions = ()  # by device, or empty: starts of this body that the next one joins

    @property
    def endless(self) -> bool:
        """True if this is part of an asynchronous schedule: microbatches may be in flight before and after
        it.
        """
        return bool(self.carried_in or self.carried_out)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.placement)

    def moved(self, action: Action) -> tuple[Subject, ...]:
        """Return the subjects that an OFFLOAD or RELOAD moves.

        Raises:
            UsageError: the action names no subject, or a bundle that the program does not have.
        """
        subject = action.subject
        if isinstance(subject, Subject):
            return (subject,)
        if subject is None or subject.number >= len(self.bundles):
            raise UsageError(
                f"{action} does not offload anything known: name a tensor, or one of "
                f"{counted(len(self.bundles), 'bundle')}"
            )
        return self.bundles[subject.number]

    def __repr__(self) -> str:
        """Return a one-line summary instead of thousands of actions."""
        actions = sum(map(len, self.actions))
        return (
            f"<{type(self).__name__}: {counted(actions, 'action')} on "
            f"{counted(len(self.actions), 'device')}, "
            f"{counted(self.microbatches, 'microbatch')}>"
        )

    def __str__(self) -> str:
        lines = [
            f"device {device}: {' '.join(map(str, actions))}" for device, actions in enumerate(self.actions)
        ]
        lines += [
            f"bundle {number}: {' '.join(map(str, bundle))}" for number, bundle in enumerate(self.bundles)
        ]
        for name, carried in (("carried in", self.carried_in), ("carried out", self.carried_out)):
            lines += [
                f"{name} {device}: {' '.join(map(str, starts))}" for device, starts in enumerate(carried)
            ]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Program(UncheckedProgram):
    """A checked program of all devices.

    Raises:
        UsageError: a stage has no device, an action is on the wrong device, carried starts do not match the
            devices, a WAIT
        precedes its start, a start or a message has no partner, or the message order would hang
            (`check_order`).
    """

    def __post_init__(self) -> None:
        if () in self.placement:
            raise UsageError(
                f"stage {self.placement.index(())} is not on any device: a program must place every stage"
            )
        for carried in (self.carried_in, self.carried_out):
            if len(carried) not in (0, len(self.actions)):
                raise UsageError(
                    f"starts are carried over on {counted(len(carried), 'device')}, but the program has "
                    f"{len(self.actions)}: give one line for each device, or none"
                )
        for device, actions in enumerate(self.actions):
            _check_device(device, actions, self)
        _check_messages(self)
        check_order(self.actions, self.placement, carried_in=self.carried_in)


# -------------------------------------------------------------------- text


def parse_program(text: str, *, placement: Placement, microbatches: int) -> Program:
    """Parse the text form of a program: a line of actions for each device, then bundles and carried starts.

    A message may name the other end even if only one device is possible.
    """
    result: dict[str, list[tuple[str, ...]]] = {
        "device": [],
        "bundle": [],
        "carried in": [],
        "carried out": [],
    }
    for line in filter(None, map(str.strip, text.splitlines())):
        head, colon, tail = line.partition(":")
        name = head.rstrip("0123456789 ")
        if not colon or name not in result:
            name, tail = "device", line
        result[name].append(tuple(tail.split()))

    def actions(name: str) -> Actions:
        return tuple(
            tuple(_normal(parse_action(word), placement) for word in words) for words in result[name]
        )

    return Program(
        placement=placement,
        microbatches=microbatches,
        actions=actions("device"),
        bundles=tuple(tuple(map(_subject, words)) for words in result["bundle"]),
        carried_in=actions("carried in"),
        carried_out=actions("carried out"),
    )


def _subject(word: str) -> Subject:
    layer, dot, what = word.partition(".")
    if not (dot and layer.isdigit() and (what.isdigit() or what in STATES)):
        raise UsageError(
            f"{word!r} is neither a saved tensor nor a state: a bundle lists them as layer and number, such "
            f"as 5.3, or as layer and one of {', '.join(STATES)}"
        )
    return Subject(int(layer), int(what) if what.isdigit() else what)


def _normal(action: Action, placement: Placement) -> Action:
    """Drop the name of a message's other end if only one device is possible."""
    if action.kind in MESSAGES and action.place is not None and 0 <= action.neighbour < len(placement):
        there = placement[action.neighbour]
        if len(there) == 1 and action.place == Place([Share(Member.device(there[0]), 1)]):
            return action._replace(place=None)
    return action


# -------------------------------------------------------------------- checks


_Which = tuple[
    int | None, tuple[int, int] | None
]  # key within the messages between two stages: microbatch and rows
_Start = tuple[object, ...]  # an action without its last field, `wait`


def _check_device(device: int, actions: Iterable[Action], program: Program) -> None:
    """Check that the actions are on the device's stages, and that each start is joined once.

    The join may be in the next body.
    """
    stages = {stage for stage, devices in enumerate(program.placement) if device in devices}
    open_starts = _carried_starts(program.carried_in, device)
    for action in actions:
        kind = action.kind
        if action.stage not in stages:
            raise UsageError(f"device {device} has action {action}, but does not hold stage {action.stage}")
        if action.wait:
            if open_starts.pop(action[:-1], None) is None:
                raise UsageError(
                    f"device {device}: {action} waits for nothing: {action.start} did not start before it"
                )
        elif kind in BACKGROUND or action.in_background:
            if action[:-1] in open_starts:
                raise UsageError(f"device {device}: {action} starts twice without a WAIT in between")
            open_starts[action[:-1]] = action
        elif kind in SPLIT_BACKWARD:
            _check_split(device, action, open_starts)
    left = _carried_starts(program.carried_out, device)
    never = sorted((str(start), start) for key, start in open_starts.items() if key not in left)
    if never:
        _, first = never[0]
        if first.kind is Kind.INPUT_GRADIENTS:
            raise UsageError(
                f"device {device}: {first} is half a backward: add {_other_half(first)} after it"
            )
        raise UsageError(f"device {device}: {first} never completes: add its WAIT")


def _carried_starts(carried: Actions, device: int) -> dict[_Start, Action]:
    """Return the starts that a device carries in or out, by their key."""
    return {start[:-1]: start for start in carried[device]} if carried else {}


def _other_half(action: Action) -> Action:
    return action._replace(kind=Kind.WEIGHT_GRADIENTS)


def _check_split(device: int, action: Action, open_starts: dict[_Start, Action]) -> None:
    """Check that a split backward has both parts: first the input gradients, then the weight gradients."""
    first = action._replace(kind=Kind.INPUT_GRADIENTS)
    if action.kind is Kind.INPUT_GRADIENTS:
        if first[:-1] in open_starts:
            raise UsageError(f"device {device}: {action} occurs twice")
        open_starts[first[:-1]] = first
    elif open_starts.pop(first[:-1], None) is None:
        raise UsageError(
            f"device {device}: {action} lacks gradients to start from: {first} must come before it"
        )


def _check_messages(program: Program) -> None:
    """Check that every send has its receive.

    In a repeating body, the partner may be in the previous or next body, so microbatches are compared modulo
    those of a body. In other parts of an asynchronous schedule, carried messages may have their partner in
    another part.
    """
    repeats = program.endless and _repeats(program)
    placement, streams = program.placement, dict[Message, dict[_Which, tuple[int, Action]]]()
    elsewhere = set() if repeats else _carried(program)
    for device, actions in enumerate(program.actions):
        ends: dict[tuple[object, ...], tuple[dict[_Which, tuple[int, Action]], int]] = {}
        for action in actions:
            kind, stage, microbatch, _, _, place, part, wait = action
            if wait or kind not in MESSAGES:
                continue
            if (kind, stage, place) not in ends:
                message = message_of(device, action, placement)._replace(microbatch=None, part=None)
                ends[kind, stage, place] = streams.setdefault(message, {}), 1 if kind in SENDS else -1
            stream, sign = ends[kind, stage, place]
            which = (
                microbatch % program.microbatches if repeats and microbatch is not None else microbatch,
                part,
            )
            stream[which] = stream[which][0] + sign if which in stream else sign, action
    for message, stream in streams.items():
        for (microbatch, part), (count, action) in stream.items():
            if count and message._replace(microbatch=microbatch, part=part) not in elsewhere:
                raise UsageError(f"{action} lacks its partner {_partner(action, message, placement)}")


def _partner(action: Action, message: Message, placement: Placement) -> Action:
    """Return the other end of a message, as written on its device."""
    partner = message_partner(action)
    if len(placement[action.stage]) == 1:
        return partner
    here = message.source if action.kind in SENDS else message.target
    return partner._replace(place=Place([Share(Member.device(here), 1)]))


def _repeats(program: Program) -> bool:
    """Return whether the program can follow itself.

    Its carried-out starts are then its carried-in starts, one body later.
    """
    return tuple(map(set, program.carried_in)) == tuple(
        {shifted(start, -program.microbatches) for start in starts} for starts in program.carried_out
    )


def _carried(program: Program) -> set[Message]:
    """Return the messages with an end that the previous program started or that the next program joins."""
    return {
        message_of(device, action, program.placement)
        for starts in (program.carried_in, program.carried_out)
        for device, actions in enumerate(starts)
        for action in actions
        if action.kind in MESSAGES
    }


# -------------------------------------------------------------------- one program after the other


def shifted(action: Action, by: int) -> Action:
    """Return the action with its microbatch number increased by `by`."""
    if not by or action.microbatch is None:
        return action
    return Action(action.kind, action.stage, action.microbatch + by, *action[3:])


def in_a_row(programs: Iterable[UncheckedProgram], device: int) -> tuple[Action, ...]:
    """Return the concatenated actions of a device in these parts of an asynchronous schedule."""
    result, entered = list[Action](), 0
    for program in programs:
        result += (shifted(action, entered) for action in program.actions[device])
        entered += program.microbatches
    return tuple(result)


def joined(programs: Sequence[Program]) -> Program:
    """Concatenate these parts of an asynchronous schedule to one program."""
    entered = sum(program.microbatches for program in programs)
    left = entered - programs[-1].microbatches
    return Program(
        placement=programs[0].placement,
        microbatches=entered,
        actions=tuple(in_a_row(programs, device) for device in range(len(programs[0].actions))),
        bundles=programs[0].bundles,
        carried_in=programs[0].carried_in,
        carried_out=tuple(
            tuple(shifted(start, left) for start in starts) for starts in programs[-1].carried_out
        ),
    )
