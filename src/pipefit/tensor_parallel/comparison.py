"""Compares the blocks of a divided chain with whole ones, on real numbers: the net under every rewriting of a graph.

Each distinct block goes forward and backward, whole and as all ranks have it, one rank after the other in this process
(`lockstep`). Parameters are drawn, so that none is zero or equal to another; buffers and constants are the chain's own,
and inputs are what the blocks before make of a batch. What is handed on, gradients of inputs and parameters, and
buffers are compared: in double precision, whatever the model's, or in the model's own where a kernel has no other.
Every layer is seeded before it runs, as in training, so that whole and divided ones draw equal masks.

Of equal blocks one is compared. A block takes four times the bytes of its parameters, in double precision, and as long
as the block and its backward do twice; sequences are cut short where that is too long (`shortening`).
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product
from math import sqrt
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipefit.capture.caller import recording
from pipefit.capture.chain import Chain, ChainLayer, as_values, module_settings, packing_of
from pipefit.capture.comparison import ALLOWED, Difference, difference, largest
from pipefit.capture.copying import copied
from pipefit.capture.graph_layer import GraphLayer
from pipefit.capture.random_state import put_back, seed_torch
from pipefit.capture.storages import Orders, contiguous, orders_of
from pipefit.capture.structure import Values
from pipefit.errors import PipefitError, UsageError, in_one_line
from pipefit.schema.layer_costs import Packing
from pipefit.tensor_parallel.collectives import Collectives
from pipefit.tensor_parallel.forms import assembled
from pipefit.tensor_parallel.lockstep import in_lockstep
from pipefit.tensor_parallel.operations import flops
from pipefit.tensor_parallel.stage import ShardedChain
from pipefit.tensor_parallel.tracing import blocks_begin
from pipefit.tensor_parallel.writing import tensors_of
from pipefit.texts import counted
from pipefit.units import format_bytes

# ----------------------------------------------------------------------------------------------------
# Shorter batches for layers that were traced for longer ones, so that numbers of large layers can be compared
# cheaply.
#
# A traced layer holds the lengths of its sequences as numbers in its code. In a shortened copy these are
# those of the short batch, in whole layers and in those of ranks alike: all else of the code is as it will
# run. A number that means something else and is the same makes a shortened layer fail, or compute something
# else in both.

_SHORT, _FEW, _EXPERTS = 8, 2, 8  # positions, samples, and most experts of a token


@dataclass(frozen=True, kw_only=True)
class Shortening:
    """A way to cut a batch of so many `samples`: sequences of `length`, or without one to the first few samples; or
    neither. Up to `experts` times all tokens in code are the experts of all tokens: more than one is tried only where
    code with one fails, since a width may be some times the length too.
    """

    length: int = 0
    samples: int = 0
    experts: int = 1

    @staticmethod
    def of(values: Values) -> Iterator[Shortening]:
        """The ways that batches like these have, the most likely first."""
        size = len(values[0])
        lengths = {value.shape[1] for value in values if value.ndim == 2 and not value.is_floating_point()}
        if len(lengths) == 1 and (length := lengths.pop()) > _SHORT:
            yield Shortening(length=length, samples=size)
            yield Shortening(length=length, samples=size, experts=_EXPERTS)
        if size > _FEW:
            yield Shortening(samples=size)

    @property
    def said(self) -> str:
        """What was cut, for a sentence."""
        if self.length:
            return f", with sequences of {_SHORT} instead of {counted(self.length, 'position')} and without dropout"
        return f", with {_FEW} instead of {counted(self.samples, 'sample')}" if self.samples else ""

    def cut(self, values: Values, targets: Values) -> tuple[Values, Values]:
        """A batch, cut."""
        return tuple(map(self._cut, values)), tuple(map(self._cut, targets))

    def held(self, tensor: Tensor) -> Tensor:
        """A buffer or constant, cut where it is as long as sequences: code may use it without a slice."""
        for dim, size in enumerate(tensor.shape):
            if self.length and size == self.length:
                tensor = tensor.narrow(dim, 0, _SHORT)
        return tensor

    def shortened(self, module: nn.Module) -> nn.Module:
        """A layer for the short batch, with the same tensors: itself where it was not traced."""
        if not self.length or not isinstance(module, GraphLayer):
            return module
        made = copy.copy(module)
        code = module.pipefit_code
        made.pipefit_code = code._replace(run=_recompiled(code.text, code.run, self._number))
        return made

    def _number(self, number: int) -> int:
        """What a number of code becomes: one of positions, also one more or less, of a sequence or of all samples; of
        pairs of positions, for so many heads; or of the experts of all tokens.
        """
        for samples, more in product((1, self.samples), (0, 1, -1)):
            if number == samples * (self.length + more):
                return samples * (_SHORT + more)
        pairs, tokens = divmod(number, self.length**2), divmod(number, self.samples * self.length)
        if not pairs[1]:
            return pairs[0] * _SHORT**2
        return tokens[0] * self.samples * _SHORT if not tokens[1] and tokens[0] <= self.experts else number

    def without_draws(self) -> AbstractContextManager[object]:
        """Inside, nothing is dropped, if masks would have other sizes than their code says."""
        return _NothingDropped() if self.length else nullcontext()  # type: ignore[no-untyped-call]

    def _cut(self, tensor: Tensor) -> Tensor:
        if not self.length:
            return tensor[:_FEW] if self.samples else tensor
        return tensor if tensor.ndim < 2 else torch.stack([self.held(one) for one in tensor])


def _recompiled(code: str, run: Callable[..., Any], number: Callable[[int], int]) -> Callable[..., Any]:
    """The function of generated code with other numbers in it."""
    assert isinstance(run, FunctionType)
    tree = ast.fix_missing_locations(_Numbers(number).visit(ast.parse(code)))
    names = dict(run.__globals__)
    exec(compile(tree, "<pipefit short layer>", "exec"), names)  # noqa: S102 -- the text is torch.fx's own
    found: Callable[..., Any] = names["forward"]
    return found


class _Numbers(ast.NodeTransformer):
    """Replaces whole numbers."""

    def __init__(self, number: Callable[[int], int]) -> None:
        self._number = number

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        is_whole = isinstance(node.value, int) and not isinstance(node.value, bool)
        return ast.Constant(self._number(node.value)) if is_whole else node  # type: ignore[arg-type]


class _NothingDropped(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Masks of dropout have their mean everywhere, which is as good as a probability of zero."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bernoulli_.float:
            mask, kept = args[0], args[1] if len(args) > 1 else (kwargs or {}).get("p", 0.5)
            return mask.fill_(kept)
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        return func(*args, **(kwargs or {}))


# ----------------------------------------------------------------------------------------------------
# One block of a divided chain, run forward and backward whole and as ranks have it, with the same drawn
# parameters.

_SMALLEST = 1e-3  # smaller gradients, as a share of a block's largest, count as that large: they may be rounding alone
_PERIOD = 1_000_003  # numbers that are drawn for a parameter, and then repeated: a prime, so that no two rows are equal
_WIDER = {torch.complex32: torch.complex128, torch.complex64: torch.complex128}
_WIDER |= dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64)


class Form(NamedTuple):
    """How values cross to the next layer."""

    packing: Packing = "bare"
    orders: Orders = ()


class Made(NamedTuple):
    """What a run of a block made: what it hands on, and in which form; gradients of its inputs, and by local names of
    its layers' parameters; and buffers.
    """

    values: Values
    form: Form
    incoming: tuple[Tensor | None, ...]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class Block:
    """One block, whole and divided, with the same parameters."""

    divided: ShardedChain
    block: range
    targets: Values
    form: Form
    size: Shortening
    is_wide: bool = field(kw_only=True)

    @property
    def allowed(self) -> float:
        """By which part of the largest value two numbers may be apart."""
        if self.is_wide:
            return ALLOWED[torch.float64]
        own = {p.dtype for n in self.block for p in self.chain.layers[n].module.parameters()}
        return max((ALLOWED[dtype] for dtype in own if dtype in ALLOWED), default=ALLOWED[torch.float32])

    @property
    def chain(self) -> Chain:
        return self.divided.chain

    @property
    def is_last(self) -> bool:
        """Whether the loss stands behind the block."""
        return self.block.stop == len(self.chain.layers)

    @cached_property
    def originals(self) -> list[ChainLayer]:
        """The layers of the whole chain."""
        return list(self.chain.layers[self.block.start : self.block.stop])

    @cached_property
    def own(self) -> list[ChainLayer]:
        """Copies of them, with parameters that are drawn; with the loss, where that is a module."""
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
        """What the whole block makes of values."""
        made = copied(nn.ModuleList(layer.module for layer in self.own), _once_more).children()
        layers = [replace(layer, module=module) for layer, module in zip(self.own, made, strict=True)]
        return self._run(layers, self._loss, values, self.form)

    def by_ranks(self, values: Values) -> list[Made]:
        """What every rank makes of them."""
        return in_lockstep(self.divided.ranks, lambda group: self._of_rank(group, values))

    def _of_rank(self, group: Collectives, values: Values) -> Made:
        stage = self.divided.stage
        tensors = stage.tensors(group.rank, self._of_whole)
        *layers, loss = stage.layers(group, (*self.block, self.block.stop), tensors)

        def lost(found: Values, form: Form) -> Tensor:
            if not stage.stage.has_loss:
                return found[0].reshape(())
            short = replace(loss, module=self.size.shortened(loss.module))
            return as_values(short.outputs((*found, *map(self._widened, self.targets))), "the loss")[0].reshape(())

        return self._run(layers, lost, values, Form())

    def _of_whole(self, tensor: Tensor) -> Tensor:
        """What whole layers have in the place of a tensor of the model, or of a constant of the trace."""
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
        """Forward and backward of a block, or of the ranks' end of it."""
        given = tuple(self._widened(value).detach().clone() for value in values)
        given = tuple(g.requires_grad_(v.requires_grad) for g, v in zip(given, values, strict=True))
        found = tuple(value.clone() for value in given)  # a layer may change what it is given in place
        with ExitStack() as stack:
            for mode in self._modes():
                stack.enter_context(mode)
            for number, layer in zip(self.block, layers, strict=True):
                seed_torch(number, target="cpu")
                is_end = number + 1 == len(self.chain.layers)
                shortened = replace(layer, module=self.size.shortened(layer.module))
                found, form = _through(shortened, found, form, is_end=is_end)
            if self.is_last:
                seed_torch(len(self.chain.layers), target="cpu")
                found = (loss(found, form),)
            _backward(found)
        return Made(
            tuple(value.detach().requires_grad_(value.requires_grad) for value in found),
            form,
            tuple(value.grad for value in given),
            {f"{r.name}.{n}": p.grad for r in layers for n, p in r.module.named_parameters(remove_duplicate=False)},
            {f"{r.name}.{n}": b for r in layers for n, b in r.module.named_buffers(remove_duplicate=False)},
        )

    def _modes(self) -> Iterator[AbstractContextManager[object]]:
        yield _InDouble() if self.is_wide else nullcontext()  # type: ignore[no-untyped-call]
        yield self.size.without_draws()

    def _drawn(self, tensor: Tensor, generator: torch.Generator) -> Tensor:
        """Numbers in the place of a parameter's: with a norm near 1 behind a product, and none near zero otherwise."""
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
        """A tensor in double precision, if numbers are compared in it; in memory of its own."""
        wider = _WIDER.get(tensor.dtype, tensor.dtype) if self.is_wide else tensor.dtype
        found = tensor.detach().to(wider)
        return found.clone() if found.data_ptr() == tensor.data_ptr() else found

    # ---------------------------------------------------------------- what differs

    def differences(self, whole: Made, ranks: Sequence[Made]) -> Iterator[Difference]:
        """Everything that is not equal bit by bit."""
        gradients = [g for g in (*whole.gradients.values(), *whole.incoming) if g is not None]
        floor = _SMALLEST * (max(map(largest, gradients), default=0.0) or 1.0)
        what = ["the loss"] if self.is_last else [f"value {n} that it hands on" for n in range(len(whole.values))]
        for rank, one in enumerate(ranks):
            of_rank = f"on rank {rank}"
            for name, ours, theirs in zip(what, one.values, whole.values, strict=True):
                yield from difference(f"{name} {of_rank}", theirs, ours, _SMALLEST)
            for n, (own, expected) in enumerate(zip(one.incoming, whole.incoming, strict=True)):
                yield from difference(f"the gradient of input {n} {of_rank}", expected, own, floor)
        for layer in self.originals:
            for local, tensor in tensors_of(layer.module):
                yield from self._of_tensor(f"{layer.name}.{local}", tensor, whole, ranks, floor)

    def _of_tensor(
        self, name: str, tensor: Tensor, whole: Made, ranks: Sequence[Made], floor: float
    ) -> Iterator[Difference]:
        """How the gradient of a parameter differs, or a buffer, of which ranks may have parts."""
        is_parameter = name in whole.gradients
        expected = whole.gradients[name] if is_parameter else whole.buffers[name]
        parts = [(one.gradients if is_parameter else one.buffers)[name] for one in ranks]
        shards = [self.divided.stage.tensors(rank).shard(tensor, name) for rank in range(len(ranks))]
        what = f"the gradient of {name}" if is_parameter else f"the buffer {name}"
        there = [part for part in parts if part is not None]
        if shards[0].dim is None or len(there) < len(parts):
            for rank, own in enumerate(parts):
                yield from difference(f"{what} on rank {rank}", expected, own, floor)
        else:
            yield from difference(what, expected, assembled(shards, there), floor)


