"""Programs of stages with several replicas: drawn by hand, and refused by name."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from pipefit.errors import UsageError
from pipefit.lowering import ENDLESS, Entered, lower, lower_evaluation
from pipefit.runtime.engine.execution import Programs
from pipefit.schema.actions import MESSAGES, Action, Kind
from pipefit.schema.grids import Grid, Sharding, Stage
from pipefit.schema.layer_costs import SharedParameter
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program, joined, parse_program
from pipefit.schema.training import Training, Versions
from support.pipelines import equal_profile, make_cluster, make_plan
from support.replica_profiles import gridded, resized


def divided(schedule: str, shard: Sharding, versions: Versions = "weights") -> Plan:
    """Build two stages; the first has two replicas that divide some state."""
    plan = gridded(2, 1, microbatches=2, schedule=schedule)
    first = replace(plan.stages[0], grid=replace(plan.stages[0].grid, shard=shard))
    return replace(plan, stages=(first, plan.stages[1]), training=replace(plan.training, versions=versions))


def drawn(text: str) -> list[str]:
    """Return a line for each device, as a program prints them."""
    return [" ".join(line.split()) for line in re.split(r"\n\s*(?=device )", text) if line.strip()]


def test_neighbours_of_different_degree_exchange_just_their_rows() -> None:
    """Three replicas send to two: the middle one has rows for both, and gets gradients from both."""
    assert str(lower(gridded(3, 2, samples=6))).splitlines() == drawn(
        """
        device 0: 0RECV_B0{0:2}@device3 0LOAD0{0:2} 0F0 0SEND_F0{0:2}@device3
                  0WAIT_SEND_F0{0:2}@device3 0WAIT_RECV_B0{0:2}@device3 0B0 0REDUCE 0WAIT_REDUCE 0STEP
        device 1: 0RECV_B0{2:3}@device3 0RECV_B0{3:4}@device4 0LOAD0{2:4} 0F0
                  0SEND_F0{2:3}@device3 0SEND_F0{3:4}@device4 0WAIT_SEND_F0{2:3}@device3 0WAIT_SEND_F0{3:4}@device4
                  0WAIT_RECV_B0{2:3}@device3 0WAIT_RECV_B0{3:4}@device4 0B0 0REDUCE 0WAIT_REDUCE 0STEP
        device 2: 0RECV_B0{4:6}@device4 0LOAD0{4:6} 0F0 0SEND_F0{4:6}@device4
                  0WAIT_SEND_F0{4:6}@device4 0WAIT_RECV_B0{4:6}@device4 0B0 0REDUCE 0WAIT_REDUCE 0STEP
        device 3: 1RECV_F0{0:2}@device0 1RECV_F0{2:3}@device1 1WAIT_RECV_F0{0:2}@device0 1WAIT_RECV_F0{2:3}@device1
                  1LOAD0{0:3} 1F0 1B0 1SEND_B0{0:2}@device0 1SEND_B0{2:3}@device1 1REDUCE
                  1WAIT_SEND_B0{0:2}@device0 1WAIT_SEND_B0{2:3}@device1 1WAIT_REDUCE 1STEP
        device 4: 1RECV_F0{3:4}@device1 1RECV_F0{4:6}@device2 1WAIT_RECV_F0{3:4}@device1 1WAIT_RECV_F0{4:6}@device2
                  1LOAD0{3:6} 1F0 1B0 1SEND_B0{3:4}@device1 1SEND_B0{4:6}@device2 1REDUCE
                  1WAIT_SEND_B0{3:4}@device1 1WAIT_SEND_B0{4:6}@device2 1WAIT_REDUCE 1STEP
        """
    )


def test_one_device_names_the_many_and_the_many_name_their_rows() -> None:
    """Two replicas send to one device, which names the sender of each part; an evaluation does the same."""
    assert str(lower_evaluation(gridded(2, 1), microbatches=1)).splitlines() == drawn(
        """
        device 0: 0LOAD0{0:2} 0N0 0SEND_F0{0:2} 0WAIT_SEND_F0{0:2}
        device 1: 0LOAD0{2:4} 0N0 0SEND_F0{2:4} 0WAIT_SEND_F0{2:4}
        device 2: 1RECV_F0{0:2}@device0 1RECV_F0{2:4}@device1 1WAIT_RECV_F0{0:2}@device0 1WAIT_RECV_F0{2:4}@device1
                  1LOAD0 1N0
        """
    )


def test_shards_share_the_receivers_and_each_gets_its_rows_once() -> None:
    """Two shards send to three, and back to two; the third need not; sums are among equal shards."""
    plan = gridded(2, 2)
    grids = Grid(devices=(0, 1, 2, 3), data=2, tensor=2), Grid(devices=(4, 5, 6), tensor=3)
    of_ranks = tuple(replace(m, tensor=n) for n in (2, 3) for m in plan.profile.measurements)
    wide = replace(
        plan,
        cluster=make_cluster(7),
        profile=replace(plan.profile, measurements=(*plan.profile.measurements, *of_ranks)),
        stages=tuple(replace(stage, grid=grid) for stage, grid in zip(plan.stages, grids, strict=True)),
    )
    program = lower(wide)
    told = [
        [str(action) for action in own if (action.part or action.place) and not action.wait]
        for own in program.actions
    ]
    assert told == [
        ["0RECV_B0{0:2}@device4", "0LOAD0{0:2}", "0SEND_F0{0:2}@device4", "0SEND_F0{0:2}@device6",
         "0REDUCE@device0*1+device2*1"],
        ["0RECV_B0{0:2}@device5", "0LOAD0{0:2}", "0SEND_F0{0:2}@device5", "0REDUCE@device1*1+device3*1"],
        ["0RECV_B0{2:4}@device4", "0LOAD0{2:4}", "0SEND_F0{2:4}@device4", "0SEND_F0{2:4}@device6",
         "0REDUCE@device0*1+device2*1"],
        ["0RECV_B0{2:4}@device5", "0LOAD0{2:4}", "0SEND_F0{2:4}@device5", "0REDUCE@device1*1+device3*1"],
        ["1RECV_F0{0:2}@device0", "1RECV_F0{2:4}@device2", "1SEND_B0{0:2}@device0", "1SEND_B0{2:4}@device2"],
        ["1RECV_F0{0:2}@device1", "1RECV_F0{2:4}@device3", "1SEND_B0{0:2}@device1", "1SEND_B0{2:4}@device3"],
        ["1RECV_F0{0:2}@device0", "1RECV_F0{2:4}@device2"],
    ]  # fmt: skip
    assert parse_program(str(program), placement=program.placement, microbatches=1).actions == program.actions


def test_equal_degrees_exchange_one_to_one() -> None:
    """Every replica sends all its rows to its partner."""
    messages = [a for a in lower(gridded(2, 2)).actions[1] if a.part and not a.wait]
    assert list(map(str, messages)) == ["0RECV_B0{2:4}@device3", "0LOAD0{2:4}", "0SEND_F0{2:4}@device3"]


def test_gradients_of_a_shared_parameter_are_added_up_over_all_replicas_at_once() -> None:
    """A stage's sum leaves shared parameters out (`runtime.comm.collectives`); their sum covers the devices
    of both stages.
    """
    tied = SharedParameter(name="w", users=(0, 1), nbytes=4, gradient_bytes=4, state_bytes=0)
    program = lower(gridded(2, 1, shared=(tied,), clip_norm=1.0))
    ends = [" ".join(str(action) for action in actions[-8:]) for actions in program.actions]
    own = "0REDUCE 0REDUCE[0.shared] 0WAIT_REDUCE 0WAIT_REDUCE[0.shared] 0AGREE 0WAIT_AGREE 0STEP"
    assert ends[0].endswith(own)
    assert ends[1].endswith(own)
    assert ends[2].endswith("1REDUCE[0.shared] 1WAIT_REDUCE[0.shared] 1AGREE 1WAIT_AGREE 1STEP")


def test_a_smaller_last_microbatch_is_divided_too() -> None:
    """A last microbatch of two rows instead of four gives one to each replica."""
    program = lower(gridded(2, 1, microbatches=3), microbatches=2, last=2)
    loads = [str(a) for actions in program.actions for a in actions if "LOAD" in a.kind]
    assert loads == ["0LOAD0{0:2}", "0LOAD1{0:1}", "0LOAD0{2:4}", "0LOAD1{1:2}", "1LOAD0", "1LOAD1"]


@pytest.mark.parametrize("seed", range(30))
def test_random_degrees_make_programs_that_end(seed: int) -> None:
    """Random degrees never make a program that hangs under NCCL's rules or mixes messages up."""
    rng = Random(seed)
    degrees = [rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(1, 5))]
    schedule = rng.choice(["gpipe", "1f1b", "eager-1f1b", "torchgpipe"])
    program = lower(gridded(*degrees, samples=12, microbatches=rng.randint(1, 5), schedule=schedule))
    assert len(program.actions) == sum(degrees)


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("schedule", ENDLESS)
def test_steps_of_random_degrees_without_end_fit_together(schedule: str, seed: int) -> None:
    """Each step joins the starts of the one before, and a smaller microbatch in flight has its rows in all
    steps: each stage receives and sends the rows of every microbatch it computes, with drains at any time.
    """
    rng = Random(seed)
    degrees = [rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(2, 4))]
    plan, steps = gridded(*degrees, samples=24, microbatches=5, schedule=schedule), rng.randint(1, 6)
    least = len(degrees) if schedule == "pipedream-2bw" else 1
    sizes = [[24] * rng.randint(least - 1, 4) + [rng.choice([12, 24])] for _ in range(steps)]
    programs, entered, made = Programs(plan), Entered(), list[Program]()
    for own in sizes:
        made.append(programs.training(len(own), entered, update=True, last=own[-1]))
        entered = programs.then(entered, own)
    whole = joined([*made, programs.training(0, entered, update=True)])
    samples = dict(enumerate(size for own in sizes for size in own))
    ends = [kind for kind in Kind if kind in MESSAGES]
    met = {(kind, stage): Counter[int]() for kind in ends for stage in range(len(degrees))}
    for action in (action for actions in whole.actions for action in actions if not action.wait):
        if action.kind in MESSAGES and action.microbatch is not None:
            first, last = action.part or (0, samples[action.microbatch])
            met[action.kind, action.stage][action.microbatch] += last - first
    for (kind, stage), found in met.items():
        there = Action(kind, stage).neighbour
        assert found == (samples if 0 <= there < len(degrees) else {}), (kind, stage)


