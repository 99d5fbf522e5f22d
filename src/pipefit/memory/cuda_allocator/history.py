"""Replay of a GPU's recorded history through the simulated allocator, compared block by block.

    torch.cuda.memory._record_memory_history()              # before the first tensor is on the GPU
    ...                                                     # train
    history = torch.cuda.memory._snapshot()["device_traces"][0]
    print(replay(history, AllocatorSettings.parse(os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))))

The simulated driver puts segments at the recorded addresses, so that every block must be at its recorded
address. When the real allocator released cached memory, the replay releases all cached memory, which may be
more under `max_split_size_mb`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from pipefit.errors import UsageError
from pipefit.memory.cuda_allocator.caching import CachingAllocator, Figures, SegmentPart
from pipefit.memory.cuda_allocator.settings import AllocatorSettings
from pipefit.units import format_bytes

_SHOWN = 10  # differences that are reported; later ones mostly follow from them
_ELSEWHERE = 1 << 60  # addresses of segments that the real allocator did not take
_DEFAULT = AllocatorSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The comparison of a history with its replay: allocations, peaks, and the first differences in words."""

    allocations: int
    peak: Figures
    recorded_reserved_bytes: int
    differences: tuple[str, ...]

    def __str__(self) -> str:
        """Return the compared figures, and the differences."""
        reserved = (
            f"{format_bytes(self.peak.reserved_bytes)} reserved, recorded "
            f"{format_bytes(self.recorded_reserved_bytes)}"
        )
        verdict = "every block is at its recorded address" if not self.differences else "differences:"
        return "\n".join([f"{self.allocations} allocations, {reserved}: {verdict}", *self.differences])


def replay(history: Iterable[Mapping[str, Any]], settings: AllocatorSettings = _DEFAULT) -> Replay:
    """Replay the recorded history of one device from its beginning.

    `history` is an entry of `torch.cuda.memory._snapshot()["device_traces"]`.

    Raises:
        UsageError: it begins in the middle: it frees a block whose allocation is not recorded.
    """
    return _Replayed(settings).of(history)


class _Replayed:
    """A replay in progress: the simulated allocator, and the recorded state at the same moment."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self._given: deque[int] = deque()  # addresses of segments that the real driver has just handed out
        self._allocator = CachingAllocator(settings, addresses=self._addresses())
        self._blocks: dict[int, SegmentPart] = {}  # by recorded address
        self._reserved = self._highest = self._count = 0
        self._emptied = False
        self._differences: list[str] = []

    def _addresses(self) -> Iterator[int]:
        for address in count(_ELSEWHERE, 1 << 48):
            yield self._given.popleft() if self._given else address

    def of(self, history: Iterable[Mapping[str, Any]]) -> Replay:
        """Replay the whole history, entry by entry."""
        for position, entry in enumerate(history):
            action = entry["action"]
            if action in ("segment_alloc", "segment_map"):
                self._take(entry["addr"], entry["size"])
            elif action in ("segment_free", "segment_unmap"):
                self._give_back(entry["size"])
            elif action == "alloc":
                self._allocate(position, entry["addr"], entry["size"], entry.get("stream", 0))
            elif action == "free_completed":
                self._free(position, entry["addr"])
        return Replay(
            allocations=self._count,
            peak=self._allocator.peak,
            recorded_reserved_bytes=self._highest,
            differences=tuple(self._differences[:_SHOWN]),
        )

    def _take(self, address: int, nbytes: int) -> None:
        self._given.append(address)
        self._reserved += nbytes
        self._highest = max(self._highest, self._reserved)

    def _give_back(self, nbytes: int) -> None:
        if not self._emptied:
            self._allocator.empty_cache()
        self._emptied = True
        self._reserved -= nbytes

    def _allocate(self, position: int, address: int, nbytes: int, stream: int) -> None:
        self._emptied = False
        self._count += 1
        block = self._blocks[address] = self._allocator.allocate(nbytes, stream)
        self._given.clear()
        if block.address != address:
            self._differ(position, nbytes, f"is at {block.address:#x}, recorded at {address:#x}")
        if self._allocator.reserved != self._reserved:
            result, recorded = format_bytes(self._allocator.reserved), format_bytes(self._reserved)
            self._differ(position, nbytes, f"leaves {result} reserved, recorded {recorded}")

    def _free(self, position: int, address: int) -> None:
        self._emptied = False
        if address not in self._blocks:
            raise UsageError(
                f"entry {position} frees {address:#x}, which the history does not allocate: record it from "
                "the beginning, before the first tensor is on the GPU, and with a large enough max_entries"
            )
        self._allocator.free(self._blocks.pop(address))

    def _differ(self, position: int, nbytes: int, how: str) -> None:
        self._differences.append(f"entry {position}: the block of {format_bytes(nbytes)} {how}")
