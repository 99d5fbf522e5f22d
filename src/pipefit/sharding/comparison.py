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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product

import torch

from pipefit.capture.caller import recording
from pipefit.capture.chain import Chain
from pipefit.capture.random_state import put_back
from pipefit.capture.settings import module_settings
from pipefit.capture.structure import Values
from pipefit.errors import PipefitError, UsageError, in_one_line
from pipefit.sharding.block import Block, Form, Made
from pipefit.sharding.chain import ShardedChain
from pipefit.sharding.operations import flops
from pipefit.sharding.shortening import Shortening
from pipefit.sharding.tracing import blocks_begin
from pipefit.units import format_bytes

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
