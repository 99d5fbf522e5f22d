"""Holds of folders: one live training may save to a folder; the others' errors name it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from pipefit.checkpoints import hold as holds
from pipefit.checkpoints.hold import LOCK, Hold, Owner, check_holder, new_owner, process_start
from pipefit.errors import FileError
from support.synthetic_checkpoints import OWNER

OTHER = replace(OWNER, training="c" * 32, run="d" * 32, pid=8)


@contextmanager
def another(folder: Path) -> Iterator[tuple[int, Owner]]:
    """Start another process that holds a folder until the end of the block; yield it and its owner."""
    told, tell = os.pipe()
    end, ends = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(ends)
        hold = Hold(folder, new_owner("a plan of theirs"))
        os.write(tell, json.dumps(asdict(hold.owner)).encode())
        os.read(end, 1)
        hold.release()
        os._exit(0)
    try:
        yield pid, Owner(**json.loads(os.read(told, 1 << 16)))
    finally:
        for file in (ends, told, tell, end):
            os.close(file)
        os.waitpid(pid, 0)


def test_a_folder_that_is_held_is_refused_by_name(tmp_path: Path) -> None:
    """A held folder is refused with the holder's training, plan, process, host and start time, and is free
    after its end.
    """
    with another(tmp_path) as (process, owner):
        said = rf"^another training, {owner.training[:8]} \(a plan of theirs\), process {process} on .+, started "
        said += (
            rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC, "
            rf"is saving to {re.escape(str(tmp_path))}: wait until it ends, or"
        )
        with pytest.raises(FileError, match=said):
            Hold(tmp_path, OWNER)
    Hold(tmp_path, OWNER).release()
    assert list(tmp_path.iterdir()) == []


def test_a_holder_that_is_killed_holds_nothing(tmp_path: Path) -> None:
    """A killed holder holds nothing: its lock file is taken over with the new holder's name."""
    with another(tmp_path) as (process, _):
        os.kill(process, signal.SIGKILL)
    assert (tmp_path / LOCK).exists()
    hold = Hold(tmp_path, OWNER)
    hold.check()
    assert json.loads((tmp_path / LOCK).read_text()) == asdict(OWNER)
    hold.release()


def test_a_holder_that_stands_still_holds_on(tmp_path: Path) -> None:
    """A holder stopped by Ctrl-Z keeps its folder, so that it can save later."""
    with another(tmp_path) as (process, _):
        os.kill(process, signal.SIGSTOP)
        with pytest.raises(FileError, match="another training"):
            Hold(tmp_path, OWNER)
        os.kill(process, signal.SIGCONT)


def test_a_fork_of_a_holder_holds_nothing(tmp_path: Path) -> None:
    """A holder's fork, as of a data loader, holds nothing: it may outlive the holder, and its end leaves the
    folder held.
    """
    hold = Hold(tmp_path, OWNER)
    if not os.fork():
        os._exit(0 if hold.released else 1)
    assert os.wait()[1] == 0
    hold.check()
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        os.write(tell, b"here")
        time.sleep(30)
        os._exit(0)
    try:
        os.read(told, 4)
        os.close(hold.file)  # as the system does when the holder is killed
        hold._give_up.detach()
        Hold(tmp_path, OTHER).release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_process_that_keeps_the_lock_of_an_ended_holder_is_told(tmp_path: Path) -> None:
    """If a holder has ended but a process that it has started keeps the lock, as a stopped worker or a fork
    by a library does, the error says so: nobody waits for the holder.
    """
    told, tell = os.pipe()
    holder = os.fork()
    if not holder:
        hold = Hold(tmp_path, new_owner("a plan"))
        child = ctypes.CDLL(None).fork()  # without Python's handlers
        if child:
            os.write(tell, str(child).encode())
            os._exit(0)
        while not hold.released:
            time.sleep(1)
    os.waitpid(holder, 0)
    child = int(os.read(told, 16))
    try:
        said = "that process is not found here, but one that it started may hold the folder: fuser .*"
        with pytest.raises(
            FileError, match=rf"process {holder} on .* is saving to .*; {said}{LOCK} names it$"
        ):
            Hold(tmp_path, OWNER)
    finally:
        os.kill(child, signal.SIGKILL)


def test_an_object_that_is_not_used_keeps_nobody_of_its_process_out(tmp_path: Path) -> None:
    """An unused holder does not block a later training of the same process; one that is writing does."""
    first = Hold(tmp_path, OWNER)
    first.busy = True
    with pytest.raises(FileError, match="process 7 on here"):
        Hold(tmp_path, OTHER)
    first.busy = False
    second = Hold(tmp_path, OTHER)
    assert first.released
    second.check()
    with pytest.raises(FileError, match="process 8 on here"):
        check_holder(tmp_path, OWNER)
    second.release()


