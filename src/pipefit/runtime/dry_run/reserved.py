"""Reserved bytes of a device's caching allocator, from the lives of storages in a dry run.

Positions of blocks depend on all allocations before them, so the lives of executed layers are repeated for
all others (`dry_run.devices`), and those of executed microbatches here: an action has the same effect on
its microbatch's storages as the executed one, so its lives are repeated with other names. A storage that
outlives its microbatch, until an update, dies with that of the executed microbatch. If a repetition frees a
missing storage, or leaves one, `LivesOf.consistent` turns False, and the dry run is repeated with all
microbatches.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from pipefit.memory import (
    AllocatorSettings,
    Arena,
    CachingAllocator,
    Excerpt,
    Lifetimes,
    NamedExcerpt,
    communicators,
    planned_bytes,
    with_enough,
)
from pipefit.runtime.dry_run.lives import BACKWARD_WORKSPACE, FORWARD_WORKSPACE, Lives
from pipefit.runtime.dry_run.microbatches import Seat, Seated, StepEffects
from pipefit.schema.devices import Member, Overheads
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program
from pipefit.schema.trace import AllocatorPeaks

Event = tuple[Hashable, int]  # a storage, and its bytes at birth or 0 at death

WORKSPACES = (FORWARD_WORKSPACE, BACKWARD_WORKSPACE)
_NOTHING = Overheads(context_bytes=0, communicator_bytes=0, cublas_workspace_bytes=0)


Recorded = Sequence[Excerpt] | Lives  # of one action


class LivesOf:
    """Lives of one device's storages in the whole program, step by step, from those of the executed
    actions.

    They are only unfolded when they are asked for, because few devices are simulated if one does not fit.
    """

    def __init__(self) -> None:
        self._seen = deque[tuple[Seated, Recorded, Sequence[Recorded]]]()
        self._consistent = True
        self._excerpts = list[NamedExcerpt]()
        self._turns = list[int]()
        self._count = 0
        self._repetition = StepEffects[Sequence[Excerpt]]()
        self._own = defaultdict[tuple[int, int], set[Hashable]](set)  # by stage, microbatch
        self._copies = defaultdict[Hashable, list[Hashable]](list)  # living, by executed storage
        self._living = set[Hashable]()

    @property
    def consistent(self) -> bool:
        """True unless a repetition freed a missing storage, or left one."""
        self._unfold()
        return self._consistent

    @property
    def excerpts(self) -> Sequence[NamedExcerpt]:
        """All births and deaths so far, in order."""
        self._unfold()
        return self._excerpts

    @property
    def turns(self) -> Sequence[int]:
        """Positions of events at which a microbatch comes to the first stage."""
        self._unfold()
        return self._turns

    @property
    def events(self) -> list[Event]:
        """All births and deaths so far."""
        return [event for named_excerpt in self.excerpts for event in named_excerpt.events]

    def step(self, seated: Seated, before: Recorded, of_actions: Sequence[Recorded]) -> None:
        """Add the lives of one step, from those before it and in its executed actions."""
        self._seen.append((seated, before, of_actions))

    def _unfold(self) -> None:
        """Follow the storages through the steps that have been added since the last time."""
        while self._seen:
            self._follow(*self._seen.popleft())

    def _follow(self, seated: Seated, before: Recorded, of_actions: Sequence[Recorded]) -> None:
        """Follow the storages through one step."""
        whole = list(self._repetition.step(seated, [*map(excerpts, of_actions)]))
        for seat, lives in whole:
            if seat.flight is not None and seat.like is None:
                for excerpt in lives:
                    self._own[seat.flight] |= excerpt.names.difference(WORKSPACES)
        self._ended(excerpts(before))
        flights = [seat.flight for seat, _ in whole if seat.flight is not None]
        first = min((stage for stage, _ in flights), default=0)
        coming = {flight for flight in flights if flight[0] == first}
        for seat, lives in whole:
            if seat.flight in coming:
                coming.remove(seat.flight)
                self._turns.append(self._count)
            if seat.flight is None:
                self._ended(lives)
            elif seat.like is None:
                for excerpt in lives:
                    self._add(NamedExcerpt(excerpt))
            else:
                self._repeat(seated.number, seat, lives)
        self._consistent &= not any(self._copies.values())

    def _ended(self, lives: Sequence[Excerpt]) -> None:
        """Add the lives in an action without a microbatch: storages that die there die in all
        microbatches.
        """
        for excerpt in lives:
            copies = {name: own for _, name in excerpt.ends if (own := self._copies.pop(name, None))}
            self._add(NamedExcerpt(_with_deaths(excerpt, copies) if copies else excerpt))

    def _repeat(self, number: int, seat: Seat, lives: Sequence[Excerpt]) -> None:
        """Add lives under the names of another microbatch."""
        assert seat.flight is not None
        assert seat.like is not None
        stage, microbatch = seat.flight
        own = self._own[stage, seat.like]
        for excerpt in lives:
            named = NamedExcerpt(excerpt, own, (number, microbatch))
            self._add(named)
            for _, name in excerpt.left:
                if name in own:
                    self._copies[name].append(named.name(name))
            for _, name in excerpt.ends:
                if named.name(name) in self._copies.get(name, ()):
                    self._copies[name].remove(named.name(name))

    def _add(self, named: NamedExcerpt) -> None:
        """Add an excerpt. A workspace is born once, however often its action is repeated."""
        if not named.excerpt.events:
            return
        known = self._living.intersection(WORKSPACES)
        if not known.isdisjoint(named.excerpt.names):
            others = (event for event in named.excerpt.events if event[0] not in known)
            named = NamedExcerpt(Excerpt(others), named.own, named.tag)
        ends = {named.name(name) for _, name in named.excerpt.ends}
        left = {named.name(name) for _, name in named.excerpt.left}
        self._consistent &= ends <= self._living and self._living.isdisjoint(left)
        self._living -= ends
        self._living |= left
        self._excerpts.append(named)
        self._count += len(named.excerpt.events)


def excerpts(lives: Recorded) -> Sequence[Excerpt]:
    """Return lives in excerpts: in one, unless they are in several."""
    several = [one for one in lives if isinstance(one, Excerpt)]
    return several or [Excerpt(one for one in lives if not isinstance(one, Excerpt))]


def events(lives: Recorded) -> Sequence[Event]:
    """Return lives as single births and deaths."""
    return [event for excerpt in excerpts(lives) for event in excerpt.events]


def _with_deaths(excerpt: Excerpt, copies: Mapping[Hashable, Sequence[Hashable]]) -> Excerpt:
    """Return an excerpt in which storages with copies die together with these."""
    events = list[Event]()
    for name, nbytes in excerpt.events:
        events.append((name, nbytes))
        if not nbytes:
            events += [(copy, 0) for copy in copies.get(name, ())]
    return Excerpt(events)


def overheads(plan: Plan, device: int) -> Overheads:
    """Return non-tensor memory of a process on a device of the plan: zero for a device other than a GPU."""
    return plan.cluster.devices[device].kind.overheads if plan.cluster.backend == "cuda" else _NOTHING


def lent_events(arenas: Sequence[Arena], device: int) -> list[Event]:
    """Return the births of lent arenas: a tensor for each, allocated before all others, and freed after
    them.
    """
    return [(("lent", n), a.nbytes) for n, a in enumerate(arenas) if a.lender == Member.device(device)]


class RepeatedLives(Protocol):
    """Lives of one device's storages in all steps."""

    @property
    def consistent(self) -> bool:
        """True unless a repetition freed a missing storage, or left one."""

    @property
    def excerpts(self) -> Sequence[NamedExcerpt]:
        """All births and deaths in order."""

    @property
    def turns(self) -> Sequence[int]:
        """Positions of events at which turns may begin."""


