"""The layers of a rank: the steps of each layer as generated code, over the rank's parameters and buffers.

The code is equal on every rank; only the parameters differ, and the rank's interface to its group, which the
layers hold as `pipefit_group`. Names in a layer's state dict are those of the whole layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from pipefit.capture import (
    ChainLayer,
    Context,
    Contexts,
    context,
    copy_hooks,
    hooks_of,
    layer_class,
    left_real,
    register,
    stored_entries,
)
from pipefit.errors import UsageError
from pipefit.schema.layer_costs import CollectiveKind
from pipefit.tensor_parallel.collectives import Collectives, copied, gathered, sliced, spread
from pipefit.tensor_parallel.forms import C, DimSplit, Form, R, TensorShard
from pipefit.tensor_parallel.operations import GROUP, Call, nbytes, shape
from pipefit.tensor_parallel.search import ChosenForms
from pipefit.tensor_parallel.tracing import TracedStage, is_stored

# ---- The operations of a rank in order: those of the stage, and conversions of values to other forms
#
# A step belongs to the layer that needs it first. Conversions are outside of all contexts, because a value
# made under `no_grad` may be used again with gradients.

Phase = Literal["forward", "backward"]


class Key(NamedTuple):
    """A value in a form, and where this form exists.

    `place` is a layer for stored tensors, -1 (everywhere) for replicated values, and a block for values in
    other forms.
    """

    node: fx.Node
    form: Form
    place: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call in a layer: its result, and the form of each operand."""

    layer: int
    made: Key
    call: Call
    operands: dict[fx.Node, Key]
    context: Context


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCollective:
    """A collective in one pass of a layer; `nbytes` are those of the whole tensor."""

    kind: CollectiveKind
    phase: Phase
    layer: int
    nbytes: int


class Steps:
    """The steps of a stage in the chosen forms, and their `collectives`.

    `crossing` has the values that cross at each edge between blocks.
    """

    def __init__(self, stage: TracedStage, choice: ChosenForms) -> None:
        self.stage, self.choice = stage, choice
        self.all: list[Step] = []
        self.collectives: list[WrittenCollective] = []
        self.crossing: list[list[Key]] = []
        self._known = {Key(node, R) for node in stage.inputs}
        for node in stage.graph.nodes:
            if node.op == "call_function":
                self._end_blocks(stage.block(stage.layer_of[node]))
                self._operation(node)
        last = len(stage.layers) - (0 if stage.has_loss else 1)
        self._end_blocks(stage.block(last))
        returned: Any = stage.graph.output_node().args[0]
        self.outputs = [self._in_form(node, R, last) for node in returned]

    def _end_blocks(self, block: int) -> None:
        """End all blocks before `block`: values that cross are replicated."""
        for number in range(len(self.crossing), block):
            layer = self.stage.edges[number] - 1
            self.crossing.append([self._in_form(node, R, layer) for node in self.stage.cuts[number]])

    def _operation(self, node: fx.Node) -> None:
        way, layer = self.choice.ways[node], self.stage.layer_of[node]
        operands = {source: self._in_form(source, form, layer) for source, form in way.operands.items()}
        key = self._key(node, way.result, layer)
        self._known.add(key)
        self.all.append(Step(layer=layer, made=key, call=way.call, operands=operands, context=context(node)))
        if way.summed:
            self._note("reduce_scatter" if way.scattered else "all_reduce", "forward", layer, way.summed)
        if way.scattered and node in self.choice.trained:
            self._note("all_gather", "backward", layer, way.summed)

    def _in_form(self, node: fx.Node, form: Form, layer: int) -> Key:
        """Return the value in that form, adding a conversion if it does not exist yet."""
        key = self._key(node, form, layer)
        if key in self._known:
            return key
        home = self._home(node, layer)
        if form != home:
            direct = form == R or (
                form == C and isinstance(home, DimSplit) and self._key(node, R, layer) not in self._known
            )
            start = self._in_form(node, home if direct else R, layer)
            call = self._conversion(node, start.form, form, layer)
            self.all.append(Step(layer=layer, made=key, call=call, operands={node: start}, context=()))
        self._known.add(key)
        return key

    def _key(self, node: fx.Node, form: Form, layer: int) -> Key:
        if is_stored(node):
            return Key(node, form, layer)
        return Key(node, form, -1 if form == R else self.stage.block(layer))

    def _home(self, node: fx.Node, layer: int) -> Form:
        """Return the form in which a value is stored, is made, or enters the block of the layer."""
        made = self.stage.layer_of.get(node, 0)
        is_here = is_stored(node) or self.stage.block(made) == self.stage.block(layer)
        return self.choice.home.get(node, R) if is_here else R

    def _conversion(self, node: fx.Node, start: Form, form: Form, layer: int) -> Call:
        is_trained = node in self.choice.trained
        if isinstance(start, DimSplit):
            assert not isinstance(form, DimSplit)
            self._note("all_gather", "forward", layer, nbytes(node))
            if form == C and is_trained:
                self._note("reduce_scatter", "backward", layer, nbytes(node))
            return Call(
                target=spread if form == C else gathered, args=(node, start, shape(node)[start.dim], GROUP)
            )
        if is_trained:
            self._note("all_reduce" if form == C else "all_gather", "backward", layer, nbytes(node))
        return (
            Call(target=copied, args=(node, GROUP))
            if form == C
            else Call(target=sliced, args=(node, form, GROUP))
        )

    def _note(self, kind: CollectiveKind, phase: Phase, layer: int, nbytes: int) -> None:
        self.collectives.append(WrittenCollective(kind=kind, phase=phase, layer=layer, nbytes=nbytes))


