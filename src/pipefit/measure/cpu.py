"""The CPU meter: counts the bytes of one device by category, and enforces its cap.

A `Meter` is a dispatch mode. It sees every operation on tensors, real or fake, and watches each storage that
an operation allocates through a weak reference. Views and in-place operations allocate none, so a tensor from
elsewhere is not counted when it is used. Memory that a CPU kernel allocates and frees within one operation is
invisible from outside; it is looked up in `measure.kernels` and counted as workspace. When the sum exceeds
the cap, the meter raises a `torch.OutOfMemoryError`, as CUDA does. An emulated device is a worker under such
a meter.

Costs about ten microseconds an operation. Real GPUs have their allocator's statistics (`measure.cuda`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from pipefit.measure.kernels import Kernels
from pipefit.schema.trace import CATEGORIES, AllocatorPeaks, Category, MemorySample
from pipefit.torch_internals import (
    TorchDispatchMode,
    backward_id,
    backward_node,
    retains_graph,
    run_backward,
    storage_uses,
    without_dispatch_modes,
)
from pipefit.torch_internals.data_parallel import local_forms
from pipefit.units import format_bytes

# ---- Forwards that record a graph but save nothing, for runs that will be recomputed
#
# Some kernels (attention, recurrent layers, matrix products) differ in their last bits without a graph, so a
# forward that will run again records one, and drops all saved tensors. Numbers are the exception: for the
# backward of `x * 2.0` autograd keeps the 2.0 as long as the graph exists, which a meter counts.


@contextmanager
def saving_nothing() -> Iterator[None]:
    """Record a graph in the body that saves no tensors, so it cannot run backward."""
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_drop, _nothing):
        yield


def _drop(tensor: Tensor) -> None:
    """Save None instead of a tensor."""


def _nothing(_: None) -> NoReturn:
    raise AssertionError("a forward that saves nothing has no backward")


# ---- Backward formulas that change a new tensor in place, but not under a dispatch mode
#
# Torch asks in these formulas whether a mode is active (`areAnyTensorSubclassLike`, FunctionsManual.cpp), and
# then runs an operation out of place, which needs one more tensor. A meter is a mode, so it runs the
# operation in place, as training without a meter does. The new tensor is one of the last two that were
# allocated.

_aten = torch.ops.aten
_PICKS = frozenset({"Kthvalue", "Max", "Median", "Min", "Mode", "Nanmedian", "Sort", "Topk"})
_CROSS_ENTROPIES = frozenset({"BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"})
_IN_PLACE = {
    _aten.index_add.default: (_aten.index_add_.default, frozenset({"IndexSelect"})),
    _aten.index_fill.int_Tensor: (_aten.index_fill_.int_Tensor, frozenset({"Trace"})),
    _aten.index_put.default: (_aten.index_put_.default, frozenset({"Index"})),
    _aten.masked_scatter.default: (_aten.masked_scatter_.default, frozenset({"MaskedSelect"})),
    _aten.mul.Tensor: (_aten.mul_.Tensor, _CROSS_ENTROPIES),
    _aten.put.default: (_aten.put_.default, frozenset({"Take"})),
    _aten.scatter.src: (_aten.scatter_.src, _PICKS),
    _aten.scatter_add.default: (_aten.scatter_add_.default, frozenset({"Cummax", "Cummin", "Gather"})),
    _aten.sub.Tensor: (_aten.sub_.Tensor, _CROSS_ENTROPIES),
}  # by operation: its form in place, and the formulas by what they are the backward of

# The same holds where autograd sums the gradients of a value with several users (`can_accumulate_inplace`,
# input_buffer.cpp): it adds to the first gradient in place if nobody else holds that. A mode cannot see from
# a tensor's references whether Python code, such as a hook, keeps it. So the meter does it only for gradients
# that a node of torch's own made for the very value that they are gradients of. Others count one tensor more.

# Linear layers add the bias in place, too, to the product of an input that is not contiguous, and attention
# without a fused kernel adds its mask to the scores. Of the product that such a function of torch's adds to,
# Python has no reference. A meter adds on a view of it, because autograd expects another tensor.

_SUM, _ADD = _aten.add.Tensor, _aten.add_.Tensor
_PRODUCTS = frozenset({_aten.mm.default, _aten.bmm.default, _aten.mv.default, _aten.dot.default})
_DISPATCHING = "_caller", "_sums_in_place", "operation", "__torch_dispatch__"


Edge = tuple[int, int]  # a node, by its number or its parameter, and the number of its input
Uses = tuple[int, int]  # numbers of references to a tensor and to its storage


class _Held(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the references to the first operand of a sum, to its storage, and of Python code to it."""

    uses: Uses | None = None
    references: int | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _SUM:
            self.uses, self.references = _uses(args[0]), sys.getrefcount(args[0])
        return func(*args, **(kwargs or {}))


