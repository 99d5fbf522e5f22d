"""The program: for every device, the ordered list of all it does in one step. Simulator, dry run and runtime follow it.

An action has a text form that can be parsed. The first number is the stage, the one after the kind the microbatch:

    0LOAD3               copy microbatch 3's data to the device; complete when it returns
    2RECV_F0             start receiving stage 2's inputs               2WAIT_RECV_F0       they have arrived
    2F0                  forward of the whole stage                     2F0[3:6]            of layers 3, 4 and 5 only
    2N0                  forward that keeps nothing but its inputs      2N0[3:6]
    2R0                  forward again, from those inputs               2R0[3:6]
    2B0                  backward, from what F or R has saved           2B0[3:6]
    2I0, 2W0             the two parts of a split backward: gradients of the inputs, gradients of the weights
    2SEND_F0             start sending stage 2's outputs to stage 3     2WAIT_SEND_F0       sent: the buffer is freed
    2SEND_B0, 2RECV_B0   the same for gradients: from stage 2 to stage 1, and into stage 2 from stage 3
    2SEND_F0{0:2}@device5    only rows 0 and 1 of the microbatch, to one device of several
    2GATHER_F0           start exchanging rows, so that every device of the stage has the whole inputs; WAIT joins
    2OFFLOAD0[5.3]@host  start copying layer 5's saved tensor 3 away    2WAIT_OFFLOAD0[5.3]@host   device copy freed
    2RELOAD0[5.3]@host   allocate, and start copying it back            2WAIT_RELOAD0[5.3]@host    it is back
    2OFFLOAD0[5.3]@device3*2+device4*1    striped over two peers, two parts and one
    2OFFLOAD0#1@host     the saved tensors of the program's bundle 1, together
    0REDUCE[1.shared]    start summing the gradients of shared parameter 1 over the stages that have a copy; WAIT joins
    0AGREE               start exchanging norms of gradients and overflows between all stages; WAIT joins
    2STEP                optimizer step; gradients are freed            2STEP3              asynchronous: after one

Everything that runs in the background has one mechanism: an action starts it, and the same action with WAIT joins it.
Receives and reloads allocate memory when they start; sends and offloads free memory when they are joined. So what is
allocated at which action depends on the program alone, and not on the speed of devices and links.

A subject in brackets may also be `5.parameters`, `5.gradients`, `5.optimizer` or `5.versions`. The other end of a
message is named only where the neighbouring stage is on several devices. A program may be the body of an
endless schedule, and then join actions that the body before it has started: these are `carried_in`. Those that it
leaves to the next body to join are `carried_out`. Microbatches are then counted from the first one of this body, and
earlier ones have negative numbers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from pipefit.errors import UsageError
from pipefit.places import Member, Place, Share, parse_place


class Kind(StrEnum):
    """What an action does; the value is its name in the text form."""

    LOAD = "LOAD"
    FORWARD = "F"
    FORWARD_ONLY = "N"
    RECOMPUTE = "R"
    BACKWARD = "B"
    INPUT_GRADIENTS = "I"
    WEIGHT_GRADIENTS = "W"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    GATHER_FORWARD = "GATHER_F"
    OFFLOAD = "OFFLOAD"
    RELOAD = "RELOAD"
    REDUCE = "REDUCE"
    AGREE = "AGREE"
    STEP = "STEP"


FORWARDS = frozenset({Kind.FORWARD, Kind.FORWARD_ONLY})
SPLIT_BACKWARD = frozenset({Kind.INPUT_GRADIENTS, Kind.WEIGHT_GRADIENTS})
COMPUTE = FORWARDS | SPLIT_BACKWARD | {Kind.RECOMPUTE, Kind.BACKWARD, Kind.STEP}
COLLECTIVE = frozenset({Kind.REDUCE, Kind.AGREE, Kind.GATHER_FORWARD})
SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECEIVES = frozenset({Kind.RECV_FORWARD, Kind.RECV_BACKWARD})
MESSAGES = SENDS | RECEIVES
COPIES = frozenset({Kind.OFFLOAD, Kind.RELOAD})
BACKGROUND = MESSAGES | COLLECTIVE | COPIES
_TOWARDS_END = frozenset({Kind.SEND_FORWARD, Kind.RECV_BACKWARD})  # messages with the next stage


class Subject(NamedTuple):
    """What an action is about: saved tensor number `what` of a layer, or the layer's `parameters`, `gradients`,
    `optimizer` state or `versions`. With `shared` as `what`, `layer` is the number of a shared parameter.
    """

    layer: int
    what: int | str

    def __str__(self) -> str:
        return f"{self.layer}.{self.what}"


class Bundle(NamedTuple):
    """The saved tensors that one action moves together: entry `number` of the program's table."""

    number: int

    def __str__(self) -> str:
        return f"#{self.number}"