@pytest.mark.parametrize(
    ("plan", "last", "message"),
    [
        (
            divided(schedule="pipedream", shard="parameters"),
            None,
            "that shard parameters, but under .* its own weight version",
        ),
        (
            divided(schedule="pipedream-2bw", shard="optimizer", versions="everything"),
            None,
            "2 replicas that shard optimizer, but versions='everything' reserves memory",
        ),
        (
            gridded(2, 1),
            3,
            "stage 0 has 2 replicas, which cannot split the 3 samples .* remove 1 of them",
        ),
        (
            gridded(3, 2, samples=12),
            9,
            "stage 1 has 2 replicas, which .* 9 samples .* remove 3 of them, or add 3",
        ),
        (
            gridded(3, 2, samples=12),
            7,
            "stage 0 has 3 replicas, which .* 7 samples .* remove 1 of them, or add 5",
        ),
    ],
)
def test_what_replicas_cannot_do_is_refused(plan: Plan, last: int | None, message: str) -> None:
    """The error names the stage and an alternative."""
    with pytest.raises(UsageError, match=message):
        lower(plan, last=last)


def test_replicas_that_no_plan_can_have_are_refused() -> None:
    """A microbatch that replicas do not divide, and local batches of unprofiled sizes, are refused."""
    plan = make_plan(equal_profile(2), [1, 1], cluster=make_cluster(6))
    stages = (
        Stage(start=0, stop=1, grid=Grid(devices=(0, 1, 2), data=3)),
        Stage(start=1, stop=2, grid=Grid.of(3)),
    )
    with pytest.raises(
        UsageError,
        match="3 replicas of stage 0 cannot split a microbatch of 1 sample evenly: use a batch of 12 samples",
    ):
        replace(plan, stages=stages)
    sizes = replace(plan.profile, measurements=(replace(plan.profile.measurements[0], microbatch_size=6),))
    with pytest.raises(
        UsageError, match=r"local batches of 2 samples, but .* at 6: .* microbatch_size=\(6, 2\)\)"
    ):
        replace(plan, stages=stages, profile=sizes, training=Training(batch_size=6, microbatches=1))


