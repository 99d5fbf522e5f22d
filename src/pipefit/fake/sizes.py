"""The chains of a task over fake tensors, for any number of samples, of which few are traced.

A traced model is captured for the fewest and the most samples that are of interest, one beside the other, and the
chains between are written from these two (`capture.sizes`), where that can be done. A chain by hand is the same for any
number of samples, and is made once. Every chain that is asked for has tensors of its own, unless no layer of it is to
be run: copies of a thousand layers take seconds, of which a survey runs one of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch.fx.config  # noqa: F401 - so that it is there to be changed
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from pipefit.beside import beside
from pipefit.capture.chain import Chain
from pipefit.capture.model import with_batch
from pipefit.capture.sample import Sample, sample
from pipefit.capture.sizes import Family, Sketch
from pipefit.capture.task import Task
from pipefit.errors import UsageError
from pipefit.fake.chain import chain_again, fake_chain
from pipefit.fake.target import FakeTarget
from pipefit.profiles import Target

_MOST = 256  # samples of which a batch is made only to trace the model


class Chains:
    """The chains of `task`. Those between the smallest and the largest of `sizes` are written, if there are some.

    Traces are kept where `sizes` are named, so that none is made twice.
    """

    def __init__(self, task: Task, sizes: Iterable[int] = ()) -> None:
        self.task = task
        self._sizes = sorted(set(sizes))
        self._known = [size for size in self._sizes if size <= _MOST]
        self._traced: dict[int, Chain] = {}
        self._most: Callable[[], Sketch | None] | None = None  # of the largest size
        self._family: Family | None = None
        self._writes = True
        self._tells = False  # lines of code, which a trace takes time for

    def also_for(self, task: Task) -> Chains:
        """The chains of a task that differs from this one's in nothing that a trace sees, such as the optimizer."""
        found = Chains(task, self._sizes)
        found._traced, found._tells = self._traced, self._tells
        return found

    def of(self, samples: int, fake: FakeTarget, like: Sample | None = None) -> Chain:
        """The chain for so many samples, of which `like` is a batch, over tensors of `fake`. Call it inside `fake`."""
        found = self.unrun(samples, fake, like)
        return chain_again(found, fake) if samples in self._traced or self._by_hand is not None else found

    def unrun(self, samples: int, fake: FakeTarget, like: Sample | None = None) -> Chain:
        """The same chain, which may be kept for others: copies of its layers may be run (`layers_again`), they may not.
        Call it inside `fake`.
        """
        if samples not in self._traced and self._by_hand is None:
            self._begin(fake)
            if samples in (self._known[1:] if self._traced.keys() & self._known[:1] else self._known[1:-1]):
                self.family(fake)
        if self._by_hand is not None:
            return with_batch(self._by_hand, *(like or sample(self.task, samples)))
        if samples in self._traced:
            return self._traced[samples]
        family = self._family
        if family is None or not family.few < samples <= family.many:
            return self._trace(samples, fake, like)
        made = chain_again(family.chain, fake)
        family.write(made, samples)
        return made

    @property
    def _by_hand(self) -> Chain | None:
        """The chain, if it is one by hand and was made."""
        return next((chain for chain in self._traced.values() if not chain.traced), None)

    def checked(self, sizes: Iterable[int], fake: FakeTarget) -> Callable[[], bool]:
        """Begin to trace the model with these numbers of samples: a function that tells whether the chains for them
        are those of the traces. Where one is not, all are from then on.

        Call it, and the function, inside `fake`.
        """
        family = self._family
        written = [size for size in sizes if family and family.few < size < family.many and size not in self._traced]
        if family is None or not written:
            return lambda: True
        (checked,) = beside(lambda: all(self._is_written_well(family, size, fake) for size in written))

        def found() -> bool:
            if checked():
                return True
            self._writes, self._family = False, None
            return False

        return found

    def _is_written_well(self, family: Family, samples: int, fake: FakeTarget) -> bool:
        try:
            return family.has(self._trace(samples, fake), samples)
        except UsageError:
            return False

    def family(self, fake: FakeTarget) -> Family | None:
        """The chains that are written, if there are sizes between others, and if that can be done. Call it inside
        `fake`.
        """
        if self._family is None and self._writes and self._known[1:-1]:
            self._begin(fake)
            self._family = self._found(self._known, fake)
            self._writes = self._family is not None
        return self._family

    def _begin(self, fake: FakeTarget) -> None:
        """Begin with the trace of the largest size, of which no more than a sketch is needed to write chains."""
        if self._most is None and self._known[1:-1]:
            (self._most,) = beside(lambda: self._sketched(self._known[-1], fake.target))

    def _found(self, known: Sequence[int], fake: FakeTarget) -> Family | None:
        """The family of the smallest and the largest size. A single sample may be another model than several are."""
        fewest = known[:2] if known[0] == 1 and len(known) > 3 else known[:1]
        return next(filter(None, (self._between(few, known[-1], fake) for few in fewest)), None)

    def _between(self, few: int, many: int, fake: FakeTarget) -> Family | None:
        """The family of two traces; None where there is none, or one of them fails."""
        try:
            if few not in self._traced and self._by_hand is None:
                self._trace(few, fake)
            if self._by_hand is not None:
                return None
            return Family.of(self._traced[few], few, self._most() if self._most else None, many)
        except UsageError:  # whoever asks for this size is told
            return None

    def _sketched(self, samples: int, target: Target) -> Sketch | None:
        """The sketch of a trace over tensors of its own, for it may be made when those of `_begin` are no more."""
        if samples not in self._traced:
            with _disable_current_modes(), FakeTarget(target) as fake:
                self._trace(samples, fake)
        return Sketch.of(self._traced[samples])

    def _trace(self, samples: int, fake: FakeTarget, like: Sample | None = None) -> Chain:
        """The chain of a trace, which is kept where sizes are named."""
        like = like or sample(self.task, samples)
        made = self._quickly(fake, like) or fake_chain(self.task, fake, like)
        if self._sizes:
            self._traced[samples] = made
        return made

    def _quickly(self, fake: FakeTarget, like: Sample) -> Chain | None:
        """The chain without the lines of code of its operations, unless some are told: where a trace is refused, or has
        blocks that could not be divided.
        """
        if self._tells:
            return None
        try:
            with _without_lines():
                made = fake_chain(self.task, fake, like)
        except UsageError:
            made = None
        self._tells = made is None or any(block.undivided for block in made.blocks)
        return None if self._tells else made


def _without_lines() -> AbstractContextManager[Any]:
    """Inside, traces have no lines of code; torch 2.11 cannot leave them out, and takes a quarter longer."""
    if not hasattr(fx.config, "do_not_emit_stack_traces"):
        return nullcontext()
    return mock.patch.object(fx.config, "do_not_emit_stack_traces", True)