class Action(NamedTuple):
    """One thing a device does.

    `layers` is a half-open range; None is the whole stage. `place` is where a copy goes, or the other end of a message.
    `part` are the rows of the microbatch that a message carries; None is all of them. `wait` joins an earlier start.
    """

    kind: Kind
    stage: int
    microbatch: int | None = None
    layers: tuple[int, int] | None = None
    subject: Subject | Bundle | None = None
    place: Place | None = None
    part: tuple[int, int] | None = None
    wait: bool = False

    def __str__(self) -> str:
        text = f"{self.stage}{'WAIT_' if self.wait else ''}{self.kind.value}"
        if self.microbatch is not None:
            text += str(self.microbatch)
        if self.layers is not None:
            text += f"[{self.layers[0]}:{self.layers[1]}]"
        if self.subject is not None:
            text += str(self.subject) if isinstance(self.subject, Bundle) else f"[{self.subject}]"
        if self.part is not None:
            text += f"{{{self.part[0]}:{self.part[1]}}}"
        return text if self.place is None else f"{text}@{self.place}"

    @property
    def start(self) -> Action:
        """The action that this WAIT joins."""
        return self._replace(wait=False)

    @property
    def join(self) -> Action:
        """The WAIT that joins this action."""
        return self._replace(wait=True)

    @property
    def neighbour(self) -> int:
        """The stage at the other end of a message."""
        return self.stage + (1 if self.kind in _TOWARDS_END else -1)


_KINDS = "|".join(sorted((kind.value for kind in Kind), key=len, reverse=True))
_ACTION = re.compile(
    rf"(?P<stage>\d+)(?P<wait>WAIT_)?(?P<kind>{_KINDS})(?P<microbatch>-?\d+)?"
    r"(?:\[(?P<start>\d+):(?P<stop>\d+)\])?"
    r"(?:\[(?P<layer>\d+)\.(?P<what>\d+|parameters|gradients|optimizer|versions|shared)\]|\#(?P<bundle>\d+))?"
    r"(?:\{(?P<first>\d+):(?P<last>\d+)\})?"
    r"(?:@(?P<place>\S+))?"
)


@lru_cache(maxsize=1 << 16)
def parse_action(text: str) -> Action:
    """The action that `str(action)` wrote.

    Raises:
        UsageError: not an action.
    """
    match = _ACTION.fullmatch(text.strip())
    if not match:
        raise UsageError(
            f"{text!r} is not an action: write stage, kind and microbatch, such as 2F0, 2WAIT_RECV_F0 "
            "or 2OFFLOAD0[5.3]@host"
        )
    part = match.groupdict()
    return Action(
        kind=Kind(part["kind"]),
        stage=int(part["stage"]),
        microbatch=None if part["microbatch"] is None else int(part["microbatch"]),
        layers=None if part["start"] is None else (int(part["start"]), int(part["stop"])),
        subject=_subject(part["layer"], part["what"], part["bundle"]),
        place=None if part["place"] is None else parse_place(part["place"]),
        part=None if part["first"] is None else (int(part["first"]), int(part["last"])),
        wait=part["wait"] is not None,
    )


