"""Calls in a separate process: code for fake GPUs in tests that train on real ones before and after."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import ParamSpec, TypeVar

P, T = ParamSpec("P"), TypeVar("T")


def elsewhere(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Return the result of `function` from a fresh process; arguments and result must be picklable."""
    return _process().submit(function, *arguments, **options).result()


@cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=mp.get_context("spawn"))
