"""Resume under other grids: every old plan by every new plan, with replicas, ZeRO and tensor shards."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipefit.runtime import Trainer
from support.gallery_samples import sampled
from support.local_batches import batches, equal
from support.resumable_grids import ENDLESS, GRIDS, plan_of_grids
from support.sharded_stages import divided

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, SAVED = 4, 2


def trained(name: str, before: str, after: str, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and state of a training that another trainer resumes under another plan."""
    task, plans = divided(name), [plan_of_grids(name, before), plan_of_grids(name, after)]
    data = batches(task, plans[0], STEPS)
    first = Trainer(task, plans[0], seed=5)
    losses = [first.step(batch) for batch in data[:SAVED]]
    first.save(folder, background=False)
    second = Trainer(task, plans[1], seed=6)
    assert second.load(folder) == SAVED
    losses += [second.step(batch) for batch in data[SAVED:]]
    return losses, second.state_dict(optimizer=True)


def unbroken(name: str, grids: str) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and state of the uninterrupted training."""
    task, plan = divided(name), plan_of_grids(name, grids)
    trainer = Trainer(task, plan, seed=5)
    return [trainer.step(batch) for batch in batches(task, plan, STEPS)], trainer.state_dict(optimizer=True)


def plain() -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and state of a plain PyTorch loop."""
    task = divided("still")
    torch.manual_seed(5)
    module, losses = task.build(), []
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for inputs, targets in batches(task, plan_of_grids("still", "one device"), STEPS):
        loss = torch.nn.functional.mse_loss(module(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(module.state_dict())


def goes_on_as_plain_training(before: str, after: str, folder: Path) -> None:
    losses, state = trained("still", before, after, folder)
    expected, theirs = plain()
    assert losses == pytest.approx(expected, rel=1e-6)  # they are told in float32
    assert equal({name: state[name] for name in theirs}, theirs, relative=1e-9)


def goes_on_bitwise(grids: str, folder: Path) -> None:
    losses, state = trained("dropped", grids, grids, folder)
    expected, theirs = unbroken("dropped", grids)
    assert losses == expected
    assert equal(state, theirs, relative=0)


SAMPLE = [("ZeRO 3", "shards"), ("ZeRO-Offload", "swapped states")]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("before", "after"), SAMPLE)
def test_training_goes_on_under_other_grids(before: str, after: str, tmp_path: Path) -> None:
    """Losses and parameters after a resume under another grid equal an uninterrupted plain loop."""
    goes_on_as_plain_training(before, after, tmp_path)


@pytest.mark.gallery
@pytest.mark.parametrize(("before", "after"), [case for case in product(GRIDS, GRIDS) if case not in SAMPLE])
def test_training_goes_on_from_any_grids_to_any(before: str, after: str, tmp_path: Path) -> None:
    """Losses and parameters equal a plain loop for every pair of grids."""
    goes_on_as_plain_training(before, after, tmp_path)


@pytest.mark.parametrize("grids", ["ZeRO 1 of shards"])
def test_grids_go_on_as_if_they_had_never_stopped(grids: str, tmp_path: Path) -> None:
    """Resumed grids equal uninterrupted ones bit by bit, with dropout and the optimizer's state."""
    goes_on_bitwise(grids, tmp_path)


@pytest.mark.gallery
@pytest.mark.parametrize("grids", [one for one in GRIDS if one != "ZeRO 1 of shards"])
def test_all_grids_go_on_as_if_they_had_never_stopped(grids: str, tmp_path: Path) -> None:
    """All grids resume bit by bit."""
    goes_on_bitwise(grids, tmp_path)


def is_taken_up(before: str, after: str, folder: Path) -> None:
    """Assert that a trainer which loads another plan's checkpoint has its whole state."""
    first, second = (
        Trainer(divided("dropped"), plan_of_grids("dropped", grids), seed=5) for grids in (before, after)
    )
    for batch in batches(first.task, first.plan, SAVED):
        first.step(batch)
    first.save(folder, background=False)
    assert second.load(folder) == SAVED
    ours, theirs = (trainer.state_dict(optimizer=True) for trainer in (second, first))
    assert any(name.startswith("optimizer/") for name in theirs)
    assert equal(ours, theirs, relative=0)


@pytest.mark.gallery
@pytest.mark.parametrize("grids", sampled(ENDLESS, often=["2bw, ZeRO 1 of shards"]))
def test_endless_schedules_go_on_as_if_they_had_only_saved(grids: str, tmp_path: Path) -> None:
    """Under asynchronous schedules, a resumed training equals the training that saved the checkpoint, bit by
    bit, with dropout.
    """
    task, plan = divided("dropped"), plan_of_grids("dropped", grids)
    data, found = batches(task, plan, STEPS), []
    first = Trainer(task, plan, seed=5)
    for batch in data[:SAVED]:
        first.step(batch)
    first.save(tmp_path)
    second = Trainer(task, plan, seed=6)
    first.finish()
    assert second.load(tmp_path) == SAVED
    for trainer in (first, second):
        losses = [trainer.step(batch) for batch in data[SAVED:]]
        found.append(([*losses[trainer.late :], *trainer.finish()], trainer.state_dict(optimizer=True)))
    (losses, state), (expected, theirs) = found
    assert losses == expected and len(losses) == STEPS - SAVED
    assert equal(state, theirs, relative=0)


TAKEN_UP = [("pipedream", "ZeRO 3"), ("ZeRO-Offload", "pipedream-2bw")]
WITH_ENDLESS = [case for case in product(GRIDS | ENDLESS, GRIDS | ENDLESS) if set(case) & set(ENDLESS)]


@pytest.mark.parametrize(("before", "after"), TAKEN_UP)
def test_what_endless_schedules_have_trained_is_taken_up(before: str, after: str, tmp_path: Path) -> None:
    """State moves bit by bit between asynchronous schedules and plans of every other kind; later numbers
    differ.
    """
    is_taken_up(before, after, tmp_path)


@pytest.mark.gallery
@pytest.mark.parametrize(("before", "after"), [case for case in WITH_ENDLESS if case not in TAKEN_UP])
def test_what_any_plan_has_trained_is_taken_up_by_endless_ones(
    before: str, after: str, tmp_path: Path
) -> None:
    """Asynchronous schedules load the state of every kind of plan."""
    is_taken_up(before, after, tmp_path)
