"""The pass that offloads saved tensors: an OFFLOAD after their forward, a RELOAD before their backward.

    F4 SEND_F4 OFFLOAD4#1  ...compute...  WAIT_SEND_F4 WAIT_OFFLOAD4#1    behind=1: one compute action hides
    the offload RELOAD4#1  ...compute...  WAIT_RECV_B4 WAIT_RELOAD4#1 B4              ahead=1: one compute
    action hides the reload

A reload that starts ahead of its backward precedes the waits of an earlier compute action, so it also uses
the time in which the device waits for messages. If an offload could not end before its reload begins, neither
is done. `ahead` and `behind` count the forwards and backwards that the schedule orders, each as one,
regardless of its pieces. This pass follows communication, because an offload is joined after the send of the
same storage.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import NamedTuple

from pipefit.errors import UsageError
from pipefit.memory import StageStorages
from pipefit.schema.actions import COMPUTE, FORWARDS, UPDATES, Action, Bundle, Kind, Subject
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Run, SavedTensors, State, StateKind, What
from pipefit.schema.devices import Member, Place, Share
from pipefit.schema.plan import Plan

# ---- Bundles: the subjects that one OFFLOAD or RELOAD moves together, in the table of a program

Bundles = tuple[tuple[Subject, ...], ...]


def bundles_of(plan: Plan) -> Bundles:
    """Return the bundles of all decisions that move more than one subject."""
    moved = (subjects for decision in plan.decisions for subjects in _moved(decision))
    return tuple(dict.fromkeys(subjects for subjects in moved if len(subjects) > 1))


def subjects_of(moved: SavedTensors | State) -> tuple[Subject, ...]:
    """Return the action subjects of saved tensors, or of a state of every layer."""
    if isinstance(moved, SavedTensors):
        return tuple(Subject(layer, index) for layer, index in moved.tensors)
    return of_layers(moved.start, moved.stop, moved.kind)


def of_layers(start: int, stop: int, kind: StateKind) -> tuple[Subject, ...]:
    """Return the subjects of a state of layers `start` to `stop - 1`."""
    return tuple(Subject(layer, kind) for layer in range(start, stop))


def moved_states(plan: Plan) -> list[Decision]:
    """Return the decisions that offload parameters or gradients."""
    offloads = (decision for decision in plan.decisions if decision.what is What.OFFLOAD)
    return [
        d for d in offloads if isinstance(d.subject, State) and d.subject.kind in ("parameters", "gradients")
    ]


def state_edges(plan: Plan, stage: int) -> list[int]:
    """Return the layers at which moved parameters, gradients or weight versions of a stage begin and end."""
    states = (d.subject for d in plan.decisions_of(stage, What.OFFLOAD) if isinstance(d.subject, State))
    return sorted({edge for run in states if run.kind != "optimizer" for edge in (run.start, run.stop)})


def named(subjects: tuple[Subject, ...], bundles: Bundles) -> Subject | Bundle:
    """Return the subject of an action that moves these subjects: the only one, or their bundle."""
    return subjects[0] if len(subjects) == 1 else Bundle(bundles.index(subjects))


def _moved(decision: Decision) -> Iterator[tuple[Subject, ...]]:
    """Yield the subjects that a decision's actions move.

    An update elsewhere moves gradients out and parameters back.
    """
    subject = decision.subject
    if isinstance(subject, Run):
        return
    if decision.what is What.UPDATE and isinstance(subject, State):
        yield of_layers(subject.start, subject.stop, "gradients")
        yield of_layers(subject.start, subject.stop, "parameters")
    else:
        yield subjects_of(subject)


# ---- Striping: a tensor that goes to several peers at once, in blocks that all end together
#
#     striped(cluster, 0)                      on a DGX-1: device1*1+device2*1+device3*2+device4*2
#     striped(cluster, 0, peers=[3, 4])        device3*1+device4*1
#
# Each block is proportional to the bandwidth of the link to its peer. If every peer has separate wires, and
# all links the same latency, no other blocks for the same peers end earlier. Peers in one switch share the
# device's own port: equal blocks are then as fast as a single one, and spread the lent memory. (MPress, D2D
# swap.)

_FINEST = 100  # rates are approximated by ratios of whole numbers with at most this denominator


def neighbours(cluster: Cluster, device: int) -> tuple[int, ...]:
    """Return the devices that a link joins directly with this one."""
    here = Member.device(device)
    joined = {member for link in cluster.links if here in link.members for member in link.members} - {here}
    return tuple(number for number in range(len(cluster.devices)) if Member.device(number) in joined)


def striped(cluster: Cluster, device: int, peers: Iterable[int] | None = None) -> Place:
    """Return the place to which a device moves a tensor over its links to all of these peers at once.

    Args:
        cluster: the cluster.
        device: the device that moves a tensor.
        peers: devices with a link to `device`; default: all of them.

    Raises:
        UsageError: no peers, one without a direct link, or a device that does not exist.
    """
    cluster.check(Member.device(device), "striping")
    near = neighbours(cluster, device)
    chosen = near if peers is None else tuple(dict.fromkeys(peers))
    far = [peer for peer in chosen if peer not in near]
    if far or not chosen:
        reached = ", ".join(map(str, near)) or "no other device"
        raise UsageError(
            f"device {device} of cluster {cluster.name!r} cannot stripe tensors over {far or 'no peers'}: "
            f"its links lead to {reached}; name some of those, or a host"
        )
    rates = [cluster.route(Member.device(device), Member.device(peer)).bytes_per_second for peer in chosen]
    return Place(Share(Member.device(peer), parts) for peer, parts in zip(chosen, _whole(rates), strict=True))


def _whole(rates: list[float]) -> list[int]:
    """Return the smallest whole numbers in the ratios of these rates."""
    quotients = [Fraction(rate / min(rates)).limit_denominator(_FINEST) for rate in rates]
    scale = lcm(*(quotient.denominator for quotient in quotients))
    numbers = [int(quotient * scale) for quotient in quotients]
    return [number // gcd(*numbers) for number in numbers]


# ---- Moves of saved tensors

Inserted = defaultdict[int, list[Action]]  # by position


class Absence(NamedTuple):
    """The absence of a tensor or state: its OFFLOAD, and the positions of the actions around it.

    The offload starts after `start` and is joined after `freed`. The reload starts before `back`, and is
    joined before the first of `users`, which need the memory again.
    """

    offload: Action
    start: int
    freed: int
    back: int
    users: tuple[int, ...]

    @property
    def reload(self) -> Action:
        """The action that starts the reload."""
        return Action(Kind.RELOAD, *self.offload[1:])


def copied(actions: Sequence[Action], plan: Plan, bundles: Bundles) -> list[Action]:
    """Return one rank's actions with every decision to offload saved tensors carried out.

    Raises:
        UsageError: a decision moves tensors that are recomputed.
    """
    timeline, stages = Timeline(actions), {action.stage for action in actions}
    decisions = [d for d in plan.decisions if isinstance(d.subject, SavedTensors) and d.stage in stages]
    moves = moves_of(timeline, decisions, plan, bundles)
    before, behind = inserted(moves)
    return [
        one for n, action in enumerate(actions) for one in (*before.get(n, ()), action, *behind.get(n, ()))
    ]


def inserted(moves: Sequence[Absence]) -> tuple[Inserted, Inserted]:
    """Return the copies of all moves to insert before, and after, the action at each position."""
    before: Inserted = defaultdict(list)
    behind: Inserted = defaultdict(list)
    for move in moves:
        behind[move.start].append(move.offload)
        behind[move.freed].append(move.offload.join)
        before[move.back].append(move.reload)
        before[move.users[0]].append(move.reload.join)
    return before, behind


def moves_of(
    timeline: Timeline, decisions: Sequence[Decision], plan: Plan, bundles: Bundles
) -> list[Absence]:
    """Return one rank's moves by decisions to offload saved tensors.

    Raises:
        UsageError: a decision moves tensors that are recomputed.
    """
    storages = {stage: StageStorages.of(plan, stage) for stage in {decision.stage for decision in decisions}}
    result = list[Absence | None]()
    for decision in decisions:
        users, subject = _users(storages[decision.stage], decision), _subject(decision, bundles)
        for microbatch in filter(decision.microbatches.__contains__, timeline.microbatches(decision.stage)):
            result.append(_move(timeline, decision, microbatch, subject, users))
    return [move for move in result if move is not None]


class _Users(NamedTuple):
    """The layers that need the storages of a decision again.

    `last_saver` is the last layer that saves any of them; `readers` are the layers that have any of them as
    input: a recomputation that begins there starts from it.
    """

    last_saver: int
    readers: frozenset[int]


class Timeline:
    """A rank's ordered actions, with an index of their positions."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self.actions = actions
        self.units = _units(actions)
        self._ends = [last for _, last in self.units]
        self.computes: dict[int, dict[int, list[int]]] = defaultdict(
            dict
        )  # positions, by stage and microbatch
        self.sends: dict[
            tuple[int, int | None, bool], int
        ] = {}  # of outputs, by stage, microbatch and `wait`
        for number, (kind, stage, microbatch, *_, wait) in enumerate(actions):
            if kind in COMPUTE and microbatch is not None:
                self.computes[stage].setdefault(microbatch, []).append(number)
            elif kind is Kind.SEND_FORWARD:
                self.sends[stage, microbatch, wait] = number

    def microbatches(self, stage: int) -> list[int]:
        """Return the microbatches of a stage, in rising order."""
        return sorted(self.computes[stage])

    def unit(self, position: int) -> int:
        """Return the number of the unit (`_units`) that contains a position, or of the next one."""
        return bisect_left(self._ends, position)

    def before_waiting(self, number: int) -> int:
        """Return the position before the waits and the load of a compute action, and after all updates."""
        while number:
            action = self.actions[number - 1]
            of_update = action.kind in UPDATES or action.moves_state
            if action.kind is not Kind.LOAD and (not action.wait or of_update):
                break
            number -= 1
        return number


