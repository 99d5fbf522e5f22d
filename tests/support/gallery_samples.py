"""Tables with a fixed sample for every test run, and the mark `gallery` for the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], often: Collection[Any]) -> list[Any]:
    """Return arguments of `parametrize`: those of `values` in `often` unmarked, the others in the gallery. A
    value for several arguments is a tuple.
    """
    rows = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [value if value in often else pytest.param(*row, marks=pytest.mark.gallery) for value, row in rows]


def seeds(often: int, of: int) -> list[Any]:
    """Return seeds 0 to `of` - 1; `often` of them run every time, spread evenly, because cases may grow with
    the seed.
    """
    return sampled(range(of), {number * of // often for number in range(often)})
