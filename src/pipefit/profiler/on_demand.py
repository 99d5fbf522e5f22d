"""Profiles of a task that are made when a planner asks for one: for the microbatch sizes and numbers of tensor-parallel
ranks among which it chooses.

Of the sizes among which it chooses the smallest and the largest are traced, and chains for those between are written
from these two where that can be done (`pipefit.fake_cuda.chain`). `checked` holds the sizes of a plan against traces.
Sizes that are going to be asked for are profiled beside the first one (`pipefit.processes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

from pipefit.capture.caller import recording
from pipefit.capture.chain import Chain
from pipefit.capture.task import Task
from pipefit.fake_cuda.apart import run_a_backward
from pipefit.fake_cuda.chain import Chains
from pipefit.fake_cuda.target import FakeTarget
from pipefit.processes import beside, forks_left
from pipefit.profiler.coupling import measured_coupling, with_coupling
from pipefit.profiler.fake import Progress, profile_sizes
from pipefit.schema.profile import MOST_THREADS, ModelProfile, Target
from pipefit.schema.validation import whole

T = TypeVar("T")

_MANY = 3  # cores

_Wanted = tuple[int, tuple[int, ...], bool]  # a size of microbatches, numbers of ranks, and whether positions too


class OnDemand:
    """A function that profiles `task`, for every size and numbers of ranks once; arguments are those of `profile`.

    `sizes` are those that may be asked for, as far as they are known; `ahead` says in which order they are going to be.
    `chains` are the task's own, if there are some.
    """

    def __init__(
        self,
        task: Task,
        *,
        target: Target = "cpu",
        threads: int = 1,
        progress: Progress | None = None,
        sizes: Iterable[int] = (),
        ahead: Sequence[int] = (),
        chains: Chains | None = None,
    ) -> None:
        whole("threads", threads, 1, MOST_THREADS)
        self.sizes = tuple(sorted(sizes))
        self.chains = chains or Chains(task, self.sizes)
        self._task, self._target, self._threads, self._progress = task, target, threads, progress
        self._known: dict[_Wanted, ModelProfile] = {}
        self._ahead = () if target == "cpu" else tuple(ahead)
        self._coupling: str | None = None  # what a comparison of microbatches with their halves has found
        self._begun: dict[_Wanted, Callable[[], ModelProfile]] = {}

    def __call__(self, microbatch_size: int, tensor: Sequence[int] = (), *, sequences: bool = False) -> ModelProfile:
        """The profile of layers that are whole, and divided between each of these numbers of ranks; by `sequences`
        along positions too.
        """
        wanted = microbatch_size, tuple(sorted({degree for degree in tensor if degree > 1})), sequences
        if wanted not in self._known:
            self._say("tracing the model")
            with _profiling():
                self._begin(wanted)
                begun = self._begun.pop(wanted, None) or self._first(wanted)
                made = begun()
                if microbatch_size > 1 and self._coupling is None:
                    self._coupling = measured_coupling(self._task, made)
                self._known[wanted] = with_coupling(made, self._coupling or "")
            self._say("searching")
        return self._known[wanted]

    def report_to(self, progress: Progress | None) -> None:
        """Tell `progress` from now on what is done."""
        self._progress = progress

    def _say(self, what: str) -> None:
        """What is done now, which takes nobody knows how long."""
        if self._progress is not None:
            self._progress(0, 0, what)

    def _begin(self, first: _Wanted) -> None:
        """Begin to profile other sizes, beside the first one."""
        others = [(size, *first[1:]) for size in self._ahead if size != first[0]]
        self._ahead = ()
        if others:
            with FakeTarget(self._target) as fake:
                self.chains.family(fake)
            works = (partial(self._made, wanted, None) for wanted in others)
            self._begun = dict(zip(others, profiled_beside(self._target, *works), strict=True))

    def _first(self, wanted: _Wanted) -> Callable[[], ModelProfile]:
        """What makes a profile that is waited for: another process, where there are so many cores that a dry run will
        have some. Torch refuses backwards in all forks of a process that has run one.
        """
        if self._target == "cpu" or forks_left() < _MANY:
            return partial(self._made, wanted, self._progress)
        with FakeTarget(self._target) as fake:
            self.chains.unrun(wanted[0], fake)
        return profiled_beside(self._target, partial(self._made, wanted, None))[0]

    def chain(self) -> Chain:
        """The chain of the smallest size. Costs its trace, and no profile."""
        self._say("tracing the model")
        with _profiling(), FakeTarget(self._target) as fake:
            return self.chains.of(min(self.sizes, default=1), fake)

    def _made(self, wanted: _Wanted, progress: Progress | None) -> ModelProfile:
        size, ranks, sequences = wanted
        return profile_sizes(
            self._task,
            [size],
            target=self._target,
            threads=self._threads,
            tensor=ranks,
            sequences=sequences,
            progress=progress,
            chains=self.chains,
        )

    def checked(self, sizes: Iterable[int] | None = None) -> Callable[[], bool]:
        """Begin to trace the model at these sizes, by default at all that were asked for: a function that tells whether
        it does there what their profiles say.

        Where it does something else at one of them, as a model may that asks how many samples there are, all profiles
        are forgotten, and each is made of a trace from then on.
        """
        self._begun = {}
        wanted = sorted({size for size, *_ in self._known} if sizes is None else set(sizes))
        fake = FakeTarget(self._target)
        with _profiling(), fake:
            checked = self.chains.checked(wanted, fake)

        def found() -> bool:
            with _profiling(), fake:
                as_traced = checked()
            if not as_traced:
                self._known.clear()
            return as_traced

        return found


def profiled_beside(target: Target, *works: Callable[[], T]) -> tuple[Callable[[], T], ...]:
    """Begin with works that profile (`pipefit.processes`). Those for the CPU run kernels, whose threads a fork has
    not.
    """
    return beside(*works, forks=target != "cpu", check=run_a_backward)


@contextmanager
def _profiling() -> Iterator[None]:
    """Inside, errors name what is done, and no random generator of the caller changes."""
    with recording("profiling"), torch.random.fork_rng(devices=[]):
        yield
