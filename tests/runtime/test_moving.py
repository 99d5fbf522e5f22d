"""Offload of saved tensors: the numbers of plain training, the bytes of the simulator."""

from __future__ import annotations

import functools
import gc
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.capture.model import build_chain
from pipefit.errors import OutOfMemory, UsageError
from pipefit.lowering import lower
from pipefit.memory.arenas import arenas_of, lent_bytes
from pipefit.memory.storages import StageStorages
from pipefit.runtime import Trainer, certify
from pipefit.runtime.dry_run.layers import Shortened
from pipefit.runtime.offload.moving import Luggage
from pipefit.schema.actions import Kind, Subject
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Run, SavedTensors, What
from pipefit.schema.devices import Host, Member, parse_place
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.trace import Category, Trace
from pipefit.simulator import simulate
from support.allocator_events import measured_peaks
from support.known_profiles import profile
from support.memory_samples import samples, step_peaks_of
from support.offload_choices import movable
from support.random_offloads import Attention, make_batch, make_chain, moving, with_disk
from support.random_trainings import random_plan
from support.small_tasks import alone, batch_of, plan_of, task_of

STEPS = 3


class Halves(nn.Module):
    """Two views of one storage, both saved, and joined again."""

    def forward(self, x: Tensor) -> Tensor:
        one, other = torch.sigmoid(x).chunk(2, dim=1)
        return torch.cat([one * other, one + other], dim=1)


class Twice(nn.Module):
    """A layer that uses one value in two ways, so that two operations and the next layer may save it."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(-x * x)
        return y * torch.tanh(y)


class Tripled(nn.Module):
    """A product with a number."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 3.0


CHAINS: dict[str, Callable[[], Sequence[nn.Module]]] = {
    "elementwise": lambda: (
        nn.Linear(8, 16), nn.Sigmoid(), nn.Linear(16, 16), nn.Tanh(), Halves(), Twice(), nn.Linear(16, 4)
    ),
    "in place": lambda: (
        nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.SiLU(inplace=True), nn.ELU(inplace=True),
        nn.Linear(16, 4),
    ),
    "random and running": lambda: (
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.LayerNorm(16), nn.Dropout(0.3),
        nn.Linear(16, 4),
    ),
    "attention": lambda: (
        nn.Linear(8, 16), nn.LayerNorm(16), Attention(16), nn.GELU(), nn.Linear(16, 16), Attention(16),
        nn.Linear(16, 4),
    ),
    "views": lambda: (
        nn.Linear(8, 16), nn.Unflatten(1, (4, 4)), nn.Conv1d(4, 4, 3, padding=1), nn.Flatten(), nn.Identity(),
        nn.Softplus(), nn.Unflatten(1, (2, 8)), nn.Linear(8, 8), nn.Flatten(), nn.Linear(16, 4),
    ),
}  # fmt: skip
SPLITS = {"elementwise": [4, 3], "views": [3, 4, 3]}


def task_named(name: str) -> Task:
    """Return the task of a chain, under an optimizer with state."""
    return task_of(CHAINS[name], optimizer=torch.optim.AdamW)


@functools.cache
def found(name: str) -> ModelProfile:
    """Return its profile."""
    return profile(task_named(name), microbatch_size=2, threads=torch.get_num_threads())


def trained(task: Task, plan: Plan, steps: int = STEPS) -> tuple[list[float], dict[str, Tensor], Trace]:
    """Return the losses of some steps, the state at the end, and the trace."""
    trainer = Trainer(task, plan)
    losses = [trainer.step(batch_of(task, plan, step)) for step in range(steps)]
    assert all(not runner.mover.borrowed.in_use for runner in trainer.runners)
    return losses, trainer.state_dict(), trainer.trace