def other_file(path: Path) -> None:
    """Make a path a second name of a file with a text."""
    (path.parent / "other").write_text("text")
    path.hardlink_to(path.parent / "other")


@pytest.mark.parametrize(
    "put",
    [os.mkfifo, lambda path: path.symlink_to("/dev/null"), Path.mkdir, other_file],
    ids=["pipe", "link", "folder", "hard link"],
)
def test_what_is_no_file_is_not_locked(put: Any, tmp_path: Path) -> None:
    """A pipe or a link in place of the lock file is refused, without a wait or a write."""
    put(tmp_path / LOCK)
    with pytest.raises(
        FileError, match=r"training.lock.* (cannot be opened|is not a regular file|has other names)"
    ):
        Hold(tmp_path, OWNER)
    assert not (tmp_path / "other").exists() or (tmp_path / "other").read_text() == "text"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"run": 1}', b"\xff", b"[" * 100_000, b"{}" * 40_000]
)
def test_a_file_that_names_nobody_is_taken_over(content: bytes, tmp_path: Path) -> None:
    """A lock file with any text, but without a lock, is taken over."""
    (tmp_path / LOCK).write_bytes(content)
    hold = Hold(tmp_path, OWNER)
    hold.check()
    hold.release()


def no_locks(file: int, how: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_without_locks_the_name_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without locks, the name in the file counts.

    A process of this host that has ended holds nothing; a live one does, and so does one of another host,
    which cannot be checked. The error names the file to remove.
    """
    monkeypatch.setattr(fcntl, "flock", no_locks)
    here = new_owner("a plan")
    for alive in (here, OTHER):
        (tmp_path / LOCK).write_text(json.dumps(asdict(alive)))
        with pytest.raises(FileError, match=r"does not support locks .*: if it has, remove .*training\.lock"):
            Hold(tmp_path, OWNER)
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    (tmp_path / LOCK).write_text(json.dumps(asdict(replace(here, pid=gone.pid))))
    Hold(tmp_path, OWNER).release()
    assert list(tmp_path.iterdir()) == []


def test_locks_that_another_host_does_not_see_are_found_at_the_next_check(tmp_path: Path) -> None:
    """If locks do not reach another host, the later training's name is found at the next check."""
    hold = Hold(tmp_path, OWNER)
    (tmp_path / LOCK).write_text(json.dumps(asdict(OTHER)))
    with pytest.raises(FileError, match="process 8 on here"):
        hold.check()
    (tmp_path / LOCK).unlink()
    with pytest.raises(FileError, match="cannot be read any more"):
        hold.check()
    hold.release()


def test_a_holder_that_ends_as_another_opens_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock on a file that its holder has removed between opening and locking does not count."""
    first, usual = Hold(tmp_path, OWNER), holds._opened

    def opened(path: Path) -> int:
        file = usual(path)
        first.release()
        return file

    monkeypatch.setattr(holds, "_opened", opened)
    second = Hold(tmp_path, OTHER)
    monkeypatch.undo()
    second.check()
    second.release()


def test_the_start_of_a_process_is_known() -> None:
    """The start time of a process is known to the second; that of an ended process is unknown."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = process_start(process.pid)
        assert started is not None
        assert abs(started - time.time()) < 60
        process.kill()
    assert process_start(process.pid) is None


def test_a_run_has_the_same_name_if_the_clock_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that torchrun restarts belong to the same run although the clock has been set meanwhile, which
    also changes the time of the system's start.
    """
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    before, usual = new_owner("").run, process_start
    monkeypatch.setattr(holds, "process_start", lambda pid: (usual(pid) or 0.0) + 3600)
    assert new_owner("").run == before


def test_workers_that_torchrun_starts_again_are_of_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarted torchrun workers belong to one run: by their parent process on one machine, by the job's name
    on several.
    """
    runs = [new_owner("").run for _ in range(2)]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    alone: list[Owner] = [new_owner("") for _ in range(2)]
    monkeypatch.setattr(os, "getppid", lambda: 1)
    elsewhere = new_owner("")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(os, "getppid", os.getpid)
    several = new_owner("")
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert len({*runs, alone[0].run, elsewhere.run, several.run}) == 5
    assert alone[0].run == alone[1].run == alone[0].training
    assert new_owner("").run == several.run
