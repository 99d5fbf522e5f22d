"""Commands that receive a signal.

`python signalled_commands.py SIGNAL SECONDS COMMAND ...` runs a pipefit command that receives the signal after these
seconds. The model `stubborn` sends a signal to its own process in its forward, and swallows the
resulting exception.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress

import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.cli import main, progress

WIDTH = 8


class Stubborn(nn.Linear):
    """A linear layer that ignores all exceptions, as code between Python and C++ sometimes does."""

    def __init__(self, number: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self._number = number  # private: not a setting of the model

    def forward(self, values: Tensor) -> Tensor:
        """Return a result of shape (batch, width)."""
        if self._number:
            with suppress(BaseException):
                os.kill(os.getpid(), self._number)
                time.sleep(0.01)
        return super().forward(values)


def stubborn(number: int = 0, layers: int = 2) -> Task:
    """Build layers that send themselves the signal of that number."""
    return Task(
        nn.Sequential(*(Stubborn(number) for _ in range(layers))),
        batch=lambda size: (torch.randn(size, WIDTH), torch.randn(size, WIDTH)),
        loss=nn.functional.mse_loss,
    )


if __name__ == "__main__":
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a program in the background may have it ignored
    timer = threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.Signals[sys.argv[1]]))
    timer.daemon = True
    timer.start()
    progress.FIRST_SECONDS = 1e6  # no progress lines
    sys.argv[:3] = ["pipefit"]
    sys.exit(main())
