"""Measures what one layer costs: runs its forward, its backward and its optimizer step under a meter.

The layer runs between an `enter` and a `leave`, as a stage does in the runtime, so that its bytes are the same there.
There are three runs: one to see what autograd saves, one as the first microbatch of a step, and one as a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from pipefit.capture.by_value import assumptions
from pipefit.capture.constants import constants, held_tensors
from pipefit.capture.held import held_storages
from pipefit.capture.refusals import Refusal
from pipefit.capture.stand_ins import STRANGER
from pipefit.capture.storages import storage_key
from pipefit.capture.structure import Values
from pipefit.layer_costs import GradientOrigin, LayerCost, Origin, Parameter, SavedTensor, Span, Value
from pipefit.meter.kernels import Kernels
from pipefit.meter.unsaved import saving_nothing
from pipefit.profiler.arriving import Layouts, dense, gradients_in, layouts_of
from pipefit.profiler.backward_state import check_backward
from pipefit.profiler.feedback import Feedback, feedback
from pipefit.profiler.gradients import BackwardPass, Gradients, gradients_of
from pipefit.profiler.graph import nodes
from pipefit.profiler.loss_state import changed_by_loss
from pipefit.profiler.pass_meter import PassMeter
from pipefit.profiler.plain import Plain, changed_name, plain_attributes
from pipefit.profiler.saved import LayerStorages, Packed, lasting_tensors, saved_tensors, savers
from pipefit.profiler.update import LayerGroups, MakeOptimizer, Peak, updates_of
from pipefit.profiler.writes import changed_inputs
from pipefit.runtime.apart import born_apart
from pipefit.runtime.boundary import GraphEnds, backward, enter, leave
from pipefit.runtime.weight_copies import WeightCopy, cast_by, using
from pipefit.texts import dtype_name
from pipefit.trace import Category
from pipefit.work import Work

Call = Callable[[Values], Values]


class _Kept(NamedTuple):
    """What exists after a forward. `outputs` are tensors like those that it returned."""

    storages: tuple[int, ...]  # bytes of the layer's own
    saved: tuple[SavedTensor, ...]
    output_origins: tuple[Origin, ...]
    outputs: Values


class _Microbatch(NamedTuple):
    """Forward and backward of one microbatch."""

    forward_peak: Peak
    forward: Work
    spans: tuple[Span, ...]  # of the backward
    backward: Work
    arriving: Layouts
    gradients: Gradients
    layouts: Layouts


class LayerMeter:
    """Measures `call` (a layer, or the loss) with the parameters of `module`, on inputs like `inputs`.

    `shared` are those of its trained parameters that other layers have too. `owner` has the plain attributes that a
    call may change; by default it is `module`. After a measurement `changed_buffers` are the names of the buffers that
    a forward changes, `changed_inputs` the numbers of the inputs on which it works in place, and `layouts` tells how
    the gradients of the inputs lie.
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
        self._by_value = False  # whether something was assumed of the forward, since it depends on values
        self.anchor = torch.empty(0, device=device, requires_grad=True)
        self._left = set[str]()  # what a backward changes in place

    def measure(
        self, optimizer: MakeOptimizer, groups: LayerGroups = (), *, arriving: Layouts | None = None
    ) -> tuple[LayerCost, Values]:
        """The cost of the layer with these parameter groups, and tensors like those that it returned.

        Its backward starts from gradients of the outputs that lie as `arriving` says, by default a dense one for each.
        """
        attributes, shapes = plain_attributes(self.owner), _buffer_shapes(self.module)
        with self.meter:
            self._copy_weights()
            self.meter.tag(self._statics(), Category.PARAMETERS)
            kept = self._kept_by_forward()
            checkpoint = self._checkpoint()
            first, later = self._microbatch(arriving), self._microbatch(arriving)
            read = frozenset(self.meter.read)
            gradient_bytes = self._gradient_bytes()
            updates = updates_of(self.meter, optimizer, groups, self._follow)
            self._drop_gradients()
        self.layouts = later.layouts
        _check_buffer_shapes(shapes, _buffer_shapes(self.module))
        second = self._feedback(attributes)
        self._check_backward(second)
        self.changed_buffers = second.changed
        held = held_storages(self.module).values()
        cost = LayerCost(
            module=type(self.module).__name__,
            parameters=tuple(self._parameter(*named, second, read) for named in self.module.named_parameters()),
            buffer_bytes=sum(one.nbytes for one in held if one.is_buffer),
            constant_bytes=sum(one.nbytes for one in held if not one.is_buffer),
            inputs=tuple(map(_value, self.like, (origin.kind != "none" for origin in later.gradients.origins))),
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
        """Backward passes whose outputs' gradients have the layouts `arriving`.

        `usual` are the origins of the inputs' gradients where each output's gradient is in a storage of its own.
        """
        with self.meter:
            self.meter.tag(self._statics(), Category.PARAMETERS)
            first, later = self._microbatch(arriving), self._microbatch(arriving, usual)
            self._drop_gradients()
        return BackwardPass(first.spans, later.spans, later.gradients, later.layouts)

    def _gradient_bytes(self) -> int:
        """Bytes of the parameters' gradients that exist when a step is made."""
        for parameter in self.shared:  # one that this layer leaves unused has its gradient from another one
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter, requires_grad=False)
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return sum(gradient.untyped_storage().nbytes() for gradient in gradients)

    def _drop_gradients(self) -> None:
        """Another layer that shares a parameter with this one is measured from the start."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def _statics(self) -> list[Tensor]:
        """What exists as long as the layer does. A forward may replace a buffer, so no list of them is kept."""
        copies = [copy.tensor for _, copy in self._copied]
        return [*self.module.parameters(), *self.module.buffers(), *constants(self.module), *copies]

    def _copy_weights(self) -> None:
        """See of which weights autocast keeps copies, and make them as the runtime does."""
        if self._autocast is not None:
            given = self._enter(GraphEnds(), [torch.empty_like(value, requires_grad=False) for value in self.like])
            cast = cast_by(partial(self._call, given), list(self.module.parameters()), self._autocast, given)
            self.meter.forget_graphs()
            self._copied = [(weight, WeightCopy.of(weight, self._autocast)) for weight in cast]
            self._follow()
            self.meter.watched = frozenset(storage_key(weight) for weight in cast)
            self.meter.read.clear()

    def _follow(self) -> None:
        """Let the copies have the values of their weights."""
        for weight, copy in self._copied:
            copy.fresh = False
            copy.follow(weight)

    def call(self, values: Values) -> Values:
        """Run the layer forward with the copies of its weights."""
        with using(self._copied, self._autocast, values):
            return self._call(values)

    def _parameter(self, name: str, parameter: Tensor, second: Feedback, read: Set[int]) -> Parameter:
        """What is known of a parameter; `read` are the storages of copied weights that passes read themselves."""
        copies = (copy.tensor.untyped_storage().nbytes() for weight, copy in self._copied if weight is parameter)
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
        """Run a forward, and see what a second one would find changed.

        Like every run it is under the meter, for results lie as those of the target's kernels only there: otherwise
        views of them could fail, and values would leave the layer in other orders than where it is measured.
        """
        with self.meter:
            found = feedback(self._forward, self.module, self.owner, attributes)
            self.meter.forget_graphs()
        return found

    def _check_backward(self, second: Feedback) -> None:
        """Check that a backward does not depend on how many other microbatches went forward before it.

        Raises:
            Refusal: it does.
        """
        with self.meter:
            check_backward(self._forward, self.module, second, self._left)
            self.meter.forget_graphs()
        self._drop_gradients()

    def changed_by_loss(self, loss: object) -> str:
        """What a forward of the loss changes of its own tensors, in words; see `changed_by_loss`."""
        with self.meter:
            found = changed_by_loss(self._forward, loss)
            self.meter.forget_graphs()
        return found

    def _forward(self, graph: GraphEnds | None = None) -> Values:
        """Run a forward, at the start of `graph`."""
        inputs = [torch.empty_like(value, requires_grad=False) for value in self.like]
        return self.call(self._enter(graph or GraphEnds(), inputs))

    def _kept_by_forward(self) -> _Kept:
        """Run a forward, and see what exists after it."""
        packed: list[ReferenceType[Packed]] = []

        def pack(tensor: Tensor) -> Packed:
            one = Packed(tensor)
            packed.append(ref(one))
            return one

        before, known = self.meter.total, assumptions()
        inputs = [torch.empty_like(value, requires_grad=False) for value in self.like]
        graph = GraphEnds()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
            values = self._enter(graph, list(inputs))
            values = self.call(values)
        self._refuse_strangers(values)
        storages = LayerStorages(self.meter, self._statics(), inputs)
        saved = saved_tensors([known() for known in packed], savers(values), storages)
        lasting = lasting_tensors(values, len(packed), storages)
        saved += lasting
        origins = tuple(map(storages.origin, values))
        hidden = self.meter.total - before - sum(storages.own) - sum(t.untyped_storage().nbytes() for t in inputs)
        if hidden > 0:
            index, origin = len(packed) + len(lasting), storages.add(hidden)
            saved.append(SavedTensor(index=index, nbytes=hidden, dtype="uint8", origin=origin, hidden=True))
        self._by_value = assumptions() > known
        if self._by_value:  # with other values it may keep others, and number them otherwise
            saved = [replace(one, hidden=True) for one in saved]
        kept = _Kept(tuple(storages.own), tuple(saved), origins, tuple(map(_like, values)))
        leave(graph, values)
        graph.root = None
        del values
        self.meter.forget_graphs()
        return kept

    def _refuse_strangers(self, values: Values) -> None:
        """Check that the trained parameters behind `values` are the layer's own.

        Raises:
            Refusal: one belongs to another layer or to none.
        """
        own = set(map(id, self.module.parameters()))
        leaves = (getattr(node, "variable", None) for node in nodes(values))
        if any(isinstance(leaf, nn.Parameter) and id(leaf) not in own for leaf in leaves):
            raise Refusal(*STRANGER)

    def _checkpoint(self) -> Peak:
        """The peak of a forward that saves nothing. Sees which inputs it changes in place."""
        inputs = [torch.empty_like(value, requires_grad=False) for value in self.like]
        self.meter.start()
        versions = [value._version for value in inputs]
        with saving_nothing():
            self.call(self._enter(GraphEnds(), list(inputs)))
        self.meter.drop_graph()
        self.changed_inputs = changed_inputs(inputs, versions, self.meter.written)
        return Peak.of(self.meter)

    def _microbatch(self, arriving: Layouts | None, usual: Sequence[GradientOrigin] = ()) -> _Microbatch:
        """Run a forward and its backward, from gradients of the outputs that lie as `arriving` says, or dense ones."""
        graph = GraphEnds()
        inputs = [torch.empty_like(value, requires_grad=False) for value in self.like]
        arrived = self.meter.storages(inputs)
        self.meter.start()
        values = self._enter(graph, inputs)
        values = self.call(values)
        peak, forward = Peak.of(self.meter), self.meter.work
        device = values[0].device
        arriving = dense(values) if arriving is None else arriving
        incoming = gradients_in(arriving, device)
        leave(graph, values)
        del values
        self.meter.start(arrived)
        graph.incoming = incoming
        given = [None if gradient is None else self.meter.storages([gradient])[0] for gradient in incoming]
        del incoming
        with born_apart(self.module.parameters()):
            backward(graph)
        self._left |= {n for n, t in held_tensors(self.module).items() if storage_key(t) in self.meter.written}
        outgoing = self._outgoing(graph)
        work, spans = self.meter.work, self.meter.spans
        gradients = gradients_of(self.meter, outgoing, given, usual)
        return _Microbatch(peak, forward, spans, work, arriving, gradients, layouts_of(outgoing))

    def _outgoing(self, graph: GraphEnds) -> Sequence[Tensor | None]:
        """The gradients of the inputs. Where values decide which there are, it is all that there can be."""
        found = graph.outgoing or (None,) * len(self.like)
        if not self._by_value:
            return found
        return [
            torch.empty_like(value, requires_grad=False) if gradient is None and wanted else gradient
            for gradient, value, wanted in zip(found, self.like, self.flags, strict=True)
        ]

    def _enter(self, graph: GraphEnds, inputs: list[Tensor]) -> Values:
        values = tuple(inputs)
        inputs.clear()
        return enter(graph, values, self.flags, self.anchor) if any(self.flags) else values


def _like(value: Tensor) -> Tensor:
    """A new tensor with the layout and `requires_grad` of `value`, and without its graph."""
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
    """Shape and dtype of every buffer, None where there is none yet."""
    buffers = ((f"{path}.{name}", b) for path, part in module.named_modules() for name, b in part._buffers.items())
    return {name.removeprefix("."): None if b is None else (b.shape, b.dtype) for name, b in buffers}


def _check_buffer_shapes(before: dict[str, object], after: dict[str, object]) -> None:
    """Check that buffers are as large as they were before the first forward.

    Raises:
        Refusal: one is not; names it.
    """
    name = changed_name(before, after)
    if name is not None:
        raise Refusal(
            f"its forward gives the buffer {name!r} another shape or type, and what that takes is in no plan",
            "register it with a tensor of the shape that it is going to have",
        )