def crossing(steps: Steps, inputs: Iterable[Key], layers: int) -> list[list[Key]]:
    """Return the values that each of `layers` layers passes to the next.

    They are in the order in which they are made, or at an edge in the recorded order.
    """
    made = dict.fromkeys(inputs, -1) | {step.made: step.layer for step in steps.all}
    last = dict.fromkeys(steps.outputs, layers)
    for step in reversed(steps.all):
        for key in step.operands.values():
            last.setdefault(key, step.layer)
    at_edges = dict(zip((edge - 1 for edge in steps.stage.edges), steps.crossing, strict=True))
    for layer, keys in at_edges.items():
        last |= {key: max(layer, last.get(key, -1)) for key in keys}
    return [
        at_edges[n]
        if n in at_edges
        else [key for key, first in made.items() if first <= n < last.get(key, -1)]
        for n in range(layers)
    ]


def of_layer(steps: Iterable[Step], layer: int) -> Iterator[Step]:
    """Return the steps of one layer."""
    return (step for step in steps if step.layer == layer)


# ---- Generated code


@dataclass(frozen=True, kw_only=True)
class LayerCode:
    """The graph of a layer, and the constants that it holds in addition to the layer's tensors."""

    graph: fx.Graph
    constants: Mapping[str, fx.Node]


def write(
    stage: TracedStage, steps: Sequence[Step], layer: int, inputs: Sequence[Key], outputs: Sequence[Key]
) -> LayerCode:
    """Return the code of one layer, or of the loss, which takes `inputs` and returns `outputs`.

    Values that cross to another block are contiguous without a permutation of dimensions, as the whole layers
    pass them on.
    """
    module = stage.layers[layer].module if layer < len(stage.layers) else nn.Module()
    writer = _StepWriter(stage, module, inputs)
    for step in of_layer(steps, layer):
        writer.step(step)
    return writer.finished(outputs, ends_block=layer + 1 in stage.edges)


