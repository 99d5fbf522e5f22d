"""Gathers and frees of divided parameters: programs drawn by hand, bytes and seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipefit.errors import UsageError
from pipefit.lowering import lower, lower_evaluation
from pipefit.schema.actions import Kind
from pipefit.schema.decisions import Decision, State, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.layer_costs import SharedParameter
from pipefit.schema.plan import Plan
from pipefit.schema.program import parse_program
from pipefit.schema.trace import Category
from pipefit.simulator import Simulation, simulate
from support.replica_profiles import gridded


def one_stage(*, buckets: int, microbatches: int = 1, bytes_per_second: float = 1e30, data: int = 2) -> Plan:
    """Build a stage of four equal layers on some replicas: forwards of a second, backwards of two, parameters
    of 32 bytes.
    """
    plan = gridded(
        data,
        1,
        1,
        1,
        microbatches=microbatches,
        schedule="gpipe",
        samples=12,
        bytes_per_second=bytes_per_second,
    )
    grid = Grid(devices=tuple(range(data)), data=data, shard="parameters", buckets=buckets)
    return replace(plan, stages=(Stage(start=0, stop=4, grid=grid),))


def drawn(plan: Plan) -> str:
    """Return the passes and gathers of a device."""
    return " ".join(str(a) for a in lower(plan).actions[0] if "LOAD" not in str(a) and "REDUCE" not in str(a))


def test_a_bucket_is_gathered_while_the_pass_before_is_computed() -> None:
    """A bucket is freed after its pass, except after the last forward, which the backward follows; owners
    update.
    """
    assert drawn(one_stage(buckets=4)) == (
        "0UNSHARD[0:1] 0UNSHARD[1:2] 0WAIT_UNSHARD[0:1] 0F0[0:1] 0RESHARD[0:1] "
        "0UNSHARD[2:3] 0WAIT_UNSHARD[1:2] 0F0[1:2] 0RESHARD[1:2] "
        "0UNSHARD[3:4] 0WAIT_UNSHARD[2:3] 0F0[2:3] 0RESHARD[2:3] 0WAIT_UNSHARD[3:4] 0F0[3:4] "
        "0UNSHARD[2:3] 0B0[3:4] 0RESHARD[3:4] 0UNSHARD[1:2] 0WAIT_UNSHARD[2:3] 0B0[2:3] 0RESHARD[2:3] "
        "0UNSHARD[0:1] 0WAIT_UNSHARD[1:2] 0B0[1:2] 0RESHARD[1:2] 0WAIT_UNSHARD[0:1] 0B0[0:1] 0RESHARD[0:1] 0STEP"
    )


def test_a_shared_parameter_comes_with_the_bucket_of_its_first_user() -> None:
    """A shared parameter is gathered for the passes through its last user too, and freed in between."""
    plan = gridded(2, *[1] * 5, microbatches=1, schedule="gpipe", samples=12)
    name = plan.measurement.costs[0].parameters[0].name
    tied = SharedParameter(name=name, users=(0, 5), nbytes=32, gradient_bytes=32, state_bytes=0)
    shared = replace(
        plan.profile, measurements=tuple(replace(m, shared=(tied,)) for m in plan.profile.measurements)
    )
    grid = Grid(devices=(0, 1), data=2, shard="parameters", buckets=5)
    told = drawn(replace(plan, profile=shared, stages=(Stage(start=0, stop=6, grid=grid),))).split()
    first = [action for action in told if "[0:1]" in action or "[4:6]" in action]
    assert " ".join(first) == (
        "0UNSHARD[0:1] 0WAIT_UNSHARD[0:1] 0F0[0:1] 0RESHARD[0:1] 0UNSHARD[0:1] 0UNSHARD[4:6] 0WAIT_UNSHARD[0:1] "
        "0WAIT_UNSHARD[4:6] 0F0[4:6] 0B0[4:6] 0RESHARD[0:1] 0RESHARD[4:6] "
        "0UNSHARD[0:1] 0WAIT_UNSHARD[0:1] 0B0[0:1] 0RESHARD[0:1]"
    )


def test_with_one_bucket_all_parameters_stay_until_the_update() -> None:
    """With one bucket nothing is computed between passes, so all parameters stay until the update."""
    assert drawn(one_stage(buckets=1, microbatches=2)) == (
        "0UNSHARD[0:4] 0WAIT_UNSHARD[0:4] 0F0 0F1 0B0 0B1 0RESHARD[0:4] 0STEP"
    )


def test_owners_have_offloaded_parameters_from_their_gather_to_their_pass() -> None:
    """Offloaded parameters return before the gather of their own bucket, not before that of another one, and
    leave after its pass; an update needs them too.
    """
    parameters = State(start=1, stop=2, kind="parameters")
    move = Decision(stage=0, subject=parameters, what=What.OFFLOAD, place=parse_place("host"))
    actions = lower(replace(one_stage(buckets=4), decisions=(move,))).actions[0]
    kinds = {Kind.RELOAD, Kind.OFFLOAD, Kind.UNSHARD, Kind.FORWARD, Kind.BACKWARD, Kind.STEP}
    told = " ".join(str(action) for action in actions if action.kind in kinds and not action.wait)
    assert told.replace("[1.parameters]@host", "") == (
        "0UNSHARD[0:1] 0RELOAD 0UNSHARD[1:2] 0F0[0:1] 0UNSHARD[2:3] 0F0[1:2] 0OFFLOAD "
        "0UNSHARD[3:4] 0F0[2:3] 0F0[3:4] 0UNSHARD[2:3] 0B0[3:4] "
        "0RELOAD 0UNSHARD[1:2] 0B0[2:3] 0UNSHARD[0:1] 0B0[1:2] 0OFFLOAD 0B0[0:1] "
        "0STEP[0:1] 0RELOAD 0STEP[1:2] 0OFFLOAD 0STEP[2:4]"
    )


def test_parameters_stay_where_nothing_would_be_computed_without_them() -> None:
    """One of two buckets is used when the other's next pass would gather it: both stay, except
    at the turn.
    """
    assert drawn(one_stage(buckets=2, microbatches=2)) == (
        "0UNSHARD[0:2] 0UNSHARD[2:4] 0WAIT_UNSHARD[0:2] 0F0[0:2] 0WAIT_UNSHARD[2:4] 0F0[2:4] 0F1[0:2] 0RESHARD[0:2] "
        "0F1[2:4] 0UNSHARD[0:2] 0B0[2:4] 0WAIT_UNSHARD[0:2] 0B0[0:2] 0B1[2:4] 0RESHARD[2:4] 0B1[0:2] 0RESHARD[0:2] "
        "0STEP"
    )


def test_an_evaluation_gathers_all() -> None:
    """An evaluation gathers all parameters and does not cut its forwards."""
    actions = lower_evaluation(one_stage(buckets=4), microbatches=1).actions[0]
    words = [str(action) for action in actions]
    assert [word.split("[")[0] for word in words if "SHARD" in word] == (
        ["0UNSHARD"] * 4 + ["0WAIT_UNSHARD"] * 4 + ["0RESHARD"] * 4
    )
    assert words.index("0N0") == words.index("0RESHARD[0:1]") - 1


@pytest.mark.parametrize(("buckets", "others"), [(1, 3), (2, 3), (4, 2)])
def test_a_replica_has_its_own_layer_and_those_of_two_buckets(buckets: int, others: int) -> None:
    """Four replicas own a layer of 32 bytes each, the only one they keep between steps."""
    trace = simulate(one_stage(buckets=buckets, data=4, microbatches=3))
    found = [sample.by_category[Category.PARAMETERS] for sample in trace.devices[0].memory]
    assert max(found) == 32 + others * 32
    assert Simulation(one_stage(buckets=buckets, data=4))._at_rest(0)[0] == 32


def test_gathers_are_hidden_behind_passes() -> None:
    """A layer's 32 bytes take half a second: all gathers are hidden except the first, and the last sum of
    gradients.
    """
    plan = one_stage(buckets=4, bytes_per_second=64)
    assert simulate(plan).step_seconds[0] == pytest.approx(12 + 0.5 + 0.5)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "0WAIT_UNSHARD[0:1] 0F0[0:1]",
            "0F0[0:1] 0WAIT_UNSHARD[0:1]",
            r"0F0\[0:1\] needs the parameters of layer 0, wh",
        ),
        (
            "0RESHARD[3:4]",
            "",
            r"UNSHARD\[3:4\] gathers parameters of layer 3, which are already on the device or on their way",
        ),
        (
            "0RESHARD[3:4]",
            "0RESHARD[3:4] 0RESHARD[3:4]",
            r"RESHARD\[3:4\] frees parameters of layer 3, which are not",
        ),
    ],
)
def test_programs_that_gather_wrongly_are_refused(old: str, new: str, message: str) -> None:
    """Wrong gathers are refused by the ledger, before anything runs."""
    plan = one_stage(buckets=4, microbatches=2, data=4)
    program = lower(plan)
    text = str(program).replace(old, new)
    wrong = parse_program(text, placement=program.placement, microbatches=2)
    with pytest.raises(UsageError, match=message):
        simulate(plan, program=wrong)
