"""Calls in a separate process, such as code for fake GPUs in tests that train on real ones before and after, and
in workers.
"""

from __future__ import annotations

import multiprocessing as mp
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from pipefit.runtime.launch.forks import forks

P, T = ParamSpec("P"), TypeVar("T")


def elsewhere(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Return the result of `function` from a fresh process; arguments and result must be picklable."""
    return _process().submit(function, *arguments, **options).result()


@cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=mp.get_context("spawn"))


def printed(program: str, *arguments: str) -> list[str]:
    """Return the lines that a program prints in a process that has run no backward, so that it can fork."""
    with tempfile.TemporaryDirectory() as folder:
        in_workers(1, _run, program, arguments, sys.path, Path(folder, "printed"))
        return Path(folder, "printed").read_text().splitlines()


def _run(rank: int, program: str, arguments: tuple[str, ...], path: list[str], file: Path) -> None:
    sys.path[:], sys.argv = path, ["-c", *arguments]
    with file.open("w") as out, redirect_stdout(out):
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})


def in_workers(count: int, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in this many processes with their ranks; the fork server has imported torch for all."""
    forks()
    torch.multiprocessing.start_processes(function, arguments, nprocs=count, start_method="forkserver")
