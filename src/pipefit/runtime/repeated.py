"""Repeated layers: a dry run executes four of many equal layers in a row, and they stand for all of them.

Layers of equal settings do the same to memory, one after the other, as long as their neighbours are equal too. So the
first and the last of the row are kept, whose neighbours are others, and two between them, which have to agree
(`pipefit.runtime.repeated_meter`). The plan, its program and the chain are shortened to these layers, and the stages
know nothing of it. What is repeated may be up to 40 layers together, such as those of a block.

A repeat lies within one stage and, where layers are recomputed, within one piece. A shared parameter, a hook, a setting
that cannot be compared, a saved tensor that is moved away, or replicas that divide the stage's state make a layer equal
to no other. Finding repeats takes
milliseconds for 400 layers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from pipefit.actions import COMPUTE, COPIES, Action, Kind, Subject
from pipefit.capture.chain import Chain, ChainLayer
from pipefit.capture.constants import constants
from pipefit.capture.parameter_groups import parameter_groups
from pipefit.capture.settings import module_settings
from pipefit.capture.task import Task
from pipefit.cost.storages import StageStorages
from pipefit.fake.fingerprint import options
from pipefit.plans import Plan
from pipefit.profiles import Measurement
from pipefit.program import Program
from pipefit.sharing import SharedParameter

KEPT = 4  # executions in a repeat: its ends and two between them
_LONGEST = 40  # layers that are repeated together


class Copy(NamedTuple):
    """One execution of repeated layers: number 0 to 3 of a repeat. Number 2 stands for as many as `times` says."""

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
        """The layers that are not executed."""
        first = self.start + (KEPT - 1) * self.period
        return range(first, first + (self.count - KEPT) * self.period)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """A plan without the layers that others stand for, with its program and chain.

    `copies` has for every layer of this plan the execution that it belongs to, None outside of repeats. `swept` has for
    the text of an action the repeats that it passes through. `absent` are the trained parameters left out, and `kept`
    the layers that are not.
    """

    plan: Plan
    program: Program
    chain: Chain
    copies: tuple[Copy | None, ...]
    swept: Mapping[str, frozenset[int]]
    absent: int
    kept: tuple[int, ...]

    def shortened(self, chain: Chain) -> Chain:
        """Another chain of the same model without those layers."""
        return replace(chain, layers=tuple(chain.layers[layer] for layer in self.kept))

    @staticmethod
    def of(task: Task, plan: Plan, program: Program, chain: Chain) -> Shortened:
        """`plan` without the layers that others stand for."""
        keys = _keys(task, plan, chain, _movers(plan, program) | _divided(plan))
        repeats = [repeat for start, stop in _ranges(plan, program) for repeat in _repeats(keys, start, stop)]
        omitted = {layer for repeat in repeats for layer in repeat.omitted}
        if not omitted:
            return Shortened.none(plan, program, chain)
        kept = [layer for layer in range(len(chain.layers)) if layer not in omitted]
        layers = tuple(chain.layers[layer] for layer in kept)
        where = {layer: copy for number, repeat in enumerate(repeats) for layer, copy in _copies(number, repeat)}
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
        """`plan` with all of its layers."""
        copies, kept = (None,) * len(chain.layers), tuple(range(len(chain.layers)))
        return Shortened(plan=plan, program=program, chain=chain, copies=copies, swept={}, absent=0, kept=kept)


# ---------------------------------------------------------------- finding repeats


def _keys(task: Task, plan: Plan, chain: Chain, movers: frozenset[int]) -> list[object]:
    """For every layer a key that is equal where layers do the same to memory, given equal neighbours."""
    sharing = {user for shared in chain.shared for user in shared.users}
    held = [list(map(id, (*layer.module.buffers(), *constants(layer.module)))) for layer in chain.layers]
    users = Counter(tensor for own in held for tensor in set(own))
    common = [tuple(tensor for tensor in own if users[tensor] > 1) for own in held]
    return [
        object()
        if number in sharing or number in movers
        else (
            tuple(one.layers[number] for one in plan.profile.measurements),
            common[number],
            module_settings(layer.module, id),
            _groups(task, layer),
        )
        for number, layer in enumerate(chain.layers)
    ]


def _movers(plan: Plan, program: Program) -> frozenset[int]:
    """The layers that save or return something which is moved away."""
    copies = [action for actions in program.actions for action in actions if action.kind in COPIES]
    found = {subject.layer for action in copies if action.moves_state for subject in program.moved(action)}
    for stage, subjects in {(a.stage, program.moved(a)) for a in copies if not a.moves_state}:
        storages = StageStorages.of(plan, stage)
        moved = {storages.storage(subject) for subject in subjects}
        found |= {
            min(storages.start + position, storages.stop - 1)
            for position, layer in enumerate(storages.layers)
            if moved.intersection((*layer.saves, *layer.outputs))
        }
    return frozenset(found)


def _divided(plan: Plan) -> frozenset[int]:
    """The layers of stages whose state replicas divide, layer by layer."""
    stages = (stage for stage in plan.stages if stage.grid.shard != "none")
    return frozenset(layer for stage in stages for layer in range(stage.start, stage.stop))


def _groups(task: Task, layer: ChainLayer) -> object:
    """A layer's parameter groups, as far as they matter to memory."""
    groups = [group for groups in parameter_groups([layer], task.groups) for group in groups]
    return [(len(group["params"]), options({k: v for k, v in group.items() if k != "params"})) for group in groups]


