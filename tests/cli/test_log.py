"""Log of a training: the source of its figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.utils.flop_counter import FlopCounterMode

import pipefit
from pipefit.cli.train import StepLog
from pipefit.models import build
from pipefit.runtime.options import StepReport
from pipefit.schema.cluster import Cluster

REPORT = StepReport(
    step=11,
    loss=3.25,
    seconds=0.5,
    samples_per_second=16.0,
    learning_rate=None,
    peak_bytes={0: 1 << 20, 1: 3 << 20},
)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_flops_are_those_that_torch_counts_in_plain_training(recompute: str) -> None:
    """The count covers all microbatches of a step, forward and backward, without recomputation; MFU is for
    both GPUs.
    """
    task = build("gpt", layers=2, hidden=32, heads=2, vocabulary=64, sequence=16, dropout=0.0)
    plan = pipefit.plan(
        pipefit.profile(task, microbatch_size=2, target="cuda"), Cluster.preset("4x-titan-rtx"),
        microbatches=4, batch_size=8, stages=2, recompute=recompute,
    )  # fmt: skip
    module, (tokens, targets) = task.build(), task.batch(2)
    with FlopCounterMode(display=False) as counted:
        task.loss(module(tokens), targets).backward()
    log = StepLog(plan, 100)
    figures = log.figures(REPORT)
    rate = 4 * counted.get_total_flops() / 0.5
    assert figures["flops_per_second"] == pytest.approx(rate, rel=0.1)  # torch counts products alone
    peak = plan.cluster.devices[0].kind.flops["float32"]
    assert figures["mfu"] == pytest.approx(figures["flops_per_second"] / (2 * peak))
    assert figures["tokens_per_second"] == 16 * 16.0
    line = log.line(REPORT)
    assert line.startswith("step 12 of 100  loss 3.2500  256 tokens/s  ")
    assert "MFU" in line and "device 1: 3.00 MiB of 23.65 GiB" in line


def test_the_fullest_device_is_the_one_with_the_least_room_for_its_size() -> None:
    """The device is not necessarily the one with the most bytes; without a meter none is named."""
    task = build("mlp", widths=(8, 8), inputs=8)
    plan = pipefit.plan(
        pipefit.profile(task, microbatch_size=1), Cluster.emulated((1, 2 << 20), (1, 64 << 20))
    )
    assert "device 0: 1.00 MiB of 2.00 MiB" in StepLog(plan, 1).line(REPORT)
    assert "device" not in StepLog(plan, 1).line(replace(REPORT, peak_bytes={0: 0, 1: 0}))
