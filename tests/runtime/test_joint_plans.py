"""Plans of the joint planner, trained on emulated devices that are too small for every plain split."""

from __future__ import annotations

from typing import Any

import pytest

from pipefit.errors import InfeasibleError
from pipefit.models import build
from pipefit.planner import plan
from pipefit.runtime import certify
from pipefit.schema.cluster import Cluster
from support.allocator_events import measured_peaks
from support.gallery_samples import sampled
from support.known_profiles import profile

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 4, "hidden": 64, "heads": 4, "vocabulary": 64, "sequence": 64, "attention": "eager"},
    "bert": {"layers": 4, "hidden": 64, "heads": 4, "vocabulary": 64, "sequence": 64},
}


@pytest.mark.gallery
@pytest.mark.parametrize("name", sampled(MODELS, often=["gpt"]))
def test_a_joint_plan_trains_where_no_split_fits(name: str) -> None:
    """With three quarters of the leanest split's memory, a joint plan trains: the allocator's peaks are the
    plan's, below the cap.
    """
    task = build(name, **MODELS[name])
    costs = profile(task, microbatch_size=4)
    roomy = plan(costs, Cluster.emulated((2, 1 << 40)), batch_size=24, objective="peak")
    assert roomy.prediction
    cap = max(roomy.prediction.peak_bytes) * 3 // 4
    cluster = Cluster.emulated((2, cap))
    with pytest.raises(InfeasibleError):
        plan(costs, cluster, batch_size=24, objective="peak")
    made = plan(costs, cluster, batch_size=24)
    assert made.decisions and made.prediction and max(made.prediction.peak_bytes) <= cap
    certified = certify(task, made)
    measured = measured_peaks(task, made, steps=2)
    for device, peak in enumerate(made.prediction.peak_bytes):
        assert certified.devices[device].peak_bytes == peak == max(measured[device])
