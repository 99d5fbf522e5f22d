"""Stages of tensor shards, alone and with replicas: the numbers of plain training, whoever has which part."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from divided import MODELS, divided, grid_plan
from pipefit.plans import Plan
from pipefit.profiler import profile
from pipefit.profiles import ModelProfile
from pipefit.runtime import Trainer
from slices import Plain, batches, equal
from tiny import batch_of

SIZES = (12, 6, 4)
GRIDS = [(1, 1), (2, 1), (1, 2), (3, 1), (1, 4), (2, 2)]
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def profiled(name: str) -> ModelProfile:
    """The profile of a model, at the sizes of all slices, whole and divided."""
    return profile(divided(name, optimizer=MOMENTUM), microbatch_size=SIZES, tensor=(1, 2, 4))


def random_plan(name: str, seed: int, **training: Any) -> Plan:
    """Up to three stages of random grids on at most eight devices, dealt out at random."""
    rng = Random(seed)
    count = rng.choice([1, 2, 3])
    degrees = [(8, 2)]
    while sum(data * tensor for data, tensor in degrees) > 8 or all(tensor == 1 for _, tensor in degrees):
        degrees = [rng.choice(GRIDS) for _ in range(count)]
        if name == "tied":  # stages that share a parameter have as many shards
            degrees = [(data, degrees[0][1]) for data, _ in degrees]
    edges = [0, *sorted(rng.sample(range(1, 6), count - 1)), 6]
    schedule = rng.choice(["gpipe", "1f1b"])
    return grid_plan(
        profiled(name), edges, degrees, microbatches=rng.randint(1, 3), schedule=schedule, rng=rng, **training
    )


def parameters(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of a state; of buffers, every replica has its own."""
    return {name: tensor for name, tensor in state.items() if "running" not in name and "num_batches" not in name}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_are_those_of_every_stage_mapped_over_its_slices(name: str, seed: int) -> None:
    """Losses and parameters after three steps: draws, statistics of samples and tied weights included."""
    task = divided(name, optimizer=MOMENTUM)
    plan = random_plan(name, seed)
    trainer, plain = Trainer(task, plan), Plain(task, plan)
    for inputs, targets in batches(task, plan, 3):
        assert trainer.step((inputs, targets)) == pytest.approx(plain.step(inputs, targets), rel=1e-6)
    assert equal(parameters(trainer.state_dict()), parameters(dict(plain.module.state_dict())), relative=1e-9)


def shares(trainer: Trainer) -> int:
    """How many tensors the ranks of a trainer have parts of."""
    known = (stage.shards for stage in trainer.stages if stage.shards is not None)
    return sum(one.is_divided(name) for one in known for name in one.shards)


def test_statistics_of_samples_are_whole_where_only_shards_divide_a_stage() -> None:
    """Every rank has the channels of its own part, and a state dict all of them."""
    task = divided("normed", optimizer=MOMENTUM)
    plan = grid_plan(profiled("normed"), [0, 3, 6], [(1, 4), (1, 2)])
    trainer, plain = Trainer(task, plan), Plain(task, plan)
    for inputs, targets in batches(task, plan, 2):
        trainer.step((inputs, targets))
        plain.step(inputs, targets)
    assert shares(trainer)
    assert equal(trainer.state_dict(), dict(plain.module.state_dict()), relative=1e-9)


def test_clipping_counts_every_part_once_and_what_is_whole_once() -> None:
    """The norm of all gradients over two batches, whoever has them; the factor is a number in single precision."""
    task, norm = divided("tied", optimizer=partial(torch.optim.SGD, lr=1.0)), 0.01
    found = replace(profiled("tied"), fingerprint=profile(task, microbatch_size=4).fingerprint)
    plan = grid_plan(found, [0, 2, 6], [(2, 2), (1, 2)], clip_norm=norm)
    trainer, plain = Trainer(task, plan, accumulate=2), Plain(task, plan)
    (first, one), (second, other) = batches(task, plan, 2)
    trainer.step((first, one))
    trainer.step((second, other))
    plain.backward(first, one, 0.5)
    plain.steps += 1
    plain.backward(second, other, 0.5)
    expected = nn.utils.clip_grad_norm_(plain.module.parameters(), norm)
    plain.optimizer.step()
    found_norms = {stage.agreement.norm for stage in trainer.stages if stage.agreement is not None}
    assert len(found_norms) == 1  # all agree, to the bit
    assert found_norms.pop() == pytest.approx(float(expected), rel=1e-6)
    assert equal(trainer.state_dict(), dict(plain.module.state_dict()), relative=1e-6)


