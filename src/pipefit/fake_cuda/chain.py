"""The chain of a task over fake tensors, which have the shapes of the model's tensors but no bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pipefit.capture import (
    Chain,
    ChainLayer,
    Family,
    Sample,
    Sketch,
    Task,
    capture,
    copied,
    copy_of,
    in_mode,
    refuse_module,
    with_batch,
)
from pipefit.capture.sample import sample
from pipefit.errors import UsageError
from pipefit.fake_cuda.target import FakeTarget
from pipefit.processes import beside
from pipefit.schema.layer_costs import Kernel
from pipefit.schema.profile import Measurement, Target
from pipefit.torch_internals import without_dispatch_modes
from pipefit.torch_internals.fake_tensors import DataDependentOutputException
from pipefit.torch_internals.patches import without_code_lines


def fake_chain(
    task: Task, fake: FakeTarget, sample: Sample, *, training: bool = True, target: Target | None = None
) -> Chain:
    """Return the task's chain for microbatches like `sample`, over fake tensors on `fake.device`.

    Call it inside `fake`. An existing module is copied, not changed. `target` is where the chain will run, by
    default that of `fake`.
    """
    return capture(faked(task, fake, training=training), *sample, target=target or fake.target)


def chain_again(chain: Chain, fake: FakeTarget) -> Chain:
    """Return a copy of `chain` with new fake tensors, in a tenth of the time of a new trace.

    No layer of `chain` may have run. Call it inside `fake`.
    """
    return replace(chain, layers=layers_again(chain.layers, fake))


def layers_again(layers: Sequence[ChainLayer], fake: FakeTarget) -> tuple[ChainLayer, ...]:
    """Return copies of layers with new fake tensors. Call it inside `fake`."""
    own = copied(nn.ModuleList(layer.module for layer in layers), fake.again).children()
    return tuple(replace(layer, module=module) for layer, module in zip(layers, own, strict=True))


def faked(task: Task, fake: FakeTarget, *, training: bool = True) -> Task:
    """Return `task` with its module over fake tensors. Call it inside `fake`."""
    module = task.module if isinstance(task.module, nn.Module) else built_without_bytes(task, fake)
    refuse_module(module, task.name)  # before the copy, which does not show everything
    module = copy_of(module, task.name, fake.fake)
    _start_counting(module, fake)
    return replace(task, module=in_mode(module, training))


def built_without_bytes(task: Task, fake: FakeTarget) -> nn.Module:
    """Return the module that the task's factory builds inside `fake`.

    If the factory reads numbers from a tensor, it runs on torch's `meta` device instead.
    """
    try:
        with fake.assuming_nothing():
            return task.build()
    except DataDependentOutputException:
        with without_dispatch_modes(), torch.device("meta"):
            return task.build()


def _start_counting(module: nn.Module, fake: FakeTarget) -> None:
    """Set the batch counts of batch norms without momentum, which read them to average over all batches."""
    for part in module.modules():
        if (
            isinstance(part, nn.modules.batchnorm._NormBase)
            and part.momentum is None
            and part.track_running_stats
        ):
            assert part.num_batches_tracked is not None
            fake.set_value(part.num_batches_tracked, 0)


# ---- Chains of a task for any number of samples, derived from few traces
#
# A traced model is captured for the smallest and the largest number of samples, in parallel, and the chains
# in between are derived from these two (`capture.sizes`) if possible. A chain of written layers is equal for
# any number of samples, and made once. Every requested chain has separate tensors, unless its layers will not
# run: copies of a thousand layers take seconds, and a survey runs one layer of each kind.

_MOST = 256  # samples in a batch that is made only for a trace


class Chains:
    """The chains of `task`. Those between the smallest and the largest of `sizes` are derived, if possible.

    Traces are kept if `sizes` are given, so that none is made twice.
    """

    def __init__(self, task: Task, sizes: Iterable[int] = ()) -> None:
        self.task = task
        self._sizes = sorted(set(sizes))
        self._known = [size for size in self._sizes if size <= _MOST]
        self._traced: dict[int, Chain] = {}
        self._most: Callable[[], Sketch | None] | None = None  # returns the sketch of the largest size
        self._family: Family | None = None
        self._writes = True
        self._compared = set[int]()  # sizes whose derived chains equal their traces
        self._tells = False  # whether traces record lines of code, which takes time
        # Of profiled chains: measurements by samples, with the operations whose results were assumed; and
        # divisions (`tensor_parallel`) by samples, ranks and sequence parallelism
        self.surveyed: dict[int, tuple[Measurement, tuple[Kernel, ...]]] = {}
        self.divided: dict[tuple[int, int, bool], Any] = {}

    def also_for(self, task: Task) -> Chains:
        """Return the chains of a task that differs only in what a trace does not see, such as the
        optimizer.
        """
        result = Chains(task, self._sizes)
        result._traced, result._tells = self._traced, self._tells
        return result

    def of(self, samples: int, fake: FakeTarget, like: Sample | None = None) -> Chain:
        """Return the chain for `samples` samples over tensors of `fake`; `like` is a batch.

        Call it inside `fake`.
        """
        result = self.unrun(samples, fake, like)
        return chain_again(result, fake) if samples in self._traced or self._by_hand is not None else result

    def unrun(self, samples: int, fake: FakeTarget, like: Sample | None = None) -> Chain:
        """Return the chain for this number of samples, which other callers may share. Call it inside `fake`.

        Its layers must not run; copies of them may (`layers_again`).
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
        chain = chain_again(family.chain, fake)
        family.write(chain, samples)
        return chain

    @property
    def _by_hand(self) -> Chain | None:
        """The chain, if it is one of written layers and exists."""
        return next((chain for chain in self._traced.values() if not chain.traced), None)

    def checked(self, sizes: Iterable[int], fake: FakeTarget) -> Callable[[], bool]:
        """Begin to trace the model at these sizes; return a function that compares chains with traces.

        The function returns False if a chain differs from its trace; all chains are traced from then on. Call
        both inside `fake`.
        """
        family = self._family
        known = self._traced.keys() | self._compared
        written = [size for size in sizes if family and family.few < size < family.many and size not in known]
        if family is None or not written:
            return lambda: True
        (checked,) = beside(lambda: all(self._is_written_well(family, size, fake) for size in written))

        def found() -> bool:
            if checked():
                self._compared.update(written)
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
        """Return the derived chains, if sizes in between can be derived. Call it inside `fake`."""
        if self._family is None and self._writes and self._known[1:-1]:
            self._begin(fake)
            self._family = self._found(self._known, fake)
            self._writes = self._family is not None
        return self._family

    def _begin(self, fake: FakeTarget) -> None:
        """Begin to trace the largest size, whose sketch suffices to derive chains."""
        if self._most is None and self._known[1:-1]:
            (self._most,) = beside(lambda: self._sketched(self._known[-1], fake.target))

    def _found(self, known: Sequence[int], fake: FakeTarget) -> Family | None:
        """Return the family of the smallest and the largest size; a single sample may be another model."""
        fewest = known[:2] if known[0] == 1 and len(known) > 3 else known[:1]
        return next(filter(None, (self._between(few, known[-1], fake) for few in fewest)), None)

    def _between(self, few: int, many: int, fake: FakeTarget) -> Family | None:
        """Return the family of two traces; None if there is none, or a trace fails."""
        try:
            if few not in self._traced and self._by_hand is None:
                self._trace(few, fake)
            if self._by_hand is not None:
                return None
            return Family.of(self._traced[few], few, self._most() if self._most else None, many)
        except UsageError:  # a request for this size reports the error
            return None

    def _sketched(self, samples: int, target: Target) -> Sketch | None:
        """Return the sketch of a trace over separate tensors: those of `_begin` may no longer exist."""
        if samples not in self._traced:
            with without_dispatch_modes(), FakeTarget(target) as fake:
                self._trace(samples, fake)
        return Sketch.of(self._traced[samples])

    def _trace(self, samples: int, fake: FakeTarget, like: Sample | None = None) -> Chain:
        """Return the chain of a trace, which is kept if sizes are given."""
        like = like or sample(self.task, samples)
        chain = self._quickly(fake, like) or fake_chain(self.task, fake, like)
        if self._sizes:
            self._traced[samples] = chain
        return chain

    def _quickly(self, fake: FakeTarget, like: Sample) -> Chain | None:
        """Return the chain, traced without lines of code; None if lines are needed.

        They are needed if a trace is refused, or has blocks that could not be divided.
        """
        if self._tells:
            return None
        try:
            with without_code_lines():
                chain = fake_chain(self.task, fake, like)
        except UsageError:
            chain = None
        self._tells = chain is None or any(block.undivided for block in chain.blocks)
        return None if self._tells else chain
