"""Tasks that come to grief in a worker, and only there: their layers behave while they are profiled."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal

import torch
from torch import Tensor, nn

import asleep
from pipefit.capture import Task

WIDTH = 8


class Untold(KeyboardInterrupt):
    """An exception that cannot be sent to another process, and cannot even print itself; few places catch one."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(lambda: first + second)

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Spot(nn.Linear):
    """A linear layer at which `accident` happens."""

    def __init__(self, accident: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self._accident = accident  # private, as it is no setting of the model

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
            asleep.sleep(1000)
        case "forks":
            os.fork()
        case "falls asleep later":
            asleep.tell()
        case "slow":
            asleep.sleep(1.5)


def make(accident: str = "none", layers: int = 3) -> Task:
    """Layers, and at the end the one with the accident."""
    spots = [Spot(accident if number == layers - 1 else "none") for number in range(layers)]
    return Task(
        nn.Sequential(*spots), batch=make_batch, loss=nn.functional.mse_loss, optimizer=torch.optim.SGD
    )


def make_batch(size: int) -> tuple[Tensor, Tensor]:
    """Noise."""
    return torch.randn(size, WIDTH), torch.randn(size, WIDTH)


def make_nothing() -> Task:
    """Fails before there is a task, in the second worker to come here later than in the first."""
    raise ValueError("no task today\nand more")


def make_late(accident: str) -> Task:
    """Worker 0 takes 1.5 seconds to make its batch, and then comes the accident, at its first layer."""
    spots = [Spot(accident if number == 0 else "none") for number in range(3)]
    return Task(
        nn.Sequential(*spots), batch=_late_batch, loss=nn.functional.mse_loss, optimizer=torch.optim.SGD
    )


def _late_batch(size: int) -> tuple[Tensor, Tensor]:
    if mp.current_process().name == "pipefit-worker-0":
        asleep.sleep(1.5)
    return make_batch(size)


def make_slowly() -> Task:
    """One worker never comes back from here."""
    if mp.current_process().name == "pipefit-worker-1":
        asleep.sleep(1000)
    return make()


def make_talking() -> Task:
    """Prints a word of the environment."""
    print(f"the word is {os.environ.get('PIPEFIT_TEST_WORD')}")
    return make()
