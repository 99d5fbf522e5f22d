"""A plan's peaks and seconds, assembled from parts of its devices that are cached for other plans.

The actions of a device in a step, its peak and its compute seconds depend on its own stages, on the places of
neighbouring stages, and on the decisions about its own stages. So of two plans that differ in one stage, only
that stage's devices are lowered and read again. Interactions of devices are left to the clock and to arenas,
which are assembled for every plan. Sends and receives are assumed to match, as they do in all lowered
programs. Replicas with the same actions on other rows and neighbours hold the same bytes, so one ledger
serves all of them; those with the same times are lowered and timed once, and of replicas that differ by
their updates alone the slowest is timed (`simulator.timed_program`).

Cost: some ten microseconds for each changed action, and 1.5 microseconds for every action of the plan;
replicas with equal actions and times count once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from math import isclose
from typing import NamedTuple

import numpy as np

from pipefit.errors import UsageError
from pipefit.lowering import distinct_steps, period, rank_programs
from pipefit.memory import (
    Arena,
    Costs,
    StageCost,
    StageStorages,
    arenas_for,
    lent_bytes,
    message_sizes,
    missing_bytes,
    moved_bytes,
)
from pipefit.schema.actions import COLLECTIVE, FORWARDS, MESSAGES, Action, Kind, Message
from pipefit.schema.devices import Member
from pipefit.schema.grids import Grid
from pipefit.schema.plan import Plan
from pipefit.schema.program import UncheckedProgram, in_a_row, shifted
from pipefit.simulator.clock import Run, Times, mean_cycle, repeating
from pipefit.simulator.ledger import Effects, LedgerReading, at_rest, highest, reading
from pipefit.simulator.timed_program import (
    COMPUTE,
    STARTS,
    Collected,
    DeviceReader,
    EqualDevices,
    Own,
    TimedDevice,
    TimedProgram,
    alike,
    slowest,
)

# ---- Long steps from short ones
#
# Once the pipeline is full, a device repeats the same turn for every microbatch:
#
#     head | turn | turn | tail                  lowered and read
#     head | turn | turn | turn ... turn | tail  the extension to more microbatches
#
# A turn starts with the forward of a microbatch. Left-out turns come before the tail, since the end of a step
# differs: it starts no receive for the next step. Turns are compared, not assumed to be equal.

Passes = tuple[tuple[int, int | None], ...]  # positions and microbatches

_ALIKE, _TAIL = 2, 2  # number of turns that have to be equal, and of turns in the tail


def shortened(plan: Plan, rank: int, steps: int) -> Plan | None:
    """Return the plan with the fewest microbatches that show the turns of a rank in `steps` steps.

    None if it has no more microbatches, or does not treat all of them equally. With n stages after it, the
    first backward of a rank follows its forward n (2n under eager 1F1B), and then every turn has one. Under
    PipeDream a rank frees its first weights at the backward of microbatch n (`memory.states`), after
    forward 2n.
    """
    how, behind = plan.training, len(plan.stages) - 1 - rank
    filling = {"1f1b": behind + 1, "eager-1f1b": 2 * behind + 1, "pipedream": 2 * behind + 1}
    few = filling.get(how.schedule, how.microbatches) + _ALIKE + _TAIL
    if few >= how.microbatches or (how.endless and steps > 1) or period(plan) > 1:
        return None
    if len(plan.ranks) < len(plan.stages):
        return None
    return replace(plan, training=replace(how, batch_size=few * how.microbatch_size, microbatches=few))


class Turns(NamedTuple):
    """The turn at positions `start` to `stop - 1` of a short step; a long step has `more` additional ones."""

    start: int
    stop: int
    more: int

    @staticmethod
    def of(actions: Sequence[Action], more: int) -> Turns | None:
        """Return the last turn before the tail of these actions; None unless it equals the one before."""
        begins, before = list[int](), None
        for position, action in enumerate(actions):
            if action.kind in FORWARDS and action.microbatch != before:
                begins.append(position)
                before = action.microbatch
        if len(begins) < _ALIKE + _TAIL:
            return None
        first, start, stop = begins[-_ALIKE - _TAIL : -_TAIL + 1]
        turn = [shifted(action, 1) for action in actions[first:start]]
        return Turns(start, stop, more) if turn == list(actions[start:stop]) else None

    @property
    def length(self) -> int:
        """Number of actions of a turn."""
        return self.stop - self.start

    def passes(self, short: Passes) -> Passes:
        """Return the positions of passes in the long step."""
        head = [one for one in short if one[0] < self.stop]
        turn = [one for one in head if one[0] >= self.start]
        again = [self._later(one, by) for by in range(1, self.more + 1) for one in turn]
        return (*head, *again, *(self._later(one, self.more) for one in short[len(head) :]))

    def _later(self, one: tuple[int, int | None], by: int) -> tuple[int, int | None]:
        position, microbatch = one
        return position + by * self.length, None if microbatch is None else microbatch + by

    def tell(self, effects: Effects) -> bool:
        """Return whether the short step's effects on memory have the long step's peak.

        The effects of both turns must be equal, and a turn must free all that it allocates.
        """
        first = self.start - self.length
        one, other = (
            [
                (position - begin, result)
                for position, result in effects
                if begin <= position < begin + self.length
            ]
            for begin in (first, self.start)
        )
        return one == other and not sum(result.after_bytes for _, result in one)

    def timed(self, short: TimedDevice) -> TimedDevice | None:
        """Return the long step for the clock.

        None if its turns differ, or join transfers that started before them.
        """
        codes, seconds, transfers, started = short
        first, start, stop = self.start - self.length, self.start, self.stop
        begun = [sum(code in STARTS for code in codes[:position]) for position in (first, start, stop)]
        each, turn, tail = begun[2] - begun[1], started[begun[1] : begun[2]], started[begun[2] :]
        collected = Counter(one.what for one in turn if isinstance(one, Collected))
        alike = (
            codes[first:start] == codes[start:stop]
            and seconds[first:start] == seconds[start:stop]
            and _later_numbers(transfers[first:start], each) == transfers[start:stop]
            and all(number < 0 or number >= begun[0] for number in transfers[start:])
            and [_later(one, 1, collected) for one in started[begun[0] : begun[1]]] == turn
        )
        if not alike:
            return None
        more, again = range(1, self.more + 1), transfers[start:stop]
        return TimedDevice(
            codes[:stop] + codes[start:stop] * self.more + codes[stop:],
            seconds[:stop] + seconds[start:stop] * self.more + seconds[stop:],
            [
                *transfers[:stop],
                *(number for by in more for number in _later_numbers(again, by * each)),
                *_later_numbers(transfers[stop:], self.more * each),
            ],
            [
                *started[: begun[2]],
                *(_later(one, by, collected) for by in more for one in turn),
                *(_later(one, self.more, collected) for one in tail),
            ],
        )


def _later_numbers(numbers: Sequence[int], by: int) -> list[int]:
    return [number + by if number >= 0 else number for number in numbers]


def _later(
    begun: Message | Collected | Own, by: int, collected: Counter[Hashable]
) -> Message | Collected | Own:
    """Return the transfer of a turn, `by` turns later; each turn has `collected` collectives of each key."""
    if isinstance(begun, Collected):
        return begun._replace(turn=begun.turn + by * collected[begun.what])
    if not isinstance(begun, Message) or begun.microbatch is None:
        return begun
    return begun._replace(microbatch=begun.microbatch + by)


# ---- Devices of ranks, lowered once and read once


class DeviceMemory(NamedTuple):
    """Peak of a device, without memory that it lends, and the actions that use memory elsewhere."""

    peak_bytes: int
    placed: tuple[Action, ...]


def is_alone(plan: Plan) -> bool:
    """Return whether every stage has its own device."""
    devices = {device for stage in plan.stages for device in stage.devices}
    return all(len(stage.devices) == 1 for stage in plan.stages) and len(devices) == len(plan.stages)


def as_alone(plan: Plan) -> Plan:
    """Return the plan of stages with one device each, as if stage s were on device s.

    Such actions are equal on any device; the device decides only their seconds and the destinations of
    messages.
    """
    return replace(plan, stages=tuple(replace(stage, grid=Grid.of(n)) for n, stage in enumerate(plan.stages)))


class Lowered:
    """Actions of a device of a rank in `steps` steps; its layers are those of `stages`.

    Of a step with many microbatches, only the number that determines the others is lowered and read
    (`Turns`). `known` has its programs by their number of microbatches, if they have been lowered.

    Raises:
        UsageError: a decision cannot be carried out.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        device: int,
        steps: int,
        stages: Mapping[int, StageCost],
        known: dict[int, tuple[UncheckedProgram, ...]] | None = None,
    ) -> None:
        self._plan, self._rank, self._device, self._steps, self._stages = plan, rank, device, steps, stages
        self._lowered = {} if known is None else known
        short = shortened(plan, rank, steps)
        if short is not None:
            self.programs = self._programs(short)
            more = plan.training.microbatches - short.training.microbatches
            self._turns = Turns.of(self.programs[-1].actions[device], more)
        if short is None or self._turns is None:
            self._lower_all()

    def _lower_all(self) -> None:
        """Lower all microbatches."""
        self.programs, self._turns = self._programs(self._plan), None

    def _programs(self, plan: Plan) -> tuple[UncheckedProgram, ...]:
        count = plan.training.microbatches
        if count not in self._lowered:
            self._lowered[count] = rank_programs(plan, self._rank, self._steps, [self._device])
        return self._lowered[count]

    @property
    def counts(self) -> list[int]:
        """Number of actions of each program."""
        more = 0 if self._turns is None else self._turns.more * self._turns.length
        return [len(program.actions[self._device]) + more for program in self.programs]

    def timed(self, reader: DeviceReader) -> TimedDevice:
        """Return the device for the clock: the step that repeats, or all steps if asynchronous."""
        last = self.programs[-1]
        every = [self.programs[min(step, len(self.programs) - 1)] for step in range(self._steps)]
        result = reader.read(in_a_row(every, self._device) if last.endless else last.actions[self._device])
        if self._turns is None:
            return result
        if (whole := self._turns.timed(result)) is not None:
            return whole
        self._lower_all()
        return self.timed(reader)

    def passes(self, kinds: frozenset[Kind]) -> Passes:
        """Return the positions of passes of these kinds in the last step, with their microbatches."""
        return self._passes(self.programs[-1], kinds)

    def _passes(self, program: UncheckedProgram, kinds: frozenset[Kind]) -> Passes:
        actions = enumerate(program.actions[self._device])
        result = tuple((n, a.microbatch) for n, a in actions if a.kind in kinds and not a.wait)
        return result if self._turns is None else self._turns.passes(result)

    @property
    def all_turns(self) -> tuple[int, ...]:
        """Positions of the first forwards of every microbatch in all steps."""
        result, counts = list[int](), self.counts
        for step in range(self._steps):
            number = min(step, len(self.programs) - 1)
            passes = self._passes(self.programs[number], FORWARDS)
            before = sum(counts[min(one, len(counts) - 1)] for one in range(step))
            first = dict[int | None, int]()
            for position, microbatch in passes:
                first.setdefault(microbatch, before + position)
            result += first.values()
        return tuple(result)

    @cached_property
    def held(self) -> DeviceMemory:
        """Memory of the device.

        Raises:
            UsageError: an action uses a tensor or state that does not exist at that time.
        """
        read = self._reading()
        if self._turns is not None and not all(map(self._turns.tell, read.effects)):
            self._lower_all()
            read = self._reading()
        changes = (
            (n, position, effect) for n, effects in enumerate(read.effects) for position, effect in effects
        )
        placed = read.placed
        if self.programs[-1].endless:
            placed = [
                a for program in self.programs for a in program.actions[self._device] if a.place is not None
            ]
        rest = at_rest((stage.rest for stage in self._stages.values()), 0, read.away)
        return DeviceMemory(highest(rest, changes), tuple(placed))

    def _reading(self) -> LedgerReading:
        """Read the ledger, with rows counted from the device's first: replicas then share cached effects."""
        distinct = distinct_steps(self._plan)
        read = partial(reading, self._device, self._stages, steps=self._steps, distinct=distinct)
        try:
            return read([_from_first_row(program, self._device) for program in self.programs])
        except UsageError:  # its message names other rows
            return read(self.programs)


