"""The chain of a task over fake tensors, which have the shapes of the model's tensors but no bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.fx.config
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import _disable_current_modes

from pipefit.capture import capture
from pipefit.capture.chain import Chain, ChainLayer
from pipefit.capture.copying import copied
from pipefit.capture.model import with_batch
from pipefit.capture.refused import copy_of, refuse_module
from pipefit.capture.sample import Sample, in_mode, sample
from pipefit.capture.sizes import Family, Sketch
from pipefit.capture.task import Task
from pipefit.errors import UsageError
from pipefit.fake_cuda.target import FakeTarget
from pipefit.processes import beside
from pipefit.schema.profile import Target


def fake_chain(
    task: Task, fake: FakeTarget, sample: Sample, *, training: bool = True, target: Target | None = None
) -> Chain:
    """The task's chain for microbatches like `sample`, over fake tensors on `fake.device`. Call it inside `fake`.

    An existing module is copied, not changed. `target` is where the chain will run, by default that of `fake`.
    """
    return capture(faked(task, fake, training=training), *sample, target=target or fake.target)


def chain_again(chain: Chain, fake: FakeTarget) -> Chain:
    """`chain`, of which no layer has run, with tensors of its own: as if it were made again, in a tenth of the time.

    Call it inside `fake`.
    """
    return replace(chain, layers=layers_again(chain.layers, fake))


def layers_again(layers: Sequence[ChainLayer], fake: FakeTarget) -> tuple[ChainLayer, ...]:
    """The same of some layers. Call it inside `fake`."""
    own = copied(nn.ModuleList(layer.module for layer in layers), fake.again).children()
    return tuple(replace(layer, module=module) for layer, module in zip(layers, own, strict=True))


def faked(task: Task, fake: FakeTarget, *, training: bool = True) -> Task:
    """`task` with its module over fake tensors. Call it inside `fake`."""
    module = task.module if isinstance(task.module, nn.Module) else built_without_bytes(task, fake)
    refuse_module(module, task.name)  # before it is copied, for a copy does not show all
    module = copy_of(module, task.name, fake.fake)
    _start_counting(module, fake)
    return replace(task, module=in_mode(module, training))


def built_without_bytes(task: Task, fake: FakeTarget) -> nn.Module:
    """The module that the task's factory builds inside `fake`.

    A factory that reads numbers from a tensor builds it on torch's `meta` device instead.
    """
    try:
        with fake.assuming_nothing():
            return task.build()
    except DataDependentOutputException:
        with _disable_current_modes(), torch.device("meta"):
            return task.build()


def _start_counting(module: nn.Module, fake: FakeTarget) -> None:
    """A batch norm without momentum averages over all batches: it reads how many there were."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.momentum is None and part.track_running_stats:
            assert part.num_batches_tracked is not None
            fake.set_value(part.num_batches_tracked, 0)


# ----------------------------------------------------------------------------------------------------
# The chains of a task over fake tensors, for any number of samples, of which few are traced.
#
# A traced model is captured for the fewest and the most samples that are of interest, one beside the other,
# and the chains between are written from these two (`capture.sizes`), where that can be done. A chain by hand
# is the same for any number of samples, and is made once. Every chain that is asked for has tensors of its
# own, unless no layer of it is to be run: copies of a thousand layers take seconds, of which a survey runs
# one of each kind.

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
