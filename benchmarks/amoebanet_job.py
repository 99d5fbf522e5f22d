"""AmoebaNet-D of any number of filters, to be trained on equal devices. Not a benchmark itself."""

from __future__ import annotations

from dataclasses import dataclass

from partitioners import SCHEDULES, Setting
from pipefit.capture import Task
from pipefit.largest.growth import Demand
from pipefit.lowering.passes.recomputation import Recompute
from pipefit.models import build
from pipefit.planner import PlanOptions
from pipefit.profiler import profile
from pipefit.schema.cluster import Cluster
from pipefit.schema.profile import ModelProfile, Target
from pipefit.schema.training import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained, on what. `values` are the numbers of filters among which the largest is looked for.

    The pools are averages, as in torchgpipe's benchmark, which mCAP measured.
    """

    cluster: Cluster
    layers: int
    image_size: int
    microbatches: int
    microbatch_size: int
    values: range
    target: Target = "cpu"

    def task(self, filters: int) -> Task:
        """The model of so many filters."""
        return build(
            "amoebanet", layers=self.layers, filters=filters, image_size=self.image_size, pooling="average"
        )

    def demand(self, recompute: Recompute) -> Demand:
        """How it is trained, for our own search of splits, of one device a stage as theirs are."""
        return Demand(
            cluster=self.cluster,
            target=self.target,
            options=PlanOptions(
                microbatch_size=self.microbatch_size,
                microbatches=self.microbatches,
                schedule=SCHEDULES[recompute],
                recompute=recompute,
                data=1,
                tensor=1,
                planner="exact",
            ),
        )

    def profile(self, filters: int) -> ModelProfile:
        """What its layers cost, however often they are recomputed."""
        return profile(self.task(filters), microbatch_size=self.microbatch_size, target=self.target)

    def setting(self, costs: ModelProfile, filters: int, recompute: Recompute) -> Setting:
        """What partitioners are given."""
        batch = self.microbatches * self.microbatch_size
        training = Training(batch_size=batch, microbatches=self.microbatches, schedule=SCHEDULES[recompute])
        return Setting(
            task=self.task(filters),
            profile=costs,
            cluster=self.cluster,
            training=training,
            recompute=recompute,
        )
