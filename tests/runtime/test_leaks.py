"""Endings of training during offload: no process, memory, file or folder is left."""

from __future__ import annotations

import multiprocessing as mp
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest

import pipefit
from pipefit.errors import WorkerFailed
from pipefit.lowering import lower
from pipefit.schema.actions import Action, Kind
from pipefit.schema.decisions import Decision, Run, SavedTensors, What
from pipefit.schema.devices import Link, parse_place
from pipefit.schema.plan import Plan
from support.ending_tasks import HOW, make_ending
from support.process_tree import command, descendants, is_running, mappings, open_files
from support.random_offloads import make_chain
from support.small_tasks import plan_of

ROOT = Path(__file__).parents[2]
SECONDS = 300  # for a loaded machine
COPY = 0.01  # seconds of a copy, so that some are always under way
THEIRS = ("pymp-", "torchinductor_")  # multiprocessing's sockets until this process ends; torch's for good


@cache
def plan() -> Plan:
    """Return two workers that lend to each other and move to the host; one also recomputes."""
    still = plan_of(make_chain(), [3, 3], microbatches=3, schedule="gpipe")
    link = Link.between("device0", "device1", "host0", bytes_per_second=512 / COPY)
    moves = [(0, ((1, 0),), "device1*1+host*1"), (1, ((4, 0),), "device0")]
    again = Decision(stage=1, subject=Run(start=3, stop=4), what=What.RECOMPUTE)
    decisions = [
        replace(
            again,
            stage=stage,
            subject=SavedTensors(tensors=tensors),
            what=What.OFFLOAD,
            place=parse_place(place),
            ahead=1,
        )
        for stage, tensors, place in moves
    ]
    return replace(still, cluster=replace(still.cluster, links=(link,)), decisions=(*decisions, again))


def points(device: int) -> list[Action]:
    """Return every action of a device for the middle microbatch, and for none."""
    return [action for action in lower(plan()).actions[device] if action.microbatch in (None, 1)]


# -------------------------------------------------------------------- leftovers


def helpers() -> set[int]:
    """Return multiprocessing's two processes and their folder's remover, which stay."""
    words = ("multiprocessing.forkserver import main", "resource_tracker", "rmtree(sys.argv[1]")
    return {n for n in descendants(os.getpid()) if any(word in command(n) for word in words)}


def nameless(process: int) -> list[str]:
    """Return pipefit's memory files that a process has open or mapped."""
    return [line for line in (*mappings(process), *open_files(process)) if "memfd:pipefit" in line]


def left(folder: Path, shared: set[str], others: set[int]) -> list[str]:
    """Return the leftovers: processes, memory files, named shared memory, files and folders.

    `others` are processes of other tests, such as a browser, which may start more.
    """
    mine = [os.getpid(), *helpers()]
    theirs = others.union(*map(descendants, others)).difference(mine)
    found = [
        f"process {number}"
        for number in descendants(os.getpid())
        if number not in mine and number not in theirs
    ]
    found += [name for process in mine for name in nameless(process)]
    found += sorted(set(os.listdir("/dev/shm")) - shared)
    return found + [path.name for path in folder.iterdir() if not path.name.startswith(THEIRS)]


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check for leftovers after every test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    shared, others = set(os.listdir("/dev/shm")), set(descendants(os.getpid()))
    yield
    assert_nothing_left(tmp_path, shared, others)


def assert_nothing_left(folder: Path, shared: set[str], others: set[int]) -> None:
    """Check that processes are gone at once, and all else soon, because other programs have shared memory
    too.
    """
    assert mp.active_children() == []
    until = time.monotonic() + SECONDS
    while found := left(folder, shared, others):
        assert time.monotonic() < until, found
        time.sleep(0.05)


# -------------------------------------------------------------------- endings


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Restore Ctrl-C's usual effect, which a shell turns off for programs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def train_to_the_end(how: str, device: int, action: str) -> None:
    """Train until the expected end."""
    error = KeyboardInterrupt if how == "interrupted" else WorkerFailed
    with pytest.raises(error) as caught:
        pipefit.train(partial(make_ending, how, device, action), plan(), steps=1000)
    if how != "interrupted":
        assert f"worker {device}" in str(caught.value) and f"at {action}:" in str(caught.value)


@pytest.mark.parametrize(
    ("how", "kind"), [("killed", Kind.RELOAD), ("raises", Kind.BACKWARD), ("interrupted", Kind.OFFLOAD)]
)
def test_whoever_ends_leaves_nothing(how: str, kind: Kind) -> None:
    """A killed or failing worker, or Ctrl-C, during copies to the host and to each other leaves nothing."""
    train_to_the_end(how, 0, str(next(action for action in points(0) if action.kind is kind)))


@pytest.mark.gallery
@pytest.mark.timeout(900)
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("how", HOW)
def test_at_whatever_action_it_ends_nothing_is_left(how: str, device: int, tmp_path: Path) -> None:
    """An end at any action of a microbatch or a step, on any device, leaves nothing."""
    shared, others = set(os.listdir("/dev/shm")), set(descendants(os.getpid()))
    for action in points(device):
        train_to_the_end(how, device, str(action))
        assert_nothing_left(tmp_path, shared, others)


SCRIPT = f"""
import sys
sys.path[:0] = [{str(ROOT / "tests")!r}, {str(Path(__file__).parent)!r}]
import pipefit, test_leaks
from support.random_offloads import make_chain
if __name__ == "__main__":
    plan = test_leaks.plan()
    print("ready", flush=True)
    pipefit.train(make_chain, plan, steps=100000, on_step=lambda report: report.step or print("going", flush=True))
"""


@pytest.mark.parametrize("word", [pytest.param("ready", marks=pytest.mark.gallery), "going"])
def test_a_parent_that_is_killed_leaves_nothing(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed parent leaves no process and no memory, while its fork server still imports torch or in the
    middle of a step: all processes follow it. Only multiprocessing's folder of sockets stays.
    """
    monkeypatch.setattr(tempfile, "tempdir", None)
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="left-"))  # a short path, for sockets
    environment = {
        **os.environ,
        "TMPDIR": str(folder),
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            assert word in iter(lambda: parent.stdout.readline().strip(), "")
            until = time.monotonic() + SECONDS
            while not (started := descendants(parent.pid)) or not list(folder.glob("pymp-*")):
                assert time.monotonic() < until
        finally:
            parent.kill()
    until = time.monotonic() + SECONDS
    while found := [
        *filter(is_running, started),
        *(p.name for p in folder.iterdir() if not p.name.startswith(THEIRS)),
    ]:
        assert time.monotonic() < until, found
        time.sleep(0.05)
    shutil.rmtree(folder)
