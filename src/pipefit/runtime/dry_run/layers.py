"""Repeated layers: a dry run executes four of equal layers in a row, and they stand for all of them.

Layers with equal settings have equal effects on memory, as long as their neighbors and the actions on them
are equal too. So the first and the last of the row are kept, which have other neighbors, and two between
them, which must agree. The plan, its program and the chain are shortened to these layers, and stages run them
without changes. A repeat may consist of many layers, such as those of a block.

A repeat lies within one stage. Every action covers the whole repeat, or lies within one of its equal parts,
as the recomputation of a block and the move of its state do; then the actions of all parts are equal and in
equal order. A shared parameter, a hook, a setting that cannot be compared, or an offloaded saved tensor make
a layer unequal to all others. Replicas that shard the stage's state own different layers: then one device is
run as if it owned all layers and one as if it owned none (`runtime.dry_run.devices`), and events of both are
repeated for the other layers (`runtime.dry_run.devices`). Finding repeats takes milliseconds for 400 layers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipefit.capture import Chain, ChainLayer, Task, constants, module_key, storage_key
from pipefit.capture.parameter_groups import parameter_groups
from pipefit.fake_cuda.fingerprint import options
from pipefit.measure import SCALAR_BYTES, Kernels, Meter, Number, Tracked
from pipefit.memory import StageStorages
from pipefit.runtime.dry_run.microbatches import ALL_LAYERS, Bytes, BytesChange, StandIn, plus
from pipefit.runtime.engine.stage import StageRunner
from pipefit.runtime.optim.half_precision import copies_of
from pipefit.schema.actions import COMPUTE, COPIES, Action, Bundle, Kind, Subject
from pipefit.schema.layer_costs import SharedParameter
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Measurement
from pipefit.schema.program import Program
from pipefit.schema.trace import CATEGORIES, Category, MemorySample

KEPT = 4  # executions in a repeat: its ends and two between them
_LONGEST = 400  # layers that are repeated together
_STAND_IN = KEPT - 2  # number of the execution that stands for others


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

    @property
    def stop(self) -> int:
        """The layer after the last one."""
        return self.start + self.period * self.count


Span = tuple[int, int]  # the first layer, and the one after the last


class Passing(NamedTuple):
    """How an action passes through repeated layers.

    It passes through all copies of the repeats `covered`, in a computation at least through those `swept`; or
    it is on layers of one `copy`, and `relative` is the action with layers counted from the copy's first.
    """

    covered: frozenset[int] = frozenset()
    swept: frozenset[int] = frozenset()
    copy: Copy | None = None
    relative: Hashable = None


@dataclass(frozen=True, kw_only=True)
class Shortened:
    """A plan without the represented layers, with its program and chain.

    `copies` has for every layer of this plan its execution, None outside of repeats. `passings` maps the text
    of an action to its way through the repeats. `absent` is the number of trained parameters left out, and
    `kept` are the layers that are not left out. `stand` maps actions of the whole program to executed ones.
    `whole` is the plan of all layers, and `repeats` are in its numbers.
    """

    plan: Plan
    program: Program
    chain: Chain
    copies: tuple[Copy | None, ...]
    passings: Mapping[str, Passing]
    absent: int
    kept: tuple[int, ...]
    whole: Plan
    repeats: tuple[Repeat, ...] = ()
    stand: StandIn = ALL_LAYERS

    def shortened(self, chain: Chain) -> Chain:
        """Return another chain of the same model without the omitted layers."""
        return replace(chain, layers=tuple(chain.layers[layer] for layer in self.kept))

    @staticmethod
    def of(
        task: Task, plan: Plan, program: Program, chain: Chain, unlike: frozenset[int] = frozenset()
    ) -> Shortened:
        """Shorten `plan` and its program by all layers that others stand for; none stands for one of
        `unlike`.
        """
        keys = _distinct(_keys(task, plan, chain, _movers(plan, program) | unlike))
        actions = _Actions(program, plan)
        repeats = [r for stage in plan.stages for r in _repeats(keys, stage.start, stage.stop, actions)]
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
        moves = _Moves(repeats, program)
        executed = _program(program, kept, moves)
        return Shortened(
            plan=short,
            program=executed,
            chain=replace(chain, layers=layers),
            copies=copies,
            passings=_passings(short, executed, copies, layers),
            absent=sum(parameter.requires_grad for parameter in left_out),
            kept=tuple(kept),
            whole=plan,
            repeats=tuple(repeats),
            stand=StandIn(moves.instead, moves.twin, moves.execution),
        )

    @staticmethod
    def none(plan: Plan, program: Program, chain: Chain) -> Shortened:
        """Return `plan` with all of its layers."""
        copies, kept = (None,) * len(chain.layers), tuple(range(len(chain.layers)))
        return Shortened(
            plan=plan,
            program=program,
            chain=chain,
            copies=copies,
            passings={},
            absent=0,
            kept=kept,
            whole=plan,
        )


# ---------------------------------------------------------------- actions on layers


def _span(action: Action, program: Program) -> Span | None:
    """Return the layers of an action; None if it is on the whole stage."""
    if action.layers is not None:
        return action.layers
    if action.kind in COPIES:
        layers = [subject.layer for subject in program.moved(action)]
        return min(layers), max(layers) + 1
    return None


class _Actions:
    """The actions on parts of stages, by their first layers."""

    def __init__(self, program: Program, plan: Plan) -> None:
        self._of_layers: list[dict[int, list[_Placed]]] = [{} for _ in plan.profile.layers]
        for device, actions in enumerate(program.actions):
            for position, action in enumerate(actions):
                if (span := _span(action, program)) is not None:
                    first, stop = span
                    placed = _Placed(device, position, _relative(action, first, program))
                    self._of_layers[first].setdefault(stop, []).append(placed)

    def limit(self, start: int, period: int, stop: int) -> int:
        """Return the last possible end of a repeat from `start` on, at most `stop`.

        Every action on some of its layers covers the repeat, or lies within one of its copies.
        """
        for first in range(stop):
            if first >= stop:
                break
            for end in self._of_layers[first]:
                copy = start + (first - start) // period * period
                if end <= start or (first >= start and end <= copy + period):
                    continue
                stop = min(stop, end if first <= start else copy)
        return stop

    def within(self, start: int, stop: int) -> Hashable:
        """Return the actions within these layers in their order, independently of the first layer."""
        result = [
            (placed, first - start, end - start)
            for first in range(start, stop)
            for end, actions in self._of_layers[first].items()
            for placed in actions
            if end <= stop
        ]
        result.sort(key=lambda one: one[0][:2])
        return tuple((placed.device, placed.action, *span) for placed, *span in result)


class _Placed(NamedTuple):
    """An action without its layers, and its position in a device's program."""

    device: int
    position: int
    action: Hashable


