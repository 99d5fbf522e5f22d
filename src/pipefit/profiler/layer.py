"""Measurement of one layer: its forward, its backward and its optimizer step run under a meter.

The layer runs between `enter` and `leave`, as in a stage of the runtime, so its bytes are equal there. There
are three runs: one to see what autograd saves, one as the first microbatch of a step, and one as a later
microbatch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from pipefit.capture import (
    STRANGER,
    Refusal,
    Values,
    assumptions,
    constants,
    held_storages,
    held_tensors,
    noticing,
    reachable,
    storage_key,
)
from pipefit.measure import Kernels, Tracked, layouts_of, saving_nothing
from pipefit.profiler.feedback import (
    BufferSources,
    Feedback,
    Plain,
    changed_inputs,
    changed_name,
    feedback,
    nodes,
    plain_attributes,
)
from pipefit.profiler.pass_meter import Layouts, PassMeter, dense, gradients_in
from pipefit.profiler.update import LayerGroups, MakeOptimizer, Peak, updates_of
from pipefit.runtime import GraphEnds, WeightCopy, backward, born_apart, cast_by, cut, enter, leave, using
from pipefit.schema.layer_costs import (
    GradientOrigin,
    LayerCost,
    Origin,
    Parameter,
    SavedTensor,
    Span,
    Value,
    Work,
)
from pipefit.schema.trace import Category
from pipefit.texts import dtype_name
from pipefit.torch_internals import pytree

# ---- Saved tensors: which operation saved each, and whose storage each has


class Packed:
    """A saved tensor as a graph node holds it: it dies with the node if the forward drops the node's result.

    The tensor is detached, because a node that saves its own output would otherwise keep itself alive.
    """

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


class StorageOrigins:
    """Origins of the storages of a layer's tensors: parameters and buffers, inputs, or the layer's own.

    `own` has the bytes of the layer's own storages, in the order of the first calls of `origin`.
    """

    def __init__(self, meter: PassMeter, statics: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self._meter, self.own = meter, list[int]()
        self._origins = {storage_key(t): Origin(kind="parameter") for t in statics}
        self._origins |= {storage_key(t): Origin(kind="input", index=k) for k, t in enumerate(inputs)}

    def origin(self, tensor: Tensor) -> Origin:
        """Return the origin of a tensor's storage; tensors of a loss, such as class weights, are
        parameters.
        """
        key = storage_key(tensor)
        if key not in self._origins:
            known = self._meter.counts(tensor)
            nbytes = tensor.untyped_storage().nbytes()
            self._origins[key] = self.add(nbytes) if known else Origin(kind="parameter")
        return self._origins[key]

    def add(self, nbytes: int) -> Origin:
        """Add a storage of the layer's own, and return its origin."""
        self.own.append(nbytes)
        return Origin(kind="own", index=len(self.own) - 1)


def saved_tensors(
    packed: Sequence[Packed | None], operations: dict[object, list[str]], storages: StorageOrigins
) -> list[SavedTensor]:
    """Return the tensors that autograd still holds, in the order of saving; None stands for a dropped one."""
    kept = [(index, held.tensor) for index, held in enumerate(packed) if held is not None]
    return [
        SavedTensor(
            index=index,
            operation=names.pop(0) if (names := operations.get(_identity(tensor))) else "",
            shape=tuple(tensor.shape),
            nbytes=tensor.numel() * tensor.element_size(),
            dtype=dtype_name(tensor.dtype),
            origin=storages.origin(tensor),
        )
        for index, tensor in kept
    ]


