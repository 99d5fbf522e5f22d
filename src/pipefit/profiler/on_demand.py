"""Profiles of a task that are made when a planner asks for one: for the microbatch sizes among which it chooses."""

from __future__ import annotations

from collections.abc import Callable

from pipefit.capture.task import Task
from pipefit.profiler import Progress, profile
from pipefit.profiles import ModelProfile, Target


def on_demand(
    task: Task, *, target: Target = "cpu", threads: int = 1, progress: Progress | None = None
) -> Callable[[int], ModelProfile]:
    """A function from a microbatch size to the profile of `task`, each made once; arguments are those of `profile`."""
    known = dict[int, ModelProfile]()

    def at(microbatch_size: int) -> ModelProfile:
        if microbatch_size not in known:
            known[microbatch_size] = profile(
                task, microbatch_size=microbatch_size, target=target, threads=threads, progress=progress
            )
        return known[microbatch_size]

    return at
