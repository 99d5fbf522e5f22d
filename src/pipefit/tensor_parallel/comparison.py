"""Comparison of a divided chain's blocks with whole ones: the safety net of graph rewriting.

Each distinct block runs forward and backward, whole and on all ranks, one rank after the other in this
process (`lockstep`). Parameters are drawn, so that none is zero or equal to another; buffers and constants
are the chain's own, and inputs are the outputs of earlier blocks for a batch. Outputs, gradients of inputs
and parameters, and buffers are compared in double precision, whatever the model's, or in the model's own if a
kernel does not support double precision. Every layer is seeded before it runs, as in training, so that whole
and divided layers draw equal masks.

Equal blocks are compared once. A block needs four times the bytes of its parameters in double precision, and
as long as two forwards and backwards of the block; sequences are shortened if that takes too long
(`Shortening`).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise, product
from math import sqrt
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from pipefit.capture import (
    ALLOWED,
    Chain,
    ChainLayer,
    Difference,
    Form,
    GraphLayer,
    MeanDraws,
    UnknownDraw,
    Values,
    as_values,
    copied,
    difference,
    largest,
    module_key,
    passed_on,
    put_back,
    recording,
    seed_torch,
)
from pipefit.errors import PipefitError, UsageError, in_one_line
from pipefit.tensor_parallel.collectives import Collectives
from pipefit.tensor_parallel.forms import assembled
from pipefit.tensor_parallel.operations import flops
from pipefit.tensor_parallel.stage import ShardedChain
from pipefit.tensor_parallel.tracing import blocks_begin
from pipefit.tensor_parallel.writing import tensors_of
from pipefit.texts import counted, first_of
from pipefit.torch_internals import TorchDispatchMode, pytree
from pipefit.units import format_bytes

# ---- Shorter batches for traced layers, so that large layers can be compared cheaply
#
# A traced layer holds sequence lengths as arguments of its operations. A shortened copy has the short batch's
# lengths instead, in whole layers as in divided ones; all other arguments are unchanged. If an equal number
# means something else, the shortened layer fails, or both layers compute something else.

_SHORT, _FEW, _EXPERTS = 8, 2, 8  # positions, samples, and experts of a token at most


@dataclass(frozen=True, kw_only=True)
class Shortening:
    """A way to cut a batch of `samples` samples.

    Sequences of `length` are cut, or without a length the batch is cut to its first samples; or neither.
    Numbers up to `experts` times all tokens count as expert assignments of all tokens. More than one expert
    is tried only if code with one fails, since a width may be a multiple of the length too.
    """

    length: int = 0
    samples: int = 0
    experts: int = 1

    @staticmethod
    def of(values: Values) -> Iterator[Shortening]:
        """Yield the ways to cut batches like these, the most likely first."""
        size = len(values[0])
        lengths = {value.shape[1] for value in values if value.ndim == 2 and not value.is_floating_point()}
        if len(lengths) == 1 and (length := lengths.pop()) > _SHORT:
            yield Shortening(length=length, samples=size)
            yield Shortening(length=length, samples=size, experts=_EXPERTS)
        if size > _FEW:
            yield Shortening(samples=size)

    @property
    def said(self) -> str:
        """Description of the cut, to continue a sentence."""
        if self.length:
            return (
                f", with sequences of {_SHORT} instead of {counted(self.length, 'position')} and without "
                "dropout"
            )
        return f", with {_FEW} instead of {counted(self.samples, 'sample')}" if self.samples else ""

    def cut(self, values: Values, targets: Values) -> tuple[Values, Values]:
        """Return a batch, cut."""
        return tuple(map(self._cut, values)), tuple(map(self._cut, targets))

    def held(self, tensor: Tensor) -> Tensor:
        """Return a buffer or constant, cut in dimensions of the sequence length: code may not slice it."""
        for dim, size in enumerate(tensor.shape):
            if self.length and size == self.length:
                tensor = tensor.narrow(dim, 0, _SHORT)
        return tensor

    def shortened(self, module: nn.Module) -> nn.Module:
        """Return a layer for the short batch with the same tensors; `module` itself if it was not traced."""
        if not self.length or not isinstance(module, GraphLayer):
            return module
        graph_layer = copy.copy(module)
        graph_layer.pipefit_code = module.pipefit_code.with_numbers(self._number)
        return graph_layer

    def _number(self, number: int) -> int:
        """Return what replaces an integer argument of an operation.

        Replaced are numbers of positions of a sequence or of all samples, also one more or less; multiples of
        pairs of positions, as for several heads; and expert assignments of all tokens.
        """
        if number < 0:
            return -self._number(-number)
        for samples, more in product((1, self.samples), (0, 1, -1)):
            if number == samples * (self.length + more):
                return samples * (_SHORT + more)
        pairs, tokens = divmod(number, self.length**2), divmod(number, self.samples * self.length)
        if not pairs[1]:
            return pairs[0] * _SHORT**2
        return tokens[0] * self.samples * _SHORT if not tokens[1] and tokens[0] <= self.experts else number

    def without_draws(self) -> AbstractContextManager[object]:
        """Use means for random draws in the body if they would have other sizes than in the code."""
        return MeanDraws() if self.length else nullcontext()

    def _cut(self, tensor: Tensor) -> Tensor:
        if not self.length:
            return tensor[:_FEW] if self.samples else tensor
        return tensor if tensor.ndim < 2 else torch.stack([self.held(one) for one in tensor])


# ---- One block, run forward and backward, whole and on ranks, with the same drawn parameters

_SMALLEST = 1e-3  # floor of gradients, as a share of a block's largest: smaller ones may be rounding
_PERIOD = 1_000_003  # numbers drawn for a parameter, then repeated: a prime, so no two rows are equal
_WIDER = {torch.complex32: torch.complex128, torch.complex64: torch.complex128}
_WIDER |= dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64)


class Made(NamedTuple):
    """Results of a block: outputs and their form, gradients of inputs and parameters, buffers."""

    values: Values
    form: Form
    incoming: tuple[Tensor | None, ...]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class ComparedBlock:
    """One block, whole and divided, with the same parameters."""

    divided: ShardedChain
    block: range
    targets: Values
    form: Form
    size: Shortening
    is_wide: bool = field(kw_only=True)

    @property
    def allowed(self) -> float:
        """Allowed difference of two numbers, as a share of the largest value."""
        if self.is_wide:
            return ALLOWED[torch.float64]
        own = {p.dtype for n in self.block for p in self.chain.layers[n].module.parameters()}
        return max((ALLOWED[dtype] for dtype in own if dtype in ALLOWED), default=ALLOWED[torch.float32])

    @property
    def chain(self) -> Chain:
        return self.divided.chain

    @property
    def is_last(self) -> bool:
        """True if the loss follows the block."""
        return self.block.stop == len(self.chain.layers)

    @cached_property
    def originals(self) -> list[ChainLayer]:
        """The layers of the whole chain."""
        return list(self.chain.layers[self.block.start : self.block.stop])

    @cached_property
    def own(self) -> list[ChainLayer]:
        """Copies of the original layers, with drawn parameters."""
        generator = torch.Generator().manual_seed(self.block.start)
        modules = nn.ModuleList([layer.module for layer in self.originals])
        made = copied(modules, lambda tensor: self._drawn(tensor, generator)).children()
        return [replace(layer, module=module) for layer, module in zip(self.originals, made, strict=True)]

    @cached_property
    def drawn(self) -> dict[int, Tensor]:
        """The tensors of the copies, by the ids of the originals."""
        pairs = zip(self.originals, self.own, strict=True)
        tensors = (zip(tensors_of(a.module), tensors_of(b.module), strict=True) for a, b in pairs)
        return {id(old): new for both in tensors for (_, old), (_, new) in both}

    def whole(self, values: Values) -> Made:
        """Run the whole block on `values`."""
        made = copied(nn.ModuleList(layer.module for layer in self.own), _once_more).children()
        layers = [replace(layer, module=module) for layer, module in zip(self.own, made, strict=True)]
        return self._run(layers, self._loss, values, self.form)

    def by_ranks(self, values: Values) -> list[Made]:
        """Run the divided block on `values`, on every rank."""
        return in_lockstep(self.divided.ranks, lambda group: self._of_rank(group, values))

    def _of_rank(self, group: Collectives, values: Values) -> Made:
        stage = self.divided.stage
        tensors = stage.tensors(group.rank, self._of_whole)
        *layers, loss = stage.layers(group, (*self.block, self.block.stop), tensors)

        def lost(found: Values, form: Form) -> Tensor:
            if not stage.stage.has_loss:
                return found[0].reshape(())
            short = replace(loss, module=self.size.shortened(loss.module))
            return as_values(short.outputs((*found, *map(self._widened, self.targets))), "the loss")[
                0
            ].reshape(())

        return self._run(layers, lost, values, Form())

    def _of_whole(self, tensor: Tensor) -> Tensor:
        """Return the whole layers' counterpart of a tensor of the model, or of a constant of the trace."""
        known = self.drawn.get(id(tensor))
        return self.size.held(self._widened(tensor)) if known is None else known

    def _loss(self, values: Values, form: Form) -> Tensor:
        criterion: Any = self.chain.criterion
        if isinstance(criterion, nn.Module):
            criterion = copied(criterion, self._widened)
        chain = replace(self.chain, criterion=criterion, packing=form.packing)
        return chain.loss(values, tuple(map(self._widened, self.targets)))

    def _run(
        self, layers: Sequence[ChainLayer], loss: Callable[[Values, Form], Tensor], values: Values, form: Form
    ) -> Made:
        """Run a block forward and backward: the whole layers, or a rank's."""
        given = tuple(self._widened(value).detach().clone() for value in values)
        given = tuple(g.requires_grad_(v.requires_grad) for g, v in zip(given, values, strict=True))
        result = tuple(value.clone() for value in given)  # a layer may change its inputs in place
        with ExitStack() as stack:
            if self.is_wide:
                stack.enter_context(_InDouble())  # type: ignore[no-untyped-call]
            stack.enter_context(self.size.without_draws())
            for number, layer in zip(self.block, layers, strict=True):
                seed_torch(number, target="cpu")
                shortened = replace(
                    layer,
                    module=self.size.shortened(layer.module),
                    packing=form.packing,
                    orders=form.orders,
                )
                is_last = number + 1 == len(self.chain.layers)
                result, form = passed_on(shortened.outputs(result), layer.name, is_last=is_last)
            if self.is_last:
                seed_torch(len(self.chain.layers), target="cpu")
                result = (loss(result, form),)
            _backward(result)
        return Made(
            tuple(value.detach().requires_grad_(value.requires_grad) for value in result),
            form,
            tuple(value.grad for value in given),
            {
                f"{r.name}.{n}": p.grad
                for r in layers
                for n, p in r.module.named_parameters(remove_duplicate=False)
            },
            {f"{r.name}.{n}": b for r in layers for n, b in r.module.named_buffers(remove_duplicate=False)},
        )

    def _drawn(self, tensor: Tensor, generator: torch.Generator) -> Tensor:
        """Return numbers in place of a tensor's, with norm near 1 after a product, otherwise not near
        zero.
        """
        wide = self._widened(tensor)
        if not isinstance(tensor, nn.Parameter):
            return self.size.held(wide).clone()
        if not wide.is_floating_point():
            return wide
        limit = sqrt(3 * tensor.shape[0] / max(tensor.numel(), 1)) if tensor.ndim > 1 else 0.5
        numbers = torch.empty(min(tensor.numel(), _PERIOD), dtype=wide.dtype).uniform_(
            -limit, limit, generator=generator
        )
        numbers = numbers if tensor.ndim > 1 else numbers + 1
        made = wide if wide.is_contiguous() else torch.empty(wide.shape, dtype=wide.dtype)
        for part in torch.split(made.view(-1), _PERIOD):
            part.copy_(numbers[: part.numel()])
        return wide if made is wide else wide.copy_(made)

    def _widened(self, tensor: Tensor) -> Tensor:
        """Return a tensor in separate memory, in double precision if the comparison uses it."""
        wider = _WIDER.get(tensor.dtype, tensor.dtype) if self.is_wide else tensor.dtype
        result = tensor.detach().to(wider)
        return result.clone() if result.data_ptr() == tensor.data_ptr() else result

    # ---------------------------------------------------------------- differences

    def differences(self, whole: Made, ranks: Sequence[Made]) -> Iterator[Difference]:
        """Yield everything that is not bitwise equal."""
        gradients = [g for g in (*whole.gradients.values(), *whole.incoming) if g is not None]
        floor = _SMALLEST * (max(map(largest, gradients), default=0.0) or 1.0)
        what = ["the loss"] if self.is_last else [f"output value {n}" for n in range(len(whole.values))]
        for rank, made in enumerate(ranks):
            of_rank = f"on rank {rank}"
            for name, ours, theirs in zip(what, made.values, whole.values, strict=True):
                yield from difference(f"{name} {of_rank}", theirs, ours, _SMALLEST)
            for n, (own, expected) in enumerate(zip(made.incoming, whole.incoming, strict=True)):
                yield from difference(f"the gradient of input {n} {of_rank}", expected, own, floor)
        for layer in self.originals:
            for local, tensor in tensors_of(layer.module):
                yield from self._of_tensor(f"{layer.name}.{local}", tensor, whole, ranks, floor)

    def _of_tensor(
        self, name: str, tensor: Tensor, whole: Made, ranks: Sequence[Made], floor: float
    ) -> Iterator[Difference]:
        """Yield the differences of a parameter's gradient, or of a buffer, whole or divided."""
        is_parameter = name in whole.gradients
        expected = whole.gradients[name] if is_parameter else whole.buffers[name]
        parts = [(made.gradients if is_parameter else made.buffers)[name] for made in ranks]
        shards = [self.divided.stage.tensors(rank).shard(tensor, name) for rank in range(len(ranks))]
        what = f"the gradient of {name}" if is_parameter else f"the buffer {name}"
        there = [part for part in parts if part is not None]
        if shards[0].dim is None or len(there) < len(parts):
            for rank, own in enumerate(parts):
                yield from difference(f"{what} on rank {rank}", expected, own, floor)
        else:
            yield from difference(what, expected, assembled(shards, there), floor)


