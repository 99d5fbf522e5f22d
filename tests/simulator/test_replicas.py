"""Reports of simulated stages with several replicas: in print, on the page, and over the links."""

from __future__ import annotations

from pipefit.report.page.charts import traffic
from pipefit.report.show import text
from pipefit.simulator import Simulation, simulate
from pipefit.simulator.simulation import contents
from support.replica_profiles import gridded


def test_a_stage_is_printed_with_all_its_devices() -> None:
    """The fullest replica stands for the stage; rows of three or more devices are abbreviated."""
    rows = text(gridded(3, 2, samples=6)).splitlines()
    assert [row.split()[:3] for row in rows if row.split()[:1] in (["0"], ["1"])] == [
        ["0", "0-2", "layer0"],
        ["1", "3", "4"],
    ]


def test_every_row_crosses_a_boundary_once_in_each_direction() -> None:
    """Values of eight bytes a sample, and their gradients, cross once between any two degrees."""
    for front, behind in ((3, 2), (2, 3), (1, 6), (6, 1), (2, 2)):
        every = traffic(gridded(front, behind, samples=6, microbatches=2))
        found = {stretch: size for stretch, size in every.items() if stretch.what == "messages"}
        forward = {(s.source.number or 0) < front for s in found}
        assert forward == {True, False}
        assert sum(found.values()) == 2 * (2 * 6 * 8)


def test_what_fills_a_replica_is_told() -> None:
    """A replica's contents are those of its local batch, and match its device's peak."""
    plan = gridded(2, 1, microbatches=2)
    trace = simulate(plan)
    for device in range(3):
        told = contents(plan, device)
        assert told is not None
        assert told.peak == trace.devices[device].peak
    assert Simulation(plan).peak_bytes[0] == Simulation(plan).peak_bytes[1]


def test_a_value_lasts_until_its_last_part_has_been_sent() -> None:
    """A sender of two replicas' rows holds the value until both have their rows. The value is freed before
    the next gradients, six of eight bytes, arrive.
    """
    samples = simulate(gridded(1, 2, samples=6, microbatches=2), steps=1).devices[0].memory
    highest = {sample.action: sample.total_bytes for sample in samples}
    first, second = highest["0WAIT_SEND_F0{0:3}@device1"], highest["0WAIT_SEND_F0{3:6}@device2"]
    assert highest["0RECV_B1{0:3}@device1"] - 6 * 8 < first == second
