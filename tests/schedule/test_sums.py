"""Starts of gradient sums: programs drawn by hand, and their time alongside backwards."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import accumulate
from random import Random
from typing import Any

import pytest

from pipefit.errors import UsageError
from pipefit.lowering import lower, lower_drain, step_programs
from pipefit.lowering.passes.collectives import bucket_edges
from pipefit.schema.actions import MESSAGES, Kind
from pipefit.schema.decisions import Decision, Microbatches, Run, What
from pipefit.schema.grids import Grid, Sharding, Stage
from pipefit.schema.layer_costs import SharedParameter
from pipefit.schema.plan import Plan
from pipefit.schema.trace import Category
from pipefit.simulator import simulate
from support.replica_profiles import gridded


def one_stage(
    *,
    buckets: int,
    shard: Sharding = "none",
    microbatches: int = 1,
    bytes_per_second: float = 1e30,
    data: int = 2,
) -> Plan:
    """Build a stage of four equal layers on some replicas: forwards of a second, backwards of two, gradients
    of 32 bytes.
    """
    plan = gridded(
        data,
        1,
        1,
        1,
        microbatches=microbatches,
        schedule="gpipe",
        samples=12,
        bytes_per_second=bytes_per_second,
    )
    grid = Grid(devices=tuple(range(data)), data=data, shard=shard, buckets=buckets)
    return replace(plan, stages=(Stage(start=0, stop=4, grid=grid),))


def drawn(plan: Plan, *, update: bool = True) -> str:
    """Return the passes and sums of a device."""
    return " ".join(
        str(action) for action in lower(plan, update=update).actions[0] if "LOAD" not in str(action)
    )


def test_the_last_microbatch_goes_backward_in_buckets() -> None:
    """Each sum starts after the backward of its layers; all are joined before the update."""
    assert drawn(one_stage(buckets=1, microbatches=2)) == "0F0 0F1 0B0 0B1 0REDUCE 0WAIT_REDUCE 0STEP"
    assert drawn(one_stage(buckets=2, microbatches=2)) == (
        "0F0 0F1[0:2] 0F1[2:4] 0B0 0B1[2:4] 0REDUCE[2:4] 0B1[0:2] 0REDUCE[0:2] "
        "0WAIT_REDUCE[2:4] 0WAIT_REDUCE[0:2] 0STEP"
    )


def test_nothing_is_summed_before_the_last_batch_of_an_update() -> None:
    """Accumulated batches keep their gradients unsummed, without cuts."""
    assert drawn(one_stage(buckets=2), update=False) == "0F0 0B0"


def test_owners_bring_updated_parameters_to_all() -> None:
    """With divided optimizer state, owners bring parameters after the update."""
    assert drawn(one_stage(buckets=1, shard="optimizer")) == (
        "0F0 0B0 0REDUCE 0WAIT_REDUCE 0STEP 0UNSHARD 0WAIT_UNSHARD"
    )


def test_gradients_that_owners_keep_are_summed_for_every_microbatch() -> None:
    """A sum is joined after the next backward, or before it if that adds to the same gradients; the last ones
    at the end, before the update.
    """
    assert drawn(one_stage(buckets=1, shard="gradients", microbatches=2)) == (
        "0F0 0F1 0B0 0REDUCE0 0WAIT_REDUCE0 0B1 0REDUCE1 0WAIT_REDUCE1 0STEP 0UNSHARD 0WAIT_UNSHARD"
    )
    summed = (
        "0F0[0:2] 0F0[2:4] 0F1[0:2] 0F1[2:4] 0B0[2:4] 0REDUCE0[2:4] 0B0[0:2] 0WAIT_REDUCE0[2:4] 0REDUCE0[0:2] "
        "0B1[2:4] 0WAIT_REDUCE0[0:2] 0REDUCE1[2:4] 0B1[0:2] 0WAIT_REDUCE1[2:4] 0REDUCE1[0:2] 0WAIT_REDUCE1[0:2]"
    )
    plan = one_stage(buckets=2, shard="gradients", microbatches=2)
    assert drawn(plan) == f"{summed} 0STEP 0UNSHARD 0WAIT_UNSHARD"
    assert drawn(plan, update=False) == summed


PASSES = "0B-1[2:4] 0WAIT_REDUCE-2[0:2] 0REDUCE-1[2:4] 0B-1[0:2] 0WAIT_REDUCE-1[2:4] 0REDUCE-1[0:2]"
SUMS = "0B-1[2:4] 0REDUCE-1[2:4] 0B-1[0:2] 0REDUCE-1[0:2]"
NEXT = "0F1[0:2] 0F1[2:4] 0WAIT_STASH-1 0B0[2:4] 0REDUCE0[2:4] 0B0[0:2] 0WAIT_REDUCE0[2:4] 0REDUCE0[0:2]"
UNSHARD = "0UNSHARD-1 0WAIT_UNSHARD-1"
WITHOUT_END: list[
    tuple[str, int, Sharding, str, str]
] = [  # schedule, buckets, divided state, a step, its drain
    (
        *("pipedream", 2, "none"),
        f"0F0[0:2] 0F0[2:4] {SUMS} 0STASH-1 0WAIT_REDUCE-1[2:4] 0WAIT_REDUCE-1[0:2] 0STEP-1 0WAIT_STASH-1",
        f"{SUMS} 0WAIT_REDUCE-1[2:4] 0WAIT_REDUCE-1[0:2] 0STEP-1",
    ),
    (
        *("pipedream", 1, "optimizer"),
        f"0F0 0B-1 0REDUCE-1 0STASH-1 0WAIT_REDUCE-1 0STEP-1 {UNSHARD} 0WAIT_STASH-1",
        f"0B-1 0REDUCE-1 0WAIT_REDUCE-1 0STEP-1 {UNSHARD}",
    ),
    (
        *("pipedream-2bw", 2, "gradients"),
        f"0F0[0:2] 0F0[2:4] {PASSES} 0STASH-1 0WAIT_REDUCE-1[0:2] 0STEP-1 {UNSHARD} {NEXT}",
        f"{PASSES} 0WAIT_REDUCE-1[0:2] 0STEP-1 {UNSHARD}",
    ),
]


@pytest.mark.parametrize(("schedule", "buckets", "shard", "step", "drain"), WITHOUT_END)
def test_every_update_without_end_has_sums_of_its_own(
    schedule: str, buckets: int, shard: Sharding, step: str, drain: str
) -> None:
    """Sums start after the last backward before the update, which joins them; sums for every microbatch may
    be joined in the next step.
    """
    plan = gridded(2, 1, 1, 1, 1, microbatches=2 if "2bw" in schedule else 1, schedule=schedule)
    grid = Grid(devices=(0, 1), data=2, shard=shard, buckets=buckets)
    plan = replace(plan, stages=(Stage(start=0, stop=4, grid=grid), Stage(start=4, stop=5, grid=Grid.of(2))))
    for program, expected in ((step_programs(plan)[-1], step), (lower_drain(plan, entered=4), drain)):
        own = (a for a in program.actions[0] if a.kind is not Kind.LOAD and a.kind not in MESSAGES)
        assert " ".join(map(str, own)) == expected


@pytest.mark.parametrize("buckets", [1, 2, 4])
def test_owners_alone_keep_gradients(buckets: int) -> None:
    """A replica has the gradients of its two layers and of at most two buckets: 32 bytes for each layer."""
    trace = simulate(one_stage(buckets=buckets, shard="gradients", microbatches=3))
    most = max(sample.by_category.get(Category.GRADIENTS, 0) for sample in trace.devices[0].memory)
    last = next(sample for sample in trace.devices[0].memory if sample.action == "0STEP")
    assert most == {1: 4, 2: 4, 4: 3}[buckets] * 32
    assert last.by_category[Category.GRADIENTS] == 2 * 32


def test_gradients_of_parameters_that_stages_share_are_not_divided() -> None:
    """The sentence names the parameter and state that could be divided."""
    tied = SharedParameter(name="w", users=(0, 1), nbytes=4, gradient_bytes=4, state_bytes=0)
    plan = gridded(2, 1, shared=(tied,))
    grid = replace(plan.stages[0].grid, shard="gradients")
    with pytest.raises(
        UsageError, match=r"shard gradients, but shares parameter 'w' .* only the optimizer state"
    ):
        lower(replace(plan, stages=(replace(plan.stages[0], grid=grid), plan.stages[1])))


@pytest.mark.parametrize("buckets", [1, 2, 4])
def test_all_but_the_last_sum_is_hidden_behind_backwards(buckets: int) -> None:
    """Two replicas exchange 32 bytes for a layer, in the two seconds of a backward: only the last bucket is
    exposed.
    """
    found = simulate(one_stage(buckets=buckets, bytes_per_second=16))
    assert found.step_seconds[0] == pytest.approx(4 * 1 + 4 * 2 + 4 * 2 / buckets)


@pytest.mark.parametrize("data", [2, 4])
def test_sums_for_owners_and_their_parameters_take_as_long_as_sums_for_all(data: int) -> None:
    """A reduce-scatter and an all-gather are the two halves of a ring: each carries all but one of the equal
    shares.
    """
    whole, divided = (
        simulate(one_stage(buckets=1, shard=shard, bytes_per_second=16, data=data)).step_seconds[0]
        for shard in ("none", "optimizer")
    )
    assert whole == pytest.approx(12 + 2 * (data - 1) / data * 8)
    assert divided == pytest.approx(whole)


def test_a_shared_parameter_counts_in_the_bucket_of_its_first_user() -> None:
    """A shared parameter's gradient is summed with its first user, after those of all users
    are accumulated.
    """
    plan = one_stage(buckets=2)
    name = plan.measurement.costs[0].parameters[0].name
    tied = SharedParameter(name=name, users=(0, 3), nbytes=32, gradient_bytes=32, state_bytes=0)
    shared = replace(
        plan.profile, measurements=tuple(replace(m, shared=(tied,)) for m in plan.profile.measurements)
    )
    plan = replace(plan, profile=shared)
    assert bucket_edges(plan, 0) in ([1], [2])
    assert bucket_edges(replace(plan, stages=(one_stage(buckets=4).stages[0],)), 0) == [1, 2]


def test_recomputed_runs_stay_together() -> None:
    """A cut moves to the nearest layer outside recomputed runs; without one there is a single bucket."""
    plan = one_stage(buckets=2)
    assert bucket_edges(plan, 0) == [2]
    run = Decision(stage=0, subject=Run(start=0, stop=3), what=What.RECOMPUTE, microbatches=Microbatches())
    assert bucket_edges(replace(plan, decisions=(run,)), 0) == [3]
    assert drawn(replace(plan, decisions=(run,))) == (
        "0N0[0:3] 0F0[3:4] 0B0[3:4] 0REDUCE[3:4] 0R0[0:3] 0B0[0:3] 0REDUCE[0:3] 0WAIT_REDUCE[3:4] 0WAIT_REDUCE[0:3] "
        "0STEP"
    )
    whole = Decision(stage=0, subject=Run(start=0, stop=4), what=What.RECOMPUTE, microbatches=Microbatches())
    assert bucket_edges(replace(plan, decisions=(whole,)), 0) == []


@pytest.mark.parametrize("buckets", [2, 3, 5, 8, 40])
def test_a_cut_is_at_the_layer_nearest_to_an_equal_part(buckets: int) -> None:
    """Cuts equal those of trying all layers for every part; layers may have no bytes, or almost all."""
    rng = Random(buckets)
    for _ in range(30):
        plan = uneven([rng.choice((0, 1, 3, 7, 50)) for _ in range(6)], buckets)
        ends = [*accumulate(cost.gradient_bytes for cost in plan.measurement.costs)]
        parts = [Fraction(ends[-1] * part, buckets) for part in range(1, buckets)]
        nearest = {min(range(5), key=lambda layer: abs(ends[layer] - part)) for part in parts}
        assert bucket_edges(plan, 0) == sorted(layer + 1 for layer in nearest if 0 < ends[layer] < ends[-1])


def test_more_buckets_than_layers_are_as_many_as_layers() -> None:
    """More buckets than layers become one per layer."""
    for buckets in (10**9, 10**30):
        assert bucket_edges(uneven([1, 50, 0, 1, 1, 0], buckets), 0) == [1, 2, 4]


def uneven(sizes: list[int], buckets: int) -> Plan:
    """Build a stage of layers with these bytes of gradients, on two replicas."""
    plan = gridded(2, *(1 for _ in sizes[1:]), samples=2)
    grid = Grid(devices=(0, 1), data=2, buckets=buckets)
    made = tuple(
        replace(
            one,
            kinds=tuple(replace(one.costs[n], gradient_bytes=size) for n, size in enumerate(sizes)),
            layers=tuple(range(len(sizes))),
        )
        for one in plan.profile.measurements
    )
    profile = replace(plan.profile, measurements=made)
    return replace(plan, profile=profile, stages=(Stage(start=0, stop=len(sizes), grid=grid),))


def test_no_bucket_is_refused() -> None:
    """Zero buckets are refused with the number."""
    with pytest.raises(UsageError, match="gradients are all-reduced in 1 bucket or more, not 0"):
        Grid(devices=(0, 1), data=2, buckets=0)


@pytest.mark.parametrize("asked", [{"shard": "optimizer"}, {"buckets": 3}])
def test_a_single_replica_has_nobody_to_divide_or_sum_with(asked: Any) -> None:
    """Division without replicas is refused with the requested state, with or without tensor shards."""
    what = "shard='optimizer'" if "shard" in asked else "buckets=3"
    for grid in ({"devices": (0,)}, {"devices": (0, 1), "tensor": 2}):
        with pytest.raises(
            UsageError,
            match=f"stage of 1 replica neither all-reduces nor shards anything.* {what} has no effect: omit it",
        ):
            Grid(**grid, **asked)
