"""Tables of which every run of the tests tries a fixed sample, and the mark `gallery` the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], often: Collection[Any]) -> list[Any]:
    """What `parametrize` takes: those of `values` that are in `often` as they are, the others in the gallery. A value
    for several arguments is a tuple.
    """
    rows = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [value if value in often else pytest.param(*row, marks=pytest.mark.gallery) for value, row in rows]


def seeds(often: int, of: int) -> list[Any]:
    """Seeds from 0 to `of` - 1, of which `often` are tried in every run: spread evenly, as cases may grow with them."""
    return sampled(range(of), {number * of // often for number in range(often)})
