"""The rewriting that moves saved tensors away and back: an OFFLOAD after their forward, a RELOAD before their backward.

    F4 SEND_F4 OFFLOAD4#1  ...compute...  WAIT_SEND_F4 WAIT_OFFLOAD4#1    behind=1: one compute action hides the offload
    RELOAD4#1  ...compute...  WAIT_RECV_B4 WAIT_RELOAD4#1 B4              ahead=1: one compute action hides the reload

A reload that starts ahead of its backward stands before the waits of an earlier compute action, so that it also uses
the time in which the device waits for messages. If an offload could not end before its reload begins, neither is done.
`ahead` and `behind` count the forwards and backwards that the schedule orders, each as one, however many pieces it has.
This is the last rewriting, because an offload is joined after the send of the same storage.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipefit.actions import COMPUTE, FORWARDS, Action, Bundle, Kind, Subject
from pipefit.cost.storages import StageStorages
from pipefit.decisions import Decision, SavedTensors, What
from pipefit.errors import UsageError
from pipefit.plans import Plan

Bundles = tuple[tuple[Subject, ...], ...]


def bundles_of(plan: Plan) -> Bundles:
    """The saved tensors that move together, for every decision that moves more than one."""
    moved = (d.subject for d in plan.decisions if isinstance(d.subject, SavedTensors) and len(d.subject.tensors) > 1)
    return tuple(dict.fromkeys(_subjects(subject) for subject in moved))


def copied(actions: Sequence[Action], plan: Plan, bundles: Bundles) -> list[Action]:
    """One rank's actions with every decision to offload saved tensors carried out.

    Raises:
        UsageError: a decision moves something other than saved tensors, or tensors that are recomputed.
    """
    stages = {action.stage for action in actions}
    decisions = [d for d in plan.decisions if d.what is What.OFFLOAD and d.stage in stages]
    if not decisions:
        return list(actions)
    copies, storages = _Copies(actions), {stage: StageStorages.of(plan, stage) for stage in stages}
    for decision in decisions:
        users, subject = _users(storages[decision.stage], decision), _subject(decision, bundles)
        for microbatch in filter(decision.microbatches.__contains__, copies.microbatches(decision.stage)):
            copies.add(decision, microbatch, subject, users)
    return list(copies.merged())


class _Users(NamedTuple):
    """Who needs the storages that a decision moves once more.

    `last_saver` is the last layer that saves any of them, and `readers` are the layers that any of them is given to: a
    second forward that begins there starts from it.
    """

    last_saver: int
    readers: frozenset[int]


class _Copies:
    """A rank's actions, and the copies to insert before and after each of them."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self.actions = actions
        self.before: dict[int, list[Action]] = defaultdict(list)
        self.behind: dict[int, list[Action]] = defaultdict(list)
        self.units = _units(actions)
        self.ends = [last for _, last in self.units]
        self.computes: dict[int, dict[int, list[int]]] = defaultdict(dict)  # positions, by stage and microbatch
        self.sends: dict[tuple[int, int | None, bool], int] = {}  # of outputs, by stage, microbatch and whether a WAIT
        for number, (kind, stage, microbatch, *_, wait) in enumerate(actions):
            if kind in COMPUTE and microbatch is not None:
                self.computes[stage].setdefault(microbatch, []).append(number)
            elif kind is Kind.SEND_FORWARD:
                self.sends[stage, microbatch, wait] = number

    def add(self, decision: Decision, microbatch: int, subject: Subject | Bundle, users: _Users) -> None:
        """Insert the offload and the reload of one microbatch, unless the offload could not end before the reload.

        The offload starts behind the forward, or behind the send of its outputs, which may be in the same storage. It
        is joined behind the join of that send, and `decision.behind` units later or more. The reload is joined just
        before the backward, or the second forward, that needs it, and starts `decision.ahead` units earlier.
        """
        forward, user = self._positions(decision, microbatch, users)
        last, first = self._unit(forward) + decision.behind, self._unit(user) - decision.ahead
        if last >= first:
            return
        start = self.sends.get((decision.stage, microbatch, False), forward)
        freed = max(self.units[last][1], self.sends.get((decision.stage, microbatch, True), 0))
        begin = self._before_waiting(self.units[first][0]) if decision.ahead else user
        if freed >= begin:
            return
        offload = Action(Kind.OFFLOAD, decision.stage, microbatch, None, subject, decision.place)
        reload = Action(Kind.RELOAD, decision.stage, microbatch, None, subject, decision.place)
        self.behind[start].append(offload)
        self.behind[freed].append(offload.join)
        self.before[begin].append(reload)
        self.before[user].append(reload.join)

    def microbatches(self, stage: int) -> list[int]:
        """The microbatches of a stage, in rising order."""
        return sorted(self.computes[stage])

    def merged(self) -> Iterator[Action]:
        """The actions with the copies inserted."""
        for number, action in enumerate(self.actions):
            yield from self.before[number]
            yield action
            yield from self.behind[number]

    def _unit(self, position: int) -> int:
        """The number of the unit (`_units`) that a position is in."""
        return bisect_left(self.ends, position)

    def _positions(self, decision: Decision, microbatch: int, users: _Users) -> tuple[int, int]:
        """Where a stage's last forward is, and the first action after it that needs the moved tensors."""
        forward = user = -1
        for number in self.computes[decision.stage][microbatch]:
            action = self.actions[number]
            holds = action.layers is None or action.layers[0] <= users.last_saver < action.layers[1]
            if holds and action.kind in (Kind.FORWARD_ONLY, Kind.RECOMPUTE):
                raise UsageError(
                    f"{decision}: layer {users.last_saver} is recomputed for microbatch {microbatch}; do only one"
                )
            if action.kind in FORWARDS:
                forward = number
            starts = action.kind is Kind.RECOMPUTE and action.layers is not None and action.layers[0] in users.readers
            if user < 0 and (starts or (holds and action.kind is Kind.BACKWARD)):
                user = number
        return forward, user

    def _before_waiting(self, number: int) -> int:
        """The position before the waits and the load that a compute action needs."""
        while number and (self.actions[number - 1].wait or self.actions[number - 1].kind is Kind.LOAD):
            number -= 1
        return number


