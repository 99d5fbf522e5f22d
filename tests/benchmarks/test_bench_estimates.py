"""The comparison with accelerate's estimate: a measure of real memory, and the page's table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import pipefit
from bench_estimates import PAGE, Row, table, trained
from pipefit import Task
from pipefit.models.hugging_face import hf
from support.known_profiles import profile


class Loss(nn.Module):
    """A layer of 1 MiB that returns an object with a loss, as transformers models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512, bias=False)

    def forward(self, values: torch.Tensor) -> object:
        return type("Outputs", (), {"loss": self.layer(values).square().mean()})


def test_a_plain_loop_holds_parameters_gradients_adams_two_and_what_an_update_computes() -> None:
    """A plain loop holds six times the parameters, as an update has two results of their size; a batch of one
    adds little.
    """
    task = Task(Loss, batch=lambda size: ({"values": torch.zeros(size, 512)}, None), loss=None)
    assert 6 << 20 <= trained(task, 1) <= 6.1 * (1 << 20)


@pytest.mark.gallery
def test_gpt2_takes_what_is_predicted_once_its_cache_is_off() -> None:
    """GPT-2's bytes are as predicted, plus the loop's labels and loss; with the cache, each layer's values no
    longer hold its keys and queries: two thirds of their shared storage, less.
    """
    pytest.importorskip("transformers")
    layers, width, tokens = 2, 64, 256
    task = hf("gpt2", sequence=tokens, n_layer=layers, n_embd=width, n_head=2, vocab_size=8192)
    plan = pipefit.plan(profile(task, microbatch_size=1), "emulated:1x1GiB", batch_size=1, planner="uniform")
    assert plan.prediction is not None

    def uncached() -> nn.Module:
        module = task.module()
        module.config.use_cache = False
        return module

    (predicted,) = plan.prediction.peak_bytes
    kept = predicted + tokens * 8 + 4
    assert trained(task, 1) == kept - layers * 2 * tokens * width * 4
    assert trained(replace(task, module=uncached), 1) == kept  # last: a task has one configuration


def test_the_page_has_the_table_of_the_figures() -> None:
    """The table is made only from the JSON next to the benchmark."""
    saved = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "estimates.json").read_text())
    rows = [Row(**one) for one in saved["rows"]]
    assert len({row.model for row in rows}) >= 5
    assert table(rows) in PAGE.read_text(encoding="utf-8")