def _relative(action: Action, first: int, program: Program) -> Hashable:
    """Return an action with layers counted from `first`."""
    moved = (
        tuple((subject.layer - first, subject.what) for subject in program.moved(action))
        if action.kind in COPIES
        else action.subject
    )
    return action._replace(layers=None, subject=None), moved


class _Moves:
    """Actions moved from one copy of a repeat to another one, in the numbers of the whole program."""

    def __init__(self, repeats: Sequence[Repeat], program: Program) -> None:
        self._program = program
        self._bundles = {bundle: Bundle(number) for number, bundle in reversed([*enumerate(program.bundles)])}
        self._shifts = dict[int, int]()  # to the stand-in, by omitted layer
        self._twins = dict[int, int]()  # to the twin, by layer of the stand-in
        self._executions = dict[int, tuple[int, int]]()  # repeat, and number in it, of every repeated layer
        for repeat_number, repeat in enumerate(repeats):
            self._executions |= {
                layer: (repeat_number, (layer - repeat.start) // repeat.period)
                for layer in range(repeat.start, repeat.stop)
            }
            stand_in = range(repeat.start + _STAND_IN * repeat.period, repeat.omitted.start)
            self._twins |= dict.fromkeys(stand_in, -repeat.period)
            for layer in repeat.omitted:
                self._shifts[layer] = stand_in.start + (layer - repeat.start) % repeat.period - layer
        self._known: dict[Hashable, tuple[int, int] | None] = {}

    def instead(self, action: Action) -> Action | None:
        """Return the executed action for an action on omitted layers; None if it is executed."""
        return self._moved(action, self._shifts)

    def execution(self, action: Action) -> int | None:
        """Return the number of an execution that an action lies within; None if it lies within none."""
        if action.layers is None and action.kind not in COPIES:
            return None
        first, last = (self._executions.get(layer) for layer in self._ends(action))
        return first[1] if first is not None and first == last else None

    def twin(self, action: Action) -> Action | None:
        """Return the action on the twin for an action on a stand-in alone, or else None."""
        return self._moved(action, self._twins)

    def _moved(self, action: Action, shifts: Mapping[int, int]) -> Action | None:
        if action.layers is None and action.kind not in COPIES:
            return None
        first, last = self._ends(action)
        if first not in shifts or last not in shifts:
            return None
        if action.layers is not None:
            start, stop = action.layers
            return action._replace(layers=(start + shifts[first], stop + shifts[first]))
        moved = tuple(
            subject._replace(layer=subject.layer + shifts[subject.layer])
            for subject in self._program.moved(action)
        )
        return action._replace(
            subject=moved[0] if isinstance(action.subject, Subject) else self._bundles[moved]
        )

    def _ends(self, action: Action) -> tuple[int, int]:
        """Return the first and the last layer of an action."""
        key = action.layers, action.subject
        if key not in self._known:
            span = _span(action, self._program)
            assert span is not None
            self._known[key] = span[0], span[1] - 1
        return self._known[key]  # type: ignore[return-value]


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
            module_key(layer.module),
            _groups(task, layer),
        )
        for number, layer in enumerate(chain.layers)
    ]