def test_smaller_batches_and_evaluations_divide_parameters_as_training_does() -> None:
    """Eighteen samples of twenty-four train as plain training does, and then all are evaluated."""
    task, plan = divided("tied", optimizer=MOMENTUM), grid_plan(profiled("tied"), [0, 2, 6], [(3, 2), (1, 2)])
    trainer, plain = Trainer(task, plan), Plain(task, plan)
    inputs, targets = batch_of(task, plan)
    for count in (18, 24):
        expected = plain.step(inputs[:count], targets[:count])
        assert trainer.step((inputs[:count], targets[:count])) == pytest.approx(expected, rel=1e-6)
    assert equal(trainer.state_dict(), dict(plain.module.state_dict()), relative=1e-9)
    plain.module.eval()
    with torch.inference_mode():
        expected = float(nn.functional.mse_loss(plain.module(inputs), targets))
        assert trainer.evaluate((inputs, targets)) == pytest.approx(expected, rel=1e-6)
        assert trainer.evaluate((inputs[:15], targets[:15])) == pytest.approx(
            float(nn.functional.mse_loss(plain.module(inputs[:15]), targets[:15])), rel=1e-6
        )


def test_an_evaluation_uses_the_statistics_of_all_channels() -> None:
    """Batch norm of a rank in evaluation mode, and buffers that no state dict has."""
    task, plan = divided("normed", optimizer=MOMENTUM), grid_plan(profiled("normed"), [0, 6], [(1, 4)])
    trainer, plain = Trainer(task, plan), Plain(task, plan)
    inputs, targets = batch_of(task, plan)
    trainer.step((inputs, targets))
    plain.step(inputs, targets)
    plain.module.eval()
    expected = nn.functional.mse_loss(plain.module(inputs), targets).item()
    assert trainer.evaluate((inputs, targets)) == pytest.approx(expected, rel=1e-6)
    before = trainer.state_dict()
    plain.module.train()
    assert trainer.step((inputs, targets)) == pytest.approx(plain.step(inputs, targets), rel=1e-6)
    assert equal(trainer.state_dict(), dict(plain.module.state_dict()), relative=1e-9)
    assert not equal(trainer.state_dict(), before, relative=1e-9)


@pytest.mark.parametrize("how", [([0, 6], [(1, 1)]), ([0, 3, 6], [(1, 4), (2, 1)]), ([0, 2, 6], [(2, 2), (1, 2)])])
@pytest.mark.parametrize("name", ["normed", "dropped"])
def test_training_goes_on_under_other_degrees(name: str, how: Any, tmp_path: Path) -> None:
    """Checkpoints have whole tensors, the optimizer's too, under the names of the module."""
    adam = partial(torch.optim.AdamW, lr=0.01)
    task = divided(name, optimizer=adam)
    found = replace(profiled(name), fingerprint=profile(task, microbatch_size=4).fingerprint)
    saved, other = grid_plan(found, [0, 3, 6], [(1, 2), (1, 2)]), grid_plan(found, *how)
    before, after = Trainer(task, saved), Trainer(task, other, seed=1)
    never = Trainer(task, saved)
    first, second = batches(task, saved, 2)
    for trainer in (before, never):
        trainer.step(first)
    before.save(tmp_path)
    before.finish()
    assert after.load(tmp_path) == 1
    assert equal(after.state_dict(optimizer=True), before.state_dict(optimizer=True), relative=0)
    assert after.state_dict(optimizer=True).keys() >= {"optimizer/0.up.weight/exp_avg"}
    never.step(second)
    after.step(second)
    if name == "dropped" and all(data == 1 for data, _ in how[1]):  # slices draw for themselves
        assert equal(after.state_dict(), never.state_dict(), relative=1e-9)
    plain = task.build()
    plain.load_state_dict(pipefit_weights(tmp_path))
    assert equal(dict(plain.state_dict()), before.state_dict(), relative=0)


def pipefit_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of the newest checkpoint, as plain PyTorch takes them."""
    from pipefit.checkpoints import load_state_dict

    return load_state_dict(folder)


def test_whole_checkpoints_are_divided_as_they_are_loaded(tmp_path: Path) -> None:
    """A plan without shards saves; ranks take their parts, and train on as it does."""
    task = divided("normed", optimizer=MOMENTUM)
    whole, plan = grid_plan(profiled("normed"), [0, 6], [(1, 1)]), grid_plan(profiled("normed"), [0, 6], [(1, 4)])
    one, ranks = Trainer(task, whole), Trainer(task, plan, seed=1)
    first, second = batches(task, whole, 2)
    one.step(first)
    one.save(tmp_path)
    one.finish()
    ranks.load(tmp_path)
    assert ranks.step(second) == pytest.approx(one.step(second), rel=1e-6)
    assert equal(ranks.state_dict(), one.state_dict(), relative=1e-9)
    ranks.load_state_dict(one.state_dict(optimizer=True))
    assert equal(ranks.state_dict(optimizer=True), one.state_dict(optimizer=True), relative=0)
