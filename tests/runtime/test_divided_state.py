"""Sharded state of a stage's replicas: the numbers of plain training, and predicted bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from pipefit.capture.storages import without_memory
from pipefit.errors import UsageError
from pipefit.planner import plan as make_plan
from pipefit.runtime import Trainer, certify, train
from pipefit.runtime.engine.in_flight import move
from pipefit.runtime.engine.runner import DeviceRunner
from pipefit.runtime.options import Saving
from pipefit.schema.actions import Action
from pipefit.schema.decisions import Decision, Microbatches, Run, SavedTensors, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Sharding
from pipefit.schema.json_io import load_cluster
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.simulator import simulate
from support.fully_sharded import fully_sharded
from support.gallery_samples import sampled
from support.known_profiles import profile
from support.local_batches import Plain, batches, equal, parameters, random_grids, sliced_plan
from support.replicated_models import MODELS, plain_task, precise, replicated, tied
from support.separate_process import in_workers
from support.sharded_stages import divided, grid_plan
from support.small_tasks import goes_on, in_one_process
from support.stage_reader import READINGS, WORKERS, reading
from support.step_peaks import step_peaks, too_low

SIZES = (12, 6, 4, 3)
DIVIDED: tuple[Sharding, ...] = ("optimizer", "gradients", "parameters")
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def profiles() -> dict[str, ModelProfile]:
    """Return the profile of every model, at the sizes of all local batches."""
    return {name: profile(replicated(name), microbatch_size=SIZES) for name in MODELS}


def random_plan(found: ModelProfile, seed: int, **training: Any) -> Plan:
    """Return one to three stages of random degrees, each with random sharding, or none, in some buckets."""
    rng = Random(seed)
    edges, degrees = random_grids(rng, [1, 2, 2, 3])
    shard = [rng.choice((*DIVIDED, *DIVIDED, "none")) for _ in degrees]
    if found.measurements[0].shared and len(degrees) > 1:  # the first and the last stage have a copy each
        shard[0] = shard[-1] = rng.choice(["none", "optimizer"])
    return sliced_plan(
        found,
        edges,
        degrees,
        microbatches=rng.randint(1, 3),
        schedule=rng.choice(["gpipe", "1f1b"]),
        rng=rng,
        shard=shard,
        buckets=[rng.choice([1, 2, 4]) for _ in degrees],
        **training,
    )


RANDOM = [(name, seed) for name in MODELS for seed in range(3)]
OFTEN = [*zip(MODELS, range(3), strict=True)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "seed"), sampled(RANDOM, often=OFTEN))
def test_the_numbers_are_those_of_plain_training(
    name: str, seed: int, profiles: dict[str, ModelProfile]
) -> None:
    """Losses and parameters after three steps are plain training's, under any sharding."""
    task = replicated(name, optimizer=MOMENTUM)
    plan = random_plan(
        replace(profiles[name], fingerprint=profile(task, microbatch_size=3).fingerprint), seed
    )
    trainer, plain = Trainer(task, plan), Plain(task, plan)
    for inputs, targets in batches(task, plan, 3):
        assert trainer.step((inputs, targets)) == pytest.approx(plain.step(inputs, targets), rel=1e-6)
    assert equal(parameters(trainer.state_dict()), parameters(dict(plain.module.state_dict())), relative=1e-9)


@pytest.mark.sample(2)
@pytest.mark.parametrize("shard", DIVIDED)
def test_the_numbers_are_bitwise_those_of_whole_replicas(
    shard: Sharding, profiles: dict[str, ModelProfile]
) -> None:
    """With one microbatch per step, sums keep their order: sharded updates are bitwise those of whole
    replicas.
    """
    whole, divided = (
        sliced_plan(profiles["dropped"], [0, 3, 6], [3, 2], microbatches=1, shard=(what, what))
        for what in ("none", shard)
    )
    task = replicated("dropped")
    one, other = Trainer(task, whole), Trainer(task, divided)
    for batch in batches(task, whole, 3):
        assert one.step(batch) == other.step(batch)
    assert equal(one.state_dict(optimizer=True), other.state_dict(optimizer=True), relative=0)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "seed"), sampled(RANDOM, often=OFTEN))
