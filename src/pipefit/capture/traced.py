"""A traced model as a chain: pieces of the program become modules that hold the model's own parameters.

Every layer holds, under local names, the parameters and buffers that it uses: the model's own objects, so
training the chain trains the model. Tensors that the program does not use go to the layer nearest by name.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

from torch import fx, nn
from torch.export import ExportedProgram

from pipefit.capture.chain import Chain, ChainLayer
from pipefit.capture.data_flow import Flow, sums
from pipefit.capture.exporting import export
from pipefit.capture.flat_graph import flatten, nbytes, operator_name, plain, role, stack, value
from pipefit.capture.graph_layer import Binding, layer_class, write
from pipefit.capture.parameter_groups import WHY
from pipefit.capture.refusals import LooksAtValues
from pipefit.capture.structure import Tree
from pipefit.capture.task import Granularity, Task
from pipefit.capture.whole_modules import wider
from pipefit.errors import UsageError
from pipefit.schema.profile import Block, Target

# ---- Units of a traced model: the module, a block or half a block in size, of each operation
#
# A block is a part of a container whose parts are of one class, such as transformer.h.3, or a module without
# blocks inside. A module that runs most of the model's operations is split into its parts. Takes time linear
# in the number of operations and modules.

_WAIST = 1.25  # a factor: bytes between blocks in a unit, relative to around it
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class Units:
    """The unit of every operation: one of the modules that the operation ran in."""

    def __init__(self, flow: Flow, module: nn.Module, *, deeper: bool) -> None:
        self.flow, self.deeper = flow, deeper
        self.modules = dict(module.named_modules(remove_duplicate=False))
        self._holds = with_blocks(self.modules)
        self._of_blocks = frozenset(
            path for path, part in self.modules.items() if self._parts_are_blocks(path, part)
        )

    @cached_property
    def of_all(self) -> list[str]:
        """The unit of each operation; "" for operations without a unit."""
        result, lone = self._found(frozenset()), frozenset[str]()
        while more := self._too_large(result) - lone:  # split a module with most of the model's operations
            lone |= more
            result = self._found(lone)
        return result

    def _found(self, lone: frozenset[str]) -> list[str]:
        units = {path: self._of(path, lone) for path in self._paths}
        return [units[stack(node)] for node in self.flow.order]

    @cached_property
    def _paths(self) -> frozenset[tuple[str, ...]]:
        """The module paths of all operations, one for each innermost module."""
        return frozenset(stack(node) for node in self.flow.order)

    def _of(self, path: Sequence[str], lone: frozenset[str]) -> str:
        """Return the unit of an operation that ran in the modules of `path`."""
        inside = [part for part in path if part]
        depth = next((n for n, part in enumerate(inside) if part not in lone and self._is_unit(part)), None)
        if depth is None:
            return ""
        depth = max((n for n, part in enumerate(inside) if _parent(part) in self._rows), default=depth)
        return inside[depth + 1] if self.deeper and depth + 1 < len(inside) else inside[depth]

    def _is_unit(self, path: str) -> bool:
        path = plain(path)
        module = self.modules.get(path)
        if module is None or _parent(path) in self._of_blocks:
            return True
        return path not in self._holds and not isinstance(module, _CONTAINERS)

    def _parts_are_blocks(self, path: str, module: nn.Module) -> bool:
        """Return whether `module` is a container of blocks: parts of one class, or without blocks inside."""
        if not isinstance(module, _CONTAINERS):
            return False
        classes = [type(part) for part in module.children()]
        inside = (f"{path}.{name}" if path else name for name, _ in module.named_children())
        return (len(set(classes)) == 1 and len(classes) > 1) or self._holds.isdisjoint(inside)

    def _too_large(self, units: Sequence[str]) -> frozenset[str]:
        """Return units that have parts and run more than half of all operations."""
        return frozenset(
            unit
            for unit, count in Counter(units).items()
            if unit
            and count > len(units) / 2
            and any(True for _ in self.modules[plain(unit)].children())
            and not isinstance(self.modules.get(_parent(unit)), _CONTAINERS)
        )

    @cached_property
    def _rows(self) -> frozenset[str]:
        """Containers in units whose parts are blocks in a row: no more crosses between them than around.

        So the stages of a vision model are divided, but not the experts of a block, nor modules that a
        shortcut skips.
        """
        around, spans, result = self._around_containers(), self._spans(), set[str]()
        calls = defaultdict[str, list[tuple[int, int]]](list)
        for part, span in spans.items():
            calls[_parent(part)].append(span)
        for container in sorted(around, key=lambda path: path.count(".")):
            units = {self._innermost(path, result) for path in around[container]} - {""}
            if len(units) == 1 and self._is_row(container, spans[units.pop()], sorted(calls[container])):
                result.add(container)
        return frozenset(result)

    def _around_containers(self) -> Mapping[str, set[tuple[str, ...]]]:
        """Return for every module with parts the modules around them, outermost first, in each of its
        calls.
        """
        result = defaultdict[str, set[tuple[str, ...]]](set)
        for path in {tuple(filter(None, path)) for path in self._paths}:
            first: dict[str, int] = {}
            for n, part in enumerate(path):
                first.setdefault(_parent(part), n)
            for container, n in first.items():
                if container:
                    result[container].add(path[:n])
        return result

    def _innermost(self, path: tuple[str, ...], rows: set[str]) -> str:
        """Return the innermost unit, or block in a row, of a path; empty if there is none."""
        return next((part for part in reversed(path) if _parent(part) in rows or self._is_unit(part)), "")

    def _spans(self) -> dict[str, tuple[int, int]]:
        """Return the first and last operation of every call of a module."""
        result: dict[str, tuple[int, int]] = {}
        for number, node in enumerate(self.flow.order):
            for part in filter(None, stack(node)):
                result[part] = result.get(part, (number, number))[0], number
        return result

    def _is_row(self, container: str, around: tuple[int, int], calls: Sequence[tuple[int, int]]) -> bool:
        """Return whether no more crosses between these calls of a container's parts than around their
        unit.
        """
        module = self.modules.get(container)
        if len(calls) < 2 or not isinstance(module, _CONTAINERS) or not _are_blocks(list(module.children())):
            return False
        cost, count, ends = (
            self.flow.cost,
            self.flow.count,
            [end for end in (around[0] - 1, around[1]) if end >= 0],
        )
        bytes_around, count_around = max(cost[end] for end in ends), max(count[end] for end in ends)
        return all(
            any(
                self.flow.legal[cut] and cost[cut] <= _WAIST * bytes_around and count[cut] <= count_around
                for cut in range(before, after)
            )
            for (_, before), (after, _) in pairwise(calls)
        )


def _are_blocks(parts: Sequence[nn.Module]) -> bool:
    """Return whether the modules are of one class, and have parts."""
    return len({type(part) for part in parts}) == 1 and any(True for _ in parts[0].children())


def _parent(path: str) -> str:
    return plain(path).rpartition(".")[0]


def with_blocks(modules: Mapping[str, nn.Module]) -> frozenset[str]:
    """Return the paths of modules that contain blocks: a container of modules that have parts themselves."""
    result = set[str]()
    for path, module in modules.items():
        if isinstance(module, _CONTAINERS) and any(
            True for part in module.children() for _ in part.children()
        ):
            around = path
            while around not in result:
                result.add(around)
                around = around.rpartition(".")[0]
    return frozenset(result)


# ---- Cuts of a traced model: fine layers, and blocks of layers between which a stage may end
#
# Every operation belongs to a unit: a module of the size that the granularity requests. Between two units
# with parameters there is one block boundary, at the cut with the fewest bytes; of several such cuts the
# last, so equal units become equal blocks. Operations without parameters (reshapes, masks, dropout, the loss)
# join a neighboring block. A cut with many times more bytes than the next one is dropped.
#
# Layers are finer. A layer ends when the innermost module changes, or when a module proceeds to another
# parameter; but all uses of a parameter in one block stay in one layer. Layers are equal for every
# granularity, and so are their random draws. Takes time linear in the number of operations.

_FAR_MORE = 4  # a factor: bytes of a cut relative to the next one
_LITTLE = 1000  # drop such a cut only next to a piece with less than 1/1000 of all parameters
_SMALL = 100  # a unit with less than 1/100 of the largest unit's parameters joins a neighbor


class LayerOperations(NamedTuple):
    """Operations `start` to `stop - 1`, which become the layer `name`."""

    start: int
    stop: int
    name: str


class Pieces(NamedTuple):
    """The layers in order, and their blocks; without blocks, each layer is one."""

    layers: tuple[LayerOperations, ...]
    blocks: tuple[Block, ...]


WHOLE = "whole"  # the name of a model's only layer


def all_in_one(flow: Flow, why: str) -> Pieces:
    """Return the model as one layer and one block, with the reason."""
    piece = LayerOperations(0, len(flow.order), WHOLE)
    return Pieces((piece,), (Block(name=WHOLE, layers=1, undivided=why),))


def pieces(flow: Flow, module: nn.Module, granularity: Granularity, kept: Mapping[str, str]) -> Pieces:
    """Return the layers of a model, and the blocks that a granularity makes of them.

    `kept` maps the paths of modules that stay whole to the reasons.
    """
    blocks, halves = (_Runs(flow, Units(flow, module, deeper=deeper)) for deeper in (False, True))
    is_free = _free(flow, blocks.cuts)
    finer = sorted({*blocks.cuts, *(cut for cut in halves.cuts if is_free[cut])})
    layers = tuple(_named(flow, _fine(flow, frozenset(finer), is_free), partial(_innermost, flow)))
    if granularity == "layers":
        return Pieces(layers, ())
    runs, ends = (blocks, blocks.cuts) if granularity == "blocks" else (halves, finer)
    starts = [layer.start for layer in layers]
    result = [
        Block(
            name=name,
            layers=bisect_left(starts, stop) - bisect_left(starts, start),
            undivided="; ".join(
                (
                    *(reason for place, reason in runs.undivided if start < place < stop),
                    *_whole(flow.order[start:stop], module, kept),
                )
            ),
        )
        for start, stop, name in _named(flow, ends, runs.name)
    ]
    return Pieces(layers, tuple(result))


def _whole(nodes: Sequence[fx.Node], module: nn.Module, kept: Mapping[str, str]) -> Iterator[str]:
    """Yield which modules with blocks stay whole among these operations, and why."""
    called = (meaning.name for node in nodes for source in node.all_input_nodes if (meaning := role(source)))
    divisible = with_blocks(dict(module.named_modules(remove_duplicate=False)))
    for path in dict.fromkeys(called):
        if path in kept and path in divisible:
            yield f"{path} stays whole{kept[path]}"


def _named(flow: Flow, cuts: Sequence[int], name: Callable[[int, int], str]) -> Iterator[LayerOperations]:
    """Yield the pieces between cuts, named after their operations, with a number for repeated names."""
    met: dict[str, int] = {}
    for start, stop in pairwise([0, *(cut + 1 for cut in cuts), len(flow.order)]):
        own = plain(name(start, stop))
        count = met[own] = met.get(own, -1) + 1
        yield LayerOperations(start, stop, f"{own}@{count}" if count else own)


def _fine(flow: Flow, given: Set[int], is_free: Sequence[bool]) -> list[int]:
    """Return the given cuts, and those where the innermost module changes or proceeds to another parameter.

    Operations that only make views, such as a reshape, do not form a layer.
    """
    cuts, met, computes = list[int](), set[fx.Node](), False
    for cut, (before, after) in enumerate(zip(flow.order, [*flow.order[1:], None], strict=True)):
        met |= _parameters(flow, before)
        computes |= flow.computes(before)
        if after is None or cut in given:
            if not computes and cuts and cuts[-1] not in given:
                cuts.pop()
        elif not (computes and is_free[cut] and flow.legal[cut] and _changes(flow, met, before, after)):
            continue
        cuts.append(cut)
        met, computes = set(), False
    return cuts[:-1]


def _changes(flow: Flow, met: Set[fx.Node], before: fx.Node, after: fx.Node) -> bool:
    """Return whether the innermost module changes, or proceeds to a parameter that is not among those met."""
    goes_on = bool(met) and not _parameters(flow, after) <= met
    return goes_on or stack(before)[-1:] != stack(after)[-1:]


def _innermost(flow: Flow, start: int, stop: int) -> str:
    """Return the innermost module of the operation with the most parameter bytes, by default the first
    one.
    """
    nodes = flow.order[start:stop]
    most = max(nodes, key=lambda node: sum(map(nbytes, _parameters(flow, node))))
    return "".join(stack(most)[-1:]) or _of_the_root(flow, nodes)


def _of_the_root(flow: Flow, nodes: Sequence[fx.Node]) -> str:
    """Return a name for operations of the root module: its largest parameter, or the first computation.

    Among parameters of equal size the first by name is taken, so every trace of the model gives the same
    name.
    """
    own = [node for node in nodes if not any(stack(node))] or nodes
    used = (parameter for node in own for parameter in _parameters(flow, node))
    largest = min(used, key=lambda parameter: (-nbytes(parameter), parameter.name), default=None)
    if largest is not None and (meaning := role(largest)):
        return meaning.name
    return operator_name(next((node for node in own if flow.computes(node)), own[0]))


def _free(flow: Flow, block_cuts: Sequence[int]) -> list[bool]:
    """Return for each cut whether all uses of a parameter, buffer or constant in a block stay in one
    layer.
    """
    last: dict[fx.Node, int] = {}
    closed = []
    for number, node in enumerate(flow.order):
        for source in flow.needs(node):
            if (meaning := role(source)) is None or meaning.kind == "input":
                continue
            before = last.get(source, number)
            if bisect_left(block_cuts, before) == bisect_left(block_cuts, number):
                closed.append((before, number - 1, 1))
            last[source] = number
    return [count == 0 for count in sums(len(flow.order), closed)]


class _Runs:
    """Consecutive operations of one unit, and the parameter bytes that each operation is the first to use."""

    def __init__(self, flow: Flow, units: Units) -> None:
        self.flow, self.units, self.deeper = flow, units.of_all, units.deeper
        # First operations of units that cannot be cut from the unit before, each with the reason
        self.undivided: list[tuple[int, str]] = []
        self.weights: list[int] = []  # parameter bytes that each operation is the first to use
        met: set[fx.Node] = set()
        for node in self.flow.order:
            fresh = _parameters(self.flow, node) - met
            met |= fresh
            self.weights.append(sum(map(nbytes, fresh)))
        self.total = sum(self.weights)
        self.cuts = self._worthwhile(list(self._cheapest()))

    def _cheapest(self) -> Iterator[int]:
        """Yield one cut between any two neighboring units with parameters, if there is a legal one."""
        for (_, end), (start, _) in pairwise(self._heavy()):
            candidates = [cut for cut in range(end, start) if self.flow.legal[cut]]
            if candidates:
                yield min(candidates, key=lambda cut: (self.flow.cost[cut], -cut))
            else:
                one, other = (plain(self.units[number]) or "the model" for number in (end, start))
                self.undivided.append((start, f"{one} and {other}: {self.flow.obstacle(start - 1)}"))

    def name(self, start: int, stop: int) -> str:
        """Return the unit that uses the most parameter bytes in a piece."""
        used: dict[str, set[fx.Node]] = {}
        for unit, node in zip(self.units[start:stop], self.flow.order[start:stop], strict=True):
            if unit:
                used.setdefault(unit, set()).update(_parameters(self.flow, node))
        most = max(used, key=lambda unit: sum(map(nbytes, used[unit])), default="")
        return most or _of_the_root(self.flow, self.flow.order[start:stop])

    def _heavy(self) -> list[tuple[int, int]]:
        """Return first and last operation of every run of a unit that uses parameters."""
        result: list[tuple[int, int]] = []
        previous, light = None, self._light()
        for number, (unit, node) in enumerate(zip(self.units, self.flow.order, strict=True)):
            uses = plain(unit) not in light and bool(_parameters(self.flow, node))
            if uses and unit == previous:
                result[-1] = (result[-1][0], number)
            elif uses:
                result.append((self._begin(number), number))
                previous = unit
        ends = [self._end(last) for _, last in result]
        return [(first, end) for (first, _), end in zip(result, ends, strict=True)]

    def _light(self) -> set[str]:
        """Return units with too few parameters to be blocks; without halves, operations of no unit."""
        sizes: dict[str, int] = {}
        for unit, weight in zip(self.units, self.weights, strict=True):
            sizes[plain(unit)] = sizes.get(plain(unit), 0) + weight
        largest = max(sizes.values(), default=0)
        small = {unit for unit, size in sizes.items() if size * _SMALL < largest}
        return small if self.deeper else small & {""}

    def _begin(self, number: int) -> int:
        """Return the first operation of the run that contains `number`."""
        while number and self.units[number - 1] == self.units[number]:
            number -= 1
        return number

    def _end(self, number: int) -> int:
        while number + 1 < len(self.units) and self.units[number + 1] == self.units[number]:
            number += 1
        return number

    def _worthwhile(self, cuts: list[int]) -> list[int]:
        """Return the cuts except costly ones: far more bytes than a neighbor, few parameters between."""
        kept = list(cuts)
        for cut in sorted(cuts, key=self.flow.cost.__getitem__, reverse=True):
            place = kept.index(cut)
            for other in kept[max(place - 1, 0) : place] + kept[place + 1 : place + 2]:
                between = sum(self.weights[min(cut, other) + 1 : max(cut, other) + 1])
                if self.flow.cost[cut] > _FAR_MORE * self.flow.cost[other] and between * _LITTLE < self.total:
                    kept.remove(cut)
                    break
        return kept


def _parameters(flow: Flow, node: fx.Node) -> set[fx.Node]:
    return {
        source for source in flow.needs(node) if (meaning := role(source)) and meaning.kind == "parameter"
    }


# ---- Capture by a trace

_INSIDE = (
    "do that in a submodule of the model, which stays whole (in each block separately, if blocks are "
    "skipped at random)"
)


def traced_chain(
    task: Task, module: nn.Module, inputs: Any, targets: Tree | None, target: Target, *, whole: bool
) -> Chain:
    """Return the chain of `module`, traced on `inputs`, with the dtypes that its values have on the target.

    If the module stays `whole`, because its optimizer couples all parameters, it is one layer.

    Raises:
        UsageError: the module cannot be traced, computes nothing, or does not return the required loss.
    """
    shape = Tree.of("the inputs", inputs)
    program, graph, kept = _traced(task, module, inputs, target)
    outputs = _end(task, program, graph)
    flow = Flow(graph, task.name)
    if not flow.order:
        raise UsageError(f"{task.name} computes nothing, so it does not have any layers")
    first = [node for node in flow.values(-1) if (meaning := role(node)) and meaning.kind == "input"]
    if not first:
        raise UsageError(f"{task.name} does not use its inputs: its output is the same for every batch")
    cut = all_in_one(flow, WHY) if whole else pieces(flow, module, task.granularity, kept)
    return Chain(
        task.name,
        tuple(_layers(flow, module, cut.layers, program, first)),
        blocks=cut.blocks,
        inputs=_taken(shape, program, inputs, first),
        outputs=outputs,
        targets=targets,
        criterion=task.loss,
    )


def _traced(
    task: Task, module: nn.Module, inputs: Any, target: Target
) -> tuple[ExportedProgram, fx.Graph, Mapping[str, str]]:
    """Return the program of `module`, its graph, and the paths of parts that stay whole, with reasons.

    Raises:
        UsageError: the module cannot be traced.
    """
    whole, first = dict[str, str](), None
    while True:
        try:
            program = export(
                module,
                task.name,
                inputs,
                own_loss=task.loss is None,
                autocast=task.autocast,
                target=target,
                whole=whole,
            )
            return program, flatten(program, task.name, autocasts=task.autocast is not None), whole
        except LooksAtValues as error:
            first = first or error
            more = wider(module, whole, error)
            if more is None:
                raise first if first.path else UsageError(f"{first}; or {_INSIDE}") from error
            whole = more


def _layers(
    flow: Flow,
    module: nn.Module,
    cut: Sequence[LayerOperations],
    program: ExportedProgram,
    first: Sequence[fx.Node],
) -> Iterator[ChainLayer]:
    """Yield the layers, one for each piece; each takes the values that the layer before it returns."""
    binding, result, arriving = Binding(module, program.constants), list[ChainLayer](), tuple(first)
    parts = dict(module.named_modules(remove_duplicate=False))
    for piece in cut:
        leaving = flow.outputs if piece is cut[-1] else flow.values(piece.stop - 1)
        order = flow.order[piece.start : piece.stop]
        needed = [
            meaning
            for node in flow.needed_by(order, leaving)
            if (meaning := role(node)) and meaning.kind != "input"
        ]
        names = binding.names(piece.name, needed)
        kind = layer_class(type(parts.get(plain(piece.name), module)).__name__)
        layer = kind(write(flow, order, arriving, leaving, names))
        result.append(ChainLayer(piece.name, layer, binding.fill(layer, needed, names)))
        arriving = leaving
    yield from binding.with_the_rest(result)


def _end(task: Task, program: ExportedProgram, graph: fx.Graph) -> Tree:
    """End the graph in tensors only, and return their structure.

    The tensors are the loss if the model computes it, otherwise all outputs.
    """
    end, spec = graph.output_node(), program.call_spec.out_spec
    assert spec is not None
    leaves = list(end.args[0])  # type: ignore[arg-type]
    if task.loss is None:
        return Tree.of("the outputs", value(leaves[0]))
    taken = tuple(number for number, leaf in enumerate(leaves) if isinstance(leaf, fx.Node))
    constants = tuple(None if isinstance(leaf, fx.Node) else leaf for leaf in leaves)
    end.args = (tuple(leaves[number] for number in taken),)
    return Tree("the outputs", spec, taken, constants)


def _taken(shape: Tree, program: ExportedProgram, inputs: Any, first: Sequence[fx.Node]) -> Tree:
    """Return the structure of the inputs in the program's order; the first layer takes those that it
    needs.
    """
    if isinstance(inputs, dict):
        assert program.call_spec.in_spec is not None
        keys = program.call_spec.in_spec.child(1).context
        shape = Tree.of("the inputs", {key: inputs[key] for key in keys})
    numbers = tuple(meaning.index for node in first if (meaning := role(node)))
    orders = dict(zip(shape.taken, shape.orders, strict=True))
    return replace(
        shape,
        taken=numbers,
        plain=shape.plain and numbers == shape.taken,
        orders=tuple(orders[n] for n in numbers),
    )
