"""Forks: their output arrives, none remains, and a stuck one is given up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from unittest import mock

import pytest

from pipefit import processes
from pipefit.processes import Fork
from support.process_tree import is_running
from test_beside import is_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has forks of this kind")


@pytest.fixture
def impatience() -> Iterator[None]:
    """Treat a fork as stuck after a fifth of a second of sleep."""
    with mock.patch.object(processes, "LOOK_SECONDS", 0.01), mock.patch.object(processes, "LOOKS", 20):
        yield


def test_what_a_fork_answers_is_received() -> None:
    """All answers arrive, even if larger than a pipe's buffer; then none, and the status is known once."""
    answers = [b"0123456789" * 100_000, b"", b"last"]
    fork = Fork(lambda: answers)
    assert [fork.receive() for _ in range(4)] == [*answers, None]
    assert (fork.end(), fork.end(), fork.receive()) == (0, 0, None)


def asleep() -> list[bytes]:
    """Sleep for long."""
    time.sleep(1000)
    return []


def killed() -> list[bytes]:
    """Kill the process that calls it."""
    os.kill(os.getpid(), signal.SIGTERM)
    return []


def test_how_a_fork_has_ended_is_known() -> None:
    """The status is known if the fork ends by its own signal, or by ours, in the middle of its work."""
    fork = Fork(killed)
    assert fork.receive() is None
    assert os.WTERMSIG(fork.end()) == signal.SIGTERM
    assert os.WTERMSIG(Fork(asleep).end()) == signal.SIGKILL


@pytest.mark.usefixtures("impatience")
def test_a_fork_that_waits_for_a_lock_of_a_lost_thread_is_given_up() -> None:
    """The thread that holds the lock does not exist in the fork; `end` terminates it."""
    lock, held, done = threading.Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    try:
        fork = Fork(lambda: [bytes(lock.acquire(timeout=20))])
        with pytest.raises(TimeoutError, match="did not run"):
            fork.receive()
        assert os.WTERMSIG(fork.end()) == signal.SIGKILL
    finally:
        done.set()
        thread.join()


@pytest.mark.usefixtures("impatience")
@pytest.mark.parametrize("does", ["computes", "waits for one that computes"])
def test_a_fork_that_works_is_waited_for(does: str) -> None:
    """A working fork is waited for, however long it takes, also if its own fork works."""

    def compute() -> list[bytes]:
        until = time.process_time() + 0.3
        while time.process_time() < until:
            pass
        return [b"answer"]

    def wait() -> list[bytes]:
        return [Fork(compute).receive() or b""]

    assert Fork(compute if does == "computes" else wait).receive() == b"answer"


@pytest.mark.usefixtures("impatience")
def test_a_fork_that_is_stopped_is_waited_for() -> None:
    """A stopped fork is waited for until the user continues it."""

    def work() -> list[bytes]:
        os.kill(os.getpid(), signal.SIGSTOP)
        return [b"answer"]

    fork = Fork(work)
    later = threading.Timer(0.6, os.kill, (fork._process, signal.SIGCONT))
    later.start()
    assert fork.receive() == b"answer"
    later.join()


_PROGRAM = """
import os, time
from pipefit.processes import Fork

def work():
    yield str(os.getpid()).encode()
    time.sleep(1000)

fork = Fork(work)
print(fork.receive().decode(), flush=True)
fork.receive()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_fork_ends_with_a_process_that_waits_for_it(how: signal.Signals) -> None:
    """A fork ends with its parent, however that ends, without a handler of ours."""
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        fork = int(process.stdout.readline())
        assert is_running(fork)
        process.send_signal(how)
        process.wait(60)
    assert is_gone(fork)
