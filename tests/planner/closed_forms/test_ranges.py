"""The vectorised memory model against the ledger of one microbatch, and of the whole program."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from chains import devices, hostile, layer, measurement, plain, profile, training, value
from pipefit.cost.effects import Effect
from pipefit.cost.flight import Flights
from pipefit.cost.rest import StageRest
from pipefit.cost.storages import StageStorages
from pipefit.planner.closed_forms.bands import stage_peak
from pipefit.planner.closed_forms.ranges import Ranges
from pipefit.planner.closed_forms.surroundings import surroundings
from pipefit.plans import Grid, Plan, Stage
from pipefit.profiles import Measurement, Origin, Span
from pipefit.program import parse_action
from pipefit.schedule import SCHEDULES
from pipefit.schedule.whole_stages import RECOMPUTE, Recompute, whole_stages
from pipefit.simulator import Simulation

few = hypothesis_settings(max_examples=150, deadline=None)


def band_cell(model: Measurement, start: int, stop: int) -> dict[str, int]:
    """What a band says of one range, from the microbatches that go through it, kept and recomputed."""
    storages = StageStorages(model, start, stop)
    flights, rest = Flights(storages), StageRest(storages, 3)
    here = [start == 0 or storages.last, start > 0, not storages.last]

    def through(words: str, *, is_first: bool = False) -> dict[str, Effect | None]:
        """The effects of these kinds of actions, but for those that the range has no part in."""
        residency, effects = flights.start, {}
        for word in words.split():
            if (word == "LOAD" and not here[0]) or ("RECV_F" in word and not here[1]):
                continue
            if ("RECV_B" in word or "SEND_F" in word) and not here[2]:
                continue
            action = parse_action(f"0{word}0")
            residency, effects[word] = flights.apply(residency, action, is_first=is_first)
        return effects

    def after(effect: Effect | None) -> int:
        return effect.after_bytes if effect else 0

    arriving = "RECV_F WAIT_RECV_F LOAD"
    leaving = "SEND_F WAIT_SEND_F RECV_B WAIT_RECV_B"
    kept = through(f"{arriving} F {leaving} B", is_first=True)
    later = through(f"{arriving} F {leaving} B")
    again = through(f"{arriving} N {leaving} R B")
    inputs = after(kept.get("LOAD")) + after(kept.get("RECV_F"))
    travelling = later["B"].after[3] + after(later.get("RECV_B"))
    return {
        "static": rest.parameter_bytes + rest.loss_bytes + rest.early_state_bytes,
        "gradients": rest.gradient_bytes,
        "state": rest.state_bytes - rest.early_state_bytes,
        "retained": inputs + after(kept["F"]) + after(kept.get("WAIT_SEND_F")),
        "inputs": inputs,
        "received": after(kept.get("RECV_F")),
        "output_gradients": after(kept.get("RECV_B")),
        "input_gradients": travelling,
        "sent": -after(kept.get("WAIT_SEND_F")),
        "forward_peak": kept["F"].peak_bytes,
        "backward_first_peak": kept["B"].peak_bytes,
        "backward_later_peak": later["B"].peak_bytes,
        "update_first_peak": rest.first_update.peak_bytes,
        "update_peak": rest.later_update.peak_bytes,
        "checkpoint_sent": -after(again.get("WAIT_SEND_F")),
        "checkpoint_peak": again["N"].peak_bytes,
    }


def assert_band_is_the_walk(model: Measurement, width: int, first: int, last: int) -> None:
    band = Ranges(model, microbatches=3).band(width, first=first, last=last)
    count = len(model.layers)
    for (row, column), valid in np.ndenumerate(band.valid):
        start, stop = first + int(column), first + int(column) + int(row) + 1
        assert valid == (stop <= count)
        if valid:
            expected = band_cell(model, start, stop)
            assert {name: int(getattr(band, name)[row, column]) for name in expected} == expected


@few
@given(st.randoms(use_true_random=False), st.integers(1, 7))
def test_every_range_costs_what_the_walk_over_it_finds(rng: Random, count: int) -> None:
    """A full band equals what the ledger finds, for layers that alias, pass through and release as they like."""
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
    st.sampled_from(sorted(SCHEDULES)),
    st.sampled_from(RECOMPUTE),
    st.integers(1, 9),
    st.data(),
)
def test_a_stage_peaks_where_its_program_does(
    rng: Random, count: int, schedule: str, recompute: Recompute, microbatches: int, data: st.DataObject
) -> None:
    """The peak at a schedule position equals a ledger of the lowered program over two steps, for every split."""
    model = hostile(rng, count)
    stages = data.draw(st.integers(1, count))
    band = Ranges(model, microbatches=microbatches).band(count)
    peaks = [stage_peak(band, surroundings(schedule, s, stages, microbatches, recompute)) for s in range(stages)]
    for cuts in combinations(range(1, count), stages - 1):
        edges = (0, *cuts, count)
        found = tuple(int(peaks[s][edges[s + 1] - edges[s] - 1, edges[s]]) for s in range(stages))
        plan = split(model, edges, schedule, microbatches, recompute)
        assert found == Simulation(plan, steps=2).peak_bytes


def split(model: Measurement, edges: tuple[int, ...], schedule: str, microbatches: int, recompute: Recompute) -> Plan:
    stages = tuple(Stage(start=a, stop=b, grid=Grid.of(n)) for n, (a, b) in enumerate(pairwise(edges)))
    return Plan(
        profile=profile(model),
        cluster=devices(*[1 << 40] * len(stages)),
        training=training(schedule, microbatches),
        stages=stages,
        decisions=whole_stages(stages, recompute, schedule, microbatches),
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