def _backward(values: Values) -> None:
    """Run the backward of a block's outputs with drawn gradients, or of a loss."""
    wanted = [value for value in values if value.requires_grad]
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.ones_like(value)
        if value.ndim == 0
        else torch.empty_like(value).uniform_(-1, 1, generator=generator)
        for value in wanted
    ]
    if wanted:
        torch.autograd.backward(wanted, drawn)


def _once_more(tensor: Tensor) -> Tensor:
    """Return a parameter in the same memory with a separate gradient, or a copy of any other tensor."""
    return tensor.detach() if isinstance(tensor, nn.Parameter) else tensor.detach().clone()


class _InDouble(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that replaces requested narrower dtypes by double precision."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(
            torch.dtype, lambda dtype: _WIDER.get(dtype, dtype), (args, kwargs or {})
        )
        return func(*args, **kwargs)


# ---- The comparison

LONGEST_SECONDS = 3.0  # estimated limit for a comparison at full length
_FLOPS = 5e9  # of a core, per second, in double precision
_PASSES, _COPIES = (
    6,
    4,
)  # forward and backward of a block, and its parameters and gradients, both whole and divided


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Result of a comparison: the number of distinct blocks that agree, and their largest difference `apart`.

    `apart` is a share of the largest value. `left_out` is the reason for which blocks could not be compared,
    if any.
    """

    blocks: int = 0
    apart: float = 0.0
    left_out: str = ""


class BlockNotComparable(Exception):
    """A block cannot run whole in the required way."""


def compare_blocks(
    divided: ShardedChain,
    values: Values,
    targets: Values,
    *,
    free_bytes: int,
    longest: float = LONGEST_SECONDS,
) -> Compared:
    """Compare every distinct block of a divided chain with the whole one, for a batch like the traced one.

    Neither the chain nor a random generator changes. `longest` is the limit in seconds for a batch of full
    length, estimated from its operations, above which the batch is shortened.

    Raises:
        UsageError: a divided block computes other numbers than the whole one. The message says which, by how
            much and what to do.
    """
    with put_back(), recording("comparing sharded layers"):
        blocks = _ChainBlocks(divided, free_bytes)
        reason, sizes = "", [Shortening()] if blocks.seconds <= longest else Shortening.of(values)
        for size, is_wide in product(sizes, (True, False)):
            try:
                return blocks.compare(*size.cut(values, targets), size, is_wide=is_wide)
            except BlockNotComparable as error:
                reason = str(error)
    return Compared(
        left_out=reason or f"it would take about {blocks.seconds:.0f} s, and its batches cannot be shortened"
    )


@dataclass(frozen=True)
class _ChainBlocks:
    """The blocks of a divided chain."""

    divided: ShardedChain
    free_bytes: int

    @cached_property
    def ranges(self) -> list[range]:
        """The layers of every block."""
        edges = (0, *blocks_begin(self.chain), len(self.chain.layers))
        return [range(start, stop) for start, stop in pairwise(edges)]

    @cached_property
    def kinds(self) -> list[object]:
        """A key for every block, equal for blocks that compute the same from equal inputs, whole and
        divided.
        """
        return [
            (self._key(block), number in (0, len(self.ranges) - 1))
            for number, block in enumerate(self.ranges)
        ]

    @property
    def chain(self) -> Chain:
        return self.divided.chain

    @property
    def seconds(self) -> float:
        """Estimated seconds to compare all distinct blocks."""
        traced, distinct = self.divided.stage.stage, dict(zip(self.kinds, self.ranges, strict=True)).values()
        layers = {layer for block in distinct for layer in block} | {len(self.chain.layers)}
        work = sum(flops(node) for node, layer in traced.layer_of.items() if layer in layers)
        return _PASSES * work / (_FLOPS * torch.get_num_threads())

    def compare(self, values: Values, targets: Values, size: Shortening, *, is_wide: bool) -> Compared:
        """Compare all distinct blocks for a batch of this size.

        Raises:
            NotComparable: a block cannot run. The message says why.
            UsageError: a block computes other numbers.
        """
        known, apart, form = dict[object, Made](), 0.0, Form(self.chain.layers[0].packing)
        for block, kind in zip(self.ranges, self.kinds, strict=True):
            key = kind, tuple((value.shape, value.dtype, value.requires_grad) for value in values), form
            if key not in known:
                known[key], result = self._compared(block, values, targets, form, size, is_wide=is_wide)
                apart = max(apart, result)
            values, form = known[key].values, known[key].form
        return Compared(blocks=len(known), apart=apart)

    def _compared(
        self, block: range, values: Values, targets: Values, form: Form, size: Shortening, *, is_wide: bool
    ) -> tuple[Made, float]:
        """Return the results of the whole block, and the largest difference of the ranks from them."""
        self._check_room(block)
        one = ComparedBlock(self.divided, block, targets, form, size, is_wide=is_wide)
        try:
            whole = one.whole(values)
            ranks = one.by_ranks(values)
        except UnknownDraw as error:
            raise BlockNotComparable(str(error)) from error
        except PipefitError:
            raise
        except Exception as error:  # a kernel that has no double precision, or none on the CPU
            raise BlockNotComparable(
                f"{self._name(block)} fails on the CPU ({in_one_line(error)})"
            ) from error
        return whole, self._apart(one, whole, ranks)

    def _apart(self, block: ComparedBlock, whole: Made, ranks: Sequence[Made]) -> float:
        """Return the largest difference of the ranks, as a share of the largest value.

        Raises:
            UsageError: the difference is larger than rounding explains.
            NotComparable: the whole block returns no finite numbers.
        """
        if not any(bool(v.isfinite().all()) for v in whole.values if v.is_floating_point()):
            raise BlockNotComparable(f"{self._name(block.block)} has infinite or nan outputs for such inputs")
        result = list(block.differences(whole, ranks))
        if far := [each for each in result if each.apart is None or not each.apart <= block.allowed]:
            raise UsageError(
                f"{self._name(block.block)} of {self.chain.name}, sharded over {self.divided.ranks} "
                "tensor-parallel ranks, computes other numbers than unsharded: "
                f"{first_of(far)} ({block.allowed:.0e} of the largest value is "
                f"allowed{block.size.said}). Training was not started. This is a defect of pipefit; please "
                "report it with the layer. Give its stage one shard (Grid(tensor=1), or --tensor 1 for all "
                "stages), or skip the comparison with numbers=False (train --no-numbers)"
            )
        return max((each.apart or 0.0 for each in result), default=0.0)

    def _check_room(self, block: range) -> None:
        """Check that the host has the memory that a block needs.

        Raises:
            NotComparable: it has not.
        """
        parameters = {id(p): p for n in block for p in self.chain.layers[n].module.parameters()}
        needed = 8 * _COPIES * sum(parameter.numel() for parameter in parameters.values())
        if needed > self.free_bytes:
            raise BlockNotComparable(
                f"{self._name(block)} needs {format_bytes(needed)} on the host, which has "
                f"{format_bytes(self.free_bytes)} free"
            )

    def _name(self, block: range) -> str:
        first, last = (self.chain.layers[n].name for n in (block[0], block[-1]))
        return f"layer {first}" if first == last else f"layers {first} to {last}"

    def _key(self, block: range) -> object:
        layers, codes = self.chain.layers, self.divided.stage.codes
        whole = tuple((module_key(layers[n].module), layers[n].autocast) for n in block)
        return whole, tuple(
            repr([(n.op, n.target, n.args, n.kwargs) for n in codes[k].graph.nodes]) for k in block
        )


# ---- Threads that run one at a time: each has its turn until it waits for another
#
# For code that must stop in the middle of a call, such as a rank inside a layer whose collective waits for
# another rank: the running thread calls `pause`, and continues there at its next turn. Computations follow
# the order of the calls of `advance`. Every thread draws from torch's default generator as if it were the
# only one.


class Abandoned(RuntimeError):
    """This thread waits for a thread that has failed."""


class Turn:
    """A thread that runs `run`, but only while `advance` waits for it."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._thread = threading.Thread(target=self._body, name="pipefit-turn", daemon=True)
        self._go, self._back = (
            threading.Lock(),
            threading.Lock(),
        )  # released to give the turn, and to return it
        self._go.acquire()
        self._back.acquire()
        self._draws = torch.get_rng_state()
        self._failure: BaseException | None = None
        self._runs = self._ended = self._abandoned = False

    def advance(self) -> bool:
        """Give the thread the turn; return whether it has ended when the turn comes back.

        Raises:
            BaseException: whatever `run` raises.
        """
        self._give()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return self._ended

    def abandon(self) -> None:
        """End the thread: the `pause` in which it waits raises `Abandoned`."""
        self._abandoned = True
        if self._runs:  # the caller was interrupted while the thread had the turn
            self._back.acquire()
            self._runs = False
        if self._thread.ident is not None and not self._ended:
            self._give()
        self._failure = None

    def _give(self) -> None:
        """Give the thread the turn, and wait until it comes back.

        The random state is kept here, because it is a large tensor.
        """
        torch.set_rng_state(self._draws)
        self._runs = True
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._go.release()
        self._back.acquire()
        self._runs = False
        self._draws = torch.get_rng_state()
        if self._ended:
            self._thread.join()

    def _body(self) -> None:
        _here.turn = self
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 -- raised again by `advance`
            self._failure = error
        finally:
            self._ended = True
            self._back.release()

    def _pause(self) -> None:
        self._back.release()
        self._go.acquire()
        if self._abandoned:
            raise Abandoned("another thread has failed")