def assert_as_foretold(name: str, seed: int) -> None:
    """Check the numbers and bytes of a random plan of a chain with random moves."""
    rng = Random(f"{name} {seed}")
    task, still = task_named(name), random_plan(found(name), rng, microbatches=rng.randint(2, 5))
    still = replace(still, cluster=with_disk(still.cluster))
    plan = moving(still, rng)
    losses, state, measured = trained(task, plan)
    expected, wanted, _ = trained(task, still)
    assert losses == expected
    assert all(torch.equal(state[key], wanted[key]) for key in wanted)
    dry = certify(task, plan, steps=STEPS)
    assert samples(measured) == samples(dry) == samples(certify(task, plan, steps=STEPS, fold=False))
    assert step_peaks_of(dry) == step_peaks_of(simulate(plan, steps=STEPS))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CHAINS)
def test_whatever_is_moved_numbers_and_bytes_are_those_foretold(name: str) -> None:
    """Losses, parameters and buffers are bitwise those of the plan without moves; every measured sample is
    the dry run's, folded or not; the peak of every step is the simulator's.
    """
    assert_as_foretold(name, 0)


@pytest.mark.gallery
@pytest.mark.parametrize("seed", range(1, 13))
@pytest.mark.parametrize("name", CHAINS)
def test_more_plans_that_move_are_as_foretold(name: str, seed: int) -> None:
    """Many more random plans with moves have exact numbers and bytes."""
    assert_as_foretold(name, seed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["elementwise", "views"])
def test_the_allocator_sees_what_leaves_and_comes_back(name: str) -> None:
    """The allocator's events have the dry run's peaks, except for memory lent by a device, which is not a
    tensor's.

    For chains without random draws, the losses are those of plain training.
    """
    rng = Random(name)
    task, still = (
        task_named(name),
        plan_of(task_named(name), SPLITS[name], microbatches=4, profiled=found(name)),
    )
    plan = moving(still, rng)
    assert any(action.kind is Kind.OFFLOAD for actions in lower(plan).actions for action in actions)
    dry, lent, allocated = certify(task, plan), arenas_of(plan, lower(plan)), measured_peaks(task, plan)
    for device, peaks in enumerate(allocated):
        here = lent_bytes(lent, Member.device(device))
        assert peaks == [dry.devices[device].step_peak_bytes(step) - here for step in range(2)]
    assert trained(task, plan, 2)[0] == alone(task, plan, 2)[0]


# -------------------------------------------------------------------- refusals and leftovers


Moved = tuple[int, tuple[tuple[int, int], ...], str]  # stage, tensors, place


def halves(*moves: Moved, microbatches: int = 4, cluster: Cluster | None = None) -> Plan:
    """Return two stages of `make_chain` under GPipe, with these moves."""
    plan = plan_of(make_chain(), [3, 3], microbatches=microbatches, schedule="gpipe")
    decisions = tuple(
        Decision(
            stage=stage, subject=SavedTensors(tensors=tensors), what=What.OFFLOAD, place=parse_place(place)
        )
        for stage, tensors, place in moves
    )
    return replace(plan, cluster=cluster or plan.cluster, decisions=decisions)


def on_hosts(*hosts: Host) -> Cluster:
    """Return the plan on two devices of the first of these hosts."""
    return replace(Cluster.emulated((2, 1 << 30)), hosts=hosts)


SIGMOID = ((1, 0),)  # layer 1's output, which it saves: 2 samples of 64 numbers
EVERYONE = pytest.mark.parametrize("run", [Trainer, certify])


@pytest.mark.sample(1)
@EVERYONE
def test_a_host_without_room_is_refused(run: Callable[[Task, Plan], object]) -> None:
    """A host without room is refused: four microbatches of 512 bytes exceed 2,047, before training begins,
    with the excess.
    """
    for room in (2047, 2048):
        plan = halves((0, SIGMOID, "host"), cluster=on_hosts(Host(memory_bytes=room)))
        if room == 2048:
            run(make_chain(), plan)
        else:
            words = r"host0 has .* would need 2.00 KiB for .*, 1 B too much: 2.00 KiB of device 0; offload"
            with pytest.raises(OutOfMemory, match=words):
                run(make_chain(), plan)


