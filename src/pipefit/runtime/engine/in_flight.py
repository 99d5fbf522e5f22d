"""One microbatch in one stage.

A flight holds waiting values, pieces that ran forward, and gradients that the backward has reached. Only a
flight refers to these tensors, so that a tensor it drops is freed at once, as `memory` predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from pipefit.capture import ChainLayer, Values, placed, storage_key, without_memory
from pipefit.capture.storages import flat
from pipefit.errors import UsageError, causes
from pipefit.runtime.offload.moving import Luggage
from pipefit.runtime.optim.weight_versions import Version
from pipefit.schema.actions import Action
from pipefit.schema.layer_costs import LayerCost, Value
from pipefit.texts import counted, layers_text
from pipefit.torch_internals import storage_uses
from pipefit.torch_internals.fake_tensors import FakeTensor

# ---- Buffers of layers in other storages: on another device, or copied for a second forward.
#
# Several buffers may share a storage, and several layers of a stage may hold it: it is moved and copied as
# one, so that a stage takes exactly the bytes that its plan says.

Place = tuple[nn.Module, str, Tensor]  # the module that holds a buffer, its name there, and the buffer


def buffer_places(modules: Sequence[nn.Module]) -> Iterator[Place]:
    """Yield every place of every buffer of `modules`."""
    for module in modules:
        for part in module.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    yield part, name, buffer


def held_buffers(layers: Sequence[ChainLayer]) -> list[Tensor]:
    """Return the present buffers of `layers`; a forward may have replaced earlier ones."""
    return [buffer for _, _, buffer in buffer_places([layer.module for layer in layers])]


def in_other_storages(
    buffers: Sequence[Tensor], convert: Callable[[Tensor], Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Convert each storage once, as one flat tensor.

    Return the new storages, and tensors like `buffers` in them.
    """
    made: dict[int, Tensor] = {}
    for buffer in buffers:
        if storage_key(buffer) not in made:
            made[storage_key(buffer)] = convert(flat(buffer))
    return list(made.values()), [placed(buffer, made[storage_key(buffer)]) for buffer in buffers]


def move(modules: Sequence[nn.Module], device: torch.device, *, absent: Container[int] = ()) -> None:
    """Move `modules` to `device`. Unlike `Module.to`, keep shared buffers shared.

    Modules already on the device stay untouched, because `Module.to` drops gradient hooks of fake parameters.
    Parameters with ids in `absent` get no memory on the device, so that together they may exceed its memory.
    """
    places = [place for place in buffer_places(modules) if place[2].device != device]
    _, moved = in_other_storages([buffer for _, _, buffer in places], lambda storage: storage.to(device))
    for (part, name, _), buffer in zip(places, moved, strict=True):
        part._buffers[name] = buffer
    for parameter in (one for module in modules for one in module.parameters()):
        if id(parameter) in absent and parameter.device != device:
            like = parameter.shape, parameter.stride()
            parameter.data = without_memory(torch.empty_strided(*like, dtype=parameter.dtype, device=device))
    for module in modules:
        if any(parameter.device != device for parameter in module.parameters()):
            module.to(device)


# ---- Copies of buffers for second forwards
# Each microbatch changes a buffer once, in its first forward. If a layer computes with a buffer that it
# changes, its second forward must see the values of the first. So such a buffer is copied before the first
# forward, once for each microbatch in flight. All other buffers, such as batch norm statistics, are copied
# when the second forward begins. The copies stay until the backward, because the graph may refer to them.
# `memory` predicts their bytes.

Buffers = dict[tuple[nn.Module, str], Tensor | None]  # by module and name in it


def fed_back_copies(layers: Sequence[ChainLayer], costs: Sequence[LayerCost]) -> Buffers:
    """Return copies of the present buffers that `layers` both read and change."""
    result: Buffers = {}
    for layer, cost in zip(layers, costs, strict=True):
        for name in cost.fed_back:
            path, _, attribute = name.rpartition(".")
            part = layer.module.get_submodule(path)
            result[part, attribute] = part._buffers.get(attribute)
    return _copied(result)


@contextmanager
def working_copies(layers: Sequence[ChainLayer], copies: Buffers) -> Iterator[None]:
    """Use copies of the buffers of `layers` in the context: the `copies` of their first forward, or new ones.

    Afterwards the layers have the originals, and `copies` holds the buffers of the second forward: the
    copies, or their replacements by the forward.
    """
    parts = (part for layer in layers for part in layer.module.modules())
    originals = {(part, name): buffer for part in parts for name, buffer in part._buffers.items()}
    copies |= _copied({place: buffer for place, buffer in originals.items() if place not in copies})
    try:
        _put(copies)
        copies.clear()  # so that replaced buffers are freed
        yield
        copies |= {(part, name): part._buffers[name] for part, name in originals}
    finally:
        _put(originals)