def _first_row(program: UncheckedProgram, device: int) -> int:
    """Return the first row of microbatches that a device's actions carry; 0 if they carry all."""
    return min((action.part[0] for action in program.actions[device] if action.part), default=0)


def _from_first_row(program: UncheckedProgram, device: int) -> UncheckedProgram:
    """Return a program whose actions of a device carry rows counted from its first one."""
    first = _first_row(program, device)
    if not first:
        return program
    own = tuple(
        action
        if action.part is None
        else action._replace(part=(action.part[0] - first, action.part[1] - first))
        for action in program.actions[device]
    )
    return replace(program, actions=(*program.actions[:device], own, *program.actions[device + 1 :]))


# ---- Assembled plans


class _Memory(NamedTuple):
    """Memory of one device: its peak without memory that it lends, and the memory lent to it."""

    peak_bytes: int
    arenas: tuple[Arena, ...]


class _Unread:
    """Memory of a device, read at the first call, since a plan that is too slow need not fit.

    It drops the device's actions after that, as those of thousands of plans would be too many.
    """

    def __init__(self, read: Callable[[], _Memory]) -> None:
        self._read: Callable[[], _Memory] | None = read
        self._found = _Memory(0, ())

    def __call__(self) -> _Memory:
        if self._read is not None:
            self._found, self._read = self._read(), None
        return self._found


