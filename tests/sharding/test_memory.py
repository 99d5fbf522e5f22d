"""Memory of a rank in one process with fake tensors: parameters and activations, against closed forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pipefit.capture import Task, capture
from pipefit.models import build
from pipefit.tensor_parallel import Alone, Prices, RankStage, shard_stage
from support.ranks_and_whole import CHEAP

BATCH, SEQUENCE, HIDDEN, HEADS, FLOAT = 2, 16, 64, 8, 4


def block(ranks: int, rank: int, **options: Any) -> RankStage:
    """Return one rank's part of a GPT block on fake tensors."""
    task = build("gpt", layers=1, hidden=HIDDEN, heads=HEADS, vocabulary=32, sequence=SEQUENCE, dropout=0.0)
    inputs, targets = task.batch(BATCH)
    chain = capture(Task(task.build(), batch=task.batch, loss=task.loss), inputs, targets)
    hidden = torch.empty(BATCH, SEQUENCE, HIDDEN)
    stage = shard_stage(chain.layers[1:2], ranks, (hidden,), **{"prices": CHEAP, **options})
    return stage.rank(Alone(rank=rank, size=ranks))


def saved_bytes(stage: RankStage) -> int:
    """Return the bytes of the storages that autograd keeps, without parameters."""
    own = {p.untyped_storage()._cdata for layer in stage.layers for p in layer.module.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    hidden = torch.empty(BATCH, SEQUENCE, HIDDEN, requires_grad=True) * 1
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        (out,) = stage((hidden,))
    assert out.shape == hidden.shape
    return sum(t.untyped_storage().nbytes() for storage, t in kept.items() if storage not in own)


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_block_of_gpt_keeps_its_share(ranks: int) -> None:
    """A GPT block keeps inputs and outputs of two norms whole; queries, keys, values, attention, and both
    sides of GELU are divided.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = [saved_bytes(block(ranks, rank)) for rank in (0, ranks - 1)]
    tokens = BATCH * SEQUENCE
    whole = 4 * tokens * HIDDEN + 4 * tokens  # and a mean and a deviation for each token and norm
    divided = (3 + 1 + 4 + 4) * tokens * HIDDEN + tokens * HEADS  # and a sum for each token and head
    assert found == [FLOAT * (whole + divided // ranks)] * 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_by_positions_a_block_keeps_two_values_whole(ranks: int) -> None:
    """With sequence parallelism, a rank keeps only the inputs of attention and MLP whole."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = saved_bytes(block(ranks, 0, sequences=True, prices=Prices(stored=10.0)))
    tokens = BATCH * SEQUENCE
    divided = (2 + 3 + 1 + 4 + 4) * tokens * HIDDEN + 4 * tokens + tokens * HEADS
    assert found == FLOAT * (2 * tokens * HIDDEN + divided // ranks)


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_has_its_share_of_the_weights(ranks: int) -> None:
    """All matrices and the biases before a split are divided; norms and the biases after a sum are whole."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        held = sum(p.nbytes for layer in block(ranks, 0).layers for p in layer.module.parameters())
    divided = 12 * HIDDEN**2 + 3 * HIDDEN + 4 * HIDDEN
    whole = 2 * HIDDEN + 4 * HIDDEN
    assert held == FLOAT * (divided // ranks + whole)
