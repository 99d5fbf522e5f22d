"""Programs that need offloaded weights, or move weights in use: refused by simulation and training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from pipefit.errors import UsageError
from pipefit.lowering import lower
from pipefit.memory.stage import Costs
from pipefit.runtime import Trainer
from pipefit.schema.actions import Action, parse_action
from pipefit.schema.decisions import Decision, State, What
from pipefit.schema.devices import parse_place
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program
from pipefit.simulator import Simulation
from pipefit.simulator.ledger import Ledger
from support.random_offloads import make_batch, make_chain
from support.small_tasks import plan_of

Rearrange = Callable[[list[Action]], list[Action]]


def weights_away(schedule: str = "pipedream") -> Plan:
    """Return three stages; the first offloads the older weights of its only layer as early as possible."""
    plan = plan_of(make_chain(), [1, 2, 3], microbatches=4, schedule=schedule)
    subject = State(start=0, stop=1, kind="versions")
    moves = Decision(stage=0, subject=subject, what=What.OFFLOAD, place=parse_place("host"), behind=0)
    return replace(plan, decisions=(moves,) if schedule == "pipedream" else ())


def word(text: str, microbatch: int) -> Action:
    """Return a copy action for the first layer's weights."""
    return parse_action(f"0{text}{microbatch}[0.versions]@host")


def behind(action: str, *moved: Action) -> Rearrange:
    """Return a rearrangement that puts these actions after `action`."""

    def rearranged(actions: list[Action]) -> list[Action]:
        rest = [one for one in actions if one not in moved]
        place = rest.index(parse_action(action)) + 1
        return [*rest[:place], *moved, *rest[place:]]

    return rearranged


def by_another_name(actions: list[Action]) -> list[Action]:
    """Offload and reload the first weights, which microbatches 1 and 2 need, under microbatch 2, before the
    backward of 1.
    """
    own = word("OFFLOAD", 1), word("WAIT_OFFLOAD", 1), word("RELOAD", 1), word("WAIT_RELOAD", 1)
    return [one._replace(microbatch=2) if one in own[:2] else one for one in actions if one not in own[2:]]


def programs(plan: Plan, rearrange: Rearrange, number: int) -> list[Program]:
    """Return the first steps, with the first device's actions of the last step rearranged."""
    *first, last = [lower(plan, entered=4 * step) for step in range(number)]
    return [*first, replace(last, actions=(tuple(rearrange(list(last.actions[0]))), *last.actions[1:]))]


def read(plan: Plan, steps: Sequence[Program]) -> None:
    """Run the ledger of the first device."""
    stage, kind = plan.stages[0], plan.cluster.devices[0].kind
    ledger = Ledger(0, {0: Costs.of(plan).stage(stage.start, stage.stop, kind)}, steps[0])
    for program in steps:
        ledger.read(program.actions[0])


def run(plan: Plan, steps: Sequence[Program]) -> None:
    """Run all devices in this process."""
    trainer = Trainer(make_chain(), plan)
    for program in steps:
        torch.manual_seed(0)
        inputs, targets = make_batch(2)
        trainer._run_program(program, inputs=[[inputs]] * 4, targets=[[targets]] * 4, weights=[1.0] * 4)