def test_a_batch_that_is_named_instead_works() -> None:
    """The suggested batch works: all degrees divide its microbatches, in the same number as before."""
    plan = gridded(3, 2, samples=6)
    one, sizes = plan.profile.measurements[0], (1, 2, 3, 4, 6)
    profile = replace(plan.profile, measurements=tuple(resized(one, size) for size in sizes))
    asked = Training(batch_size=8, microbatches=2)
    with pytest.raises(
        UsageError, match="cannot split a microbatch of 4 samples evenly: use a batch of 12 samples"
    ):
        replace(plan, profile=profile, training=asked)
    assert (
        replace(plan, profile=profile, training=replace(asked, batch_size=12)).training.microbatch_size == 6
    )
    asked = Training(batch_size=12, microbatches=3)
    with pytest.raises(UsageError, match="use microbatches of 6 samples"):
        replace(plan, profile=profile, training=asked)
    assert (
        replace(plan, profile=profile, training=replace(asked, microbatches=2)).training.microbatch_size == 6
    )


def test_degrees_that_are_no_grid_are_refused() -> None:
    """Degrees below one, even if they multiply to the number of devices, and too few or many devices are
    refused.
    """
    with pytest.raises(
        UsageError, match="a grid must have at least 1 replica of at least 1 shard, not -1 of -1"
    ):
        Grid(devices=(0,), data=-1, tensor=-1)
    with pytest.raises(
        UsageError, match="a grid must have at least 1 replica of at least 1 shard, not 0 of 1"
    ):
        Grid(devices=(), data=0)
    with pytest.raises(UsageError, match="a grid of 1 replica of 3 shards each needs 3 devices, not 2"):
        Grid(devices=(0, 1), tensor=3)


def test_a_buffer_that_is_computed_with_and_changed_is_refused() -> None:
    """Such a buffer would differ in every replica, with no single value for the model."""
    plan = gridded(2, 1)
    fed = tuple(
        replace(made, kinds=tuple(replace(kind, fed_back=("u",)) for kind in made.kinds))
        for made in plan.profile.measurements
    )
    with pytest.raises(UsageError, match=r"layer .* computes with u and changes it in every forward"):
        lower(replace(plan, profile=replace(plan.profile, measurements=fed)))
