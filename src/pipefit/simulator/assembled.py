"""A plan's peaks and seconds, put together of what each of its devices does, which is remembered for other plans.

What a device does in a step, what it holds at its peak and how long it computes follow from its own stages, from where
the stages next to them are, and from what is decided about its own. So of two plans that differ in a stage only that
stage's devices are lowered and read again. What devices do to each other is left to the clock and to arenas, which are
put together for every plan. Nothing checks that sends and receives meet, as they do in whatever is lowered. Replicas
that do the same with other rows and neighbours hold the same bytes, so that the ledger of one of them tells for all;
those that do it at the same times are lowered and timed once (`simulator.alike`).

Costs: what changed, at some ten microseconds for an action; and one and a half for every action of the plan; replicas
that do the same at the same times count once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from pipefit.actions import COLLECTIVE, FORWARDS, MESSAGES, Kind
from pipefit.cost.messages import message_sizes
from pipefit.cost.stage import Costs, StageCost
from pipefit.cost.storages import StageStorages
from pipefit.errors import UsageError
from pipefit.places import Member
from pipefit.plans import Plan
from pipefit.program import UncheckedProgram
from pipefit.schedule import distinct_steps
from pipefit.schedule.arenas import Arena, arenas_for, lent_bytes, moved_bytes
from pipefit.schedule.room import missing_bytes
from pipefit.simulator.alike import Alike, alike
from pipefit.simulator.lowered import Held, Lowered, as_alone, is_alone
from pipefit.simulator.timed_device import DeviceReader, TimedDevice
from pipefit.simulator.timed_program import TimedProgram
from pipefit.simulator.times import Times
from pipefit.simulator.turns import Passes


class _Memory(NamedTuple):
    """What one device holds: its peak without what it lends, and what is lent to it."""

    peak_bytes: int
    arenas: tuple[Arena, ...]


class _Unread:
    """What a device holds, read when it is first asked for: a plan that is too slow need not fit. Until then it keeps
    the device's actions, and no longer, because of thousands of plans that would be many.
    """

    def __init__(self, read: Callable[[], _Memory]) -> None:
        self._read: Callable[[], _Memory] | None = read
        self._found = _Memory(0, ())

    def __call__(self) -> _Memory:
        if self._read is not None:
            self._found, self._read = self._read(), None
        return self._found


class Part(NamedTuple):
    """What one device does: to the clock, its forwards and backwards in the last step, and what it holds.

    Asking for that raises `UsageError` where an action uses what does not exist then.
    """

    timed: TimedDevice
    counts: tuple[int, ...]  # its actions in every step
    forwards: Passes
    backwards: Passes
    memory: Callable[[], _Memory]


class _Read(NamedTuple):
    """What the devices of a rank do, and the actions in their programs."""

    parts: dict[int, Part]
    actions: int


class Parts:
    """What devices do, for plans of one profile, cluster and training, whose `costs` they share.

    Only so many `steps` are simulated; all that differ unless given. What others have read (`shared`) is not read
    again, but its actions count as if it were.
    """

    def __init__(self, costs: Costs, steps: int | None = None, shared: Parts | None = None) -> None:
        self._costs, self._steps = costs, steps
        self._read_by_all: dict[Hashable, _Read] = {} if shared is None else shared._read_by_all
        self._lowered: dict[Hashable, Lowered] = {} if shared is None else shared._lowered
        self._known: dict[Hashable, dict[int, Part]] = {}
        self._alike: dict[Hashable, Alike | None] = {} if shared is None else shared._alike
        self.actions = 0  # in the programs of all devices that were asked for, once each

    @property
    def actions_of_all(self) -> int:
        """The actions in the programs that were read, for whomever."""
        return sum(read.actions for read in self._read_by_all.values())

    def apart(self) -> Parts:
        """The same, for somebody else who counts what they ask for."""
        return Parts(self._costs, self._steps, self)

    def steps(self, plan: Plan) -> int:
        """How many steps of a plan are simulated."""
        return distinct_steps(plan) if self._steps is None else self._steps

    def alike(self, plan: Plan) -> Alike | None:
        """The devices of a plan that stand for all; None where each stands for itself."""
        key = (
            tuple(stage.grid for stage in plan.stages),
            tuple(plan.summed.values()),
            plan.training.microbatch_size,
            frozenset(decision.what for decision in plan.decisions),
        )
        if key not in self._alike:
            self._alike[key] = alike(plan)
        return self._alike[key]

    def of_rank(self, plan: Plan, rank: int, standing: Alike | None = None) -> dict[int, Part]:
        """What the devices of a rank do, or those of them that stand for the others.

        Raises:
            UsageError: a decision cannot be carried out.
        """
        stages, steps = plan.ranks[rank], self.steps(plan)
        decisions = tuple(decision for decision in plan.decisions if decision.stage in stages)
        own = tuple(plan.stages[stage] for stage in stages)
        summed = tuple((number, members) for number, members in plan.summed.items() if set(members) & set(stages))
        there = plan.stages[stages[0]].devices
        stands = there if standing is None else tuple(standing.devices[device] for device in there)
        key = rank, tuple(stage.grid for stage in plan.stages), own, decisions, summed, steps, stands
        if key not in self._known:
            if key not in self._read_by_all:
                self._read_by_all[key] = self._read(replace(plan, decisions=decisions), rank, steps, stands)
            self._known[key], actions = self._read_by_all[key]
            self.actions += actions
        return self._known[key]

    def _read(self, plan: Plan, rank: int, steps: int, stands: Sequence[int]) -> _Read:
        """What the devices do that stand for each of the rank's; the actions of all of these count."""
        if is_alone(plan):
            with suppress(UsageError):  # which would speak of another device
                return self._read_alone(plan, rank, steps)
        return self._read_all(plan, rank, steps, stands)

    def _read_alone(self, plan: Plan, rank: int, steps: int) -> _Read:
        """What a rank of one device does, which has been lowered if another device did the same.

        Raises:
            UsageError: a decision cannot be carried out.
        """
        place, device = plan.stages[rank], plan.stages[rank].devices[0]
        stages = {rank: self._costs_of(plan, rank, device)}
        summed = tuple((number, members) for number, members in plan.summed.items() if rank in members)
        key = rank, len(plan.stages), place.start, place.stop, plan.decisions, summed, steps
        if key not in self._lowered:
            self._lowered[key] = Lowered(as_alone(plan), rank, rank, steps, stages)
        lowered = self._lowered[key]

        def held() -> Held:
            try:
                return lowered.held
            except UsageError:  # which speaks of another device
                return Lowered(plan, rank, device, steps, stages).held

        part = self._part(plan, device, lowered, steps, stages, held)
        return _Read({device: part}, sum(lowered.counts))

    def _read_all(self, plan: Plan, rank: int, steps: int, stands: Sequence[int]) -> _Read:
        """The same of any rank.

        Raises:
            UsageError: a decision cannot be carried out.
        """
        told = dict[Hashable, Held]()  # what ledgers of the rank's devices have told

        def read(device: int) -> tuple[Part, int]:
            stages = {number: self._costs_of(plan, number, device) for number in plan.ranks[rank]}
            lowered = Lowered(plan, rank, device, steps, stages)

            def held() -> Held:
                key = _alike(lowered.programs, device, stages)
                if key not in told:
                    told[key] = lowered.held
                return told[key]

            return self._part(plan, device, lowered, steps, stages, held), sum(lowered.counts)

        found = {device: read(device) for device in dict.fromkeys(stands)}
        return _Read({device: part for device, (part, _) in found.items()}, sum(found[device][1] for device in stands))

    def _part(
        self,
        plan: Plan,
        device: int,
        lowered: Lowered,
        steps: int,
        stages: Mapping[int, StageCost],
        held: Callable[[], Held],
    ) -> Part:
        """What a device does, whose actions have been lowered, perhaps as those of another one."""
        program = replace(lowered.programs[-1], placement=plan.placement)
        nbytes = moved_bytes(program, {number: stage.rest for number, stage in stages.items()})

        def memory() -> _Memory:
            peak_bytes, placed = held()
            return _Memory(peak_bytes, tuple(arenas_for(device, placed, nbytes, plan.cluster.devices[device].host)))

        timed = lowered.timed(DeviceReader(device, program, plan.cluster, stages, nbytes))
        counts = lowered.counts
        return Part(
            timed=timed,
            counts=tuple(counts[min(step, len(counts) - 1)] for step in range(steps)),
            forwards=lowered.passes(FORWARDS),
            backwards=lowered.passes(frozenset({Kind.BACKWARD})),
            memory=_Unread(memory),
        )

    def _costs_of(self, plan: Plan, number: int, device: int) -> StageCost:
        """The costs of a stage on one of its devices."""
        return self._costs.of_device(plan, number, device, plan.stages[number].devices)

    def storages(self, plan: Plan) -> list[StageStorages]:
        """The storages of every stage."""
        return [self._costs_of(plan, n, stage.devices[0]).storages for n, stage in enumerate(plan.stages)]