class Allocators:
    """Peaks of the caching allocators of a plan's devices, which have these `settings`.

    Equal devices are simulated once. With `plans_addresses`, addresses of their tensors are planned too.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        arenas: Sequence[Arena],
        settings: AllocatorSettings,
        *,
        plans_addresses: bool,
    ) -> None:
        self._plan, self._program, self._arenas, self._settings = plan, program, arenas, settings
        self._plans_addresses = plans_addresses
        self._known: dict[Hashable, AllocatorPeaks] = {}
        self._lifetimes: dict[Hashable, Lifetimes] = {}  # by lives and lent arenas

    def peaks(self, device: int, lives: RepeatedLives, requested: int) -> AllocatorPeaks | None:
        """Return the peaks of a device with these lives and its lent arenas; None if they are inconsistent.

        The device's meter has counted `requested` bytes.
        """
        if not lives.consistent:
            return None
        plan, program, lent = self._plan, self._program, lent_events(self._arenas, device)
        if (lives, *lent) not in self._lifetimes:
            turns = [len(lent) + turn for turn in lives.turns]
            self._lifetimes[lives, *lent] = Lifetimes(lent, turns, excerpts=lives.excerpts)
        lifetimes = self._lifetimes[lives, *lent]
        of_device = plan.cluster.devices[device].memory_bytes, overheads(plan, device)
        key = (
            lifetimes.digest,
            _workspaces(lifetimes),
            requested,
            of_device,
            communicators(plan, program, device),
        )
        if key not in self._known:
            planned = planned_bytes(lifetimes) if self._plans_addresses else 0
            peaks = allocator_peaks(plan, program, device, lifetimes, self._settings, requested)
            self._known[key] = replace(peaks, planned_bytes=planned)
        return self._known[key]


def _workspaces(lifetimes: Lifetimes) -> int:
    """Return the number of workspaces, which are never freed."""
    return len(lifetimes.living.intersection(WORKSPACES))


def allocator_peaks(
    plan: Plan,
    program: Program,
    device: int,
    lifetimes: Lifetimes,
    settings: AllocatorSettings,
    requested: int,
) -> AllocatorPeaks:
    """Return the peaks of a device's allocator; its meter has counted `requested` bytes.

    The device has the cluster's memory, minus its context and communicators. If that does not suffice, the
    figures are those of a device with just enough memory, to a segment.
    """
    own, count = overheads(plan, device), communicators(plan, program, device)
    memory = plan.cluster.devices[device].memory_bytes
    taken = own.context_bytes + count * own.communicator_bytes
    capped = CachingAllocator(settings, memory, taken=taken)
    fits = lifetimes.have_room(capped)
    enough = None if fits else with_enough(lifetimes, settings, memory, taken)
    result, growing = (
        enough or capped,
        CachingAllocator(replace(settings, expandable=True), memory, taken=taken),
    )
    other = enough is not None and not settings.expandable and lifetimes.have_room(growing)
    return AllocatorPeaks(
        settings=str(settings),
        requested_bytes=requested,
        allocated_bytes=result.peak.allocated_bytes,
        reserved_bytes=result.peak.reserved_bytes,
        retries=result.retries,
        fits=fits,
        workspaces=_workspaces(lifetimes),
        workspace_bytes=own.cublas_workspace_bytes,
        context_bytes=own.context_bytes,
        communicators=count if own.communicator_bytes else 0,
        communicator_bytes=own.communicator_bytes,
        expandable_bytes=growing.peak.reserved_bytes if other else 0,
    )