def test_simulator_dry_run_meter_and_allocator_agree(
    name: str, seed: int, profiles: dict[str, ModelProfile]
) -> None:
    """Simulator, dry run, meter and allocator agree on every device's peak in both steps, to the byte; the
    simulator's are bounds if two layers of a stage use one parameter.
    """
    plan = random_plan(profiles[name], seed + 10)
    found = step_peaks(replicated(name), plan)
    assert found.dry == found.metered == found.allocated
    if name == "tied" and len(plan.stages) == 1:
        assert not too_low(replicated(name), plan)
    else:
        assert found.simulated == found.dry


@pytest.mark.sample(1)
@pytest.mark.parametrize("shard", DIVIDED)
def test_state_before_the_first_step_is_divided_too(shard: Sharding) -> None:
    """Adagrad has its state before any step: all four accounts agree on every device in the first step too."""
    task = replicated("dropped", optimizer=partial(torch.optim.Adagrad, lr=0.1))
    found = profile(task, microbatch_size=SIZES)
    plan = sliced_plan(found, [0, 3, 6], [3, 2], microbatches=2, shard=(shard, shard))
    peaks = step_peaks(task, plan)
    assert peaks.simulated == peaks.dry == peaks.metered == peaks.allocated


@pytest.mark.sample(1)
@pytest.mark.parametrize("shard", DIVIDED)
def test_clipping_and_accumulation_are_those_of_the_whole_batch(
    shard: Sharding, profiles: dict[str, ModelProfile]
) -> None:
    """The clip norm counts every parameter once, with its owner's gradient; gradients of two batches
    accumulate.
    """
    task, norm = replicated("dropped", optimizer=partial(torch.optim.SGD, lr=1.0)), 0.01
    found = replace(profiles["dropped"], fingerprint=profile(task, microbatch_size=3).fingerprint)
    plan = sliced_plan(found, [0, 2, 6], [3, 2], clip_norm=norm, shard=(shard, shard))
    whole = replace(plan, stages=sliced_plan(found, [0, 2, 6], [3, 2]).stages)
    trainer, plain = Trainer(task, plan, accumulate=2), Trainer(task, whole, accumulate=2)
    for one in batches(task, plan, 4):
        assert trainer.step(one) == pytest.approx(plain.step(one), rel=1e-12)
    assert equal(trainer.state_dict(), plain.state_dict(), relative=1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "precision", sampled(["master-float16", "master-bfloat16"], often=["master-float16"])
)
@pytest.mark.parametrize("shard", DIVIDED)
def test_precisions_are_those_of_whole_replicas(shard: Sharding, precision: Any) -> None:
    """Precisions match whole replicas: the loss is scaled, owners hold master weights, one overflow skips the
    update of all.
    """
    task = precise(precision)
    found = profile(task, microbatch_size=(4, 2))
    whole, divided = (
        sliced_plan(found, [0, 3, 5], [2, 2], microbatches=1, shard=(what, what), buckets=(2, 2))
        for what in ("none", shard)
    )
    one, other = Trainer(task, whole), Trainer(task, divided)
    for step in range(3):
        torch.manual_seed(step)
        batch = task.batch(4)
        if step == 1:
            batch = (batch[0] * 1e4, batch[1])
        assert one.step(batch) == pytest.approx(other.step(batch), nan_ok=True)
    assert equal(one.state_dict(optimizer=True), other.state_dict(optimizer=True), relative=0)
    peaks = step_peaks(task, divided)
    assert peaks.dry == peaks.metered == peaks.allocated == peaks.simulated


