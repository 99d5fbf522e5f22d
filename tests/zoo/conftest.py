"""Shared fixtures of the zoo's tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def small_models_run_on_one_thread(one_thread: None) -> None:
    """Run on one thread: models this small are slower on several, and profiles assume one for kernels'
    workspaces.
    """
