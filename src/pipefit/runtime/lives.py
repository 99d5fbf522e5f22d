"""Lives of storages: in which order a device allocates and frees its memory, which decides what a GPU reserves.

A `LivesMeter` takes note of every storage that is born or dies, action by action. cuBLAS's workspaces are births too:
torch takes one from the caching allocator for each thread that multiplies matrices, at its first product, and keeps it
(`getCurrentCUDABlasHandle` in aten/src/ATen/cuda/CublasHandlePool.cpp). One thread runs forwards and updates, and
autograd has another one for backwards.

Costs about a microsecond for each birth and death.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipefit.capture.storages import storage_key
from pipefit.meter.cpu import Tracked
from pipefit.meter.kernels import Kernels
from pipefit.runtime.repeated_meter import RepeatedMeter

Life = tuple[int, int]  # a storage and its bytes as it is born, and 0 as it dies
Lives = tuple[Life, ...]

FORWARD_WORKSPACE, BACKWARD_WORKSPACE = -1, -2  # storages that are never freed
_aten = torch.ops.aten
_PRODUCTS = frozenset(
    getattr(operation, overload)
    for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot")
    for operation in (getattr(_aten, name),)
    for overload in operation.overloads()
)


class LivesMeter(RepeatedMeter):  # type: ignore[no-untyped-call]
    """A meter that also tells the lives of storages.

    Args:
        place: where the device's tensors are.
        workspace_bytes: of one workspace of cuBLAS.
    """

    def __init__(
        self,
        device: int,
        *,
        kernels: Kernels | None,
        swept: Mapping[str, frozenset[int]],
        place: torch.device,
        workspace_bytes: int,
    ) -> None:
        super().__init__(device, kernels=kernels, swept=swept, place=place)
        self._workspace_bytes = workspace_bytes
        self._workspaces: set[int] = set()
        self._names: dict[int, int] = {}  # of living storages, by their keys, which others have after them
        self._named = 0
        self._lives: list[list[Life]] = [[]]  # of every action since they were taken last, and before the first of them

    def take(self) -> tuple[Lives, list[Lives]]:
        """The lives before the next action, and those of every action since the last call. Call it after `changes`."""
        before, *actions, between = map(tuple, self._lives)
        self._lives = [list(between)]
        return before, actions

    # ---------------------------------------------------------------- what a meter does

    def begin(self, action: str) -> None:
        super().begin(action)
        self._lives.append([])

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = super().operation(func, args, kwargs)
        if func in _PRODUCTS and self._workspace_bytes:
            self._compute_in_workspace()
        return out

    def _compute_in_workspace(self) -> None:
        backward = torch._C._current_graph_task_id() >= 0
        name = BACKWARD_WORKSPACE if backward else FORWARD_WORKSPACE
        if name not in self._workspaces:
            self._workspaces.add(name)
            self._grow_workspace(name)

    def _grow_workspace(self, name: int) -> None:
        self._lives[-1].append((name, self._workspace_bytes))

    def _track(self, tensor: Tensor) -> Tracked:
        known = storage_key(tensor) in self._live
        tracked = super()._track(tensor)
        if not known:
            self._birth(tracked.key, tracked.nbytes)
        return tracked

    def _resize(self, tracked: Tracked, nbytes: int) -> None:
        """A resized storage has new memory before its old one is freed."""
        super()._resize(tracked, nbytes)
        old = self._names.pop(tracked.key, None)
        self._birth(tracked.key, nbytes)
        self._death(old)

    def _died(self, tracked: Tracked) -> None:
        super()._died(tracked)
        self._death(self._names.pop(tracked.key, None))

    def _birth(self, key: int, nbytes: int) -> None:
        if nbytes:  # an empty tensor takes no memory
            self._names[key] = self._named
            self._lives[-1].append((self._named, nbytes))
            self._named += 1

    def _death(self, name: int | None) -> None:
        if name is not None:
            self._lives[-1].append((name, 0))
