"""Links that training waits for, as a supervisor concludes from the workers' actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from pipefit.lowering import lower
from pipefit.runtime.launch.launch import WorkerPosition, waited_for
from pipefit.schema.plan import Plan
from support.pipelines import equal_profile, make_plan

NEVER = 1 << 20  # after all actions of a step


def positions(
    plan: Plan, at: Mapping[int, str | int], steps: Mapping[int, int] | None = None
) -> dict[int, WorkerPosition]:
    """Return the positions of workers: each at an action, or at a number without one; in step 3 by default."""
    found = {}
    for device, own in enumerate(lower(plan).actions):
        where = at[device]
        number = where if isinstance(where, int) else [str(action) for action in own].index(where)
        found[device] = WorkerPosition(step=(steps or {}).get(device, 3), number=number, actions=own)
    return found


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Return three stages."""
    return make_plan(equal_profile(6), (2, 2, 2))


@pytest.mark.parametrize(
    ("at", "ends"),
    [
        ({0: "0SEND_F1", 1: "1WAIT_RECV_F1", 2: NEVER}, ()),  # it is about to be begun
        ({0: "0WAIT_SEND_F1", 1: "1WAIT_RECV_F1", 2: NEVER}, (0,)),
        ({0: NEVER, 1: "1WAIT_RECV_F1", 2: -1}, (0,)),
        ({0: NEVER, 1: "1WAIT_RECV_B0", 2: "2B0"}, ()),  # the other computes
        ({0: NEVER, 1: "1WAIT_RECV_B0", 2: -1}, ()),  # the other makes its batch
        ({0: NEVER, 1: "1F1", 2: NEVER}, ()),  # it computes itself
        ({0: NEVER, 1: -1, 2: NEVER}, ()),
        ({0: NEVER, 1: NEVER, 2: NEVER}, ()),
    ],
)
def test_a_link_is_waited_for_where_both_ends_have_begun(
    at: dict[int, str | int], ends: object, plan: Plan
) -> None:
    """A link is waited for only if both ends have begun the transfer: a worker that computes, or has not
    reached it, is another case.
    """
    assert waited_for(plan, 1, positions(plan, at)) == ends


def test_another_step_counts_by_its_number(plan: Plan) -> None:
    """A worker a step ahead has begun every action of this one, and a worker a step late none."""
    at: dict[int, str | int] = {0: "0F0", 1: "1WAIT_RECV_F1", 2: NEVER}
    assert waited_for(plan, 1, positions(plan, at, {0: 4})) == (0,)
    assert waited_for(plan, 1, positions(plan, at | {0: NEVER}, {0: 2})) == ()


def test_a_sum_is_waited_for_where_all_have_begun_it(plan: Plan) -> None:
    """A sum is waited for if all workers have begun it: of three that clip by a norm, a late one is not the
    link's fault.
    """
    clipped = replace(plan, training=replace(plan.training, clip_norm=1.0))
    waits: dict[int, str | int] = {stage: f"{stage}WAIT_AGREE" for stage in range(3)}
    assert waited_for(clipped, 1, positions(clipped, waits)) == (0, 2)
    assert waited_for(clipped, 1, positions(clipped, waits | {2: "2AGREE"})) == ()
