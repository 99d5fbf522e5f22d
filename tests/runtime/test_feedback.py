"""Recomputed layers that compute with buffers they change: the numbers of plain training, and exact bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.lowering.passes.recomputation import recompute_decisions
from pipefit.runtime import Trainer, certify
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Microbatches, Run, What
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.training import Training
from pipefit.simulator import simulate
from support.buffer_feedback import FEEDING_BACK, WIDTH, Average, Saved, spectral, task_with
from support.gallery_samples import sampled
from support.known_profiles import profile
from support.random_trainings import Case, accounts
from support.small_tasks import batch_of, plan_of, task_of

STEPS = 3
CASES = [(name, by_hand) for name, (_, _, ways) in FEEDING_BACK.items() for by_hand in ways]
OFTEN = [
    *((name, ways[-1]) for name, (_, _, ways) in FEEDING_BACK.items()),
    ("average", False),
    ("twice", False),
]


def plain(task: Task, plan: Plan) -> tuple[list[float], dict[str, Tensor]]:
    """Train without pipefit, one forward and backward per microbatch; return losses and the last state."""
    torch.manual_seed(0)
    module = task.build()
    optimizer, count = task.optimizer(module.parameters()), plan.training.microbatches
    losses = []
    for step in range(STEPS):
        batch = (torch.tensor_split(part, count) for part in batch_of(task, plan, step))
        parts = []
        for inputs, targets in zip(*batch, strict=True):
            loss = task.loss(module(inputs.clone()), targets.clone())
            (loss / count).backward()
            parts.append(loss.detach())
        losses.append(float(torch.stack(parts) @ torch.full((count,), 1 / count)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, module.state_dict()


def check_numbers(task: Task, plan: Plan) -> None:
    """Check that every loss, parameter and buffer is plain training's."""
    losses, state = plain(task, plan)
    trainer = Trainer(task, plan)
    assert [trainer.step(batch_of(task, plan, step)) for step in range(STEPS)] == losses
    trained = trainer.state_dict()
    assert trained.keys() == state.keys()
    assert [name for name, tensor in state.items() if not torch.equal(trained[name], tensor)] == []


def check_bytes(task: Task, plan: Plan) -> None:
    """Check that simulator, dry run and allocator agree on the peak of every device in every step."""
    for account in accounts(Case(name=task.name, settings={}, task=task, plan=plan)):
        assert account.dry_run_bytes == account.oracle_bytes == account.simulated_bytes


def kept(task: Task, schedule: str) -> Plan:
    """Return two stages and four microbatches, nothing recomputed."""
    found = profile(task, microbatch_size=2, threads=torch.get_num_threads())
    return Plan(
        profile=found,
        cluster=Cluster.emulated((2, 1 << 30)),
        training=Training(batch_size=8, microbatches=4, schedule=schedule),
        stages=(
            Stage(start=0, stop=1, grid=Grid.of(0)),
            Stage(start=1, stop=len(found.layers), grid=Grid.of(1)),
        ),
    )


def whole(task: Task, schedule: str) -> Plan:
    """Return the plan with both stages recomputed for every microbatch."""
    plan = kept(task, schedule)
    return replace(
        plan,
        decisions=recompute_decisions(plan.stages, plan.profile.edges, "always", schedule, 4),
    )


def with_run(task: Task, schedule: str) -> Plan:
    """Return the plan with the layer that feeds back recomputed in the second stage, for two microbatches of
    three.
    """
    plan = kept(task, schedule)
    layer = next(number for number, cost in enumerate(plan.measurement.costs) if cost.fed_back)
    run, which = Run(start=layer, stop=layer + 1), Microbatches(taken=2, every=3)
    decision = Decision(stage=1, subject=run, what=What.RECOMPUTE, microbatches=which, ahead=1)
    return replace(plan, decisions=(decision,))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "by_hand"), sampled(CASES, often=OFTEN))
def test_recomputed_layers_see_the_buffers_of_their_first_forward(name: str, by_hand: bool) -> None:
    """With four microbatches in flight, each recomputation sees the buffers of its first forward and changes
    none. Copies of buffers, replaced ones included, count from the first forward to the backward.
    """
    task = task_with(FEEDING_BACK[name][0], by_hand=by_hand)
    plan = whole(task, "gpipe")
    check_numbers(task, plan)
    check_bytes(task, plan)


