"""Casts without effect in several blocks of a divided chain."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipefit.capture import Task, capture
from pipefit.tensor_parallel import Alone
from pipefit.tensor_parallel.stage import shard_chain


class Scaled(nn.Module):
    """A layer that multiplies by a shared table, moved to the input's device."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x * self.table.to(x.device)).tanh())


def test_a_cast_that_changes_nothing_is_no_value_between_blocks() -> None:
    """A cast without effect returns its operand, so that a trace has one name for it in all blocks; every
    block uses its own table.
    """
    table = torch.ones(8)
    module = nn.Sequential(Scaled(table), Scaled(table))
    task = Task(module, batch=lambda n: (torch.randn(n, 8), torch.randn(n, 8)), loss=nn.functional.mse_loss)
    inputs, targets = task.batch(2)
    chain = capture(task, inputs, targets)
    divided = shard_chain(chain, 2, chain.flatten(inputs), chain.flatten_targets(targets))
    (first, second) = divided.rank(Alone(rank=0, size=2)).layers
    assert [tuple(value.shape) for value in second(first((inputs,)))] == [(2, 8)]
