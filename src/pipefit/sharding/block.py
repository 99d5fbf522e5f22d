"""One block of a divided chain, run forward and backward whole and as ranks have it, with the same drawn parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipefit.capture.chain import Chain, ChainLayer, as_values, packing_of
from pipefit.capture.copying import copied
from pipefit.capture.numbers import ALLOWED, Difference, difference, largest
from pipefit.capture.orders import Orders, contiguous, orders_of
from pipefit.capture.random_state import seed_torch
from pipefit.capture.structure import Values
from pipefit.layer_costs import Packing
from pipefit.sharding.chain import ShardedChain
from pipefit.sharding.collectives import Collectives
from pipefit.sharding.lockstep import in_lockstep
from pipefit.sharding.shards import assembled
from pipefit.sharding.shortening import Shortening
from pipefit.sharding.writing import tensors_of

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
