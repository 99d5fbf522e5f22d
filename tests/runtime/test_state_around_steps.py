"""Offloaded state around skipped and failed steps, evaluations and checkpoints."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipefit.lowering import lower
from pipefit.runtime import Trainer
from pipefit.runtime.state import StageState
from pipefit.schema.actions import Action
from pipefit.schema.decisions import Decision
from support.memory_samples import step_peaks_of
from support.offloaded_state import EACH, assert_same, one_stage, task_named
from support.small_tasks import batch_of


@pytest.mark.sample(1)
@EACH
def test_a_step_that_is_skipped_leaves_everything_as_it_was(decisions: tuple[Decision, ...]) -> None:
    """A step skipped for overflowing gradients updates nothing: moved state returns to its place, and
    training continues with the numbers of a plan without moves.
    """
    task, plan = task_named("overflowing"), one_stage(*decisions, kind="overflowing")
    one, other = Trainer(task, plan), Trainer(task, replace(plan, decisions=()))
    skipped = []
    for step in range(4):
        assert one.step(batch_of(task, plan, step)) == other.step(batch_of(task, plan, step))
        (agreement,) = {stage.agreement for stage in one.stages}
        skipped.append(agreement is not None and agreement.overflow)
        assert_same(one.state, other.state)
    assert skipped[0] and not all(skipped)


@pytest.mark.sample(2)
@EACH
def test_smaller_batches_accumulation_and_evaluation_work_while_state_is_away(
    decisions: tuple[Decision, ...],
) -> None:
    """Smaller batches, accumulation and evaluation work with offloaded state."""
    task, plan = task_named("adamw"), one_stage(*decisions, microbatches=3)
    one, other = Trainer(task, plan, accumulate=2), Trainer(task, replace(plan, decisions=()), accumulate=2)
    for size in (6, 4, 2, 6):
        torch.manual_seed(size)
        batch = task.batch(size)
        assert one.step(batch) == other.step(batch)
        assert one.evaluate(batch) == other.evaluate(batch)
        assert_same(one.state, other.state)


@pytest.mark.sample(1)
@EACH
def test_a_state_is_loaded_where_it_belongs(decisions: tuple[Decision, ...]) -> None:
    """State moves in both directions between plans with and without moved state."""
    task, plan = task_named("copies"), one_stage(*decisions, kind="copies")
    still = replace(plan, decisions=())
    whole, first, second, third = (Trainer(task, one) for one in (still, still, plan, still))
    batches = [batch_of(task, plan, step) for step in range(6)]
    expected = [whole.step(batch) for batch in batches]
    losses = [first.step(batch) for batch in batches[:2]]
    for before, trainer in ((first, second), (second, third)):
        before.state.load_into(list(trainer.stages))
        for stage, last in zip(trainer.stages, before.stages, strict=True):
            stage.batch_number = last.batch_number  # dropout depends on it
        at = 2 if trainer is second else 4
        losses += [trainer.step(batch) for batch in batches[at : at + 2]]
    assert losses == expected
    assert_same(third.state, whole.state)


@pytest.mark.sample(1)
@EACH
def test_training_goes_on_from_a_checkpoint_whatever_is_away(
    decisions: tuple[Decision, ...], tmp_path: Path
) -> None:
    """Training resumes from a checkpoint with offloaded state: under the same plan with equal losses, state
    and bytes, and under a plan without moves with equal losses.
    """
    task, plan = task_named("scheduled"), one_stage(*decisions, kind="scheduled")
    whole, first = Trainer(task, plan), Trainer(task, plan)
    batches = [batch_of(task, plan, step) for step in range(4)]
    expected = [whole.step(batch) for batch in batches]
    assert [first.step(batch) for batch in batches[:2]] == expected[:2]
    first.save(tmp_path, background=False)
    assert [first.step(batch) for batch in batches[2:]] == expected[2:]
    for other in (plan, replace(plan, decisions=())):
        trainer = Trainer(task, other)
        trainer.load(tmp_path)
        assert [trainer.step(batch) for batch in batches[2:]] == expected[2:]
        assert_same(trainer.state, whole.state)
        if other is plan:
            assert step_peaks_of(trainer.trace)[0][-1] == step_peaks_of(whole.trace)[0][-1]


@pytest.mark.sample(2)
@EACH
@pytest.mark.parametrize("at", ["STEP", "RELOAD", "OFFLOAD", "WAIT"])
def test_after_a_failed_step_everything_is_where_it_was(decisions: tuple[Decision, ...], at: str) -> None:
    """After a step that fails at its last action of a kind, with some layers updated, no slot is in use, the
    device's memory is as before, and the state can be read and loaded.
    """
    task, plan = task_named("adamw"), one_stage(*decisions)
    trainer, fresh = Trainer(task, plan), Trainer(task, plan)
    trainer.step(batch_of(task, plan))
    fresh.step(batch_of(task, plan))
    kept, runner = trainer.state, trainer.runners[0]
    kept = StageState({n: t.clone() for n, t in kept.tensors.items()},
                      {n: {k: t.clone() for k, t in of.items()} for n, of in kept.optimizer.items()})  # fmt: skip
    gc.collect()
    assert runner.meter is not None
    level, execute, last = runner.meter.total, runner._execute, Counter[str]()
    total = Counter(word for action in lower(plan).actions[0] for word in words_of(action))

    def failing(action: Action) -> None:
        last.update(words_of(action))
        if at in words_of(action) and last[at] == total[at]:
            raise RuntimeError("it failed")
        execute(action)

    runner._execute = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="it failed"):
        trainer.step(batch_of(task, plan, 1))
    runner._execute = execute  # type: ignore[method-assign]
    gc.collect()
    assert runner.meter.total == level
    assert not runner.mover.borrowed.in_use
    kept.load_into(list(trainer.stages))
    assert_same(trainer.state, fresh.state)
    for stage, other in zip(trainer.stages, fresh.stages, strict=True):
        other.batch_number = stage.batch_number
    for step in (2, 3):
        assert trainer.step(batch_of(task, plan, step)) == fresh.step(batch_of(task, plan, step))
    assert_same(trainer.state, fresh.state)


def words_of(action: Action) -> list[str]:
    """Return the kind of an action, and WAIT for the joins of state copies."""
    return ["WAIT"] if action.wait else [action.kind.value]
