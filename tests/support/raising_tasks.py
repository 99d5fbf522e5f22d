"""A task whose code fails in one worker: in the factory, the data, the loss, a pass or the optimizer."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.capture import Task

PHASES = ("factory", "batch", "loss", "forward", "backward", "optimizer", "step")


class Wordless(Exception):
    """An exception that cannot be printed or pickled."""

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def __str__(self) -> str:
        raise RuntimeError("no words")


def _recurse() -> None:
    _recurse()


def _raise(error: BaseException) -> None:
    raise error


HAPPENS: dict[str, Callable[[], object]] = {
    "ValueError: enough": lambda: _raise(ValueError("enough")),
    "ValueError": lambda: _raise(ValueError()),
    "RuntimeError: one line": lambda: _raise(RuntimeError("one line\nand another")),
    "Wordless": lambda: _raise(Wordless()),
    "RecursionError: maximum recursion depth": _recurse,
    "ExceptionGroup: several": lambda: _raise(ExceptionGroup("several", [ValueError(1), TypeError(2)])),
    "BrokenPipeError: [Errno 32]": lambda: _raise(BrokenPipeError(32, "Broken pipe")),
    "OSError: [Errno 24] Too many open files; a process may open": lambda: _raise(
        OSError(24, "Too many open files")
    ),
    "KeyboardInterrupt": lambda: _raise(KeyboardInterrupt()),
    "SystemExit: 0": lambda: sys.exit(0),
    "GeneratorExit": lambda: _raise(GeneratorExit()),
    "BaseExceptionGroup: all": lambda: _raise(
        BaseExceptionGroup("all", [KeyboardInterrupt(), ValueError(1)])
    ),
    "its process exited with code 3": lambda: os._exit(3),
    "its process exited with code 255": lambda: os._exit(255),
    "killed by signal 11 (Segmentation fault)": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "ran out of memory": lambda: _raise(MemoryError()),
    "ran out of memory ": lambda: _raise(
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")
    ),
}


def happen(here: str, phase: str, number: int) -> None:
    """Trigger the accident of this phase in worker 1."""
    if here == phase and mp.current_process().name == "pipefit-worker-1":
        list(HAPPENS.values())[number]()


class _Spot(nn.Linear):
    """A layer with the accident of its passes."""

    def __init__(self, accident: Callable[[str], None]) -> None:
        super().__init__(4, 4)
        self._accident = accident

    def forward(self, values: Tensor) -> Tensor:
        result = super().forward(values)
        self._accident("forward")
        if mp.parent_process() is not None and type(result) is Tensor and result.requires_grad:
            result.register_hook(self._backward)
        return result

    def _backward(self, gradient: Tensor) -> Tensor:
        self._accident("backward")
        return gradient


class _Optimizer(torch.optim.SGD):
    """Plain gradient descent with the accident of its construction and steps."""

    def __init__(self, groups: Any, accident: Callable[[str], None]) -> None:
        accident("optimizer")
        super().__init__(groups, lr=0.1)
        self._accident = accident

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Trigger the accident, then update."""
        self._accident("step")
        return super().step(closure)


def make(phase: str = "none", number: int = 0) -> Task:
    """Build four layers, and an accident in worker 1 only."""
    accident = partial(_happen_at, phase, number)
    accident("factory")

    def batch(size: int) -> tuple[Tensor, Tensor]:
        accident("batch")
        return torch.randn(size, 4), torch.randn(size, 4)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        accident("loss")
        return nn.functional.mse_loss(outputs, targets)

    layers = nn.Sequential(*(_Spot(accident) for _ in range(4)))
    return Task(layers, batch=batch, loss=loss, optimizer=partial(_Optimizer, accident=accident))


def _happen_at(phase: str, number: int, here: str) -> None:
    happen(here, phase, number)
