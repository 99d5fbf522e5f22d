"""The benchmark of profiling, in small: the formulas' numbers of runs, and errors of the right sign."""

from __future__ import annotations

import pytest

from bench_profiling import rows, setting
from support.gallery_samples import sampled

SMALL = {"layers": 4, "hidden": 32, "heads": 2, "sequence": 16, "vocabulary": 100}


@pytest.mark.gallery
@pytest.mark.parametrize("recompute", sampled(["never", "always"], often=["never"]))
def test_the_fake_profile_takes_no_run_and_is_exact(recompute: str) -> None:
    """For a GPT of few layers on three devices our predictor is right in every split, and trimmed runs are
    fewer.
    """
    given = setting("gpt", SMALL, 3, recompute)
    fake, incremental, trimmed = rows("gpt", given, 15)
    layers = len(given.profile.layers)
    assert (fake.runs, fake.largest_error) == (0, 0.0)
    assert incremental.runs == layers
    assert trimmed.runs == -(-(2 * layers - 1) // 3)
    assert all(row.ninth_decile_error <= row.largest_error for row in (fake, incremental, trimmed))