def lasting_tensors(values: Sequence[Tensor], first: int, storages: StorageOrigins) -> list[SavedTensor]:
    """Return the tensors that custom functions in the graph of `values` keep as attributes of their contexts.

    Autograd does not know these tensors: they live as long as the graph, past the backward of their function.
    They are numbered from `first` on.
    """
    kept = [
        (node.name().rpartition("Backward")[0], leaf)
        for node in sorted(nodes(values), key=lambda node: node._sequence_nr())
        for leaf in pytree.tree_leaves(getattr(node, "__dict__", {}))
        if isinstance(leaf, Tensor)
    ]
    return [
        SavedTensor(
            index=first + number,
            operation=operation,
            shape=tuple(tensor.shape),
            nbytes=tensor.numel() * tensor.element_size(),
            dtype=dtype_name(tensor.dtype),
            origin=storages.origin(tensor),
            lasting=True,
        )
        for number, (operation, tensor) in enumerate(kept)
    ]


def savers(values: Sequence[Tensor]) -> dict[object, list[str]]:
    """Return the operations in the graph of `values` that saved each tensor, in the order in which they
    ran.
    """
    result: dict[object, list[str]] = defaultdict(list)
    for node in sorted(nodes(values), key=lambda node: node._sequence_nr()):
        operation = node.name().rpartition("Backward")[0]
        for name in dir(node):
            if name.startswith("_saved_") and isinstance(kept := getattr(node, name), Tensor):
                result[_identity(kept)].append(operation)
    return result


def _identity(tensor: Tensor) -> object:
    """Return a key that is equal for tensors with the same storage, offset, shape and strides."""
    return storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


# ---- Tensors of a loss that its forward changes, such as a center that follows earlier values
#
# A loss runs once for each microbatch, on the last stage, in the order of plain training. Its changes happen
# once: it is neither recomputed nor replicated. Its tensors are not copied, unlike the buffers of layers.


def changed_by_loss(forward: Callable[[], object], loss: object) -> str:
    """Return what `forward`, which runs `loss` over fake tensors, changes, to follow "which"; or ""."""
    before = [one for one in reachable(loss) if isinstance(one, Tensor)]
    with noticing() as stood_in, BufferSources(()) as sources:
        forward()
    kept = set(map(id, reachable(loss)))
    held = held_tensors(loss) if isinstance(loss, nn.Module) else {}
    names = {id(tensor): repr(name) for name, tensor in held.items()}
    replaced = [one for one in before if id(one) not in kept and storage_key(one) in sources.taken]
    changed = [
        *stood_in.replaced,
        *replaced,
        *(real for real, fake in stood_in.pairs if storage_key(fake) in sources.written),
    ]
    return f"changes {names.get(id(changed[0]), 'a tensor')} in every forward" if changed else ""


# ---- Gradients that a backward returns for its inputs: their storages and layouts


class GradientOrigins(NamedTuple):
    """Origins of the inputs' gradients, and bytes of their storages that are the layer's own."""

    origins: tuple[GradientOrigin, ...]
    storages: tuple[int, ...]

    def also_as(self, others: Sequence[GradientOrigins]) -> GradientOrigins:
        """Return what holds here and in all `others`: gradients contiguous in each, the largest storages."""
        alike = [other for other in others if len(other.storages) == len(self.storages)]
        origins = tuple(
            replace(origin, contiguous=all(other.origins[number].contiguous for other in others))
            for number, origin in enumerate(self.origins)
        )
        return GradientOrigins(origins, tuple(map(max, zip(*(one.storages for one in alike), strict=True))))


class BackwardPass(NamedTuple):
    """A first backward and a later one, and the gradients that they return."""

    first: tuple[Span, ...]
    later: tuple[Span, ...]
    gradients: GradientOrigins
    left: Layouts


def gradients_of(
    meter: PassMeter,
    outgoing: Sequence[Tensor | None],
    given: Sequence[Tracked | None],
    usual: Sequence[GradientOrigin],
) -> GradientOrigins:
    """Return whether inputs' gradients have their own storages, or those of the outputs' gradients, `given`.

    Several of `given` may share a storage; then `usual`, if given, says which of them is passed on.
    """
    own: list[Tracked] = []

    def origin(number: int, gradient: Tensor | None) -> GradientOrigin:
        if gradient is None:
            return GradientOrigin(kind="none")
        (tracked,), contiguous = meter.storages([gradient]), gradient.is_contiguous()
        if usual and usual[number].kind == "output" and given[usual[number].index] is tracked:
            return usual[number]
        if tracked in given:
            return GradientOrigin(kind="output", index=given.index(tracked), contiguous=contiguous)
        if tracked not in own:
            own.append(tracked)
        return GradientOrigin(kind="own", index=own.index(tracked), contiguous=contiguous)

    origins = tuple(origin(number, gradient) for number, gradient in enumerate(outgoing))
    return GradientOrigins(origins, tuple(tracked.nbytes for tracked in own))