@pytest.mark.gallery
@pytest.mark.parametrize("schedule", ["gpipe", "torchgpipe", "1f1b"])
@pytest.mark.parametrize("way", [whole, with_run])
@pytest.mark.parametrize(("name", "by_hand"), CASES)
def test_every_schedule(name: str, by_hand: bool, way: Callable[[Task, str], Plan], schedule: str) -> None:
    """Whole stages and single layers, recomputed early or just in time, for all microbatches or some, are
    exact under every schedule. A layer that saves its buffer is refused if a later microbatch's forward comes
    before a backward that is not recomputed.
    """
    task = task_with(FEEDING_BACK[name][0], by_hand=by_hand)
    plan = way(task, schedule)
    if name in ("saved", "started") and way is with_run and schedule != "1f1b":
        with pytest.raises(UsageError, match=r"microbatch 2 cannot go backward .* changed in place"):
            Trainer(task, plan).step(batch_of(task, plan, 0))
        return
    check_bytes(task, plan)
    if schedule != "torchgpipe":  # whose backwards, and so sums of gradients, are in another order
        check_numbers(task, plan)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("build", "by_hand"), [(spectral, False), (Average, True)])
def test_a_run_for_some_microbatches(build: Callable[[], nn.Module], by_hand: bool) -> None:
    """A run recomputed for some microbatches is exact: the other microbatches' only forward changes the
    buffers too.
    """
    task = task_with(build, by_hand=by_hand)
    plan = with_run(task, "1f1b")
    check_numbers(task, plan)
    check_bytes(task, plan)


def test_a_checkpoint_keeps_the_buffers_that_feed_back_and_no_others() -> None:
    """A checkpointed forward keeps only the buffers that feed back: 24 more bytes for each microbatch in
    flight.
    """
    peaks = {}
    for reads in (True, False):
        task = task_with(lambda reads=reads: Average(reads=reads), by_hand=True)
        for count in (2, 3):
            plan = plan_of(task, [4], microbatches=count, schedule="gpipe", recompute="stages")
            trace = simulate(plan, steps=2)
            first = [s for s in trace.devices[0].memory if s.step == 1 and s.action == f"0N{count - 1}"]
            peaks[reads, count] = sum(first[0].bytes)
    more = {reads: peaks[reads, 3] - peaks[reads, 2] for reads in (True, False)}
    assert more[True] - more[False] == 6 * 4


def test_equal_layers_that_feed_back_are_folded() -> None:
    """A dry run of four of eight equal layers, each with buffers that feed back, predicts the memory of all."""
    task = task_of(lambda: [spectral() for _ in range(8)], inputs=WIDTH, outputs=WIDTH)
    plan = plan_of(task, [8], microbatches=3, schedule="gpipe", recompute="stages")
    folded, every = certify(task, plan), certify(task, plan, fold=False)
    assert folded == every
    assert [d.step_peak_bytes(1) for d in folded.devices] == [
        simulate(plan, steps=2).devices[0].step_peak_bytes(1)
    ]


def test_an_evaluation_between_steps_changes_nothing() -> None:
    """An evaluation leaves buffers alone, and the next step trains as without it."""
    task = task_with(spectral, by_hand=True)
    plan = whole(task, "gpipe")
    trainers = Trainer(task, plan), Trainer(task, plan)
    for step in range(STEPS):
        losses = [trainer.step(batch_of(task, plan, step)) for trainer in trainers]
        assert losses[0] == losses[1]
        trainers[0].evaluate(batch_of(task, plan, 100 + step))
    states = [trainer.state_dict() for trainer in trainers]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_a_saved_average_can_be_trained_in_a_pipeline_where_it_is_recomputed() -> None:
    """A backward through a saved average that the next microbatch changed is refused unless the layer is
    recomputed; a copy is unchanged.
    """
    task = task_with(Saved, by_hand=True)
    plan = kept(task, "gpipe")
    with pytest.raises(
        UsageError, match=r"microbatch 0 cannot go backward through layers 1 to 3: .* recompute these"
    ):
        Trainer(task, plan).step(batch_of(task, plan))
    check_numbers(task, whole(task, "1f1b"))
