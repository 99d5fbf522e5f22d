"""Stages with replicas: the numbers of plain training on local batches, and bytes known in advance."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from pipefit.capture import Chain, Task
from pipefit.capture.sample import Sample
from pipefit.errors import UsageError
from pipefit.fake_cuda import chain as sizes_of_a_model
from pipefit.fake_cuda.chain import fake_chain
from pipefit.fake_cuda.target import FakeTarget
from pipefit.lowering import lower
from pipefit.runtime import Trainer, certify, train
from pipefit.schema.decisions import Decision, Microbatches, Run, What
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.simulator import simulate
from support.gallery_samples import sampled, seeds
from support.known_profiles import profile
from support.local_batches import Plain, batches, equal, parameters, random_grids, sliced_plan
from support.replicated_models import MODELS, Table, replicated
from support.small_tasks import batch_of, in_one_process, task_of
from support.step_peaks import step_peaks

SIZES = (12, 6, 4, 3)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def profiles() -> dict[str, ModelProfile]:
    """Return the profile of every model at the sizes of all local batches."""
    return {name: profile(replicated(name), microbatch_size=SIZES) for name in MODELS}


def random_plan(found: ModelProfile, seed: int, **training: Any) -> Plan:
    """Return two or three stages of random degrees on at most eight devices, in random order."""
    rng = Random(seed)
    edges, degrees = random_grids(rng, [2, 2, 3])
    schedule = rng.choice(["gpipe", "1f1b"])
    return sliced_plan(
        found, edges, degrees, microbatches=rng.randint(1, 3), schedule=schedule, rng=rng, **training
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", seeds(2, of=4))
@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_are_those_of_every_stage_mapped_over_its_slices(
    name: str, seed: int, profiles: dict[str, ModelProfile]
) -> None:
    """Losses and parameters after three steps equal every stage mapped over its local batches: random draws,
    batch statistics and tied weights included.
    """
    task = replicated(name, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    plan = random_plan(
        replace(profiles[name], fingerprint=profile(task, microbatch_size=3).fingerprint), seed
    )
    trainer, plain = Trainer(task, plan), Plain(task, plan)
    for inputs, targets in batches(task, plan, 3):
        assert trainer.step((inputs, targets)) == pytest.approx(plain.step(inputs, targets), rel=1e-6)
    assert equal(parameters(trainer.state_dict()), parameters(dict(plain.module.state_dict())), relative=1e-9)


def test_equal_degrees_train_as_smaller_microbatches_do(profiles: dict[str, ModelProfile]) -> None:
    """With two replicas everywhere, local batches train as the microbatches of a plan without replicas, with
    the same random draws.
    """
    task = replicated("dropped")
    halves = sliced_plan(profiles["dropped"], [0, 3, 6], [2, 2], microbatches=2)
    small = replace(profiles["dropped"], measurements=profiles["dropped"].measurements[1:])
    others = sliced_plan(small, [0, 3, 6], [1, 1], microbatches=4)
    one, other = Trainer(task, halves), Trainer(task, others)
    for inputs, targets in batches(task, halves, 2):
        assert one.step((inputs, targets)) == pytest.approx(other.step((inputs, targets)), rel=1e-6)
    assert equal(one.state_dict(), other.state_dict(), relative=1e-9)


RANDOM = [(name, seed) for name in MODELS for seed in range(3)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "seed"), sampled(RANDOM, often=[*zip(MODELS, range(3), strict=True)]))
def test_simulator_dry_run_meter_and_allocator_agree(
    name: str, seed: int, profiles: dict[str, ModelProfile]
) -> None:
    """Simulator, dry run, meter and allocator agree on all devices' peaks in both steps, to the byte."""
    found = step_peaks(replicated(name), random_plan(profiles[name], seed + 10))
    assert found.dry == found.metered == found.allocated == found.simulated