@pytest.mark.sample(2)
@pytest.mark.parametrize("shard", DIVIDED)
def test_training_goes_on_under_other_plans(
    shard: Sharding, profiles: dict[str, ModelProfile], tmp_path: Path
) -> None:
    """Training continues under other plans: each owner's state is stored once under the model's names, and
    whole replicas or other owners load it.
    """
    task, found = replicated("normed"), profiles["normed"]
    plans = [
        sliced_plan(found, [0, 2, 6], [3, 2], shard=(shard, shard)),
        sliced_plan(found, [0, 3, 6], [1, 4], shard=("none", shard)),
        sliced_plan(found, [0, 2, 6], [2, 1]),
    ]
    goes_on(task, plans, batches(task, plans[0], 4), tmp_path)


@pytest.mark.gallery
def test_workers_train_as_one_process_does(profiles: dict[str, ModelProfile], tmp_path: Path) -> None:
    """Four workers over gloo with sharded state have the losses and peaks of one process, and save whole
    state.
    """
    task = replicated("dropped")
    plan = sliced_plan(
        profiles["dropped"], [0, 3, 6], [2, 2], clip_norm=1.0, shard=(DIVIDED[-1], "optimizer")
    )
    losses, trace = train(
        partial(replicated, "dropped"), plan, steps=2, saving=Saving(directory=str(tmp_path))
    )
    alone, expected = in_one_process(task, plan, 2)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert trace.peak_bytes == certify(task, plan).peak_bytes
    after = Trainer(task, sliced_plan(profiles["dropped"], [0, 6], [1]))
    assert after.load(tmp_path) == 2
    assert equal(after.state_dict(optimizer=True), alone.state_dict(optimizer=True), relative=1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize("shard", DIVIDED)
def test_decisions_about_memory_hold_for_divided_state(
    shard: Sharding, profiles: dict[str, ModelProfile]
) -> None:
    """Recomputed runs and offloaded tensors change no number of sharded training, and their bytes are
    predicted.
    """
    task, found = replicated("dropped"), profiles["dropped"]
    plan = sliced_plan(found, [0, 5, 6], [2, 3], microbatches=3, shard=(shard, shard), buckets=(3, 1))
    recompute = Decision(
        stage=0, subject=Run(start=1, stop=4), what=What.RECOMPUTE, microbatches=Microbatches()
    )
    moves = Decision(
        stage=0,
        subject=SavedTensors(tensors=((0, 0),)),
        what=What.OFFLOAD,
        place=parse_place("host"),
        microbatches=Microbatches(),
    )
    decided = replace(plan, decisions=(recompute, moves))
    kept, freed = Trainer(task, plan), Trainer(task, decided)
    for one in batches(task, plan, 2):
        assert kept.step(one) == freed.step(one)
    assert equal(kept.state_dict(optimizer=True), freed.state_dict(optimizer=True), relative=0)
    assert simulate(decided).peak_bytes == certify(task, decided).peak_bytes == freed.trace.peak_bytes


@pytest.mark.sample(1)
@pytest.mark.parametrize("shard", DIVIDED)
def test_evaluations_smaller_batches_and_failed_steps(
    shard: Sharding, profiles: dict[str, ModelProfile]
) -> None:
    """An evaluation has the loss of whole replicas, a smaller batch their numbers, and training continues
    after a failed step.
    """
    task, found = replicated("dropped"), profiles["dropped"]
    whole, divided = (
        sliced_plan(found, [0, 2, 6], [1, 3], shard=("none", what), buckets=(1, 3))
        for what in ("none", shard)
    )
    one, other = Trainer(task, whole), Trainer(task, divided)
    (inputs, targets), second = batches(task, whole, 2)
    with pytest.raises(Interrupted), interrupting(other, "1REDUCE"):
        other.step(second)
    for trainer in (one, other):
        for stage in trainer.stages:
            stage.batch_number = 0
    assert one.step((inputs[:18], targets[:18])) == other.step((inputs[:18], targets[:18]))
    assert one.evaluate(second) == other.evaluate(second)
    assert one.step(second) == pytest.approx(other.step(second), rel=1e-12)
    assert equal(one.state_dict(), other.state_dict(), relative=1e-9)


class Interrupted(Exception):
    """An error for an interrupted step."""


@contextmanager
def interrupting(trainer: Trainer, text: str) -> Iterator[None]:
    """Stop steps at the first action whose text begins with this prefix."""
    timed = DeviceRunner._timed

    def stopping(self: DeviceRunner, action: Action, *rest: Any) -> None:
        if str(action).startswith(text):
            raise Interrupted
        timed(self, action, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceRunner, "_timed", stopping)
        yield


@pytest.mark.gallery
@pytest.mark.parametrize("shard", sampled(DIVIDED, often=["parameters"]))
def test_replicas_of_tensor_shards_divide_state_too(shard: Sharding, tmp_path: Path) -> None:
    """Devices that hold the same tensor-parallel shard divide its state: plain training's numbers, predicted
    bytes, whole checkpoints.
    """
    task = divided("dropped", optimizer=MOMENTUM)
    found = profile(task, microbatch_size=(12, 6), tensor=(1, 2))
    plan = grid_plan(found, [0, 3, 6], [(2, 2), (2, 1)])
    grids = (replace(stage.grid, shard=shard, buckets=3) for stage in plan.stages)
    plan = replace(plan, stages=tuple(replace(s, grid=g) for s, g in zip(plan.stages, grids, strict=True)))
    trainer, plain = Trainer(task, plan), Plain(task, plan)
    for one in batches(task, plan, 2):
        assert trainer.step(one) == pytest.approx(plain.step(*one), rel=1e-6)
    assert equal(trainer.state_dict(), dict(plain.module.state_dict()), relative=1e-9)
    assert trainer.trace.peak_bytes == certify(task, plan).peak_bytes == simulate(plan).peak_bytes
    trainer.save(tmp_path)
    trainer.finish()
    after = Trainer(task, grid_plan(found, [0, 6], [(1, 1)]))
    after.load(tmp_path)
    assert equal(after.state_dict(optimizer=True), trainer.state_dict(optimizer=True), relative=0)


@pytest.mark.gallery
def test_the_numbers_are_those_of_fully_shard(tmp_path: Path) -> None:
    """Two replicas that shard parameters train the numbers of `fully_shard` in two processes, each with a
    part of each parameter.
    """
    task = plain_task()
    plan = sliced_plan(
        profile(task, microbatch_size=(4, 2)),
        [0, 5],
        [2],
        microbatches=1,
        shard=("parameters",),
        buckets=(3,),
    )
    data, trainer = batches(task, plan, 3), Trainer(task, plan)
    for one in data:
        trainer.step(one)
    in_workers(2, fully_sharded, str(tmp_path), task, data)
    assert equal(trainer.state_dict(), torch.load(tmp_path / "parameters.pt"), relative=1e-9)


def test_a_worker_refuses_to_read_a_module_of_which_it_holds_parts(tmp_path: Path) -> None:
    """In a worker under ZeRO-3 an existing module is not called, copied or saved: each says what to do
    instead, after every step, and the trainer's tensors are those of training in one process.
    """
    task = plain_task()
    found = profile(task, microbatch_size=(4, 2))
    plan = sliced_plan(found, [0, 5], [2], microbatches=1, shard=("parameters",))
    data, trainer = batches(task, plan, 2), Trainer(task, plan)
    for one in data:
        trainer.step(one)
    in_workers(WORKERS, reading, str(tmp_path), task, plan, data)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORKERS)]
    for refusals, _ in results:
        assert refusals.keys() == READINGS.keys()
        assert all("trainer.state_dict" in refusal for refusal in refusals.values())
    assert equal(trainer.state_dict(), {**results[0][1], **results[1][1]}, relative=1e-9)


