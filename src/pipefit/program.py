"""The program: for every device, the ordered list of all it does in one step. Simulator, dry run and runtime follow it.

    device 0: 0LOAD0 0F0 0SEND_F0 0WAIT_SEND_F0 0RECV_B0 0WAIT_RECV_B0 0B0 0STEP
    device 1: 1RECV_F0 1WAIT_RECV_F0 1LOAD0 1F0 1B0 1SEND_B0 1WAIT_SEND_B0 1STEP

`pipefit.actions` explains the words. A program may be the body of an endless schedule, and then join actions that the
body before it has started: these are `carried_in`. Those that it leaves to the next body to join are `carried_out`.
Microbatches are then counted from the first one of this body, and earlier ones have negative numbers. The program that
fills the pipeline carries nothing in, the one that drains it nothing out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipefit.actions import (
    BACKGROUND,
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
    message_of,
    message_partner,
    parse_action,
)
from pipefit.errors import UsageError
from pipefit.message_order import check_order
from pipefit.places import Member, Place, Share
from pipefit.tables import Shown
from pipefit.texts import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class UncheckedProgram(Shown):
    """What every device does in one step, or some of them. `placement[stage]` are the devices that hold the stage."""

    placement: Placement
    microbatches: int
    actions: Actions  # per device of the cluster, empty for unused devices
    bundles: tuple[tuple[Subject, ...], ...] = ()
    carried_in: Actions = ()  # per device, where there are any: starts of the body before that this one joins
    carried_out: Actions = ()  # starts of this one that the next body joins

    @property
    def endless(self) -> bool:
        """Whether this is a part of an endless schedule: microbatches may be in flight before and after it."""
        return bool(self.carried_in or self.carried_out)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.placement)

    def moved(self, action: Action) -> tuple[Subject, ...]:
        """The subjects that an OFFLOAD or RELOAD moves.

        Raises:
            UsageError: it names none, or a bundle that the program does not have.
        """
        subject = action.subject
        if isinstance(subject, Subject):
            return (subject,)
        if subject is None or subject.number >= len(self.bundles):
            raise UsageError(
                f"{action} moves nothing that is known: name a tensor, or one of {counted(len(self.bundles), 'bundle')}"
            )
        return self.bundles[subject.number]

    def __repr__(self) -> str:
        """A line: all actions would be thousands."""
        actions = sum(map(len, self.actions))
        return (
            f"<{type(self).__name__}: {counted(actions, 'action')} on {counted(len(self.actions), 'device')}, "
            f"{counted(self.microbatches, 'microbatch')}>"
        )

    def __str__(self) -> str:
        lines = [f"device {device}: {' '.join(map(str, actions))}" for device, actions in enumerate(self.actions)]
        lines += [f"bundle {number}: {' '.join(map(str, bundle))}" for number, bundle in enumerate(self.bundles)]
        for name, carried in (("carried in", self.carried_in), ("carried out", self.carried_out)):
            lines += [f"{name} {device}: {' '.join(map(str, starts))}" for device, starts in enumerate(carried)]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Program(UncheckedProgram):
    """A program of all devices, that can be carried out.

    Raises:
        UsageError: a stage without a device, an action on the wrong one, starts carried over on other devices than
            there are, a WAIT before its start, a start or a message without its partner, or an order of messages in
            which devices would wait for each other without end (`message_order`).
    """

    def __post_init__(self) -> None:
        if () in self.placement:
            raise UsageError(f"stage {self.placement.index(())} is on no device: a program places every stage")
        for carried in (self.carried_in, self.carried_out):
            if len(carried) not in (0, len(self.actions)):
                raise UsageError(
                    f"starts are carried over on {counted(len(carried), 'device')}, and the program has "
                    f"{len(self.actions)}: it needs a line for each, or none"
                )
        for device, actions in enumerate(self.actions):
            _check_device(device, actions, self)
        _check_messages(self)
        check_order(self.actions, self.placement, carried_in=self.carried_in)


# -------------------------------------------------------------------- text


def parse_program(text: str, *, placement: Placement, microbatches: int) -> Program:
    """The program that `str(program)` wrote: a line of actions for each device, then bundles and carried starts.

    A message that names the only device at its other end is the same as one that names none.
    """
    found: dict[str, list[tuple[str, ...]]] = {"device": [], "bundle": [], "carried in": [], "carried out": []}
    for line in filter(None, map(str.strip, text.splitlines())):
        head, colon, tail = line.partition(":")
        name = head.rstrip("0123456789 ")
        if not colon or name not in found:
            name, tail = "device", line
        found[name].append(tuple(tail.split()))

    def actions(name: str) -> Actions:
        return tuple(tuple(_normal(parse_action(word), placement) for word in words) for words in found[name])

    return Program(
        placement=placement,
        microbatches=microbatches,
        actions=actions("device"),
        bundles=tuple(tuple(map(_subject, words)) for words in found["bundle"]),
        carried_in=actions("carried in"),
        carried_out=actions("carried out"),
    )


def _subject(word: str) -> Subject:
    layer, dot, what = word.partition(".")
    if not (dot and layer.isdigit() and (what.isdigit() or what in STATES)):
        raise UsageError(
            f"{word!r} is no saved tensor and no state: a bundle lists them as layer and number, such as 5.3, or as "
            f"layer and one of {', '.join(STATES)}"
        )
    return Subject(int(layer), int(what) if what.isdigit() else what)


def _normal(action: Action, placement: Placement) -> Action:
    """A message without the name of its other end, if only one is possible."""
    if action.kind in MESSAGES and action.place is not None and 0 <= action.neighbour < len(placement):
        there = placement[action.neighbour]
        if len(there) == 1 and action.place == Place([Share(Member.device(there[0]), 1)]):
            return action._replace(place=None)
    return action


# -------------------------------------------------------------------- checks


_Which = tuple[int | None, tuple[int, int] | None]  # of the messages between two stages: its microbatch and rows
_Start = tuple[object, ...]  # an action without the last field, which is whether it is a WAIT


def _check_device(device: int, actions: Iterable[Action], program: Program) -> None:
    """Check that actions are of the device's stages, and that each start is joined once, here or in the next body."""
    stages = {stage for stage, devices in enumerate(program.placement) if device in devices}
    open_starts = _carried_starts(program.carried_in, device)
    for action in actions:
        kind = action.kind
        if action.stage not in stages:
            raise UsageError(f"device {device} has action {action}, but stage {action.stage} is not on it")
        if action.wait:
            if open_starts.pop(action[:-1], None) is None:
                raise UsageError(f"device {device}: {action} joins nothing: {action.start} did not start before it")
        elif kind in BACKGROUND or action.in_background:
            if action[:-1] in open_starts:
                raise UsageError(f"device {device}: {action} starts twice before it is joined")
            open_starts[action[:-1]] = action
        elif kind in SPLIT_BACKWARD:
            _check_split(device, action, open_starts)
    left = _carried_starts(program.carried_out, device)
    never = sorted((str(start), start) for key, start in open_starts.items() if key not in left)
    if never:
        _, first = never[0]
        if first.kind is Kind.INPUT_GRADIENTS:
            raise UsageError(f"device {device}: {first} is half a backward: add {_other_half(first)} behind it")
        raise UsageError(f"device {device}: {first} is never joined: add its WAIT")


