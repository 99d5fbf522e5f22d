"""Profiles on demand of a planner, for each microbatch size and number of tensor-parallel ranks.

Of the sizes that the planner chooses from, the smallest and the largest are traced, and chains for sizes in
between are derived from these two if possible (`fake_cuda.chain`). `checked` compares the sizes of a
plan with traces. Sizes that will be needed are profiled in parallel with the first one (`pipefit.processes`).
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

_MANY = 3  # cores, at least, to profile in another process

_Wanted = tuple[int, tuple[int, ...], bool]  # microbatch size, numbers of ranks, sequence parallelism


class OnDemand:
    """A function that profiles `task` once for each combination of size, ranks and `sequences`.

    Arguments are those of `profile`. `sizes` are those that may be needed, if known; `ahead` is the order in
    which they will be. `chains` are the task's existing chains, if any.
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
        self._coupling: str | None = None  # result of comparing microbatches with their halves
        self._begun: dict[_Wanted, Callable[[], ModelProfile]] = {}

    def __call__(self, microbatch_size: int, tensor: Sequence[int] = (), *, sequences: bool = False) -> ModelProfile:
        """Return the profile of whole layers, and of layers divided between each of these numbers of ranks.

        With `sequences`, ranks divide positions too.
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
        """Report progress to `progress` from now on."""
        self._progress = progress

    def _say(self, what: str) -> None:
        """Report the current activity, of unknown duration."""
        if self._progress is not None:
            self._progress(0, 0, what)

    def _begin(self, first: _Wanted) -> None:
        """Begin to profile other sizes in parallel with the first one."""
        others = [(size, *first[1:]) for size in self._ahead if size != first[0]]
        self._ahead = ()
        if others:
            with FakeTarget(self._target) as fake:
                self.chains.family(fake)
            works = (partial(self._made, wanted, None) for wanted in others)
            self._begun = dict(zip(others, profiled_beside(self._target, *works), strict=True))

    def _first(self, wanted: _Wanted) -> Callable[[], ModelProfile]:
        """Return a function that makes an awaited profile, in another process if enough cores are free.

        Torch refuses backwards in all forks of a process that has run one, so this process avoids them.
        """
        if self._target == "cpu" or forks_left() < _MANY:
            return partial(self._made, wanted, self._progress)
        with FakeTarget(self._target) as fake:
            self.chains.unrun(wanted[0], fake)
        return profiled_beside(self._target, partial(self._made, wanted, None))[0]

    def chain(self) -> Chain:
        """Return the chain of the smallest size, at the cost of a trace but no profile."""
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
        """Begin to trace the model at these sizes; return a function that compares traces with profiles.

        By default the sizes are all that have been requested. The function returns False if one differs, as
        for a model that reads its number of samples; then all profiles are dropped, and new ones are made
        from traces.
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
    """Start works that profile in other processes (`pipefit.processes`); works for the CPU do not fork.

    Kernels on the CPU use threads, which a fork does not have.
    """
    return beside(*works, forks=target != "cpu", check=run_a_backward)


@contextmanager
def _profiling() -> Iterator[None]:
    """Name profiling in errors of the body, and restore the caller's random generators."""
    with recording("profiling"), torch.random.fork_rng(devices=[]):
        yield
