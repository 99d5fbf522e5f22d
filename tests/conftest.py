"""Put the package `support` of helpers, and the benchmarks, on the import path of all tests; keep kernel
measurements out of the user's cache.

Tests run in as many processes as there are cores, so each computes with one thread, as pipefit's workers do,
unless OMP_NUM_THREADS says otherwise. The process that hands out tests collects none, and imports no torch.
"""

import gc
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "benchmarks")]

# A shell without job control ignores Ctrl-C in what it starts in the background, and processes that tests
# start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Property tests draw the same fifty cases every time, without a time limit: none fails by chance, or on a
# loaded machine. `pytest --hypothesis-profile default` draws others, and twice as many.
settings.register_profile(
    "steady",
    max_examples=50,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("steady")


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measure each operation once for all tests and their subprocesses, in a temporary folder."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared / "cache"))
        yield


@pytest.fixture(autouse=True)
def no_lines_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off progress lines on stderr, however slow the machine is."""
    from pipefit.cli import progress

    monkeypatch.setattr(progress, "FIRST_SECONDS", 1e6)


@pytest.fixture(autouse=True)
def plans_are_not_compared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off the trainers' comparison with plain training, here and in workers, unless the test is marked
    `compares_plans`: tests compare themselves, and some have layers that kill a worker.
    """
    from pipefit.runtime.checks import comparison

    is_marked = request.node.get_closest_marker("compares_plans") is not None
    monkeypatch.setenv(comparison.PLANS, "1" if is_marked else "0")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one process more than there are cores, because a tenth of all test time is spent waiting."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Turn off the garbage collector during collection, when imports leave no garbage, and raise its
    threshold: tests leave little.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.set_threshold(5_000, 10, 10)
        gc.enable()


def pytest_collectstart() -> None:
    """Seed torch before a module is imported: weights of models made there are the same in every run."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed torch before each test and its fixtures, so that no draw depends on the tests before it."""
    import torch

    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the cases of a test marked `sample(count)` to the gallery, except the last, the first if `count`
    is above 1, and as many others as it allows, drawn by the test's name. Cases that are in the gallery
    already do not count.
    """
    tests = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("sample")
        if mark is not None and item.get_closest_marker("gallery") is None:
            tests[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    for (name, count), cases in tests.items():
        inner = cases[1 if count > 1 else 0 : -1]
        for item in Random(name).sample(inner, max(0, len(cases) - count)):
            item.add_marker(pytest.mark.gallery)


@pytest.fixture(scope="session", autouse=True)
def fake_modes_without_stacks() -> Iterator[None]:
    """Let fake modes not record where they are made: pytest's deep stacks take longer than small models."""
    from torch._subclasses import fake_tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            fake_tensor, "traceback", SimpleNamespace(extract_stack=list, format_list=list), raising=False
        )
        yield


@pytest.fixture(scope="session", autouse=True)
def imports_of_the_fork_server() -> Iterator[None]:
    """Import torch's engine once for all its workers too: half a second each."""
    import torch

    from pipefit.runtime.launch import forks

    if torch.__version__ < "2.13":  # torch's engine is refused
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forks, "_IMPORTED", [*forks._IMPORTED, "pipefit.torch_engine.rank"])
        yield


@pytest.fixture(scope="module", autouse=True)
def what_was_made_before_stays() -> None:
    """Freeze the objects of earlier modules and their imports: a million objects, half a second in each full
    collection.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run kernels on one thread: sums and workspaces do not depend on the number of cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
