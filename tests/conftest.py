"""Lets tests in every folder import the helpers that lie beside this file, and the benchmarks; keeps what is measured
of kernels out of the user's cache.

Tests run in as many processes as there are cores, so each computes with one thread, as pipefit's workers do, unless
OMP_NUM_THREADS says otherwise.
"""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from pipefit.cli import progress
from pipefit.runtime.checks import comparison

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "benchmarks")]
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

# Property tests draw the same cases every time, and may take as long as they like: none fails by chance, or on a loaded
# machine. `pytest --hypothesis-profile default` draws others.
settings.register_profile(
    "steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests and the processes that they start measure each operation once, together, into a temporary folder."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared / "cache"))
        yield


@pytest.fixture(autouse=True)
def no_lines_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, stderr has what a test is about, and no line that says what is being done."""
    monkeypatch.setattr(progress, "FIRST_SECONDS", 1e6)


@pytest.fixture(autouse=True)
def plans_are_not_compared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No trainer, here or in a worker, compares its plan with plain training, which tests do themselves, unless the
    test is marked `compares_plans`: there are thousands of them, and some have layers at which a worker dies.
    """
    is_marked = request.node.get_closest_marker("compares_plans") is not None
    monkeypatch.setenv(comparison.PLANS, "1" if is_marked else "0")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nothing that is imported to collect tests is garbage, so that the collector would look for it in vain; and tests
    leave little, so that it need not look after every few hundred objects.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.set_threshold(5000, 10, 10)
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def what_was_made_before_stays() -> None:
    """The garbage collector need not look again at what earlier modules and their imports have left: a million objects,
    which would cost half a second in each full collection.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Kernels run on one thread: sums do not depend on the number of cores, and neither does what kernels take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
