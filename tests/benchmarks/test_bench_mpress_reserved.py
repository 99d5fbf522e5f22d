"""Reports of a dry run with the allocator: the device whose process is nearest to its memory."""

from __future__ import annotations

from bench_mpress import questions
from bench_mpress_reserved import row_of
from pipefit.schema.trace import AllocatorPeaks, DeviceTrace

MIB = 1 << 20


def device(number: int, reserved: int, memory: int) -> DeviceTrace:
    """Build a device of given MiB, with these MiB reserved by its allocator."""
    own = AllocatorPeaks(
        settings="", requested_bytes=reserved // 2 * MIB, allocated_bytes=reserved * MIB, reserved_bytes=reserved * MIB,
        context_bytes=10 * MIB, fits=reserved + 10 <= memory,
    )  # fmt: skip
    return DeviceTrace(device=number, budget_bytes=memory * MIB, events=(), memory=(), allocator=own)


def test_the_fullest_process_is_told() -> None:
    """The fullest process is chosen by share of memory, not by bytes; devices with too little, context
    included, are counted.
    """
    asked = next(questions(["gpt-5.3B"]))
    row = row_of(asked, "joint", "fixed", [device(0, 400, 1000), device(1, 95, 100), device(2, 92, 100)], 1.0)
    assert (row.device, row.process_bytes, row.memory_bytes) == (1, 105 * MIB, 100 * MIB)
    assert row.short_devices == 2
    assert row.cells[-1] == "2 devices"