def frozen() -> nn.Sequential:
    """Return layers whose first and last share a frozen weight, and a trained one."""
    layers = tied()
    assert isinstance(layers[0], nn.Linear)
    layers[0].weight.requires_grad_(False)
    return nn.Sequential(*layers).double()


def test_what_is_shared_and_not_trained_may_be_divided() -> None:
    """A frozen weight shared by two stages, each with its copy, may be sharded: training is that of a plain
    loop.
    """
    task = replace(replicated("tied", optimizer=MOMENTUM), module=frozen)
    plan = sliced_plan(profile(task, microbatch_size=(4, 2)), [0, 3, 6], [2, 2], shard=["parameters"] * 2)
    plain, trainer = Plain(task, plan), Trainer(task, plan)
    for inputs, targets in batches(task, plan, 2):
        assert trainer.step((inputs, targets)) == pytest.approx(plain.step(inputs, targets), rel=1e-6)
    assert equal(parameters(trainer.state_dict()), parameters(dict(plain.module.state_dict())), relative=1e-9)


def test_layers_that_share_what_is_not_trained_are_gathered_together() -> None:
    """Layers that share a frozen weight in one stage of several buckets are gathered together: peaks, and the
    numbers of a plain loop.
    """
    task = replace(replicated("tied", optimizer=MOMENTUM), module=frozen)
    of = profile(task, microbatch_size=(4, 2))
    plan = sliced_plan(of, [0, 6], [2], shard=["parameters"], buckets=(3,))
    plain, trainer = Plain(task, plan), Trainer(task, plan)
    for inputs, targets in batches(task, plan, 2):
        assert trainer.step((inputs, targets)) == pytest.approx(plain.step(inputs, targets), rel=1e-6)
    assert equal(parameters(trainer.state_dict()), parameters(dict(plain.module.state_dict())), relative=1e-9)
    assert simulate(plan).peak_bytes == certify(task, plan).peak_bytes == trainer.trace.peak_bytes