# ---- The meter of a layer

Call = Callable[[Values], Values]


class _Kept(NamedTuple):
    """Results of a forward. `outputs` are tensors like those that it returned."""

    storages: tuple[int, ...]  # bytes of the layer's own storages
    saved: tuple[SavedTensor, ...]
    output_origins: tuple[Origin, ...]
    outputs: Values
    stopped_peak_bytes: int | None  # of the forward until all tensors were saved


class _Microbatch(NamedTuple):
    """Forward and backward of one microbatch."""

    forward_peak: Peak
    forward: Work
    spans: tuple[Span, ...]  # of the backward
    buffered_spans: tuple[Span, ...]
    backward: Work
    arriving: Layouts
    gradients: GradientOrigins
    layouts: Layouts


class LayerMeter:
    """Measures `call` (a layer, or the loss) with the parameters of `module`, on inputs like `inputs`.

    `shared` are its trained parameters that other layers have too. `owner` has the plain attributes that a
    call may change; by default it is `module`. After a measurement, `changed_buffers` names the buffers that
    a forward changes, `changed_inputs` numbers the inputs that it changes in place, and `layouts` has the
    layouts of the inputs' gradients.
    """

    def __init__(
        self,
        call: Call,
        module: nn.Module,
        inputs: Sequence[Tensor],
        kernels: Kernels | None,
        shared: Sequence[nn.Parameter] = (),
        *,
        autocast: torch.dtype | None = None,
        owner: object | None = None,
    ) -> None:
        self._call, self.module, self.shared, self.owner = call, module, shared, owner or module
        self._autocast, self._copied = autocast, list[tuple[Tensor, WeightCopy]]()
        self.like = tuple(inputs)
        self.flags = tuple(value.requires_grad for value in inputs)
        device = inputs[0].device
        self.meter = PassMeter(kernels, device)
        self.changed_buffers, self.changed_inputs = frozenset[str](), frozenset[int]()
        self.layouts: Layouts = ()
        self._by_value = False  # whether the forward depends on values, so results were assumed
        self.anchor = torch.empty(0, device=device, requires_grad=True)

    def measure(
        self, optimizer: MakeOptimizer, groups: LayerGroups = (), *, arriving: Layouts | None = None
    ) -> tuple[LayerCost, Values]:
        """Return the cost of the layer with these parameter groups, and tensors like its outputs.

        Its backward starts from gradients of the outputs with the layouts `arriving`, by default a dense one
        for each output.
        """
        attributes, shapes = plain_attributes(self.owner), _buffer_shapes(self.module)
        with self.meter:
            self._copy_weights()
            self.meter.tag(self._statics(), Category.PARAMETERS)
            kept = self._kept_by_forward(arriving)
            checkpoint = self._checkpoint()
            first, later = self._microbatch(arriving), self._microbatch(arriving)
            read = frozenset(self.meter.read)
            gradient_bytes = self._gradient_bytes()
            updates = updates_of(self.meter, optimizer, groups, self._follow)
            self._drop_gradients()
        self.layouts = later.layouts
        _check_buffer_shapes(shapes, _buffer_shapes(self.module))
        second = self._feedback(attributes)
        self.changed_buffers = second.changed
        held = held_storages(self.module).values()
        cost = LayerCost(
            module=type(self.module).__name__,
            parameters=tuple(
                self._parameter(*named, second, read) for named in self.module.named_parameters()
            ),
            buffer_bytes=sum(held_storage.nbytes for held_storage in held if held_storage.is_buffer),
            constant_bytes=sum(one.nbytes for one in held if not one.is_buffer),
            inputs=tuple(
                map(_value, self.like, (origin.kind != "none" for origin in later.gradients.origins))
            ),
            outputs=tuple(map(_value, kept.outputs, (gradient is not None for gradient in first.arriving))),
            output_origins=kept.output_origins,
            storages=kept.storages,
            saved=kept.saved,
            forward_peak_bytes=first.forward_peak.nbytes,
            forward_workspace_bytes=first.forward_peak.workspace,
            checkpoint_peak_bytes=checkpoint.nbytes,
            checkpoint_workspace_bytes=checkpoint.workspace,
            mutates_inputs=bool(self.changed_inputs),
            fed_back=second.fed_back,
            fed_back_bytes=second.fed_back_bytes,
            unseen=second.unseen,
            unrepeatable=second.unrepeatable,
            coupled=second.coupled,
            draws=second.draws,
            undivided=updates.undivided,
            update_left_bytes=updates.left_bytes,
            backward_first=first.spans,
            backward_later=later.spans,
            buffered_first=first.buffered_spans,
            buffered_later=later.buffered_spans,
            stopped_peak_bytes=kept.stopped_peak_bytes,
            gradient_bytes=gradient_bytes,
            input_gradients=later.gradients.origins,
            gradient_storages=later.gradients.storages,
            state_bytes=updates.state_bytes,
            early_state_bytes=updates.early_state_bytes,
            update_first_peak_bytes=updates.first.nbytes,
            update_first_workspace_bytes=updates.first.workspace,
            update_peak_bytes=updates.later.nbytes,
            update_workspace_bytes=updates.later.workspace,
            forward=first.forward,
            backward=first.backward,
            update=updates.work,
        )
        return cost, kept.outputs

    def measure_again(self, arriving: Layouts, usual: Sequence[GradientOrigin]) -> BackwardPass:
        """Measure backward passes whose outputs' gradients have the layouts `arriving`.

        `usual` are the origins of the inputs' gradients if each output's gradient has its own storage.
        """
        with self.meter:
            self.meter.tag(self._statics(), Category.PARAMETERS)
            first, later = self._microbatch(arriving), self._microbatch(arriving, usual)
            self._drop_gradients()
        return BackwardPass(first.spans, later.spans, later.gradients, later.layouts)

    def _gradient_bytes(self) -> int:
        """Return the bytes of the parameters' gradients at an optimizer step."""
        for parameter in self.shared:  # a parameter unused here has a gradient from another layer
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter, requires_grad=False)
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return sum(gradient.untyped_storage().nbytes() for gradient in gradients)

    def _drop_gradients(self) -> None:
        """Drop gradients, so that another layer with a shared parameter is measured from the start."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def _statics(self) -> list[Tensor]:
        """Return the tensors that live as long as the layer; not cached: a forward may replace a buffer."""
        copies = [copy.tensor for _, copy in self._copied]
        return [*self.module.parameters(), *self.module.buffers(), *constants(self.module), *copies]

    def _copy_weights(self) -> None:
        """Find the weights that autocast copies, and make the copies as the runtime does."""
        if self._autocast is not None:
            given = self._enter(
                GraphEnds(), [torch.empty_like(value, requires_grad=False) for value in self.like]
            )
            cast = cast_by(partial(self._call, given), list(self.module.parameters()), self._autocast, given)
            self._copied = [(weight, WeightCopy.of(weight, self._autocast)) for weight in cast]
            self._follow()
            self.meter.watched = frozenset(storage_key(weight) for weight in cast)
            self.meter.read.clear()

    def _follow(self) -> None:
        """Update the copies to the values of their weights."""
        for weight, copy in self._copied:
            copy.fresh = False
            copy.follow(weight)

    def call(self, values: Values) -> Values:
        """Run the layer forward with the copies of its weights."""
        with using(self._copied, self._autocast, values):
            return self._call(values)

    def _parameter(self, name: str, parameter: Tensor, second: Feedback, read: Set[int]) -> Parameter:
        """Describe a parameter; `read` are the storages of copied weights that passes read directly."""
        copies = (
            copy.tensor.untyped_storage().nbytes() for weight, copy in self._copied if weight is parameter
        )
        copy_bytes = sum(copies)
        return Parameter(
            name=name,
            shape=tuple(parameter.shape),
            dtype=dtype_name(parameter.dtype),
            nbytes=parameter.untyped_storage().nbytes(),
            trainable=parameter.requires_grad,
            copy_bytes=copy_bytes,
            cast_only=copy_bytes > 0 and storage_key(parameter) not in read and not self._by_value,
            changed=name in second.parameters,
        )

    # ---------------------------------------------------------------- the runs

    def _feedback(self, attributes: Plain) -> Feedback:
        """Run a forward to find what a second one would find changed.

        It runs under the meter, like every run, because only there results have the strides of the target's
        kernels: otherwise views of them could fail, and values would leave the layer in other orders than in
        the measurement.
        """
        with self.meter:
            return feedback(self._forward, self.module, self.owner, attributes)

    def changed_by_loss(self, loss: object) -> str:
        """Return what a forward of the loss changes of its own; see the function `changed_by_loss`."""
        with self.meter:
            return changed_by_loss(self._forward, loss)

    def _forward(self, graph: GraphEnds | None = None) -> Values:
        """Run a forward, at the start of `graph`."""
        inputs = [torch.empty_like(value, requires_grad=False) for value in self.like]
        return self.call(self._enter(graph or GraphEnds(), inputs))

    def _kept_by_forward(self, arriving: Layouts | None) -> _Kept:
        """Run a forward whose outputs get gradients as `arriving`, and return what exists after it."""
        packed: list[ReferenceType[Packed]] = []

        peak_bytes = 0

        def pack(tensor: Tensor) -> Packed:
            nonlocal peak_bytes
            one = Packed(tensor)
            packed.append(ref(one))
            peak_bytes = self.meter.peak_bytes
            return one

        before, known = self.meter.total, assumptions()
        inputs = [torch.empty_like(value, requires_grad=False) for value in self.like]
        graph = GraphEnds()
        self.meter.start()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
            values = self._enter(graph, list(inputs))
            values = self.call(values)
        self._refuse_strangers(values)
        values = self._cut(values, arriving)
        storages = StorageOrigins(self.meter, self._statics(), inputs)
        saved = saved_tensors([known() for known in packed], savers(values), storages)
        lasting = lasting_tensors(values, len(packed), storages)
        saved += lasting
        origins = tuple(map(storages.origin, values))
        hidden = (
            self.meter.total - before - sum(storages.own) - sum(t.untyped_storage().nbytes() for t in inputs)
        )
        if hidden > 0:
            index, origin = len(packed) + len(lasting), storages.add(hidden)
            saved.append(SavedTensor(index=index, nbytes=hidden, dtype="uint8", origin=origin, hidden=True))
        self._by_value = assumptions() > known
        if self._by_value:  # other values may change which tensors are saved
            saved = [replace(saved_tensor, hidden=True) for saved_tensor in saved]
        kept = _Kept(
            tuple(storages.own),
            tuple(saved),
            origins,
            tuple(map(_like, values)),
            None if self._by_value else peak_bytes,
        )
        leave(graph, values)
        graph.root = None
        del values
        return kept

    def _refuse_strangers(self, values: Values) -> None:
        """Check that the trained parameters in the graph of `values` are the layer's own.

        Raises:
            Refusal: one belongs to another layer or to none.
        """
        own = set(map(id, self.module.parameters()))
        leaves = (getattr(node, "variable", None) for node in nodes(values))
        if any(isinstance(leaf, nn.Parameter) and id(leaf) not in own for leaf in leaves):
            raise Refusal(*STRANGER)

    def _checkpoint(self) -> Peak:
        """Return the peak of a forward that saves nothing; set `changed_inputs`."""
        inputs = [torch.empty_like(value, requires_grad=False) for value in self.like]
        self.meter.start()
        versions = [value._version for value in inputs]
        with saving_nothing():
            self.call(self._enter(GraphEnds(), list(inputs)))
        self.changed_inputs = changed_inputs(inputs, versions, self.meter.written)
        return Peak.of(self.meter)

    def _microbatch(self, arriving: Layouts | None, usual: Sequence[GradientOrigin] = ()) -> _Microbatch:
        """Run a forward and its backward, from gradients with the layouts `arriving`, by default dense
        ones.
        """
        graph = GraphEnds()
        inputs = [torch.empty_like(value, requires_grad=False) for value in self.like]
        arrived = self.meter.storages(inputs)
        self.meter.start()
        values = self._enter(graph, inputs)
        values = self.call(values)
        peak, forward = Peak.of(self.meter), self.meter.work
        device = values[0].device
        values = self._cut(values, arriving)
        arriving = dense(values) if arriving is None else arriving
        incoming = gradients_in(arriving, device)
        leave(graph, values)
        returned = self.meter.storages(values)
        del values
        given = [None if gradient is None else self.meter.storages([gradient])[0] for gradient in incoming]
        self.meter.start(arrived, filter(None, given), returned)
        graph.incoming = incoming
        del incoming
        with born_apart(self.module.parameters()):
            backward(graph)
        outgoing = self._outgoing(graph)
        work, spans, buffered = self.meter.work, self.meter.spans, self.meter.engine_spans
        gradients = gradients_of(self.meter, outgoing, given, usual)
        return _Microbatch(
            peak, forward, spans, buffered, work, arriving, gradients, layouts_of(outgoing, ())
        )

    def _outgoing(self, graph: GraphEnds) -> Sequence[Tensor | None]:
        """Return the gradients of the inputs; all possible ones if values decide which exist."""
        result = graph.outgoing or (None,) * len(self.like)
        if not self._by_value:
            return result
        return [
            torch.empty_like(value, requires_grad=False) if gradient is None and wanted else gradient
            for gradient, value, wanted in zip(result, self.like, self.flags, strict=True)
        ]

    def _cut(self, values: Values, arriving: Layouts | None) -> Values:
        """Free the graph of outputs for which no gradient arrives, as the runtime does."""
        if arriving is None:
            return values
        pairs = zip(values, arriving, strict=True)
        unused = [value.requires_grad and layout is None for value, layout in pairs]
        return cut(values, unused, self.anchor) if any(unused) else values

    def _enter(self, graph: GraphEnds, inputs: list[Tensor]) -> Values:
        values = tuple(inputs)
        inputs.clear()
        return enter(graph, values, self.flags, self.anchor) if any(self.flags) else values


def _like(value: Tensor) -> Tensor:
    """Return a new tensor with the layout and `requires_grad` of `value`, without its graph."""
    return torch.empty_like(value, requires_grad=False).requires_grad_(value.requires_grad)


def _value(tensor: Tensor, has_gradient: bool) -> Value:
    return Value(
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        nbytes=tensor.numel() * tensor.element_size(),
        requires_grad=tensor.requires_grad,
        unused=tensor.requires_grad and not has_gradient,
    )


def _buffer_shapes(module: nn.Module) -> dict[str, object]:
    """Return shape and dtype of every buffer; None for an unset one."""
    buffers = (
        (f"{path}.{name}", b) for path, part in module.named_modules() for name, b in part._buffers.items()
    )
    return {name.removeprefix("."): None if b is None else (b.shape, b.dtype) for name, b in buffers}


def _check_buffer_shapes(before: dict[str, object], after: dict[str, object]) -> None:
    """Check that buffers have the shapes and dtypes that they had before the first forward.

    Raises:
        Refusal: one does not. The message names it.
    """
    name = changed_name(before, after)
    if name is not None:
        raise Refusal(
            f"its forward changes the shape or dtype of the buffer {name!r}, whose new memory plans cannot "
            "predict",
            "register it with a tensor of its final shape",
        )
