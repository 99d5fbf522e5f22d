"""Measure one layer: run it forward, backward and through an update under a gauge, and write down what it costs.

The layer hangs between an `enter` and a `leave`, exactly as a stage hangs in the runtime, so that what is measured
alone holds in company. Three runs: one to see what autograd saves, a first microbatch, and a later one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipefit.meter.cpu import Tracked
from pipefit.profiler.gauge import Gauge, dtype_name
from pipefit.profiles import GradientOrigin, LayerCost, Origin, Parameter, SavedTensor, Span, Value, Work
from pipefit.runtime.boundary import Cell, Values, backward, enter, leave
from pipefit.trace import Category

Call = Callable[[Values], Values]


class _Held:
    """A saved tensor as the graph holds it: gone with its node, where a forward drops a result that it does not use.

    Detached, because an output that its own node saves would keep the node alive.
    """

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


class LayerMeter:
    """Measures `call` (a layer, or the loss) with the parameters of `module`, on inputs like `inputs`."""

    def __init__(self, call: Call, module: nn.Module, inputs: Sequence[Tensor], threads: int | None) -> None:
        self.call, self.module = call, module
        self.like = tuple(inputs)
        self.flags = tuple(value.requires_grad for value in inputs)
        self.gauge = Gauge(threads)
        device = inputs[0].device
        self.anchor = torch.empty(0, device=device, requires_grad=True)
        self.statics = [*module.parameters(), *module.buffers()]
        self.outputs: Values = ()
        self.input_gradients: tuple[GradientOrigin, ...] = ()
        self.gradient_storages: tuple[int, ...] = ()

    def measure(self, optimizer: Callable[..., Optimizer]) -> LayerCost:
        """Everything about the layer. Afterwards `outputs` are like what the layer returned."""
        with self.gauge:
            self.gauge.tag(self.statics, Category.PARAMETERS)
            storages, saved, origins = self._anatomy()
            checkpoint_peak, mutates = self._checkpoint()
            forward_peak, backward_first, forward, backwards = self._microbatch()
            _, backward_later, _, _ = self._microbatch()
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
            gradient_bytes = sum(g.untyped_storage().nbytes() for g in gradients)
            first, later, state, early, update = self._update(optimizer)
        return LayerCost(
            module=type(self.module).__name__,
            parameters=tuple(_parameter(name, p) for name, p in self.module.named_parameters()),
            buffer_bytes=sum(b.untyped_storage().nbytes() for b in self.module.buffers()),
            inputs=tuple(map(_value, self.like)),
            outputs=tuple(map(_value, self.outputs)),
            output_origins=origins,
            storages=storages,
            saved=saved,
            forward_peak_bytes=forward_peak,
            checkpoint_peak_bytes=checkpoint_peak,
            mutates_inputs=mutates,
            backward_first=backward_first,
            backward_later=backward_later,
            gradient_bytes=gradient_bytes,
            input_gradients=self.input_gradients,
            gradient_storages=self.gradient_storages,
            state_bytes=state,
            early_state_bytes=early,
            update_first_peak_bytes=first,
            update_peak_bytes=later,
            forward=forward,
            backward=backwards,
            update=update,
        )

    # ---------------------------------------------------------------- the runs

    def _anatomy(self) -> tuple[tuple[int, ...], tuple[SavedTensor, ...], tuple[Origin, ...]]:
        """What the forward leaves: own storages, saved tensors and outputs with their origins."""
        packed: list[ReferenceType[_Held]] = []

        def pack(tensor: Tensor) -> _Held:
            held = _Held(tensor)
            packed.append(ref(held))
            return held

        before = self.gauge.total
        inputs = [torch.empty_like(value, requires_grad=False) for value in self.like]
        where: dict[int, Origin] = {t.untyped_storage()._cdata: Origin(kind="parameter") for t in self.statics}
        where |= {t.untyped_storage()._cdata: Origin(kind="input", index=k) for k, t in enumerate(inputs)}
        own: list[int] = []

        def origin(tensor: Tensor) -> Origin:
            storage = tensor.untyped_storage()
            if storage._cdata not in where:
                where[storage._cdata] = Origin(kind="own", index=len(own))
                own.append(self.gauge.storages([tensor])[0].nbytes)
            return where[storage._cdata]

        cell = Cell()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
            values = self._enter(cell, list(inputs))
            values = self.call(values)
        operations = savers(values)
        kept = [(index, held.tensor) for index, known in enumerate(packed) if (held := known()) is not None]
        saved = [
            SavedTensor(
                index=index,
                operation=names.pop(0) if (names := operations.get(_identity(t))) else "",
                shape=tuple(t.shape),
                nbytes=t.numel() * t.element_size(),
                dtype=dtype_name(t.dtype),
                origin=origin(t),
            )
            for index, t in kept
        ]
        origins = tuple(origin(value) for value in values)
        hidden = self.gauge.total - before - sum(own) - sum(t.untyped_storage().nbytes() for t in inputs)
        if hidden > 0:  # kept on a custom function's context, unseen by hooks
            saved.append(
                SavedTensor(index=len(packed), nbytes=hidden, dtype="uint8", origin=Origin(kind="own", index=len(own)))
            )
            own.append(hidden)
        self.outputs = tuple(_like(value) for value in values)
        leave(cell, values)
        cell.root = None
        del values
        self.gauge.forget_graphs()
        return tuple(own), tuple(saved), origins

    def _checkpoint(self) -> tuple[int, bool]:
        """The peak of a forward that saves nothing, and whether it changed its inputs."""
        inputs = tuple(torch.empty_like(value, requires_grad=False) for value in self.like)
        self.gauge.start()
        with torch.no_grad():
            versions = [value._version for value in inputs]
            self.call(inputs)
        return self.gauge.peak_bytes, versions != [value._version for value in inputs]

    def _microbatch(self) -> tuple[int, tuple[Span, ...], Work, Work]:
        """Forward and backward of one microbatch: forward peak, backward spans, and the work of both."""
        cell = Cell()
        inputs = [torch.empty_like(value, requires_grad=False) for value in self.like]
        arrived = self.gauge.storages(inputs)
        self.gauge.start()
        values = self._enter(cell, inputs)
        values = self.call(values)
        peak, forward = self.gauge.peak_bytes, self.gauge.work
        incoming = [torch.empty_like(v, requires_grad=False) if v.requires_grad else None for v in values]
        leave(cell, values)
        del values
        self.gauge.start(arrived)
        cell.incoming = incoming
        given = [None if gradient is None else self.gauge.storages([gradient])[0] for gradient in incoming]
        del incoming
        backward(cell)
        work, spans = self.gauge.work, self.gauge.spans
        self._trace_gradients(cell.outgoing, given)
        return peak, spans, forward, work

    def _trace_gradients(self, outgoing: Sequence[Tensor | None], given: Sequence[Tracked | None]) -> None:
        """Note where the gradients of the inputs live: in storages of their own, or in the outputs' gradients."""
        own: list[Tracked] = []
        origins = []
        for gradient in outgoing or [None] * len(self.like):
            if gradient is None:
                origins.append(GradientOrigin(kind="none"))
                continue
            tracked, contiguous = self.gauge.storages([gradient])[0], gradient.is_contiguous()
            passed = next((number for number, known in enumerate(given) if known is tracked), None)
            if passed is not None:
                origins.append(GradientOrigin(kind="output", index=passed, contiguous=contiguous))
                continue
            if tracked not in own:
                own.append(tracked)
            origins.append(GradientOrigin(kind="own", index=own.index(tracked), contiguous=contiguous))
        self.input_gradients = tuple(origins)
        self.gradient_storages = tuple(tracked.nbytes for tracked in own)

    def _update(self, optimizer: Callable[..., Optimizer]) -> tuple[int, int, int, int, Work]:
        """Two optimizer steps over the layer: first peak, later peak, state bytes, those before any step, work."""
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        if not trainable:
            return 0, 0, 0, 0, Work(flops=0, moved_bytes=0)
        before = self.gauge.total
        stepper = optimizer([{"params": trainable}])
        early = self.gauge.total - before
        self.gauge.start()
        stepper.step()
        first, state = self.gauge.peak_bytes, self.gauge.total - before
        self.gauge.start()
        stepper.step()
        return first, self.gauge.peak_bytes, state, early, self.gauge.work

    def _enter(self, cell: Cell, inputs: list[Tensor]) -> Values:
        values = tuple(inputs)
        inputs.clear()
        return enter(cell, values, self.flags, self.anchor) if any(self.flags) else values