def _through(layer: ChainLayer, values: Values, form: Form, *, is_end: bool) -> tuple[Values, Form]:
    """What a layer hands on, and how; the last one as it makes it."""
    outputs = replace(layer, packing=form.packing, orders=form.orders).outputs(values)
    found = as_values(outputs, layer.name)
    form = Form(packing_of(outputs), () if is_end else orders_of(found))
    return found if is_end else contiguous(found, form.orders), form


def _backward(values: Values) -> None:
    """The backward of what a block hands on, with gradients that are drawn; or of a loss."""
    wanted = [value for value in values if value.requires_grad]
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.ones_like(value) if value.ndim == 0 else torch.empty_like(value).uniform_(-1, 1, generator=generator)
        for value in wanted
    ]
    if wanted:
        torch.autograd.backward(wanted, drawn)


def _once_more(tensor: Tensor) -> Tensor:
    """A parameter in the same memory, with a gradient of its own; a copy of all else, which a forward may change."""
    return tensor.detach() if isinstance(tensor, nn.Parameter) else tensor.detach().clone()


class _InDouble(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is asked for in a narrower type is made in double precision."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(torch.dtype, lambda dtype: _WIDER.get(dtype, dtype), (args, kwargs or {}))
        return func(*args, **kwargs)


# ----------------------------------------------------------------------------------------------------

LONGEST_SECONDS = 3.0  # that are guessed for a comparison at full length
_FLOPS = 5e9  # of a core, in a second, in double precision
_PASSES, _COPIES = 6, 4  # forward and backward of a block, whole and divided; its parameters and gradients, both ways
_TOLD = 3  # differences that are printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What a comparison found: how many distinct blocks agree, at most by which part of the largest value two numbers
    are `apart`, and, where blocks could not be compared, why not.
    """

    blocks: int = 0
    apart: float = 0.0
    left_out: str = ""


class NotComparable(Exception):
    """A block cannot be run, whole, as it would have to be."""


def compare_blocks(
    divided: ShardedChain, values: Values, targets: Values, *, free_bytes: int, longest: float = LONGEST_SECONDS
) -> Compared:
    """Compare every distinct block of a divided chain with the whole one, for a batch like that it was divided for.

    Neither the chain nor a random generator changes. `longest` are the seconds that a batch of full length may take, by
    a guess from its operations, before it is cut short.

    Raises:
        UsageError: a block of ranks computes other numbers than the whole one; says which, by how much and what to do.
    """
    with put_back(), recording("comparing divided layers"):
        blocks = _Blocks(divided, free_bytes)
        reason, sizes = "", [Shortening()] if blocks.seconds <= longest else Shortening.of(values)
        for size, is_wide in product(sizes, (True, False)):
            try:
                return blocks.compare(*size.cut(values, targets), size, is_wide=is_wide)
            except NotComparable as error:
                reason = str(error)
    return Compared(
        left_out=reason or f"it would take about {blocks.seconds:.0f} s, and its batches cannot be cut short"
    )


@dataclass(frozen=True)
class _Blocks:
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
        """Of every block what is equal where two do the same to equal inputs, whole and divided."""
        return [(self._key(block), number in (0, len(self.ranges) - 1)) for number, block in enumerate(self.ranges)]

    @property
    def chain(self) -> Chain:
        return self.divided.chain

    @property
    def seconds(self) -> float:
        """About how long it takes to compare all distinct blocks."""
        traced, distinct = self.divided.stage.stage, dict(zip(self.kinds, self.ranges, strict=True)).values()
        layers = {layer for block in distinct for layer in block} | {len(self.chain.layers)}
        work = sum(flops(node) for node, layer in traced.layer_of.items() if layer in layers)
        return _PASSES * work / (_FLOPS * torch.get_num_threads())

    def compare(self, values: Values, targets: Values, size: Shortening, *, is_wide: bool) -> Compared:
        """Compare all distinct blocks for a batch of this size.

        Raises:
            NotComparable: one cannot be run; says why.
            UsageError: one computes other numbers.
        """
        known, apart, form = dict[object, Made](), 0.0, Form(self.chain.layers[0].packing)
        for block, kind in zip(self.ranges, self.kinds, strict=True):
            key = kind, tuple((value.shape, value.dtype, value.requires_grad) for value in values), form
            if key not in known:
                known[key], found = self._compared(block, values, targets, form, size, is_wide=is_wide)
                apart = max(apart, found)
            values, form = known[key].values, known[key].form
        return Compared(blocks=len(known), apart=apart)

    def _compared(
        self, block: range, values: Values, targets: Values, form: Form, size: Shortening, *, is_wide: bool
    ) -> tuple[Made, float]:
        """What the whole block makes, and how far apart the ranks are from it."""
        self._check_room(block)
        one = Block(self.divided, block, targets, form, size, is_wide=is_wide)
        try:
            whole = one.whole(values)
            ranks = one.by_ranks(values)
        except PipefitError:
            raise
        except Exception as error:  # a kernel that has no double precision, or none on the CPU
            raise NotComparable(f"{self._name(block)} fails on the CPU ({in_one_line(error)})") from error
        return whole, self._apart(one, whole, ranks)

    def _apart(self, one: Block, whole: Made, ranks: Sequence[Made]) -> float:
        """How far apart the ranks are at most, as a part of the largest value.

        Raises:
            UsageError: they are further apart than rounding explains.
            NotComparable: the whole block has no finite numbers.
        """
        if not any(bool(v.isfinite().all()) for v in whole.values if v.is_floating_point()):
            raise NotComparable(f"{self._name(one.block)} makes no finite numbers of such inputs")
        found = list(one.differences(whole, ranks))
        if far := [each for each in found if each.apart is None or not each.apart <= one.allowed]:
            more = f", and {len(far) - _TOLD} more" if len(far) > _TOLD else ""
            raise UsageError(
                f"{self._name(one.block)} of {self.chain.name}, divided between {self.divided.ranks} tensor-parallel "
                f"ranks, computes other numbers than whole: {', '.join(map(str, far[:_TOLD]))}{more} "
                f"({one.allowed:.0e} of the largest value is allowed{one.size.said}). Nothing was trained. Give its "
                "stage one shard (Grid(tensor=1), or --tensor 1 for all stages) and report the layer: this is a fault "
                "of pipefit; numbers=False (train --no-numbers) leaves the comparison out"
            )
        return max((each.apart or 0.0 for each in found), default=0.0)

    def _check_room(self, block: range) -> None:
        """Check that the host has the memory that a block takes.

        Raises:
            NotComparable: it has not.
        """
        parameters = {id(p): p for n in block for p in self.chain.layers[n].module.parameters()}
        needed = 8 * _COPIES * sum(parameter.numel() for parameter in parameters.values())
        if needed > self.free_bytes:
            raise NotComparable(
                f"{self._name(block)} takes {format_bytes(needed)} of the host, which has "
                f"{format_bytes(self.free_bytes)} to spare"
            )

    def _name(self, block: range) -> str:
        first, last = (self.chain.layers[n].name for n in (block[0], block[-1]))
        return f"layer {first}" if first == last else f"layers {first} to {last}"

    def _key(self, block: range) -> object:
        layers, codes = self.chain.layers, self.divided.stage.codes
        whole = tuple((module_settings(layers[n].module, id), layers[n].autocast) for n in block)
        return whole, tuple(repr([(n.op, n.target, n.args, n.kwargs) for n in codes[k].graph.nodes]) for k in block)