def _subject(layer: str | None, what: str | None, bundle: str | None) -> Subject | Bundle | None:
    if bundle is not None:
        return Bundle(int(bundle))
    if layer is None or what is None:
        return None
    return Subject(int(layer), int(what) if what.isdigit() else what)


Placement = tuple[tuple[int, ...], ...]
Actions = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What every device does in one step. `placement[stage]` are the devices that hold the stage.

    Raises:
        UsageError: an action on the wrong device, a WAIT before its start, a start or a message without its partner,
            or an order of messages in which devices would wait for each other for ever (`message_order`).
    """

    placement: Placement
    microbatches: int
    actions: Actions  # per device of the cluster, empty for unused devices
    bundles: tuple[tuple[Subject, ...], ...] = ()
    carried_in: Actions = ()  # per device, where there are any: starts of the body before that this one joins
    carried_out: Actions = ()  # starts of this one that the next body joins

    def __post_init__(self) -> None:
        for device, actions in enumerate(self.actions):
            _check_device(device, actions, self)
        _check_messages(self)
        from pipefit.message_order import check_order  # imported here because it needs the actions of this module

        check_order(self)

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
                f"{action} moves nothing that is known: name a tensor, or one of {len(self.bundles)} bundles"
            )
        return self.bundles[subject.number]

    def __str__(self) -> str:
        lines = [f"device {device}: {' '.join(map(str, actions))}" for device, actions in enumerate(self.actions)]
        lines += [f"bundle {number}: {' '.join(map(str, bundle))}" for number, bundle in enumerate(self.bundles)]
        for name, carried in (("carried in", self.carried_in), ("carried out", self.carried_out)):
            lines += [f"{name} {device}: {' '.join(map(str, starts))}" for device, starts in enumerate(carried)]
        return "\n".join(lines)


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
        bundles=tuple(tuple(map(_tensor, words)) for words in found["bundle"]),
        carried_in=actions("carried in"),
        carried_out=actions("carried out"),
    )


def _tensor(word: str) -> Subject:
    layer, dot, index = word.partition(".")
    if not (dot and layer.isdigit() and index.isdigit()):
        raise UsageError(f"{word!r} is no saved tensor: a bundle lists them as layer and number, such as 5.3")
    return Subject(int(layer), int(index))


def _normal(action: Action, placement: Placement) -> Action:
    """A message without the name of its other end, if only one is possible."""
    if action.kind in MESSAGES and action.place is not None and 0 <= action.neighbour < len(placement):
        there = placement[action.neighbour]
        if len(there) == 1 and action.place == Place([Share(Member.device(there[0]), 1)]):
            return action._replace(place=None)
    return action


# -------------------------------------------------------------------- checks


def _check_device(device: int, actions: Iterable[Action], program: Program) -> None:
    """Check that actions are of the device's stages, and that each start is joined once, here or in the next body."""
    placement = program.placement
    open_starts = set(program.carried_in[device]) if program.carried_in else set()
    for action in actions:
        if action.stage >= len(placement) or device not in placement[action.stage]:
            raise UsageError(f"device {device} has action {action}, but stage {action.stage} is not on it")
        if action.wait:
            if action.start not in open_starts:
                raise UsageError(f"device {device}: {action} joins nothing: {action.start} did not start before it")
            open_starts.remove(action.start)
        elif action.kind in BACKGROUND:
            if action in open_starts:
                raise UsageError(f"device {device}: {action} starts twice before it is joined")
            open_starts.add(action)
        elif action.kind in SPLIT_BACKWARD:
            _check_split(device, action, open_starts)
    open_starts -= set(program.carried_out[device]) if program.carried_out else set()
    if open_starts:
        first = min(open_starts, key=str)
        if first.kind is Kind.INPUT_GRADIENTS:
            raise UsageError(f"device {device}: {first} is half a backward: add {_other_half(first)} behind it")
        raise UsageError(f"device {device}: {first} is never joined: add its WAIT")


