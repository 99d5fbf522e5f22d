"""Warnings about simulated plans whose host is too small for the offloaded tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipefit.errors import PipefitWarning
from pipefit.schema.decisions import Decision, SavedTensors, What
from pipefit.schema.devices import parse_place
from pipefit.simulator import simulate
from support.random_offloads import make_chain
from support.small_tasks import plan_of


def test_a_host_that_is_too_small_is_told() -> None:
    """The warning names the member, its memory and the missing bytes; the trace is still returned."""
    still = plan_of(make_chain(), [3, 3], microbatches=3, schedule="gpipe")
    moved = Decision(
        stage=0,
        subject=SavedTensors(tensors=((1, 0),)),
        what=What.OFFLOAD,
        place=parse_place("host"),
        ahead=1,
    )
    plan = replace(still, decisions=(moved,))
    small = replace(plan.cluster.hosts[0], memory_bytes=1)
    with pytest.warns(PipefitWarning, match=r"cannot be trained: host0 has 1 B, but would need .* too much"):
        trace = simulate(replace(plan, cluster=replace(plan.cluster, hosts=(small,))))
    assert trace.peak_bytes == simulate(plan).peak_bytes
