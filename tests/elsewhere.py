"""Calls in a process of their own: what follows fake GPUs, for tests that train on real ones before and after."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import ParamSpec, TypeVar

P, T = ParamSpec("P"), TypeVar("T")


def elsewhere(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """What `function` returns in a process that is used for nothing else; everything has to be pickled."""
    return _process().submit(function, *arguments, **options).result()


@cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=mp.get_context("spawn"))