def _movers(plan: Plan, program: Program) -> frozenset[int]:
    """Return the layers that save or return offloaded tensors."""
    copies = {
        (action.stage, program.moved(action))
        for actions in program.actions
        for action in actions
        if action.kind in COPIES and not action.moves_state
    }
    result = set[int]()
    for stage, subjects in copies:
        storages = StageStorages.of(plan, stage)
        moved = {storages.storage(subject) for subject in subjects}
        result |= {
            min(storages.start + position, storages.stop - 1)
            for position, layer in enumerate(storages.layers)
            if moved.intersection((*layer.saves, *layer.outputs))
        }
    return frozenset(result)


def _groups(task: Task, layer: ChainLayer) -> object:
    """Return the properties of a layer's parameter groups that matter to memory."""
    groups = [group for groups in parameter_groups([layer], task.groups) for group in groups]
    return [
        (len(group["params"]), options({k: v for k, v in group.items() if k != "params"})) for group in groups
    ]


def _distinct(keys: Iterable[object]) -> list[int]:
    """Return numbers that are equal for equal keys, which may have no hash."""
    known, result = list[object](), list[int]()
    for key in keys:
        number = next((number for number, other in enumerate(known) if other == key), len(known))
        known[number:] = known[number:] or [key]
        result.append(number)
    return result


def _repeats(keys: Sequence[int], start: int, stop: int, actions: _Actions) -> Iterator[Repeat]:
    """Yield the repeats within layers `start` to `stop - 1` that omit some layers."""
    places = defaultdict[int, list[int]](list)
    for layer in range(start, stop):
        places[keys[layer]].append(layer)
    while start < stop:
        periods = (layer - start for layer in places[keys[start]] if start < layer <= start + _LONGEST)
        best = Repeat(start, 1, KEPT)
        for period in periods:
            if len(best.omitted) >= stop - start - KEPT * period:  # this period cannot omit more
                break
            other = Repeat(start, period, _count(keys, start, stop, period, actions))
            best = other if len(other.omitted) > len(best.omitted) else best
        if best.omitted:
            yield best
            start = best.stop
        else:
            start += 1