def test_a_lender_pays_for_what_it_lends() -> None:
    """A lender's arena counts from the start, under its cap: with one byte less training does not begin."""
    task, plan = make_chain(), halves((0, SIGMOID, "device1"))
    lent = [s.by_category.get(Category.LENT, 0) for s in trained(task, plan)[2].devices[1].memory]
    assert set(lent) == {4 * 512}
    peaks = certify(task, plan).peak_bytes
    for less in (0, 1):
        caps = Cluster.emulated((1, peaks[0]), (1, peaks[1] - less))
        tight = Trainer(task, replace(plan, cluster=caps))
        step = functools.partial(tight.step, batch_of(task, plan))
        if less:
            with pytest.raises(OutOfMemory, match="device 1 ran out of memory"):
                [step() for _ in range(2)]
        else:
            assert [step() for _ in range(2)]


def test_a_device_without_a_stage_lends_what_it_has() -> None:
    """A device without a stage has the simulator's trace: one sample, of the lent bytes; less memory is
    refused.
    """
    cluster = Cluster.emulated((2, 1 << 20), (1, 2048))
    task, plan = make_chain(), halves((0, SIGMOID, "device2"), cluster=cluster)
    assert samples(trained(task, plan)[2])[2] == samples(certify(task, plan))[2] == samples(simulate(plan))[2]
    with pytest.raises(
        OutOfMemory, match=r"device2 has .*, but would need .* for offloaded tensors, 1 B too much"
    ):
        Trainer(task, replace(plan, cluster=Cluster.emulated((2, 1 << 20), (1, 2047))))


@pytest.mark.sample(5)
@EVERYONE
@pytest.mark.parametrize(
    ("place", "words"),
    [
        (
            "host1",
            "to host1 on another host, which only the simulator supports: use a place on the same host",
        ),
        (
            "disk1",
            "to disk1 on another host, which only the simulator supports: use a place on the same host",
        ),
        (
            "device2",
            "to device2 on another host, which only the simulator supports: use a place on the same host",
        ),
        ("disk0", "host0 and disk0 are not connected: add a link"),
        ("host*1+device0*1", "device 0 cannot offload to itself: give another place"),
    ],
)
def test_places_that_cannot_be_reached_are_named(
    run: Callable[[Task, Plan], object], place: str, words: str
) -> None:
    """Unreachable places (members of another host, an unlinked disk, the device itself) are refused before
    training.
    """
    cluster = on_hosts(*(Host(memory_bytes=1 << 30, disk_bytes=1 << 30) for _ in range(2)))
    cluster = replace(cluster, devices=(*cluster.devices, replace(cluster.devices[0], host=1)))
    with pytest.raises(UsageError, match=words):
        run(make_chain(), halves((0, SIGMOID, place), cluster=cluster))


def test_the_memory_of_a_parameter_is_no_saved_tensor() -> None:
    """A saved weight has a number, but a decision cannot name it; the error says that the stage keeps no such
    tensor.
    """
    weight = next(t.index for t in halves().measurement.costs[2].saved if t.origin.kind == "parameter")
    with pytest.raises(UsageError, match=f"saved tensor 2.{weight} cannot be offloaded"):
        Trainer(make_chain(), halves((0, ((2, weight),), "host")))


def test_a_number_that_an_operation_keeps_is_no_saved_tensor() -> None:
    """The 3.0 of a product is not in autograd's hooks: the profile marks it, and lowering refuses to move it."""
    task = task_of(lambda: [nn.Linear(8, 8), Tripled(), nn.Linear(8, 4)])
    plan = plan_of(task, [3], microbatches=2, schedule="gpipe")
    (number,) = [tensor for tensor in plan.measurement.costs[1].saved if tensor.hidden]
    subject = SavedTensors(tensors=((1, number.index),))
    moves = Decision(stage=0, subject=subject, what=What.OFFLOAD, place=parse_place("host"))
    with pytest.raises(UsageError, match=f"saved tensor 1.{number.index} cannot be offloaded"):
        lower(replace(plan, decisions=(moves,)))


