"""Asynchronous schedules against drawings, closed forms, and an independent count of weight versions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from pipefit.errors import UsageError
from pipefit.lowering import ENDLESS, SCHEDULES, lower, lower_drain, step_programs
from pipefit.schema.actions import Action, Kind
from pipefit.schema.layer_costs import SharedParameter
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program, parse_program
from pipefit.simulator import Simulation
from support.asynchronous_programs import one_program
from support.gallery_samples import sampled
from support.pipelines import equal_profile, make_plan

# Stage by stage: the first step of four microbatches, one in the middle, and the drain. A bar is an update of
# a copy, a dot one in place.
PIPEDREAM_FIRST = """
F0 F1 F2 F3 B0|
F0 F1 F2 B0| F3 B1|
F0 F1 B0| F2 B1| F3 B2|
F0 B0. F1 B1. F2 B2. F3 B3.
"""
PIPEDREAM_BODY = """
F0 B-3| F1 B-2| F2 B-1| F3 B0|
F0 B-2| F1 B-1| F2 B0| F3 B1|
F0 B-1| F1 B0| F2 B1| F3 B2|
F0 B0. F1 B1. F2 B2. F3 B3.
"""
PIPEDREAM_DRAIN = """
B-3. B-2. B-1.
B-2. B-1.
B-1.

"""
# With two versions: a bar is an update of a copy, an arrow the moment from which forwards use it.
TWO_FIRST = """
F0 F1 F2 B0
F0 F1 B0 F2 B1
F0 B0 F1 B1 F2 B2|
"""
TWO_BODY = """
F0 B-2 F1 B-1| F2 > B0
F0 B-1| F1 B0 F2 > B1
F0 B0 F1 B1 F2 > B2|
"""
TWO_DRAIN = """
B-2 B-1.
B-1.
>
"""


def plan_of(schedule: str, stages: int, microbatches: int) -> Plan:
    """Build a plan with one layer on each of `devices` devices."""
    return make_plan(equal_profile(stages), [1] * stages, microbatches=microbatches, schedule=schedule)


def drawn(program: Program) -> str:
    """Draw the passes of every stage in the notation above."""
    return "\n" + "\n".join(" ".join(_drawn(actions)) for actions in program.actions) + "\n"


def _drawn(actions: tuple[Action, ...]) -> Iterator[str]:
    compute, copied = "", False
    for action in actions:
        mark = "." if action.kind is Kind.STEP and not copied else ""
        if action.kind in (Kind.FORWARD, Kind.BACKWARD):
            if compute:
                yield compute
            compute, copied = f"{action.kind.value}{action.microbatch}", False
        elif action.kind is Kind.STASH and not action.wait:
            mark, copied = "|", True
        elif action.kind is Kind.STASH and not copied:  # joined later than right after the update
            if compute:
                yield compute
            compute = ">"
        compute += mark
    if compute:
        yield compute


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "first", "body", "drain"),
    [
        ("pipedream", 4, 4, PIPEDREAM_FIRST, PIPEDREAM_BODY, PIPEDREAM_DRAIN),
        ("pipedream-2bw", 3, 3, TWO_FIRST, TWO_BODY, TWO_DRAIN),
    ],
)
def test_the_parts_of_an_endless_schedule_are_as_drawn(
    schedule: str, stages: int, microbatches: int, first: str, body: str, drain: str
) -> None:
    """The first step fills the pipeline, later steps are the body, and the drain ends the microbatches in
    flight.
    """
    plan = plan_of(schedule, stages, microbatches)
    assert [drawn(program) for program in step_programs(plan)] == [first, body]
    assert drawn(lower(plan, entered=1000)) == body
    assert drawn(lower_drain(plan, entered=2 * microbatches)) == drain


def test_a_step_of_one_microbatch_is_the_program_written_by_hand() -> None:
    """A stage's sends of the step before are joined after this step's first pass."""
    plan = plan_of("pipedream", 2, 1)
    body = """
        device 0: 0RECV_B-1 0LOAD0 0F0 0SEND_F0 0WAIT_RECV_B-1 0B-1 0WAIT_SEND_F0 0STASH-1 0STEP-1 0WAIT_STASH-1
        device 1: 1RECV_F0 1WAIT_RECV_F0 1LOAD0 1F0 1WAIT_SEND_B-1 1B0 1SEND_B0 1STEP0
        carried in 0:
        carried in 1: 1SEND_B-1
        carried out 0:
        carried out 1: 1SEND_B0
    """
    assert step_programs(plan)[-1] == parse_program(body, placement=((0,), (1,)), microbatches=1)


def sizes_of(schedule: str, stages: int) -> list[tuple[int, ...]]:
    """Draw steps of any size: of one microbatch, of many, and of smaller batches between them."""
    if schedule == "pipedream":
        return [(1,) * 3 * stages, (stages,) * 3, (2 * stages + 1, 1, 2, 7), (3, 3)]
    return [(stages,) * 4, (stages + 2, stages, 2 * stages, stages + 1)]


@pytest.mark.sample(5)
@pytest.mark.parametrize("schedule", ENDLESS)
@pytest.mark.parametrize("stages", sampled(range(1, 9), often=(1, 2, 3, 5, 8)))
def test_steps_and_drains_of_an_endless_schedule_fit_together(schedule: str, stages: int) -> None:
    """Steps of any size fit together, with drains at any time: each step joins the starts of the one before,
    every message has its partner, no device deadlocks, forward and backward of a microbatch use the same
    weights, and in the end all stages have learnt from all microbatches.
    """
    for sizes in sizes_of(schedule, stages):
        plan = plan_of(schedule, stages, max(sizes))
        for stop in range(1, len(sizes) + 1):
            whole = one_program(plan, sizes[:stop], drained=True)
            assert whole.carried_out == ((),) * stages
            for actions in whole.actions:
                for kind in (Kind.FORWARD, Kind.BACKWARD):
                    assert [a.microbatch for a in actions if a.kind is kind] == list(range(sum(sizes[:stop])))
            for weights in followed(whole):
                assert weights.newest == weights.current == list(range(sum(sizes[:stop])))


class Weights:
    """The versions of one stage's weights, each the set of microbatches whose gradients it contains."""

    def __init__(self) -> None:
        self.newest: list[int] = []
        self.current = self.newest
        self.of: dict[int, list[int]] = {}  # by microbatch in flight
        self.met: list[int] = []  # gradients not yet in any weights
        self.learnt: dict[int, list[int]] = {}  # by microbatch, the gradients in its weights
        self.most_held = self.most_in_flight = 0

    def act(self, action: Action) -> None:
        """Follow one action."""
        m = action.microbatch or 0
        if action.kind is Kind.FORWARD:
            self.of[m], self.learnt[m] = self.current, list(self.current)
        elif action.kind is Kind.BACKWARD:
            assert self.of[m] == self.learnt[m], "its weights have changed in between"
            self.met.append(m)
            del self.of[m]
        elif action.kind is Kind.STEP:
            self.newest += self.met
            self.met.clear()
        elif action.kind is Kind.STASH and not action.wait:
            self.newest = list(self.newest)
        elif action.kind is Kind.STASH:
            self.current = self.newest
        held = {id(weights) for weights in (self.newest, self.current, *self.of.values())}
        self.most_held, self.most_in_flight = (
            max(self.most_held, len(held)),
            max(self.most_in_flight, len(self.of)),
        )