def _units(actions: Sequence[Action]) -> list[tuple[int, int]]:
    """First and last position of every forward and backward that the schedule orders, in all its pieces.

    A recomputation that stands before another unit belongs to it.
    """
    units: list[tuple[int, int]] = []
    current: object = None
    early: int | None = None
    for number, action in enumerate(actions):
        if action.kind is Kind.RECOMPUTE:
            early = number if early is None else early
        elif action.kind in COMPUTE and action.kind is not Kind.STEP:
            key = action.kind in FORWARDS, action.stage, action.microbatch
            first = units.pop()[0] if key == current else number if early is None else early
            units.append((first, number))
            current, early = key, None
    return units


def _subject(decision: Decision, bundles: Bundles) -> Subject | Bundle:
    """What the copies of a decision name: its saved tensor, or the bundle of all of them."""
    assert isinstance(decision.subject, SavedTensors)
    subjects = _subjects(decision.subject)
    return subjects[0] if len(subjects) == 1 else Bundle(bundles.index(subjects))


def _users(storages: StageStorages, decision: Decision) -> _Users:
    """The layers that need the storages of a decision.

    Raises:
        UsageError: the decision moves something other than saved tensors, or a tensor that the stage does not keep.
    """
    if not isinstance(decision.subject, SavedTensors):
        raise UsageError(f"{decision}: this can be written down, but it cannot be carried out yet")
    subjects = _subjects(decision.subject)
    moved = {storages.storage(subject) for subject in subjects}
    readers = (storages.start + n for n, layer in enumerate(storages.layers) if moved.intersection(layer.inputs))
    return _Users(max(saver for subject in subjects for saver in storages.savers(subject)), frozenset(readers))


def _subjects(moved: SavedTensors) -> tuple[Subject, ...]:
    return tuple(Subject(layer, index) for layer, index in moved.tensors)
