"""A meter of one pass of a layer, which also counts the work, and sees when a backward releases its inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from pipefit.layer_costs import Span
from pipefit.meter.cpu import Meter, Tracked
from pipefit.meter.kernels import Kernels
from pipefit.profiler.writes import given_storages, written_storages
from pipefit.texts import dtype_name
from pipefit.trace import CATEGORIES, Category
from pipefit.work import Alike, Work

_WORKSPACE = CATEGORIES.index(Category.WORKSPACE)

# These operations only allocate, or ask a fake tensor for its device; they move no bytes.
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

# These read as much of their first argument, a table, as they return
_READ_ROWS = frozenset(
    {
        torch.ops.aten.embedding.default,
        torch.ops.aten.index_select.default,
        torch.ops.aten.gather.default,
        torch.ops.aten.index.Tensor,
    }
)


class PassMeter(Meter):  # type: ignore[no-untyped-call]
    """Measures one pass of one layer: its peak and spans, above the level at its start, and its work."""

    def __init__(self, kernels: Kernels | None, place: torch.device | None = None) -> None:
        super().__init__(device=0, kernels=kernels, place=place)
        self._base = 0
        self._watched: dict[Tracked, int] = {}  # an input's storage -> its number
        self._released: list[tuple[int, int]] = []  # (input, bytes)
        self._spans: list[Span] = []
        self._operations: Counter[tuple[int, int, str]] = Counter()  # how many of so many FLOPs and bytes moved
        self.written: set[int] = set()  # the storages that operations of the pass changed in place
        self.watched: frozenset[int] = frozenset()  # storages of which is to be known whether operations read them
        self.read: set[int] = set()  # those of them that operations of any pass were given, but to make views of them

    def storages(self, tensors: Sequence[Tensor]) -> list[Tracked]:
        """The tensors' storages, without holding them."""
        return [self._track(tensor) for tensor in tensors]

    def counts(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage is among those that are counted."""
        return tensor.untyped_storage()._cdata in self._live

    def start(self, inputs: Sequence[Tracked] = ()) -> None:
        """Begin a pass, and watch when each of the `inputs` that still exist is released."""
        self.begin("pass")
        self._base = self.total
        self._watched = {tracked: number for number, tracked in enumerate(inputs) if tracked() is not None}
        self._released, self._spans = [], []
        self._operations.clear()
        self.written.clear()

    @property
    def peak_bytes(self) -> int:
        """The peak of the pass so far, above its start."""
        return self._peak - self._base

    @property
    def workspace_bytes(self) -> int:
        """The bytes of that peak that are the workspace of a kernel."""
        return self._peak_bytes[_WORKSPACE]

    @property
    def spans(self) -> tuple[Span, ...]:
        """The pass, divided where it released inputs. A span that is no higher than an earlier one is left out."""
        kept: list[Span] = []
        for span in (*self._spans, self._span()):
            if not kept or span.peak_bytes > max(s.peak_bytes for s in kept):
                kept.append(span)
        return tuple(kept)

    @property
    def work(self) -> Work:
        """The work of the pass so far."""
        return Work.of(Alike(number, *each) for each, number in self._operations.items())

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.watched and not func.is_view:
            self.read |= self.watched & given_storages(args, kwargs)
        out = super().operation(func, args, kwargs)
        self.written |= written_storages(func, args, kwargs)
        if not func.is_view and func not in _MOVE_NOTHING:
            count = flop_registry.get(func._overloadpacket)
            flops = 0 if count is None else count(*args, **kwargs, out_val=out)
            read = _nbytes(args[1:]) + _nbytes(out) if func in _READ_ROWS else _nbytes(args)
            self._operations[flops, read + _nbytes(out), _dtype(args) if flops else ""] += 1
        return out

    def _died(self, tracked: Tracked) -> None:
        number = self._watched.pop(tracked, None)
        if number is None:
            super()._died(tracked)
            return
        self._spans.append(self._span())
        self._released.append((number, tracked.nbytes))
        super()._died(tracked)
        self._peak, self._peak_bytes = self.total, list(self.bytes)

    def _span(self) -> Span:
        """The span since the last release, with the peak that it would have if all inputs had been kept."""
        gone = sum(nbytes for _, nbytes in self._released)
        return Span(
            peak_bytes=self._peak - self._base + gone,
            workspace_bytes=self.workspace_bytes,
            released=tuple(number for number, _ in self._released),
        )


def _dtype(args: tuple[Any, ...]) -> str:
    """The dtype of the first floating-point operand; empty where there is none."""
    return next((dtype_name(a.dtype) for a in args if isinstance(a, Tensor) and a.is_floating_point()), "")


def _nbytes(item: Any) -> int:
    if isinstance(item, Tensor):
        return item.numel() * item.element_size()
    if isinstance(item, (tuple, list)):
        return sum(map(_nbytes, item))
    return 0
