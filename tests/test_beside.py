"""Work in a second process gives the same results, errors and output, and leaves nothing after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from pipefit.cli import main
from pipefit.processes import beside, forking, forks_left
from support.process_tree import is_running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has forks of this kind")


@pytest.fixture(autouse=True)
def _two_cores() -> Any:
    """Simulate two cores on any machine."""
    with mock.patch("os.sched_getaffinity", return_value={0, 1}):
        yield


def is_gone(process: int) -> bool:
    """Return whether a process ends within a while."""
    deadline = time.monotonic() + 60
    while is_running(process) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(process)


def asleep() -> None:
    """Sleep for long."""
    time.sleep(1000)


def own() -> int:
    """Return the id of the working process."""
    return os.getpid()


def test_works_are_done_in_one_other_process_in_order() -> None:
    """Each work runs once, and its result may be requested again; the process ends with the last one."""
    began = time.monotonic()
    with forking():
        first, second, third = beside(own, time.monotonic, own)
        assert second() >= began
        assert first() == third() == first() != os.getpid()
    assert is_gone(first())


def test_results_of_any_length_wait_until_they_are_asked_for() -> None:
    """Results larger than a pipe's buffer wait too."""
    with forking():
        many, last = beside(lambda: b"0123456789" * 1_000_000, own)
        assert last() != os.getpid()
        assert many() == b"0123456789" * 1_000_000


def test_elsewhere_work_is_put_off() -> None:
    """Outside of `forking`, on one core, for works that must not fork, and in a fork, work runs once, when
    requested.
    """

    def put_off(**how: bool) -> None:
        done = mock.Mock(return_value=1)
        (later,) = beside(done, **how)
        assert not done.called
        assert later() == later() == done.call_count == 1

    put_off()
    with forking():
        put_off(forks=False)
        with mock.patch("os.sched_getaffinity", return_value={0}):
            put_off()
        (nested,) = beside(lambda: (os.getpid(), beside(own)[0]()))
        assert nested()[0] == nested()[1] != os.getpid()
    put_off()


def test_what_a_check_refuses_is_done_here() -> None:
    """The check runs in the fork, before all works, and only there."""
    with forking():
        (refused,) = beside(own, check=lambda: 1 / 0)
        (done,) = beside(own, check=own)
        assert refused() == HERE != done()
    assert beside(own, check=lambda: 1 / 0)[0]() == HERE


def test_there_are_no_more_forks_than_cores() -> None:
    """The limit applies until a fork has ended."""
    with forking():
        two = [beside(own, asleep), beside(own, asleep)]
        assert two[0][0]() != os.getpid() != two[1][0]()
        assert beside(own)[0]() == os.getpid()
        del two[0]
        assert beside(own)[0]() != os.getpid()


@pytest.mark.parametrize("call", ["os.fork", "os.pipe"])
def test_where_no_process_is_to_be_had_work_is_done_here(call: str) -> None:
    """Work runs here if a user or a container has reached its limit of processes or open files."""
    with forking(), mock.patch(call, side_effect=BlockingIOError(11, "Resource temporarily unavailable")):
        (work,) = beside(own)
        assert work() == HERE


def _fails() -> None:
    raise ValueError(f"in {os.getpid()}")


def _prints() -> None:
    print(os.getpid())


def _writes() -> None:
    os.write(2, b"words\n")


def _warns() -> None:
    warnings.warn(f"in {os.getpid()}", UserWarning, stacklevel=1)


def _unpicklable() -> Any:
    process = os.getpid()
    return lambda: process


def _killed() -> None:
    if os.getpid() != HERE:
        os.kill(os.getpid(), signal.SIGKILL)


HERE = os.getpid()


@pytest.mark.parametrize("loud", [_fails, _prints, _writes, _warns, _unpicklable, _killed])
def test_what_is_not_silent_is_done_here(loud: Callable[[], Any], capfd: pytest.CaptureFixture[str]) -> None:
    """Errors, output and warnings appear in this process once, and so does later work. Earlier results are
    used.
    """
    with forking(), warnings.catch_warnings(record=True) as warned:
        before, later, behind = beside(own, loud, own)
        if loud is _fails:
            with pytest.raises(ValueError, match=f"^in {HERE}$"):
                later()
        else:
            found = later()
            assert loud is not _unpicklable or found() == HERE
        assert before() != HERE == behind()
    assert [str(one.message) for one in warned] == ([f"in {HERE}"] if loud is _warns else [])
    said = capfd.readouterr()
    assert said.out == (f"{HERE}\n" if loud is _prints else "")
    assert said.err == ("words\n" if loud is _writes else "")


def test_there_is_a_core_for_each_fork() -> None:
    """Of two cores one remains next to a fork that works, and both after it has ended, whether or not its
    result was taken. Outside of `forking`, and on a single core, forks are forbidden.
    """
    assert forks_left() == 0
    with forking():
        assert forks_left() == 2
        working = beside(own, asleep)
        assert forks_left() == 1
        del working
        (later,) = beside(own)
        deadline = time.monotonic() + 60
        while forks_left() < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert forks_left() == 2
        assert later() != HERE
        with mock.patch("os.sched_getaffinity", return_value={0}):
            assert forks_left() == 0


def test_a_fork_ends_when_nobody_asks_for_it() -> None:
    """A fork ends with its functions, in the middle of its work, without leaving a file."""
    with forking():
        files = len(os.listdir("/proc/self/fd"))
        process, sleeping = beside(own, asleep)
        found = process()
        assert is_running(found)
        del process, sleeping
        assert not is_running(found)
        assert len(os.listdir("/proc/self/fd")) == files


_PROGRAM = """
import os, sys, time
from unittest import mock
from pipefit.processes import beside, forking, forks_left
from pipefit.cli.progress import stoppable

with mock.patch("os.sched_getaffinity", lambda _: {0, 1}), stoppable(at_once=True), forking():
    process, sleeping = beside(os.getpid, lambda: time.sleep(1000))
    print(process(), flush=True)
    if sys.argv[1] == "wait":
        sleeping()
    time.sleep(1000)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("does", ["wait", "work"])
def test_a_fork_ends_with_its_process(how: signal.Signals, does: str) -> None:
    """A fork ends with its process, however that ends, and whether or not it waits for a result."""
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, does], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        fork = int(process.stdout.readline())
        assert is_running(fork)
        process.send_signal(how)
        try:
            process.wait(60)
        finally:
            process.kill()  # who was started with signals ignored does not end by them
    assert is_gone(fork)


def test_only_commands_of_a_process_of_their_own_fork() -> None:
    """The command line called with arguments is a function in the caller's process and does not fork."""
    with mock.patch("os.fork") as fork:
        assert main(["--version"]) == 0
        assert main(["profile", "zoo:mlp", "--microbatch-size", "2", "--target", "cuda"]) == 0
    assert not fork.called
