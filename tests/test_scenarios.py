"""Three scenarios through the types: what runs comes out of `lower`, what cannot run yet is a program all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import nn

from pipefit.actions import parse_action
from pipefit.capture import Task
from pipefit.decisions import Decision, Run, SavedTensors, What
from pipefit.errors import UsageError
from pipefit.layer_costs import Origin, SavedTensor
from pipefit.places import parse_place
from pipefit.plans import Grid, Plan, Stage
from pipefit.program import Program, parse_program
from pipefit.runtime import Trainer, certify
from pipefit.schedule import lower
from pipefit.simulator import Simulation, simulate
from pipefit.trace import Category
from pipelines import chain_profile, equal_profile, make_cluster, make_layer, make_plan
from tiny import plan_of, task_of

PEERS = "device2*1+device3*1"

# -------------------------------------------------------------------- (a) compaction under 1F1B


def compacted(**links: float) -> Plan:
    """Four stages; stage 0, layers 0 to 8, recomputes 3 to 5 early and lends tensor 7.2, 100 bytes, to two peers."""
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
    return make_plan(chain_profile(layers), [9, 1, 1, 1], microbatches=8, decisions=decisions, cluster=cluster)


# Microbatch 4 on device 0, drawn by hand; what belongs to other microbatches in between is left out.
WAY_OUT = "0LOAD4 0F4[0:3] 0N4[3:6] 0F4[6:9] 0SEND_F4 0OFFLOAD4[7.2]@{p} 0WAIT_SEND_F4 0WAIT_OFFLOAD4[7.2]@{p}"
WAY_BACK = "0RELOAD4[7.2]@{p} 0R4[3:6] 0RECV_B4 0WAIT_RECV_B4 0WAIT_RELOAD4[7.2]@{p} 0B4[6:9] 0B4[3:6] 0B4[0:3]"
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
    """Every microbatch goes out behind its send and comes back, with its recomputation, one compute action early."""
    actions = lower(compacted()).actions[0]
    assert " ".join(str(a) for a in actions if a.kind.value in COMPUTES) == BETWEEN
    assert " ".join(str(a) for a in actions if a.microbatch == 4) == f"{WAY_OUT} {WAY_BACK}".format(p=PEERS)
    texts = list(map(str, actions))
    joined = texts.index(f"0WAIT_OFFLOAD4[7.2]@{PEERS}")
    assert texts.index("0F4[6:9]") < texts.index("0B1[6:9]") < joined < texts.index("0R2[3:6]")
    begun = texts.index(f"0RELOAD4[7.2]@{PEERS}")
    assert texts.index("0B3[0:3]") < begun < texts.index("0R4[3:6]") < texts.index("0F7[0:3]")


def test_lenders_reserve_for_the_microbatches_in_flight() -> None:
    """Four are outstanding at once, each with half its bytes at each peer; whatever the speed of links."""
    for speed in (1e30, 100.0, 1.0):
        simulation = Simulation(compacted(bytes_per_second=speed), steps=2)
        assert [tuple(arena) for arena in simulation.arenas] == [(2, 0, 4, 50), (3, 0, 4, 50)]
        alone = Simulation(replace(simulation.plan, decisions=()), steps=2)
        lent = [a - b for a, b in zip(simulation.peak_bytes, alone.peak_bytes, strict=True)]
        assert lent[0] < 0 and lent[1:] == [0, 200, 200]


def test_compaction_adds_up_as_by_hand() -> None:
    """Of microbatch 0, alone on the device, every sample is the sum that the scenario spells out: an F piece adds what
    it saves, N keeps its input, a joined OFFLOAD frees 7.2, R adds what it saves, every B piece frees what it saved.
    """
    held = {
        s.action: s.by_category.get(Category.ACTIVATIONS, 0)
        for s in simulate(compacted()).devices[0].memory
        if s.step == 0
    }
    saved = 16 + 8  # of a layer: storage of its own, and its input
    assert held["0F0[0:3]"] == 3 * saved
    assert held["0N0[3:6]"] == 3 * saved + 8  # its input, which goes on living
    assert held["0F0[6:9]"] == 3 * saved + 8 + 3 * saved + 100
    assert held["0F1[0:3]"] - held["0F0[6:9]"] == 3 * saved
    after = 3 * saved + 8 + 3 * saved  # microbatch 0, away
    assert held["0N1[3:6]"] - held["0F1[0:3]"] == 8
    assert held["0F1[6:9]"] - held["0N1[3:6]"] == 3 * saved + 100
    # three in flight; 7.2 of microbatch 0 is on its way back, that of 2 still on its way out
    assert held["0R0[3:6]"] == 3 * after + 2 * 100 + 3 * 16 + 2 * 8


def test_the_runtime_refuses_to_move_what_it_cannot_move_yet() -> None:
    """A plan that offloads is certified and trained by nobody: the first OFFLOAD is named, before anything hangs."""
    task, plan = moving()
    simulate(plan)
    with pytest.raises(UsageError, match=r"the runtime cannot execute 0OFFLOAD0\[1.[0-9]\]@host yet"):
        certify(task, plan)
    with pytest.raises(UsageError, match=r"the runtime cannot execute 0OFFLOAD0\[1.[0-9]\]@host yet"):
        Trainer(task, plan).step(task.batch(plan.training.batch_size))


def moving() -> tuple[Task, Plan]:
    """A real task, and a plan that moves the first tensor that its second layer keeps."""
    task = task_of(lambda: [nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 4)])
    plan = plan_of(task, [3], microbatches=2, schedule="gpipe")
    index = next(t.index for t in plan.measurement.costs[1].saved if t.origin.kind != "parameter")
    moved = SavedTensors(tensors=((1, index),))
    decision = Decision(stage=0, subject=moved, what=What.OFFLOAD, place=parse_place("host"))
    return task, replace(plan, decisions=(decision,))


# -------------------------------------------------------------------- (b) PipeDream, four stages, no flush

PIPEDREAM = ((0,), (1,), (2,), (3,))


def minibatch(stage: int, forward: int | None, backward: int | None, *, joins_backward: bool = True) -> list[str]:
    """What a stage does when one minibatch goes forward and another one backward: sends of the one before are joined
    here, and the receive of the next forward is posted.
    """
    first, last, actions = stage == 0, stage == 3, list[str]()
    if forward is not None:
        actions += [] if first else [f"WAIT_RECV_F{forward}"]
        actions += [f"LOAD{forward}"] if first or last else []
        actions += [f"F{forward}"]
    if backward is not None:
        actions += [] if last else [f"RECV_B{backward}", f"WAIT_RECV_B{backward}"]
        actions += [f"B{backward}"]
        actions += [f"WAIT_SEND_B{backward - 1}"] if joins_backward and not first else []
        actions += [] if first else [f"SEND_B{backward}"]
        actions += [f"STEP{backward}"]
    return actions


def sending(stage: int, forward: int, *, joins: bool = True) -> list[str]:
    """The send of a minibatch that went forward, behind the join of the one before."""
    before = [f"WAIT_SEND_F{forward - 1}"] if joins else []
    return [*before, f"SEND_F{forward}"] if stage < 3 else []


def filling(stage: int) -> list[str]:
    """The first call of four minibatches: stage s takes 4 - s of them, and makes one update."""
    actions = ["RECV_F0"] if stage else []
    for number in range(4 - stage):
        actions += minibatch(stage, number, None)
        actions += [f"RECV_F{number + 1}"] if stage else []
        actions += sending(stage, number, joins=number > 0)
    return actions + minibatch(stage, None, 0, joins_backward=False)


def steady(stage: int) -> list[str]:
    """The body: minibatch 0 enters, stage s takes the one that entered s calls before; number -3 goes backward."""
    forward = minibatch(stage, -stage, None) + ([f"RECV_F{1 - stage}"] if stage else [])
    return forward + sending(stage, -stage) + minibatch(stage, None, -3)


def draining(stage: int) -> list[str]:
    """The end: the minibatches on their way go on, and the last three go backward everywhere."""
    actions = []
    for number in range(3):
        forward = number - stage
        if forward < 0:
            actions += minibatch(stage, forward, None)
            actions += [f"RECV_F{forward + 1}"] if forward < -1 else []
            actions += sending(stage, forward)
        elif forward == 0:
            actions += ["WAIT_SEND_F-1"]
        actions += minibatch(stage, None, number - 3)
    return actions + (["WAIT_SEND_B-1"] if stage else [])


def part(of: Callable[[int], list[str]], *, microbatches: int, carried: tuple[int | None, int | None]) -> Program:
    """A part of the schedule; the minibatch that enters next, as the one before counts it and as this part does."""
    lines = [f"device {s}: {' '.join(f'{s}{action}' for action in of(s))}" for s in range(4)]
    for name, entered in zip(("in", "out"), carried, strict=True):
        lines += [f"carried {name} {s}: {outstanding(s, entered)}" for s in range(4) if entered is not None]
    return parse_program("\n".join(lines), placement=PIPEDREAM, microbatches=microbatches)


def outstanding(stage: int, entered: int) -> str:
    """What a stage has started and not joined when minibatch `entered` is the next to enter."""
    sends = [f"{stage}SEND_F{entered - 1 - stage}"] if stage < 3 else []
    receives = [f"{stage}RECV_F{entered - stage}", f"{stage}SEND_B{entered - 4}"] if stage else []
    return " ".join([*sends, *receives])


PARTS = {
    "first": part(filling, microbatches=4, carried=(None, 4)),
    "body": part(steady, microbatches=1, carried=(0, 1)),
    "drain": part(draining, microbatches=1, carried=(0, None)),
}


@pytest.mark.parametrize("name", PARTS)
def test_every_part_of_pipedream_is_a_program(name: str) -> None:
    """First, body and drain are valid, with what they carry in and out, and their texts come back equal."""
    program = PARTS[name]
    assert parse_program(str(program), placement=PIPEDREAM, microbatches=program.microbatches) == program


def test_the_parts_of_pipedream_are_as_drawn() -> None:
    """Numbers count from the first minibatch of the call; no part waits for the pipeline to be empty."""
    texts = {name: [" ".join(map(str, actions)) for actions in program.actions] for name, program in PARTS.items()}
    assert texts["body"][0] == "0LOAD0 0F0 0WAIT_SEND_F-1 0SEND_F0 0RECV_B-3 0WAIT_RECV_B-3 0B-3 0STEP-3"
    assert texts["body"][3] == ("3WAIT_RECV_F-3 3LOAD-3 3F-3 3RECV_F-2 3B-3 3WAIT_SEND_B-4 3SEND_B-3 3STEP-3")
    assert texts["first"][2] == (
        "2RECV_F0 2WAIT_RECV_F0 2F0 2RECV_F1 2SEND_F0 2WAIT_RECV_F1 2F1 2RECV_F2 2WAIT_SEND_F0 2SEND_F1 2RECV_B0 "
        "2WAIT_RECV_B0 2B0 2SEND_B0 2STEP0"
    )
    assert texts["drain"][0] == (
        "0WAIT_SEND_F-1 0RECV_B-3 0WAIT_RECV_B-3 0B-3 0STEP-3 0RECV_B-2 0WAIT_RECV_B-2 0B-2 0STEP-2 0RECV_B-1 "
        "0WAIT_RECV_B-1 0B-1 0STEP-1"
    )


@pytest.mark.parametrize(
    ("before", "after", "entered"), [("first", "body", 4), ("body", "body", 1), ("body", "drain", 1)]
)
def test_what_one_part_of_pipedream_leaves_the_next_one_takes(before: str, after: str, entered: int) -> None:
    """What is carried out, with numbers that count from the next call, is what is carried in."""
    left, taken = PARTS[before].carried_out, PARTS[after].carried_in
    assert [{a._replace(microbatch=(a.microbatch or 0) - entered) for a in starts} for starts in left] == [
        set(starts) for starts in taken
    ]


def test_endless_schedules_are_refused_by_name() -> None:
    """The simulator says that it cannot run a body yet; and a schedule of that name does not exist."""
    plan = make_plan(equal_profile(4), [1] * 4, microbatches=1)
    with pytest.raises(UsageError, match="the body of an endless schedule, which cannot be simulated yet"):
        simulate(plan, program=PARTS["body"])
    with pytest.raises(UsageError, match="there is no schedule 'pipedream'; choose one of"):
        lower(make_plan(equal_profile(4), [1] * 4, schedule="pipedream"))


# -------------------------------------------------------------------- (c) grids

GRIDS = ((0, 1, 2, 3), (4, 5))  # stage 0 four times, a replica for two samples; stage 1 in two shards


def replica(device: int) -> str:
    """Device 0 to 3: its two rows go to the shard that takes this half; their gradients come from both alike."""
    rows, to = f"{{{2 * device}:{2 * device + 2}}}", 4 + device // 2
    return (
        f"0LOAD0{rows} 0F0 0SEND_F0{rows}@device{to} 0RECV_B0{rows}@device{to} 0WAIT_SEND_F0{rows}@device{to} "
        f"0WAIT_RECV_B0{rows}@device{to} 0B0 0REDUCE[0.gradients] 0WAIT_REDUCE[0.gradients] 0STEP"
    )


def shard(device: int) -> str:
    """Device 4 or 5: half of the rows comes from two replicas, the other half from the other shard."""
    replicas = (0, 1) if device == 4 else (2, 3)
    rows = [f"{{{2 * n}:{2 * n + 2}}}@device{n}" for n in replicas]
    return " ".join(
        [
            *(f"1RECV_F0{part}" for part in rows),
            *(f"1WAIT_RECV_F0{part}" for part in rows),
            "1GATHER_F0 1WAIT_GATHER_F0 1LOAD0 1F0 1B0",
            *(f"1SEND_B0{part}" for part in rows),
            *(f"1WAIT_SEND_B0{part}" for part in rows),
            "1STEP",
        ]
    )


def gridded() -> Program:
    """One microbatch of eight samples."""
    lines = [*map(replica, range(4)), *map(shard, (4, 5))]
    text = "\n".join(f"device {device}: {line}" for device, line in enumerate(lines))
    return parse_program(text, placement=GRIDS, microbatches=1)


def test_grids_are_a_program() -> None:
    """Rows travel between devices by name, and the shards exchange halves; the text comes back equal."""
    program = gridded()
    assert parse_program(str(program), placement=GRIDS, microbatches=1) == program
    assert "0SEND_F0{2:4}@device4" in map(str, program.actions[1])
    assert "1SEND_B0{4:6}@device2" in map(str, program.actions[5])
    lost = str(program).replace("1RECV_F0{2:4}@device1 ", "").replace("1WAIT_RECV_F0{2:4}@device1 ", "")
    with pytest.raises(UsageError, match=r"0SEND_F0\{2:4\}@device4 has no partner: 1RECV_F0\{2:4\}@device1 is missing"):
        parse_program(lost, placement=GRIDS, microbatches=1)


def test_grids_are_refused_by_name() -> None:
    """A plan with grids can be made; lowering, the simulator and the dry run say that it cannot run yet."""
    plan = make_plan(equal_profile(2), [1, 1], microbatches=1, cluster=make_cluster(6))
    stages = (
        Stage(start=0, stop=1, grid=Grid(devices=GRIDS[0], data=4)),
        Stage(start=1, stop=2, grid=Grid(devices=GRIDS[1], tensor=2)),
    )
    wide = replace(plan, stages=stages)
    assert wide.placement == GRIDS
    assert wide.ranks == ((0,), (1,))
    for run in (lower, simulate):
        with pytest.raises(
            UsageError, match=r"on devices \[0, 1, 2, 3\]: stages on several devices can be written down"
        ):
            run(wide)
    with pytest.raises(UsageError, match=r"stage 0 is on devices \[0, 1, 2, 3\], which cannot be simulated yet"):
        simulate(wide, program=gridded())
    task = task_of(lambda: [nn.Linear(8, 8), nn.Linear(8, 4)])
    real = replace(plan_of(task, [1, 1]), stages=stages, cluster=make_cluster(6))
    for train in (certify, Trainer):
        with pytest.raises(UsageError, match=r"on devices \[0, 1, 2, 3\]: stages on several devices can be written"):
            train(task, real)


def test_a_message_of_a_grid_says_whom_it_is_for() -> None:
    """`1RECV_F0` alone would not say from which of four devices."""
    with pytest.raises(UsageError, match=r"1RECV_F0 does not say to which of devices \[0, 1, 2, 3\]"):
        parse_program(
            "device 0:\ndevice 1:\ndevice 2:\ndevice 3:\ndevice 4: 1RECV_F0 1WAIT_RECV_F0",
            placement=GRIDS,
            microbatches=1,
        )
    assert str(parse_action("0SEND_F0{2:4}@device4")) == "0SEND_F0{2:4}@device4"
