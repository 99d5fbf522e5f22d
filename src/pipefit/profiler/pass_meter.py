"""A meter of one pass of a layer that also counts the work and detects when a backward releases its
inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import conv_flop_count

from pipefit.measure import Kernels, Meter, Tracked, counted_flops, in_layout, layouts_of
from pipefit.profiler.feedback import given_storages, written_storages
from pipefit.schema.layer_costs import Alike, Family, Layout, Span, Work
from pipefit.schema.trace import CATEGORIES, Category
from pipefit.texts import dtype_name

# ---- Layouts of gradients: each in its own storage, several in one, or expanded
#
# A layer's backward may copy a gradient that is not dense before it computes with it. So layers are measured
# with gradients in the layouts in which the next layer, or the loss, passes them on.


Layouts = tuple[Layout | None, ...]  # None for a value without a gradient


def dense(values: Sequence[Tensor]) -> Layouts:
    """Return the layouts of dense gradients, as a stage receives them: separate, in the order of the
    values.
    """
    return layouts_of(gradients_like(values), ())


def dense_alike(layouts: Layouts, dense_ones: Layouts) -> Layouts:
    """Return the `dense_ones` of values with a gradient in `layouts`: what a stage that ends here
    receives.
    """
    left = [one if layout is not None else None for layout, one in zip(layouts, dense_ones, strict=True)]
    numbers = {one.storage: number for number, one in enumerate(filter(None, left))}
    return tuple(None if one is None else replace(one, storage=numbers[one.storage]) for one in left)


def gradients_like(values: Sequence[Tensor]) -> list[Tensor | None]:
    """Return a dense gradient for every value that requires one."""
    return [torch.empty_like(value, requires_grad=False) if value.requires_grad else None for value in values]


def gradients_in(layouts: Layouts, device: torch.device) -> list[Tensor | None]:
    """Return gradients with these layouts."""
    storages: dict[int, Tensor] = {}
    return [None if layout is None else in_layout(layout, storages, device) for layout in layouts]


# ---- The meter of a pass

_WORKSPACE = CATEGORIES.index(Category.WORKSPACE)

# These operations only allocate, or query a fake tensor's device; they move no bytes.
_MOVE_NOTHING = frozenset(
    {
        torch.ops.prim.device.default,
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)

# These read only the returned rows of their first argument, a table
_READ_ROWS = frozenset(
    {
        torch.ops.aten.embedding.default,
        torch.ops.aten.index_select.default,
        torch.ops.aten.gather.default,
        torch.ops.aten.index.Tensor,
    }
)


class PassMeter(Meter):  # type: ignore[no-untyped-call]
    """Measures one pass of one layer: peak and spans, above the level at its start, and work."""

    def __init__(self, kernels: Kernels | None, place: torch.device | None = None) -> None:
        super().__init__(device=0, kernels=kernels, place=place)
        self._base = 0
        self._watched: dict[Tracked, int] = {}  # an input's storage -> its number
        self._released: list[tuple[int, int]] = []  # (input, bytes)
        self._gradients: set[Tracked] = set()  # of the outputs, as long as they exist
        self._outputs: set[Tracked] = set()  # as long as they exist
        self._used_bytes = self._returned_bytes = 0  # of those that do not exist any more
        self._spans: list[Span] = []
        # (FLOPs, bytes moved, dtype, family, matrix product) -> operations
        self._operations: Counter[tuple[int, int, str, Family, tuple[int, ...]]] = Counter()
        self.written: set[int] = set()  # storages that operations of the pass changed in place
        self.watched: frozenset[int] = frozenset()  # storages whose reads are recorded
        self.read: set[int] = set()  # watched storages that any pass read, except for views

    def storages(self, tensors: Sequence[Tensor]) -> list[Tracked]:
        """Return the tensors' storages, without keeping them alive."""
        return [self._track(tensor) for tensor in tensors]

    def counts(self, tensor: Tensor) -> bool:
        """Return whether the tensor's storage is counted."""
        return tensor.untyped_storage()._cdata in self._live

    def start(
        self,
        inputs: Sequence[Tracked] = (),
        gradients: Iterable[Tracked] = (),
        outputs: Iterable[Tracked] = (),
    ) -> None:
        """Begin a pass, and watch for the release of each of the `inputs` that still exists.

        A backward also releases its `outputs` if it has saved them, and their `gradients`.
        """
        self.begin("pass")
        self._base = self.total
        self._watched = {tracked: number for number, tracked in enumerate(inputs) if tracked() is not None}
        self._released, self._spans, self._used_bytes, self._returned_bytes = [], [], 0, 0
        self._gradients, self._outputs = set(gradients), set(outputs)
        self._operations.clear()
        self.written.clear()

    @property
    def peak_bytes(self) -> int:
        """Peak of the pass so far, above its start."""
        return self._peak - self._base

    @property
    def workspace_bytes(self) -> int:
        """Bytes of kernel workspace in that peak."""
        return self._peak_bytes[_WORKSPACE]

    @property
    def spans(self) -> tuple[Span, ...]:
        """Spans of the pass, divided at releases of inputs, except spans below an earlier peak."""
        plain = (replace(span, used_bytes=0, returned_bytes=0) for span in self._all_spans())
        return _rising(plain, attrgetter("released"))

    @property
    def engine_spans(self) -> tuple[Span, ...]:
        """The spans by released gradients and outputs, too; empty if that makes no difference."""
        released = attrgetter("released", "used_bytes", "returned_bytes")
        result = _rising(self._all_spans(), released)
        return () if result == self.spans else result

    def _all_spans(self) -> list[Span]:
        return [*self._spans, self._span()]

    @property
    def work(self) -> Work:
        """Work of the pass so far."""
        return Work.of(Alike(number, *each) for each, number in self._operations.items())

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.watched and not func.is_view:
            self.read |= self.watched & given_storages(args, kwargs)
        out = super().operation(func, args, kwargs)
        self.written |= written_storages(func, args, kwargs)
        if not func.is_view and func not in _MOVE_NOTHING:
            flops, family, converted = _products(func, args, kwargs, out)
            read = _nbytes(args[1:]) + _nbytes(out) if func in _READ_ROWS else _nbytes(args)
            dtype = _dtype(args)
            self._operations[flops, read + _nbytes(out), dtype, family, _matrices(func, args, out)] += 1
            if converted:
                self._operations[0, converted, dtype, "layout", ()] += 1
        return out

    def _died(self, tracked: Tracked) -> None:
        number = self._watched.pop(tracked, None)
        if number is None and tracked not in self._gradients | self._outputs:
            super()._died(tracked)
            return
        self._spans.append(self._span())
        if number is not None:
            self._released.append((number, tracked.nbytes))
        elif tracked in self._gradients:
            self._used_bytes += tracked.nbytes
        else:
            self._returned_bytes += tracked.nbytes
        self._gradients.discard(tracked)
        self._outputs.discard(tracked)
        super()._died(tracked)
        self._peak, self._peak_bytes = self.total, list(self.bytes)

    def _span(self) -> Span:
        """Return the span since the last release, with its peak as if all inputs had been kept."""
        gone = sum(nbytes for _, nbytes in self._released)
        return Span(
            peak_bytes=self._peak - self._base + gone,
            workspace_bytes=self.workspace_bytes,
            released=tuple(number for number, _ in self._released),
            used_bytes=self._used_bytes,
            returned_bytes=self._returned_bytes,
        )


