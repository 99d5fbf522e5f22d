"""A stage as one flat graph: the layers one after the other, and the loss behind them.

Values are made anew where the layers change them in place and nobody else sees the change, because a value may be had
in several forms. What is changed in place and seen elsewhere stays as it is, and is replicated. Costs one trace of the
stage; nothing is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from pipefit.capture.aliases import groups, mutated_arguments
from pipefit.capture.binding import Binding
from pipefit.capture.chain import Chain, ChainLayer, as_values, packed
from pipefit.capture.exporting import export
from pipefit.capture.flat import context, flatten, role, stack, sweep, value
from pipefit.capture.structure import Values


@dataclass(frozen=True, kw_only=True)
class TracedStage:
    """The graph, the layer of every operation (for the loss the number of layers), and what it computes with."""

    graph: fx.Graph
    layers: tuple[ChainLayer, ...]
    layer_of: dict[fx.Node, int]
    binding: Binding
    inputs: tuple[fx.Node, ...]
    targets: int  # how many of the inputs, the last ones, are targets of the loss
    has_loss: bool
    is_first: bool  # the inputs are a batch, and need no gradient

    def tensor(self, node: fx.Node) -> Tensor:
        """The parameter, buffer or constant that a placeholder stands for."""
        meaning = role(node)
        assert meaning is not None
        return self.binding.tensor(meaning.name)


def trace(
    layers: Sequence[ChainLayer], values: Values, *, chain: Chain | None, targets: Values, is_first: bool
) -> TracedStage:
    """The graph of `layers` on values like `values`; with the loss of `chain`, if one is given and has it.

    Raises:
        UsageError: a layer cannot be followed.
    """
    stage = _Stage(layers, chain, len(targets))
    dtype = layers[0].autocast
    name = f"layers {layers[0].name} to {layers[-1].name}"
    program = export(stage, name, (*values, *targets), own_loss=False, autocast=dtype)
    graph = flatten(program, name, autocasts=dtype is not None)
    _made_anew(graph)
    sweep(graph)
    inputs = {r.index: node for node in graph.nodes if (r := role(node)) and r.kind == "input"}
    return TracedStage(
        graph=graph,
        layers=tuple(layers),
        layer_of=_layers(graph, len(layers)),
        binding=Binding(stage, program.constants),
        inputs=tuple(inputs[number] for number in sorted(inputs)),
        targets=len(targets),
        has_loss=stage.criterion is not None,
        is_first=is_first,
    )


def is_stored(node: fx.Node) -> bool:
    """Whether it is a parameter, buffer or constant."""
    return (found := role(node)) is not None and found.kind != "input"


def without_gradient(node: fx.Node) -> bool:
    """Whether the operation runs under `torch.no_grad()`."""
    return [entry[1] for entry in context(node) if entry[0] == "grad"][-1:] == [False]


class _Stage(nn.Module):
    """The layers as one module, as the runtime calls them."""

    def __init__(self, layers: Sequence[ChainLayer], chain: Chain | None, targets: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer.module for layer in layers])
        self.criterion = chain.criterion if chain else None
        self._chain, self._packings, self._targets = chain, [layer.packing for layer in layers], targets

    def forward(self, *values: Tensor) -> Values:
        targets = values[len(values) - self._targets :]
        values = values[: len(values) - self._targets]
        for number, (layer, packing) in enumerate(zip(self.layers, self._packings, strict=True)):
            values = as_values(layer(packed(values, packing)), str(number))
        if self._chain is None or self.criterion is None:
            return values
        wanted = None if self._chain.targets is None else self._chain.targets.rebuild(targets)
        return (self.criterion(self._chain.rebuild(values), wanted),)


def _layers(graph: fx.Graph, count: int) -> dict[fx.Node, int]:
    """The layer of every operation: the one that it ran in; behind the last, the loss."""
    found, current = {}, 0
    for node in graph.nodes:
        if node.op == "call_function":
            inside = next((call for call in stack(node) if call.startswith("layers.")), None)
            if inside is not None:
                current = max(current, int(inside.split(".")[1].partition("@")[0]))
            elif stack(node):
                current = count
            found[node] = current
    return found


def _made_anew(graph: fx.Graph) -> None:
    """Operations in place become such that make a new value, where only the value itself and its users see them."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        target = _out_of_place(node)
        if target is None:
            continue
        old = node.args[0]
        roots = groups(graph)
        others = [o for o, root in roots.items() if root is roots[old] and o is not old and order[o] < order[node]]
        if not is_stored(roots[old]) and all(order[user] < order[node] for other in others for user in other.users):
            node.target = target
            old.replace_all_uses_with(node, lambda user, node=node: order[user] > order[node])


def _out_of_place(node: fx.Node) -> torch._ops.OpOverload | None:
    """The operator that returns what `node` writes into its first operand; None where its type would be another."""
    target = node.target
    if not mutated_arguments(node) or not isinstance(target, torch._ops.OpOverload) or without_gradient(node):
        return None  # what is changed without a gradient keeps the one that it has; what is made anew has none
    namespace, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if not name.endswith("_") or packet is None or target._overloadname not in packet.overloads():
        return None
    types = {found.dtype for source in node.all_input_nodes if isinstance(found := value(source), Tensor)}
    is_same = len(types) == 1 and mutated_arguments(node) == [node.args[0]]
    return getattr(packet, target._overloadname) if is_same else None
