"""Peaks as sums of two numbers for each block, measured by training runs: mCAP's predictor. (mCAP, listing 1.1.)

    peak of blocks i to j - 1  =  mem_isolated[i] + mem_added[i + 1] + ... + mem_added[j - 1]

mCAP calls a layer what is a block here. Such a prediction ignores a stage's place in the schedule. So it suits GPipe,
where all stages hold the same number of microbatches. It is best under recomputation, where a peak is that of the
largest block plus all parameters. A number may be negative, because a block may lower the peak of those before it.
`pipefit.profiler` measures the numbers; the planners `additive`, `mcap_bf` and `mcap_bo` use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from pipefit.errors import UsageError
from pipefit.texts import counted
from pipefit.training import Training


@dataclass(frozen=True, kw_only=True)
class AdditiveCosts:
    """Two numbers of bytes for every block: its peak alone on a device, and what it adds to the blocks before it.

    They are valid only for the `training` and the `recompute` setting under which they were measured.

    Raises:
        UsageError: the two do not have the same number of blocks, or none.
    """

    __pydantic_config__ = {"extra": "forbid"}

    mem_isolated: tuple[int, ...]
    mem_added: tuple[int, ...]
    training: Training
    recompute: str = "never"

    def __post_init__(self) -> None:
        if len(self.mem_isolated) != len(self.mem_added) or not self.mem_isolated:
            raise UsageError(
                "additive costs are two numbers for every block, not "
                f"{len(self.mem_isolated)} alone and {len(self.mem_added)} added"
            )

    def differences(self, training: Training, recompute: str) -> list[str]:
        """How the settings of these runs differ from `training` and `recompute`, as phrases."""
        found = self.training.differences(training)
        if self.recompute != recompute:
            found.append(f"recompute {self.recompute}, not recompute {recompute}")
        return found

    @cached_property
    def _sums(self) -> tuple[int, ...]:
        return (0, *accumulate(self.mem_added))

    def peak(self, start: int, stop: int) -> int:
        """The estimated peak of blocks `start` to `stop - 1` on one device, in bytes.

        Raises:
            UsageError: no such blocks.
        """
        if not 0 <= start < stop <= len(self.mem_isolated):
            raise UsageError(f"blocks {start} to {stop - 1} are no stage of {counted(len(self.mem_isolated), 'block')}")
        return self.mem_isolated[start] + self._sums[stop] - self._sums[start + 1]

    def __call__(self, stage: int, start: int, stop: int) -> int:
        """The estimated peak, whatever the stage's place."""
        return self.peak(start, stop)