def _alike(programs: Sequence[UncheckedProgram], device: int, stages: Mapping[int, StageCost]) -> Hashable:
    """Equal for devices whose ledgers tell the same: their stages cost the same, and they do the same with rows as far
    from their first one, and with neighbours in the same order. What is lent to a device is its own.
    """
    peers, first = dict[object, int](), min((a.part[0] for a in programs[0].actions[device] if a.part), default=0)
    found = list[object]()
    for program in programs:
        for kind, stage, microbatch, layers, subject, place, part, wait in program.actions[device]:
            if place is not None and kind not in MESSAGES and kind not in COLLECTIVE:
                return device
            peer = -1 if place is None else peers.setdefault(place, len(peers))
            rows = None if part is None else (part[0] - first, part[1] - first)
            found.append((kind, stage, microbatch, layers, subject, peer, rows, wait))
    return tuple((number, id(one.flights), one.share) for number, one in stages.items()), tuple(found)


def assembled(plan: Plan) -> Assembled:
    """A plan by itself."""
    return Assembled(plan, Parts(Costs.of(plan)))


class Assembled:
    """A plan of which only what is new is lowered and read.

    Raises:
        UsageError: a decision cannot be carried out; some of them as the peaks are asked for.
    """

    def __init__(self, plan: Plan, parts: Parts) -> None:
        self.plan, self._parts, self._endless = plan, parts, plan.training.endless
        self._steps, self._alike = parts.steps(plan), parts.alike(plan)
        of_ranks = (parts.of_rank(plan, rank, self._alike) for rank in range(len(plan.ranks)))
        self._read = dict(chain.from_iterable(found.items() for found in of_ranks))  # of those that stand for others
        stands = {device: device for device in self._read} if self._alike is None else self._alike.devices
        self._stands = stands
        self._devices = {device: self._read[one] for device, one in stands.items()}

    @property
    def actions(self) -> int:
        """The actions in the programs of all steps."""
        return sum(sum(part.counts) for part in self._devices.values())

    @cached_property
    def arenas(self) -> tuple[Arena, ...]:
        """The memory that devices and hosts lend to devices."""
        return tuple(chain(*(self._devices[device].memory().arenas for device in sorted(self._devices))))

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most bytes allocated on every device."""
        devices = range(len(self.plan.cluster.devices))
        own = [self._devices[device].memory().peak_bytes if device in self._devices else 0 for device in devices]
        return tuple(own[device] + lent_bytes(self.arenas, Member.device(device)) for device in devices)

    @property
    def fits(self) -> bool:
        """Whether every device and every host has the memory."""
        full = any(peak > budget for peak, budget in zip(self.peak_bytes, self.plan.cluster.budgets, strict=True))
        return not full and not any(missing_bytes(self.plan, self.arenas).values())

    @cached_property
    def step_seconds(self) -> tuple[float, ...]:
        """Seconds of every step."""
        return self.times.step_seconds

    @cached_property
    def utilisation(self) -> tuple[float, ...]:
        """The share of the last step in which every device computes."""
        found = self.times.utilisation
        return tuple(found[self._stands.get(device, device)] for device in range(len(found)))

    @cached_property
    def times(self) -> Times:
        """When everything begins and ends."""
        devices = range(len(self.plan.cluster.devices))
        idle, none = TimedDevice([], [], [], []), (0,) * self._steps
        timed = [self._read[device].timed if device in self._read else idle for device in devices]
        sizes = message_sizes(self.plan, self.plan.placement, self._parts.storages(self.plan))
        counts = [self._read[device].counts if device in self._read else none for device in devices]
        program = TimedProgram(timed, self.plan.cluster, sizes, self._alike)
        return Times(program, counts, endless=self._endless)

    def forwards_ended(self, device: int) -> dict[int | None, float]:
        """When the forward of every microbatch of the last step ended on a device."""
        after = self.times.clock.after[self._stands[device]]
        return {microbatch: after[at] for at, microbatch in self._in_last_step(device, self._devices[device].forwards)}

    def backwards_run(self, device: int) -> dict[int | None, tuple[float, float]]:
        """When the backward of every microbatch of the last step began and ended on a device."""
        after, found = [0.0, *self.times.clock.after[self._stands[device]]], dict[int | None, tuple[float, float]]()
        for at, microbatch in self._in_last_step(device, self._devices[device].backwards):
            begin, _ = found.get(microbatch, (after[at], 0.0))
            found[microbatch] = begin, after[at + 1]
        return found

    def _in_last_step(self, device: int, passes: Passes) -> Iterator[tuple[int, int | None]]:
        """Where passes of the last step are among the actions of all steps."""
        before = self.times.starts(self._stands[device])[-2]
        return ((before + position, microbatch) for position, microbatch in passes)
