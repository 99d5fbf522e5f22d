"""Repeated layers: a dry run executes four of equal layers in a row, and they stand for all of them.

Layers with equal settings have equal effects on memory, as long as their neighbors are equal too. So the
first and the last of the row are kept, which have other neighbors, and two between them, which must agree.
The plan, its program and the chain are shortened to these layers, and stages run them without changes. A
repeat may consist of up to 40 layers, such as those of a block.

A repeat lies within one stage and, with recomputation, within one piece. A shared parameter, a hook, a
setting that cannot be compared, an offloaded saved tensor, or replicas that shard the stage's state make a
layer unequal to all others. Finding repeats takes milliseconds for 400 layers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipefit.capture.chain import Chain, ChainLayer, module_settings
from pipefit.capture.copying import constants
from pipefit.capture.parameter_groups import parameter_groups
from pipefit.capture.storages import storage_key
from pipefit.capture.task import Task
from pipefit.fake_cuda.fingerprint import options
from pipefit.measure.cpu import SCALAR_BYTES, Meter, Tracked
from pipefit.measure.kernels import Kernels
from pipefit.memory.storages import StageStorages
from pipefit.runtime.dry_run.microbatches import Bytes, Change
from pipefit.runtime.engine.stage import StageRunner
from pipefit.runtime.optim.half_precision import copies_of
from pipefit.schema.actions import COMPUTE, COPIES, Action, Kind, Subject
from pipefit.schema.layer_costs import SharedParameter
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Measurement
from pipefit.schema.program import Program
from pipefit.schema.trace import CATEGORIES, Category, MemorySample

KEPT = 4  # executions in a repeat: its ends and two between them
_LONGEST = 40  # layers that are repeated together


class Copy(NamedTuple):
    """One execution of repeated layers: number 0 to 3 of a repeat. Number 2 stands for `times` executions."""

    repeat: int
    number: int
    times: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """`count` times the same `period` layers, from layer `start` on."""

    start: int
    period: int
    count: int

    @property
    def omitted(self) -> range:
        """Layers that are not executed."""
        first = self.start + (KEPT - 1) * self.period
        return range(first, first + (self.count - KEPT) * self.period)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """A plan without the represented layers, with its program and chain.

    `copies` has for every layer of this plan its execution, None outside of repeats. `swept` maps the text of
    an action to the repeats that it passes through. `absent` is the number of trained parameters left out,
    and `kept` are the layers that are not left out.
    """

    plan: Plan
    program: Program
    chain: Chain
    copies: tuple[Copy | None, ...]
    swept: Mapping[str, frozenset[int]]
    absent: int
    kept: tuple[int, ...]

    def shortened(self, chain: Chain) -> Chain:
        """Return another chain of the same model without the omitted layers."""
        return replace(chain, layers=tuple(chain.layers[layer] for layer in self.kept))

    @staticmethod
    def of(task: Task, plan: Plan, program: Program, chain: Chain) -> Shortened:
        """Shorten `plan` by all layers that others stand for."""
        keys = _keys(task, plan, chain, _movers(plan, program) | _divided(plan))
        repeats = [repeat for start, stop in _ranges(plan, program) for repeat in _repeats(keys, start, stop)]
        omitted = {layer for repeat in repeats for layer in repeat.omitted}
        if not omitted:
            return Shortened.none(plan, program, chain)
        kept = [layer for layer in range(len(chain.layers)) if layer not in omitted]
        layers = tuple(chain.layers[layer] for layer in kept)
        where = {
            layer: copy for number, repeat in enumerate(repeats) for layer, copy in _copies(number, repeat)
        }
        copies, short = tuple(where.get(layer) for layer in kept), _plan(plan, kept)
        left_out = (parameter for layer in omitted for parameter in chain.layers[layer].module.parameters())
        program = _program(program, kept)
        return Shortened(
            plan=short,
            program=program,
            chain=replace(chain, layers=layers),
            copies=copies,
            swept=_swept(short, program, copies, layers),
            absent=sum(parameter.requires_grad for parameter in left_out),
            kept=tuple(kept),
        )

    @staticmethod
    def none(plan: Plan, program: Program, chain: Chain) -> Shortened:
        """Return `plan` with all of its layers."""
        copies, kept = (None,) * len(chain.layers), tuple(range(len(chain.layers)))
        return Shortened(
            plan=plan, program=program, chain=chain, copies=copies, swept={}, absent=0, kept=kept
        )


# ---------------------------------------------------------------- finding repeats


def _keys(task: Task, plan: Plan, chain: Chain, movers: frozenset[int]) -> list[object]:
    """Return keys of layers, equal for layers with equal effects on memory, given equal neighbors."""
    sharing = {user for shared in chain.shared for user in shared.users}
    held = [list(map(id, (*layer.module.buffers(), *constants(layer.module)))) for layer in chain.layers]
    users = Counter(tensor for own in held for tensor in set(own))
    common = [tuple(tensor for tensor in own if users[tensor] > 1) for own in held]
    return [
        object()
        if number in sharing or number in movers
        else (
            tuple(measurement.layers[number] for measurement in plan.profile.measurements),
            common[number],
            module_settings(layer.module, id),
            _groups(task, layer),
        )
        for number, layer in enumerate(chain.layers)
    ]


def _movers(plan: Plan, program: Program) -> frozenset[int]:
    """Return the layers that save or return offloaded tensors, or whose state is offloaded."""
    copies = [action for actions in program.actions for action in actions if action.kind in COPIES]
    result = {subject.layer for action in copies if action.moves_state for subject in program.moved(action)}
    for stage, subjects in {(a.stage, program.moved(a)) for a in copies if not a.moves_state}:
        storages = StageStorages.of(plan, stage)
        moved = {storages.storage(subject) for subject in subjects}
        result |= {
            min(storages.start + position, storages.stop - 1)
            for position, layer in enumerate(storages.layers)
            if moved.intersection((*layer.saves, *layer.outputs))
        }
    return frozenset(result)


def _divided(plan: Plan) -> frozenset[int]:
    """Return the layers of stages whose state replicas shard, layer by layer."""
    stages = (stage for stage in plan.stages if stage.grid.shard != "none")
    return frozenset(layer for stage in stages for layer in range(stage.start, stage.stop))


def _groups(task: Task, layer: ChainLayer) -> object:
    """Return the properties of a layer's parameter groups that matter to memory."""
    groups = [group for groups in parameter_groups([layer], task.groups) for group in groups]
    return [
        (len(group["params"]), options({k: v for k, v in group.items() if k != "params"})) for group in groups
    ]