def _put(buffers: Buffers) -> None:
    for (part, name), buffer in buffers.items():
        part._buffers[name] = buffer


def _copied(buffers: Buffers) -> Buffers:
    """Copy buffers; buffers that share a storage share one in the copies."""
    present = {place: buffer for place, buffer in buffers.items() if buffer is not None}
    _, copies = in_other_storages(list(present.values()), Tensor.clone)
    return dict.fromkeys(buffers) | dict(zip(present, copies, strict=True))


# ---- The two ends of a piece of the autograd graph
# Ordinarily a pipeline stage keeps its outputs until the backward, which starts from them, and the received
# gradients until the backward ends, because its caller holds them. Both cost memory for each microbatch in
# flight. Here the graph of a stage lies between an `enter` and a `leave`:
#
# - `leave` ends the graph in a root without bytes, so that the outputs may be freed as soon as they are sent.
#   The backward starts at the root. There it takes the received gradients out of the `GraphEnds`, so that
#   only the autograd engine holds them, and frees each after its last use.
# - `enter` passes the inputs on as aliases and, in the backward, puts their gradients into the `GraphEnds`.
#   The inputs are not leaves of the graph, so it does not keep them alive, and layers may work on them in
#   place.
#
# Within a piece, `apart` does the same for values that a layer changes in place and the layer before returned
# as views. Otherwise autograd would rewrite the graph of the view's base and copy its gradient twice in the
# backward.
#
# The backward of a piece goes through the graphs of all its outputs, including those on which the loss does
# not depend, so each layer's memory is freed in order. Autograd's operations pass undefined gradients on. A
# custom function would get zeros, or add a gradient; without incoming gradients it is not called, as in plain
# training.


@dataclass(slots=True)
class GraphEnds:
    """Ends of one piece of graph: its root, and its incoming and outgoing gradients."""

    root: Tensor | None = None
    incoming: Sequence[Tensor | None] | None = None
    outgoing: tuple[Tensor | None, ...] = ()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, graph: GraphEnds, differentiable: tuple[bool, ...], anchor: Tensor, *values: Tensor
    ) -> Values:
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        aliases = tuple(value.detach() for value in values)
        ctx.mark_non_differentiable(
            *(a for a, wanted in zip(aliases, differentiable, strict=True) if not wanted)
        )
        return aliases

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.graph.outgoing = gradients
        return (None, None, None, *(None for _ in gradients))


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: GraphEnds, *outputs: Tensor) -> Tensor:
        ctx.graph = graph
        return outputs[0].new_empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        incoming, ctx.graph.incoming = ctx.graph.incoming, None
        return (None, *incoming)


@dataclass(slots=True)
class Waiting:
    """A parameter, and the gradient of later layers, which waits for those of earlier ones."""

    parameter: Tensor
    gradient: Tensor | None


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, waiting: Waiting, parameter: Tensor) -> Tensor:
        ctx.waiting = waiting
        return parameter.new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        result, ctx.waiting.gradient = ctx.waiting.gradient, None
        # A view, to which autograd never adds in place: so the sum is in new memory, whatever the layers are
        return None, result.view_as(
            result
        ) if result is not None and result.layout is torch.strided else result


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def enter(graph: GraphEnds, values: Values, differentiable: tuple[bool, ...], anchor: Tensor) -> Values:
    """Return `values` as the start of a graph whose backward puts their gradients into `graph.outgoing`.

    Only `differentiable` values get gradients. `anchor` is any tensor that requires a gradient: it gets none,
    but makes autograd record the graph.
    """
    entered: Values = _Enter.apply(graph, differentiable, anchor, *values)  # type: ignore[no-untyped-call]
    return entered


def apart(values: Values) -> Values:
    """Replace views in a graph among `values` by aliases, for a layer that works on them in place.

    Numbers and memory are shared, and gradients pass; no other code may read the memory of such a value.
    """
    return tuple(
        _Apart.apply(v) if v._is_view() and v.requires_grad else v  # type: ignore[no-untyped-call]
        for v in values
    )


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: str, zeros: bool, anchor: Tensor, value: Tensor) -> Tensor:
        ctx.layer, ctx.zeros = layer, zeros
        ctx.set_materialize_grads(False)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None, None, None]:
        if gradient is not None and not (ctx.zeros and _may_be_zero(gradient)):
            _refuse_gradient(f"the layer after {ctx.layer}", gradient.shape)
        return None, None, None, None


def _may_be_zero(gradient: Tensor) -> bool:
    """Return whether a gradient has only zeros; True for a fake one, which has no numbers."""
    some = gradient.any()
    return isinstance(gradient, FakeTensor) or not some