def _rising(spans: Iterable[Span], released: Callable[[Span], Any]) -> tuple[Span, ...]:
    """Return the spans that peak above all earlier ones; of several with the same `released` the highest."""
    result: list[Span] = []
    for span in spans:
        if not result or span.kept_bytes > max(earlier.kept_bytes for earlier in result):
            if result and released(result[-1]) == released(span):
                result.pop()
            result.append(span)
    return tuple(result)


# ---- Floating-point operations, by torch's formulas with two corrections
#
# torch counts the weight gradient of a grouped convolution as if it had one group, and causal attention as if
# every token attended to all others. A convolution's backward has as many products as its forward for each
# gradient; causal kernels skip the blocks above the diagonal, about half of all.
#
# cuDNN's tensor-core kernels take channels last. It converts other activations before a convolution, and the
# result after it (NVIDIA, Convolutional Layers User's Guide). Dense kernels of 3 x 3 and stride 1 have
# Winograd's transform (Lavin and Gray, 2016). Depthwise kernels of torch and cuDNN take images as they are
# (ATen's `use_cudnn_depthwise`).

_CONVOLUTION, _CONVOLUTION_BACKWARD = torch.ops.aten.convolution, torch.ops.aten.convolution_backward


def _products(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> tuple[int, Family, int]:
    """Return an operation's FLOPs, its family, and the bytes that a conversion of its layout moves."""
    packet = func._overloadpacket
    if packet is _CONVOLUTION:
        return _convolution(args[0], args[1], out, args[3:], passes=1)
    if packet is _CONVOLUTION_BACKWARD:
        gradient, inputs, weight, _, *settings, wanted = args
        return _convolution(inputs, weight, gradient, settings, passes=sum(wanted[:2]))
    flops = counted_flops(func, args, kwargs, out)
    if not flops or "attention" not in func.name():
        return flops, "", 0
    names = [argument.name for argument in func._schema.arguments]
    causal = {**dict(zip(names, args, strict=False)), **kwargs}.get("is_causal")
    return flops // 2 if causal else flops, "attention", 0


_FACTORS = {  # where a matrix product has its factors
    torch.ops.aten.mm: slice(0, 2),
    torch.ops.aten.bmm: slice(0, 2),
    torch.ops.aten.addmm: slice(1, 3),
    torch.ops.aten.baddbmm: slice(1, 3),
}


def _matrices(func: Any, args: tuple[Any, ...], out: Any) -> tuple[int, ...]:
    """Return the matrices, rows, columns and terms of a matrix product (`Alike.product`).

    A convolution of one group is a product of patches and kernels; those of its backward count as if they had
    the same size.
    """
    packet = func._overloadpacket
    if packet in (_CONVOLUTION, _CONVOLUTION_BACKWARD):
        backward = packet is _CONVOLUTION_BACKWARD
        result, weight, groups = (args[0], args[2], args[-2]) if backward else (out, args[1], args[-1])
        transposed = args[7] if backward else args[6]
        if groups != 1 or transposed or not result.numel() or not weight.numel():
            return ()
        return 1, result.numel() // result.shape[1], weight.shape[0], weight[0].numel()
    place = _FACTORS.get(packet)
    if place is None:
        return ()
    left, right = args[place]
    size = (left.shape[0] if left.dim() == 3 else 1, left.shape[-2], right.shape[-1], left.shape[-1])
    return size if min(size) else ()


def _convolution(
    inputs: Tensor, weight: Tensor, result: Tensor, settings: Sequence[Any], *, passes: int
) -> tuple[int, Family, int]:
    """Return the same for `passes` products as large as a convolution's forward."""
    stride, _, dilation, transposed, _, groups = settings
    flops = passes * conv_flop_count([*inputs.shape], [*weight.shape], [*result.shape], transposed=transposed)
    if inputs.device.type == "cpu":
        return flops, "convolution", 0
    if 1 < groups == inputs.shape[1] and not transposed:
        return flops, "depthwise", 0
    dense = tuple(weight.shape[2:]) == (3, 3) and groups == max(*stride, *dilation) == 1
    last = inputs.dim() == 4 and inputs.is_contiguous(memory_format=torch.channels_last)
    moved = 0 if last else 2 * passes * (_nbytes(inputs) + _nbytes(result))  # read and written once more
    return flops, "winograd" if dense else "convolution", moved


def _dtype(args: Iterable[Any]) -> str:
    """Return the dtype of the first floating-point tensor, in lists too; empty if there is none."""
    for each in args:
        if isinstance(each, Tensor) and each.is_floating_point():
            return dtype_name(each.dtype)
        if isinstance(each, (tuple, list)) and (found := _dtype(each)):
            return found
    return ""


def _nbytes(item: Any) -> int:
    if isinstance(item, Tensor):
        return item.numel() * item.element_size()
    if isinstance(item, (tuple, list)):
        return sum(map(_nbytes, item))
    return 0