def _ranges(plan: Plan, program: Program) -> Iterator[tuple[int, int]]:
    """Yield the ranges of layers within which no action begins or ends."""
    edges = {edge for stage in plan.stages for edge in (stage.start, stage.stop)}
    edges |= {edge for actions in program.actions for action in actions for edge in action.layers or ()}
    ordered = sorted(edges)
    yield from pairwise(ordered)


def _repeats(keys: Sequence[object], start: int, stop: int) -> Iterator[Repeat]:
    """Yield the repeats within layers `start` to `stop - 1` that omit some layers."""
    while start < stop:
        result = [
            Repeat(start, period, _count(keys, start, stop, period)) for period in range(1, _LONGEST + 1)
        ]
        best = max(result, key=lambda repeat: len(repeat.omitted))
        if best.omitted:
            yield best
        start += best.period * best.count if best.omitted else 1


def _count(keys: Sequence[object], start: int, stop: int, period: int) -> int:
    """Return the number of consecutive repetitions of the `period` layers from `start` on."""
    end = start + period
    while end < stop and keys[end] == keys[end - period]:
        end += 1
    return (end - start) // period


def _copies(number: int, repeat: Repeat) -> Iterator[tuple[int, Copy]]:
    """Yield the executed layers of a repeat, with their executions."""
    every = range(repeat.start, repeat.start + repeat.period * repeat.count)
    for place, layer in enumerate(layer for layer in every if layer not in repeat.omitted):
        copy = place // repeat.period
        yield layer, Copy(number, copy, repeat.count - KEPT + 1 if copy == KEPT - 2 else 1)


