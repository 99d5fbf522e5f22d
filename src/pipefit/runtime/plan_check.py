"""The check that a plan belongs to a task, made before training and dry runs."""

from __future__ import annotations

from pipefit.capture.chain import Chain
from pipefit.capture.task import Task
from pipefit.errors import FileError
from pipefit.fake.fingerprint import fingerprint, with_loss
from pipefit.fingerprints import differences
from pipefit.plans import Plan


def check_model(plan: Plan, task: Task, chain: Chain) -> None:
    """Check that `plan` was made for `task`, whose chain is `chain`, at the plan's microbatch size.

    Raises:
        FileError: the plan was made for another task; says what differs.
    """
    profile, measurement = plan.profile, plan.measurement
    now = with_loss(fingerprint(task, chain), chain, measurement)
    found = differences(profile.fingerprint, now.fingerprint, profile.layers)
    if not found and measurement.sizes != now.sizes:
        found = ["operations of other sizes, such as another number of attention heads"]
    if found:
        raise FileError(
            f"the plan of {profile.model} does not belong to this task: it was made for {'; '.join(found)}: "
            "profile and plan this task again"
        )