def test_one_storage_is_not_moved_by_two_names() -> None:
    """A storage that one layer returns and the next one saves cannot be moved by two decisions: the second is
    refused.
    """
    saved = next(t.index for t in halves().measurement.costs[2].saved if t.origin.kind == "input")
    task, plan = make_chain(), halves((0, SIGMOID, "host"), (0, ((2, saved),), "host"))
    with pytest.raises(UsageError, match=f"offloads the storage of saved tensor 2.{saved} a second time"):
        Trainer(task, plan).step(batch_of(task, plan))


def test_a_value_that_two_layers_hold_is_copied_once() -> None:
    """The sigmoid's result, which the next layer saves too, is copied once: one copy's bytes are reserved and
    freed.
    """
    task, plan = make_chain(), halves((0, SIGMOID, "host"))
    assert len(StageStorages.of(plan, 0).savers(Subject(1, 0))) == 2
    assert [(str(a.lender), a.slots, a.slot_bytes) for a in arenas_of(plan, lower(plan))] == [
        ("host0", 4, 512)
    ]
    kept, left = (
        next(s for s in certify(task, one).devices[0].memory if s.action == "0F3").by_category[
            Category.ACTIVATIONS
        ]
        for one in (replace(plan, decisions=()), plan)
    )
    assert kept - left == 2 * 512  # of microbatches 0 and 1; that of 2 is still on its way


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_a_second_forward_starts_from_is_back_before_it(ahead: int) -> None:
    """A value saved by one layer, and read by the next one's recomputation, is back before it, and away
    between the two forwards.
    """
    task = task_of(
        lambda: [nn.Linear(8, 8), nn.Sigmoid(), nn.ReLU(), nn.Linear(8, 4)], optimizer=torch.optim.AdamW
    )
    still = plan_of(task, [4], microbatches=4, schedule="gpipe")
    again = Decision(stage=0, subject=Run(start=2, stop=4), what=What.RECOMPUTE, ahead=ahead)
    away = replace(
        again, subject=SavedTensors(tensors=((1, 0),)), what=What.OFFLOAD, place=parse_place("host")
    )
    plan = replace(still, decisions=(again, away))
    actions = [str(action) for action in lower(plan).actions[0] if action.microbatch == 3]
    assert actions.index("0WAIT_RELOAD3[1.0]@host") < actions.index("0R3[2:4]")
    losses, state, measured = trained(task, plan)
    expected, wanted, _ = trained(task, still)
    assert losses == expected and all(torch.equal(state[name], wanted[name]) for name in wanted)
    assert step_peaks_of(measured) == step_peaks_of(certify(task, plan, steps=STEPS))
    assert step_peaks_of(measured) == step_peaks_of(simulate(plan, steps=STEPS))


def test_a_smaller_last_batch_moves_less() -> None:
    """A batch that is not a multiple of the plan's microbatches trains the same numbers with and without
    moves.
    """
    task, plan = make_chain(), halves((0, SIGMOID, "host*1+device1*2"), microbatches=3)
    moving_one, still = Trainer(task, plan), Trainer(task, replace(plan, decisions=()))
    for size in (6, 5, 3, 1, 6):
        torch.manual_seed(size)
        batch = make_batch(size)
        assert moving_one.step(batch) == still.step(batch)
        assert moving_one.evaluate(batch) == still.evaluate(batch)
    assert all(
        torch.equal(a, b)
        for a, b in zip(*(t.state_dict().values() for t in (moving_one, still)), strict=True)
    )