@pytest.mark.parametrize("precision", ["float32", "mixed-bfloat16"])
def test_a_device_never_has_room_for_what_others_own(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters owned by other ranks get no memory on a device; numbers and peaks are unchanged."""
    task = precise(precision)
    found = profile(task, microbatch_size=(4, 2))
    plan = sliced_plan(
        found, [0, len(found.layers)], [2], microbatches=1, shard=("parameters",), buckets=(3,)
    )
    usual, moved = Trainer(task, plan), list[int]()

    def moving(modules: Sequence[nn.Module], device: torch.device, *, absent: frozenset[int]) -> None:
        """Move modules as to another device."""
        for parameter in (one for module in modules for one in module.parameters() if id(one) in absent):
            parameter.data = without_memory(torch.empty_like(parameter.data))
            moved.append(id(parameter))
        move(modules, device)

    monkeypatch.setattr("pipefit.runtime.engine.assembly.move", moving)
    apart = Trainer(task, plan)
    assert moved
    for one in batches(task, plan, 2):
        assert usual.step(one) == apart.step(one)
    assert equal(usual.state_dict(optimizer=True), apart.state_dict(optimizer=True), relative=0)
    assert usual.trace.peak_bytes == apart.trace.peak_bytes == simulate(plan).peak_bytes


def test_a_planner_says_what_cannot_be_divided(profiles: dict[str, ModelProfile]) -> None:
    """A planner refuses by name to shard a trained weight that two stages share, since its gradients must
    stay whole.
    """
    with pytest.raises(
        UsageError, match=r"shard gradients, but shares parameter '0\.weight' with another stage"
    ):
        make_plan(
            *(profiles["tied"], load_cluster("emulated:4x1MiB")),
            batch_size=24,
            microbatches=2,
            data=2,
            stages=2,
            shard="gradients",
        )
