"""The program: for every device, the ordered list of all it does in one step. Simulator, dry run and runtime read it.

An action has a text form that parses back. The number in front is the stage, the one behind the kind the microbatch:

    0LOAD3               copy microbatch 3's data onto the device; done when it returns
    2RECV_F0             post the receive of stage 2's inputs           2WAIT_RECV_F0       they are here
    2F0                  forward of the whole stage                     2F0[3:6]            of layers 3, 4 and 5 only
    2N0                  forward that keeps its inputs at most          2R0[3:6]            forward again, from them
    2B0                  backward of what F or R kept                   2B0[3:6]
    2SEND_F0             start sending stage 2's outputs to stage 3     2WAIT_SEND_F0       done: the buffer may go
    2SEND_B0, 2RECV_B0   the same for gradients: from stage 2 to stage 1, and into stage 2 from stage 3
    2OFFLOAD0[5.3]@host  start copying layer 5's saved tensor 3 away    2WAIT_OFFLOAD0[5.3]@host   device copy freed
    2RELOAD0[5.3]@host   allocate, and start copying it back            2WAIT_RELOAD0[5.3]@host    it is back
    2OFFLOAD0[5.3]@device3*2+device4*1    striped over two peers, two parts and one
    0REDUCE[1.shared]    start summing the gradients of shared parameter 1 over the stages that have a copy; WAIT joins
    0AGREE               start telling all stages what this one knows of its gradients: norms, overflow; WAIT joins
    2STEP                optimizer step; gradients are freed

One mechanism for all that takes time in the background: an action starts it, and the same action with WAIT joins it.
What a start needs on its device is allocated when it starts (receives, reloads); what a wait makes superfluous is freed
when it returns (sends, offloads). So memory over time is a function of the program alone, not of anyone's speed.

A subject in brackets may also be `5.parameters`, `5.gradients` or `5.optimizer`. Under asynchronous schedules a stage
has a STEP per microbatch, with its number (`2STEP0`); a backward uses the weights that its forward used.
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


class Kind(StrEnum):
    """What an action does; the value is its name in the text form."""

    LOAD = "LOAD"
    FORWARD = "F"
    FORWARD_ONLY = "N"
    RECOMPUTE = "R"
    BACKWARD = "B"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    OFFLOAD = "OFFLOAD"
    RELOAD = "RELOAD"
    REDUCE = "REDUCE"
    AGREE = "AGREE"
    STEP = "STEP"


COMPUTE = frozenset({Kind.FORWARD, Kind.FORWARD_ONLY, Kind.RECOMPUTE, Kind.BACKWARD, Kind.STEP})
FORWARDS = frozenset({Kind.FORWARD, Kind.FORWARD_ONLY})
COLLECTIVE = frozenset({Kind.REDUCE, Kind.AGREE})
MESSAGES = frozenset({Kind.SEND_FORWARD, Kind.RECV_FORWARD, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD})
BACKGROUND = MESSAGES | COLLECTIVE | {Kind.OFFLOAD, Kind.RELOAD}


class Subject(NamedTuple):
    """What an action is about: saved tensor number `what` of a layer, its `parameters`, `gradients` or `optimizer`, or,
    with `shared`, the shared parameter of that number.
    """

    layer: int
    what: int | str

    def __str__(self) -> str:
        return f"{self.layer}.{self.what}"


class Action(NamedTuple):
    """One thing a device does. `layers` is a half-open range, None the whole stage; `wait` joins an earlier start."""

    kind: Kind
    stage: int
    microbatch: int | None = None
    layers: tuple[int, int] | None = None
    subject: Subject | None = None
    place: str | None = None
    wait: bool = False

    def __str__(self) -> str:
        text = f"{self.stage}{'WAIT_' if self.wait else ''}{self.kind.value}"
        if self.microbatch is not None:
            text += str(self.microbatch)
        if self.layers is not None:
            text += f"[{self.layers[0]}:{self.layers[1]}]"
        elif self.subject is not None:
            text += f"[{self.subject.layer}.{self.subject.what}]"
        return text if self.place is None else f"{text}@{self.place}"

    @property
    def start(self) -> Action:
        """The action that this WAIT joins."""
        return self._replace(wait=False)

    @property
    def join(self) -> Action:
        """The WAIT that joins this action."""
        return self._replace(wait=True)


_KINDS = "|".join(sorted((kind.value for kind in Kind), key=len, reverse=True))
_ACTION = re.compile(
    rf"(?P<stage>\d+)(?P<wait>WAIT_)?(?P<kind>{_KINDS})(?P<microbatch>\d+)?"
    r"(?:\[(?:(?P<start>\d+):(?P<stop>\d+)|(?P<layer>\d+)\.(?P<what>\d+|parameters|gradients|optimizer|shared))\])?"
    r"(?:@(?P<place>[a-z]+\d*(?:\*\d+)?(?:\+[a-z]+\d+\*\d+)*))?"
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
    what = part["what"]
    return Action(
        kind=Kind(part["kind"]),
        stage=int(part["stage"]),
        microbatch=None if part["microbatch"] is None else int(part["microbatch"]),
        layers=None if part["start"] is None else (int(part["start"]), int(part["stop"])),
        subject=None if what is None else Subject(int(part["layer"]), int(what) if what.isdigit() else what),
        place=part["place"],
        wait=part["wait"] is not None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What every device does in one step. `placement[stage]` is the device that holds the stage.

    Raises:
        UsageError: an action on the wrong device, a WAIT before its start, a start or a message without its partner.
    """

    placement: tuple[int, ...]
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]  # per device of the cluster, empty for unused devices

    def __post_init__(self) -> None:
        for device, actions in enumerate(self.actions):
            _check_device(device, actions, self.placement)
        _check_messages(self.actions, last=len(self.placement) - 1)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.placement)

    def __str__(self) -> str:
        return "\n".join(
            f"device {device}: {' '.join(map(str, actions))}" for device, actions in enumerate(self.actions)
        )