def pause() -> None:
    """Return the turn, and continue at the next one. Call it on the thread of a `Turn`.

    Raises:
        Abandoned: there will be no next turn.
    """
    _here.turn._pause()
    for act in getattr(_here, "acts", ()):
        act()


@contextmanager
def at_each_turn(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` on this thread whenever it continues after a pause in the body.

    Other threads may have changed torch's process-wide state in the meantime.
    """
    before = getattr(_here, "acts", ())
    _here.acts = (*before, act)
    try:
        yield
    finally:
        _here.acts = before


_here = threading.local()


# ---- The group

T = TypeVar("T")
Brought = TypeVar("Brought")


def in_lockstep(ranks: int, run: Callable[[LockstepCollectives], T]) -> list[T]:
    """Return the results of `run` on each rank, all with the caller's random state.

    Raises:
        Exception: whatever `run` raises on the first rank that fails.
    """
    meeting, result = Meeting[Any](ranks), dict[int, T]()

    def of_rank(rank: int) -> None:
        result[rank] = run(LockstepCollectives(rank=rank, size=ranks, group=meeting))

    turns = [Turn(partial(of_rank, rank)) for rank in range(ranks)]
    running = list(turns)
    try:
        while running:
            before = meeting.arrivals, len(running)
            running = [turn for turn in running if not turn.advance()]
            assert (meeting.arrivals, len(running)) != before, "a rank has ended, and others wait for it"
    except BaseException:
        for turn in turns:
            turn.abandon()
        raise
    return [result[rank] for rank in range(ranks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockstepCollectives:
    """A rank's interface to a group in this process."""

    rank: int
    size: int
    group: Meeting[Any]

    def __deepcopy__(self, memo: Any) -> LockstepCollectives:
        return self  # a copy of a layer belongs to the same rank

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.group.meet(self.rank, tensor, _add_up)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        own = tensor.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self.group.meet(self.rank, (own, parts), _hand_out)
        return parts

    def all_to_all(self, tensor: Tensor) -> Tensor:
        result = torch.empty_like(tensor)
        self.group.meet(self.rank, (tensor, result), _exchange)
        return result

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        self.group.meet(self.rank, tensor, partial(_copy_from, source))
        return tensor


class Meeting(Generic[Brought]):
    """A meeting of a group's ranks: each brings an object, and the last to arrive acts on all objects."""

    def __init__(self, size: int) -> None:
        self.arrivals = 0  # arrivals of all ranks so far
        self._size = size
        self._brought: dict[int, Brought] = {}
        self._meetings = 0

    def meet(self, rank: int, brought: Brought, act: Callable[[Sequence[Brought]], None]) -> None:
        """Wait until all ranks have arrived, and `act` has been called on their objects, in rank order."""
        self._brought[rank] = brought
        self.arrivals += 1
        number = self._meetings
        if len(self._brought) == self._size:
            everything = [self._brought[member] for member in range(self._size)]
            self.forget()
            with torch.no_grad():
                act(everything)
        del brought
        while self._meetings == number:
            pause()

    def forget(self) -> None:
        """Drop the objects, after a meeting or a failure."""
        self._brought = {}
        self._meetings += 1


def _add_up(tensors: Sequence[Tensor]) -> None:
    first, *others = tensors
    for other in others:
        first.add_(other)
    for other in others:
        other.copy_(first)


def _hand_out(brought: Sequence[tuple[Tensor, list[Tensor]]]) -> None:
    for _, parts in brought:
        for part, (own, _) in zip(parts, brought, strict=True):
            part.copy_(own)


def _exchange(brought: Sequence[tuple[Tensor, Tensor]]) -> None:
    for rank, (_, result) in enumerate(brought):
        for part, (own, _) in zip(result, brought, strict=True):
            part.copy_(own[rank])


def _copy_from(source: int, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor is not tensors[source]:
            tensor.copy_(tensors[source])
