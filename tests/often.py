"""The ways to recompute that tests of long benchmarks try: two in every run, and all in the gallery."""

from __future__ import annotations

import pytest

from partitioners import SCHEDULES

OFTEN = [one if one in ("never", "except_last") else pytest.param(one, marks=pytest.mark.gallery) for one in SCHEDULES]
