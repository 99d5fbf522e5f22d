"""Traced models in worker processes: tied parameters and norms are all-reduced over a real network."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from pipefit.lowering.passes.recomputation import recompute_decisions
from pipefit.models.hugging_face import hf
from pipefit.profiler import profile
from pipefit.runtime import Trainer, certify, train
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.training import Training
from support.huggingface_models import TINY


@pytest.mark.gallery
def test_gpt2_with_tied_embeddings_on_three_workers() -> None:
    """The losses and peaks of three processes equal those of one process that runs all devices in turn."""
    factory = partial(hf, "gpt2", **TINY["gpt2"])
    task = factory()
    costs = profile(task, microbatch_size=2)
    edges = costs.edges
    stages = tuple(
        Stage(start=a, stop=b, grid=Grid.of(n))
        for n, (a, b) in enumerate(pairwise((0, edges[2], edges[-2], edges[-1])))
    )
    training = Training(batch_size=6, microbatches=3, clip_norm=0.5)
    decisions = recompute_decisions(stages, edges, "except_last", "1f1b", 3)
    cluster = Cluster.emulated((3, 1 << 30))
    plan = Plan(profile=costs, cluster=cluster, training=training, stages=stages, decisions=decisions)
    assert plan.holders == ((0, 2),)
    losses, measured = train(factory, plan, steps=3, timeout_seconds=60)
    before = torch.get_num_threads()
    torch.set_num_threads(costs.assumptions.threads)
    trainer = Trainer(replace(task, module=task.module), plan)
    alone = []
    for step in range(3):
        torch.manual_seed(step)
        alone.append(trainer.step(task.batch(6)))
    torch.set_num_threads(before)
    assert losses == pytest.approx(alone, rel=1e-6)
    assert measured.peak_bytes == trainer.trace.peak_bytes == certify(task, plan, steps=3).peak_bytes