class DevicePart(NamedTuple):
    """One device: its actions for the clock, its forwards and backwards in the last step, and its memory.

    `memory()` raises `UsageError` if an action uses a tensor or state that does not exist at that time.
    """

    timed: TimedDevice
    counts: tuple[int, ...]  # number of its actions in every step
    forwards: Passes
    backwards: Passes
    turns: tuple[int, ...]  # first actions of every microbatch in all steps of an asynchronous schedule
    memory: Callable[[], _Memory]

    @property
    def pass_seconds(self) -> tuple[float, ...]:
        """Seconds of the forwards and backwards of the last step."""
        count = self.counts[-1]
        return tuple(self.timed.seconds[n - count] for n, _ in (*self.forwards, *self.backwards))


class _LoweredDevice(NamedTuple):
    """Lowered actions of a device, the costs of its stages, and its memory, read when it is asked for."""

    lowered: Lowered
    stages: Mapping[int, StageCost]
    held: Callable[[], DeviceMemory]


class _Read(NamedTuple):
    """Parts of the devices of a rank, and the number of actions in their programs."""

    parts: dict[int, DevicePart]
    actions: int


class Parts:
    """Cache of devices' parts, for plans of one profile, cluster and training, which share `costs`.

    `steps` are simulated; by default all distinct ones. Parts read by `shared` are not read again, but their
    actions count as if they were.
    """

    def __init__(self, costs: Costs, steps: int | None = None, shared: Parts | None = None) -> None:
        self._costs, self._steps = costs, steps
        self._read_by_all: dict[Hashable, _Read] = {} if shared is None else shared._read_by_all
        self._lowered: dict[Hashable, Lowered] = {} if shared is None else shared._lowered
        self._programs: dict[Hashable, dict[int, tuple[UncheckedProgram, ...]]] = (
            {} if shared is None else shared._programs
        )
        self._known: dict[Hashable, dict[int, DevicePart]] = {}
        self._peaks: dict[Hashable, int] = {} if shared is None else shared._peaks
        self._alike: dict[Hashable, EqualDevices | None] = {} if shared is None else shared._alike
        self._longer: dict[int, Parts] = {}
        self.actions = 0  # in the programs of all requested devices, once each

    @property
    def actions_of_all(self) -> int:
        """Number of actions in all programs read, by any sharer."""
        return sum(read.actions for read in self._read_by_all.values())

    def apart(self) -> Parts:
        """Return a cache that shares the parts but counts its own requests."""
        return Parts(self._costs, self._steps, self)

    def longer(self, steps: int) -> Parts:
        """Return a cache of parts for more steps, whose actions do not count."""
        if steps not in self._longer:
            result = self._longer[steps] = Parts(self._costs, steps)
            result._alike, result._programs = self._alike, self._programs
        return self._longer[steps]

    def steps(self, plan: Plan) -> int:
        """Return the number of simulated steps of a plan."""
        return distinct_steps(plan) if self._steps is None else self._steps

    def alike(self, plan: Plan) -> EqualDevices | None:
        """Return the devices that represent all devices of a plan; None if no device represents another."""
        key = (
            tuple(stage.grid for stage in plan.stages),
            tuple(plan.summed.values()),
            plan.training.microbatch_size,
            frozenset(decision.what for decision in plan.decisions),
        )
        if key not in self._alike:
            self._alike[key] = alike(plan)
        return self._alike[key]

    def of_rank(self, plan: Plan, rank: int, standing: EqualDevices | None = None) -> dict[int, DevicePart]:
        """Return the parts of a rank's devices, or of those that represent the others (`standing`).

        Raises:
            UsageError: a decision cannot be carried out.
        """
        own, stands, key = self._own(plan, rank, standing)
        if key not in self._known:
            if key not in self._read_by_all:
                self._read_by_all[key] = self._read(own, rank, self.steps(plan), stands)
            self._known[key], actions = self._read_by_all[key]
            self.actions += actions
        return self._known[key]

    def peak_of_rank(self, plan: Plan, rank: int) -> int:
        """Return the highest peak of a rank's devices, without memory that they lend; nothing is timed.

        Raises:
            UsageError: a decision cannot be carried out, or an action uses what does not exist at that time.
        """
        own, stands, key = self._own(plan, rank, None)
        if key in self._known or is_alone(plan):
            return max(part.memory().peak_bytes for part in self.of_rank(plan, rank).values())
        if key not in self._peaks:
            every = self._lowered_all(own, rank, self.steps(plan), stands)
            self._peaks[key] = max(one.held().peak_bytes for one in every.values())
            self.actions += sum(sum(one.lowered.counts) for one in every.values())
        return self._peaks[key]

    def _own(
        self, plan: Plan, rank: int, standing: EqualDevices | None
    ) -> tuple[Plan, Sequence[int], Hashable]:
        """Return a plan with only a rank's decisions, the devices to read, and a key of what these need."""
        stages, steps = plan.ranks[rank], self.steps(plan)
        decisions = tuple(decision for decision in plan.decisions if decision.stage in stages)
        own = tuple(plan.stages[stage] for stage in stages)
        summed = tuple(
            (number, members) for number, members in plan.summed.items() if set(members) & set(stages)
        )
        there = plan.stages[stages[0]].devices
        stands = there if standing is None else tuple(standing.devices[device] for device in there)
        key = rank, tuple(stage.grid for stage in plan.stages), own, decisions, summed, steps, stands
        return replace(plan, decisions=decisions), stands, key

    def _read(self, plan: Plan, rank: int, steps: int, stands: Sequence[int]) -> _Read:
        """Return the parts of a rank's representative devices; the actions of all its devices count."""
        if is_alone(plan):
            with suppress(UsageError):  # its message would name another device
                return self._read_alone(plan, rank, steps)
        return self._read_all(plan, rank, steps, stands)

    def _read_alone(self, plan: Plan, rank: int, steps: int) -> _Read:
        """Return the parts of a rank with one device, which may share its lowered actions with other devices.

        Raises:
            UsageError: a decision cannot be carried out.
        """
        place, device = plan.stages[rank], plan.stages[rank].devices[0]
        stages = {rank: self._costs_of(plan, rank, device)}
        summed = tuple((number, members) for number, members in plan.summed.items() if rank in members)
        own = rank, len(plan.stages), place.start, place.stop, plan.decisions, summed
        key = *own, steps
        if key not in self._lowered:
            known = self._programs.setdefault((*own, min(steps, distinct_steps(plan))), {})
            self._lowered[key] = Lowered(as_alone(plan), rank, rank, steps, stages, known)
        lowered = self._lowered[key]

        def held() -> DeviceMemory:
            try:
                return lowered.held
            except UsageError:  # its message names another device
                return Lowered(plan, rank, device, steps, stages).held

        part = self._part(plan, device, lowered, steps, stages, held)
        return _Read({device: part}, sum(lowered.counts))

    def _read_all(self, plan: Plan, rank: int, steps: int, stands: Sequence[int]) -> _Read:
        """Return the parts of any rank.

        Raises:
            UsageError: a decision cannot be carried out.
        """
        every = self._lowered_all(plan, rank, steps, stands)
        parts = {
            device: self._part(plan, device, one.lowered, steps, one.stages, one.held)
            for device, one in every.items()
        }
        return _Read(parts, sum(sum(every[device].lowered.counts) for device in stands))

    def _lowered_all(
        self, plan: Plan, rank: int, steps: int, stands: Sequence[int]
    ) -> dict[int, _LoweredDevice]:
        """Return the lowered actions of some devices of a rank, which share the results of equal ledgers.

        Raises:
            UsageError: a decision cannot be carried out.
        """
        told = dict[Hashable, DeviceMemory]()

        def lowered(device: int) -> _LoweredDevice:
            stages = {number: self._costs_of(plan, number, device) for number in plan.ranks[rank]}
            result = Lowered(plan, rank, device, steps, stages)

            def held() -> DeviceMemory:
                key = _alike(result.programs, device, stages)
                if key not in told:
                    told[key] = result.held
                return told[key]

            return _LoweredDevice(result, stages, held)

        return {device: lowered(device) for device in dict.fromkeys(stands)}

    def _part(
        self,
        plan: Plan,
        device: int,
        lowered: Lowered,
        steps: int,
        stages: Mapping[int, StageCost],
        held: Callable[[], DeviceMemory],
    ) -> DevicePart:
        """Return the part of a device from its lowered actions, perhaps those of an equal device."""
        program = replace(lowered.programs[-1], placement=plan.placement)
        nbytes = moved_bytes(program, {number: stage.rest for number, stage in stages.items()})

        def memory() -> _Memory:
            peak_bytes, placed = held()
            return _Memory(
                peak_bytes, tuple(arenas_for(device, placed, nbytes, plan.cluster.devices[device].host))
            )

        timed = lowered.timed(DeviceReader(device, program, plan.cluster, stages, nbytes))
        counts = lowered.counts
        return DevicePart(
            timed=timed,
            counts=tuple(counts[min(step, len(counts) - 1)] for step in range(steps)),
            forwards=lowered.passes(FORWARDS),
            backwards=lowered.passes(frozenset({Kind.BACKWARD})),
            turns=lowered.all_turns if program.endless else (),
            memory=_Unread(memory),
        )

    def _costs_of(self, plan: Plan, number: int, device: int) -> StageCost:
        """Return the costs of a stage on one of its devices."""
        return self._costs.of_device(plan, number, device, plan.stages[number].devices)

    def storages(self, plan: Plan) -> list[StageStorages]:
        """Return the storages of every stage."""
        return [self._costs_of(plan, n, stage.devices[0]).storages for n, stage in enumerate(plan.stages)]


