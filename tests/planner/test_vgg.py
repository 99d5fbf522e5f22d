"""The real VGG-11 on four devices: all 3,654 splits."""

from __future__ import annotations

from math import comb

import pytest

from pipefit.lowering.passes.recomputation import Recompute
from pipefit.models import build
from pipefit.planner import plan
from pipefit.schema.cluster import Cluster
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import simulate
from support.known_profiles import profile


@pytest.fixture(scope="module")
def costs() -> ModelProfile:
    """Return the costs at the paper's microbatches of 92 images, on its GPUs, without allocation."""
    return profile(build("vgg11"), microbatch_size=92, target="cuda")


@pytest.mark.gallery
@pytest.mark.sample(1)
@pytest.mark.parametrize("recompute", ["never", "except_last"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_exact_finds_what_trying_all_splits_finds(
    costs: ModelProfile, schedule: str, recompute: Recompute
) -> None:
    """Both searches find the same split, ties included, with the simulator's peaks."""
    training = Training(batch_size=12 * 92, microbatches=12, schedule=schedule)
    cluster = Cluster.emulated((4, 1 << 40))
    found, best = (
        plan(costs, cluster, training, recompute=recompute, planner=name) for name in ("exact", "exhaustive")
    )
    assert found.split == best.split
    assert found.prediction == best.prediction
    assert best.provenance is not None
    assert best.provenance.evaluated == comb(29, 3) == 3654
    assert found.prediction is not None
    assert found.prediction.peak_bytes == simulate(found, steps=2).peak_bytes