def _count(keys: Sequence[int], start: int, stop: int, period: int, actions: _Actions) -> int:
    """Return the number of consecutive equal copies of the `period` layers from `start` on."""
    end = start + period
    while end < stop and keys[end] == keys[end - period]:
        end += 1
    count = (end - start) // period
    if count > KEPT:
        count = (actions.limit(start, period, end) - start) // period
    if count > KEPT:
        pairs = range(start, start + (count - 1) * period, period)  # of neighbouring copies
        first = actions.within(start, start + 2 * period)
        unlike = (n for n, at in enumerate(pairs) if actions.within(at, at + 2 * period) != first)
        count = next((n + 1 for n in unlike), count)
    return count


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


def _program(program: Program, kept: Sequence[int], moves: _Moves) -> Program:
    """Return the program without the actions on omitted layers, with layers renumbered among those `kept`."""

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
        actions=tuple(
            tuple(counted(action) for action in actions if moves.instead(action) is None)
            for actions in program.actions
        ),
        bundles=tuple(tuple(map(renamed, bundle)) for bundle in program.bundles),
    )


def _passings(
    plan: Plan, program: Program, copies: Sequence[Copy | None], layers: Sequence[ChainLayer]
) -> dict[str, Passing]:
    """Map the text of every action to its way through the repeats.

    An update sweeps through the repeats with trained parameters.
    """
    result, known = dict[str, Passing](), dict[Hashable, Passing]()
    for action in (action for actions in program.actions for action in actions):
        key = action.kind, action.stage, action.layers, action.subject
        if key not in known:
            known[key] = _passing(plan, program, action, copies, layers)
        result[str(action)] = known[key]
    return result


def _passing(
    plan: Plan,
    program: Program,
    action: Action,
    copies: Sequence[Copy | None],
    layers: Sequence[ChainLayer],
) -> Passing:
    """Return the way of an action through the repeats."""
    stage, span = plan.stages[action.stage], _span(action, program)
    first, end = span or (stage.start, stage.stop)
    through = {copy for copy in copies[first:end] if copy is not None}
    if span is not None and len(through) == 1:
        (copy,) = through
        start = copies.index(copy)
        relative = _relative(action._replace(microbatch=None), start, program), first - start, end - start
        return Passing(copy=copy, relative=relative)
    swept = (
        copy.repeat
        for copy, layer in zip(copies[first:end], layers[first:end], strict=True)
        if copy is not None
        and action.kind in COMPUTE
        and (action.kind is not Kind.STEP or any(p.requires_grad for p in layer.module.parameters()))
        and (action.kind is not Kind.STEP or stage.grid.shard == "none")  # only owners update
    )
    return Passing(frozenset(copy.repeat for copy in through), frozenset(swept))


# ---- The memory of a device with represented layers
# A storage belongs to the layers that were active at its allocation. Layers are active from the first
# operation on one of their parameters or buffers to the first on those of other layers, or during an action
# on them alone. An action that covers a repeat passes through all of its copies, in a forward, a backward or
# an update; the passages are equal for all but the ends. The two executions between the ends must agree on
# every passage and on all storages they hold. If they do not, or if an operation works on the whole repeat at
# once, the dry run is repeated with all layers. Otherwise a passage that stands for several is multiplied:
# level and peak follow by arithmetic. An action within one copy has its own effect, which
# `dry_run.microbatches` repeats for equal actions on omitted layers.
#
# Costs a few microseconds per operation more than `Meter`, and nothing without repeated layers.

