"""What the zoo's tests share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def small_models_run_on_one_thread(one_thread: None) -> None:
    """Models this small are slower on several threads, and profiles assume one for kernels' temporary memory."""
