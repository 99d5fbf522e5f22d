"""Actions: the operations of a device within a step, and their text form.

`str(action)` and `parse_action` convert between an action and its text. The first number is the stage, the
number after the kind is the microbatch:

    0LOAD3               copy microbatch 3's data to the device; complete when it returns
    2RECV_F0             start receiving stage 2's inputs               2WAIT_RECV_F0       the inputs have
    arrived 2F0                  forward of the whole stage                     2F0[3:6]            of layers
    3, 4 and 5 only 2N0                  forward that keeps nothing but its inputs      2N0[3:6]
    2R0                  recompute the forward from those inputs        2R0[3:6]
    2B0                  backward, from the tensors that F or R saved   2B0[3:6]
    2I0, 2W0             the two parts of a split backward: gradients of the inputs, gradients of the weights
    2SEND_F0             start sending stage 2's outputs to stage 3     2WAIT_SEND_F0       sent: the buffer
    is freed 2SEND_B0, 2RECV_B0   the same for gradients: from stage 2 to stage 1, and into stage 2 from stage
    3 2SEND_F0{0:2}@device5    only rows 0 and 1 of the microbatch, to one of several devices
    2OFFLOAD0[5.3]@host  start offloading layer 5's saved tensor 3      2WAIT_OFFLOAD0[5.3]@host   device copy
    freed 2RELOAD0[5.3]@host   allocate, and start copying it back            2WAIT_RELOAD0[5.3]@host    it is
    back 2OFFLOAD0[5.3]@device3*2+device4*1    striped over two peers, two parts and one
    2OFFLOAD0#1@host     the saved tensors of the program's bundle 1, together
    2OFFLOAD0[5.versions]@host    the weights of layer 5 that the forward of microbatch 0 used
    0LOAD3{2:4}          only rows 2 and 3 of microbatch 3: the local batch of one of several replicas
    0REDUCE              start the all-reduce of the stage's parameter gradients over its replicas; WAIT joins
    0REDUCE@device0*1+device2*1    only over these of its devices, which hold the same tensor shard
    0UNSHARD[2:4]        start the all-gather of parameters from their shard owners; WAIT joins
    0RESHARD[2:4]        free the parameters of layers that other replicas own
    0REDUCE[1.shared]    start the all-reduce of shared parameter 1's gradients over its holders; WAIT joins
    0AGREE               start exchanging gradient norms and overflows between all stages; WAIT joins
    2STEP                optimizer step; gradients are freed            2STEP3              after microbatch 3
    of many 2STEP[5:7]           of layers 5 and 6 only
    2STEP[5:7]@host      start it on the host, which has the optimizer's state and gradients; WAIT joins
    2OFFLOAD[5.optimizer]@host    start offloading a state of layer 5; #1 names the states of bundle 1
    2STASH3              keep the weights for microbatches in flight and coming forwards: updates change a
    copy 2WAIT_STASH3         forwards use the updated copy from here on

Background work has one mechanism: an action starts it, and the same action with WAIT joins it. Receives and
reloads allocate memory when they start; sends and offloads free memory when they are joined. Thus the bytes
allocated at an action depend on the program alone, not on the speed of devices and links. A STASH allocates
the copy; weights are freed when no microbatch in flight and no coming forward needs them
(`memory.states`).

A subject in brackets may also be `5.parameters`, `5.gradients`, `5.optimizer` or `5.versions`. A message
names its other end only if the neighbouring stage is on several devices.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from pipefit.errors import UsageError
from pipefit.schema.devices import Place, parse_place
from pipefit.texts import shortened
from pipefit.units import WHOLE


class Kind(StrEnum):
    """Kinds of actions; the value is the name in the text form."""

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
    OFFLOAD = "OFFLOAD"
    RELOAD = "RELOAD"
    REDUCE = "REDUCE"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    AGREE = "AGREE"
    STEP = "STEP"
    STASH = "STASH"


FORWARDS = frozenset({Kind.FORWARD, Kind.FORWARD_ONLY})
SPLIT_BACKWARD = frozenset({Kind.INPUT_GRADIENTS, Kind.WEIGHT_GRADIENTS})
COMPUTE = FORWARDS | SPLIT_BACKWARD | {Kind.RECOMPUTE, Kind.BACKWARD, Kind.STEP}
UPDATES = frozenset({Kind.STASH, Kind.STEP})
COLLECTIVE = frozenset({Kind.REDUCE, Kind.AGREE, Kind.UNSHARD})
SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECEIVES = frozenset({Kind.RECV_FORWARD, Kind.RECV_BACKWARD})
MESSAGES = SENDS | RECEIVES
OF_ROWS = MESSAGES | {Kind.LOAD}  # may carry a part of a microbatch's rows
COPIES = frozenset({Kind.OFFLOAD, Kind.RELOAD})
BACKGROUND = MESSAGES | COLLECTIVE | COPIES | {Kind.STASH}
STATES = ("parameters", "gradients", "optimizer", "versions")  # states of a layer
_TOWARDS_END = frozenset({Kind.SEND_FORWARD, Kind.RECV_BACKWARD})  # messages with the next stage


class Subject(NamedTuple):
    """The data that an action moves or reduces.

    Saved tensor number `what` of a layer, or the layer's `parameters`, `gradients`, `optimizer` state or
    `versions`. If `what` is `shared`, `layer` is the number of a shared parameter.
    """

    layer: int
    what: int | str

    def __str__(self) -> str:
        return f"{self.layer}.{self.what}"


class Bundle(NamedTuple):
    """Saved tensors or states that one action moves together: entry `number` of the program's table."""

    number: int

    def __str__(self) -> str:
        return f"#{self.number}"