class _StepWriter:
    """Writes steps into a new graph."""

    def __init__(self, stage: TracedStage, module: nn.Module, inputs: Sequence[Key]) -> None:
        self.stage, self.graph = stage, fx.Graph()
        self.contexts = Contexts(self.graph)
        self.known = {key: self.graph.placeholder(f"value{number}") for number, key in enumerate(inputs)}
        self.names = {id(tensor): name for name, tensor in reversed(list(tensors_of(module)))}
        self.constants: dict[str, fx.Node] = {}
        self.group: fx.Node | None = None

    def step(self, step: Step) -> None:
        """Write one step."""
        operands = {source: self._value(key) for source, key in step.operands.items()}
        self.contexts.switch(step.context)
        args, kwargs = (
            map_aggregate(item, lambda leaf: self._argument(leaf, operands))
            for item in (step.call.args, dict(step.call.kwargs))
        )
        made = self.graph.call_function(step.call.target, args, kwargs)  # type: ignore[arg-type]
        self.known[step.made] = made

    def finished(self, outputs: Sequence[Key], *, ends_block: bool) -> LayerCode:
        """Return the code, which returns `outputs`."""
        values = tuple(map(self._value, outputs))
        self.contexts.switch(())
        if ends_block:
            made = torch.ops.aten.contiguous.default
            values = tuple(
                v if v.op == "placeholder" else self.graph.call_function(made, (v,)) for v in values
            )
        self.graph.output(values)
        return LayerCode(graph=self.graph, constants=self.constants)

    def _value(self, key: Key) -> fx.Node:
        if key not in self.known:
            assert is_stored(key.node), f"{key} does not arrive"
            self.known[key] = self.graph.get_attr(self._name(key.node))
        return self.known[key]

    def _name(self, node: fx.Node) -> str:
        tensor = self.stage.tensor(node)
        if id(tensor) not in self.names:
            name = f"pipefit_constant{len(self.constants)}"
            self.names[id(tensor)], self.constants[name] = name, node
        return self.names[id(tensor)]

    def _argument(self, leaf: Any, operands: Mapping[fx.Node, fx.Node]) -> Any:
        if isinstance(leaf, fx.Node):
            return operands[leaf]
        if isinstance(leaf, torch.device):
            return self.contexts.device
        if isinstance(leaf, str) and leaf == GROUP:
            self.group = self.group or self.graph.get_attr("pipefit_group")
            return self.group
        return leaf


class RankTensors:
    """A rank's part of every tensor of a stage; a tensor that several layers share is one tensor here too.

    Parts are taken from `whole(tensor)`, which has the shape of the tensor.
    """

    def __init__(
        self,
        stage: TracedStage,
        home: Mapping[fx.Node, Form],
        rank: int,
        ranks: int,
        whole: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        self.stage, self.rank, self.ranks, self._whole = stage, rank, ranks, whole
        stored = [node for node in home if is_stored(node)]
        self.forms = {id(stage.tensor(node)): home[node] for node in stored}
        self._made: dict[int, Tensor] = {}

    def layer(self, layer: ChainLayer, code: LayerCode, group: Collectives) -> ChainLayer:
        """Return the rank's layer in place of a whole one."""
        module = layer_class(type(layer.module).__name__)(code.graph)
        module.pipefit_group = group  # type: ignore[assignment]
        kept = stored_entries(layer.module)
        for name, tensor in tensors_of(layer.module):
            register(module, name, self.part(tensor, name), persistent=name in kept)
        for name, node in code.constants.items():
            tensor = self.stage.tensor(node)
            with left_real(tensor):  # a loss may hold real tensors next to fake layers
                register(module, name, self.part(tensor, name), persistent=False)
        return replace(layer, module=module.train(layer.module.training), packing="bare")

    def part(self, tensor: Tensor, name: str) -> Tensor:
        """Return the rank's part of a tensor, in separate memory."""
        if id(tensor) not in self._made:
            local = self.shard(tensor, name).local(self._whole(tensor))
            self._made[id(tensor)] = _like(tensor, local) if isinstance(tensor, nn.Parameter) else local
        return self._made[id(tensor)]

    def shard(self, tensor: Tensor, name: str) -> TensorShard:
        """Return the shard of a tensor.

        Raises:
            UsageError: a divided parameter has gradient hooks, which would see a part of the gradient.
        """
        form = self.forms.get(id(tensor), R)
        if isinstance(form, DimSplit) and isinstance(tensor, nn.Parameter) and hooks_of(tensor):
            raise UsageError(
                f"{name} has hooks on its gradient, but {self.ranks} tensor-parallel ranks would shard it, "
                "so each hook would see only part of the gradient: remove the hooks, or do not use tensor "
                "parallelism for this stage"
            )
        return TensorShard.of(name, tensor.shape, form, self.rank, self.ranks)


def _like(parameter: nn.Parameter, local: Tensor) -> nn.Parameter:
    """Return a rank's parameter, with the hooks of the original, which are only kept on whole parameters."""
    made = nn.Parameter(local, parameter.requires_grad)
    copy_hooks(parameter, made, {})
    return made


def tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of a module under all of their names."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
