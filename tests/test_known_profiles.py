"""Profiles that tests share equal those of the profiler; other tasks or options have other profiles."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from pipefit import profiler
from pipefit.capture import Task
from support.known_profiles import profile
from support.small_tasks import task_of


def test_only_equal_tasks_share_a_profile() -> None:
    """A task made twice has one profile; another width, optimizer, size or number of threads has its own."""

    def perceptron(width: int) -> Task:
        return task_of(lambda: [nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4)])

    known = profile(perceptron(8), microbatch_size=2)
    assert profile(perceptron(8), microbatch_size=2) is known
    assert profile(perceptron(8), microbatch_size=2, threads=1) is known
    assert known == profiler.profile(perceptron(8), microbatch_size=2)
    adam = replace(perceptron(8), optimizer=torch.optim.Adam)
    for task, options in (
        (perceptron(16), {"microbatch_size": 2}),
        (adam, {"microbatch_size": 2}),
        (perceptron(8), {"microbatch_size": 4}),
        (perceptron(8), {"microbatch_size": 2, "threads": 2}),
    ):
        assert profile(task, **options) == profiler.profile(task, **options) != known


def test_an_existing_module_is_profiled_each_time() -> None:
    """Training changes a module."""
    task = replace(task_of(list), module=nn.Sequential(nn.Linear(8, 4)))
    assert profile(task, microbatch_size=2) is not profile(task, microbatch_size=2)