def _other_half(action: Action) -> Action:
    return action._replace(kind=Kind.WEIGHT_GRADIENTS)


def _check_split(device: int, action: Action, open_starts: set[Action]) -> None:
    """Check that a split backward has both parts: first the gradients of the inputs, then those of the weights."""
    first = action._replace(kind=Kind.INPUT_GRADIENTS)
    if action.kind is Kind.INPUT_GRADIENTS:
        if action in open_starts:
            raise UsageError(f"device {device}: {action} comes twice")
        open_starts.add(action)
    elif first in open_starts:
        open_starts.remove(first)
    else:
        raise UsageError(f"device {device}: {action} has no gradients to start from: {first} must come before it")


End = tuple[bool, int, int | None, tuple[int, int] | None, int, int]  # forward?, into stage, microbatch, rows, from, to


def message_end(device: int, action: Action, placement: Placement) -> End:
    """What a send and its receive have in common: direction, receiving stage, microbatch, rows, sender and receiver.

    Raises:
        UsageError: the stage at the other end does not exist, or is on several devices of which none is named.
    """
    kind, stage, microbatch, _, _, place, part, _ = action
    other = action.neighbour
    if not 0 <= other < len(placement):
        raise UsageError(f"{action} is for stage {other}, which does not exist")
    there = placement[other]
    if place is None:
        if len(there) > 1:
            raise UsageError(
                f"{action} does not say to which of devices {list(there)}: write {action}@device{there[0]}"
            )
        peer = there[0]
    else:
        peer = place.members[0].number or 0
        if len(there) == 1 or len(place) != 1 or peer not in there:
            raise UsageError(f"{action} names {place}: stage {other} is on {_devices(there)}")
    forward = kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
    if kind in SENDS:
        return forward, other, microbatch, part, device, peer
    return forward, stage, microbatch, part, peer, device


def _devices(devices: tuple[int, ...]) -> str:
    if len(devices) == 1:
        return f"device {devices[0]} alone, which is not named"
    return f"devices {', '.join(map(str, devices))}; name one of them"


def _check_messages(program: Program) -> None:
    """Check that every send has its receive.

    In the body of an endless schedule, the partner may be in the body before or after: numbers are compared modulo the
    microbatches of a body.
    """
    endless = bool(program.carried_in or program.carried_out)
    placement, balance, seen = program.placement, Counter[End](), dict[End, Action]()
    for device, actions in enumerate(program.actions):
        for action in actions:
            if action.kind in MESSAGES and not action.wait:
                end = message_end(device, action, placement)
                if endless and action.microbatch is not None:
                    end = (*end[:2], action.microbatch % program.microbatches, *end[3:])
                balance[end] += 1 if action.kind in SENDS else -1
                seen[end] = action
    for end, count in balance.items():
        if count:
            action = seen[end]
            partner = message_partner(action)
            if len(placement[action.stage]) > 1:
                here = end[4] if action.kind in SENDS else end[5]
                partner = partner._replace(place=Place([Share(Member.device(here), 1)]))
            raise UsageError(f"{action} has no partner: {partner} is missing")


_PARTNERS = {
    Kind.SEND_FORWARD: Kind.RECV_FORWARD,
    Kind.RECV_FORWARD: Kind.SEND_FORWARD,
    Kind.SEND_BACKWARD: Kind.RECV_BACKWARD,
    Kind.RECV_BACKWARD: Kind.SEND_BACKWARD,
}


def message_partner(action: Action) -> Action:
    """The other end of a send or receive, as it is written where the stages are on one device each."""
    return action._replace(kind=_PARTNERS[action.kind], stage=action.neighbour, place=None)
