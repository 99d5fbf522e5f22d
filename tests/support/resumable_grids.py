"""Plans of every kind of grid and of asynchronous schedules; training resumes between them from
checkpoints.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch

from pipefit.schema.decisions import StateKind, What
from pipefit.schema.grids import Sharding
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from support.known_profiles import profile
from support.offloaded_state import away
from support.sharded_stages import divided, grid_plan


class Grids(NamedTuple):
    """Edges of stages, their degrees of data and tensor parallelism, and their sharded and offloaded
    state.
    """

    edges: tuple[int, ...]
    degrees: tuple[tuple[int, int], ...]
    shard: Sharding = "none"
    schedule: str = "1f1b"
    away: tuple[StateKind, ...] = ()  # what of all layers is on the host between its uses
    updated: bool = False  # whether the host updates them


GRIDS = {
    "one device": Grids((0, 6), ((1, 1),)),
    "pipeline": Grids((0, 2, 6), ((1, 1), (1, 1)), schedule="gpipe"),
    "replicas": Grids((0, 4, 6), ((2, 1), (1, 1))),
    "ZeRO 1": Grids((0, 6), ((2, 1),), "optimizer"),
    "ZeRO 2": Grids((0, 3, 6), ((1, 1), (2, 1)), "gradients"),
    "ZeRO 3": Grids((0, 6), ((2, 1),), "parameters"),
    "shards": Grids((0, 3, 6), ((1, 2), (1, 1))),
    "replicas of shards": Grids((0, 6), ((2, 2),)),
    "ZeRO 1 of shards": Grids((0, 3, 6), ((1, 1), (2, 2)), "optimizer"),
    "swapped states": Grids((0, 2, 6), ((1, 1), (1, 1)), away=("optimizer", "parameters")),
    "ZeRO-Offload": Grids((0, 6), ((2, 1),), "gradients", updated=True),
}
ENDLESS = {
    **{s: Grids((0, 2, 6), ((1, 1), (1, 1)), schedule=s) for s in ("pipedream", "pipedream-2bw")},
    "2bw, ZeRO 1 of shards": Grids((0, 3, 6), ((1, 1), (2, 2)), "optimizer", "pipedream-2bw"),
    "pipedream, ZeRO 2": Grids((0, 2, 6), ((2, 1), (1, 1)), "gradients", "pipedream"),
    "pipedream, shards away": Grids((0, 4, 6), ((1, 2), (1, 1)), schedule="pipedream", away=("optimizer",)),
}


@cache
def profiled(name: str) -> ModelProfile:
    """Return the profile of microbatches and local batches, whole and sharded."""
    return profile(divided(name), microbatch_size=(4, 2), tensor=(1, 2), threads=torch.get_num_threads())


def plan_of_grids(name: str, grids: str) -> Plan:
    edges, degrees, shard, schedule, kinds, updated = (GRIDS | ENDLESS)[grids]
    plan = grid_plan(profiled(name), edges, degrees, schedule=schedule)
    stages = (
        replace(s, grid=replace(s.grid, shard=shard if s.grid.data > 1 else "none")) for s in plan.stages
    )
    decisions = [away(n, s.start, s.stop, kind=kind) for n, s in enumerate(plan.stages) for kind in kinds]
    decisions += [away(n, s.start, s.stop, What.UPDATE) for n, s in enumerate(plan.stages) if updated]
    return replace(plan, stages=tuple(stages), decisions=tuple(decisions))
