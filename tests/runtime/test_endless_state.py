"""Offloaded state and host updates under asynchronous schedules, after failures and checkpoints."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipefit.lowering import ENDLESS
from pipefit.runtime import Trainer
from pipefit.runtime.engine.runner import DeviceRunner
from pipefit.schema.actions import Action, Kind
from support.asynchronous_decisions import mixed
from support.gallery_samples import sampled
from support.random_offloads import make_chain
from support.small_tasks import batch_of

pytestmark = pytest.mark.usefixtures("one_thread")


WORDS = ("STEP", "WAIT_STEP", "RELOAD", "WAIT_RELOAD", "OFFLOAD", "WAIT_OFFLOAD")
FAILING = [(word, schedule) for word in WORDS for schedule in ENDLESS]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("word", "schedule"), sampled(FAILING, often=(*FAILING[::4], *FAILING[3::4])))
def test_after_an_update_that_failed_training_goes_on_with_what_it_has_reached(
    schedule: str, word: str
) -> None:
    """After a failure anywhere in an update no slot or memory is held. The state of all stages can be read,
    and trains on as in a new trainer that starts with it.
    """
    task, plan = make_chain(), mixed(schedule)
    trainer, fresh = Trainer(task, plan), Trainer(task, replace(plan, decisions=()))
    trainer.step(batch_of(task, plan))
    trainer.finish()
    settled = [runner.meter.total for runner in trainer.runners if runner.meter]
    failed = [fail_at(runner, word) for runner in trainer.runners[:2]]
    with pytest.raises(RuntimeError, match="it failed"):
        all(trainer.step(batch_of(task, plan, step)) for step in range(1, 4))
    for mend in failed:
        mend()
    gc.collect()
    assert [runner.meter.total for runner in trainer.runners if runner.meter] == settled
    assert not any(runner.mover.borrowed.in_use for runner in trainer.runners)
    trainer.state.load_into(list(fresh.stages))
    for stage, other in zip(trainer.stages, fresh.stages, strict=True):
        other.batch_number = stage.batch_number
    batch = batch_of(task, plan, 5)
    assert [trainer.step(batch), *trainer.finish()][-1] == [fresh.step(batch), *fresh.finish()][-1]
    assert all(map(torch.equal, trainer.state_dict().values(), fresh.state_dict().values()))


def fail_at(runner: DeviceRunner, word: str) -> Callable[[], None]:
    """Make the second action of this kind on state or an update fail; return a function that undoes it."""
    execute, met = runner._execute, Counter[str]()

    def failing(action: Action) -> None:
        about_state = action.moves_state or action.kind is Kind.STEP
        met[word] += about_state and f"{'WAIT_' * action.wait}{action.kind}" == word
        if met[word] == 2:
            raise RuntimeError("it failed")
        execute(action)

    runner._execute = failing  # type: ignore[method-assign]
    return lambda: setattr(runner, "_execute", execute)


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ENDLESS)
def test_a_checkpoint_has_what_is_away(schedule: str, tmp_path: Path) -> None:
    """A checkpoint from a drained pipeline includes offloaded state. Training continues from it unchanged,
    under the same plan and under one without moves.
    """
    task, plan = make_chain(), mixed(schedule)
    first = Trainer(task, plan)
    for step in range(2):
        first.step(batch_of(task, plan, step))
    first.save(tmp_path, background=False)
    batches = [batch_of(task, plan, step) for step in (2, 3)]
    others = [Trainer(task, plan), Trainer(task, replace(plan, decisions=()))]
    for trainer in others:
        assert trainer.load(tmp_path) == 2
    first.finish()
    losses = [[*map(trainer.step, batches), *trainer.finish()][first.late :] for trainer in (first, *others)]
    assert losses[0] == losses[1] == losses[2]
    for trainer in others:
        assert all(map(torch.equal, first.state_dict().values(), trainer.state_dict().values()))
