"""Why a device is full: what every layer has in its memory as the action begins at which it is fullest.

    for row in contents(plan, device=0).layers: ...

Costs: the time of one simulation, and that of one more walk through the programs of the devices that are asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipefit.cost.passes import Working
from pipefit.cost.rest import LayerState
from pipefit.cost.stage import Costs, StageCost
from pipefit.decisions import State, What
from pipefit.plans import Plan
from pipefit.program import Program
from pipefit.schedule import step_programs
from pipefit.simulator.ledger import Ledger
from pipefit.simulator.simulation import simulate
from pipefit.trace import MemorySample, Trace


class LayerContents(NamedTuple):
    """Bytes of one layer. A state that a decision moves counts as none: it comes and goes.

    `parameter_bytes` are with buffers and constants, `copy_bytes` those of half-precision copies of weights.
    `activation_bytes` are of what the layer has made and a backward still needs, in so many `microbatches`. Layer None
    has what came from the stage before, or from the data.
    """

    layer: int | None
    parameter_bytes: int
    copy_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    microbatches: int

    @property
    def total_bytes(self) -> int:
        """All of them."""
        state = self.parameter_bytes + self.copy_bytes + self.gradient_bytes + self.optimizer_bytes
        return state + self.activation_bytes


class TensorContents(NamedTuple):
    """An activation of a layer, of so many bytes in each of its `microbatches`.

    `operation` is autograd's that keeps it first, with its shape; both are empty where nothing does: what is handed on.
    Layer None has what came from the stage before, or from the data.
    """

    layer: int | None
    operation: str
    shape: tuple[int, ...]
    nbytes: int
    microbatches: int


class Contents(NamedTuple):
    """What is on a device as an action begins, by layers and by activations, and the bytes at the action's peak."""

    peak: MemorySample
    layers: tuple[LayerContents, ...]
    tensors: tuple[TensorContents, ...]


def contents(plan: Plan, device: int) -> Contents | None:
    """What fills a device at its peak; None for a device without a stage."""
    return contents_at(plan, device, simulate(plan).devices[device].peak)


def contents_at(plan: Plan, device: int, moment: MemorySample | None) -> Contents | None:
    """What fills a device as an action of a step begins, by the plan's account; None for a device without a stage.

    Steps behind those that differ are alike, so that of a moment in one of them the last that differs is told.
    """
    programs = step_programs(plan)
    if moment is None or moment.action not in map(str, programs[-1].actions[device]):  # of an evaluation, for example
        return None
    return _contents(plan, device, moment, programs, Costs.of(plan))


def all_contents(plan: Plan, trace: Trace) -> list[Contents | None]:
    """The same for every device; `trace` is that of the plan's simulation."""
    programs, costs = step_programs(plan), Costs.of(plan)
    return [_contents(plan, device, one.peak, programs, costs) for device, one in enumerate(trace.devices)]


def _contents(
    plan: Plan, device: int, moment: MemorySample | None, programs: Sequence[Program], costs: Costs
) -> Contents | None:
    body = programs[-1]
    stages = {
        number: costs.of_device(plan, number, device, stage.devices)
        for number, stage in enumerate(plan.stages)
        if device in stage.devices
    }
    if moment is None or not stages:
        return None
    ledger = Ledger(device, stages, body)  # the first steps may not move everything yet
    last = min(moment.step, len(programs) + 1)
    for step in range(last + 1):
        actions = programs[min(step, len(programs) - 1)].actions[device]
        here = list(map(str, actions)).index(moment.action) if step == last else len(actions)
        ledger.read(actions[:here])
    rows = (row for number, cost in stages.items() for row in _rows(ledger, number, cost, _moving(plan, number)))
    tensors = (one for number, cost in stages.items() for one in _tensors(ledger, number, cost))
    return Contents(moment, tuple(rows), tuple(tensors))


def _moving(plan: Plan, stage: int) -> set[tuple[str, int]]:
    """The states of layers that decisions move."""
    found = set()
    for decision in plan.decisions:
        if decision.stage == stage and isinstance(decision.subject, State):
            kinds = ("gradients", "optimizer") if decision.what is What.UPDATE else (decision.subject.kind,)
            found |= {(kind, layer) for kind in kinds for layer in decision.layers}
    return found


def _rows(ledger: Ledger, number: int, cost: StageCost, moving: set[tuple[str, int]]) -> list[LayerContents]:
    """The layers of a stage, after what came from elsewhere."""
    flights, born, stepped = ledger.contents(number)
    gathered, rest = ledger.gathered(number), cost.rest
    saved, counts = Counter[int](), Counter[int]()
    for residency in flights:
        found = Working(cost.storages, residency).activations()
        saved.update(found)
        counts.update(found.keys())
    elsewhere = [LayerContents(None, 0, 0, 0, 0, saved[-1], counts[-1])] if saved[-1] else []
    return elsewhere + [
        LayerContents(
            layer,
            (0 if ("parameters", layer) in moving else sum(map(rest.static_bytes, positions)) - rest.copies_here(layer))
            + (rest.unsharded_bytes(layer) - copies if layer in gathered else 0),
            copies,
            _state(cost, "gradients", layer, moving) if layer in born else 0,
            _state(cost, "optimizer" if layer in stepped else "early optimizer", layer, moving),
            sum(saved[one] for one in positions),
            max(counts[one] for one in positions),
        )
        for layer in range(cost.start, cost.stop)
        for positions in [_positions(cost, layer)]
        for copies in [rest.storages.copy_bytes(layer) if layer in gathered else rest.copies_here(layer)]
    ]


def _tensors(ledger: Ledger, number: int, cost: StageCost) -> Iterator[TensorContents]:
    """The activations of a stage, each kind of instance once."""
    found = Counter[tuple[int, int, int]]()
    for residency in ledger.contents(number)[0]:
        found.update(Working(cost.storages, residency).kept())
    for (maker, storage, nbytes), count in found.items():
        layer = None if maker < 0 else min(cost.start + maker, cost.stop - 1)
        tensor = cost.storages.saved_as.get(storage)
        operation = "copies of buffers" if storage < 0 else tensor.operation if tensor else ""
        yield TensorContents(layer, operation, tensor.shape if tensor else (), nbytes, count)


def _positions(cost: StageCost, layer: int) -> range:
    """The position of a layer; the loss counts with the last one."""
    first = layer - cost.start
    return range(first, cost.storages.count if layer == cost.stop - 1 else first + 1)


def _state(cost: StageCost, kind: LayerState, layer: int, moving: set[tuple[str, int]]) -> int:
    return 0 if (kind.removeprefix("early "), layer) in moving else cost.rest.bytes_of(kind, layer, layer + 1)