def _ranges(plan: Plan, program: Program) -> Iterator[tuple[int, int]]:
    """The ranges of layers between which no action begins or ends."""
    edges = {edge for stage in plan.stages for edge in (stage.start, stage.stop)}
    edges |= {edge for actions in program.actions for action in actions for edge in action.layers or ()}
    ordered = sorted(edges)
    yield from pairwise(ordered)


def _repeats(keys: Sequence[object], start: int, stop: int) -> Iterator[Repeat]:
    """The repeats within layers `start` to `stop - 1` of which some layers need not be executed."""
    while start < stop:
        found = [Repeat(start, period, _count(keys, start, stop, period)) for period in range(1, _LONGEST + 1)]
        best = max(found, key=lambda repeat: len(repeat.omitted))
        if best.omitted:
            yield best
        start += best.period * best.count if best.omitted else 1


def _count(keys: Sequence[object], start: int, stop: int, period: int) -> int:
    """How often the `period` layers from `start` on come one after the other."""
    end = start + period
    while end < stop and keys[end] == keys[end - period]:
        end += 1
    return (end - start) // period


def _copies(number: int, repeat: Repeat) -> Iterator[tuple[int, Copy]]:
    """The layers of a repeat that are executed, and which execution they belong to."""
    every = range(repeat.start, repeat.start + repeat.period * repeat.count)
    for place, layer in enumerate(layer for layer in every if layer not in repeat.omitted):
        copy = place // repeat.period
        yield layer, Copy(number, copy, repeat.count - KEPT + 1 if copy == KEPT - 2 else 1)


# ---------------------------------------------------------------- shortening


def _plan(plan: Plan, kept: Sequence[int]) -> Plan:
    """The plan for a model of the layers `kept`, which is for execution alone: its decisions are in the program."""
    measurements = tuple(_measurement(measurement, kept) for measurement in plan.profile.measurements)
    names = tuple(plan.profile.layers[layer] for layer in kept)
    stages = (replace(s, start=bisect_left(kept, s.start), stop=bisect_left(kept, s.stop)) for s in plan.stages)
    return replace(
        plan,
        profile=replace(plan.profile, layers=names, blocks=(), measurements=measurements, additive=None),
        stages=tuple(stages),
        decisions=(),
    )


def _measurement(measurement: Measurement, kept: Sequence[int]) -> Measurement:
    """The measurement of the layers `kept` alone."""

    def renumbered(shared: SharedParameter) -> SharedParameter:
        users, copying, cast_only = (
            tuple(bisect_left(kept, n) for n in numbers) for numbers in (shared.users, shared.copying, shared.cast_only)
        )
        return replace(shared, users=users, copying=copying, cast_only=cast_only)

    shared = tuple(map(renumbered, measurement.shared))
    layers = tuple(measurement.layers[layer] for layer in kept)
    return replace(measurement, layers=layers, shared=shared, shared_buffers=())


def _program(program: Program, kept: Sequence[int]) -> Program:
    """The program with its layers counted among those `kept`."""

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
    """For the text of every computing action the repeats that it passes through; an update, those that are trained."""
    found: dict[str, frozenset[int]] = {}
    for action in (action for actions in program.actions for action in actions if action.kind in COMPUTE):
        stage = plan.stages[action.stage]
        first, end = action.layers or (stage.start, stage.stop)
        found[str(action)] = frozenset(
            copy.repeat
            for copy, layer in zip(copies[first:end], layers[first:end], strict=True)
            if copy is not None
            and (action.kind is not Kind.STEP or any(p.requires_grad for p in layer.module.parameters()))
        )
    return found
