"""Programs of stages with tensor shards: drawn by hand, and refused by name."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from pipefit.errors import UsageError
from pipefit.lowering import lower
from pipefit.schema.actions import SENDS, message_of
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.layer_costs import SharedParameter
from pipefit.schema.plan import Plan
from pipefit.schema.program import parse_program
from support.synthetic_grids import sharded


def lines(plan: Plan) -> list[str]:
    """Return a line for each device."""
    program = lower(plan)
    assert parse_program(str(program), placement=program.placement, microbatches=1) == program
    return [" ".join(map(str, actions)) for actions in program.actions]


def test_one_device_sends_to_every_shard_and_hears_from_one() -> None:
    """Both shards need the whole inputs; their gradients are equal, so one of them sends."""
    assert lines(sharded((1, 1), (1, 2))) == [
        (
            "0RECV_B0{0:4}@device1 0LOAD0 0F0 0SEND_F0{0:4}@device1 0SEND_F0{0:4}@device2 "
            "0WAIT_SEND_F0{0:4}@device1 0WAIT_SEND_F0{0:4}@device2 0WAIT_RECV_B0{0:4}@device1 0B0 0STEP"
        ),
        "1RECV_F0{0:4} 1WAIT_RECV_F0{0:4} 1LOAD0 1F0 1B0 1SEND_B0{0:4} 1WAIT_SEND_B0{0:4} 1STEP",
        "1RECV_F0{0:4} 1WAIT_RECV_F0{0:4} 1LOAD0 1F0 1B0 1STEP",
    ]


def test_equal_degrees_exchange_shard_by_shard() -> None:
    """Every shard sends to one shard, and receives from it."""
    found = lines(sharded((1, 2), (1, 2)))
    for shard in (0, 1):
        peer = f"{{0:4}}@device{shard + 2}"
        assert f"0SEND_F0{peer} 0WAIT_SEND_F0{peer} 0WAIT_RECV_B0{peer}" in found[shard]
        assert found[shard].count("SEND_F0") == found[shard + 2].count("SEND_B0") == 2


def test_gradients_are_summed_over_devices_with_the_same_shard() -> None:
    """Two replicas of two shards each sum over devices 0 and 2, and 1 and 3. A single replica
    sums nothing.
    """
    found = lines(sharded((2, 2), (1, 2)))
    assert all("0REDUCE@device0*1+device2*1 " in found[device] for device in (0, 2))
    assert all("0REDUCE@device1*1+device3*1 " in found[device] for device in (1, 3))
    assert not any("REDUCE" in line for line in found[4:])


def test_a_shared_parameter_is_summed_shard_by_shard() -> None:
    """A shared parameter is summed over all devices of both stages with the same part of it."""
    found = lines(sharded((1, 2), (1, 2), shared=(tied(),)))
    for device, line in enumerate(found):
        own, other = device % 2, device % 2 + 2
        assert f"REDUCE[0.shared]@device{own}*1+device{other}*1 " in line


@pytest.mark.parametrize("seed", range(30))
def test_every_device_receives_its_rows_once_and_nobody_sends_for_another(seed: int) -> None:
    """For random degrees each row of a local batch arrives once, and the shards of a sender share the
    receivers evenly.
    """
    rng = Random(seed)
    degrees = [(rng.choice([1, 2, 3]), rng.choice([1, 2, 4])) for _ in range(rng.randint(2, 4))]
    plan = sharded(*degrees, samples=12, schedule=rng.choice(["gpipe", "1f1b"]))
    program = lower(plan)
    received, sent = Counter[tuple[int, int, bool]](), Counter[tuple[int, int, bool]]()
    for device, actions in enumerate(program.actions):
        for action in actions:
            if action.kind in SENDS and not action.wait and action.part is not None:
                message = message_of(device, action, program.placement)
                received[message.receiver, message.target, message.forward] += action.part[1] - action.part[0]
                sent[action.stage, device, message.forward] += action.part[1] - action.part[0]
    for number, stage in enumerate(plan.stages):
        rows = 12 // stage.grid.data
        neighbours = [(number - 1, True)] * (number > 0) + [(number + 1, False)] * (
            number + 1 < len(plan.stages)
        )
        for other, forward in neighbours:
            there = plan.stages[other].grid
            if len(stage.devices) > 1 or len(there.devices) > 1:
                assert all(received[number, device, forward] == rows for device in stage.devices)
                counts = [sent[other, device, forward] for device in there.devices]
                assert max(counts) - min(counts) <= 12 // there.data


def tied(form: str = "") -> SharedParameter:
    """Build two layers with one parameter."""
    return SharedParameter(name="w", users=(0, 1), nbytes=4, gradient_bytes=4, state_bytes=0, form=form)


def test_a_parameter_shared_by_stages_with_other_parts_is_refused() -> None:
    """Stages with other numbers of shards, or divided otherwise because of other local batch sizes, cannot
    share a parameter.
    """
    refused = r"stage 0 has 2 tensor shards in . replicas? and shares parameter 'w' with stage 1 in 1 replica, which "
    with pytest.raises(
        UsageError, match=f"{refused}has 1 shard: give both the same number of shards, or put all layers"
    ):
        lower(sharded((1, 2), (1, 1), shared=(tied(),)))
    plan = sharded((2, 2), (1, 2), shared=(tied("rows"),))
    assert lower(plan)
    forms = [replace(m, shared=(tied(str(m.microbatch_size)),)) for m in plan.profile.measurements]
    with pytest.raises(
        UsageError,
        match=f"{refused}has the same number of shards but splits it differently for .* the same number of replicas",
    ):
        lower(replace(plan, profile=replace(plan.profile, measurements=tuple(forms))))


def test_stages_of_one_rank_are_divided_alike() -> None:
    """Two stages on the same devices are both divided, or neither."""
    plan = sharded((1, 2), (2, 1), schedule="gpipe")
    stages = (plan.stages[0], Stage(start=1, stop=2, grid=Grid(devices=(0, 1), data=2)))
    with pytest.raises(
        UsageError, match="stage 0 has 2 tensor shards, but stage 1 on the same devices is sharded"
    ):
        lower(replace(plan, stages=stages))


def test_owners_bring_parameters_to_equal_shards() -> None:
    """If replicas divide the optimizer state, sums and updated parameters stay among devices with the same
    shard.
    """
    plan = sharded((2, 2))
    grid = replace(plan.stages[0].grid, shard="optimizer")
    found = lines(replace(plan, stages=(replace(plan.stages[0], grid=grid),)))
    assert all(
        f"0UNSHARD@device{device % 2}*1+device{device % 2 + 2}*1 " in line
        for device, line in enumerate(found)
    )
