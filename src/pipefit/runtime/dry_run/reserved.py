"""Reserved bytes of a device's caching allocator, from the lives of storages in a dry run.

Such a dry run does not fold layers, because a block's position depends on all allocations before it. It folds
microbatches: an action has the same effect on its microbatch's storages as the executed one, so its lives are
repeated with other names. A storage that outlives its microbatch, until an update, dies with that of the
executed microbatch. If a repetition frees a missing storage, or leaves one, `LivesOf.consistent` turns False,
and the dry run is repeated with all microbatches.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Hashable, Sequence
from hashlib import sha256

from pipefit.memory import (
    AllocatorSettings,
    Arena,
    CachingAllocator,
    Lifetimes,
    communicators,
    with_enough,
)
from pipefit.runtime.dry_run.lives import BACKWARD_WORKSPACE, FORWARD_WORKSPACE, Lives
from pipefit.runtime.dry_run.microbatches import Folding, Seat, StepEffects
from pipefit.schema.actions import Action
from pipefit.schema.devices import Member, Overheads
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program
from pipefit.schema.trace import AllocatorPeaks

Event = tuple[Hashable, int]  # a storage, and its bytes at birth or 0 at death

_WORKSPACES = (FORWARD_WORKSPACE, BACKWARD_WORKSPACE)
_NOTHING = Overheads(context_bytes=0, communicator_bytes=0, cublas_workspace_bytes=0)


class LivesOf:
    """Lives of one device's storages in the whole program, step by step, from those of the executed
    actions.
    """

    def __init__(self, folding: Folding) -> None:
        self.consistent = True
        self.events: list[Event] = []
        self.turns: list[int] = []  # positions of events at which a microbatch comes to the first stage
        self._repetition = StepEffects[Lives](folding)
        self._own: defaultdict[tuple[int, int], set[int]] = defaultdict(set)  # by stage, microbatch
        self._copies: defaultdict[int, list[Hashable]] = defaultdict(list)  # living, by executed storage
        self._living: set[Hashable] = set()

    def step(self, number: int, actions: Sequence[Action], seen: tuple[Lives, list[Lives]]) -> None:
        """Add the events of one step of all `actions`, from the lives in the executed ones."""
        before, of_actions = seen
        whole = list(self._repetition.step(number, actions, of_actions))
        for seat, lives in whole:
            if seat.flight is not None and seat.like is None:
                self._own[seat.flight] |= {name for name, nbytes in lives if nbytes and name >= 0}
        self._ended(before)
        flights = [seat.flight for seat, _ in whole if seat.flight is not None]
        coming = {flight for flight in flights if flight[0] == min(flights)[0]}
        for seat, lives in whole:
            if seat.flight in coming:
                coming.remove(seat.flight)
                self.turns.append(len(self.events))
            if seat.flight is None:
                self._ended(lives)
            elif seat.like is None:
                self._seen(lives)
            else:
                self._repeated(number, seat, lives)
        self.consistent &= not any(self._copies.values())

    def _seen(self, lives: Lives) -> None:
        for name, nbytes in lives:
            self._add(name, nbytes)

    def _ended(self, lives: Lives) -> None:
        """Add the lives in an action without a microbatch: storages that die there die in all
        microbatches.
        """
        for name, nbytes in lives:
            self._add(name, nbytes)
            for copy in () if nbytes else self._copies.pop(name, ()):
                self._add(copy, 0)

    def _repeated(self, number: int, seat: Seat, lives: Lives) -> None:
        assert seat.flight is not None
        assert seat.like is not None
        stage, microbatch = seat.flight
        own = self._own[stage, seat.like]
        for name, nbytes in lives:
            if name not in own:
                self._add(name, nbytes)
                continue
            copy = name, number, microbatch
            self._add(copy, nbytes)
            if nbytes:
                self._copies[name].append(copy)
            elif copy in self._copies[name]:
                self._copies[name].remove(copy)

    def _add(self, name: Hashable, nbytes: int) -> None:
        """Add a birth or a death. A workspace is born once, however often its action is repeated."""
        if nbytes and name in self._living and name in _WORKSPACES:
            return
        self.consistent &= (name in self._living) != bool(nbytes)
        (self._living.add if nbytes else self._living.discard)(name)
        self.events.append((name, nbytes))


def overheads(plan: Plan, device: int) -> Overheads:
    """Return non-tensor memory of a process on a device of the plan: zero for a device other than a GPU."""
    return plan.cluster.devices[device].kind.overheads if plan.cluster.backend == "cuda" else _NOTHING


def lent_events(arenas: Sequence[Arena], device: int) -> list[Event]:
    """Return the births of lent arenas: a tensor for each, allocated before all others, and freed after
    them.
    """
    return [(("lent", n), a.nbytes) for n, a in enumerate(arenas) if a.lender == Member.device(device)]


def form(events: Sequence[Event]) -> bytes:
    """Return a digest of events that is independent of names.

    It covers the bytes of every birth, and the birth of every death.
    """
    born, result = dict[Hashable, int](), array("q")
    for number, (name, nbytes) in enumerate(events):
        if nbytes:
            born[name] = number
            result.append(-1 if name in _WORKSPACES else nbytes)
        else:
            result.append(-2 - born.pop(name))
    return sha256(result.tobytes()).digest()


class Allocators:
    """Peaks of the caching allocators of a plan's devices under each of some `settings`.

    Equal devices are simulated once.
    """

    def __init__(
        self, plan: Plan, program: Program, arenas: Sequence[Arena], settings: Sequence[AllocatorSettings]
    ) -> None:
        self._plan, self._program, self._arenas, self._settings = plan, program, arenas, settings
        self._known: dict[Hashable, list[AllocatorPeaks]] = {}
        self._forms: dict[Hashable, bytes] = {}  # by the identity of events, and lent arenas

    def peaks(
        self, device: int, events: list[Event], requested: int, turns: Sequence[int] = ()
    ) -> list[AllocatorPeaks]:
        """Return the peaks of a device with these events and its lent arenas; `turns` of the events begin there.

        The device's meter has counted `requested` bytes.
        """
        plan, program, lent = self._plan, self._program, lent_events(self._arenas, device)
        every = [*lent, *events]
        if (id(events), *lent) not in self._forms:
            self._forms[id(events), *lent] = form(every)
        of_device = plan.cluster.devices[device].memory_bytes, overheads(plan, device)
        key = self._forms[id(events), *lent], requested, of_device, communicators(plan, program, device)
        if key not in self._known:
            turns = [len(lent) + turn for turn in turns]
            self._known[key] = [
                allocator_peaks(plan, program, device, every, setting, requested, turns)
                for setting in self._settings
            ]
        return self._known[key]


def allocator_peaks(
    plan: Plan,
    program: Program,
    device: int,
    events: Sequence[Event],
    settings: AllocatorSettings,
    requested: int,
    turns: Sequence[int] = (),
) -> AllocatorPeaks:
    """Return the peaks of a device's allocator; its meter has counted `requested` bytes.

    `turns` are positions of events at which the turns of a pipeline begin.

    The device has the cluster's memory, minus its context and communicators. If that does not suffice, the
    figures are those of a device with just enough memory, to a segment.
    """
    own, count = overheads(plan, device), communicators(plan, program, device)
    memory = plan.cluster.devices[device].memory_bytes
    taken = own.context_bytes + count * own.communicator_bytes
    lifetimes = Lifetimes(events, turns)
    capped = CachingAllocator(settings, memory, taken=taken)
    fits = lifetimes.have_room(capped)
    result = capped if fits else with_enough(lifetimes, settings, memory, taken) or capped
    return AllocatorPeaks(
        settings=str(settings),
        requested_bytes=requested,
        allocated_bytes=result.peak.allocated_bytes,
        reserved_bytes=result.peak.reserved_bytes,
        retries=result.retries,
        fits=fits,
        workspaces=sum(name in _WORKSPACES for name, _ in events),
        workspace_bytes=own.cublas_workspace_bytes,
        context_bytes=own.context_bytes,
        communicators=count if own.communicator_bytes else 0,
        communicator_bytes=own.communicator_bytes,
    )