def state_bytes(parameter: Tensor, optimizer: Callable[..., Optimizer], threads: int | None) -> tuple[int, int]:
    """Bytes that the optimizer keeps for one parameter, and those of them that exist before the first step."""
    gauge = Gauge(threads)
    twin = nn.Parameter(torch.empty_like(parameter, requires_grad=False))
    twin.grad = torch.empty_like(twin, requires_grad=False)
    with gauge:
        stepper = optimizer([{"params": [twin]}])
        early = gauge.total
        stepper.step()
    return gauge.total, early


def savers(values: Sequence[Tensor]) -> dict[object, list[str]]:
    """The operations in the graph of `values` that saved a tensor, in the order they ran, by the tensor's identity."""
    nodes = {value.grad_fn for value in values if value.grad_fn is not None}
    pending = list(nodes)
    while pending:
        later = {node for node, _ in pending.pop().next_functions if node is not None} - nodes
        nodes |= later
        pending += later
    found: dict[object, list[str]] = defaultdict(list)
    for node in sorted(nodes, key=lambda node: node._sequence_nr()):
        operation = node.name().rpartition("Backward")[0]
        for name in dir(node):
            if name.startswith("_saved_") and isinstance(kept := getattr(node, name), Tensor):
                found[_identity(kept)].append(operation)
    return found


def _identity(tensor: Tensor) -> object:
    """Equal for tensors that are the same bytes seen the same way."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


def _like(value: Tensor) -> Tensor:
    """A tensor laid out as `value`, with its need for a gradient, that holds on to nothing of its past."""
    twin = torch.empty_like(value, requires_grad=False)
    return twin.requires_grad_(value.requires_grad)


def _value(tensor: Tensor) -> Value:
    nbytes = tensor.numel() * tensor.element_size()
    return Value(
        shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype), nbytes=nbytes, requires_grad=tensor.requires_grad
    )


def _parameter(name: str, p: Tensor) -> Parameter:
    return Parameter(
        name=name,
        shape=tuple(p.shape),
        dtype=dtype_name(p.dtype),
        nbytes=p.untyped_storage().nbytes(),
        trainable=p.requires_grad,
    )
