"""Work over fake GPUs leaves none in a process that may train on real ones. Real GPUs are simulated here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from pipefit import processes
from pipefit.errors import InfeasibleError, PipefitError, PipefitWarning, WorkerFailed
from pipefit.fake_cuda import isolation as room
from pipefit.fake_cuda.isolation import apart
from pipefit.runtime.optim.updates import Undivided

TESTS = Path(__file__).parents[1]
SCRIPT = """
from unittest import mock
import torch
import pipefit
from pipefit.fake_cuda.target import follows_fake_streams
from support.small_tasks import task_of
task = task_of(lambda: [torch.nn.Linear(8, 8) for _ in range(2)], outputs=8)
def answers():
    plan = pipefit.plan(task, "4x-a100-80gb", batch_size=2, stages=1, microbatches=1, planner="uniform", certify=False)
    return plan.stages, pipefit.certify(task, plan).peak_bytes, pipefit.profile(task, microbatch_size=2, target="cuda")
with mock.patch.object(torch.cuda, "is_available", return_value=True):
    found = answers()
    try:
        pipefit.plan(task, "4x-a100-80gb", batch_size=4, stages=99)
    except pipefit.PipefitError as error:
        print(error)
print("fake before:", follows_fake_streams())
print("the same:", answers() == found)
print("fake after:", follows_fake_streams())
"""


@pytest.fixture(autouse=True)
def gpus() -> Iterator[None]:
    """Simulate GPUs in a process without fake ones or an earlier backward, though other tests may have run
    one.
    """
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(room, "run_a_backward"),
        mock.patch.object(room, "follows_fake_streams", return_value=False),
    ):
        yield


@pytest.mark.gallery
def test_a_script_may_plan_certify_and_profile_before_it_trains() -> None:
    """An error does not leave a fake GPU either; results equal those of a process that has one."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    error, *told = done.stdout.splitlines()
    assert "99" in error
    assert told == ["fake before: False", "the same: True", "fake after: True"]


def test_only_what_follows_cuda_is_done_in_a_fork() -> None:
    """The CPU's kernels have threads, which a fork lacks."""
    assert apart("cuda", os.getpid) != os.getpid()
    assert apart("cpu", os.getpid) == os.getpid()
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        assert apart("cuda", os.getpid) == os.getpid()


@pytest.mark.parametrize(
    "error", [InfeasibleError("too large"), Undivided("Hooked", "has hooks on its steps")]
)
def test_an_error_of_ours_comes_from_the_fork(error: PipefitError) -> None:
    """The error is raised here; the work is not repeated."""
    done = []

    def work() -> None:
        done.append(1)
        raise error

    with pytest.raises(type(error), match=re.escape(str(error))):
        apart("cuda", work)
    assert not done


def test_what_was_printed_before_is_printed_once(tmp_path: Path) -> None:
    """A fork copies the unflushed output, if stdout is a file."""
    file = tmp_path / "output"
    with file.open("w") as output, mock.patch.object(sys, "stdout", output):
        print("before")
        apart("cuda", lambda: print("in the fork"))
        print("after")
    assert file.read_text().split("\n") == ["before", "in the fork", "after", ""]


def test_warnings_tell_where_they_come_from() -> None:
    """Warnings have the same location as if the work ran here."""
    with pytest.warns(PipefitWarning, match="assumed") as told:
        apart("cuda", lambda: warnings.warn("assumed", PipefitWarning, stacklevel=1))
    assert [one.filename for one in told] == [__file__]


def test_a_fork_that_stands_still_or_is_killed_is_told() -> None:
    """The work is not repeated here: running out of memory could end this process too."""
    here = os.getpid()
    with pytest.raises(WorkerFailed, match=r"killed by SIGKILL, usually because memory .* separate process"):
        apart("cuda", lambda: signal.raise_signal(signal.SIGKILL if os.getpid() != here else signal.SIGINT))
    with (
        mock.patch.object(processes, "LOOK_SECONDS", 0.01),
        pytest.raises(WorkerFailed, match=r"did not run for 1 s, probably because .* in a separate process"),
    ):
        apart("cuda", lambda: time.sleep(1000))


@pytest.mark.parametrize("why", ["a failure of the fork's own", "no backward", "no pickle", "no process"])
def test_what_a_fork_cannot_do_is_done_here(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work runs here after a foreign error, which may be specific to the fork, if torch refuses the
    fork's backward, if a result cannot be pickled, or at a limit of processes.
    """
    here, done = os.getpid(), list[int]()

    def work() -> object:
        done.append(os.getpid())
        if why == "a failure of the fork's own" and os.getpid() != here:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return threading.Lock() if why == "no pickle" else None

    if why == "no process":
        monkeypatch.setattr(os, "fork", mock.Mock(side_effect=BlockingIOError))
    refuse = RuntimeError(
        "Unable to handle autograd's threading in combination with fork-based multiprocessing"
    )
    with mock.patch.object(room, "run_a_backward", side_effect=refuse if why == "no backward" else None):
        apart("cuda", work)
    assert done == [here]
