"""Accounts of each technique in a plan, compared with plans without it."""

from __future__ import annotations

from dataclasses import replace

from pipefit.planner.driver import accounts
from pipefit.report.plan import table
from pipefit.schema.decisions import Decision, Run, SavedTensors, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Compaction, Plan
from pipefit.simulator.assembled import assembled
from support.synthetic_models import layer, measurement, profile, training, value
from support.tight_questions import cluster, keeping_layer


def compacted() -> Plan:
    """Build a plan of one device and four layers of a hundred saved bytes: one recomputed,
    another offloaded.
    """
    chain = measurement(
        [keeping_layer(1, 100, 0, 1.0)] * 4, layer((value(1), value(1)), (value(4),), seconds=0.0)
    )
    host = parse_place("host")
    return Plan(
        profile=profile(chain),
        cluster=cluster([1 << 20], host_rate=1e9, peer_rate=1e9),
        training=training("gpipe", 6),
        stages=(Stage(start=0, stop=4, grid=Grid.of(0)),),
        decisions=(
            Decision(stage=0, subject=Run(start=2, stop=4), what=What.RECOMPUTE),
            Decision(stage=0, subject=SavedTensors(tensors=((0, 1),)), what=What.OFFLOAD, place=host),
        ),
    )


def test_each_technique_is_told_by_what_the_plan_would_be_without_it() -> None:
    """Bytes and seconds are differences of two simulations and include the seconds of recomputed layers."""
    plan = compacted()
    whole = assembled(plan)
    found, left_out = accounts(plan, whole)
    assert not left_out
    assert [(one.what, one.layers) for one in found] == [("offload to host", 1), ("recompute", 2)]
    for one, other in zip(found, reversed(plan.decisions), strict=True):
        without = assembled(replace(plan, decisions=tuple(d for d in plan.decisions if d is not other)))
        assert one.freed_bytes == without.peak_bytes[0] - whole.peak_bytes[0] > 0
        assert one.added_seconds == whole.seconds - without.seconds
    assert round(found[1].added_seconds) == 6 * 2


def test_a_table_tells_what_is_hidden_and_what_a_gib_costs() -> None:
    """The table fits eighty columns, also for offloads over many devices."""
    long = "offload to " + "+".join(f"device{n}*{n + 1}" for n in range(8))
    rows = [
        Compaction(stage=0, what=long, layers=3, freed_bytes=1 << 31, added_seconds=0.0),
        Compaction(stage=1, what="recompute", layers=12, freed_bytes=1 << 31, added_seconds=4.0),
    ]
    (shown,) = table(rows, step_seconds=10.0)
    assert shown.rows[0][3:] == ("-2.00 GiB", "hidden", "nothing")
    assert shown.rows[1][3:] == ("-2.00 GiB", "+4 s", "2 s")
    widths = [max(map(len, column)) for column in zip(shown.columns, *shown.rows, strict=True)]
    assert sum(widths) + 2 * (len(widths) - 1) <= 80
    assert list(table([], step_seconds=10.0)) == []


def test_what_frees_nothing_has_no_price() -> None:
    """A technique that frees nothing beyond the others is reported so, whether or not it takes time."""
    idle = Compaction(stage=0, what="recompute", layers=3, freed_bytes=0, added_seconds=0.0)
    (shown,) = table([idle, replace(idle, added_seconds=4.0)], step_seconds=10.0)
    assert [row[3:] for row in shown.rows] == [("none", "hidden", "-"), ("none", "+4 s", "-")]