def parse_program(text: str, *, placement: tuple[int, ...], microbatches: int) -> Program:
    """The program that `str(program)` wrote: a line for each device, its actions separated by blanks."""
    lines = [line.partition(":") for line in text.splitlines() if line.strip()]
    actions = tuple(tuple(parse_action(word) for word in _words(head, colon, tail)) for head, colon, tail in lines)
    return Program(placement=placement, microbatches=microbatches, actions=actions)


def _words(head: str, colon: str, tail: str) -> list[str]:
    return (tail if colon and head.strip().startswith("device") else head + colon + tail).split()


def _check_device(device: int, actions: Iterable[Action], placement: tuple[int, ...]) -> None:
    open_starts: set[Action] = set()
    for action in actions:
        if action.stage >= len(placement) or placement[action.stage] != device:
            raise UsageError(f"device {device} has action {action}, but stage {action.stage} is not on it")
        if action.wait:
            if action.start not in open_starts:
                raise UsageError(f"device {device}: {action} joins nothing: {action.start} did not start before it")
            open_starts.remove(action.start)
        elif action.kind in BACKGROUND:
            if action in open_starts:
                raise UsageError(f"device {device}: {action} starts twice before it is joined")
            open_starts.add(action)
    if open_starts:
        raise UsageError(f"device {device}: {min(map(str, open_starts))} is never joined: add its WAIT")


def _check_messages(devices: tuple[tuple[Action, ...], ...], last: int) -> None:
    starts = Counter(
        action for actions in devices for action in actions if action.kind in BACKGROUND and not action.wait
    )
    for action, count in starts.items():
        partner = message_partner(action)
        if partner is not None and not 0 <= partner.stage <= last:
            raise UsageError(f"{action} is for stage {partner.stage}, which does not exist")
        if partner is not None and starts[partner] != count:
            raise UsageError(f"{action} has no partner: {partner} is missing")


def message_partner(action: Action) -> Action | None:
    """The other end of a send or receive; None for other actions."""
    match action.kind:
        case Kind.SEND_FORWARD:
            return action._replace(kind=Kind.RECV_FORWARD, stage=action.stage + 1)
        case Kind.RECV_FORWARD:
            return action._replace(kind=Kind.SEND_FORWARD, stage=action.stage - 1)
        case Kind.SEND_BACKWARD:
            return action._replace(kind=Kind.RECV_BACKWARD, stage=action.stage - 1)
        case Kind.RECV_BACKWARD:
            return action._replace(kind=Kind.SEND_BACKWARD, stage=action.stage + 1)
        case _:
            return None
