"""Comparison of predicted and measured traces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipefit.errors import UsageError
from pipefit.report.traces import compare, describe_comparison, describe_trace
from pipefit.schema.trace import AllocatorPeaks, DeviceTrace, MemorySample, Trace
from pipefit.simulator import simulate
from pipefit.tables import plain
from pipefit.units import format_bytes
from support.pipelines import equal_profile, make_plan, random_profile

MIB = 1 << 20


def trace_of(*peaks: int, seconds: tuple[float, ...] = (2.0, 1.0), source: str = "measured") -> Trace:
    """Return a trace with these peaks, reached in the second of two steps."""
    devices = tuple(
        DeviceTrace(
            device=number,
            budget_bytes=1000,
            events=(),
            memory=tuple(
                MemorySample(
                    step=step, action="0F0", seconds=0.0, bytes=(0, 0, 0, peak // (2 - step), 0, 0, 0, 0, 0)
                )
                for step in (0, 1)
            ),
        )
        for number, peak in enumerate(peaks)
    )
    return Trace(source=source, steps=2, devices=devices, step_seconds=seconds)  # type: ignore[arg-type]


def test_a_comparison_is_a_subtraction() -> None:
    """The difference in bytes is measured minus predicted, and the share is of the measured bytes; seconds
    are the last step's.
    """
    found = compare(trace_of(90, 0, source="simulated"), trace_of(100, 0, seconds=(9.0, 4.0)))
    assert [row.difference_bytes for row in found.devices] == [10, 0]
    assert [row.difference for row in found.devices] == [0.1, None]
    assert (found.predicted_seconds, found.measured_seconds) == (1.0, 4.0)
    text = plain(describe_comparison(found))
    assert "+10.00 %" in text
    assert "(+300.0 %)" in text


def test_estimated_seconds_are_called_so() -> None:
    """A simulation without measured seconds says so in its trace, and a comparison in the simulated half of
    the sentence.
    """
    guessed = simulate(make_plan(equal_profile(2, backward_seconds=None), (1, 1)))
    known = simulate(make_plan(equal_profile(2), (1, 1)))
    assert (guessed.estimated, known.estimated) == (True, False)
    assert "by estimated seconds of layers" in plain(describe_trace(guessed))
    assert "estimated" not in plain(describe_trace(known))
    found = compare(guessed, known)
    assert (found.as_json()["predicted"]["estimated"], found.as_json()["measured"]["estimated"]) == (
        True,
        False,
    )
    assert plain(describe_comparison(found)).count("simulated by estimates") == 1
    assert "by estimates" not in plain(describe_comparison(compare(known, known)))


def test_what_a_gpu_holds_is_a_table_of_its_own() -> None:
    """Each device with an allocator has three numbers and their overhead, and the sum next to its memory."""
    trace = trace_of(100, 200, 0, source="dry run")
    held = AllocatorPeaks(
        settings="", requested_bytes=100, allocated_bytes=512, reserved_bytes=600, workspaces=2, workspace_bytes=64,
        context_bytes=200, communicators=3, communicator_bytes=50,
    )  # fmt: skip
    full = replace(held, communicators=0, workspaces=0, retries=4, fits=False)
    known = (
        replace(trace.devices[0], allocator=held),
        replace(trace.devices[1], allocator=full),
        trace.devices[2],
    )
    *lines, _, advice = plain(describe_trace(replace(trace, devices=known))).splitlines()
    place = lines.index("most memory that a GPU holds (caching allocator: default settings)")
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[place + 2 :]]
    assert rows == [
        ["0", "100 B", "512 B", "600 B", "2 x 64 B", "200 B", "3 x 50 B", "950 B", "95.0 % tight", "0"],
        ["1", "100 B", "512 B", "600 B", "-", "200 B", "-", "800 B", "80.0 %", "out of memory"],
    ]
    assert "most memory that a GPU holds" not in plain(describe_trace(trace))
    assert advice.startswith(
        "Out of memory: the process of device 1 needs 800 B, more than it may of its 1000 B: 600 B"
    )
    assert "plan with --reserve 1MiB" not in advice  # which is more than it has


def test_what_a_gpu_has_held_says_nothing_of_its_process() -> None:
    """A trace of training has the allocator's three numbers; memory outside of it was not measured."""
    held = AllocatorPeaks(
        settings="", requested_bytes=100, allocated_bytes=512, reserved_bytes=600, retries=1
    )
    trace = trace_of(100, source="measured")
    told = plain(
        describe_trace(replace(trace, devices=(replace(trace.devices[0], allocator=held),)))
    ).splitlines()
    assert [cell.strip() for cell in told[-2].split("  ") if cell.strip()] == [
        "device", "requested", "allocated", "reserved", "cache emptied"
    ]  # fmt: skip
    assert told[-1].split() == ["0", "100", "B", "512", "B", "600", "B", "1"]


def test_a_gpu_whose_process_does_not_fit_is_told() -> None:
    """The message names the device that lacks most, the missing bytes, and the reserve to plan with: all
    non-tensor memory, in whole MiB. It is absent if all processes fit.
    """
    trace = trace_of(100 * MIB, 100 * MIB, source="dry run")
    trace = replace(
        trace, devices=tuple(replace(device, budget_bytes=1000 * MIB) for device in trace.devices)
    )
    held = AllocatorPeaks(
        settings="", requested_bytes=100 * MIB, allocated_bytes=512 * MIB, reserved_bytes=600 * MIB,
        context_bytes=400 * MIB,
    )  # fmt: skip
    larger = replace(held, reserved_bytes=800 * MIB - 1)

    def told(*peaks: AllocatorPeaks) -> str:
        devices = (replace(device, allocator=one) for device, one in zip(trace.devices, peaks, strict=True))
        return plain(describe_trace(replace(trace, devices=tuple(devices)))).splitlines()[-1]

    assert "Out of memory" not in told(held, held)
    assert "the process of device 1 needs 1.17 GiB, 200.00 MiB over its 1000.00 MiB: 800.00" in told(
        held, larger
    )
    assert "plan with --reserve 1100MiB" not in told(held, larger)  # more than the device has
    assert "plan with --reserve 600MiB" in told(held, replace(larger, requested_bytes=600 * MIB))


def test_a_dry_run_has_no_seconds_to_compare() -> None:
    """Positions in a program are not compared with seconds."""
    found = compare(trace_of(90, source="dry run"), trace_of(100))
    assert found.predicted_seconds is None
    assert "not compared" in plain(describe_comparison(found))
    assert "without times" in plain(describe_trace(trace_of(90, source="dry run")))


def test_traces_of_different_devices_are_refused() -> None:
    """One device compared with two is a mistake, not zero bytes."""
    with pytest.raises(UsageError, match="different devices, 0 and 0, 1"):
        compare(trace_of(1), trace_of(1, 1))


def test_a_trace_shows_what_held_the_bytes() -> None:
    """The table has every device's peak, and the categories at that moment add up to it."""
    trace = simulate(make_plan(random_profile(6), (2, 4)))
    text = plain(describe_trace(trace))
    for device in trace.devices:
        assert format_bytes(device.peak_bytes) in text
        assert sum(device.peak.by_category.values()) == device.peak_bytes
    assert "activations" in text


def test_a_device_on_which_nothing_ran_is_shown_as_empty() -> None:
    """A trace with an idle device is shown, not refused."""
    trace = trace_of(5)
    idle = replace(trace.devices[0], device=1, memory=())
    assert "0 B" in plain(describe_trace(replace(trace, devices=(*trace.devices, idle))))
