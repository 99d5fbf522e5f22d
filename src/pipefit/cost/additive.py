"""The additive predictor: a stage's peak is that of its first layer alone, and what each further layer adds.

    peak of layers i to j - 1  =  mem_isolated[i] + mem_added[i + 1] + ... + mem_added[j - 1]

Blind to the stage's place in the schedule: the numbers are measured where they are measured, so it suits GPipe, where
all stages hold the same number of microbatches. It holds best under recomputation, where a peak follows the one
hungriest layer and all weights. One subtraction for a prediction. (mCAP, listing 1.1.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from pipefit.errors import UsageError


class Predictor(Protocol):
    """Says how many bytes a stage will need."""

    def __call__(self, stage: int, start: int, stop: int) -> int:
        """Peak bytes of layers `start` to `stop - 1` as stage number `stage`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdditiveCosts:
    """Bytes of every layer, measured: alone on a device, and added to the layers before it. A `Predictor`.

    Differences of peaks may be negative: a layer may lower the peak of those before it.

    Raises:
        UsageError: the two do not have the same number of layers, or none.
    """

    mem_isolated: tuple[int, ...]
    mem_added: tuple[int, ...]
    _sums: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.mem_isolated) != len(self.mem_added) or not self.mem_isolated:
            raise UsageError(
                "additive costs are two numbers for every layer, not "
                f"{len(self.mem_isolated)} alone and {len(self.mem_added)} added"
            )
        object.__setattr__(self, "_sums", (0, *accumulate(self.mem_added)))

    def peak(self, start: int, stop: int) -> int:
        """Bytes of layers `start` to `stop - 1` on one device."""
        if not 0 <= start < stop <= len(self.mem_isolated):
            raise UsageError(f"layers {start} to {stop - 1} are no stage of {len(self.mem_isolated)} layers")
        return self.mem_isolated[start] + self._sums[stop] - self._sums[start + 1]

    def __call__(self, stage: int, start: int, stop: int) -> int:
        return self.peak(start, stop)
