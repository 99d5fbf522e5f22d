"""The end of a step with offloaded optimizer state or layers updated on the host, drawn by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipefit.errors import UsageError
from pipefit.lowering import lower
from pipefit.schema.decisions import Decision, State, StateKind, What
from pipefit.schema.devices import parse_place
from pipefit.schema.plan import Plan
from pipefit.schema.program import parse_program
from support.pipelines import equal_profile, make_plan


def about(
    start: int, stop: int, what: What = What.OFFLOAD, kind: StateKind = "optimizer", **when: int
) -> Decision:
    """Build a decision about a state of some layers of the only stage."""
    subject = State(start=start, stop=stop, kind=kind)
    return Decision(stage=0, subject=subject, what=what, place=parse_place("host"), **when)


def ending(plan: Plan) -> str:
    """Return the only device's actions after its last backward, without the place."""
    words = str(lower(plan)).splitlines()[0].split()
    return " ".join(words[words.index("0B0") + 1 :]).replace("@host", "").replace(".optimizer", "")


def one_stage(*decisions: Decision, layers: int = 4) -> Plan:
    """Build layers on one device, one microbatch, and decisions."""
    return make_plan(equal_profile(layers), [layers], microbatches=1, decisions=decisions)


@pytest.mark.parametrize(
    ("decisions", "drawn"),
    [
        ([], "0STEP"),
        ([about(0, 4)], "0RELOAD#0 0WAIT_RELOAD#0 0STEP 0OFFLOAD#0 0WAIT_OFFLOAD#0"),
        (
            [about(1, 2)],
            "0STEP[0:1] 0RELOAD[1] 0WAIT_RELOAD[1] 0STEP[1:2] 0OFFLOAD[1] 0STEP[2:4] 0WAIT_OFFLOAD[1]",
        ),
        (
            [about(n, n + 1, ahead=1, behind=0) for n in range(3)],
            (
                "0RELOAD[0] 0RELOAD[1] 0WAIT_RELOAD[0] 0STEP[0:1] 0OFFLOAD[0] 0WAIT_OFFLOAD[0] "
                "0RELOAD[2] 0WAIT_RELOAD[1] 0STEP[1:2] 0OFFLOAD[1] 0WAIT_OFFLOAD[1] "
                "0WAIT_RELOAD[2] 0STEP[2:3] 0OFFLOAD[2] 0WAIT_OFFLOAD[2] 0STEP[3:4]"
            ),
        ),
        (
            [about(n, n + 1, ahead=0, behind=1) for n in (3, 2)],
            (
                "0STEP[0:2] 0RELOAD[2] 0WAIT_RELOAD[2] 0STEP[2:3] 0OFFLOAD[2] "
                "0RELOAD[3] 0WAIT_RELOAD[3] 0STEP[3:4] 0WAIT_OFFLOAD[2] 0OFFLOAD[3] 0WAIT_OFFLOAD[3]"
            ),
        ),
        (
            [about(0, 1, ahead=9, behind=9), about(3, 4, ahead=9, behind=9)],
            (
                "0RELOAD[0] 0RELOAD[3] 0WAIT_RELOAD[0] 0STEP[0:1] 0OFFLOAD[0] 0STEP[1:3] 0WAIT_RELOAD[3] 0STEP[3:4] "
                "0WAIT_OFFLOAD[0] 0OFFLOAD[3] 0WAIT_OFFLOAD[3]"
            ),
        ),
    ],
    ids=["none", "whole", "one", "double-buffered", "behind", "all at once"],
)
def test_state_comes_before_its_update_and_leaves_behind_it(decisions: list[Decision], drawn: str) -> None:
    """State moves run after run, in layer order; `count` updates hide each direction."""
    found = ending(one_stage(*decisions))
    assert sorted(found.split()) == sorted(drawn.split())
    assert found == drawn


UPDATE = What.UPDATE


@pytest.mark.parametrize(
    ("decisions", "drawn"),
    [
        (
            [about(0, 4, UPDATE)],
            "0OFFLOAD#0 0WAIT_OFFLOAD#0 0STEP 0WAIT_STEP 0RELOAD#1 0WAIT_RELOAD#1",
        ),
        (
            [about(0, 1, UPDATE), about(1, 2, UPDATE), about(3, 4, UPDATE), about(2, 3)],
            (
                "0OFFLOAD[0.gradients] 0OFFLOAD[1.gradients] 0OFFLOAD[3.gradients] "
                "0WAIT_OFFLOAD[0.gradients] 0STEP[0:1] "
                "0WAIT_OFFLOAD[1.gradients] 0STEP[1:2] 0WAIT_STEP[0:1] 0RELOAD[0.parameters] "
                "0WAIT_OFFLOAD[3.gradients] 0STEP[3:4] 0WAIT_STEP[1:2] 0RELOAD[1.parameters] "
                "0RELOAD[2] 0WAIT_RELOAD[2] 0STEP[2:3] 0OFFLOAD[2] 0WAIT_OFFLOAD[2] "
                "0WAIT_STEP[3:4] 0RELOAD[3.parameters] "
                "0WAIT_RELOAD[0.parameters] 0WAIT_RELOAD[1.parameters] 0WAIT_RELOAD[3.parameters]"
            ),
        ),
    ],
    ids=["whole", "some"],
)
def test_gradients_go_to_the_host_and_parameters_come_back(decisions: list[Decision], drawn: str) -> None:
    """A run is updated while gradients of the next one leave and parameters of the one before return; the
    device updates its layers while the host works on the last run.
    """
    assert ending(one_stage(*decisions)) == drawn


def test_the_text_of_a_program_says_which_states_are_moved() -> None:
    """States moved together are a bundle, and the program's text parses to the same program."""
    program = lower(one_stage(about(0, 2, UPDATE), about(2, 4)))
    bundles = [" ".join(map(str, bundle)) for bundle in program.bundles]
    assert bundles == ["0.gradients 1.gradients", "0.parameters 1.parameters", "2.optimizer 3.optimizer"]
    again = parse_program(str(program), placement=program.placement, microbatches=program.microbatches)
    assert again == program
    assert "0STEP[0:2]@host" in str(program).split()


def test_updates_wait_for_what_all_stages_agree_on() -> None:
    """Gradients are clipped on their device, before anything moves for the update."""
    plan = one_stage(about(0, 2, UPDATE), about(2, 4, ahead=3))
    words = ending(replace(plan, training=replace(plan.training, clip_norm=1.0))).split()
    assert words[:2] == ["0AGREE", "0WAIT_AGREE"]


def test_without_an_update_nothing_of_the_optimizer_moves() -> None:
    """A batch that only accumulates gradients leaves the optimizer state in place."""
    program = lower(one_stage(about(0, 2), about(2, 4, UPDATE)), update=False)
    assert not any(action.moves_state for action in program.actions[0])


@pytest.mark.parametrize(
    ("decisions", "words"),
    [
        ([about(0, 2), about(1, 3)], "the optimizer state of layer 1 is already offloaded"),
        ([about(0, 2), about(1, 3, UPDATE)], "the optimizer state of layer 1 is already offloaded"),
        ([about(0, 2, kind="versions")], "schedule 1f1b does not keep weight versions"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(decisions: list[Decision], words: str) -> None:
    """The error quotes the decision."""
    with pytest.raises(UsageError, match=rf"stage 0: .* on host: {words}|stage 0: .* to host: {words}"):
        lower(one_stage(*decisions))
