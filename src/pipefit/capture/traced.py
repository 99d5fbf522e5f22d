"""A traced model as a chain: pieces of the program become modules, with the model's own parameters in them.

Every layer holds, under local names, the parameters and buffers that it uses: the same objects as the model's, so that
training the chain trains the model. What the program does not use goes along with the layer nearest by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn
from torch.export import ExportedProgram

from pipefit.capture.binding import Binding
from pipefit.capture.chain import Chain, ChainLayer
from pipefit.capture.coupled_updates import WHY
from pipefit.capture.cuts import Piece, all_in_one, pieces
from pipefit.capture.exporting import export
from pipefit.capture.flat import flatten, plain, role, value
from pipefit.capture.flow import Flow
from pipefit.capture.graph_layer import GraphLayer, layer_class, write
from pipefit.capture.refusals import LooksAtValues
from pipefit.capture.structure import Tree
from pipefit.capture.task import Task
from pipefit.capture.whole_modules import wider
from pipefit.errors import UsageError
from pipefit.profiles import Target

_INSIDE = (
    "let a module of the model do it, which stays whole (each block by itself, where blocks are left out at random)"
)


def traced_chain(
    task: Task, module: nn.Module, inputs: Any, targets: Tree | None, target: Target, *, whole: bool
) -> Chain:
    """The chain of `module`, traced on `inputs`, with the types that its values have on the target.

    One that is to stay `whole`, because its optimizer couples all parameters, is one layer.

    Raises:
        UsageError: it cannot be traced, or returns no loss where it should.
    """
    shape = Tree.of("the inputs", inputs)
    program, graph, kept = _traced(task, module, inputs, target)
    outputs = _end(task, program, graph)
    flow = Flow(graph, task.name)
    if not flow.order:
        raise UsageError(f"{task.name} computes nothing: there is no layer to make")
    first = [node for node in flow.values(-1) if (meaning := role(node)) and meaning.kind == "input"]
    if not first:
        raise UsageError(f"{task.name} uses none of its inputs: what it returns is the same for every batch")
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
    """The program of `module`, its graph, and the paths of parts that stay whole, because they look at values, and why.

    Raises:
        UsageError: it cannot be traced.
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
    flow: Flow, module: nn.Module, cut: Sequence[Piece], program: ExportedProgram, first: Sequence[fx.Node]
) -> Iterator[ChainLayer]:
    """The layers, one a piece; each takes what the one before gives."""
    binding, found, arriving = Binding(module, program.constants), list[ChainLayer](), tuple(first)
    for piece in cut:
        leaving = flow.outputs if piece is cut[-1] else flow.values(piece.stop - 1)
        order = flow.order[piece.start : piece.stop]
        needed = [
            meaning for node in flow.needed_by(order, leaving) if (meaning := role(node)) and meaning.kind != "input"
        ]
        names = binding.names(piece.name, needed)
        layer = _class_of(module, piece.name)(write(flow, order, arriving, leaving, names))
        found.append(ChainLayer(piece.name, layer, binding.fill(layer, needed, names)))
        arriving = leaving
    yield from binding.with_the_rest(found)


def _class_of(module: nn.Module, name: str) -> type[GraphLayer]:
    """The class of a layer: named after the module it is made of."""
    found = dict(module.named_modules(remove_duplicate=False)).get(plain(name))
    return layer_class(type(found or module).__name__)


def _end(task: Task, program: ExportedProgram, graph: fx.Graph) -> Tree:
    """End the graph in tensors alone: the loss, if the model computes it, else all the model returns; their shape."""
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
    """The shape of the inputs, in the order of the program, of which the first layer takes those it needs."""
    if isinstance(inputs, dict):
        assert program.call_spec.in_spec is not None
        keys = program.call_spec.in_spec.child(1).context
        shape = Tree.of("the inputs", {key: inputs[key] for key in keys})
    numbers = tuple(meaning.index for node in first if (meaning := role(node)))
    orders = dict(zip(shape.taken, shape.orders, strict=True))
    return replace(
        shape, taken=numbers, plain=shape.plain and numbers == shape.taken, orders=tuple(orders[n] for n in numbers)
    )
