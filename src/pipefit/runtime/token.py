"""Proof that whoever has connected to a worker is a worker of the same training: it knows the training's token.

gloo takes for another worker whoever connects first and says its number. So before anything is exchanged, the members
of a process group tell each other a digest of the token, of the group, and of who tells it to whom. A stranger cannot
make it, and what it hears is of no use elsewhere. `pipefit train` makes a token for every start, and where a stranger
has taken a place it starts the workers anew (`pipefit.runtime.restarts`). Under `torchrun` it is the environment's
`PIPEFIT_TOKEN`, the same text for all workers; without one the digests keep nobody out. It costs one message of 32
bytes to each other member as a group is made. NCCL's groups are not checked.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from pipefit.errors import PeerLost, all_lines

TOKEN = "PIPEFIT_TOKEN"  # noqa: S105 - the name of a variable
_PATIENCE = timedelta(seconds=20)  # members of a group tell it right after they have made it
_FAREWELL = timedelta(seconds=5)  # for what is on its way to one that is refused


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_hex(16)


def check_members(group: dist.ProcessGroup | None, name: str) -> None:
    """Check that all members of a group know the token; every member has to call it, with one `name` for the group.

    Raises:
        PeerLost: one does not, or is silent.
    """
    mine, members = dist.get_rank(), dist.get_process_group_ranks(group)
    if mine not in members or dist.get_backend(group) != "gloo":
        return
    others = [rank for rank in members if rank != mine]
    told = {rank: torch.zeros(32, dtype=torch.uint8) for rank in others}
    sent = [torch.frombuffer(bytearray(_digest(name, mine, rank)), dtype=torch.uint8) for rank in others]
    begun = list[dist.Work]()
    for rank, tensor in zip(others, sent, strict=True):
        with _with(rank):
            begun.append(_under_way(dist.isend(tensor, rank, group=group)))
    for rank, tensor in told.items():
        with _with(rank):
            _under_way(dist.irecv(tensor, rank, group=group)).wait(_PATIENCE)
        if not hmac.compare_digest(bytes(tensor.tolist()), _digest(name, rank, mine)):
            _let_go(begun)  # a worker with another token hears ours before we are gone, and tells the same
            raise PeerLost(
                f"what has connected as worker {rank} does not know the token of this training: a stranger has taken "
                f"its place, or workers were started with different {TOKEN}s"
            )
    for rank, work in zip(others, begun, strict=True):
        with _with(rank):
            work.wait()


@contextmanager
def _with(rank: int) -> Iterator[None]:
    """Inside, whatever fails in talking with a worker is its loss."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(
            f"worker {rank} has connected and does not show the token of this training: it is gone, or a stranger has "
            f"taken its place ({all_lines(error)})"
        ) from error


def _under_way(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this worker is in the group"
    return work


def _let_go(begun: Sequence[dist.Work]) -> None:
    """Wait shortly for messages of which some may never arrive."""
    for work in begun:
        with suppress(RuntimeError):
            work.wait(_FAREWELL)


def _digest(name: str, teller: int, hearer: int) -> bytes:
    token = os.environ.get(TOKEN, "").encode()
    return hmac.digest(token, f"{name} {teller} {hearer}".encode(), "sha256")
