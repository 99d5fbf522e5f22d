"""Profiles of a task that are made when a planner asks for one: for the microbatch sizes and numbers of tensor-parallel
ranks among which it chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pipefit.capture.task import Task
from pipefit.profiler import Progress, profile
from pipefit.profiles import ModelProfile, Target


class OnDemand(Protocol):
    """A function from a microbatch size, and numbers of tensor-parallel ranks, to a profile that has them."""

    def __call__(self, microbatch_size: int, tensor: Sequence[int] = (), /) -> ModelProfile:
        """The profile of layers that are whole, and divided between each of these numbers of ranks."""


def on_demand(task: Task, *, target: Target = "cpu", threads: int = 1, progress: Progress | None = None) -> OnDemand:
    """A function that profiles `task`, for every size and numbers of ranks once; arguments are those of `profile`."""
    known = dict[tuple[int, tuple[int, ...]], ModelProfile]()

    def at(microbatch_size: int, tensor: Sequence[int] = (), /) -> ModelProfile:
        wanted = microbatch_size, tuple(sorted({degree for degree in tensor if degree > 1}))
        if wanted not in known:
            known[wanted] = profile(
                task,
                microbatch_size=microbatch_size,
                target=target,
                threads=threads,
                tensor=wanted[1],
                progress=progress,
            )
        return known[wanted]

    return at