def _move(
    timeline: Timeline, decision: Decision, microbatch: int, subject: Subject | Bundle, users: _Users
) -> Absence | None:
    """Return the offload and reload of one microbatch; None if the offload could not end before the reload.

    The offload starts after the forward, or after the send of its outputs, which may be in the same storage.
    It is joined after the join of that send, and at least `decision.behind` units later. The reload is joined
    just before the backward, or the recomputation, that needs it, and starts `decision.ahead` units earlier.
    """
    forward, needed = _positions(timeline, decision, microbatch, users)
    if forward < 0 or not needed:  # in an earlier or later step than those of the timeline
        return None
    last, first = timeline.unit(forward) + decision.behind, timeline.unit(needed[0]) - decision.ahead
    if last >= first:
        return None
    start = timeline.sends.get((decision.stage, microbatch, False), forward)
    freed = max(timeline.units[last][1], timeline.sends.get((decision.stage, microbatch, True), 0))
    back = timeline.before_waiting(timeline.units[first][0]) if decision.ahead else needed[0]
    offload = Action(Kind.OFFLOAD, decision.stage, microbatch, None, subject, decision.place)
    return Absence(offload, start, freed, back, needed) if freed < back else None


def _positions(
    timeline: Timeline, decision: Decision, microbatch: int, users: _Users
) -> tuple[int, tuple[int, ...]]:
    """Return the position of the stage's last forward, and of the later actions that need the moved tensors.

    Raises:
        UsageError: the tensors are recomputed.
    """
    forward, needed = -1, list[int]()
    for number in timeline.computes[decision.stage][microbatch]:
        action = timeline.actions[number]
        holds = action.layers is None or action.layers[0] <= users.last_saver < action.layers[1]
        if holds and action.kind in (Kind.FORWARD_ONLY, Kind.RECOMPUTE):
            raise recomputed_too(decision, users.last_saver, microbatch)
        if action.kind in FORWARDS:
            forward = number
        starts = (
            action.kind is Kind.RECOMPUTE and action.layers is not None and action.layers[0] in users.readers
        )
        if starts or (holds and action.kind is Kind.BACKWARD):
            needed.append(number)
    return forward, tuple(needed)


