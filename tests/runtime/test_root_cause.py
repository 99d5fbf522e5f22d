"""The parent's choice of the worker to blame, from its observations; no process is started here."""

from __future__ import annotations

import pytest

from pipefit.errors import OutOfMemory, PeerLost, PipefitError, WorkerFailed
from pipefit.runtime.launch.launch import Sighting, Watch, died, hanging, root_cause

LOST, OWN, MEMORY, DEAD = PeerLost("lost"), WorkerFailed("own"), OutOfMemory("full"), died(-9, starting=False)
ABORTED, CRASHED = died(-6, starting=False, on_gpu=True), died(-6, starting=False)


@pytest.mark.parametrize(
    ("failures", "blamed"),
    [
        ([(LOST, 1), (OWN, 2)], 1),
        ([(LOST, 1), (MEMORY, 2)], 1),
        ([(OWN, 2), (MEMORY, 1)], 1),
        ([(LOST, 1), (OWN, 2), (DEAD, 3)], 2),
        ([(DEAD, 2), (DEAD, 1)], 1),
        ([(LOST, 2), (LOST, 1)], 1),
        ([(ABORTED, 1), (OWN, 2)], 1),
        ([(ABORTED, 1), (MEMORY, 2), (LOST, 3)], 1),
        ([(ABORTED, 1), (DEAD, 2)], 1),
        ([(LOST, 1), (ABORTED, 2)], 1),
        ([(OWN, 1), (CRASHED, 2)], 1),
    ],
)
def test_the_failure_that_caused_the_others_is_found(
    failures: list[tuple[PipefitError, float]], blamed: int
) -> None:
    """Causes rank as follows: a death, an error, an abort on a GPU (NCCL aborts waiting ranks), a lost peer;
    ties go to the earliest.
    """
    assert root_cause(dict(enumerate(failures))) == blamed


@pytest.mark.parametrize(
    ("workers", "blamed"),
    [
        ("", None),
        ("1", None),
        ("9", 0),
        ("w9 1", None),  # it waits for one that is slow
        ("w9 w1", None),
        ("w9 4", 1),  # although the one that waits is silent for longer
        ("w4 w9", 1),  # all wait: a message is lost
        ("4 9", 1),
        ("1 w9 4", 2),
    ],
)
def test_the_worker_that_hangs_is_found(workers: str, blamed: int | None) -> None:
    """The hanging worker is found by seconds of silence, with 3 allowed; `w` marks workers that wait for
    others.
    """
    seen = [
        Sighting(rank=rank, silent_seconds=float(text[-1]), limit_seconds=3.0, waits=text.startswith("w"))
        for rank, text in enumerate(workers.split())
    ]
    assert hanging(seen) == blamed


def test_a_watch_goes_on_while_somebody_looks() -> None:
    """At most one second between two polls counts as silence, because a stopped program has not observed the
    rest.
    """
    read = iter([5.0, 5.5, 6.0, 1006.0, 1006.25])
    watch = Watch(1.0, lambda: next(read))
    assert [watch.now() for _ in range(4)] == [0.5, 1.0, 2.0, 2.25]


@pytest.mark.parametrize(
    ("code", "starting", "words"),
    [
        (-9, False, "signal 9 (SIGKILL), usually by the system because memory ran out"),
        (-11, False, "signal 11 (Segmentation fault)"),
        (3, False, "exited with code 3"),
        (1, True, "__name__ == '__main__'"),
        (1, False, "exited with code 1"),
        (None, False, "is still running"),
    ],
)
def test_a_death_is_described(code: int | None, starting: bool, words: str) -> None:
    """A death is described by its signal or exit code; at the start, the usual cause is a script without a
    main guard.
    """
    assert words in str(died(code, starting=starting))
