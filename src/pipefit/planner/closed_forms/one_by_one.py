"""Ranges of layers for which sums over layers are not enough: each is computed as a stage by itself.

It takes some 60 microseconds for each layer of a range. What was found is remembered for equal measurements, because a
search over microbatch sizes, replicas and schedules meets each of them many times.
"""

from __future__ import annotations

from functools import lru_cache

from pipefit.cost.rest import StageRest
from pipefit.cost.stage import WholeStage
from pipefit.profiles import Measurement


class OneByOne:
    """The ranges of one measurement, by their first layer and the one behind their last."""

    def __init__(self, measurement: Measurement) -> None:
        self._measurement = measurement
        self._known: dict[tuple[int, int], dict[str, int]] = {}

    def of(self, start: int, stop: int) -> dict[str, int]:
        """The bytes of a band for this range, without the losses that a step keeps."""
        if (start, stop) not in self._known:
            self._known[start, stop] = _computed(self._measurement, start, stop)
        return self._known[start, stop]


@lru_cache(maxsize=64)
def one_by_one(measurement: Measurement) -> OneByOne:
    """The ranges of a measurement; the same for an equal one."""
    return OneByOne(measurement)


def _computed(measurement: Measurement, start: int, stop: int) -> dict[str, int]:
    stage = WholeStage(measurement, start, stop)
    rest = StageRest(stage.storages, microbatches=0)
    return {
        "static": rest.parameter_bytes,
        "gradients": rest.gradient_bytes,
        "state": rest.state_bytes,
        "weights": rest.weight_bytes,
        "early": rest.early_state_bytes,
        "update_first_peak": rest.early_state_bytes + rest.first_update.peak_bytes,
        "backward_first_peak": stage.backward(is_first=True).peak_bytes,
        "backward_later_peak": stage.backward(is_first=False).peak_bytes,
        "input_gradients": stage.storages.sent_gradient_bytes,
    }
