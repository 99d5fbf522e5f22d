"""The meter: every byte a device holds, by category, counted as tensors are born and die; and the cap it enforces.

A `Meter` is a dispatch mode. It sees every tensor operation of the device's worker, real or fake, and follows the life
of each storage that one of them makes by a weak reference. Views and in-place operations make none: a tensor that
belongs to somebody else is not counted because it was looked at. What a CPU kernel allocates and frees within one
operation is invisible from outside; it is added from `pipefit.meter.kernels`, as workspace. When the sum passes the
cap, the meter raises `torch.OutOfMemoryError`, as CUDA does: that is what makes an emulated device.

Costs about ten microseconds an operation. Real GPUs are not metered this way; they have their allocator's own figures.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipefit.meter.kernels import Kernels
from pipefit.trace import CATEGORIES, Category, MemorySample
from pipefit.units import format_bytes

_POSITION = {category: number for number, category in enumerate(CATEGORIES)}
_LIFT = torch.ops.aten.lift_fresh.default  # a view by its schema, and how `torch.tensor(...)` announces what it made
_TEMPORARY, _ACTIVATIONS = _POSITION[Category.TEMPORARY], _POSITION[Category.ACTIVATIONS]
_WORKSPACE = _POSITION[Category.WORKSPACE]

# For the backward of `x * 2.0` autograd keeps the number, as a tensor of no dimensions that no operation returns.
_KEEP_SCALAR = frozenset(
    {torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor, torch.ops.aten.mul_.Tensor, torch.ops.aten.div_.Tensor}
)
_SCALAR_BYTES = 8


class Tracked(weakref.ref[torch.UntypedStorage]):
    """A living storage: where it is in the ledger, its bytes, and the position of its category."""

    __slots__ = ("category", "key", "nbytes")
    key: int
    nbytes: int
    category: int

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of one device.

    Args:
        device: its number, for messages.
        cap_bytes: raise `torch.OutOfMemoryError` above this; None only counts.
        kernels: the CPU's, whose memory is to be added and whose results fake ones follow; None for other targets.
    """

    def __init__(self, device: int, *, cap_bytes: int | None = None, kernels: Kernels | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.cap_bytes, self.kernels = device, cap_bytes, kernels
        self.total = 0
        self.bytes = [0] * len(CATEGORIES)
        self.action = "setting up"
        self._live: dict[int, Tracked] = {}
        self._scalars = Counter[tuple[torch.Size, float]]()
        self._spent = 0
        self._born: list[Tracked] = []
        self._peak = 0
        self._peak_bytes = list(self.bytes)

    # ---------------------------------------------------------------- what a reader tells the meter

    def begin(self, action: str) -> None:
        """`action` begins; its peak starts at the present level."""
        self.action = action
        if self.kernels is not None:
            self.kernels.refresh()
        self._release_scalars()
        self._born.clear()
        self._peak, self._peak_bytes = self.total, list(self.bytes)

    def end(self, step: int, seconds: float, category: Category = Category.TEMPORARY) -> MemorySample:
        """The action is over: what it made and left, and nobody tagged, is `category`. Answers with its peak."""
        for tracked in self._born:
            if tracked.category == _TEMPORARY and tracked() is not None:
                self._move(tracked, _POSITION[category])
        self._born.clear()
        return MemorySample(step=step, action=self.action, seconds=seconds, bytes=tuple(self._peak_bytes))  # type: ignore[arg-type]

    def tag(self, tensors: Iterable[Tensor | None], category: Category) -> None:
        """These tensors' storages are `category` from now on; ones never seen are counted from now on."""
        for tensor in tensors:
            if tensor is not None:
                tracked = self._track(tensor)
                self._move(tracked, _POSITION[category])

    # ---------------------------------------------------------------- what the meter sees

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._spent:
            self._release_scalars()
        before = self.total
        out = func(*args, **(kwargs or {}))
        known = None if self.kernels is None else self.kernels.of(func, args, kwargs or {}, out)
        if known is not None:
            out = known.laid_out(out)
        kept = self._account(func, args, out)
        if known is not None and before + known.peak_bytes - kept > self._peak:
            self._reach(before + known.peak_bytes - kept)
        return out

    def _scalar(self, tensor: Tensor, value: float) -> int:
        """`tensor * value` has run: in a forward that is recorded autograd will keep the value, in a backward it has just
        used one. Then the answer is its bytes: the kernel did not have to make a tensor of it again.
        """
        key = tensor.shape, value
        if tensor.requires_grad and torch.is_grad_enabled():
            self._scalars[key] += 1
            self._hold_scalars(1)
        elif self._scalars[key] and torch._C._current_graph_task_id() >= 0:
            self._scalars[key] -= 1
            self._spent += 1  # its node is released when it is done, before the next operation
            return _SCALAR_BYTES
        return 0

    def _release_scalars(self) -> None:
        self._hold_scalars(-self._spent)
        self._spent = 0

    def _hold_scalars(self, number: int) -> None:
        self.bytes[_ACTIVATIONS] += _SCALAR_BYTES * number
        self.total += _SCALAR_BYTES * number
        if self.total > self._peak:
            self._reach(self.total)

    def forget_graphs(self) -> None:
        """The graphs recorded so far are gone without a backward: so are the numbers they kept."""
        self._hold_scalars(-self._spent - self._scalars.total())
        self._spent = 0
        self._scalars.clear()

    def _account(self, func: Any, args: tuple[Any, ...], out: Any) -> int:
        """Count what an operation made. The answer: bytes of a number among its arguments that existed as a tensor."""
        kept = 0
        if func in _KEEP_SCALAR and isinstance(args[1], (int, float)):
            kept = self._scalar(args[0], args[1])
        if not isinstance(out, Tensor):
            if not func.is_view:
                self._track_all(out)
        elif args and out is args[0] and func is not _LIFT:  # in place: at most a storage of ours was resized
            self._check_size(out)
        elif not func.is_view or func is _LIFT:
            self._track(out)
        return kept

    def _track_all(self, items: Any) -> None:
        """Track every tensor in an operation's list of results."""
        if isinstance(items, (tuple, list)):
            for item in items:
                if isinstance(item, Tensor):
                    self._track(item)
                else:
                    self._track_all(item)

    def _check_size(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        tracked = self._live.get(storage._cdata)
        if tracked is not None and tracked.nbytes != storage.nbytes():
            self._resize(tracked, storage.nbytes())

    def _track(self, tensor: Tensor) -> Tracked:
        storage = tensor.untyped_storage()
        key = storage._cdata
        tracked = self._live.get(key)
        if tracked is None:
            tracked = Tracked(storage, self._died)
            tracked.key, tracked.nbytes, tracked.category = key, storage.nbytes(), _TEMPORARY
            self._live[key] = tracked
            self._born.append(tracked)
            self.bytes[_TEMPORARY] += tracked.nbytes
            self.total += tracked.nbytes
            if self.total > self._peak:
                self._reach(self.total)
        return tracked

    def _resize(self, tracked: Tracked, nbytes: int) -> None:
        self.bytes[tracked.category] += nbytes - tracked.nbytes
        self.total += nbytes - tracked.nbytes
        tracked.nbytes = nbytes
        if self.total > self._peak:
            self._reach(self.total)

    def _died(self, tracked: Tracked) -> None:
        del self._live[tracked.key]
        self.bytes[tracked.category] -= tracked.nbytes
        self.total -= tracked.nbytes

    def _move(self, tracked: Tracked, category: int) -> None:
        self.bytes[tracked.category] -= tracked.nbytes
        self.bytes[category] += tracked.nbytes
        tracked.category = category

    def _reach(self, level: int) -> None:
        """A new highest level within the action, of which `level - total` is inside a kernel."""
        self._peak, self._peak_bytes = level, list(self.bytes)
        self._peak_bytes[_WORKSPACE] += level - self.total
        if self.cap_bytes is not None and level > self.cap_bytes:
            raise torch.OutOfMemoryError(self._out_of_memory(level, self.cap_bytes))

    def _out_of_memory(self, level: int, cap: int) -> str:
        held = sorted(zip(self._peak_bytes, CATEGORIES, strict=True), reverse=True)
        return (
            f"device {self.device} ran out of memory at {self.action}: it needed {format_bytes(level)}, "
            f"{format_bytes(level - cap)} over its {format_bytes(cap)}; held by "
            + ", ".join(f"{category.value} {format_bytes(nbytes)}" for nbytes, category in held if nbytes)
        )
