"""The meter of a CUDA device, which reads the figures of torch's caching allocator.

`allocated` bytes are what pipefit predicts. What the allocator has `reserved`, and what the process takes in total with
context, libraries and communicators, are other numbers; `memory_figures` gives all three.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor

from pipefit.trace import CATEGORIES, Category, MemorySample


class CudaMeter:
    """Peaks of every action from `torch.cuda.max_memory_allocated`. Costs a few microseconds an action, nothing an
    operation.

    The allocator does not know what bytes are for: parameters and optimizer state are counted when they are tagged, and
    everything else is activations.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.action = ""
        self._tagged: dict[Category, dict[int, int]] = {Category.PARAMETERS: {}, Category.OPTIMIZER: {}}

    def __enter__(self) -> CudaMeter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def begin(self, action: str) -> None:
        """`action` begins: the peak restarts at the present level."""
        self.action = action
        torch.cuda.reset_peak_memory_stats(self.device)

    def end(self, step: int, seconds: float, category: Category = Category.TEMPORARY) -> MemorySample:
        """The action's peak."""
        known = {category: sum(storages.values()) for category, storages in self._tagged.items()}
        rest = torch.cuda.max_memory_allocated(self.device) - sum(known.values())
        counted = tuple(known.get(c, rest if c is Category.ACTIVATIONS else 0) for c in CATEGORIES)
        return MemorySample(step=step, action=self.action, seconds=seconds, bytes=counted)  # type: ignore[arg-type]

    def tag(self, tensors: Iterable[Tensor | None], category: Category) -> None:
        """Remember the bytes of tensors that live as long as the stage."""
        if category in self._tagged:
            for tensor in tensors:
                if tensor is not None and tensor.is_cuda:
                    storage = tensor.untyped_storage()
                    self._tagged[category][storage.data_ptr()] = storage.nbytes()

    def reserve(self, nbytes: int) -> None:
        """Remember the bytes that the device lends."""
        self._tagged[Category.LENT] = {0: nbytes}

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Nothing to do: the allocator has counted it."""

    def drop_graph(self) -> None:
        pass

    def forget_graphs(self) -> None:
        """Nothing to do: the allocator has counted what was freed."""


def memory_figures(device: torch.device) -> dict[str, int]:
    """The three numbers of a CUDA device, never to be mixed: peak allocated, peak reserved, process total now."""
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
        "process_total": total - free,
    }
