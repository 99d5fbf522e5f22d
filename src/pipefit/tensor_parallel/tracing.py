"""A stage as one flat graph: the layers one after the other, and the loss after them.

In-place changes inside layers that no other value sees become operations that make new values, because a
value may be needed in several forms. In-place changes that other values see stay, and are replicated. Takes
one trace of the stage; nothing is computed.

Between layers values are contiguous, as everywhere (`capture.chain`). At the end of each block, the values
that cross are recorded in the order in which the layers pass them on, whether they are used later or not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from pipefit.capture import (
    Binding,
    Chain,
    ChainLayer,
    Form,
    Values,
    as_made,
    context,
    export,
    flatten,
    groups,
    mutated_arguments,
    packed,
    passed_on,
    role,
    stack,
    sweep,
    value,
)
from pipefit.errors import UsageError
from pipefit.torch_internals import OpOverload, pytree
from pipefit.torch_internals.patches import without_code_lines

_NOT_MADE_ANEW = (torch.ops.aten.copy_.default,)  # torch lacks a derivative of the out-of-place operator


@dataclass(frozen=True, kw_only=True)
class TracedStage:
    """The graph, the layer of every operation (for the loss the number of layers), and the tensors it uses.

    `edges` are the first layers of all blocks except the first block; `cuts` are the values that cross before
    each edge.
    """

    graph: fx.Graph
    layers: tuple[ChainLayer, ...]
    layer_of: dict[fx.Node, int]
    binding: Binding
    inputs: tuple[fx.Node, ...]
    targets: int  # number of inputs, at the end, that are targets of the loss
    has_loss: bool
    is_first: bool  # the inputs are a batch, and need no gradient
    edges: tuple[int, ...] = ()
    cuts: tuple[tuple[fx.Node, ...], ...] = ()

    def block(self, layer: int) -> int:
        """Return the block of a layer; the loss belongs to the last."""
        return bisect_right(self.edges, layer)

    def tensor(self, node: fx.Node) -> Tensor:
        """Return the parameter, buffer or constant that a placeholder stands for."""
        meaning = role(node)
        assert meaning is not None
        return self.binding.tensor(meaning.name)

    def of_copy(self, chain: Chain) -> TracedStage | None:
        """Return the graph with the tensors of a copy of its chain; None if some are not those of layers."""
        binding = Binding(_TracedStage(chain.layers, chain, self.targets, self.edges), {})
        needed = (meaning for node in self.graph.nodes if is_stored(node) and (meaning := role(node)))
        if not all(meaning.kind != "module" and meaning.name in binding.tensors for meaning in needed):
            return None
        return replace(self, layers=tuple(chain.layers), binding=binding)


def trace(
    layers: Sequence[ChainLayer],
    values: Values,
    *,
    chain: Chain | None,
    targets: Values,
    is_first: bool,
    edges: Sequence[int] = (),
) -> TracedStage:
    """Return the graph of `layers` on values like `values`, with the loss of `chain`, if any.

    Blocks begin with the layers at `edges`.

    Raises:
        UsageError: a layer cannot be traced.
    """
    traced = partial(_trace, layers, values, chain, targets, is_first=is_first, edges=edges)
    try:
        with without_code_lines():  # only errors name lines of code, which take a quarter of a trace
            return traced()
    except UsageError:
        return traced()


def _trace(
    layers: Sequence[ChainLayer],
    values: Values,
    chain: Chain | None,
    targets: Values,
    *,
    is_first: bool,
    edges: Sequence[int],
) -> TracedStage:
    stage = _TracedStage(layers, chain, len(targets), edges)
    dtype = layers[0].autocast
    name = f"layers {layers[0].name} to {layers[-1].name}"
    with _naming_the_layer():
        program = export(stage, name, (*values, *targets), own_loss=False, autocast=dtype)
    graph = flatten(program, name, autocasts=dtype is not None)
    cuts = _without_marks(graph, program)
    _without_casts_to_itself(graph)
    _make_out_of_place(graph)
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
        edges=tuple(edges),
        cuts=_swept(graph, cuts),
    )


def blocks_begin(chain: Chain) -> tuple[int, ...]:
    """Return the first layers of a chain's blocks except the first block; without blocks each layer is
    one.
    """
    sizes = [block.layers for block in chain.blocks] or [1] * len(chain.layers)
    return tuple(accumulate(sizes))[:-1]


def is_stored(node: fx.Node) -> bool:
    """Return whether a node is a parameter, buffer or constant."""
    return (result := role(node)) is not None and result.kind != "input"


def without_gradient(node: fx.Node) -> bool:
    """Return whether the operation runs under `torch.no_grad()`."""
    return [entry[1] for entry in context(node) if entry[0] == "grad"][-1:] == [False]


class _TracedStage(nn.Module):
    """The layers as one module, as the runtime calls them; also returns the values that cross at edges."""

    def __init__(
        self, layers: Sequence[ChainLayer], chain: Chain | None, targets: int, edges: Sequence[int]
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                _Layer(each, ends_block=behind in edges, is_last=behind == len(layers))
                for behind, each in enumerate(layers, start=1)
            ]
        )
        self.criterion = chain.criterion if chain else None
        self._chain, self._packing = chain, layers[0].packing
        self._targets, self._edges = targets, frozenset(edges)

    def forward(self, *given: Tensor) -> tuple[Values, tuple[Values, ...]]:
        targets, values = given[len(given) - self._targets :], given[: len(given) - self._targets]
        form, crossing = Form(self._packing), list[Values]()
        for number, layer in enumerate(self.layers):
            values, form = layer(values, form)
            if number + 1 in self._edges:
                crossing.append(
                    _aliases(values)
                )  # separate from the next layer's inputs, which it may change in place
        return self._end(values, targets, form), tuple(crossing)

    def _end(self, values: Values, targets: Values, form: Form) -> Values:
        if self._chain is None or self.criterion is None:
            return values
        wanted = None if self._chain.targets is None else self._chain.targets.rebuild(targets)
        return (self.criterion(replace(self._chain, packing=form.packing).rebuild(values), wanted),)


class _Layer(nn.Module):
    """A layer that takes and returns values as they cross; the last one returns them as they are.

    At the end of a block it returns an alias of each value, so that a parameter crosses as a value, to the
    loss too.
    """

    def __init__(self, layer: ChainLayer, *, ends_block: bool, is_last: bool) -> None:
        super().__init__()
        self.module = layer.module
        self._ends_block, self._is_last, self._name = ends_block, is_last, layer.name

    def forward(self, values: Values, form: Form) -> tuple[Values, Form]:
        try:
            outputs = self.module(packed(as_made(values, form.orders), form.packing))
        except Exception as error:
            error.add_note(self._name)
            raise
        result, form = passed_on(outputs, self._name, is_last=self._is_last)
        if self._is_last:
            return tuple(_aliases((v,))[0] if isinstance(v, nn.Parameter) else v for v in result), form
        return _aliases(result) if self._ends_block else result, form


def _aliases(values: Values) -> Values:
    """Return an alias of every value, made by a separate operation in the trace."""
    return tuple(map(torch.ops.aten.alias.default, values))


@contextmanager
def _naming_the_layer() -> Iterator[None]:
    """Name the layer in errors of the body.

    Raises:
        UsageError: a layer cannot be traced.
    """
    try:
        yield
    except UsageError as error:
        notes = getattr(error.__cause__, "__notes__", None)
        if not notes:
            raise
        raise UsageError(
            f"layer {notes[0]} cannot be sharded over tensor-parallel ranks, which needs a trace of the "
            f"layer: {error}; or use only replicas (data), which do not"
        ) from error


def _without_marks(graph: fx.Graph, program: ExportedProgram) -> list[fx.Node]:
    """Remove the values that cross at each edge from the results; return a node in the place of each edge."""
    end, spec = graph.output_node(), program.call_spec.out_spec
    assert spec is not None
    results, crossing = pytree.tree_unflatten(end.args[0], spec)  # type: ignore[arg-type]
    end.args, result = (results,), []
    for marks in crossing:
        with graph.inserting_after(marks[-1]):
            result.append(graph.call_function(_crossing, tuple(marks)))
    for mark in (mark for marks in crossing for mark in marks):
        handed_on = mark.args[0]
        _replaced(mark, handed_on)
        if not is_stored(handed_on.args[0]):
            _replaced(handed_on, handed_on.args[0])
    return result


def _replaced(node: fx.Node, by: fx.Node) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def _crossing(*values: Tensor) -> None:
    """Mark in a graph where values cross to the next block."""


def _swept(graph: fx.Graph, cuts: Sequence[fx.Node]) -> tuple[tuple[fx.Node, ...], ...]:
    """Remove dead code, and return the values that cross at each edge."""
    end = graph.output_node()
    results, crossing = end.args[0], tuple(cut.args for cut in cuts)
    for cut in cuts:
        graph.erase_node(cut)
    end.args = ((results, crossing),)
    sweep(graph)
    end.args = (results,)
    return crossing  # type: ignore[return-value]


def _layers(graph: fx.Graph, count: int) -> dict[fx.Node, int]:
    """Return the layer of every operation: the one that it ran in; after the last, the loss."""
    result, current = {}, 0
    for node in graph.nodes:
        if node.op == "call_function":
            inside = next((call for call in stack(node) if call.startswith("layers.")), None)
            if inside is not None:
                current = max(current, int(inside.split(".")[1].partition("@")[0]))
            elif stack(node):
                current = count
            result[node] = current
    return result


def _without_casts_to_itself(graph: fx.Graph) -> None:
    """Replace a `to` that changes nothing by its operand.

    Such a `to` returns the same tensor, so a trace would use it in place of the tensor in later blocks too.
    """
    for node in list(graph.nodes):
        if (
            node.op != "call_function"
            or getattr(node.target, "overloadpacket", None) is not torch.ops.aten.to
        ):
            continue
        source = node.args[0]
        before, behind = value(source), value(node)
        is_same = isinstance(before, Tensor) and (before.dtype, before.device) == (
            behind.dtype,
            behind.device,
        )
        if (
            is_same
            and before.stride() == behind.stride()
            and True not in node.args
            and not node.kwargs.get("copy")
        ):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _make_out_of_place(graph: fx.Graph) -> None:
    """Replace in-place operations that only users of the value see by operations that make new values."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        target = _out_of_place(node)
        if target is None:
            continue
        old = node.args[0]
        roots = groups(graph)
        others = [
            o for o, root in roots.items() if root is roots[old] and o is not old and order[o] < order[node]
        ]
        if not is_stored(roots[old]) and all(
            order[user] < order[node] for other in others for user in other.users
        ):
            node.target = target
            old.replace_all_uses_with(node, lambda user, node=node: order[user] > order[node])


def _out_of_place(node: fx.Node) -> OpOverload | None:
    """Return the out-of-place operator of an in-place `node`; None if the dtype would change."""
    target = node.target
    if not mutated_arguments(node) or not isinstance(target, OpOverload) or without_gradient(node):
        return None  # a change without gradient keeps the value's gradient; a new value would have none
    if target in _NOT_MADE_ANEW:
        return None
    namespace, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if not name.endswith("_") or packet is None or target._overloadname not in packet.overloads():
        return None
    types = {result.dtype for source in node.all_input_nodes if isinstance(result := value(source), Tensor)}
    is_same = len(types) == 1 and mutated_arguments(node) == [node.args[0]]
    return getattr(packet, target._overloadname) if is_same else None
