"""The meter of a CUDA device, which reads the figures of torch's caching allocator.

`requested` bytes, those of tensors, are what pipefit predicts. What the allocator has `allocated` for them, rounded,
and `reserved`, and what the process takes in total with context, libraries and communicators, are other numbers;
`memory_figures` gives all of them. cuBLAS's workspaces come from the allocator, and are requested bytes of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor

from pipefit.trace import CATEGORIES, Category, MemorySample


class CudaMeter:
    """Peaks of every action: requested bytes, as the allocator counts them. Costs microseconds an action, nothing an
    operation: its figures are read as they are, without the flat copy that `torch.cuda.memory_stats` makes.

    The allocator does not know what bytes are for: parameters and optimizer state are counted when they are tagged, and
    everything else is activations.

    With `cap_bytes` torch's allocator reserves no more for this process from then on, and raises an exception where it
    would have to, so that a plan for a smaller GPU fails where it would fail there. Without, the limit that the process
    has stays.
    """

    def __init__(self, device: torch.device, *, cap_bytes: int | None = None) -> None:
        self.device = device
        if cap_bytes is not None:
            _, total = torch.cuda.mem_get_info(device)
            torch.cuda.set_per_process_memory_fraction(min(max(cap_bytes, 0) / total, 1.0), device)
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
        rest = _peak(self.device, "requested_bytes") - sum(known.values())
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
    """Numbers of a CUDA device that are never mixed: peaks of requested, allocated and reserved bytes, and what all of
    its processes take now.
    """
    free, total = torch.cuda.mem_get_info(device)
    peaks = {name: _peak(device, f"{name}_bytes") for name in ("requested", "allocated", "reserved")}
    return {**peaks, "process_total": total - free}


def _peak(device: torch.device, what: str) -> int:
    """The peak of one of the allocator's figures, over both of its pools."""
    return int(torch.cuda.memory_stats_as_nested_dict(device)[what]["all"]["peak"])
