"""Profiles of a task that are made when a planner asks for one: for the microbatch sizes and numbers of tensor-parallel
ranks among which it chooses.

Of the sizes among which it chooses the smallest and the largest are traced, and chains for those between are written
from these two where that can be done (`pipefit.fake.sizes`). `as_traced` holds the sizes of a plan against traces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from pipefit.capture.caller import recording
from pipefit.capture.task import Task
from pipefit.fake.sizes import Chains
from pipefit.fake.target import FakeTarget
from pipefit.profiler.fake import Progress, profile_sizes
from pipefit.profiles import MOST_THREADS, ModelProfile, Target
from pipefit.validation import whole


class OnDemand:
    """A function that profiles `task`, for every size and numbers of ranks once; arguments are those of `profile`.

    `sizes` are those that may be asked for, as far as they are known; `chains` are the task's own, if there are some.
    """

    def __init__(
        self,
        task: Task,
        *,
        target: Target = "cpu",
        threads: int = 1,
        progress: Progress | None = None,
        sizes: Iterable[int] = (),
        chains: Chains | None = None,
    ) -> None:
        whole("threads", threads, 1, MOST_THREADS)
        self.sizes = tuple(sorted(sizes))
        self.chains = chains or Chains(task, self.sizes)
        self._task, self._target, self._threads, self._progress = task, target, threads, progress
        self._known: dict[tuple[int, tuple[int, ...]], ModelProfile] = {}

    def __call__(self, microbatch_size: int, tensor: Sequence[int] = (), /) -> ModelProfile:
        """The profile of layers that are whole, and divided between each of these numbers of ranks."""
        wanted = microbatch_size, tuple(sorted({degree for degree in tensor if degree > 1}))
        if wanted not in self._known:
            self._say("tracing the model")
            with _profiling():
                self._known[wanted] = profile_sizes(
                    self._task,
                    [microbatch_size],
                    target=self._target,
                    threads=self._threads,
                    tensor=wanted[1],
                    progress=self._progress,
                    chains=self.chains,
                )
            self._say("searching")
        return self._known[wanted]

    def _say(self, what: str) -> None:
        """What is done now, which takes nobody knows how long."""
        if self._progress is not None:
            self._progress(0, 0, what)

    def as_traced(self, sizes: Iterable[int] | None = None) -> bool:
        """Whether the model does at these sizes what their profiles say, by default at all that were asked for.

        Where it does something else at one of them, as a model may that asks how many samples there are, all profiles
        are forgotten, and each is made of a trace from now on.
        """
        wanted = sorted({size for size, _ in self._known} if sizes is None else set(sizes))
        with _profiling(), FakeTarget(self._target) as fake:
            found = self.chains.are_as_traced(wanted, fake)
        if not found:
            self._known.clear()
        return found


@contextmanager
def _profiling() -> Iterator[None]:
    """Inside, errors name what is done, and no random generator of the caller changes."""
    with recording("profiling"), torch.random.fork_rng(devices=[]):
        yield
