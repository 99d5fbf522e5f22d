"""The benchmark beside accelerate's estimate: its own measure, and the table of the page."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from bench_estimates import PAGE, Row, table, trained
from pipefit import Task


class Loss(nn.Module):
    """A layer of 1 MiB that returns an object with a loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512, bias=False)

    def forward(self, values: torch.Tensor) -> object:
        return type("Outputs", (), {"loss": self.layer(values).square().mean()})


def test_a_plain_loop_holds_parameters_gradients_adams_two_and_what_an_update_computes() -> None:
    """Six times the parameters, as an update has two results of their size; a batch of one is hardly anything."""
    task = Task(Loss, batch=lambda size: ({"values": torch.zeros(size, 512)}, None), loss=None)
    assert 6 << 20 <= trained(task, 1) <= 6.1 * (1 << 20)


def test_the_page_has_the_table_of_the_figures() -> None:
    """Made of the JSON beside the benchmark, and of nothing else."""
    saved = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "estimates.json").read_text())
    rows = [Row(**one) for one in saved["rows"]]
    assert len({row.model for row in rows}) >= 5
    assert table(rows) in PAGE.read_text(encoding="utf-8")