# ---------------------------------------------------------------- shortening


def _plan(plan: Plan, kept: Sequence[int]) -> Plan:
    """Return the plan for a model of the layers `kept`, for execution only: its decisions are in the
    program.
    """
    measurements = tuple(_measurement(measurement, kept) for measurement in plan.profile.measurements)
    names = tuple(plan.profile.layers[layer] for layer in kept)
    stages = (
        replace(s, start=bisect_left(kept, s.start), stop=bisect_left(kept, s.stop)) for s in plan.stages
    )
    return replace(
        plan,
        profile=replace(plan.profile, layers=names, blocks=(), measurements=measurements, additive=None),
        stages=tuple(stages),
        decisions=(),
    )


def _measurement(measurement: Measurement, kept: Sequence[int]) -> Measurement:
    """Return the measurement of the layers `kept`."""

    def renumbered(shared: SharedParameter) -> SharedParameter:
        users, copying, cast_only = (
            tuple(bisect_left(kept, n) for n in numbers)
            for numbers in (shared.users, shared.copying, shared.cast_only)
        )
        return replace(shared, users=users, copying=copying, cast_only=cast_only)

    shared = tuple(map(renumbered, measurement.shared))
    layers = tuple(measurement.layers[layer] for layer in kept)
    return replace(measurement, layers=layers, shared=shared, shared_buffers=())


def _program(program: Program, kept: Sequence[int]) -> Program:
    """Return the program with layers renumbered among those `kept`."""

    def counted(action: Action) -> Action:
        if action.layers is not None:
            first, end = action.layers
            return action._replace(layers=(bisect_left(kept, first), bisect_left(kept, end)))
        if action.kind in COPIES and isinstance(action.subject, Subject):
            return action._replace(subject=renamed(action.subject))
        return action

    def renamed(subject: Subject) -> Subject:
        return subject._replace(layer=bisect_left(kept, subject.layer))

    return replace(
        program,
        actions=tuple(tuple(map(counted, actions)) for actions in program.actions),
        bundles=tuple(tuple(map(renamed, bundle)) for bundle in program.bundles),
    )


def _swept(
    plan: Plan, program: Program, copies: Sequence[Copy | None], layers: Sequence[ChainLayer]
) -> dict[str, frozenset[int]]:
    """Map the text of every computing action to the repeats that it passes through.

    For an update, these are the repeats with trained parameters.
    """
    result: dict[str, frozenset[int]] = {}
    for action in (action for actions in program.actions for action in actions if action.kind in COMPUTE):
        stage = plan.stages[action.stage]
        first, end = action.layers or (stage.start, stage.stop)
        result[str(action)] = frozenset(
            copy.repeat
            for copy, layer in zip(copies[first:end], layers[first:end], strict=True)
            if copy is not None
            and (action.kind is not Kind.STEP or any(p.requires_grad for p in layer.module.parameters()))
        )
    return result


# ---- The memory of a device with represented layers
# A storage belongs to the layers that were active at its allocation. Layers are active from the first
# operation on one of their parameters or buffers to the first on those of other layers. The passages of
# active layers, in a forward, a backward or an update, are equal for all layers of a repeat but its ends. The
# two executions between the ends must agree on every passage and on all storages they hold. If they do not,
# or if an operation works on the whole repeat at once, the dry run is repeated with all layers. Otherwise a
# passage that stands for several is multiplied: level and peak follow by arithmetic.
#
# Costs a few microseconds per operation more than `Meter`, and nothing without repeated layers.

NEXT_STEP = "the next step"  # name of the phase that begins after a step's last action
_ACTIVATIONS = CATEGORIES.index(Category.ACTIVATIONS)
_TWIN, _STAND_IN = 1, 2  # numbers of the executions between the ends of a repeat
_SWEEPS = ([0, 1, 2, 3], [3, 2, 1, 0])


