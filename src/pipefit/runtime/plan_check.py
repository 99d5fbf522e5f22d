"""The checks that a plan belongs to a task, made before training and dry runs, and to the devices it trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from pipefit.capture.chain import Chain, ChainLayer
from pipefit.capture.task import Task
from pipefit.errors import FileError, UsageError
from pipefit.fake.fingerprint import fingerprint, with_loss
from pipefit.fingerprints import differences
from pipefit.plans import Plan


def check_model(plan: Plan, task: Task, chain: Chain, samples: int | None = None) -> None:
    """Check that `plan` was made for `task`, whose chain is `chain` for `samples`, by default the plan's microbatches.

    Raises:
        FileError: the plan was made for another task; says what differs.
        UsageError: all but the loss is that of the plan, and the loss fails.
    """
    profile = plan.profile
    measurement = plan.measurement if samples is None else profile.at(samples)
    now = fingerprint(task, chain)
    all_but_loss = replace(now.fingerprint, loss=profile.fingerprint.loss)
    found = differences(profile.fingerprint, all_but_loss, profile.layers)
    if not found:
        now = with_loss(now, chain, measurement)
        found = differences(profile.fingerprint, now.fingerprint, profile.layers)
    if not found and measurement.sizes != now.sizes:
        found = ["operations of other sizes, such as another number of attention heads, or with other numbers"]
    if found:
        raise FileError(
            f"the plan of {profile.model} does not belong to this task: it was made for {'; '.join(found)}: "
            "profile and plan this task again"
        )


def check_casts(plan: Plan, task: Task) -> None:
    """Check that autocast casts on the plan's devices what it casts in its profile, so that values have those types.

    Raises:
        UsageError: it casts others.
    """
    made, trained = plan.profile.assumptions.target, plan.cluster.target
    if task.autocast is not None and made != trained:
        raise UsageError(
            f"the plan of {plan.profile.model} has the types of values that autocast makes for the target {made}, and "
            f"{plan.cluster.name} would train with the kernels of {trained}, for which it casts other operators: "
            f"profile with --target {trained} and plan again"
        )


def frozen_in(layers: Sequence[ChainLayer]) -> list[tuple[str, nn.Parameter]]:
    """The parameters that no gradient is computed for, with their names in the model."""
    return [(name, own) for layer in layers for name, own in layer.named_parameters if not own.requires_grad]


def check_frozen(parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Check that parameters are frozen still, as they were when the plan was made.

    Raises:
        UsageError: one is not; names it.
    """
    for name, parameter in parameters:
        if parameter.requires_grad:
            raise UsageError(
                f"parameter {name} was frozen when its plan was made, which has no room for its gradient, and no "
                "optimizer updates it: make a plan and a trainer anew for training it, or freeze it before the step"
            )
