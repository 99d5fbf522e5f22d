"""Tasks that fail in a worker only: their layers work while they are profiled."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal

import torch
from torch import Tensor, nn

from pipefit.capture import Task
from support import counted_sleep

WIDTH = 8


class Untold(KeyboardInterrupt):
    """An exception that cannot be pickled or printed, and that few handlers catch."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(lambda: first + second)

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Spot(nn.Linear):
    """A linear layer that triggers `accident`."""

    def __init__(self, accident: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self._accident = accident  # private: not a setting of the model

    def forward(self, values: Tensor) -> Tensor:
        if mp.parent_process() is not None:
            _happen(self._accident)
        return super().forward(values)


def _happen(accident: str) -> None:
    match accident:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exits":
            print("this goes to stderr")
            os._exit(3)
        case "raises":
            raise Untold(1, 2)
        case "hangs":
            counted_sleep.sleep(1000)
        case "forks":
            os.fork()
        case "falls asleep later":
            counted_sleep.tell()
        case "slow":
            counted_sleep.sleep(1.5)


def make(accident: str = "none", layers: int = 3) -> Task:
    """Build layers; the last one has the accident."""
    spots = [Spot(accident if number == layers - 1 else "none") for number in range(layers)]
    return Task(
        nn.Sequential(*spots), batch=make_batch, loss=nn.functional.mse_loss, optimizer=torch.optim.SGD
    )


def make_batch(size: int) -> tuple[Tensor, Tensor]:
    """Return noise."""
    return torch.randn(size, WIDTH), torch.randn(size, WIDTH)


def make_nothing() -> Task:
    """Fail before a task exists, in the second worker to arrive (not the first)."""
    raise ValueError("no task today\nand more")


def make_late(accident: str) -> Task:
    """Delay worker 0's batch by 1.5 seconds, then trigger the accident at its first layer."""
    spots = [Spot(accident if number == 0 else "none") for number in range(3)]
    return Task(
        nn.Sequential(*spots), batch=_late_batch, loss=nn.functional.mse_loss, optimizer=torch.optim.SGD
    )


def _late_batch(size: int) -> tuple[Tensor, Tensor]:
    if mp.current_process().name == "pipefit-worker-0":
        counted_sleep.sleep(1.5)
    return make_batch(size)


def make_slowly() -> Task:
    """Block one worker forever."""
    if mp.current_process().name == "pipefit-worker-1":
        counted_sleep.sleep(1000)
    return make()


def make_talking() -> Task:
    """Print a word from the environment."""
    print(f"the word is {os.environ.get('PIPEFIT_TEST_WORD')}")
    return make()
