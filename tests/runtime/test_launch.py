"""Failures of workers: `train` names the one that failed first, in time, without leftovers."""

from __future__ import annotations

import errno
import itertools
import multiprocessing as mp
import os
import platform
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import cache, partial
from multiprocessing.process import BaseProcess
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import pipefit
from pipefit import processes
from pipefit.capture import Task
from pipefit.errors import FileError, LimitMet, OutOfMemory, PipefitError, UsageError, WorkerFailed
from pipefit.processes import adopt_orphans
from pipefit.runtime.launch import launch
from pipefit.runtime.launch.forks import forks, start, tunables
from pipefit.runtime.launch.launch import Watch
from pipefit.runtime.options import Saving, StepReport
from pipefit.schema.plan import Plan
from support import counted_sleep, failing_tasks, network_workers, raising_tasks
from support.process_tree import children, command
from support.separate_process import in_workers

ROOT = Path(__file__).parents[2]
START_SECONDS = 300  # for a loaded machine; a worker needs about four


@cache
def plan_of(layers: int = 3, memory: str = "1MiB", microbatches: int = 4) -> Plan:
    """Return a plan of two stages; the last layer, which fails, is in stage 1."""
    profile = pipefit.profile(failing_tasks.make(layers=layers), microbatch_size=2)
    cluster = pipefit.load_cluster(f"emulated:2x{memory}")
    return pipefit.plan(
        profile, cluster, batch_size=2 * microbatches, planner="uniform", allow_infeasible=True
    )


@pytest.fixture(autouse=True)
def _sleep_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count only the time in which workers sleep: slow workers on a loaded machine have not failed."""
    counted_sleep.counted(monkeypatch, tmp_path / "asleep")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Check after every test that workers are gone, even as zombies, as soon as the fork server has checked."""
    before = set(own_children())
    yield
    assert mp.active_children() == []
    until = time.monotonic() + 60
    while not set(own_children()) <= before and time.monotonic() < until:
        time.sleep(0.01)
    assert set(own_children()) <= before


def own_children() -> list[str]:
    """Return the command lines of this process's and its fork server's children, except multiprocessing's two
    helpers and their folder's remover, which stay.
    """
    mine, server = children(os.getpid()), fork_servers()
    listed = [n for n in mine if n not in server] + [n for process in server for n in children(process)]
    commands = {number: command(number) for number in listed}
    stays = ("resource_tracker", "rmtree(sys.argv[1]")
    return [f"{n} {line}" for n, line in commands.items() if not any(word in line for word in stays)]


def fork_servers() -> list[int]:
    """Return the running fork servers of this process."""
    return [n for n in children(os.getpid()) if "multiprocessing.forkserver import main" in command(n)]


FAILED_FIRST = "worker 1 (device 1, layer 2)"
ACCIDENTS = [
    ("killed", f"{FAILED_FIRST} failed at 1F0: killed by signal 9"),
    ("exits", f"{FAILED_FIRST} failed at 1F0: its process exited with code 3"),
    ("raises", f"{FAILED_FIRST} failed at 1F0: Untold"),
    ("hangs", f"{FAILED_FIRST} hangs at 1F0: no sign of life for 3 s"),
]


