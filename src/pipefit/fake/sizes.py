"""The chains of a task over fake tensors, for any number of samples, of which few are traced.

A traced model is captured for the fewest and the most samples that are of interest, and the chains between are written
from these two (`capture.sizes`), where that can be done. Every chain that is asked for has tensors of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from unittest import mock

import torch.fx.config  # noqa: F401 - so that it is there to be changed
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from pipefit.capture.chain import Chain
from pipefit.capture.sample import Sample, sample
from pipefit.capture.sizes import Family
from pipefit.capture.task import Task
from pipefit.errors import UsageError
from pipefit.fake.chain import chain_again, fake_chain
from pipefit.fake.target import FakeTarget

_MOST = 256  # samples of which a batch is made only to trace the model


class Chains:
    """The chains of `task`. Those between the smallest and the largest of `sizes` are written, if there are some.

    Traces are kept where `sizes` are named, so that none is made twice.
    """

    def __init__(self, task: Task, sizes: Iterable[int] = ()) -> None:
        self.task = task
        self._sizes = sorted(set(sizes))
        self._traced: dict[int, Chain] = {}
        self._family: Family | None = None
        self._writes = True

    def also_for(self, task: Task) -> Chains:
        """The chains of a task that differs from this one's in nothing that a trace sees, such as the optimizer."""
        found = Chains(task, self._sizes)
        found._traced = self._traced
        return found

    def of(self, samples: int, fake: FakeTarget, like: Sample | None = None) -> Chain:
        """The chain for so many samples, of which `like` is a batch, over tensors of `fake`. Call it inside `fake`."""
        if samples in self._traced:
            return chain_again(self._traced[samples], fake)
        family = self._family_of(samples, fake)
        if family is None:
            return self._trace(samples, fake, like)
        made = chain_again(family.chain, fake)
        family.write(made, samples)
        return made

    def are_as_traced(self, sizes: Iterable[int], fake: FakeTarget) -> bool:
        """Whether the chains for these numbers of samples are those of traces. Where one is not, all are from now on.

        Call it inside `fake`.
        """
        family = self._family
        written = [size for size in sizes if family and family.few < size < family.many and size not in self._traced]
        if family is None or all(self._is_written_well(family, size, fake) for size in written):
            return True
        self._writes, self._family = False, None
        return False

    def _is_written_well(self, family: Family, samples: int, fake: FakeTarget) -> bool:
        try:
            return family.has(self._trace(samples, fake), samples)
        except UsageError:
            return False

    def _family_of(self, samples: int, fake: FakeTarget) -> Family | None:
        """The family with a chain for so many samples, if there is one."""
        known = [size for size in self._sizes if size <= _MOST]
        if self._family is None and self._writes and samples in known[1:-1]:
            self._family = self._found(known, fake)
            self._writes = self._family is not None
        family = self._family
        return family if family and family.few < samples < family.many else None

    def _found(self, known: Sequence[int], fake: FakeTarget) -> Family | None:
        """The family of the smallest and the largest size. A single sample may be another model than several are."""
        fewest = known[:2] if known[0] == 1 and len(known) > 3 else known[:1]
        return next(filter(None, (self._between(few, known[-1], fake) for few in fewest)), None)

    def _between(self, few: int, many: int, fake: FakeTarget) -> Family | None:
        """The family of two traces; None where there is none, or one of them fails."""
        try:
            for samples in (few, many):
                if samples not in self._traced:
                    self._trace(samples, fake)
            return Family.of(self._traced[few], few, self._traced[many], many)
        except (UsageError, KeyError):  # whoever asks for this size is told; or it is a chain by hand
            return None

    def _trace(self, samples: int, fake: FakeTarget, like: Sample | None = None) -> Chain:
        """The chain of a trace. One that is kept stays as it is, and a copy is returned."""
        if like is None:
            with _disable_current_modes():
                like = sample(self.task, samples)
        made = self._quickly(fake, like) or fake_chain(self.task, fake, like)
        if not (self._sizes and made.traced):
            return made
        self._traced[samples] = made
        return chain_again(made, fake)

    def _quickly(self, fake: FakeTarget, like: Sample) -> Chain | None:
        """The chain without the lines of code of its operations, where another trace has shown that none are told."""
        if not self._traced:
            return None
        try:
            with mock.patch.object(fx.config, "do_not_emit_stack_traces", True):
                made = fake_chain(self.task, fake, like)
        except UsageError:
            return None
        return None if any(block.undivided for block in made.blocks) else made
