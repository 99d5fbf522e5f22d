"""Whom the parent blames, from what it sees of the workers: no process is started here."""

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
    """A death is a cause before an error, an error before an abort on a GPU, where NCCL aborts those that wait in vain,
    and that before a lost peer; among several of a kind, the earliest.
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
    """Of workers that have been silent for so many seconds, where 3 are allowed; `w` marks those that wait."""
    seen = [
        Sighting(rank=rank, silent_seconds=float(text[-1]), limit_seconds=3.0, waits=text.startswith("w"))
        for rank, text in enumerate(workers.split())
    ]
    assert hanging(seen) == blamed


def test_a_watch_goes_on_while_somebody_looks() -> None:
    """Of the time between two looks a second counts at most: a program that was stopped has not seen the rest."""
    read = iter([5.0, 5.5, 6.0, 1006.0, 1006.25])
    watch = Watch(1.0, lambda: next(read))
    assert [watch.now() for _ in range(4)] == [0.5, 1.0, 2.0, 2.25]


@pytest.mark.parametrize(
    ("code", "starting", "words"),
    [
        (-9, False, "signal 9 (SIGKILL), as the system does when memory runs out"),
        (-11, False, "signal 11 (Segmentation fault)"),
        (3, False, "exited with code 3"),
        (1, True, '__name__ == "__main__"'),
        (1, False, "exited with code 1"),
        (None, False, "did not end"),
    ],
)
def test_a_death_is_described(code: int | None, starting: bool, words: str) -> None:
    """By its signal or exit code; one at the very start is most often a script without a guard."""
    assert words in str(died(code, starting=starting))
