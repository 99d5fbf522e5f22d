"""A program as the clock reads it: for every action a code, its seconds, and the transfer that it starts or joins.

Wires are numbered. A transfer has parts, each with its own seconds and wires; a striped one has several. Copies of one
device queue in two streams, one each way; messages do not queue but on wires.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from pipefit.cluster import Cluster
from pipefit.program import COLLECTIVE, MESSAGES, Action, Kind, Program, Subject
from pipefit.simulator.costs import StageCosts
from pipefit.simulator.places import parts

NOTHING, COMPUTE, POST, COPY, JOIN = range(5)

Parts = tuple[tuple[float, tuple[int, ...]], ...]  # seconds and wires


class Lending(NamedTuple):
    """An action that borrows from `lender` (when it begins) or, with negative bytes, gives back (when it ends)."""

    device: int
    position: int
    lender: int
    nbytes: int


class DeviceScript(NamedTuple):
    """The actions of one device."""

    codes: list[int]
    seconds: list[float]
    transfers: list[int]


class Script:
    """All devices, and the transfers among them."""

    def __init__(self, program: Program, cluster: Cluster, stages: list[StageCosts]) -> None:
        self._placement, self._cluster, self._stages = program.placement, cluster, stages
        self._wires: dict[str, int] = {}
        self._messages: dict[tuple[Kind, int, int | None], int] = {}
        self._collectives: dict[tuple[Kind, Subject | None], int] = {}
        self._members = _members(program)
        self._route = cache(cluster.route)
        self._message_parts = cache(self._new_message_parts)
        self._copy_parts = cache(self._new_copy_parts)
        self._shares = cache(self._new_shares)
        self.parts: list[Parts] = []
        self.streams: list[int] = []  # of a copy: 2 * device outward, 2 * device + 1 inward; of others -1
        self.ends: list[int] = []  # how many devices must be ready for it
        self.lendings: list[Lending] = []
        self.devices = [self._read(device, actions) for device, actions in enumerate(program.actions)]

    @property
    def wires(self) -> int:
        """How many wires are in use."""
        return len(self._wires)

    def _read(self, device: int, actions: tuple[Action, ...]) -> DeviceScript:
        """Every action of one device, resolved."""
        script = DeviceScript([], [], [])
        codes, seconds, transfers = script
        started: dict[tuple[object, ...], int] = {}
        for position, action in enumerate(actions):
            code, duration, transfer = NOTHING, 0.0, -1
            if action.wait:
                code, transfer = JOIN, started.pop(action[:6])
                if action.kind is Kind.RELOAD:
                    self._lend(device, position, action, -1)
            elif action.kind in MESSAGES or action.kind in COLLECTIVE:
                code, transfer = POST, self._message(action) if action.kind in MESSAGES else self._collective(action)
                started[action[:6]] = transfer
            elif action.kind is Kind.OFFLOAD or action.kind is Kind.RELOAD:
                code, transfer = COPY, self._copy(device, action)
                started[action[:6]] = transfer
                if action.kind is Kind.OFFLOAD:
                    self._lend(device, position, action, 1)
            elif action.kind is not Kind.LOAD:
                code, duration = COMPUTE, self._compute_seconds(action)
            codes.append(code)
            seconds.append(duration)
            transfers.append(transfer)
        return script

    def _compute_seconds(self, action: Action) -> float:
        stage = self._stages[action.stage]
        if action.kind is Kind.STEP:
            return stage.update_seconds
        first, end = action.layers or (stage.start, stage.stop)
        return stage.backward_seconds(first, end) if action.kind is Kind.BACKWARD else stage.forward_seconds(first, end)

    def _add(self, parts: Parts, *, ends: int, stream: int = -1) -> int:
        """The number of a new transfer."""
        self.parts.append(parts)
        self.streams.append(stream)
        self.ends.append(ends)
        return len(self.parts) - 1

    # ---------------------------------------------------------------- messages

    def _message(self, action: Action) -> int:
        """The number of the message that this send or receive is one end of."""
        kind, stage, microbatch = action[:3]
        if kind is Kind.SEND_FORWARD:
            kind, stage = Kind.RECV_FORWARD, stage + 1
        elif kind is Kind.SEND_BACKWARD:
            kind, stage = Kind.RECV_BACKWARD, stage - 1
        number = self._messages.get((kind, stage, microbatch))
        if number is None:
            number = self._messages[kind, stage, microbatch] = self._add(self._message_parts(kind, stage), ends=2)
        return number

    def _new_message_parts(self, kind: Kind, receiver: int) -> Parts:
        """What a message into stage `receiver` takes; nothing between stages of one device."""
        memory, sender = self._stages[receiver].memory, receiver + (-1 if kind is Kind.RECV_FORWARD else 1)
        source, target = self._placement[sender], self._placement[receiver]
        nbytes = memory.input_bytes if kind is Kind.RECV_FORWARD else memory.output_gradient_bytes
        return () if source == target else (self._part(f"device{source}", f"device{target}", nbytes),)

    # ---------------------------------------------------------------- collectives

    def _collective(self, action: Action) -> int:
        """The number of the sum or exchange that this stage takes part in."""
        key = action.kind, action.subject
        number = self._collectives.get(key)
        if number is None:
            members = self._members[key]
            nbytes = self._stages[action.stage].memory.collective_bytes(action)
            number = self._collectives[key] = self._add(self._ring(members, nbytes), ends=len(members))
        return number

    def _ring(self, members: list[int], nbytes: int) -> Parts:
        """A ring all-reduce: every member sends 2 (k-1)/k of the bytes to the next one."""
        share = 2 * (len(members) - 1) * nbytes // len(members)
        ring = zip(members, members[1:] + members[:1], strict=True)
        return tuple(self._part(f"device{a}", f"device{b}", share) for a, b in ring if a != b)

    # ---------------------------------------------------------------- copies

    def _copy(self, device: int, action: Action) -> int:
        outward = action.kind is Kind.OFFLOAD
        copied = self._copy_parts(device, outward, self._nbytes(action), action.place)
        return self._add(copied, ends=1, stream=2 * device + (not outward))

    def _new_copy_parts(self, device: int, outward: bool, nbytes: int, place: str | None) -> Parts:
        here = f"device{device}"
        shares = self._shares(device, nbytes, place)
        return tuple(self._part(*((here, there) if outward else (there, here)), share) for there, share in shares)

    def _new_shares(self, device: int, nbytes: int, place: str | None) -> tuple[tuple[str, int], ...]:
        return parts(place, nbytes, device=device, cluster=self._cluster)

    def _lend(self, device: int, position: int, action: Action, sign: int) -> None:
        if action.place is not None and "device" in action.place:
            for member, nbytes in self._shares(device, self._nbytes(action), action.place):
                if member.startswith("device"):
                    self.lendings.append(Lending(device, position, int(member[6:]), sign * nbytes))

    def _nbytes(self, action: Action) -> int:
        return self._stages[action.stage].storages[action.subject].nbytes  # type: ignore[index]  # the ledger saw it

    def _part(self, source: str, target: str, nbytes: int) -> tuple[float, tuple[int, ...]]:
        route = self._route(source, target)
        return route.seconds(nbytes), tuple(self._wires.setdefault(wire, len(self._wires)) for wire in route.wires)


def _members(program: Program) -> dict[tuple[Kind, Subject | None], list[int]]:
    """The devices of every collective."""
    found: dict[tuple[Kind, Subject | None], list[int]] = {}
    for device, actions in enumerate(program.actions):
        for action in actions:
            if action.kind in COLLECTIVE and not action.wait:
                found.setdefault((action.kind, action.subject), []).append(device)
    return found
