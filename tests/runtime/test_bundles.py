"""Bundles: one action moves storages of any dtypes and sizes as one row of bytes with a table."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.memory.storages import StageStorages, Whereabouts
from pipefit.runtime import Trainer, certify
from pipefit.runtime.offload.copying import SlotPart, UnpacedCopies
from pipefit.runtime.offload.moving import pieces
from pipefit.schema.actions import Subject, parse_action
from pipefit.schema.decisions import Decision, SavedTensors, What
from pipefit.schema.devices import Link, parse_place
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.trace import Stream
from pipefit.simulator import simulate
from support.known_profiles import profile
from support.random_offloads import movable, with_disk
from support.small_tasks import alone, batch_of, plan_of, task_of

OFFLOAD = parse_action("0OFFLOAD3#1@device1*2+host*1")


class Mixed(nn.Module):
    """A layer that keeps tensors of five dtypes, from zero to thousands of bytes."""

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.tanh(x.double()).float()
        low = torch.sigmoid(x.bfloat16()).float()
        mask = torch.where(x > 0, torch.exp(-x), x * x)
        order = torch.gather(x, 1, x.detach().argsort(1))
        nothing = torch.sigmoid(x[:, :0]).sum(1, keepdim=True)
        large = torch.softmax(x.repeat(1, 9), 1)[:, : x.shape[1]]
        return wide + low + mask + order + nothing + large


@functools.cache
def mixed_task() -> Task:
    """Return two stages with this layer, between layers that save its inputs and outputs."""
    return task_of(
        lambda: [
            nn.Linear(8, 8),
            nn.Sigmoid(),
            Mixed(),
            nn.Linear(8, 8),
            nn.Tanh(),
            Mixed(),
            nn.Linear(8, 4),
        ],
        optimizer=torch.optim.AdamW,
    )


@functools.cache
def found() -> ModelProfile:
    """Return its profile."""
    return profile(mixed_task(), microbatch_size=2, threads=torch.get_num_threads())


def bundled(schedule: str, place: str) -> Plan:
    """Return the plan with one action that moves all saved tensors of each stage."""
    plan = plan_of(mixed_task(), [4, 3], microbatches=4, schedule=schedule, profiled=found())
    decisions = tuple(
        Decision(
            stage=stage,
            subject=SavedTensors(tensors=tuple(movable(plan, stage))),
            what=What.OFFLOAD,
            place=parse_place(place.replace("device1", "device0") if stage else place),
            behind=0,
        )
        for stage in range(2)
    )
    return replace(plan, cluster=with_disk(plan.cluster), decisions=decisions)


class Counting(UnpacedCopies):
    """A copier that counts the pieces of every copy, per tensors and blocks."""

    def __init__(self) -> None:
        self.copies: list[tuple[int, int, int]] = []
        self.seconds: list[float] = []

    def start(self, parts: Sequence[SlotPart], *, outward: bool, seconds: float) -> None:
        tensors, slots = {part.storage._cdata for part in parts}, {id(part.slot) for part in parts}
        self.copies.append((len(parts), len(tensors), len(slots)))
        self.seconds.append(seconds)
        super().start(parts, outward=outward, seconds=seconds)


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", ["host", "host*1+device1*2+disk*1"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_one_action_moves_all_that_a_stage_keeps(schedule: str, place: str) -> None:
    """Five dtypes, empty storages and storages of several layers leave and return in one bundle: parameters
    are those of plain training, bytes those of the dry run, and peaks the simulator's.
    """
    plan, task = bundled(schedule, place), mixed_task()
    storages = StageStorages.of(plan, 0)
    moved = [Subject(*tensor) for tensor in plan.decisions[0].subject.tensors]  # type: ignore[union-attr]
    saved = {t.index: t for t in plan.measurement.costs[2].saved}
    assert {saved[s.what].dtype for s in moved if s.layer == 2} >= {
        "float64",
        "bfloat16",
        "float32",
        "bool",
        "int64",
    }
    assert any(storages.sizes[storages.storage(subject)] == 0 for subject in moved)
    assert any(len(storages.savers(subject)) > 1 for subject in moved)
    trainer = Trainer(task, plan)
    losses = [trainer.step(batch_of(task, plan, step)) for step in range(3)]
    expected, state = alone(task, plan, 3)
    assert losses == pytest.approx(expected, rel=1e-6)  # the mean of a step's losses is rounded differently
    assert all(torch.equal(state[name], tensor) for name, tensor in trainer.state_dict().items())
    dry = certify(task, plan, steps=3)
    for device, other in zip(trainer.trace.devices, dry.devices, strict=True):
        assert [(s.action, s.bytes) for s in device.memory] == [(s.action, s.bytes) for s in other.memory]
    simulated = simulate(plan, steps=3)
    for device, other in zip(dry.devices, simulated.devices, strict=True):
        assert [device.step_peak_bytes(s) for s in range(3)] == [other.step_peak_bytes(s) for s in range(3)]
    assert all(not runner.mover.borrowed.in_use for runner in trainer.runners)


def test_a_bundle_is_few_copies() -> None:
    """Each action starts one copy of k tensors to m blocks, in at most k + m - 1 pieces instead of k times m."""
    plan, task = bundled("gpipe", "host*1+device1*2+disk*1"), mixed_task()
    trainer = Trainer(task, plan)
    copier = trainer.runners[0].mover.copier = Counting()
    trainer.step(batch_of(task, plan))
    actions = [e.action for e in trainer.trace.devices[0].events if "LOAD" in e.action and "#" in e.action]
    assert len(copier.copies) == len([a for a in actions if "WAIT" not in a]) == 2 * 4
    for count, tensors, blocks in copier.copies:
        assert blocks == 3 and tensors > 6
        assert count <= tensors + blocks - 1


SLOW = {"bytes_per_second": 1e3, "latency_seconds": 1e-3}
OWN_LINKS = (
    Link.between("device0", "device1", **SLOW),
    Link.between("device0", "device2", lanes=2, **SLOW),
    Link.between("device0", "host0", **SLOW),
    Link.between("device1", "host0", **SLOW),
    Link.between("host0", "disk0", bytes_per_second=5e2, latency_seconds=1e-2),
)


@pytest.mark.parametrize(
    ("place", "links"),
    [
        ("device1*1+device2*2", OWN_LINKS),
        ("device1*2+device2*1", OWN_LINKS),
        ("host*1+disk*1+device2*1", OWN_LINKS),  # bytes to the disk use the host's wire too
        (
            "device1*1+device2*1",
            (Link.between("device0", "device1", "device2", "host0", **SLOW),),
        ),  # one port
    ],
)
def test_a_copy_is_paced_as_long_as_it_is_simulated(place: str, links: tuple[Link, ...]) -> None:
    """A device's only copy takes the simulator's seconds in both directions, over separate and shared wires."""
    task = task_of(lambda: [nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 4)])
    plan = plan_of(task, [3], microbatches=1, schedule="gpipe")
    cluster = with_disk(replace(plan.cluster, devices=plan.cluster.devices * 3))
    decision = Decision(
        stage=0,
        subject=SavedTensors(tensors=((1, 0),)),
        what=What.OFFLOAD,
        place=parse_place(place),
        behind=0,
    )
    plan = replace(plan, cluster=replace(cluster, links=links), decisions=(decision,))
    trainer = Trainer(task, plan)
    copier = trainer.runners[0].mover.copier = Counting()
    trainer.step(batch_of(task, plan))
    simulated = [e for e in simulate(plan, steps=1).devices[0].events if e.stream is Stream.COPY]
    assert len(simulated) == len(copier.seconds) == 2
    assert copier.seconds == [pytest.approx(e.end_seconds - e.start_seconds) for e in simulated]


def test_a_move_is_known_from_before_a_bundle_leaves_until_it_is_back() -> None:
    """A bundle is marked as leaving when the copy starts and as away when it is joined, and likewise on the way
    back. Its move is dropped when the bundle is back.
    """
    plan, task = bundled("gpipe", "host"), mixed_task()
    seen: list[tuple[str, list[Whereabouts]]] = []

    def look(number: int) -> None:
        runner = trainer.runners[0]
        flight = runner._flights.get((0, 0))
        moves = [] if flight is None else [move.state for move in flight.luggage.moves.values()]
        if number < len(runner.program.actions[0]):
            seen.append((str(runner.program.actions[0][number]), moves))

    trainer = Trainer(task, plan)
    trainer.runners[0].on_action = look
    trainer.step(batch_of(task, plan))
    told = dict(seen)
    assert told["0WAIT_OFFLOAD0#0@host"] == [Whereabouts.LEAVING]
    assert told["0RELOAD0#0@host"] == [Whereabouts.AWAY]
    assert told["0WAIT_RELOAD0#0@host"] == [Whereabouts.RETURNING]
    assert told["0B0"] == []


@given(
    st.lists(st.integers(0, 40), max_size=6), st.lists(st.integers(0, 60), max_size=5), st.integers(0, 10**6)
)
def test_every_byte_has_one_place(tensors: list[int], blocks: list[int], seed: int) -> None:
    """Byte n of the row of tensors is byte n of the row of blocks, in at most k + m - 1 pieces."""
    blocks.append(max(sum(tensors) - sum(blocks), 0) + Random(seed).randint(0, 5))
    made = list(pieces(tensors, blocks))
    assert len(made) <= max(len(tensors) + len(blocks) - 1, 0)
    row = [(number, byte) for number, nbytes in enumerate(tensors) for byte in range(nbytes)]
    there = [(number, byte) for number, nbytes in enumerate(blocks) for byte in range(nbytes)]
    found = {
        (piece.tensor, piece.offset + n): (piece.block, piece.within + n)
        for piece in made
        for n in range(piece.nbytes)
    }
    assert found == dict(zip(row, there, strict=False))
    assert sum(piece.nbytes for piece in made) == sum(tensors) == len(found)