@pytest.mark.parametrize(("accident", "sentence"), ACCIDENTS, ids=[name for name, _ in ACCIDENTS])
def test_the_worker_that_failed_first_is_named_and_never_its_neighbour(
    accident: str, sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A worker that is killed, exits, raises an unpicklable error or hangs is named with its position, in
    time.

    The previous worker, which waits for it, is not. Stdout stays ours and stderr holds no traceback.
    """
    plan, began = plan_of(), time.monotonic()
    with pytest.raises(WorkerFailed) as caught:
        pipefit.train(partial(failing_tasks.make, accident), plan, steps=2, timeout_seconds=3)
    assert str(caught.value).startswith(sentence)
    assert time.monotonic() - began < START_SECONDS + 3
    out, err = capfd.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert ("failing_tasks.py" in "".join(getattr(caught.value, "__notes__", ()))) == (accident == "raises")


def test_a_fork_that_goes_on_training_is_ended_by_name() -> None:
    """A module that forks its worker and lets both train on is reported before they interfere."""
    with pytest.raises(UsageError, match=r"^device 1 was forked by a module .* continues training"):
        pipefit.train(partial(failing_tasks.make, "forks"), plan_of(), steps=20)


REPORTS: list[tuple[str, Callable[[], Task], dict[str, Any], type[PipefitError], str]] = [
    (
        "parameters over the cap",
        failing_tasks.make,
        {"memory": "400B"},
        OutOfMemory,
        "device 0 ran out of memory at sett",
    ),
    (
        "peak over the cap",
        failing_tasks.make,
        {"memory": "1500B"},
        OutOfMemory,
        "device 0 ran out of memory at 0",
    ),
    (
        "another model",
        failing_tasks.make,
        {"layers": 4},
        FileError,
        "does not belong to this task: it was made for 4 layers, not 3",
    ),
    (
        "factory raises",
        failing_tasks.make_nothing,
        {},
        WorkerFailed,
        "failed while it started: ValueError: no task today; ",
    ),
]


@pytest.mark.parametrize(
    ("name", "task", "planned", "kind", "sentence"), REPORTS, ids=[name for name, *_ in REPORTS]
)
def test_a_worker_that_reports_is_heard(
    name: str, task: Callable[[], Task], planned: dict[str, Any], kind: type[PipefitError], sentence: str
) -> None:
    """A worker's failure report arrives as an error of that type, in one line."""
    with pytest.raises(kind) as caught:
        pipefit.train(task, plan_of(**planned), steps=1)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_worker_that_never_starts_is_named() -> None:
    """A worker that never starts is named within `start_seconds`, although the other waits for it at the
    rendezvous.
    """
    with pytest.raises(WorkerFailed, match=r"worker 1 .* hangs while it started: no sign of life for 3 s"):
        pipefit.train(failing_tasks.make_slowly, plan_of(), steps=1, start_seconds=3)


def test_waiting_for_a_slow_worker_is_no_failure() -> None:
    """A worker may wait for others longer than `timeout_seconds` if each of their actions takes less."""
    losses, _ = pipefit.train(
        partial(failing_tasks.make_late, "slow"), plan_of(microbatches=1), steps=1, timeout_seconds=2
    )
    assert len(losses) == 1


def test_a_worker_that_waits_is_not_the_one_that_hangs() -> None:
    """A waiting worker is not the hanging one, although it is silent for longer: it waits since the step
    began, for a worker that hangs since later.
    """
    with pytest.raises(WorkerFailed, match=r"^worker 0 \(device 0, .* hangs at 0F0: no sign of life for 2 s"):
        pipefit.train(partial(failing_tasks.make_late, "hangs"), plan_of(), steps=1, timeout_seconds=2)


def test_a_program_that_was_stopped_blames_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program stopped by Ctrl-Z blames no worker: its workers stop with it for any time, and `on_step` may
    take as long; here time passes before every check.
    """
    away = itertools.count(0, 1000)
    monkeypatch.setattr(launch, "Watch", partial(Watch, clock=lambda: time.monotonic() + next(away)))
    losses, _ = pipefit.train(partial(failing_tasks.make_late, "slow"), plan_of(microbatches=1), steps=1)
    assert len(losses) == 1


def test_a_second_interrupt_waits_until_all_is_cleared_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C while the workers are being stopped leaves neither a worker nor a file."""

    def stop(report: StepReport) -> None:
        raise KeyboardInterrupt

    def interrupted(self: BaseProcess, timeout: float | None = None) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.undo()
        self.join(timeout)

    monkeypatch.setattr(BaseProcess, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipefit.train(failing_tasks.make, plan_of(), steps=1000, on_step=stop)


@pytest.mark.parametrize("more", [1, 14])
def test_workers_that_cannot_be_started_are_a_failure_by_name(
    more: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Workers that cannot start for lack of file descriptors are a failure with the reason and the limit to
    raise, and without a traceback of a start that failed halfway. With enough descriptors, the next run
    trains.
    """
    plan, processes = plan_of(), resource.getrlimit(resource.RLIMIT_NOFILE)
    ensure_running()
    files = len(os.listdir("/proc/self/fd")) - 1 + more
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, processes[1]))
    try:
        with pytest.raises(
            WorkerFailed,
            match=rf"^2 workers cannot be started: Too many open files; .*{files} files here \(ulimit -n\)",
        ):
            pipefit.train(failing_tasks.make, plan, steps=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, processes)
    assert "Traceback" not in capfd.readouterr().err
    losses, _ = pipefit.train(failing_tasks.make, plan, steps=1)
    assert len(losses) == 1


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_where_processes_may_share_nothing_the_places_are_named(number: int) -> None:
    """Without shared memory, as in a container with a read-only /dev/shm, the error names the places, since
    more memory or fewer devices would not help.
    """
    failing = mock.patch.object(launch, "Heartbeat", side_effect=OSError(number, os.strerror(number)))
    with (
        failing,
        pytest.raises(WorkerFailed, match=rf"{os.strerror(number)}; processes share semaphores in /dev/shm"),
    ):
        pipefit.train(failing_tasks.make, plan_of(), steps=1)


@pytest.mark.gallery
def test_a_fork_server_that_is_killed_at_a_request_is_replaced() -> None:
    """A fork server that the system kills during a request is replaced, and the training continues."""
    plan = plan_of()
    pipefit.train(failing_tasks.make, plan, steps=1)
    (server,) = fork_servers()
    os.kill(server, signal.SIGSTOP)  # the request gets no answer
    threading.Timer(1, os.kill, (server, signal.SIGKILL)).start()
    losses, _ = pipefit.train(failing_tasks.make, plan, steps=1)
    assert len(losses) == 1
    assert fork_servers() != [server]


@pytest.mark.gallery
@pytest.mark.parametrize("dies", [True, False])
def test_without_the_fork_server_a_worker_ends_as_it_ends(dies: bool) -> None:
    """If the system kills the fork server too, a killed worker's signal is still reported, and a living
    worker trains on.
    """

    def kill(report: StepReport) -> None:
        if report.step == 1:
            (server,) = fork_servers()
            (_, last) = children(server)
            os.kill(server, signal.SIGKILL)
            if dies:
                os.kill(last, signal.SIGKILL)

    plan = plan_of()
    run = partial(pipefit.train, failing_tasks.make, plan, steps=9, on_step=kill)
    if dies:
        with pytest.raises(
            WorkerFailed, match=r"^worker 1 .* killed by signal 9 \(SIGKILL\), usually by the system because"
        ):
            run()
    else:
        assert len(run()[0]) == 9
    pipefit.train(failing_tasks.make, plan, steps=1)  # by another one


def test_orphans_stay_with_this_process_only_while_it_trains() -> None:
    """This process adopts orphans only while it trains, so that it never waits for those of the caller's
    programs.
    """
    before = adopt_orphans(False)
    inside = []
    pipefit.train(
        failing_tasks.make, plan_of(), steps=1, on_step=lambda _: inside.append(adopt_orphans(True))
    )
    assert (before, inside, adopt_orphans(before)) == (False, [True], False)


def test_too_few_processes_and_threads_are_told_before_a_worker_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Too few processes and threads are reported once, with the limit, before a worker starts: workers and
    libraries would fail in many ways.
    """
    started = []

    def start_thread(function: Callable[[], None], arguments: tuple[()]) -> int:
        if len(started) == 5:
            raise RuntimeError("can't start new thread")
        started.append(function)
        return start_new_thread(function, arguments)

    monkeypatch.setattr(launch, "start", lambda *_: pytest.fail("a worker was started"))
    monkeypatch.setattr(processes, "start_new_thread", start_thread)
    monkeypatch.setattr(processes, "_soft", {"RLIMIT_NPROC": 77}.get)
    with pytest.raises(
        WorkerFailed, match=r"^2 workers cannot be started: .*this user may have 77 processes and"
    ):
        pipefit.train(failing_tasks.make, plan_of(), steps=1)
    assert len(started) == 5


def test_a_limit_that_workers_meet_as_they_start_is_named_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """A limit that workers meet at their start is named once, even if training may restart, since it would
    fail again.
    """
    monkeypatch.setattr(processes, "_soft", {"RLIMIT_NOFILE": 7}.get)
    number = next(n for n, what in enumerate(raising_tasks.HAPPENS) if "Too many open files" in what)
    task = partial(raising_tasks.make, "factory", number)
    saving = Saving(directory=str(tmp_path))
    with pytest.raises(LimitMet, match=r"^worker 1 \(.*a process may open \d+ files here .*last saved: none"):
        pipefit.train(task, plan_of(), steps=1, saving=saving, restarts=2)
    monkeypatch.setattr(launch, "start", mock.Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
    with pytest.raises(
        LimitMet, match=r"^worker 0 of 2 cannot be started: .*a process may open 7 files here .*none"
    ):
        pipefit.train(failing_tasks.make, plan_of(), steps=1, saving=saving, restarts=2)
    assert not [warning for warning in recwarn if "restart" in str(warning.message)]


def asks_for_huge_pages() -> bool:
    """Check that the system gives huge pages on request only, and that malloc is glibc's, which can request
    them.
    """
    way, (library, version) = Path("/sys/kernel/mm/transparent_hugepage/enabled"), platform.libc_ver()
    known = library == "glibc" and tuple(map(int, version.split("."))) >= (2, 35)
    return known and way.exists() and "[madvise]" in way.read_text()


@pytest.mark.skipif(not asks_for_huge_pages(), reason="nobody can ask for huge pages here")
def test_workers_ask_for_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers request huge pages: the system reports them for tensor memory, and this process's environment
    is unchanged.
    """
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.perturb=0")
    before = dict(os.environ)
    ours, theirs = forks().Pipe(duplex=False)
    process = forks().Process(target=network_workers.show_memory, args=(theirs,))
    start(process)
    assert dict(os.environ) == before
    assert "hg" in ours.recv()
    process.join()


@pytest.mark.parametrize(
    ("given", "told"),
    [("", "glibc.malloc.hugetlb=1"), ("glibc.malloc.perturb=1", "glibc.malloc.perturb=1:glibc.malloc.hugetlb=1"),
     ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0")],
)  # fmt: skip
def test_what_malloc_is_told_stays_and_has_the_last_word(given: str, told: str) -> None:
    """A user's huge-page setting in glibc's tunables wins; other tunables are kept next to pipefit's."""
    assert tunables(given) == told


def test_a_working_directory_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deleted working directory, in which processes cannot start, is named in the message instead of
    limits.
    """
    plan, gone = plan_of(), tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(
        WorkerFailed, match="the working directory has been removed; change to an existing one"
    ):
        pipefit.train(failing_tasks.make, plan, steps=1)


@pytest.mark.gallery
def test_a_long_path_of_temporary_files_is_no_obstacle(tmp_path: Path) -> None:
    """A TMPDIR longer than a socket's path may be does not prevent training."""
    script, folder = tmp_path / "script.py", tmp_path / ("long" * 30)
    folder.mkdir()
    call = WORK.replace("steps=100000", "steps=1")
    script.write_text(SCRIPT.format(tests=ROOT / "tests", call=f'if __name__ == "__main__":\n    {call}'))
    run = subprocess.run(
        [sys.executable, script],
        env=environment() | {"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, "going\n"), run.stderr


def test_workers_have_the_surroundings_of_the_moment(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Workers have the parent's current environment and standard error, not those of an earlier training; a
    model's prints go to that standard error.
    """
    plan = plan_of()
    for word in ("first", "second"):
        monkeypatch.setenv("PIPEFIT_TEST_WORD", word)
        pipefit.train(failing_tasks.make_talking, plan, steps=1)
        out, err = capfd.readouterr()
        assert (out, err.replace("\n", "")) == ("", f"the word is {word}" * 2)  # two write at once


def test_stopping_leaves_nothing_behind() -> None:
    """A caller's exception, such as Ctrl-C, passes through, and the workers are gone."""

    def stop(report: StepReport) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipefit.train(failing_tasks.make, plan_of(), steps=1000, on_step=stop)


def test_what_cannot_start_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that cannot be pickled, a task instead of a function, and impossible numbers are refused before
    a worker starts.
    """
    plan = plan_of()

    def never(*_: Any) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(launch, "start", never)
    with pytest.raises(UsageError, match="cannot be sent to the workers"):
        pipefit.train(lambda: failing_tasks.make("none"), plan, steps=1)
    with pytest.raises(UsageError, match="not a Task"):
        pipefit.train(failing_tasks.make(), plan, steps=1)  # type: ignore[arg-type]
    for numbers in (
        {"steps": 0},
        {"steps": 1, "timeout_seconds": 0},
        {"steps": 1, "timeout_seconds": float("nan")},
    ):
        with pytest.raises(UsageError, match="must be a "):
            pipefit.train(failing_tasks.make, plan, **numbers)  # type: ignore[arg-type]


def test_what_is_in_no_file_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script from standard input, and a task defined at a prompt, are refused at once, since workers cannot
    read them.
    """
    main = sys.modules["__main__"]
    monkeypatch.setattr(launch, "start", lambda *_: pytest.fail("a worker was started"))
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "__file__", "<stdin>", raising=False)
    with pytest.raises(UsageError, match=r"not in a file \(<stdin>\)"):
        pipefit.train(failing_tasks.make, plan_of(), steps=1)
    monkeypatch.delattr(main, "__file__")

    def typed(name: str) -> Task:
        return failing_tasks.make(name)

    typed.__module__, typed.__qualname__ = "__main__", "typed"
    monkeypatch.setattr(main, "typed", typed, raising=False)
    for task in (partial(typed, "none"), partial(partial(typed), "none")):
        with pytest.raises(UsageError, match=r"not in a file \(a notebook, a prompt or python -c\)"):
            pipefit.train(task, plan_of(), steps=1)


def test_a_process_that_may_start_none_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemonic process of multiprocessing.Pool, which may not start children, is refused with a remedy
    instead of an assertion.
    """
    monkeypatch.setattr(launch, "start", lambda *_: pytest.fail("a worker was started"))
    monkeypatch.setitem(mp.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"daemonic process.*ProcessPoolExecutor"):
        pipefit.train(failing_tasks.make, plan_of(), steps=1)


def test_as_many_workers_as_stages() -> None:
    """A trainer in a group of another size reports the required number of workers."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="2 devices, but the launcher started 1 worker:"):
            pipefit.Trainer(failing_tasks.make(), plan_of())
    finally:
        dist.destroy_process_group()


SCRIPT = """
import pipefit, sys
sys.path.insert(0, "{tests}")
from support import failing_tasks
plan = pipefit.plan(
    pipefit.profile(failing_tasks.make(), microbatch_size=2), pipefit.load_cluster("emulated:1x1MiB"), batch_size=4
)
{call}
"""
WORK = (
    "pipefit.train(failing_tasks.make, plan, steps=100000, "
    'on_step=lambda report: report.step or print("going", flush=True))'
)


@pytest.mark.gallery
def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    """A script without a main guard is explained in the last line, after multiprocessing's message about
    bootstrapping.
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=ROOT / "tests", call=WORK))
    run = subprocess.run(
        [sys.executable, script], env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert "if __name__ == '__main__'" in run.stderr.splitlines()[-1]


def under_torchrun(script: list[str], folder: Path) -> str:
    """Return what a script prints under torchrun with three workers."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    ran = subprocess.run(
        [*torchrun, *script], env=environment(), capture_output=True, text=True, check=True, timeout=300
    )
    return ran.stdout


def in_forks(script: list[str], folder: Path) -> str:
    """Return what a script prints in three workers with torchrun's environment, which need not import torch."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    in_workers(3, _run_as_torchrun_does, script, port, folder)
    return "".join((folder / str(rank)).read_text() for rank in range(3))


def _run_as_torchrun_does(rank: int, script: list[str], port: int, folder: Path) -> None:
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in told.items()}
    sys.argv = script
    with (folder / str(rank)).open("w") as out, redirect_stdout(out):
        runpy.run_path(script[0], run_name="__main__")


@pytest.mark.parametrize(
    "workers", [in_forks, pytest.param(under_torchrun, marks=pytest.mark.gallery)], ids=["forks", "torchrun"]
)
def test_workers_of_torchrun_print_the_losses_of_one_process(
    workers: Callable[[list[str], Path], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """The same script, alone and with a worker for each of three stages, prints the same losses."""
    script = [str(ROOT / "examples" / "train_loop.py"), "--steps", "3"]
    monkeypatch.setattr(sys, "argv", script)
    runpy.run_path(script[0], run_name="__main__")
    alone = capsys.readouterr().out
    assert "step 2: loss " in alone
    assert workers(script, tmp_path) == alone


def environment() -> dict[str, str]:
    """Return the environment of a script that may not find an installed pipefit."""
    path = {"PYTHONPATH": str(ROOT / "src"), "TMPDIR": tempfile.gettempdir()}
    return {**os.environ, **path, "OMP_NUM_THREADS": "1"}