NEXT_STEP = "the next step"  # name of the phase that begins after a step's last action
_ACTIVATIONS = CATEGORIES.index(Category.ACTIVATIONS)
_TWIN = 1  # number of the execution that must be equal to the stand-in
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
        passings: maps the text of an action to its way through repeats.
        place: torch device of the device's tensors.
    """

    def __init__(
        self,
        device: int,
        *,
        kernels: Kernels | None,
        passings: Mapping[str, Passing],
        place: torch.device | None = None,
    ) -> None:
        super().__init__(device, kernels=kernels, place=place)
        self.alike = True
        self._passings, self._passing = passings, Passing()
        self._own: dict[int, Copy | None] = {}  # by storage: parameters, buffers and master weights
        self._maker: dict[int, Copy | None] = {}  # by storage: the layers that were active
        self._numbers = Counter[Copy | None]()  # of scalars that autograd keeps, by active layers
        self._stand_ins: set[Copy] = set()
        self._at_work: Copy | None = None
        self._passages: list[Passage] = []
        self._from: Bytes = tuple(self.bytes)
        self._began: list[Bytes] = []  # present bytes, and those of each execution
        self._held: list[dict[Copy, Bytes]] = []
        self._ways: list[Passing] = []
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
                _take(copy, [weight_copy.tensor for _, weight_copy in stage.copies.of(number)], self._own)
                trained = [masters.get(parameter, parameter) for parameter in parameters]
                held = [*layer.module.buffers(), *constants(layer.module)]
                _take(copy, [*parameters, *held, *trained], self._own)
                _take(copy, [state[parameter] for parameter in trained if parameter in state], born)
        self._maker |= self._own | born
        self._stand_ins |= {copy for copy in copies if copy is not None and copy.number == _STAND_IN}

    @property
    def level(self) -> Bytes:
        """Present bytes of every category on the whole device, at rest."""
        held, result = self._of_copies(), tuple(self.bytes)
        for copy in self._stand_ins:
            own, twin = held[copy], held[Copy(copy.repeat, _TWIN, 1)]
            self.alike &= own == twin
            result = plus(result, own, copy.times - 1)
        return result

    def _of_copies(self) -> dict[Copy, Bytes]:
        """Return the present bytes of every execution that stands for others, and of its twin."""
        twins = [Copy(copy.repeat, _TWIN, 1) for copy in self._stand_ins]
        held = {copy: [0] * len(CATEGORIES) for copy in (*self._stand_ins, *twins)}
        for key, tracked in self._live.items() if held else ():
            if (own := held.get(self._maker.get(key))) is not None:  # type: ignore[arg-type]
                own[tracked.category] += tracked.nbytes
        for copy, count in self._numbers.items() if held else ():
            if (own := held.get(copy)) is not None:  # type: ignore[arg-type]
                own[_ACTIVATIONS] += SCALAR_BYTES * count
        return {copy: tuple(own) for copy, own in held.items()}

    def changes(self) -> list[BytesChange]:
        """Return the effects of every action since the last call on the whole device."""
        self.begin(NEXT_STEP)
        began, held, ways, peaks = self._began, self._held, self._ways, self._peaks
        self._began, self._held, self._ways, self._peaks = [], [], [], []
        return [
            BytesChange(peak, self._grown(way, plus(after, before, -1), own, behind))
            for peak, way, (before, after), (own, behind) in zip(
                peaks, ways, pairwise(began), pairwise(held), strict=False
            )
        ]

    def _grown(
        self, way: Passing, change: Bytes, before: Mapping[Copy, Bytes], after: Mapping[Copy, Bytes]
    ) -> Bytes:
        """Return the change of an action on the whole device, from its own and those of each execution."""
        for copy in self._stand_ins:
            if copy.repeat in way.covered:
                twin = Copy(copy.repeat, _TWIN, 1)
                grown = plus(after[copy], before[copy], -1)
                self.alike &= grown == plus(after[twin], before[twin], -1)
                change = plus(change, grown, copy.times - 1)
        return change

    # ---------------------------------------------------------------- meter interface

    def begin(self, action: str) -> None:
        super().begin(action)
        self._passing = self._passings.get(action, Passing())
        self._at_work, self._passages = self._passing.copy, []
        self._from = tuple(self.bytes)
        self._began.append(self._from)
        self._held.append(self._of_copies())
        self._ways.append(self._passing)

    def end(self, step: int, seconds: float, category: Category = Category.TEMPORARY) -> MemorySample:
        self._pass_on(None)
        self.alike &= self._whole_sweeps()
        self._peaks.append(self._highest())
        return super().end(step, seconds, category)

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._stand_ins:
            return super().operation(func, args, kwargs)
        storages = storages_in((args, kwargs))
        owners = {copy for key in storages if (copy := self._own.get(key)) is not None}
        if len(owners) == 1 and self._is_passed(owner := owners.pop()) and owner != self._at_work:
            self._settle_numbers()
            self._pass_on(owner)
        known = (len(self._born), self._peak)
        out = super().operation(func, args, kwargs)
        if known != (len(self._born), self._peak):
            makers = Counter(
                copy.repeat for copy in {self._maker.get(key) for key in storages} if copy is not None
            )
            self.alike &= len(owners) <= 1 and max(makers.values(), default=0) < KEPT
        return out

    def _is_passed(self, copy: Copy) -> bool:
        """Return whether the present action passes through the whole repeat of a copy."""
        return copy.repeat in self._passing.covered

    def _track(self, tensor: Tensor) -> Tracked:
        key = storage_key(tensor)
        if key not in self._live:
            self._maker[key] = self._at_work
        return super()._track(tensor)

    def count_number(self, number: Number, change: int) -> None:
        if change > 0:
            number.execution = self._at_work
        self._numbers[number.execution] += change
        super().count_number(number, change)

    # ---------------------------------------------------------------- passages

    def _pass_on(self, copy: Copy | None) -> None:
        """Make the layers of `copy` active."""
        now = tuple(self.bytes)
        at_peak, after = plus(tuple(self._peak_bytes), self._from, -1), plus(now, self._from, -1)
        self._passages.append(Passage(self._at_work, at_peak, after))
        self._at_work, self._from = copy, now
        self._peak, self._peak_bytes = self.total, list(self.bytes)

    def _whole_sweeps(self) -> bool:
        """Return whether the action passed evenly through every expected repeat, from one end to the
        other.
        """
        numbers: defaultdict[int, list[int]] = defaultdict(list)
        for copy, _, _ in self._passages:
            if copy is not None and self._is_passed(copy):
                numbers[copy.repeat].append(copy.number)
        whole = all(
            result[place : place + 4] in _SWEEPS
            for result in numbers.values()
            for place in range(0, len(result), 4)
        )
        return whole and self._passing.swept <= set(numbers) and self._even()

    def _even(self) -> bool:
        """Return whether every passage that stands for several equals the adjacent passage of its twin."""
        for before, here, behind in zip(self._passages, self._passages[1:], self._passages[2:], strict=False):
            if here.copy is not None and here.copy.number == _STAND_IN and self._is_passed(here.copy):
                twin = Passage(Copy(here.copy.repeat, _TWIN, 1), here.at_peak, here.after)
                if twin not in (before, behind):
                    return False
        return True

    def _highest(self) -> Bytes:
        """Return the peak of an action on the whole device, above its initial level.

        Of a multiplied passage, the last or the first has the highest peak.
        """
        level = highest = (0,) * len(CATEGORIES)
        for copy, at_peak, after in self._passages:
            times = 1 if copy is None or not self._is_passed(copy) else copy.times
            top = plus(plus(level, after, times - 1) if sum(after) > 0 else level, at_peak)
            highest = max(highest, top, key=sum)
            level = plus(level, after, times)
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
