"""The vectorised memory model against the walk over one stage, and against a ledger of the whole program."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from ledger import walk
from pipefit.cost.memory import StageMemory

from chains import devices, hostile, layer, measurement, plain, profile, training, value
from pipefit.planner.closed_forms.bands import stage_peak
from pipefit.planner.closed_forms.ranges import Ranges
from pipefit.plans import Grid, Plan, Stage
from pipefit.profiles import Measurement, Origin, Span
from pipefit.schedule import situations

few = hypothesis_settings(max_examples=150, deadline=None)


def band_cell(memory: StageMemory) -> dict[str, int]:
    """What a band says of one range, from the walk over that range."""
    forward, first, later = memory.forward(), memory.backward(first_microbatch=True), memory.backward()
    arriving = memory.input_bytes + memory.target_bytes
    return {
        "static": memory.parameter_bytes + memory.loss_bytes,
        "gradients": memory.gradient_bytes,
        "state": memory.step.state_bytes,
        "retained": arriving + forward.after_bytes - memory.sent_bytes,
        "inputs": arriving,
        "received": memory.input_bytes if memory.start else 0,
        "output_gradients": memory.output_gradient_bytes,
        "input_gradients": memory.input_gradient_bytes,
        "sent": memory.sent_bytes,
        "forward_peak": forward.peak_bytes,
        "backward_first_peak": first.peak_bytes,
        "backward_later_peak": later.peak_bytes,
        "update_first_peak": memory.step.first_peak_bytes,
        "update_peak": memory.step.peak_bytes,
    }


def assert_band_is_the_walk(model: Measurement, width: int, first: int, last: int) -> None:
    band = Ranges(model, microbatches=3).band(width, first=first, last=last)
    count = len(model.layers)
    for (row, column), valid in np.ndenumerate(band.valid):
        start, stop = first + int(column), first + int(column) + int(row) + 1
        assert valid == (stop <= count)
        if valid:
            expected = band_cell(StageMemory(model, start, stop, microbatches=3))
            assert {name: int(getattr(band, name)[row, column]) for name in expected} == expected


@few
@given(st.randoms(use_true_random=False), st.integers(1, 7))
def test_every_range_costs_what_the_walk_over_it_finds(rng: Random, count: int) -> None:
    """All arrays of a full band equal `StageMemory`, for layers that alias, pass through and release as they like."""
    assert_band_is_the_walk(hostile(rng, count), count, 0, count - 1)


def test_two_values_that_share_a_storage_further_back_are_released_together() -> None:
    """The last layer saves one value and releases the other; they share a storage if the range starts early."""
    pair, both = (value(8), value(8)), (Origin(kind="input", index=0), Origin(kind="input", index=1))
    shared = layer((value(3),), pair, storages=(8,), origins=(Origin(kind="own", index=0),) * 2, saved=())
    through = layer(pair, pair, storages=(), origins=both, saved=())
    spans = (Span(peak_bytes=1), Span(peak_bytes=200, released=(1,)))
    last = layer(pair, (value(3),), saved=both[:1], first=spans, later=spans)
    loss = layer((value(3),), (value(4),))
    assert_band_is_the_walk(measurement([shared, through, through, last], loss), 4, 0, 3)


@few
@given(st.randoms(use_true_random=False), st.integers(2, 9), st.data())
def test_a_part_of_a_band_is_that_part(rng: Random, count: int, data: st.DataObject) -> None:
    """A band of any width over any starts holds the same numbers, though storages cross its edges."""
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first, count - 1))
    assert_band_is_the_walk(hostile(rng, count), data.draw(st.integers(1, count - first)), first, last)


@few
@given(
    st.randoms(use_true_random=False),
    st.integers(1, 6),
    st.sampled_from(["gpipe", "1f1b"]),
    st.integers(1, 9),
    st.data(),
)
def test_a_stage_peaks_where_its_program_does(
    rng: Random, count: int, schedule: str, microbatches: int, data: st.DataObject
) -> None:
    """The peak at a schedule position equals a ledger of the lowered program over two steps, for every split."""
    model = hostile(rng, count)
    stages = data.draw(st.integers(1, count))
    band = Ranges(model, microbatches=microbatches).band(count)
    peaks = [stage_peak(band, situations(schedule, s, stages, microbatches)) for s in range(stages)]
    for cuts in combinations(range(1, count), stages - 1):
        edges = (0, *cuts, count)
        found = tuple(int(peaks[s][edges[s + 1] - edges[s] - 1, edges[s]]) for s in range(stages))
        assert found == walk(split(model, edges, schedule, microbatches))


def split(model: Measurement, edges: tuple[int, ...], schedule: str, microbatches: int) -> Plan:
    stages = [Stage(start=a, stop=b, grid=Grid.of(n)) for n, (a, b) in enumerate(pairwise(edges))]
    return Plan(
        profile=profile(model),
        cluster=devices(*[1 << 40] * len(stages)),
        training=training(schedule, microbatches),
        stages=tuple(stages),
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_floor_is_below_what_is_retained_and_rises_with_the_range(seed: int) -> None:
    """`floor` bounds `retained` from below for every range, and grows when a range does: planners prune by it."""
    model = (hostile if seed % 2 else plain)(Random(seed), 12)
    ranges = Ranges(model)
    band, (saved, born) = ranges.band(12), ranges.floor()
    assert (np.diff(saved) >= 0).all() and (np.diff(born) >= 0).all()
    for (row, start), valid in np.ndenumerate(band.valid):
        assert not valid or saved[start + row + 1] - born[start] <= band.retained[row, start]