def cut(
    values: Values, unused: Sequence[bool], anchor: Tensor, layer: str = "", *, zeros: bool = False
) -> Values:
    """Replace `unused` outputs of `layer` by aliases apart from its graph, whose saved tensors are freed.

    No gradient arrives for them, so a backward would never reach these tensors; with `zeros`, gradients of
    zeros may arrive, as FSDP2 makes them for all inputs of a layer. `anchor` is as for `enter`.
    """
    return tuple(
        _Cut.apply(layer, zeros, anchor, value.detach()) if is_unused else value  # type: ignore[no-untyped-call]
        for value, is_unused in zip(values, unused, strict=True)
    )


def leave(graph: GraphEnds, outputs: Values) -> None:
    """End the graph at `outputs`.

    Its backward starts at `graph.root`, which is None if no output requires a gradient.
    """
    root: Tensor = _Leave.apply(graph, *outputs)  # type: ignore[no-untyped-call]
    graph.root = root if root.requires_grad else None


def backward(graph: GraphEnds, waiting: Sequence[Waiting] = ()) -> None:
    """Run the graph backward, from output gradients `graph.incoming` to input gradients `graph.outgoing`.

    Gradients of parameters that are `waiting` are the first summands of those that the graph makes, as if one
    graph had made both. Only `graph` and `waiting` may refer to these gradients: then the engine frees each
    after its last use.
    """
    root, graph.root = graph.root, None
    roots: list[Tensor] = [
        _Late.apply(one, one.parameter)  # type: ignore[no-untyped-call]
        for one in waiting
    ]
    if root is not None:
        _pass_over(root, graph.incoming or ())
        roots.append(root)
    del root
    if roots:
        torch.autograd.backward(roots, [tensor.detach() for tensor in roots])
    graph.incoming = None


def _pass_over(root: Tensor, incoming: Sequence[Tensor | None]) -> None:
    """Stop custom functions that only outputs without a gradient depend on from being called in the
    backward.
    """
    assert root.grad_fn is not None
    ends = [node for node, _ in root.grad_fn.next_functions]  # of all outputs, in order
    aside = [node for node, gradient in zip(ends, incoming, strict=True) if gradient is None]
    functions = [node for node in _behind(aside) if isinstance(node, BackwardCFunction)]
    if not functions:
        return
    called = set(
        _behind([node for node, gradient in zip(ends, incoming, strict=True) if gradient is not None])
    )
    for function in functions:
        if function not in called:
            function.set_materialize_grads(False)
            function.apply = partial(_nothing, len(function.needs_input_grad))  # type: ignore[method-assign]


def _behind(ends: Iterable[Node | None]) -> Iterator[Any]:
    """Yield the given graph nodes and every node that they depend on."""
    met, waiting = set[Node](), [node for node in ends if node is not None]
    while waiting:
        node = waiting.pop()
        if node not in met:
            met.add(node)
            yield node
            waiting += [before for before, _ in node.next_functions if before is not None]


def _nothing(count: int, *gradients: Tensor | None) -> tuple[None, ...]:
    """Return undefined gradients for the arguments of a function without incoming gradients."""
    return (None,) * count


# ---- Separate memory for parameter gradients
# Autograd may hand views of one tensor on as the gradients of parameters and of values: after `torch.cat((p,
# q))` those of `p` and `q` are parts of one tensor, after `x + p.view(3, 8)` the gradient of `p` is that of
# `x`. An in-place addition to the parameter's gradient, by the backward of the next microbatch or an
# all-reduce, would change the other gradient too, which may be on its way to another stage; and a small
# gradient would keep the memory of a large tensor until the update. So a gradient in shared or larger memory
# is copied as soon as it is accumulated, in a measured layer as in a whole stage. Copies cost time in the
# first backward of a step, and memory until the last view is copied.