CASES: dict[str, tuple[Rearrange, int, str, str]] = {
    "too late": (
        behind("0B-1", word("RELOAD", -1), word("WAIT_RELOAD", -1)),
        2,
        r"0B-1 needs a version of layer 0 that is away \(@host\): RELOAD it",
        r"0B3 needs a tensor that is away: 0WAIT_RELOAD3\[0.versions\]@host must come before it",
    ),
    "in use": (
        behind("0F0", word("OFFLOAD", 0), word("WAIT_OFFLOAD", 0)),
        2,
        r"0OFFLOAD0\[0.versions\]@host offloads weights that updates would change: a STASH must come before",
        "weights of layer 0 cannot be offloaded, because updates would change them: copy them first",
    ),
    "by another name": (
        by_another_name,
        1,
        r"0B1 needs a version of layer 0 that is away \(@host\)",
        "0B1 needs the offloaded weights of layer 0: RELOAD them",
    ),
    "twice": (
        behind("0WAIT_STASH0", word("OFFLOAD", 1), word("OFFLOAD", 2), word("WAIT_OFFLOAD", 1)),
        1,
        r"0OFFLOAD2\[0.versions\]@host offloads a version of layer 0 that is on its way out already",
        r"0OFFLOAD2\[0.versions\]@host offloads the weights of layer 0 a second time",
    ),
    "never away": (
        lambda actions: [one for one in actions if one not in (word("OFFLOAD", 1), word("WAIT_OFFLOAD", 1))],
        1,
        r"0RELOAD1\[0.versions\]@host reloads a version of layer 0 that is on the device",
        r"0RELOAD1\[0.versions\]@host reloads a storage that is on the device",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_that_are_not_there_or_still_in_use_are_told(name: str) -> None:
    """Weights that are absent or in use are reported by ledger and runtime, each at the faulty action."""
    rearrange, number, simulated, trained = CASES[name]
    plan = weights_away()
    steps = programs(plan, rearrange, number)
    with pytest.raises(UsageError, match=f"^device 0: {simulated}"):
        read(plan, steps)
    with pytest.raises(UsageError, match=trained):
        run(plan, steps)


def newest_away() -> Plan:
    """Return three stages; the first offloads the newest weights of its first layer and of the two layers
    after it.
    """
    plan = plan_of(make_chain(), [3, 2, 1], microbatches=4, schedule="pipedream")
    subjects = (State(start=start, stop=stop, kind="parameters") for start, stop in ((0, 1), (1, 3)))
    host = parse_place("host")
    return replace(
        plan, decisions=tuple(Decision(stage=0, subject=s, what=What.OFFLOAD, place=host) for s in subjects)
    )


def copied_again(actions: list[Action]) -> list[Action]:
    """Replace the copy of the second layer's weights by one of the first layer's."""
    one, other = parse_action("0STASH0[1:3]"), parse_action("0STASH1[0:1]")
    instead = {one: other, one.join: other.join}
    return [instead.get(action, action) for action in actions]


COPIES: dict[str, tuple[Rearrange, str, str]] = {
    "updated before it is copied": (
        behind("0STEP0[1:3]", parse_action("0STASH0[1:3]")),
        r"0STEP0\[1:3\] would change weights that forwards still use: a STASH must come before it",
        "the weights of later forwards: the program must copy them first",
    ),
    "used before all is copied": (
        behind("0STEP0[0:1]", parse_action("0WAIT_STASH0[0:1]")),
        r"0WAIT_STASH0\[0:1\] comes before the STASH of layer 1: copy the weights of all layers first",
        "forwards cannot use new weights before the STASH of layer 1",
    ),
    "copied twice": (
        copied_again,
        r"0STASH1\[0:1\] copies weights a second time: the WAIT of the first copy must come before it",
        "weights of layer 0 have already been copied",
    ),
    "copied while away": (
        behind("0B0[1:3]", parse_action("0STASH0[0:1]")),
        r"0STASH0\[0:1\] needs the parameters of layer 0, which is away \(@host\)",
        r"0STASH0\[0:1\] needs the parameters of layer 0, which is away \(@host\)",
    ),
}


@pytest.mark.parametrize("name", COPIES)
def test_weights_that_are_copied_run_by_run_are_copied_before_they_change(name: str) -> None:
    """Weights copied run by run must be copied before their update or use in a forward; ledger and runtime
    refuse anything else.
    """
    rearrange, simulated, trained = COPIES[name]
    plan = newest_away()
    steps = programs(plan, rearrange, 1)
    with pytest.raises(UsageError, match=f"^device 0: {simulated}"):
        read(plan, steps)
    with pytest.raises(UsageError, match=trained):
        run(plan, steps)


def test_a_schedule_with_an_end_has_no_versions_to_move() -> None:
    """A program for a synchronous schedule that moves versions is refused."""
    plan = weights_away("1f1b")
    copies = tuple(word(text, 0) for text in ("OFFLOAD", "WAIT_OFFLOAD", "RELOAD", "WAIT_RELOAD"))
    (program,) = programs(plan, behind("0F0", *copies), 1)
    with pytest.raises(UsageError, match="offloads weight versions in a program without them"):
        assert Simulation(plan, program=program).effects
    with pytest.raises(UsageError, match="offloads weight versions, but the plan's schedule is synchronous"):
        run(plan, [program])
    away = replace(weights_away(), training=plan.training)
    with pytest.raises(
        UsageError, match="versions of layer 0 to host: schedule 1f1b does not keep weight versions"
    ):
        lower(away)


def test_weights_in_common_memory_stay() -> None:
    """A parameter that is a part of a larger tensor cannot be offloaded and is refused by name."""
    plan, task = weights_away(), make_chain()

    def build() -> torch.nn.Module:
        chain = task.build()
        large = torch.zeros(1000)
        chain[0].weight = torch.nn.Parameter(large[: chain[0].weight.numel()].view_as(chain[0].weight))
        return chain

    trainer = Trainer(replace(task, module=build), plan)
    with pytest.raises(
        UsageError, match="parameter weight of layer 0 cannot be offloaded, because its memory"
    ):
        trainer.step(make_batch(8))