class Action(NamedTuple):
    """One action of a device.

    `layers` is a half-open range; None means the whole stage. `place` is the target of a copy, the other end
    of a message, or the members of a collective if these are not all devices of the stages. `part` is the
    range of microbatch rows that a message or a LOAD carries; None means all rows. `wait` marks the join of
    an earlier start.
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
        kind, stage, microbatch, layers, subject, place, part, wait = self
        text = f"{stage}WAIT_{kind}" if wait else f"{stage}{kind}"
        if microbatch is not None:
            text += str(microbatch)
        if layers is not None:
            text += f"[{layers[0]}:{layers[1]}]"
        if subject is not None:
            text += str(subject) if isinstance(subject, Bundle) else f"[{subject}]"
        if part is not None:
            text += f"{{{part[0]}:{part[1]}}}"
        return text if place is None else f"{text}@{place}"

    @property
    def start(self) -> Action:
        """The action that this WAIT joins."""
        return Action(*self[:-1], False)

    @property
    def join(self) -> Action:
        """The WAIT that joins this action."""
        return Action(*self[:-1], True)

    @property
    def in_background(self) -> bool:
        """True if the action starts work that its WAIT joins; an update does if it runs at another place."""
        return self.kind in BACKGROUND or (self.kind is Kind.STEP and self.place is not None)

    @property
    def moves_state(self) -> bool:
        """True if the action moves a state, which belongs to no microbatch, instead of saved tensors."""
        return self.kind in COPIES and self.microbatch is None

    @property
    def neighbour(self) -> int:
        """The stage at the other end of a message."""
        return self.stage + (1 if self.kind in _TOWARDS_END else -1)


def collective(action: Action) -> Hashable:
    """Return a key that the starts of one collective share.

    It has the kind, the subject, the layers, the stage if all members are in one stage, and the members if
    the action names them.
    """
    kind, stage, _, layers, subject, place, *_ = action
    within = kind is Kind.UNSHARD or (kind is Kind.REDUCE and subject is None)
    return kind, subject, stage if within else None, layers, place


_KINDS = "|".join(sorted((kind.value for kind in Kind), key=len, reverse=True))
_ACTION = re.compile(
    rf"(?P<stage>{WHOLE})(?P<wait>WAIT_)?(?P<kind>{_KINDS})(?P<microbatch>-?{WHOLE})?"
    rf"(?:\[(?P<start>{WHOLE}):(?P<stop>{WHOLE})\])?"
    rf"(?:\[(?P<layer>{WHOLE})\.(?P<what>{WHOLE}|{'|'.join(STATES)}|shared)\]|\#(?P<bundle>{WHOLE}))?"
    rf"(?:\{{(?P<first>{WHOLE}):(?P<last>{WHOLE})\}})?"
    r"(?:@(?P<place>\S+))?"
)


@lru_cache(maxsize=1 << 16)
def parse_action(text: str) -> Action:
    """Parse the text form of an action.

    Raises:
        UsageError: the text is not an action.
    """
    match = _ACTION.fullmatch(text.strip())
    if not match:
        raise UsageError(
            f"{shortened(repr(text))} is not an action: write stage, kind and microbatch, such as 2F0, "
            "2WAIT_RECV_F0 "
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


# ---- The two ends of a message


Placement = tuple[tuple[int, ...], ...]  # the devices of every stage
Actions = tuple[tuple[Action, ...], ...]  # the ordered actions of every device


class Message(NamedTuple):
    """A message: the fields that a send and its receive share."""

    forward: bool  # True: outputs, sent to the next stage; False: gradients, sent to the previous stage
    receiver: int  # the receiving stage
    microbatch: int | None
    part: tuple[int, int] | None  # the rows; None means all rows
    source: int  # the sending device
    target: int  # the receiving device


def message_of(device: int, action: Action, placement: Placement) -> Message:
    """Return the message that a send or receive on `device` is one end of.

    Raises:
        UsageError: the stage at the other end does not exist, or is on several devices and the action names
            none.
    """
    kind, stage, microbatch, _, _, place, part, _ = action
    other = action.neighbour
    if not 0 <= other < len(placement):
        raise UsageError(f"{action} is for stage {other}, which does not exist")
    there = placement[other]
    if place is None:
        if len(there) > 1:
            raise UsageError(
                f"{action} needs one of the devices {list(there)}: write {action}@device{there[0]}"
            )
        peer = there[0]
    else:
        peer = place.members[0].number or 0
        if len(there) == 1 or len(place) != 1 or peer not in there:
            raise UsageError(f"{action} names {place}: stage {other} is on {_how_named(there)}")
    forward = kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
    if kind in SENDS:
        return Message(forward, other, microbatch, part, device, peer)
    return Message(forward, stage, microbatch, part, peer, device)


def _how_named(devices: tuple[int, ...]) -> str:
    """Describe the devices of a stage, and whether a message to the stage names one of them."""
    if len(devices) == 1:
        return f"device {devices[0]}, which needs no name"
    return f"devices {', '.join(map(str, devices))}; name one of them"


_PARTNERS = {
    Kind.SEND_FORWARD: Kind.RECV_FORWARD,
    Kind.RECV_FORWARD: Kind.SEND_FORWARD,
    Kind.SEND_BACKWARD: Kind.RECV_BACKWARD,
    Kind.RECV_BACKWARD: Kind.SEND_BACKWARD,
}


def message_partner(action: Action) -> Action:
    """Return the other end of a send or receive, as written if each of the two stages is on one device."""
    return action._replace(kind=_PARTNERS[action.kind], stage=action.neighbour, place=None)
