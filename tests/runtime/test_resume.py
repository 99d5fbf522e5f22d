"""Training resumed from a checkpoint equals uninterrupted training bit by bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from pipefit.runtime import Trainer
from pipefit.runtime.checkpoint import checkpointing
from pipefit.schema.plan import Plan
from support.resumed_tasks import ENDLESS, FEATURES, SYNCHRONOUS, broken, plan_for, unbroken

pytestmark = pytest.mark.usefixtures("one_thread")

SPLIT = (2, 2, 2)
SPLITS = ((6,), (1, 5), (3, 1, 2), (1, 1, 2, 1, 1))


def assert_equal(
    ours: tuple[list[float], dict[str, Tensor], Trainer],
    theirs: tuple[list[float], dict[str, Tensor], Trainer],
) -> None:
    """Assert that losses, all tensors and the learning rates are equal bit by bit."""
    assert ours[0] == theirs[0]
    assert ours[1].keys() == theirs[1].keys()
    assert [name for name, tensor in theirs[1].items() if not torch.equal(ours[1][name], tensor)] == []
    assert rates(ours[2]) == rates(theirs[2])
    assert scales(ours[2]) == scales(theirs[2])


def scales(trainer: Trainer) -> set[tuple[float, int]]:
    """Return the loss scale and the number of steps since the last overflow."""
    agreements = [stage.agreement for stage in trainer.stages if stage.agreement is not None]
    return {(one.scale.value, one.scale.quiet) for one in agreements if one.scale is not None}


def rates(trainer: Trainer) -> set[str]:
    """Return the options of all parameter groups."""
    return {
        repr({key: value for key, value in group.items() if key != "params"})
        for stage in trainer.stages
        if stage.optimizer is not None
        for group in stage.optimizer.param_groups
    }


def goes_on(name: str, schedule: str, folder: Path) -> None:
    plan = plan_for(name, schedule, SPLIT)
    ours = broken(name, plan, plan, folder / "broken")
    theirs = unbroken(name, plan, folder / "unbroken" if schedule in ENDLESS else None)
    assert_equal(ours, theirs)


TABLE = [
    (schedule, name)
    for schedule, (name, feature) in itertools.product((*SYNCHRONOUS, *ENDLESS), FEATURES.items())
    if feature.endless or schedule in SYNCHRONOUS
]
SAMPLE = [
    *(("1f1b", name) for name in FEATURES),
    *((schedule, "dropout") for schedule in ("gpipe", *ENDLESS)),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("schedule", "name"), SAMPLE)
def test_training_goes_on_as_if_it_had_never_stopped(schedule: str, name: str, tmp_path: Path) -> None:
    """A new trainer with other weights loads a checkpoint and has the losses and state of an uninterrupted
    one.
    """
    goes_on(name, schedule, tmp_path)


def test_the_loss_scale_of_the_table_has_changed() -> None:
    """The loss scale of the table changes, by one overflow and four steps without, so that a scale that is
    not restored would be noticed.
    """
    assert scales(unbroken("scaling", plan_for("scaling", "1f1b", SPLIT))[2]) == {(2.0**15, 4)}


@pytest.mark.gallery
@pytest.mark.parametrize(("schedule", "name"), [case for case in TABLE if case not in SAMPLE])
def test_training_goes_on_under_every_schedule_with_every_feature(
    schedule: str, name: str, tmp_path: Path
) -> None:
    """Every combination of the table resumes with the same numbers. Asynchronous pipelines drain to save, in
    the uninterrupted run too.
    """
    goes_on(name, schedule, tmp_path)


CHANGES = [("dropout", (6,), (3, 1, 2)), ("several", (1, 1, 2, 1, 1), (2, 4)), ("masters", (2, 4), (4, 1, 1))]
FEATURED = ("norm", "held", "groups", "cycle", "numbers", "scaling", "clipping")
EVERY = [
    (name, *change)
    for name in (*FEATURED, "dropout", "several", "masters")
    for change in itertools.permutations(SPLITS, 2)
]


def goes_on_elsewhere(name: str, before: Plan, after: Plan, folder: Path) -> None:
    assert_equal(broken(name, before, after, folder), unbroken(name, after))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "before", "after"), CHANGES)
def test_training_goes_on_under_another_plan(
    name: str, before: tuple[int, ...], after: tuple[int, ...], tmp_path: Path
) -> None:
    """Training resumes with other stages, devices and schedule, with the numbers of either plan."""
    goes_on_elsewhere(name, plan_for(name, "gpipe", before), plan_for(name, "1f1b", after), tmp_path)


@pytest.mark.gallery
@pytest.mark.parametrize(("name", "before", "after"), [case for case in EVERY if case not in CHANGES])
def test_training_goes_on_under_any_other_plan(
    name: str, before: tuple[int, ...], after: tuple[int, ...], tmp_path: Path
) -> None:
    """Training resumes with the same numbers for every pair of splits."""
    goes_on_elsewhere(name, plan_for(name, "gpipe", before), plan_for(name, "1f1b", after), tmp_path)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_memory_that_runs_out_as_a_checkpoint_is_taken_up_is_no_fault_of_it(
    error: Exception, tmp_path: Path
) -> None:
    """Running out of memory while a checkpoint is loaded is reported as such, not as a bad file."""
    _, _, trainer = broken(
        "adamw", plan_for("adamw", "1f1b", SPLIT), plan_for("adamw", "1f1b", SPLIT), tmp_path
    )
    with mock.patch.object(checkpointing, "restore", side_effect=error), pytest.raises(type(error)) as caught:
        trainer.load(tmp_path)
    assert caught.value is error
