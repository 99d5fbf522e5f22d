"""The work of one pass of a layer: its operations by size, their sums, and seconds where they were measured.

Times of passes that were not measured are estimated operation by operation (`pipefit.cost.time`), because a small one
reaches less of a device's peak figures than a large one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pipefit.dtypes import check_dtype
from pipefit.errors import UsageError

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter"]


class Alike(NamedTuple):
    """Operations alike: how many, and the floating-point operations and moved bytes of each.

    `dtype` is that of the operands of a product; empty where nothing is multiplied, or where it is not known.
    """

    number: int
    flops: int
    moved_bytes: int
    dtype: str = ""


class Collective(NamedTuple):
    """What the ranks of a tensor-parallel group do together in a pass; `nbytes` are those of the whole tensor."""

    kind: CollectiveKind
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one pass of a layer.

    It is counted in floating-point operations and in bytes that kernels read and write; `operations` are those that
    either is the sum of, empty where the work is known as a whole only. `seconds` are measured, or None. They are
    without the `collectives`, in which the ranks of a tensor-parallel group wait for each other.

    Raises:
        UsageError: a negative number, 1e9 seconds or more, or operations of another sum.
    """

    __pydantic_config__ = {"extra": "forbid"}

    flops: int
    moved_bytes: int
    seconds: float | None = None
    operations: tuple[Alike, ...] = ()
    collectives: tuple[Collective, ...] = ()

    @staticmethod
    def of(operations: Iterable[Alike]) -> Work:
        """The work of these operations."""
        found = tuple(operations)
        flops = sum(alike.number * alike.flops for alike in found)
        return Work(flops=flops, moved_bytes=sum(a.number * a.moved_bytes for a in found), operations=found)

    def __post_init__(self) -> None:
        if self.operations:
            self._check_operations()
        if any(collective.nbytes < 0 for collective in self.collectives):
            raise UsageError("a collective is of zero or more bytes")
        if self.flops < 0 or self.moved_bytes < 0 or (self.seconds is not None and not 0 <= self.seconds < 1e9):
            raise UsageError(
                "work has zero or more FLOPs, bytes moved and seconds, and fewer than 1e9 seconds, not "
                f"{self.flops}, {self.moved_bytes} and {self.seconds}"
            )

    def _check_operations(self) -> None:
        """Check that the operations exist, and that the work is the sum of them."""
        if any(number < 1 or flops < 0 or moved < 0 for number, flops, moved, _ in self.operations):
            raise UsageError("operations alike are one or more, of zero or more FLOPs and bytes moved each")
        for dtype in {alike.dtype for alike in self.operations} - {""}:
            check_dtype(dtype)
        sums = (
            sum(a.number * a.flops for a in self.operations),
            sum(a.number * a.moved_bytes for a in self.operations),
        )
        if sums != (self.flops, self.moved_bytes):
            raise UsageError(
                f"work of {self.flops} FLOPs and {self.moved_bytes} bytes moved is not that of its operations, "
                f"{sums[0]} and {sums[1]}"
            )