class Passage(NamedTuple):
    """Effects while the layers of `copy` were active: at the peak, and at the end."""

    copy: Copy | None
    at_peak: Bytes
    after: Bytes


class RepeatedMeter(Meter):  # type: ignore[no-untyped-call]
    """A meter of the whole device, although not all of its layers are executed.

    `alike` turns False if layers turn out to differ: then the meter's results are invalid.

    Args:
        swept: maps the text of an action to the repeats that it must pass through.
        place: torch device of the device's tensors.
    """

    def __init__(
        self,
        device: int,
        *,
        kernels: Kernels | None,
        swept: Mapping[str, frozenset[int]],
        place: torch.device | None = None,
    ) -> None:
        super().__init__(device, kernels=kernels, place=place)
        self.alike = True
        self._swept = swept
        self._own: dict[int, Copy | None] = {}  # by storage: parameters, buffers and master weights
        self._maker: dict[int, Copy | None] = {}  # by storage: the layers that were active
        self._numbers = Counter[Copy | None]()  # of scalars that autograd keeps, by active layers
        self._stand_ins: set[Copy] = set()
        self._at_work: Copy | None = None
        self._passages: list[Passage] = []
        self._from: Bytes = tuple(self.bytes)
        self._began: list[Bytes] = []
        self._peaks: list[Bytes] = []

    def own_layers(self, stage: StageRunner, copies: Sequence[Copy | None]) -> None:
        """Register tensors that the layers of a stage, each of one of `copies`, hold from the start."""
        masters, state = (
            copies_of(stage.optimizer),
            stage.optimizer.state if stage.optimizer is not None else {},
        )
        born: dict[int, Copy | None] = {}
        for number, (layer, copy) in enumerate(zip(stage.layers, copies, strict=True), start=stage.start):
            if copy is not None:
                parameters = list(layer.module.parameters())
                _take(copy, [one.tensor for _, one in stage.copies.of(number)], self._own)
                trained = [masters.get(parameter, parameter) for parameter in parameters]
                held = [*layer.module.buffers(), *constants(layer.module)]
                _take(copy, [*parameters, *held, *trained], self._own)
                _take(copy, [state[parameter] for parameter in trained if parameter in state], born)
        self._maker |= self._own | born
        self._stand_ins |= {copy for copy in copies if copy is not None and copy.number == _STAND_IN}

    @property
    def level(self) -> Bytes:
        """Present bytes of every category on the whole device."""
        held: defaultdict[Copy, list[int]] = defaultdict(lambda: [0] * len(CATEGORIES))
        for key, tracked in self._live.items() if self._stand_ins else ():
            copy = self._maker.get(key)
            if copy is not None:
                held[copy][tracked.category] += tracked.nbytes
        for copy, count in self._numbers.items():
            if copy is not None:
                held[copy][_ACTIVATIONS] += SCALAR_BYTES * count
        result: Bytes = tuple(self.bytes)
        for copy in self._stand_ins:
            self.alike &= held[copy] == held[Copy(copy.repeat, _TWIN, 1)]
            result = _plus(result, held[copy], copy.times - 1)
        return result

    def changes(self) -> list[Change]:
        """Return the effects of every action since the last call on the whole device."""
        self.begin(NEXT_STEP)
        began, peaks = self._began, self._peaks
        self._began, self._peaks = [], []
        return [
            Change(_plus(peak, before, -1), _plus(after, before, -1))
            for peak, (before, after) in zip(peaks, pairwise(began), strict=True)
        ]

    # ---------------------------------------------------------------- meter interface

    def begin(self, action: str) -> None:
        super().begin(action)
        self._at_work, self._passages = None, []
        self._from = tuple(self.bytes)
        self._began.append(self.level)

    def end(self, step: int, seconds: float, category: Category = Category.TEMPORARY) -> MemorySample:
        self._pass_on(None)
        self.alike &= self._whole_sweeps()
        peak: Any = self._highest(self._began[-1])
        self._peaks.append(peak)
        return replace(super().end(step, seconds, category), bytes=peak)

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._stand_ins:
            return super().operation(func, args, kwargs)
        storages = storages_in((args, kwargs))
        owners = {copy for key in storages if (copy := self._own.get(key)) is not None}
        if len(owners) == 1 and (owner := owners.pop()) != self._at_work:
            if self._spent:
                self._release_scalars()
            self._pass_on(owner)
        known = (len(self._born), self._peak)
        out = super().operation(func, args, kwargs)
        if known != (len(self._born), self._peak):
            makers = Counter(
                copy.repeat for copy in {self._maker.get(key) for key in storages} if copy is not None
            )
            self.alike &= len(owners) <= 1 and max(makers.values(), default=0) < KEPT
        return out

    def _track(self, tensor: Tensor) -> Tracked:
        key = storage_key(tensor)
        if key not in self._live:
            self._maker[key] = self._at_work
        return super()._track(tensor)

    def _hold_scalars(self, number: int) -> None:
        self._numbers[self._at_work] += number
        super()._hold_scalars(number)

    # ---------------------------------------------------------------- passages

    def _pass_on(self, copy: Copy | None) -> None:
        """Make the layers of `copy` active."""
        now = tuple(self.bytes)
        at_peak, after = _plus(tuple(self._peak_bytes), self._from, -1), _plus(now, self._from, -1)
        self._passages.append(Passage(self._at_work, at_peak, after))
        self._at_work, self._from = copy, now
        self._peak, self._peak_bytes = self.total, list(self.bytes)

    def _whole_sweeps(self) -> bool:
        """Return whether the action passed evenly through every expected repeat, from one end to the
        other.
        """
        numbers: defaultdict[int, list[int]] = defaultdict(list)
        for copy, _, _ in self._passages:
            if copy is not None:
                numbers[copy.repeat].append(copy.number)
        whole = all(
            result[place : place + 4] in _SWEEPS
            for result in numbers.values()
            for place in range(0, len(result), 4)
        )
        return whole and self._swept.get(self.action, frozenset()) <= set(numbers) and self._even()

    def _even(self) -> bool:
        """Return whether every passage that stands for several equals the adjacent passage of its twin."""
        for before, here, behind in zip(self._passages, self._passages[1:], self._passages[2:], strict=False):
            if here.copy is not None and here.copy.number == _STAND_IN:
                twin = Passage(Copy(here.copy.repeat, _TWIN, 1), here.at_peak, here.after)
                if twin not in (before, behind):
                    return False
        return True

    def _highest(self, level: Bytes) -> Bytes:
        """Return the peak of an action on the whole device, from its initial `level`.

        Of a multiplied passage, the last or the first has the highest peak.
        """
        highest = level
        for copy, at_peak, after in self._passages:
            times = 1 if copy is None else copy.times
            top = _plus(_plus(level, after, times - 1) if sum(after) > 0 else level, at_peak)
            highest = max(highest, top, key=sum)
            level = _plus(level, after, times)
        return highest


def _take(copy: Copy, tensors: Sequence[Any], owners: dict[int, Copy | None]) -> None:
    """Enter `copy` as the owner of these tensors' storages. A buffer that several layers share gets None."""
    for key in storages_in(tensors):
        owners[key] = copy if owners.get(key, copy) == copy else None


def storages_in(item: Any) -> set[int]:
    """Return the storages of all tensors in an operation's arguments, including nested collections."""
    if isinstance(item, Tensor):
        return {storage_key(item)}
    if isinstance(item, dict):
        return storages_in(list(item.values()))
    return set().union(*map(storages_in, item)) if isinstance(item, (tuple, list)) else set()


def _plus(one: Bytes, other: Iterable[int], times: int = 1) -> Bytes:
    return tuple(a + times * b for a, b in zip(one, other, strict=True))