def _uses(tensor: Tensor) -> Uses:
    """Return the numbers of references to a tensor and to its storage."""
    return tensor._use_count(), storage_uses(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


@cache
def _uses_of_autograd() -> Uses | None:
    """Return the numbers of references that a mode sees to a gradient that only autograd holds."""
    with without_dispatch_modes(), torch.inference_mode(False), torch.enable_grad():
        value = torch.ones((), requires_grad=True) * 2
        total = value.sin() + value.cos()
        with _Held() as held:  # type: ignore[no-untyped-call]
            torch.autograd.backward(total)
        uses: Uses | None = held.uses
    return uses


@cache
def _references_of_torch() -> int | None:
    """Return the number of Python's references that a mode sees to a product that only torch holds."""
    with without_dispatch_modes(), torch.inference_mode(False), _Held() as held:  # type: ignore[no-untyped-call]
        torch.nn.functional.linear(torch.ones(2, 3, 2).mT, torch.ones(2, 3), torch.ones(2))
    references: int | None = held.references
    return references


def _caller() -> Any:
    """Return the code of the function that runs the present operation; None if a thread of autograd does."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name in _DISPATCHING:
        frame = frame.f_back
    return None if frame is None else frame.f_code


def _edges(node: Any) -> tuple[Edge, ...]:
    """Return the edges of a node of torch's own: the values whose gradients it makes."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return ()
    return tuple(
        (id(user.variable) if user.name().endswith("AccumulateGrad") else user._sequence_nr(), number)
        for user, number in node.next_functions
        if user is not None
    )


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor fill its memory, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


# ---- The meter

_POSITION = {category: number for number, category in enumerate(CATEGORIES)}
_LIFT = torch.ops.aten.lift_fresh.default  # a view by its schema; `torch.tensor(...)` calls it on its result
_DEVICE = (
    torch.ops.prim.device.default
)  # called on fake tensors, more often than all other operations together
_COLLECTIVES = "c10d"  # these return their arguments, which may be views
_TEMPORARY, _ACTIVATIONS = _POSITION[Category.TEMPORARY], _POSITION[Category.ACTIVATIONS]
_LENT, _WORKSPACE = _POSITION[Category.LENT], _POSITION[Category.WORKSPACE]
_PARAMETERS, _OF_VALUES = _POSITION[Category.PARAMETERS], (Category.BOUNDARY, Category.ACTIVATIONS)

# For the backward of `x * 2.0` autograd keeps the number, as a 0-dimensional tensor that no operation
# returns. The node of that backward holds it, until the node has run or dies with its graph. So does a
# meter's `Number`: it is in the node's metadata, and its bytes count as long as it exists.
_KEEP_SCALAR = frozenset(
    {
        torch.ops.aten.mul.Tensor,
        torch.ops.aten.div.Tensor,
        torch.ops.aten.mul_.Tensor,
        torch.ops.aten.div_.Tensor,
    }
)
_IN_PLACE_PRODUCTS = frozenset({torch.ops.aten.mul_.Tensor, torch.ops.aten.div_.Tensor})
SCALAR_BYTES = 8
_NUMBER = "pipefit's number"  # key in the metadata of a node


class Number:
    """A number that autograd keeps for a backward; the meter counts its bytes until nobody refers to it."""

    __slots__ = ("__weakref__", "execution", "meter", "value")

    def __init__(self, meter: Meter, value: float) -> None:
        self.meter, self.value = meter, value
        self.execution: Any = None  # of subclasses of the meter
        meter.count_number(self, 1)

    def __del__(self) -> None:
        self.meter.count_number(self, -1)


class OverCap(torch.OutOfMemoryError):
    """An allocation of `asked_bytes` exceeded the cap of a meter, which already counts it."""

    def __init__(self, sentence: str, asked_bytes: int) -> None:
        super().__init__(sentence)
        self.asked_bytes = asked_bytes


class Tracked(weakref.ref[torch.UntypedStorage]):
    """A live storage, with its key in the ledger, and what made it: an operation, and edges of its node."""

    __slots__ = ("category", "edges", "key", "maker", "nbytes")
    key: int
    nbytes: int
    category: int  # its position
    maker: Any
    edges: tuple[Edge, ...]  # of the node of a backward that made it

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of one device.

    Args:
        device: its number, for messages.
        cap_bytes: raise `torch.OutOfMemoryError` above this; None only counts.
        kernels: the workspaces of CPU kernels, which are added, and the layouts of their results, which fake
        results
            get; None for other targets.
        place: the device of the memory: tensors elsewhere, such as optimizer states on the host of a GPU, are
        not
            counted. None counts all.
    """

    def __init__(
        self,
        device: int,
        *,
        cap_bytes: int | None = None,
        kernels: Kernels | None = None,
        place: torch.device | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.cap_bytes, self.kernels = device, cap_bytes, kernels
        self.allocator: AllocatorPeaks | None = None
        self._place = None if place is None else place.type
        self.total = 0
        self.bytes = [0] * len(CATEGORIES)
        self.action = "setting up"
        self._live: dict[int, Tracked] = {}
        self._products: dict[
            weakref.ref[Tensor], Number
        ] = {}  # of the last operation, which have no node yet
        self._spent: list[Number] = []  # of the present node of a backward, which has used them
        self._born: list[Tracked] = []
        self._peak = 0
        self._peak_bytes = list(self.bytes)
        self._making: Any = None  # the operation that runs
        self._uses_of_autograd, self._references_of_torch = _uses_of_autograd(), _references_of_torch()
        self._node: int | None = None
        self._node_edges: tuple[Edge, ...] = ()

    # ---------------------------------------------------------------- called by the runtime

    def begin(self, action: str) -> None:
        """Begin `action`: the peak restarts at the present level."""
        self.action = action
        if self.kernels is not None:
            self.kernels.refresh()
        self._settle_numbers()
        self._born.clear()
        self._peak, self._peak_bytes = self.total, list(self.bytes)

    def end(self, step: int, seconds: float, category: Category = Category.TEMPORARY) -> MemorySample:
        """End the action, and return its peak.

        Memory that it allocated and did not free counts as `category` unless it is tagged already.
        """
        for tracked in self._born:
            if tracked.category == _TEMPORARY and tracked() is not None:
                self._move(tracked, _POSITION[category])
        self._born.clear()
        return MemorySample(
            step=step,
            action=self.action,
            seconds=seconds,
            bytes=tuple(self._peak_bytes),  # type: ignore[arg-type]
        )

    def tag(self, tensors: Iterable[Tensor | None], category: Category) -> None:
        """Count the storages of these tensors as `category` from now on, also previously uncounted ones.

        A parameter or buffer that a layer returns as a value stays a parameter.
        """
        for tensor in tensors:
            if tensor is not None and self._is_here(tensor):
                tracked = self._track(tensor)
                if tracked.category != _PARAMETERS or category not in _OF_VALUES:
                    self._move(tracked, _POSITION[category])

    def reserve(self, nbytes: int) -> None:
        """Count memory that the device lends to others as long as it lives."""
        self.bytes[_LENT] += nbytes
        self.total += nbytes
        if self.total > self._peak:
            self._reach(self.total, nbytes)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Update a storage to its present size."""
        tracked = self._live.get(storage._cdata)
        if tracked is not None and tracked.nbytes != storage.nbytes():
            self._resize(tracked, storage.nbytes())

    # ---------------------------------------------------------------- counting

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a meter is not compiled, and the check would cost time in every operation

    def __enter__(self) -> Any:
        self._sharded, self._forms = local_forms()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._sharded and any(issubclass(kind, self._sharded) for kind in types):
            return NotImplemented
        if func in self._forms:
            with self:  # it sees the operations of which this one consists
                return self._forms[func](*args, **(kwargs or {}))
        return args[0].device if func is _DEVICE else self.operation(func, args, kwargs or {})

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and count its allocations."""
        if self._spent or self._products:
            self._settle_numbers()
        before = self.total
        if func in _IN_PLACE and backward_id() >= 0 and not torch.is_grad_enabled():
            func = self._as_without_a_mode(func, args[0])
        elif func is _SUM and not kwargs and backward_id() >= 0 and not torch.is_grad_enabled():
            func = _ADD if self._sums_in_place(args[0]) else func
        elif (
            func is _SUM
            and not kwargs
            and sys.getrefcount(args[0]) == self._references_of_torch
            and self._is_new_product(args[0])
        ):
            func, args = _ADD, (_aten.alias.default(args[0]), args[1])
        self._making = func
        out = func(*args, **kwargs)
        known = None if self.kernels is None else self.kernels.of(func, args, kwargs, out)
        if known is not None:
            out = known.laid_out(out)
        kept = self._account(func, args, out)
        if known is not None:
            peak_bytes = known.peak_bytes(out) - kept
            self._take(before + peak_bytes, peak_bytes)
        return out

    def _as_without_a_mode(self, func: Any, changed: Tensor) -> Any:
        """Return the operation that autograd would run without a dispatch mode, for one that it runs now."""
        in_place, formulas = _IN_PLACE[func]
        node, newest = backward_node(), [tracked.key for tracked in self._born[-2:]]
        is_formula = node is not None and node.name().partition("Backward")[0] in formulas
        return in_place if is_formula and changed.untyped_storage()._cdata in newest else func

    def _sums_in_place(self, gradient: Tensor) -> bool:
        """Return whether autograd would add to this gradient in place without a dispatch mode."""
        tracked = self._live.get(gradient.untyped_storage()._cdata)
        if tracked is None or _caller() not in (None, run_backward.__code__):  # but a hook, for example
            return False
        edges = self._edges()
        repeated = {edge for edge in edges if edges.count(edge) > 1}
        common = repeated if tracked.edges is edges else set(edges).intersection(tracked.edges)
        return bool(common) and _is_dense(gradient) and _uses(gradient) == self._uses_of_autograd

    def _is_new_product(self, tensor: Tensor) -> bool:
        """Return whether the tensor is a matrix product, and the newest of all tensors."""
        newest = self._born[-1] if self._born else None
        return (
            newest is not None and newest.maker in _PRODUCTS and newest.key == tensor.untyped_storage()._cdata
        )

    def _edges(self) -> tuple[Edge, ...]:
        """Return the values whose gradients the present node of a backward makes; none for Python code."""
        node = backward_node() if backward_id() >= 0 else None
        number = None if node is None else node._sequence_nr()
        if number != self._node:
            self._node, self._node_edges = number, () if node is None else _edges(node)
        return self._node_edges

    def _keep_number(self, func: Any, tensor: Tensor, value: float, product: Tensor) -> int:
        """Count the tensor that autograd makes of the number in `tensor * value` and keeps for the backward.

        The operation has just run. If it was part of a backward, it used such a tensor, whose bytes are
        returned, because the kernel used this tensor instead of making one. The node frees it afterwards,
        unless its graph is retained. A graph of the backward itself shares it.
        """
        node: Any = backward_node() if backward_id() >= 0 else None
        number: Number | None = None if node is None else node.metadata.get(_NUMBER)
        if number is not None and number.value != value:
            number = None  # the product is not that of the node's formula
        is_used = number is not None
        if number is not None and not retains_graph():
            self._spent.append(node.metadata.pop(_NUMBER))
        if tensor.requires_grad and torch.is_grad_enabled():
            changed: Any = product._base if func in _IN_PLACE_PRODUCTS and product._is_view() else product
            self._products[weakref.ref(changed, self._forget_product)] = number or Number(self, value)
        return SCALAR_BYTES if is_used else 0

    def _forget_product(self, product: weakref.ref[Tensor]) -> None:
        self._products.pop(product, None)

    def _settle_numbers(self) -> None:
        """Free the numbers of the node that has run, and hand those of new products to their nodes."""
        self._spent.clear()
        for reference, number in list(self._products.items()):
            product = reference()
            node: Any = None if product is None else product.grad_fn
            if node is not None:
                node.metadata[_NUMBER] = number
        self._products.clear()

    def count_number(self, number: Number, change: int) -> None:
        """Count one number more or less."""
        self.bytes[_ACTIVATIONS] += SCALAR_BYTES * change
        self.total += SCALAR_BYTES * change
        if self.total > self._peak:
            self._reach(self.total, SCALAR_BYTES)

    def _account(self, func: Any, args: tuple[Any, ...], out: Any) -> int:
        """Count an operation's allocations; return the bytes of a number that autograd had kept for it."""
        kept = 0
        if func in _KEEP_SCALAR and isinstance(args[1], (int, float)) and self._keeps_numbers(args[0]):
            kept = self._keep_number(func, args[0], args[1], out)
        if not isinstance(out, Tensor):
            if not func.is_view and func.namespace != _COLLECTIVES:
                self._track_all(out)
        elif args and out is args[0] and func is not _LIFT:  # in place: not new, but maybe resized
            self.resized(out.untyped_storage())
        elif (not func.is_view or func is _LIFT) and self._is_here(out):
            self._track(out)
        return kept

    def _is_here(self, tensor: Tensor) -> bool:
        return self._place is None or tensor.device.type == self._place

    def _keeps_numbers(self, tensor: Tensor) -> bool:
        """Return whether the number that autograd keeps for a product with this tensor is on this device."""
        return tensor.device.type == "cpu" and self._is_here(tensor)

    def _track_all(self, items: Any) -> None:
        """Track every tensor in an operation's list of results."""
        if isinstance(items, (tuple, list)):
            for item in items:
                if isinstance(item, Tensor):
                    if self._is_here(item):
                        self._track(item)
                else:
                    self._track_all(item)

    def _take(self, level: int, asked: int) -> None:
        """Count a kernel's workspace, with which memory reached `level`."""
        if level > self._peak:
            self._reach(level, asked)

    def _track(self, tensor: Tensor) -> Tracked:
        storage = tensor.untyped_storage()
        key = storage._cdata
        tracked = self._live.get(key)
        if tracked is None:
            tracked = Tracked(storage, self._died)
            tracked.key, tracked.nbytes, tracked.category = key, storage.nbytes(), _TEMPORARY
            tracked.maker, tracked.edges = self._making, self._edges()
            self._live[key] = tracked
            self._born.append(tracked)
            self.bytes[_TEMPORARY] += tracked.nbytes
            self.total += tracked.nbytes
            if self.total > self._peak:
                self._reach(self.total, tracked.nbytes)
        return tracked

    def _resize(self, tracked: Tracked, nbytes: int) -> None:
        more = nbytes - tracked.nbytes
        self.bytes[tracked.category] += more
        self.total += more
        tracked.nbytes = nbytes
        if self.total > self._peak:
            self._reach(self.total, more)

    def _died(self, tracked: Tracked) -> None:
        del self._live[tracked.key]
        self.bytes[tracked.category] -= tracked.nbytes
        self.total -= tracked.nbytes

    def _move(self, tracked: Tracked, category: int) -> None:
        self.bytes[tracked.category] -= tracked.nbytes
        self.bytes[category] += tracked.nbytes
        tracked.category = category

    def _reach(self, level: int, asked: int) -> None:
        """Record a new highest level of the action, including `level - total` bytes of kernel workspace.

        The latest allocation, in bytes, is passed on to the error.

        Raises:
            OverCap: the level exceeds the cap.
        """
        self._peak, self._peak_bytes = level, list(self.bytes)
        self._peak_bytes[_WORKSPACE] += level - self.total
        if self.cap_bytes is not None and level > self.cap_bytes:
            raise OverCap(self._out_of_memory(level, self.cap_bytes), asked)

    def _out_of_memory(self, level: int, cap: int) -> str:
        held = sorted(zip(self._peak_bytes, CATEGORIES, strict=True), reverse=True)
        return (
            f"device {self.device} ran out of memory at {self.action}: it needed {format_bytes(level)}, "
            f"{format_bytes(level - cap)} over its {format_bytes(cap)}; held by "
            + ", ".join(f"{category.value} {format_bytes(nbytes)}" for nbytes, category in held if nbytes)
        )
