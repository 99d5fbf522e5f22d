"""Sequence parallelism: numbers of plain training, bytes of the allocator, and fewer of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.report.show import text
from pipefit.runtime import Trainer, certify, train
from pipefit.runtime.comm import transport
from pipefit.runtime.engine.tensor_groups import without_peers
from pipefit.schema.decisions import Decision, Microbatches, Run, SavedTensors, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Grid
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.simulator import simulate
from support.gallery_samples import sampled
from support.known_profiles import profile
from support.local_batches import Plain, batches, equal
from support.offload_choices import movable
from support.sharded_stages import WIDTH, Degrees, divided, grid_plan
from support.small_tasks import batch_of, in_one_process
from support.step_peaks import step_peaks

POSITIONS = 6
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

pytestmark = pytest.mark.usefixtures("one_thread")


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return random sequences with a target for every position."""
    shape = size, POSITIONS
    return torch.randn(*shape, WIDTH, dtype=torch.float64), torch.randn(*shape, 4, dtype=torch.float64)


def along(name: str = "dropped") -> Task:
    """Return a task with norms, residuals and dropout over sequences."""
    return replace(divided(name, optimizer=MOMENTUM), batch=batch)


@cache
def profiled(name: str = "dropped") -> ModelProfile:
    """Return the profile at the sizes of all local batches: whole, and divided with and without sequence
    parallelism.
    """
    return profile(along(name), microbatch_size=(4, 2), tensor=(1, 2), sequences=True)


def plan_of(
    edges: Sequence[int],
    degrees: Sequence[Degrees],
    sequences: Sequence[int],
    name: str = "dropped",
    **training: str,
) -> Plan:
    """Return a plan on a grid; the shards of stages in `sequences` use sequence parallelism."""
    plan = grid_plan(profiled(name), edges, degrees, **training)
    stages = (replace(s, grid=replace(s.grid, sequences=n in sequences)) for n, s in enumerate(plan.stages))
    return replace(plan, stages=tuple(stages))


def decided(plan: Plan) -> Plan:
    """Return the plan with recomputed layers on its first stage, and an offloaded tensor on its last."""
    last = len(plan.stages) - 1
    again = Decision(stage=0, subject=Run(start=0, stop=1), what=What.RECOMPUTE, microbatches=Microbatches())
    taken = SavedTensors(tensors=(movable(plan, last)[-1],))
    away = Decision(stage=last, subject=taken, what=What.OFFLOAD, place=parse_place("host"))
    return replace(plan, decisions=(again, away))


PLANS = {
    "beside others": lambda: plan_of([0, 3, 5, 6], [(1, 2), (1, 2), (1, 1)], [0]),
    "in replicas, behind and before": lambda: plan_of([0, 2, 6], [(2, 2), (1, 2)], [0, 1]),
    "decided": lambda: decided(plan_of([0, 2, 6], [(1, 2), (1, 2)], [0, 1], schedule="gpipe")),
}


@pytest.mark.parametrize("name", sampled(PLANS, often=["in replicas, behind and before"]))
def test_the_numbers_are_those_of_plain_training(name: str) -> None:
    """Losses and parameters of two steps with random draws equal plain training, in a smaller batch and an
    evaluation too.
    """
    task, plan = along(), PLANS[name]()
    trainer, plain = Trainer(task, plan), Plain(task, plan)
    for number, (inputs, targets) in enumerate(batches(task, plan, 2)):
        count = len(inputs) - 2 * (number == 1 and not plan.decisions)
        some = inputs[:count], targets[:count]
        assert trainer.step(some) == pytest.approx(plain.step(*some), rel=1e-6)
    assert equal(trainer.state_dict(), dict(plain.module.state_dict()), relative=1e-9)
    inputs, targets = batch_of(task, plan)
    plain.module.eval()
    expected = nn.functional.mse_loss(plain.module(inputs), targets).item()
    assert trainer.evaluate((inputs, targets)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", sampled(PLANS, often=["decided"]))
def test_simulator_dry_run_meter_and_allocator_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulator, dry run, meter and allocator agree on the peaks of every rank in both steps, to the byte,
    with absent peers.
    """
    monkeypatch.setattr(transport, "Together", lambda plan: without_peers)
    found = step_peaks(along(), PLANS[name]())
    assert found.dry == found.metered == found.allocated
    assert found.dry == found.simulated or any(d.place for d in PLANS[name]().decisions)


def test_less_is_kept_and_more_is_sent() -> None:
    """With sequence parallelism, ranks need less memory, have the same parts of parameters, and run more
    collectives.
    """
    plain, less = (plan_of([0, 6], [(1, 2)], sequences) for sequences in ([], [0]))
    assert max(simulate(less).peak_bytes) < max(simulate(plain).peak_bytes)
    one, other = plain.measured(0), less.measured(0)
    assert [cost.parameter_bytes for cost in one.costs] == [cost.parameter_bytes for cost in other.costs]
    kinds = [{each.kind for cost in m.costs for each in cost.forward.collectives} for m in (one, other)]
    assert kinds[0] == {"all_reduce"} and kinds[1] >= {"reduce_scatter", "all_gather"}
    assert "with sequence parallelism" in text(less) and "with sequence parallelism" not in text(plain)


@pytest.mark.gallery
def test_tied_stages_may_differ_in_it() -> None:
    """Stages that share a parameter may differ in sequence parallelism: ranks have the same parts of the
    parameter.
    """
    task, plan = along("tied"), plan_of([0, 3, 6], [(1, 2), (1, 2)], [1], "tied")
    trainer, plain = Trainer(task, plan), Plain(task, plan)
    for inputs, targets in batches(task, plan, 2):
        assert trainer.step((inputs, targets)) == pytest.approx(plain.step(inputs, targets), rel=1e-6)
    assert equal(trainer.state_dict(), dict(plain.module.state_dict()), relative=1e-9)


@pytest.mark.gallery
def test_workers_do_what_one_process_does() -> None:
    """Three workers over gloo, two with sequence parallelism, have the losses and peaks of one process."""
    plan = plan_of([0, 4, 6], [(1, 2), (1, 1)], [0])
    losses, trace = train(along, plan, steps=2)
    alone, expected = in_one_process(along(), plan, 2)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert trace.peak_bytes == alone.trace.peak_bytes == certify(along(), plan).peak_bytes


def test_what_has_no_positions_or_no_shards_is_refused() -> None:
    """Sequence parallelism without positions or shards is refused by name, with a fix."""
    with pytest.raises(UsageError, match="a stage of 1 shard holds all positions"):
        Grid(devices=(0, 1), data=2, sequences=True)
    with pytest.raises(UsageError, match=r"give their number \(tensor\), such as 2"):
        profile(along(), microbatch_size=2, sequences=True)
    with pytest.raises(UsageError, match=r"2 tensor-parallel ranks cannot shard dropped along positions"):
        profile(divided("dropped"), microbatch_size=2, tensor=2, sequences=True)
    without = replace(profiled(), measurements=tuple(m for m in profiled().measurements if not m.sequences))
    with pytest.raises(
        UsageError, match=r"for 2 ranks without sequence parallelism: .* --tensor 2 --sequences"
    ):
        replace(plan_of([0, 6], [(1, 2)], [0]), profile=without)