def _alike(programs: Sequence[UncheckedProgram], device: int, stages: Mapping[int, StageCost]) -> Hashable:
    """Return a key that is equal for devices with equal ledgers.

    Their stages have equal costs, and their actions use rows at the same distance from their first one, with
    neighbours in the same order, and the same hosts and devices that lend memory.
    """
    peers, first = dict[object, int](), _first_row(programs[0], device)
    result = list[object]()
    for program in programs:
        for kind, stage, microbatch, layers, subject, place, part, wait in program.actions[device]:
            is_peer = place is not None and (kind in MESSAGES or kind in COLLECTIVE)
            peer = peers.setdefault(place, len(peers)) if is_peer else place
            rows = None if part is None else (part[0] - first, part[1] - first)
            result.append((kind, stage, microbatch, layers, subject, peer, rows, wait))
    return tuple(
        (number, id(stage_cost.flights), stage_cost.share) for number, stage_cost in stages.items()
    ), tuple(result)


def assembled(plan: Plan) -> Assembled:
    """Return one plan, assembled without a shared cache."""
    return Assembled(plan, Parts(Costs.of(plan)))


_LONGER = 1, 2, 4, 8, 16  # multiples of the fewest steps, which are simulated until they repeat
_ROUNDING = 1e-9


class Assembled:
    """Simulated plan; only its new parts are lowered and read.

    Raises:
        UsageError: a decision cannot be carried out; for some decisions, when peaks are computed.
    """

    def __init__(self, plan: Plan, parts: Parts) -> None:
        self.plan, self.parts, self._endless = plan, parts, plan.training.endless
        self._steps, self._alike = parts.steps(plan), parts.alike(plan)
        of_ranks = (parts.of_rank(plan, rank, self._alike) for rank in range(len(plan.ranks)))
        self._read = dict(
            chain.from_iterable(result.items() for result in of_ranks)
        )  # of those that represent others
        stands = {device: device for device in self._read} if self._alike is None else self._alike.devices
        self._devices = {device: self._read[one] for device, one in stands.items()}
        self._slowest = slowest(
            {device: part.timed for device, part in self._read.items()},
            lambda device: self._read[device].pass_seconds,
            plan.cluster,
        )
        self._stands = {device: self._slowest[one] for device, one in stands.items()}

    @property
    def actions(self) -> int:
        """Number of actions in the programs of all steps."""
        return sum(sum(part.counts) for part in self._devices.values())

    @cached_property
    def arenas(self) -> tuple[Arena, ...]:
        """Memory that devices and hosts lend to devices."""
        return tuple(chain(*(self._devices[device].memory().arenas for device in sorted(self._devices))))

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most bytes allocated on every device."""
        devices = range(len(self.plan.cluster.devices))
        own = [
            self._devices[device].memory().peak_bytes if device in self._devices else 0 for device in devices
        ]
        return tuple(own[device] + lent_bytes(self.arenas, Member.device(device)) for device in devices)

    def peak_of(self, device: int) -> int:
        """Return the most bytes allocated on one device; others are read only if the plan moves tensors."""
        if any(decision.place is not None for decision in self.plan.decisions):
            return self.peak_bytes[device]
        return self._devices[device].memory().peak_bytes

    @property
    def fits(self) -> bool:
        """True if every device and every host has enough memory."""
        budgets = self.plan.cluster.budgets
        full = any(part.memory().peak_bytes > budgets[device] for device, part in self._devices.items())
        full = full or any(peak > budget for peak, budget in zip(self.peak_bytes, budgets, strict=True))
        return not full and not any(missing_bytes(self.plan, self.arenas).values())

    @cached_property
    def step_seconds(self) -> tuple[float, ...]:
        """Seconds of every simulated step."""
        return self.times.step_seconds

    @cached_property
    def seconds(self) -> float:
        """Mean seconds of a step in a long run, which is that of the steps from which on all repeat."""
        last = self.step_seconds[-1]
        steady = self._steady_asynchronous if self._endless else self._steady_synchronous
        return last if isclose(last, steady, rel_tol=_ROUNDING) else steady

    @property
    def _steady_synchronous(self) -> float:
        if self.times.steps_are_apart:
            return self.step_seconds[-1]
        runs = list[Run]()
        for times in _LONGER:
            runs = self._times(3 * times).runs()
            if (result := repeating(runs, window=1)) is not None:
                return result
        return mean_cycle(runs)

    @property
    def _steady_asynchronous(self) -> float:
        """Seconds of a step under PipeDream, where every microbatch is a turn, or PipeDream-2BW.

        Turns last until their transfers end, so the window has as many as microbatches are in flight.
        """
        how, stages = self.plan.training, len(self.plan.stages)
        pipedream = how.schedule == "pipedream"
        turn = period(self.plan) if pipedream else how.microbatches
        window = -(-stages // turn) if pipedream else 1
        least = -(-2 * stages // turn) + 2 * window + 1  # turns that fill the pipeline, and the known ones
        runs = list[Run]()
        for times in _LONGER:
            steps = max(self._steps, -(-times * least * turn // how.microbatches))
            other = self if steps == self._steps else Assembled(self.plan, self.parts.longer(steps))
            runs = other._runs(turn)
            if (result := repeating(runs, window=window)) is not None:
                return result * how.microbatches / turn
        return mean_cycle(runs) * how.microbatches / turn

    def _runs(self, turn: int) -> list[Run]:
        """Return the runs of all devices in cycles of `turn` microbatches."""
        return [
            (np.array(self.times.clock.after[device]), part.turns[::turn])
            for device, part in self._read.items()
            if self._slowest[device] == device
        ]

    @cached_property
    def utilisation(self) -> tuple[float, ...]:
        """Share of the last step in which every device computes."""
        shares = list(self.times.utilisation)
        for device, one in self._stands.items():
            same = self._devices[device] is self._read[one]
            shares[device] = shares[one] if same else self._utilisation_beside(device, one)
        return tuple(shares)

    @property
    def last_ends(self) -> dict[int, float]:
        """The time at which every device ends its last action."""
        return {device: self.times.clock.after[one][-1] for device, one in self._stands.items()}

    def _utilisation_beside(self, device: int, one: int) -> float:
        """Return a device's share; `one` represents it, and computes at least as long in every action."""
        count, timed = self._devices[device].counts[-1], self._timed_program.devices[one]
        seconds = zip(timed.codes, timed.seconds, self._devices[device].timed.seconds, strict=True)
        busy = [own if code == COMPUTE else taken for code, taken, own in seconds]
        return sum(busy[-count:]) / self.step_seconds[-1]

    @cached_property
    def times(self) -> Times:
        """Start and end times of all actions and transfers of the simulated steps."""
        return self._times(self._steps)

    def _times(self, steps: int) -> Times:
        """Return the times of so many steps, under an asynchronous schedule of the simulated ones."""
        none = (0,) * self._steps
        counts = [
            self._read[device].counts if self._slowest.get(device) == device else none
            for device in range(len(self.plan.cluster.devices))
        ]
        if not self._endless:
            counts = [own[:1] * steps for own in counts]
        return Times(self._timed_program, counts, endless=self._endless)

    @cached_property
    def _timed_program(self) -> TimedProgram:
        devices, idle = range(len(self.plan.cluster.devices)), TimedDevice([], [], [], [])
        timed = [
            self._read[device].timed if self._slowest.get(device) == device else idle for device in devices
        ]
        sizes = message_sizes(self.plan, self.plan.placement, self.parts.storages(self.plan))
        return TimedProgram(timed, self.plan.cluster, sizes, self._alike or EqualDevices(self._slowest))

    def forwards_ended(self, device: int) -> dict[int | None, float]:
        """Return the end time of every microbatch's forward in the last step on a device."""
        after = self.times.clock.after[self._stands[device]]
        return {
            microbatch: after[at]
            for at, microbatch in self._in_last_step(device, self._devices[device].forwards)
        }

    def backwards_run(self, device: int) -> dict[int | None, tuple[float, float]]:
        """Return the start and end time of every microbatch's backward in the last step on a device."""
        after, result = (
            [0.0, *self.times.clock.after[self._stands[device]]],
            dict[int | None, tuple[float, float]](),
        )
        for at, microbatch in self._in_last_step(device, self._devices[device].backwards):
            begin, _ = result.get(microbatch, (after[at], 0.0))
            result[microbatch] = begin, after[at + 1]
        return result

    def _in_last_step(self, device: int, passes: Passes) -> Iterator[tuple[int, int | None]]:
        """Yield the positions of the last step's passes among the actions of all steps."""
        before = self.times.starts(self._stands[device])[-2]
        return ((before + position, microbatch) for position, microbatch in passes)
