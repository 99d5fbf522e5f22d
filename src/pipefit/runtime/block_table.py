"""The table of what is moved: its blocks, their sizes and places, and which bytes of which tensors are in each.

    0OFFLOAD3#1@device1*2+host*1: 2 tensors of 3072 B, away; device1 2048 B: 0[0:2048]; host0 1024 B: 1[0:1024]

One is written before a bundle leaves, read when it returns, and replaced by another whenever it has got somewhere. The
tensors of a bundle lie in its blocks one after the other, as one row of bytes: k tensors in m blocks are at most
k + m - 1 pieces, and each piece is one copy. (MPress, the metadata table of D2D swap.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipefit.actions import Action
from pipefit.cost.residency import Whereabouts
from pipefit.places import Member
from pipefit.texts import counted


class Block(NamedTuple):
    """Bytes of a member of the cluster that are set aside for a move."""

    member: Member
    nbytes: int


class Piece(NamedTuple):
    """`nbytes` of a tensor, from `offset` on, that are `within` bytes into a block; both are numbers in a table."""

    tensor: int
    offset: int
    block: int
    within: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """What one OFFLOAD moves of one microbatch: bytes of its tensors, the blocks that take them, and where they are.

    A last microbatch may be smaller than the plan's, and then does not fill its blocks.
    """

    action: Action
    tensors: tuple[int, ...]
    blocks: tuple[Block, ...]
    state: Whereabouts

    @classmethod
    def of(cls, action: Action, tensors: Sequence[int], blocks: Sequence[tuple[Member, int]]) -> BlockTable:
        """The table of tensors of these bytes that begin to leave for blocks of these members and bytes."""
        found = tuple(Block(*block) for block in blocks)
        return cls(action=action, tensors=tuple(tensors), blocks=found, state=Whereabouts.LEAVING)

    def now(self, state: Whereabouts) -> BlockTable:
        """The table after the tensors have got somewhere."""
        return replace(self, state=state)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Which bytes of the tensors are in which blocks."""
        return tuple(pieces(self.tensors, [nbytes for _, nbytes in self.blocks]))

    def __str__(self) -> str:
        blocks = (f"{member} {nbytes} B:{self._held(number)}" for number, (member, nbytes) in enumerate(self.blocks))
        tensors = f"{counted(len(self.tensors), 'tensor')} of {sum(self.tensors)} B"
        return f"{self.action}: {tensors}, {self.state}; {'; '.join(blocks)}"

    def _held(self, block: int) -> str:
        held = (piece for piece in self.pieces if piece.block == block)
        return "".join(f" {piece.tensor}[{piece.offset}:{piece.offset + piece.nbytes}]" for piece in held)


def pieces(tensors: Sequence[int], blocks: Sequence[int]) -> Iterator[Piece]:
    """Which bytes of tensors of these sizes are in which of these blocks: each block is filled before the next one."""
    block, within = 0, 0
    for tensor, nbytes in enumerate(tensors):
        offset = 0
        while offset < nbytes:
            if within == blocks[block]:
                block, within = block + 1, 0
                continue
            taken = min(nbytes - offset, blocks[block] - within)
            yield Piece(tensor, offset, block, within, taken)
            offset, within = offset + taken, within + taken