def test_a_dry_run_captures_a_model_once_for_each_number_of_samples(
    profiles: dict[str, ModelProfile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run captures a model once for each number of samples: six replicas of two stages take two
    captures.
    """
    sizes = list[int]()

    def counted(task: Task, fake: FakeTarget, given: Sample) -> Chain:
        sizes.append(len(given[0]))
        return fake_chain(task, fake, given)

    monkeypatch.setattr(sizes_of_a_model, "fake_chain", counted)
    certify(replicated("normed"), sliced_plan(profiles["normed"], [0, 3, 6], [2, 4], microbatches=2))
    assert sizes == [6, 3]


def test_decisions_about_memory_hold_for_every_replica(profiles: dict[str, ModelProfile]) -> None:
    """Recomputation and offload on every replica change no number, and the bytes are known."""
    task, found = replicated("dropped"), profiles["dropped"]
    plan = sliced_plan(found, [0, 3, 6], [2, 3], microbatches=3)
    recompute = Decision(
        stage=0, subject=Run(start=0, stop=2), what=What.RECOMPUTE, microbatches=Microbatches()
    )
    kept, decided = Trainer(task, plan), replace(plan, decisions=(recompute,))
    freed = Trainer(task, decided)
    for one in batches(task, plan, 2):
        assert kept.step(one) == freed.step(one)
    assert equal(kept.state_dict(), freed.state_dict(), relative=0)
    assert simulate(decided).peak_bytes == certify(task, decided).peak_bytes == freed.trace.peak_bytes


def test_clipping_and_accumulation_are_those_of_the_whole_batch(profiles: dict[str, ModelProfile]) -> None:
    """The gradient norm counts every parameter once, with any number of replicas; gradients of two batches
    are accumulated.
    """
    task, norm = replicated("tied", optimizer=partial(torch.optim.SGD, lr=1.0)), 0.01
    found = replace(profiles["tied"], fingerprint=profile(task, microbatch_size=3).fingerprint)
    plan = sliced_plan(found, [0, 2, 6], [3, 2], clip_norm=norm)
    trainer, plain = Trainer(task, plan, accumulate=2), Plain(task, plan)
    (first, one), (second, other) = batches(task, plan, 2)
    trainer.step((first, one))
    trainer.step((second, other))
    plain.backward(first, one, 0.5)
    plain.backward(second, other, 0.5)
    torch.nn.utils.clip_grad_norm_(plain.module.parameters(), norm)
    plain.optimizer.step()
    assert equal(trainer.state_dict(), dict(plain.module.state_dict()), relative=1e-6)


def test_a_smaller_last_batch_counts_every_sample_once(profiles: dict[str, ModelProfile]) -> None:
    """Smaller last batches of twelve and six of 24 samples count every sample once; seven cannot be divided,
    and the error names sizes that can.
    """
    task, plan = replicated("tied"), sliced_plan(profiles["tied"], [0, 2, 6], [3, 2])
    trainer, plain = Trainer(task, plan), Plain(task, plan)
    inputs, targets = batch_of(task, plan)
    assert trainer.step((inputs[:18], targets[:18])) == pytest.approx(
        plain.step(inputs[:18], targets[:18]), rel=1e-6
    )
    assert equal(trainer.state_dict(), dict(plain.module.state_dict()), relative=1e-9)
    with pytest.raises(UsageError, match=r"7 samples of the last .* remove 1 of them, or add 5"):
        trainer.step((inputs[:19], targets[:19]))
    plain.module.eval()
    with torch.no_grad():
        expected = task.loss(plain.module(inputs), targets).item() if task.loss else 0.0
    assert trainer.evaluate((inputs, targets)) == pytest.approx(expected, rel=1e-6)


def test_training_goes_on_under_other_degrees(profiles: dict[str, ModelProfile], tmp_path: Path) -> None:
    """The first replica's state is stored once, and all replicas of another plan resume from it."""
    task = replicated("tied")
    saved, other = (sliced_plan(profiles["tied"], *how) for how in (([0, 2, 6], [3, 2]), ([0, 3, 6], [1, 4])))
    before, after, never = Trainer(task, saved), Trainer(task, other), Trainer(task, other)
    first, second = batches(task, saved, 2)
    before.step(first)
    never.step(first)
    before.save(tmp_path)
    before.finish()
    assert after.load(tmp_path) == 1
    assert equal(after.state_dict(optimizer=True), before.state_dict(optimizer=True), relative=0)
    after.step(second)
    never.step(second)
    assert equal(after.state_dict(), never.state_dict(), relative=1e-9)
    replicas = [list(runner.stages[1].parameters) for runner in after.runners if 1 in runner.stages]
    assert all(torch.equal(a, b) for others in replicas[1:] for a, b in zip(replicas[0], others, strict=True))


@pytest.mark.gallery
def test_workers_train_as_one_process_does(profiles: dict[str, ModelProfile]) -> None:
    """Three workers over gloo, two of them replicas, have the losses of one process and the peaks of the dry
    run.
    """
    task, plan = replicated("tied"), sliced_plan(profiles["tied"], [0, 3, 6], [2, 1], clip_norm=1.0)
    losses, trace = train(partial(replicated, "tied"), plan, steps=2)
    _, expected = in_one_process(task, plan, 2)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert trace.peak_bytes == certify(task, plan).peak_bytes


def summed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a loss that grows with the number of samples."""
    return (outputs - targets).square().sum()


def centred(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a loss in which samples depend on each other."""
    return (outputs - outputs.mean(0) - targets).square().mean()


@pytest.mark.parametrize("loss", [summed, centred])
def test_a_loss_that_is_no_mean_over_samples_is_refused(loss: Any) -> None:
    """A loss that is not a mean over samples is refused; without the comparison, each local batch has its own
    loss.
    """
    task = replace(replicated("dropped"), loss=loss)
    plan = sliced_plan(profile(task, microbatch_size=(4, 2)), [0, 3, 6], [1, 2])
    with pytest.raises(
        UsageError, match=r"2 replicas would train another loss of dropped: the loss of a microbatch is .*"
    ):
        Trainer(task, plan)
    Trainer(task, plan, numbers=False)


def rounded(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a mean over samples in single precision, as in many language models."""
    return torch.nn.functional.mse_loss(outputs.float(), targets.float())


def test_a_loss_in_single_precision_of_a_model_in_double_is_a_mean() -> None:
    """Rounding differences between the loss of a microbatch and of its local batches do not count as another
    loss.
    """
    task = replace(replicated("dropped"), loss=rounded)
    Trainer(task, sliced_plan(profile(task, microbatch_size=(12, 6, 4, 3)), [0, 2, 3, 6], [4, 2, 3]))


class Backwards(torch.nn.Module):
    """A layer that reverses the samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(0)


def test_samples_in_another_order_between_stages_are_refused_where_degrees_differ() -> None:
    """Reordered samples between stages of different degrees are refused, even if the loss of every local
    batch is right.
    """
    linear = partial(torch.nn.Linear, 8, 8)
    task = task_of(lambda: [linear(), Backwards(), linear(), Backwards(), torch.nn.Linear(8, 4)])
    found = profile(task, microbatch_size=(4, 2))
    for degrees in ([1, 2], [2, 1]):
        with pytest.raises(
            UsageError,
            match=r"would exchange wrong rows: value 0 between them has other numbers in 2 local batches",
        ):
            Trainer(task, sliced_plan(found, [0, 3, 5], degrees))
    plan = sliced_plan(found, [0, 3, 5], [2, 2])
    trainer, plain = Trainer(task, plan), Plain(task, plan)
    for one in batches(task, plan, 2):
        assert trainer.step(one) == pytest.approx(plain.step(*one), rel=1e-5)
    Trainer(task, sliced_plan(found, [0, 4, 5], [1, 2]))


class Turned(torch.nn.Module):
    """A layer that passes on samples along the second dimension."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.T.contiguous()


def test_samples_along_another_dimension_are_refused_where_degrees_differ() -> None:
    """Samples along another dimension are refused between stages of different degrees, because they are not
    contiguous; equal degrees exchange whole values.
    """
    task = task_of(lambda: [torch.nn.Linear(8, 8), Turned(), Turned(), torch.nn.Linear(8, 4)])
    found = profile(task, microbatch_size=(4, 2))
    with pytest.raises(
        UsageError, match=r"2 replicas of stage 0 cannot split the values for 1 of stage 1: value"
    ):
        lower(sliced_plan(found, [0, 2, 4], [2, 1]))
    same = sliced_plan(found, [0, 2, 4], [2, 2])
    trainer, plain = Trainer(task, same), Trainer(task, sliced_plan(found, [0, 1, 4], [2, 1]))
    for one in batches(task, same, 2):
        assert trainer.step(one) == pytest.approx(plain.step(one), rel=1e-5)


def tabled() -> Task:
    """Sequences of three positions; the table has a gradient but no sample dimension."""
    return Task(
        lambda: torch.nn.Sequential(Table(), Table(last=True)),
        batch=lambda n: tuple(torch.randn(n, 3, 8, dtype=torch.float64) for _ in range(2)),
        loss=torch.nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        name="tabled",
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("degrees", [(2, 1), (3, 2), (2, 2)])
def test_a_value_without_samples_goes_whole_and_once(degrees: tuple[int, int]) -> None:
    """A value without samples is sent whole and once; its gradient returns to the sending replica and is zero
    for the others.
    """
    task = tabled()
    found = profile(task, microbatch_size=(6, 3, 2))
    plan = sliced_plan(found, [0, 1, 2], degrees)
    trainer, plain = Trainer(task, plan), Trainer(task, sliced_plan(found, [0, 1, 2], [1, 1]))
    for one in batches(task, plan, 3):
        assert trainer.step(one) == pytest.approx(plain.step(one), rel=1e-6)
    assert equal(trainer.state_dict(), plain.state_dict(), relative=1e-9)
    assert simulate(plan).peak_bytes == certify(task, plan).peak_bytes == trainer.trace.peak_bytes


def test_a_gradient_from_several_receivers_is_refused() -> None:
    """A value without samples is refused if one replica would get gradients from two receivers; equal or
    decreasing degrees are accepted.
    """
    task = tabled()
    found = profile(task, microbatch_size=(6, 3, 2))
    with pytest.raises(
        UsageError,
        match=r"1 replica of stage 0 .* 2 of stage 1: value 1 has a gradient but no sample dimension",
    ):
        lower(sliced_plan(found, [0, 1, 2], [1, 2]))