@contextmanager
def born_apart(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Give each new gradient of the `parameters` that a backward in the context creates its own memory."""
    hooks = dict[int, RemovableHandle]()

    def give_memory(parameter: Tensor) -> None:
        """Copy a new gradient if its memory is larger or has other users; later ones are added to it."""
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            return
        storage = gradient.untyped_storage()
        users = storage_uses(storage._cdata)  # the gradient, the object `storage`, and others
        if storage.nbytes() > gradient.nbytes or users > 2:
            parameter.grad = gradient.clone()
        hooks[id(parameter)].remove()

    for parameter in dict.fromkeys(parameters):
        if parameter.requires_grad and parameter.grad is None:
            hook = parameter.register_post_accumulate_grad_hook(give_memory)  # type: ignore[no-untyped-call]
            hooks[id(parameter)] = hook
    try:
        yield
    finally:
        for hook in hooks.values():
            hook.remove()


# ---- Microbatches in flight

Loss = Callable[[Values, Values], Tensor]  # from the last layer's values and the targets


@dataclass(slots=True)
class FlightPiece:
    """Layers `first` to `end - 1`, whose forward was one action.

    A piece without a graph keeps its inputs and targets for its recomputation, and as `copies` the buffers
    that its layers both read and change. After the recomputation, `copies` are all buffers of the second
    forward; its graph may refer to them.
    """

    first: int
    end: int
    graph: GraphEnds = field(default_factory=GraphEnds)
    inputs: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)
    has_graph: bool = False
    copies: Buffers = field(default_factory=dict)


@dataclass(slots=True)
class Flight:
    """One microbatch in one stage.

    `microbatch` is its number in its step, and `batch_number` the number of the step. If replicas divide
    microbatches into local batches, `slice_number` counts these over the step; random draws depend on it, on
    the step and on `seed`. `samples` is the size of the local batch, or of the whole microbatch. `layers` and
    `loss` are the stage's for microbatches of this size, `boundaries` the values before every layer of the
    model and after the last, and `weight` the factor on the microbatch's loss. `version` is the weight
    version that it uses, if stages are updated with microbatches in flight. `values` wait for the next piece.
    `gradients` has one gradient, or None, for each value at the boundary that the backward has reached.
    `waiting` has gradients of shared parameters, by their numbers in the stage, that wait for those of
    earlier layers. `luggage` holds the saved tensors that the program offloads.
    """

    microbatch: int
    seed: int
    batch_number: int
    slice_number: int
    samples: int
    layers: Sequence[ChainLayer]
    loss: Loss
    boundaries: Sequence[Sequence[Value]]
    weight: float
    luggage: Luggage
    version: Version | None = None
    values: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    waiting: dict[int, Tensor] = field(default_factory=dict)
    pieces: dict[int, FlightPiece] = field(default_factory=dict)  # by their first layer

    def rows(self, load: Action, microbatches: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
        """Return the tensors that a LOAD takes from its microbatch: whole, or the rows of a local batch.

        Raises:
            UsageError: the LOAD takes more or fewer rows than the local batch has.
        """
        tensors = microbatches[self.microbatch]
        if load.part is None:
            return tensors
        first, end = load.part
        if end - first != self.samples:
            raise UsageError(
                f"{load} takes {counted(end - first, 'row')}, but the local batch has {self.samples}"
            )
        return [tensor[first:end] for tensor in tensors]

    def abandon(self) -> None:
        """Drop everything, graphs included, after a failed step."""
        for piece in self.pieces.values():
            piece.graph.root = piece.graph.incoming = None
            piece.graph.outgoing = ()
        self.pieces.clear()
        self.values.clear()
        self.targets.clear()
        self.gradients.clear()
        self.waiting.clear()


def take(box: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors in `box` and empty it, so that it no longer keeps them alive."""
    values = tuple(box)
    box.clear()
    return values


def on_device(tensors: Sequence[Tensor], values: Sequence[Value], device: torch.device) -> list[Tensor]:
    """Copy host tensors to the device, in the dtypes of the profiled values."""
    return [
        tensor.to(device, getattr(torch, value.dtype), non_blocking=True, copy=True)
        for tensor, value in zip(tensors, values, strict=True)
    ]


def gradients_to_send(
    gradients: Sequence[Tensor | None], values: Sequence[Value], layer: str
) -> list[Tensor | None]:
    """Return a contiguous gradient for each value before `layer` that has one by the plan.

    Absent gradients are None.

    Raises:
        UsageError: a value has a gradient that the plan does not expect.
    """
    for gradient, value in zip(gradients, values, strict=True):
        if gradient is not None and not value.has_gradient:
            _refuse_gradient(f"layer {layer}", value.shape)
    return [
        None if gradient is None else gradient.contiguous()
        for gradient, value in zip(gradients, values, strict=True)
        if value.has_gradient
    ]


def _refuse_gradient(layer: str, shape: Sequence[int]) -> NoReturn:
    raise UsageError(
        f"{layer} has a gradient for a value of shape {tuple(shape)}, but the loss did not depend on it when "
        "the model was profiled, so it is not expected: the layers that use a value must not depend on "
        "numbers in tensors. Multiply by zero instead of omitting a value"
    )


@contextmanager
def naming_changes(microbatch: int, first: int, end: int) -> Iterator[None]:
    """Name the microbatch and layers if a backward in the context finds a changed saved tensor.

    Raises:
        UsageError: a saved tensor has been changed in place; autograd's message would not name a layer.
    """
    try:
        yield
    except RuntimeError as error:
        if not any("modified by an inplace operation" in str(cause) for cause in causes(error)):
            raise
        raise UsageError(
            f"microbatch {microbatch} cannot go backward through {layers_text(first, end)}: their saved "
            "tensors have been changed in place, for example because a later microbatch's forward updates a "
            "buffer. Let the plan recompute these layers, or let them compute with a clone of the changed "
            "tensor"
        ) from error