def test_a_sample_alone_that_keeps_other_tensors_is_told() -> None:
    """A single sample with other saved tensors is reported: attention over it does not copy its transposes."""
    task = task_of(lambda: [nn.Linear(8, 16), Attention(16), nn.Linear(16, 4)])
    still, refused = plan_of(task, [2, 1], devices=2), list[str]()
    tensors = [name for name in movable(still, 0) if name[0] == 1]
    for name in tensors:
        move = Decision(
            stage=0, subject=SavedTensors(tensors=(name,)), what=What.OFFLOAD, place=parse_place("host")
        )
        trainer = Trainer(task, replace(still, decisions=(replace(move, behind=0),)))
        trainer.step(batch_of(task, still))
        try:
            trainer.step(task.batch(3))
        except UsageError as error:
            refused.append(str(error))
    assert 0 < len(refused) < len(tensors)
    assert all(
        re.search(r"bytes, but by the plan .*: a smaller microbatch saves other", text) for text in refused
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("bundle", [1, 2])
def test_equal_layers_around_what_moves_are_folded(bundle: int) -> None:
    """Equal layers around moves are folded: of 24 in two stages, with two layers' saved tensors moved, some
    stand for others, and every sample is that of a full dry run.
    """
    task = task_of(lambda: [nn.Linear(8, 8) for _ in range(24)], outputs=8)
    plan = plan_of(task, [12, 12], microbatches=3)
    index = next(t.index for t in plan.measurement.costs[17].saved if t.origin.kind == "input")
    tensors = ((17, index), (23, index))[:bundle]
    moves = Decision(
        stage=1, subject=SavedTensors(tensors=tensors), what=What.OFFLOAD, place=parse_place("device0")
    )
    plan = replace(plan, decisions=(replace(moves, behind=0),))
    program = lower(plan)
    assert any(action.kind is Kind.OFFLOAD for action in program.actions[1])
    short = Shortened.of(task, plan, program, build_chain(task, 2, seed=0))
    assert 8 < len(short.chain.layers) < 24
    assert certify(task, plan) == certify(task, plan, fold=False)


@pytest.mark.parametrize("changed", [{"shape": (2, 63)}, {"dtype": "float64"}])
def test_a_tensor_that_is_not_the_profiled_one_is_refused(changed: dict[str, Any]) -> None:
    """A saved tensor must match the profiled one of its number; another is refused."""
    task, plan = make_chain(), halves((0, SIGMOID, "host"))
    trainer = Trainer(task, plan)
    storages = trainer.runners[0].mover.stages[0]
    costs = list(storages.costs)
    costs[1] = replace(costs[1], saved=(replace(costs[1].saved[0], **changed),))
    storages.costs = tuple(costs)
    with pytest.raises(
        UsageError, match=r"saved tensor 1.0 is \[2, 64\] of float32 in 512 bytes, but by the plan"
    ):
        trainer.step(batch_of(task, plan))


def test_a_tensor_that_was_changed_in_place_is_found_out() -> None:
    """Watched layers check, as autograd does, that a saved tensor returns unchanged; an in-place change is
    detected.
    """
    found = Luggage({3: {0}})
    x = torch.randn(4, requires_grad=True)
    with found.watching(3):
        y = torch.sigmoid(x)
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_after_a_failed_step_no_slot_is_in_use() -> None:
    """A failed step drops its offloaded tensors, and the next step trains the numbers of a trainer without
    failures.
    """
    task, plan = make_chain(), halves((0, SIGMOID, "host"), (1, ((4, 0),), "device0"), microbatches=3)
    broken, sound = Trainer(task, plan), Trainer(task, plan)
    layer = broken.runners[1].stages[1].layers[0].module
    forward, calls = layer.forward, Counter[str]()

    def failing(x: Tensor) -> Tensor:
        calls["forward"] += 1
        if calls["forward"] == 3:
            raise RuntimeError("it failed")
        return forward(x)

    layer.forward = failing  # type: ignore[method-assign]
    levels = [runner.meter.total for runner in broken.runners if runner.meter]
    with pytest.raises(RuntimeError, match="it failed"):
        broken.step(batch_of(task, plan, 9))
    layer.forward = forward  # type: ignore[method-assign]
    gc.collect()
    assert [runner.meter.total for runner in broken.runners if runner.meter] == levels
    assert not any(runner.mover.borrowed.in_use for runner in broken.runners)
    for step in range(2):
        assert broken.step(batch_of(task, plan, step)) == sound.step(batch_of(task, plan, step))
