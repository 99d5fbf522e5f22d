"""The benchmark of straight lines between microbatch sizes."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from bench_lines import errors
from support.microbatch_size_profiles import sized
from support.synthetic_models import plain


def test_of_values_that_grow_with_the_samples_a_line_is_exact() -> None:
    """Peaks at the same action for all sizes lie on one line; sizes that define the line are left out."""
    costs = sized(plain(Random(1), 4), 64, 32, 8, 2)
    found = list(errors(costs))
    assert [one.samples for one in found] == [64, 8]
    assert all(abs(one.worst) < 1e-9 for one in found)


def test_a_run_above_the_line_is_an_error_below_zero() -> None:
    """Layers that save twice the bytes at one size exceed the line there, and only there."""
    costs = sized(plain(Random(1), 4), 64, 32, 8, 2)
    before = {one.samples: one for one in errors(costs)}
    at = next(number for number, one in enumerate(costs.measurements) if one.microbatch_size == 8)
    larger = replace(costs.at(64), microbatch_size=8)
    changed = replace(costs, measurements=(*costs.measurements[:at], larger, *costs.measurements[at + 1 :]))
    after = {one.samples: one for one in errors(changed)}
    assert after[8].worst < -0.3 < before[8].worst
    assert after[64] == before[64]
