"""Transfer of training state between plans: parameters, buffers and the optimizer's state by name."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.runtime import Trainer
from pipefit.schema.plan import Plan
from support.gallery_samples import sampled
from support.small_tasks import batch_of, plan_of, task_of

ADAMW = partial(torch.optim.AdamW, lr=0.01)


@cache
def normalised() -> Task:
    """Return a task with five layers with statistics in buffers, trained by AdamW."""
    return task_of(
        lambda: [
            nn.Linear(8, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(inplace=True),
            nn.Linear(16, 16),
            nn.Linear(16, 4),
        ],
        optimizer=ADAMW,
    )


def tied() -> Task:
    """Return a task with five layers; the first and the last share a weight."""

    def layers() -> list[nn.Module]:
        first, last = nn.Linear(8, 8), nn.Linear(8, 8)
        last.weight = first.weight
        return [first, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), last]

    return task_of(layers, outputs=8, optimizer=ADAMW)


SPLITS: list[tuple[list[int], dict[str, Any]]] = [
    ([5], {}),
    ([1, 4], {}),
    ([2, 1, 2], {"schedule": "gpipe", "recompute": "always"}),
    ([1, 1, 2, 1], {"schedule": "torchgpipe", "devices": 2}),
]


def tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Return all trained tensors, each under one name."""
    state = trainer.state
    kept = {f"{name} {key}": tensor for name, of in state.optimizer.items() for key, tensor in of.items()}
    return dict(state.tensors) | kept


def same(ours: Trainer, theirs: Trainer) -> bool:
    """Return whether tensors are equal bit by bit and have equal names."""
    mine, other = tensors(ours), tensors(theirs)
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in other)


EVERY = [(before, after) for before in SPLITS for after in SPLITS]
OFTEN = [
    *zip(SPLITS, SPLITS[1:] + SPLITS[:1], strict=True),
    *zip(SPLITS, SPLITS[2:] + SPLITS[:2], strict=True),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("before", "after"), sampled(EVERY, often=OFTEN))
def test_training_goes_on_under_another_plan_as_if_nothing_had_happened(
    before: tuple[list[int], dict[str, Any]], after: tuple[list[int], dict[str, Any]]
) -> None:
    """Two steps under one split and two more under another equal four under either, bit by bit."""
    task = normalised()
    first, second = (plan_of(task, split, microbatches=1, **how) for split, how in (before, after))
    whole, started, continued = Trainer(task, second), Trainer(task, first), Trainer(task, second, seed=7)
    batches = [batch_of(task, first, step) for step in range(4)]
    losses = [whole.step(batch) for batch in batches]
    found = [started.step(batch) for batch in batches[:2]]
    started.state.load_into(list(continued.stages))
    assert same(continued, started)
    found += [continued.step(batch) for batch in batches[2:]]
    assert found == losses
    assert same(continued, whole)


def test_what_is_loaded_is_a_copy() -> None:
    """Loaded state is a copy: further training changes neither the state nor its former trainer."""
    task = normalised()
    plan = plan_of(task, [2, 3])
    started, continued = Trainer(task, plan), Trainer(task, plan)
    started.step(batch_of(task, plan))
    before = {name: tensor.clone() for name, tensor in tensors(started).items()}
    started.state.load_into(list(continued.stages))
    continued.step(batch_of(task, plan, 1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(started).items())


def test_a_shared_parameter_is_taken_up_by_every_stage_that_has_a_copy() -> None:
    """A shared parameter goes from one stage into two copies, and returns into one within the rounding of its
    sums.
    """
    task = tied()
    plans = [plan_of(task, split, microbatches=1) for split in ([5], [3, 2], [5])]
    whole, parts = Trainer(task, plans[0]), [Trainer(task, plan, seed=n) for n, plan in enumerate(plans)]
    assert len(plans[1].holders[0]) == 2
    for step, trainer in enumerate(parts):
        if step:
            parts[step - 1].state.load_into(list(trainer.stages))
        batch = batch_of(task, plans[0], step)
        assert trainer.step(batch) == pytest.approx(whole.step(batch), rel=1e-6)
    theirs = whole.state_dict()
    for name, tensor in parts[-1].state_dict().items():
        torch.testing.assert_close(tensor, theirs[name])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            lambda state: {n: t for n, t in state.items() if n != "3.weight"},
            "3.weight is missing, but the model needs .16, 16.",
        ),
        (
            lambda state: state | {"4.bias": torch.zeros(5)},
            r"4.bias has shape \(5,\), but the model needs \(4,\)",
        ),
    ],
)
def test_a_state_of_another_model_is_refused(changed: Any, message: str) -> None:
    """A state of another model is refused; the error names the tensor and both shapes."""
    task = normalised()
    trainer = Trainer(task, plan_of(task, [2, 3]))
    state = trainer.state
    with pytest.raises(UsageError, match=f"the state does not fit the model: {message}"):
        replace(state, tensors=changed(dict(state.tensors))).load_into(list(trainer.stages))


def test_a_stage_takes_its_part_of_a_larger_state() -> None:
    """A stage takes its part of a larger state, so that a worker may get all of it."""
    task = normalised()
    whole: Plan = plan_of(task, [5])
    trained, parts = Trainer(task, whole), Trainer(task, plan_of(task, [2, 3]))
    trained.step(batch_of(task, whole))
    trained.state.load_into([next(parts.stages)])
    assert torch.equal(parts.state_dict()["0.weight"], trained.state_dict()["0.weight"])
    assert not torch.equal(parts.state_dict()["4.weight"], trained.state_dict()["4.weight"])
