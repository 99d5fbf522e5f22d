"""Three scenarios: supported ones result from `lower`, future ones are still valid programs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipefit.errors import UsageError
from pipefit.lowering import lower, lower_drain, step_programs
from pipefit.schema.actions import parse_action
from pipefit.schema.decisions import Decision, Run, SavedTensors, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.layer_costs import Origin, SavedTensor
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.program import Program, parse_program
from pipefit.schema.trace import Category
from pipefit.simulator import Simulation, simulate
from support.pipelines import chain_profile, equal_profile, lent, make_cluster, make_layer, make_plan

PEERS = "device2*1+device3*1"

# -------------------------------------------------------------------- (a) compaction under 1F1B


def compacted(**links: float) -> Plan:
    """Build four stages; stage 0, layers 0 to 8, recomputes 3 to 5 early and lends tensor 7.2, 100 bytes, to
    two peers.
    """
    moved = SavedTensor(index=2, nbytes=100, dtype="uint8", origin=Origin(kind="own", index=2))
    layers = [make_layer() for _ in range(12)]
    layers[7] = replace(layers[7], storages=(8, 16, 100), saved=(*layers[7].saved, moved))
    decisions = (
        Decision(stage=0, subject=Run(start=3, stop=6), what=What.RECOMPUTE, ahead=1),
        Decision(
            stage=0,
            subject=SavedTensors(tensors=((7, 2),)),
            what=What.OFFLOAD,
            place=parse_place(PEERS),
            behind=1,
            ahead=1,
        ),
    )
    cluster = make_cluster(4, **links)  # type: ignore[arg-type]
    return make_plan(
        chain_profile(layers), [9, 1, 1, 1], microbatches=8, decisions=decisions, cluster=cluster
    )


# Microbatch 4 on device 0; actions of other microbatches in between are left out.
WAY_OUT = (
    "0LOAD4 0F4[0:3] 0N4[3:6] 0F4[6:9] 0SEND_F4 0OFFLOAD4[7.2]@{p} 0WAIT_SEND_F4 0WAIT_OFFLOAD4[7.2]@{p}"
)
WAY_BACK = (
    "0RELOAD4[7.2]@{p} 0R4[3:6] 0RECV_B4 0WAIT_RECV_B4 0WAIT_RELOAD4[7.2]@{p} 0B4[6:9] 0B4[3:6] 0B4[0:3]"
)
BETWEEN = (  # where the others stand: what of microbatches 0 to 7 is computed after what
    "0F0[0:3] 0N0[3:6] 0F0[6:9] 0F1[0:3] 0N1[3:6] 0F1[6:9] 0F2[0:3] 0N2[3:6] 0F2[6:9] "
    "0R0[3:6] 0F3[0:3] 0N3[3:6] 0F3[6:9] 0B0[6:9] 0B0[3:6] 0B0[0:3] "
    "0R1[3:6] 0F4[0:3] 0N4[3:6] 0F4[6:9] 0B1[6:9] 0B1[3:6] 0B1[0:3] "
    "0R2[3:6] 0F5[0:3] 0N5[3:6] 0F5[6:9] 0B2[6:9] 0B2[3:6] 0B2[0:3] "
    "0R3[3:6] 0F6[0:3] 0N6[3:6] 0F6[6:9] 0B3[6:9] 0B3[3:6] 0B3[0:3] "
    "0R4[3:6] 0F7[0:3] 0N7[3:6] 0F7[6:9] 0R5[3:6] 0B4[6:9] 0B4[3:6] 0B4[0:3] "
    "0R6[3:6] 0B5[6:9] 0B5[3:6] 0B5[0:3] 0R7[3:6] 0B6[6:9] 0B6[3:6] 0B6[0:3] 0B7[6:9] 0B7[3:6] 0B7[0:3] 0STEP"
)
COMPUTES = {"F", "N", "R", "B", "STEP"}


def test_compaction_comes_out_of_the_decisions_as_drawn() -> None:
    """Every microbatch is offloaded after its send and reloaded, with its recomputation, one compute action
    early.
    """
    actions = lower(compacted()).actions[0]
    assert " ".join(str(a) for a in actions if a.kind.value in COMPUTES) == BETWEEN
    assert " ".join(str(a) for a in actions if a.microbatch == 4) == f"{WAY_OUT} {WAY_BACK}".format(p=PEERS)
    texts = list(map(str, actions))
    joined = texts.index(f"0WAIT_OFFLOAD4[7.2]@{PEERS}")
    assert texts.index("0F4[6:9]") < texts.index("0B1[6:9]") < joined < texts.index("0R2[3:6]")
    begun = texts.index(f"0RELOAD4[7.2]@{PEERS}")
    assert texts.index("0B3[0:3]") < begun < texts.index("0R4[3:6]") < texts.index("0F7[0:3]")


def test_lenders_reserve_for_the_microbatches_in_flight() -> None:
    """Four offloads are outstanding at once, each with half its bytes at each peer, whatever the speed of
    links.
    """
    for speed in (1e30, 100.0, 1.0):
        simulation = Simulation(compacted(bytes_per_second=speed), steps=2)
        assert lent(simulation) == [(2, 0, 4, 50), (3, 0, 4, 50)]
        alone = Simulation(replace(simulation.plan, decisions=()), steps=2)
        more = [a - b for a, b in zip(simulation.peak_bytes, alone.peak_bytes, strict=True)]
        assert more[0] < 0 and more[1:] == [0, 200, 200]


def test_compaction_adds_up_as_by_hand() -> None:
    """For microbatch 0, alone on the device, every sample equals the sum in the scenario: an F piece adds its
    saved bytes, N keeps its input, a joined OFFLOAD frees 7.2, R adds its saved bytes, every B piece frees
    its saved bytes.
    """
    held = {
        s.action: s.by_category.get(Category.ACTIVATIONS, 0)
        for s in simulate(compacted()).devices[0].memory
        if s.step == 0
    }
    saved = 16 + 8  # of a layer: its storage, and its input
    assert held["0F0[0:3]"] == 3 * saved
    assert held["0N0[3:6]"] == 3 * saved + 8  # its input, which goes on living
    assert held["0F0[6:9]"] == 3 * saved + 8 + 3 * saved + 100
    assert held["0F1[0:3]"] - held["0F0[6:9]"] == 3 * saved
    after = 3 * saved + 8 + 3 * saved  # microbatch 0, away
    assert held["0N1[3:6]"] - held["0F1[0:3]"] == 8
    assert held["0F1[6:9]"] - held["0N1[3:6]"] == 3 * saved + 100
    # three in flight; 7.2 of microbatch 0 is on its way back, that of 2 still on its way out
    assert held["0R0[3:6]"] == 3 * after + 2 * 100 + 3 * 16 + 2 * 8


# -------------------------------------------------------------------- (b) PipeDream, four stages, no flush

PIPEDREAM = ((0,), (1,), (2,), (3,))
BODY = """
device 0: 0RECV_B-3 0LOAD0 0F0 0SEND_F0 0WAIT_RECV_B-3 0B-3 0WAIT_SEND_F0 0STASH-3 0STEP-3 0WAIT_STASH-3
device 1: 1RECV_F0 1RECV_B-2 1WAIT_RECV_F0 1F0 1WAIT_SEND_B-3 1SEND_F0 1WAIT_RECV_B-2 1B-2 1WAIT_SEND_F0 1SEND_B-2 \
1STASH-2 1STEP-2 1WAIT_STASH-2
device 2: 2RECV_F0 2RECV_B-1 2WAIT_RECV_F0 2F0 2WAIT_SEND_B-2 2SEND_F0 2WAIT_RECV_B-1 2B-1 2WAIT_SEND_F0 2SEND_B-1 \
2STASH-1 2STEP-1 2WAIT_STASH-1
device 3: 3RECV_F0 3WAIT_RECV_F0 3LOAD0 3F0 3WAIT_SEND_B-1 3B0 3SEND_B0 3STEP0
carried in 0:
carried in 1: 1SEND_B-3
carried in 2: 2SEND_B-2
carried in 3: 3SEND_B-1
carried out 0:
carried out 1: 1SEND_B-2
carried out 2: 2SEND_B-1
carried out 3: 3SEND_B0
"""
DRAIN = """
device 0: 0RECV_B-3 0WAIT_RECV_B-3 0B-3 0STEP-3 0RECV_B-2 0WAIT_RECV_B-2 0B-2 0STEP-2 0RECV_B-1 0WAIT_RECV_B-1 0B-1 \
0STEP-1
device 1: 1WAIT_SEND_B-3 1RECV_B-2 1WAIT_RECV_B-2 1B-2 1SEND_B-2 1WAIT_SEND_B-2 1STEP-2 1RECV_B-1 1WAIT_RECV_B-1 1B-1 \
1SEND_B-1 1WAIT_SEND_B-1 1STEP-1
device 2: 2WAIT_SEND_B-2 2RECV_B-1 2WAIT_RECV_B-1 2B-1 2SEND_B-1 2WAIT_SEND_B-1 2STEP-1
device 3: 3WAIT_SEND_B-1
carried in 0:
carried in 1: 1SEND_B-3
carried in 2: 2SEND_B-2
carried in 3: 3SEND_B-1
carried out 0:
carried out 1:
carried out 2:
carried out 3:
"""


def pipedream() -> Plan:
    """Build four equal layers on four devices, a step of one microbatch."""
    return make_plan(equal_profile(4), [1] * 4, microbatches=1, schedule="pipedream")


def test_the_parts_of_pipedream_are_as_drawn() -> None:
    """One microbatch enters, every stage updates, and nothing waits for the pipeline to be empty."""
    plan = pipedream()
    assert step_programs(plan)[-1] == parse_program(BODY, placement=PIPEDREAM, microbatches=1)
    assert lower_drain(plan, entered=9) == parse_program(DRAIN, placement=PIPEDREAM, microbatches=0)
    assert lower(plan).actions[0] == tuple(map(parse_action, ["0LOAD0", "0F0", "0SEND_F0"]))


def test_a_body_of_pipedream_holds_a_version_for_every_microbatch_in_flight() -> None:
    """The peak of a stage in a full pipeline is: parameters of 32, optimizer state twice that, 24 activations
    of each microbatch in flight, and 32 for each of their versions except the newest.
    """
    for stage, device in enumerate(simulate(pipedream()).devices):
        full = max(device.memory, key=lambda sample: sample.total_bytes).by_category
        others = 3 - stage
        assert full.get(Category.VERSIONS, 0) == 32 * others
        assert full[Category.ACTIVATIONS] == 24 * (others + 1) + 4 * (stage == 3)
        assert (full[Category.PARAMETERS], full[Category.OPTIMIZER]) == (32, 64)


def test_a_part_of_an_endless_schedule_is_not_simulated_alone() -> None:
    """The part joins transfers that no action has begun; the error names the program to simulate instead."""
    with pytest.raises(
        UsageError, match="a part of an asynchronous schedule without its first steps: simulate its plan"
    ):
        simulate(pipedream(), program=step_programs(pipedream())[-1])


# -------------------------------------------------------------------- (c) grids

GRIDS = ((0, 1, 2, 3), (4, 5))  # stage 0 four times, a replica for two samples; stage 1 in two shards


def replica(device: int) -> str:
    """Return device 0 to 3: its two rows go to both shards, and their gradients come from the first."""
    rows = f"{{{2 * device}:{2 * device + 2}}}"
    return (
        f"0LOAD0{rows} 0F0 0SEND_F0{rows}@device4 0SEND_F0{rows}@device5 0RECV_B0{rows}@device4 "
        f"0WAIT_SEND_F0{rows}@device4 0WAIT_SEND_F0{rows}@device5 0WAIT_RECV_B0{rows}@device4 "
        "0B0 0REDUCE[0.gradients] 0WAIT_REDUCE[0.gradients] 0STEP"
    )


def shard(device: int) -> str:
    """Return device 4 or 5: all rows come from four replicas; the first one has their gradients for all."""
    rows = [f"{{{2 * n}:{2 * n + 2}}}@device{n}" for n in range(4)]
    back = rows if device == 4 else []
    return " ".join(
        [
            *(f"1RECV_F0{part}" for part in rows),
            *(f"1WAIT_RECV_F0{part}" for part in rows),
            "1LOAD0 1F0 1B0",
            *(f"1SEND_B0{part}" for part in back),
            *(f"1WAIT_SEND_B0{part}" for part in back),
            "1STEP",
        ]
    )


def gridded() -> Program:
    """Return one microbatch of eight samples."""
    lines = [*map(replica, range(4)), *map(shard, (4, 5))]
    text = "\n".join(f"device {device}: {line}" for device, line in enumerate(lines))
    return parse_program(text, placement=GRIDS, microbatches=1)


def test_grids_are_a_program() -> None:
    """Rows travel between devices by name; the text comes back equal."""
    program = gridded()
    assert parse_program(str(program), placement=GRIDS, microbatches=1) == program
    assert "0SEND_F0{2:4}@device4" in map(str, program.actions[1])
    assert "1SEND_B0{4:6}@device2" in map(str, program.actions[4])
    lost = str(program).replace("1RECV_F0{2:4}@device1 ", "").replace("1WAIT_RECV_F0{2:4}@device1 ", "")
    with pytest.raises(
        UsageError, match=r"0SEND_F0\{2:4\}@device4 lacks its partner 1RECV_F0\{2:4\}@device1"
    ):
        parse_program(lost, placement=GRIDS, microbatches=1)


def with_ranks(found: ModelProfile) -> ModelProfile:
    """Return the profile as if layers on two ranks cost the same as whole ones."""
    return replace(found, measurements=(*found.measurements, replace(found.measurements[0], tensor=2)))


def test_shards_have_a_program() -> None:
    """A plan with shards can be built and lowered: every shard gets the same rows, and one of them sends them
    back.
    """
    plan = make_plan(equal_profile(2), [1, 1], microbatches=1, cluster=make_cluster(6))
    stages = (
        Stage(start=0, stop=1, grid=Grid.of(0)),
        Stage(start=1, stop=2, grid=Grid(devices=GRIDS[1], tensor=2)),
    )
    wide = replace(plan, stages=stages, profile=with_ranks(plan.profile))
    assert wide.placement == ((0,), GRIDS[1])
    assert wide.ranks == ((0,), (1,))
    messages = [
        [str(action) for action in own if action.part and not action.wait] for own in lower(wide).actions
    ]
    assert messages[0] == ["0RECV_B0{0:1}@device4", "0SEND_F0{0:1}@device4", "0SEND_F0{0:1}@device5"]
    assert messages[4] == ["1RECV_F0{0:1}", "1SEND_B0{0:1}"]
    assert messages[5] == ["1RECV_F0{0:1}"]


def test_a_message_of_a_grid_says_whom_it_is_for() -> None:
    """`1RECV_F0` without the sender would not identify one of four devices."""
    with pytest.raises(UsageError, match=r"1RECV_F0 needs one of the devices \[0, 1, 2, 3\]"):
        parse_program(
            "device 0:\ndevice 1:\ndevice 2:\ndevice 3:\ndevice 4: 1RECV_F0 1WAIT_RECV_F0",
            placement=GRIDS,
            microbatches=1,
        )
    assert str(parse_action("0SEND_F0{2:4}@device4")) == "0SEND_F0{2:4}@device4"