def _carried_starts(carried: Actions, device: int) -> dict[_Start, Action]:
    """What a device carries in or out, if anything."""
    return {start[:-1]: start for start in carried[device]} if carried else {}


def _other_half(action: Action) -> Action:
    return action._replace(kind=Kind.WEIGHT_GRADIENTS)


def _check_split(device: int, action: Action, open_starts: dict[_Start, Action]) -> None:
    """Check that a split backward has both parts: first the gradients of the inputs, then those of the weights."""
    first = action._replace(kind=Kind.INPUT_GRADIENTS)
    if action.kind is Kind.INPUT_GRADIENTS:
        if first[:-1] in open_starts:
            raise UsageError(f"device {device}: {action} comes twice")
        open_starts[first[:-1]] = first
    elif open_starts.pop(first[:-1], None) is None:
        raise UsageError(f"device {device}: {action} has no gradients to start from: {first} must come before it")


def _check_messages(program: Program) -> None:
    """Check that every send has its receive.

    In a body that repeats, the partner may be in the body before or after: numbers are compared modulo the microbatches
    of a body. Of other parts of an endless schedule, what is carried in or out may have its partner elsewhere.
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
            which = microbatch % program.microbatches if repeats and microbatch is not None else microbatch, part
            stream[which] = stream[which][0] + sign if which in stream else sign, action
    for message, stream in streams.items():
        for (microbatch, part), (count, action) in stream.items():
            if count and message._replace(microbatch=microbatch, part=part) not in elsewhere:
                raise UsageError(f"{action} has no partner: {_partner(action, message, placement)} is missing")


def _partner(action: Action, message: Message, placement: Placement) -> Action:
    """The other end of a message, as it is written on its device."""
    partner = message_partner(action)
    if len(placement[action.stage]) == 1:
        return partner
    here = message.source if action.kind in SENDS else message.target
    return partner._replace(place=Place([Share(Member.device(here), 1)]))


def _repeats(program: Program) -> bool:
    """Whether the program can follow itself: what it carries out is what it carries in, one body later."""
    return tuple(map(set, program.carried_in)) == tuple(
        {shifted(start, -program.microbatches) for start in starts} for starts in program.carried_out
    )


def _carried(program: Program) -> set[Message]:
    """The messages of which an end started in the program before, or is joined in the one behind."""
    return {
        message_of(device, action, program.placement)
        for starts in (program.carried_in, program.carried_out)
        for device, actions in enumerate(starts)
        for action in actions
        if action.kind in MESSAGES
    }


# -------------------------------------------------------------------- one program after the other


def shifted(action: Action, by: int) -> Action:
    """The action with its microbatch counted from one that comes `by` earlier."""
    if not by or action.microbatch is None:
        return action
    return Action(action.kind, action.stage, action.microbatch + by, *action[3:])


def in_a_row(programs: Iterable[UncheckedProgram], device: int) -> tuple[Action, ...]:
    """The actions of a device in these parts of an endless schedule, one after the other."""
    found, entered = list[Action](), 0
    for program in programs:
        found += (shifted(action, entered) for action in program.actions[device])
        entered += program.microbatches
    return tuple(found)


def joined(programs: Sequence[Program]) -> Program:
    """These parts of an endless schedule, one after the other, as one program."""
    entered = sum(program.microbatches for program in programs)
    left = entered - programs[-1].microbatches
    return Program(
        placement=programs[0].placement,
        microbatches=entered,
        actions=tuple(in_a_row(programs, device) for device in range(len(programs[0].actions))),
        bundles=programs[0].bundles,
        carried_in=programs[0].carried_in,
        carried_out=tuple(tuple(shifted(start, left) for start in starts) for starts in programs[-1].carried_out),
    )
