"""The right to save to a folder: one training has it as long as it lives; others are told who that is."""

from __future__ import annotations

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

from made_checkpoints import OWNER
from pipefit.checkpoints import hold as holds
from pipefit.checkpoints.hold import LOCK, Hold, Owner, check_holder, new_owner, process_start
from pipefit.errors import FileError

OTHER = replace(OWNER, training="c" * 32, run="d" * 32, pid=8)


@contextmanager
def another(folder: Path) -> Iterator[tuple[int, Owner]]:
    """Another process that holds a folder, and its owner; it ends with the block."""
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
    """With the training, its plan, its process, its host and when it started; and the folder is free when it ends."""
    with another(tmp_path) as (process, owner):
        said = rf"^another training, {owner.training[:8]} \(a plan of theirs\), process {process} on .+, started "
        said += (
            rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC, "
            rf"saves to {re.escape(str(tmp_path))}: wait until it has ended, or"
        )
        with pytest.raises(FileError, match=said):
            Hold(tmp_path, OWNER)
    Hold(tmp_path, OWNER).release()
    assert list(tmp_path.iterdir()) == []


def test_a_holder_that_is_killed_holds_nothing(tmp_path: Path) -> None:
    """What it leaves is taken over, with another name in it."""
    with another(tmp_path) as (process, _):
        os.kill(process, signal.SIGKILL)
    assert (tmp_path / LOCK).exists()
    hold = Hold(tmp_path, OWNER)
    hold.check()
    assert json.loads((tmp_path / LOCK).read_text()) == asdict(OWNER)
    hold.release()


def test_a_holder_that_stands_still_holds_on(tmp_path: Path) -> None:
    """Stopped by Ctrl-Z, it goes on to save later."""
    with another(tmp_path) as (process, _):
        os.kill(process, signal.SIGSTOP)
        with pytest.raises(FileError, match="another training"):
            Hold(tmp_path, OWNER)
        os.kill(process, signal.SIGCONT)


def test_a_fork_of_a_holder_holds_nothing(tmp_path: Path) -> None:
    """One that outlives it, as a data loader may, keeps nobody from the folder; one that ends leaves it held."""
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


def test_an_object_that_is_not_used_keeps_nobody_of_its_process_out(tmp_path: Path) -> None:
    """A later training takes the folder over; while the first one writes, it is refused."""
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


@pytest.mark.parametrize(
    "put", [os.mkfifo, lambda path: path.symlink_to("/dev/null"), Path.mkdir], ids=["pipe", "link", "folder"]
)
def test_what_is_no_file_is_not_locked(put: Any, tmp_path: Path) -> None:
    """Nothing waits on a pipe, and nothing is written through a link."""
    put(tmp_path / LOCK)
    with pytest.raises(FileError, match=r"training.lock.* (cannot be opened|is not a regular file)"):
        Hold(tmp_path, OWNER)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"run": 1}', b"\xff", b"[" * 100_000, b"{}" * 40_000]
)
def test_a_file_that_names_nobody_is_taken_over(content: bytes, tmp_path: Path) -> None:
    """Whatever somebody has written there: it is the lock that counts."""
    (tmp_path / LOCK).write_bytes(content)
    hold = Hold(tmp_path, OWNER)
    hold.check()
    hold.release()


def no_locks(file: int, how: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_without_locks_the_name_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system that has none: a process of this host that is gone holds nothing; one that is there does, and
    so does one of another host, of which nobody can say; the sentence tells what to remove.
    """
    monkeypatch.setattr(fcntl, "flock", no_locks)
    here = new_owner("a plan")
    for alive in (here, OTHER):
        (tmp_path / LOCK).write_text(json.dumps(asdict(alive)))
        with pytest.raises(
            FileError, match=r"no locks that would say .*: if it has, remove .*training\.lock"
        ):
            Hold(tmp_path, OWNER)
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    (tmp_path / LOCK).write_text(json.dumps(asdict(replace(here, pid=gone.pid))))
    Hold(tmp_path, OWNER).release()
    assert list(tmp_path.iterdir()) == []


def test_locks_that_another_host_does_not_see_are_found_at_the_next_check(tmp_path: Path) -> None:
    """Where locks stay on one machine, the later training writes its name into the file."""
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
    """The file is removed between opening and locking: the lock on what is no longer there counts for nothing."""
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
    """To the second; that of no process is not."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = process_start(process.pid)
        assert started is not None
        assert abs(started - time.time()) < 60
        process.kill()
    assert process_start(process.pid) is None


def test_workers_that_torchrun_starts_again_are_of_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one machine by the process that starts them, whatever name the job has, and of several by that name."""
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
