"""The closed forms of every range of layers, checked against a storage-by-storage account of memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from random import Random

import numpy as np
import pytest

from pipefit.planner.closed_forms.ranges import Ranges, ranges_of
from pipefit.schema.layer_costs import GradientOrigin, Origin, Span
from pipefit.schema.profile import Measurement
from support.gallery_samples import seeds
from support.range_costs import range_account
from support.synthetic_models import block_sizes, hostile, layer, measurement, plain, small_first, value


def assert_band_is_the_account(
    model: Measurement,
    width: int,
    first: int,
    last: int,
    *,
    blocks: Sequence[int] = (),
    microbatches: int = 3,
) -> None:
    """Check every field of a band, for every range in it, in blocks of `size` layers."""
    edges = [0, *accumulate(blocks or [1] * len(model.layers))]
    band = ranges_of(model, edges, microbatches).band(width, first=first, last=last)
    count = len(edges) - 1
    for (row, column), valid in np.ndenumerate(band.valid):
        start, stop = first + int(column), first + int(column) + int(row) + 1
        assert valid == (stop <= count)
        if valid:
            expected = range_account(model, edges[start], edges[stop], microbatches=microbatches)
            assert {name: int(getattr(band, name)[row, column]) for name in expected} == expected


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", seeds(70, of=120))
def test_every_range_costs_what_the_account_of_it_says(seed: int) -> None:
    """All fields of a full band match the account, for layers with every kind of sharing and aliasing."""
    count = small_first(seed, largest=6)
    assert_band_is_the_account(hostile(Random(seed), count), count, 0, count - 1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(10))
def test_what_is_remembered_of_a_measurement_holds_for_any_number_of_microbatches(seed: int) -> None:
    """Ranges cached for a step of three microbatches are right for one of seven, too."""
    model = hostile(Random(seed), 5)
    for microbatches in (3, 7, 3):
        assert_band_is_the_account(model, 5, 0, 4, microbatches=microbatches)


def test_the_account_knows_every_field_of_a_band() -> None:
    """A new closed form needs a new line in the account; only the position and existence of a range are
    exempt.
    """
    band = Ranges(hostile(Random(0), 2)).band(2)
    fields = {name for name in type(band).__dataclass_fields__ if not name.startswith("_")}
    assert fields - {"first", "valid", "recomputed"} == range_account(hostile(Random(0), 2), 0, 2).keys()


def test_blocks_that_end_with_a_sum_are_not_computed_one_by_one() -> None:
    """Inside a residual block the output's gradient covers two values, at the block's end only one. Stages of
    whole blocks need no special case: 64 blocks are 2,080 ranges of up to 128 layers.
    """
    pair, alone = (value(8), value(8)), (value(8),)
    both = GradientOrigin(kind="output", index=0)
    split = layer(
        alone, pair, storages=(8,), origins=(Origin(kind="input", index=0), Origin(kind="own", index=0))
    )
    add = layer(pair, alone, storages=(8,), saved=(), input_gradients=(both, both), gradient_storages=())
    loss = layer((*alone, value(4, requires_grad=False)), (value(4),))
    ranges = Ranges(measurement([split, add] * 64, loss), range(0, 129, 2))
    assert not ranges.layers_one_by_one(64)
    assert Ranges(ranges.measurement).layers_one_by_one(2)
    assert_band_is_the_account(measurement([split, add] * 3, loss), 3, 0, 2, blocks=[2] * 3)
    assert_band_is_the_account(measurement([split, add] * 3, loss), 6, 0, 5)


def test_two_values_that_share_a_storage_further_back_are_released_together() -> None:
    """The last layer saves one value and releases the other; they share a storage if the range
    starts early.
    """
    pair, both = (value(8), value(8)), (Origin(kind="input", index=0), Origin(kind="input", index=1))
    shared = layer((value(3),), pair, storages=(8,), origins=(Origin(kind="own", index=0),) * 2, saved=())
    through = layer(pair, pair, storages=(), origins=both, saved=())
    spans = (Span(peak_bytes=1), Span(peak_bytes=200, released=(1,)))
    last = layer(pair, (value(3),), saved=both[:1], first=spans, later=spans)
    loss = layer((value(3),), (value(4),))
    assert_band_is_the_account(measurement([shared, through, through, last], loss), 4, 0, 3)


def test_a_storage_that_is_still_needed_is_not_released() -> None:
    """The last layer saves two values and releases one first; if they share a storage, that frees nothing."""
    pair, both = (value(8), value(8)), (Origin(kind="input", index=0), Origin(kind="input", index=1))
    shared = layer((value(3),), pair, storages=(8,), origins=(Origin(kind="own", index=0),) * 2, saved=())
    spans = (Span(peak_bytes=100), Span(peak_bytes=200, released=(1,)))
    last = layer(pair, (value(3),), saved=both, first=spans, later=spans)
    model = measurement([shared, last], layer((value(3),), (value(4),)))
    assert_band_is_the_account(model, 2, 0, 1)
    band = Ranges(model).band(2)
    assert band.backward_later_peak[0, 1] == 200 - 8
    assert (
        band.backward_later_peak[1, 0] == 200 + 3 - 3
    )  # the loss's saved tensors are freed, its gradient remains


@pytest.mark.sample(15)
@pytest.mark.parametrize("seed", range(60))
def test_a_part_of_a_band_is_that_part(seed: int) -> None:
    """A band of any width over any starts holds the same numbers, though storages cross its edges."""
    rng = Random(seed)
    count = 1 + small_first(seed, largest=8)
    first = rng.randrange(count)
    last = rng.randrange(first, count)
    assert_band_is_the_account(hostile(rng, count), rng.randrange(1, count - first + 1), first, last)


@pytest.mark.sample(12)
@pytest.mark.parametrize("seed", range(60))
def test_ranges_of_blocks_are_ranges_of_their_layers(seed: int) -> None:
    """Blocks of several layers match the same account, for a band of any width over any starts."""
    rng = Random(seed)
    blocks = rng.randrange(1, 6)
    sizes = block_sizes(rng, rng.randrange(blocks, 10), blocks)
    first = rng.randrange(blocks)
    last = rng.randrange(first, blocks)
    width = rng.randrange(1, blocks - first + 1)
    assert_band_is_the_account(hostile(rng, sum(sizes)), width, first, last, blocks=sizes)


@pytest.mark.parametrize("seed", range(20))
def test_the_floor_is_below_what_is_retained_and_rises_with_the_range(seed: int) -> None:
    """`floor` is a lower bound of `retained` for every range and grows with the range:
    planners prune by it.
    """
    model = (hostile if seed % 2 else plain)(Random(seed), 12)
    sizes = block_sizes(Random(seed), 12, 12 - seed % 4)
    ranges = Ranges(model, [0, *accumulate(sizes)])
    band, (saved, born) = ranges.band(12), ranges.floor()
    assert (np.diff(saved) >= 0).all() and (np.diff(born) >= 0).all()
    for (row, start), valid in np.ndenumerate(band.valid):
        assert not valid or saved[start + row + 1] - born[start] <= band.retained[row, start]