def recomputed_too(decision: Decision, layer: int, microbatch: int) -> UsageError:
    """Return the error for tensors of a decision that this layer, which is recomputed, saves."""
    return UsageError(
        f"{decision}: layer {layer} is also recomputed for microbatch {microbatch}; do only one of both"
    )


def _units(actions: Sequence[Action]) -> list[tuple[int, int]]:
    """Return the first and last position of every scheduled forward and backward.

    All its pieces are included.

    A recomputation before another unit belongs to that unit.
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
    """Return the subject of a decision's copies: its saved tensor, or the bundle of all of them."""
    assert isinstance(decision.subject, SavedTensors)
    return named(subjects_of(decision.subject), bundles)


def _users(storages: StageStorages, decision: Decision) -> _Users:
    """Return the layers that need the storages of a decision.

    Raises:
        UsageError: the decision moves a tensor that the stage does not keep.
    """
    assert isinstance(decision.subject, SavedTensors)
    subjects = subjects_of(decision.subject)
    moved = {storages.storage(subject) for subject in subjects}
    readers = (
        storages.start + n for n, layer in enumerate(storages.layers) if moved.intersection(layer.inputs)
    )
    return _Users(
        max(saver for subject in subjects for saver in storages.savers(subject)), frozenset(readers)
    )
