"""Collectives inside one process, against their definitions, and between processes, against the former."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipefit.runtime.launch.forks import forks
from pipefit.tensor_parallel import Alone, LockstepCollectives, in_lockstep
from support.sharding_workers import all_collectives, both, talk, through_seams


def test_ranks_in_lockstep_sum_gather_exchange_and_broadcast() -> None:
    """In lockstep, every rank gets the sum, all tensors in order, the tensors sent to it, and the source's
    tensor.
    """
    for rank, found in enumerate(in_lockstep(3, all_collectives)):
        assert found.pop("exchange") == [10.0 + rank, 20.0 + rank, 30.0 + rank]
        assert found == {"sum": [6.0, 0.0], "all": [1.0, 0.0, 2.0, 0.0, 3.0, 0.0], "source": [3.0, 0.0]}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradients_through_all_seams_are_those_of_the_whole(ranks: int) -> None:
    """A network with divided weights and results has the gradients that one rank computes."""
    (alone,) = in_lockstep(1, through_seams)
    assert len(alone) == 12 + 32 + 32
    for found in in_lockstep(ranks, through_seams):
        assert found == pytest.approx(alone, rel=1e-12)


def test_every_rank_draws_what_the_caller_would_draw() -> None:
    """The ranks' random generators start equal and stay independent when ranks wait for each other."""
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)

    def run(group: LockstepCollectives) -> Tensor:
        first = torch.rand(2)
        group.all_reduce(torch.ones(1))
        return torch.cat([first, torch.rand(2)])

    assert all(torch.equal(drawn, expected) for drawn in in_lockstep(3, run))


def test_a_rank_that_fails_ends_the_others() -> None:
    """A failing rank's exception reaches the caller, and no other rank waits forever."""

    def run(group: LockstepCollectives) -> None:
        if group.rank == 1:
            raise ValueError("rank 1")
        group.all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="rank 1"):
        in_lockstep(3, run)


def test_backwards_meet_too() -> None:
    """Collectives work in a backward."""

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor, group: LockstepCollectives) -> Tensor:
            ctx.group = group  # type: ignore[attr-defined]
            return x.clone()

        @staticmethod
        def backward(ctx: object, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            return ctx.group.all_reduce(g.clone()), None  # type: ignore[attr-defined]

    def run(group: LockstepCollectives) -> float:
        x = nn.Parameter(torch.ones(()))
        (Sum.apply(x, group) * (group.rank + 1)).backward()
        assert x.grad is not None
        return float(x.grad)

    assert in_lockstep(3, run) == [6.0, 6.0, 6.0]


def test_a_rank_alone_has_tensors_of_the_right_shapes() -> None:
    """A rank without peers gets tensors of the same number and shapes as with peers, each with its own
    memory.
    """
    group, tensor = Alone(rank=1, size=3), torch.ones(2, 2)
    parts = group.all_gather(tensor)
    assert [part.shape for part in parts] == [(2, 2)] * 3
    assert len({part.data_ptr() for part in (*parts, tensor)}) == 4
    exchanged = group.all_to_all(tensor)
    assert exchanged.shape == tensor.shape and exchanged.data_ptr() != tensor.data_ptr()
    assert group.all_reduce(tensor) is tensor is group.broadcast(tensor, 0)


def test_processes_compute_what_ranks_in_lockstep_do(tmp_path: Path) -> None:
    """Two processes over gloo get the results of lockstep ranks from every collective, and the same
    gradients.

    Inputs and results of a collective are freed with their tensors, though gloo's own threads release them a
    little later.
    """
    context = forks()
    pipes, processes = [], []
    for rank in range(2):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(
            context.Process(target=talk, args=(rank, str(tmp_path / "store"), theirs), daemon=True)
        )
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    found = [pipe.recv() if pipe.poll(60) else None for pipe in pipes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    for ours, theirs in zip(found, in_lockstep(2, both), strict=True):
        assert ours[0] == theirs[0]
        assert ours[1] == pytest.approx(theirs[1], rel=1e-12)
        assert ours[2] == 0
