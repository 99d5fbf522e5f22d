"""Batched timing of many splits, checked against the simulator."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest

from pipefit.models import build
from pipefit.planner.driver import plan_of
from pipefit.planner.evaluation import SplitTimer
from pipefit.planner.problem import PlanOptions, Question, Split
from pipefit.profiler import profile
from pipefit.schema.cluster import Cluster
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import Simulation

DEVICES = """name = "made"
backend = "cuda"
kinds.slow = {{ flops = {{ float32 = 5e10 }}, memory_bandwidth = "10GB/s" }}
kinds.fast = {{ flops = {{ float32 = 2e11 }}, memory_bandwidth = "10GB/s" }}
[[devices]]
count = {slow}
kind = "slow"
memory = "1GiB"
[[devices]]
count = {fast}
kind = "fast"
memory = "1GiB"
[[hosts]]
memory = "64GiB"
"""
LINK = '[[links]]\nmembers = ["device{}", "device{}"]\nbytes_per_second = "{}MB/s"\nlatency_seconds = {}\n'


def cluster(stages: int, rate: int, latency: float) -> Cluster:
    """Build devices of two kinds with a private link between every pair."""
    links = (LINK.format(*pair, rate, latency) for pair in combinations(range(max(2, stages)), 2))
    slow = max(1, stages // 2)
    return Cluster.parse(DEVICES.format(slow=slow, fast=max(2, stages) - slow) + "".join(links))


@pytest.fixture(scope="module")
def model() -> ModelProfile:
    return profile(
        build("gpt", layers=7, hidden=16, heads=2, vocabulary=32, sequence=8),
        microbatch_size=1,
        target="cuda",
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b", "gpipe"])
def test_splits_at_once_take_what_each_takes_alone(model: ModelProfile, schedule: str) -> None:
    """The first step of every split matches the simulator if messages do not share wires, in any order of the
    devices.
    """
    rng, blocks = Random(f"at once {schedule}"), len(model.edges) - 1
    for stages in (1, 2, 3, 5):
        question = Question(
            profile=model,
            cluster=cluster(stages, rng.choice([1, 1000]), rng.choice([0, 1e-5, 1e-3])),
            training=Training(batch_size=7, microbatches=7, schedule=schedule),
            options=PlanOptions(stages=stages),
        )
        cuts = [sorted(rng.sample(range(1, blocks), stages - 1)) for _ in range(6)]
        splits = [Split((0, *own, blocks), tuple(rng.sample(range(stages), stages))) for own in cuts]
        timer = SplitTimer.of(question, stages)
        assert timer is not None
        each = [Simulation(plan_of(question, split)).step_seconds[0] for split in splits]
        assert timer.seconds(splits).tolist() == pytest.approx(each, rel=1e-12)
        assert len({*each}) > 2 or stages == 1


def test_steps_that_overlap_have_no_times_at_once(model: ModelProfile) -> None:
    """An asynchronous schedule is not timed in batches: its first step says little about later ones."""
    question = Question(
        profile=model,
        cluster=cluster(2, 1, 0),
        training=Training(batch_size=4, microbatches=4, schedule="pipedream-2bw"),
    )
    assert SplitTimer.of(question, 2) is None