def followed(program: Program) -> list[Weights]:
    """Return the weights of every stage after a program."""
    found = [Weights() for _ in program.actions]
    for weights, actions in zip(found, program.actions, strict=True):
        for action in actions:
            weights.act(action)
    return found


@pytest.mark.sample(12)
@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
def test_pipedream_holds_a_version_for_every_microbatch_in_flight(stages: int, microbatches: int) -> None:
    """Stage s has P-s microbatches in flight and P-s versions; microbatch k uses weights that have learnt
    from all but the P-s-1 before it, forward and backward; after a drain all stages have learnt from all.
    """
    plan = plan_of("pipedream", stages, microbatches)
    sizes = (microbatches,) * (3 * stages // microbatches + 2)
    for stage, weights in enumerate(followed(one_program(plan, sizes, drained=True))):
        assert weights.most_in_flight == weights.most_held == stages - stage
        late = stages - stage - 1
        assert all(weights.learnt[k] == list(range(max(0, k - late))) for k in range(sum(sizes)))
        assert weights.newest == weights.current == list(range(sum(sizes)))


@pytest.mark.sample(10)
@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("more", [0, 1, 5])
def test_two_buffered_holds_two_versions(stages: int, more: int) -> None:
    """On every stage microbatches of step b use weights that have learnt from the first b-1 steps."""
    count, steps = stages + more, 5
    plan = plan_of("pipedream-2bw", stages, count)
    for stage, weights in enumerate(followed(one_program(plan, (count,) * steps, drained=True))):
        assert weights.most_in_flight == stages - stage
        assert weights.most_held == 2
        for step, m in product(range(steps), range(count)):
            assert weights.learnt[step * count + m] == list(range(max(0, step - 1) * count))
        assert weights.newest == weights.current == list(range(steps * count))


@pytest.mark.parametrize("schedule", ENDLESS)
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_a_full_pipeline_has_no_bubble(schedule: str, stages: int) -> None:
    """Stages of equal time without messages are never idle: a step takes M times a forward and a backward."""
    microbatches = stages + 1
    costs = equal_profile(stages, parameter_bytes=0)
    plan = make_plan(costs, [1] * stages, microbatches=microbatches, schedule=schedule)
    simulation = Simulation(plan)
    assert simulation.step_seconds[-1] == pytest.approx(3.0 * microbatches)
    assert simulation.utilisation == pytest.approx((1.0,) * stages)


def test_two_buffered_needs_a_microbatch_for_every_stage() -> None:
    """Fewer microbatches than stages would need a third version; the error says so."""
    with pytest.raises(
        UsageError, match="needs at least 4 microbatches in a step, one for each stage, not 3"
    ):
        lower(plan_of("pipedream-2bw", 4, 3))


def shared(plan: Plan) -> Plan:
    """Build layers; the first and the last share a parameter."""
    tied = SharedParameter(name="tied", users=(0, 2), nbytes=8, gradient_bytes=8, state_bytes=0)
    measurement = replace(plan.profile.measurements[0], shared=(tied,))
    return replace(plan, profile=replace(plan.profile, measurements=(measurement,)))


@pytest.mark.parametrize("schedule", ENDLESS)
def test_what_stages_would_have_to_agree_on_is_refused(schedule: str) -> None:
    """A common norm and a loss scale are refused when the training is constructed; the synchronous schedules
    take them.
    """
    plan = plan_of(schedule, 3, 4)
    with pytest.raises(UsageError, match=r"cannot be clipped to a common norm, .* or use schedule 1f1b"):
        replace(plan.training, clip_norm=1.0)
    with pytest.raises(
        UsageError, match=r"mixed-float16 scales the loss .*: use mixed-bfloat16, or schedule 1f1b"
    ):
        replace(plan.training, precision="mixed-float16")


def test_versions_are_asked_for_where_there_are_some() -> None:
    """A synchronous schedule has one weight version; the error names the schedules with the option."""
    with pytest.raises(
        UsageError, match=r"1f1b does not keep weight versions.* use pipedream or pipedream-2bw"
    ):
        replace(plan_of("1f1b", 2, 2).training, versions="everything")
    training = replace(plan_of("pipedream", 2, 2).training, versions="everything")
    assert training.differences(replace(training, versions="weights")) == [
        "pipedream with versions of everything, not pipedream"
    ]


def test_a_training_knows_which_schedules_are_endless() -> None:
    """The schedules that a training treats as asynchronous are those lowered to programs without a flush."""
    assert {name for name in (*SCHEDULES, *ENDLESS) if plan_of(name, 1, 1).training.endless} == set(ENDLESS)


@pytest.mark.parametrize("schedule", ENDLESS)
def test_what_has_no_meaning_without_a_flush_is_refused(schedule: str) -> None:
    """Shared parameters on several stages, several stages on a device, and accumulated batches are each
    named, with alternatives.
    """
    plan = plan_of(schedule, 3, 4)
    for refused, message in (
        (
            shared(plan),
            r"stages 0, 2 share parameter 'tied', .*: put all layers of the parameter into one stage, untie",
        ),
        (
            make_plan(plan.profile, [1] * 3, devices=1, microbatches=4, schedule=schedule),
            "one stage on each device",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            lower(refused)
    with pytest.raises(UsageError, match="cannot accumulate gradients over several batches"):
        lower(plan, update=False)


def test_a_copy_of_weights_takes_as_long_as_its_bytes_need_to_be_read_and_written() -> None:
    """The first of two stages copies weights for every microbatch; the last, which updates in place, never
    does.
    """
    plan = make_plan(equal_profile(2, parameter_bytes=10**9), [1, 1], microbatches=3, schedule="pipedream")
    simulation = Simulation(plan)
    copies = [
        event for event in simulation.trace().devices[0].events if "STASH" in event.action and event.step == 1
    ]
    kind = plan.cluster.devices[0].kind
    rate = kind.memory_bandwidth * kind.bandwidth_reached
    assert [event.end_seconds - event.start_seconds for event in copies] == pytest.approx(
        [2 * 10**9 / rate] * 3
    )
    assert not any("STASH" in event.action for event in simulation.trace().devices[1].events)
    assert simulation.step_seconds[-1] == pytest.approx(3 * (3.0 + 2 * 10**9 / rate))
