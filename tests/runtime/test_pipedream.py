"""Asynchronous schedules: numbers against a replay with stored old weights, bytes against the allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import isnan
from operator import ge
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.errors import OutOfMemory
from pipefit.lowering import ENDLESS, distinct_steps, step_programs
from pipefit.measure.cpu import Meter
from pipefit.measure.kernels import Kernels
from pipefit.profiler.training_runs.profilers import LoneStages
from pipefit.runtime import Trainer, certify, train
from pipefit.runtime.dry_run.asynchronous import fewer
from pipefit.runtime.options import StepReport
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Run, What
from pipefit.schema.plan import Plan
from pipefit.schema.trace import CATEGORIES, Category
from pipefit.schema.training import Versions
from pipefit.simulator import simulate
from support.allocator_events import measured_peaks
from support.asynchronous_replay import Numbers, replayed
from support.asynchronous_training import SEED, TASKS, Skipping, batches_of, differences, skipping, trained
from support.gallery_samples import sampled
from support.small_tasks import plan_of, task_of


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run on one thread, because sums over threads may be taken in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


CASES = {  # name: task, split, microbatches, samples of every batch, batches behind which the pipeline is drained
    "two stages": ("perceptrons", [3, 3], 3, [6] * 4, [3]),
    "one at a time": ("perceptrons", [2, 2, 2], 1, [2] * 8, [7]),
    "one stage": ("perceptrons", [6], 2, [4] * 2, [1]),
    "smaller batches": ("perceptrons", [1, 2, 3], 4, [8, 3, 8, 6, 8], [4]),
    "drained between": ("convolutions", [3, 2, 4], 3, [6] * 6, [0, 3, 5]),
    "four stages": ("convolutions", [2, 3, 2, 2], 5, [10] * 3, [2]),
    "tied in a stage": ("tied", [4, 1, 1], 3, [6] * 4, [3]),
}


RECOMPUTED = ("never", "always", "runs")
EVERY = [(name, schedule, how) for name in CASES for schedule in ENDLESS for how in RECOMPUTED]
OFTEN = [(n, s, RECOMPUTED[(i + j) % 3]) for i, n in enumerate(CASES) for j, s in enumerate(ENDLESS)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "schedule", "recompute"), sampled(EVERY, often=OFTEN))
def test_numbers_are_those_of_a_replay_with_old_weights(
    name: str, schedule: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every loss, gradient, parameter and buffer equals a replay with old weights bit by bit.

    Cases: dropout, batch norm, in-place layers, LSTMs, tied and frozen weights, batches of any size, and
    drains at any step.
    """
    which, split, microbatches, sizes, drains = CASES[name]
    if schedule == "pipedream-2bw":
        microbatches = max(microbatches, len(split))
        sizes = [2 * microbatches + (size % 2) * (1 - 2) for size in sizes]
    task = TASKS[which]()
    plan = plan_of(task, split, microbatches=microbatches, schedule=schedule)
    plan = replace(plan, decisions=decisions(plan, recompute))
    if name == "four stages":
        plan = replace(plan, training=replace(plan.training, versions="everything"))
    given = batches_of(task, sizes)
    ours = trained(task, plan, given, drains, monkeypatch)
    assert differences(ours, replayed(task, plan, given, seed=SEED, drains=drains)) == []


def decisions(plan: Plan, recompute: str) -> tuple[Decision, ...]:
    """Return memory decisions: none, all stages, or early offload of the last layers of long stages."""
    if recompute == "never":
        return ()
    return tuple(
        Decision(
            stage=number,
            subject=Run(start=stage.start if recompute == "always" else stage.stop - 1, stop=stage.stop),
            what=What.RECOMPUTE,
            ahead=int(recompute == "runs"),
        )
        for number, stage in enumerate(plan.stages)
        if not plan.measurement.shared or recompute == "always"
    )


@pytest.mark.parametrize("schedule", sampled(ENDLESS, often=["pipedream-2bw"]))
def test_traced_models_are_trained_alike(schedule: str) -> None:
    """A traced model learns the numbers of the module, called with old weights by name; it is traced again
    for smaller last microbatches.
    """
    task = skipping()
    plan = plan_of(task, [1, ..., 1], microbatches=3, schedule=schedule)
    given = batches_of(task, [6, 5, 6, 5])
    trainer = Trainer(task, plan, seed=SEED)
    told = [trainer.step(batch) for batch in given][trainer.late :] + trainer.finish()
    stage_of = {
        layer.originals[name]: number
        for number, stage in enumerate(trainer.stages)
        for layer in stage.layers
        for name, _ in layer.module.named_parameters()
    }
    torch.manual_seed(SEED)
    module = Skipping()
    plain = by_name(task, module, plan, given, stage_of)
    assert told == pytest.approx(plain, rel=1e-6)
    ours = trainer.state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in module.state_dict().items())


def by_name(
    task: Task, module: nn.Module, plan: Plan, batches: Sequence[tuple[Any, Any]], stage_of: dict[str, int]
) -> list[float]:
    """Return mean losses of a module called with delayed weights; the delay depends on the stage."""
    alone, last = plan.training.schedule == "pipedream", len(plan.stages) - 1
    late = {name: last - stage if alone else 1 for name, stage in stage_of.items()}
    own, optimizer = dict(module.named_parameters()), task.optimizer(module.parameters())
    history = [{name: p.detach().clone() for name, p in own.items()}]
    losses = []
    for x, y in batches:
        parts = list(zip(x.split(2), y.split(2), strict=True))
        total = 0.0
        for number, (some, wanted) in enumerate(parts):
            done = len(history) - 1
            used = {name: history[max(0, done - late[name])][name].clone().requires_grad_() for name in own}
            loss = task.loss(torch.func.functional_call(module, used, (some,)), wanted)
            loss.backward(torch.full((), 1.0 if alone else len(wanted) / len(y)))
            total += loss.item() * len(wanted) / len(y)
            for name, p in own.items():
                p.grad = used[name].grad if p.grad is None else p.grad + used[name].grad
            if alone or number + 1 == len(parts):
                optimizer.step()
                optimizer.zero_grad()
                history.append({name: p.detach().clone() for name, p in own.items()})
        losses.append(total)
    return losses


# -------------------------------------------------------------------- bytes


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ENDLESS)
@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        *(("one at a time", "never"), ("one stage", "never"), ("tied in a stage", "never")),
        *(("two stages", "runs"), ("drained between", "always")),
    ],
)
def test_peaks_of_every_step_are_the_allocators(name: str, schedule: str, recompute: str) -> None:
    """Simulation, dry run and meter peak exactly as the allocator in the first step, while the pipeline
    fills, while versions diverge, and in a full pipeline.

    For a weight shared by two layers of a stage, the simulator gives an upper bound, as under any schedule.
    """
    which, split, microbatches, _, _ = CASES[name]
    microbatches = max(microbatches, len(split)) if schedule == "pipedream-2bw" else microbatches
    task = TASKS[which]()
    plan = plan_of(task, split, microbatches=microbatches, schedule=schedule)
    plan = replace(plan, decisions=decisions(plan, recompute))
    if name == "two stages":
        plan = replace(plan, training=replace(plan.training, versions="everything"))
    steps = distinct_steps(plan) + 1
    trainer = Trainer(task, plan)
    for step in range(steps):
        torch.manual_seed(step)
        trainer.step(task.batch(plan.training.batch_size))
    traces = [simulate(plan, steps=steps), certify(task, plan, steps=steps), trainer.trace]
    measured = measured_peaks(task, plan, steps=steps)
    for rank, stage in enumerate(plan.stages):
        for trace in traces:
            told = [trace.devices[stage.device].step_peak_bytes(step) for step in range(steps)]
            if trace.source == "simulated" and which == "tied" and rank == 0:
                assert all(map(ge, told, measured[rank]))
            else:
                assert told == measured[rank], (trace.source, rank)


@pytest.mark.parametrize(("versions", "times"), [("weights", 1), ("everything", 4)])
def test_versions_have_a_category_of_their_own(versions: Versions, times: int) -> None:
    """Meter, dry run and simulation count old weights as weight versions.

    With versions of everything, these include gradients and AdamW's two moments and step counters.
    """
    task = TASKS["perceptrons"]()
    plan = plan_of(task, [2, 2, 2], microbatches=3, schedule="pipedream")
    plan = replace(plan, training=replace(plan.training, versions=versions))
    trainer, steps = Trainer(task, plan), distinct_steps(plan)
    for step in range(steps):
        torch.manual_seed(step)
        trainer.step(task.batch(plan.training.batch_size))
    trained = [[p for p in stage.parameters if p.requires_grad] for stage in trainer.stages]
    counts = 4 * (times > 1)  # bytes
    weights = [sum(times * p.nbytes + counts for p in own) for own in trained]
    for trace in (simulate(plan), certify(task, plan), trainer.trace):
        most = [
            max(sample.by_category.get(Category.VERSIONS, 0) for sample in device.memory)
            for device in trace.devices
        ]
        assert most == [2 * weights[0], weights[1], 0], trace.source


@pytest.mark.parametrize("schedule", ENDLESS)
def test_a_stage_that_is_trained_alone_peaks_as_in_its_pipeline(schedule: str) -> None:
    """A stage trained alone, with neighbours that send zeros, peaks as in its pipeline in every distinct
    step.
    """
    task = TASKS["perceptrons"]()
    plan = plan_of(task, [2, 2, 2], microbatches=3, schedule=schedule)
    lone = LoneStages(task, 2)
    kernels = Kernels(torch.get_num_threads())
    for stage, peak in enumerate(simulate(plan).peak_bytes):
        meter = Meter(stage, kernels=kernels)
        assert lone.train(plan, stage, device=torch.device("cpu"), meter=meter) == peak


# -------------------------------------------------------------------- a step, its loss, and the end


def means(plan: Plan, numbers: Numbers) -> list[float]:
    """Return the mean loss of every step of a full batch of microbatches."""
    count = plan.training.microbatches
    return [sum(numbers.losses[k : k + count]) / count for k in range(0, len(numbers.losses), count)]


@pytest.mark.parametrize(("split", "microbatches", "late"), [([6], 2, 0), ([3, 3], 2, 1), ([2, 2, 2], 1, 2)])
def test_a_step_returns_the_loss_of_an_earlier_batch(split: list[int], microbatches: int, late: int) -> None:
    """`step` returns the loss of an earlier batch: it lags by the distance between first and last stage and
    is nan before; `finish` returns the remaining losses once.
    """
    task = TASKS["perceptrons"]()
    plan = plan_of(task, split, microbatches=microbatches, schedule="pipedream")
    given, reports = batches_of(task, [2 * microbatches] * 5), list[StepReport]()
    trainer = Trainer(task, plan, seed=SEED, callbacks=[reports.append])
    told = [trainer.step(batch) for batch in given]
    assert (trainer.late, [isnan(loss) for loss in told]) == (late, [step < late for step in range(5)])
    losses = [*told[late:], *trainer.finish()]
    assert losses == pytest.approx(means(plan, replayed(task, plan, given, seed=SEED, drains=[4])), rel=1e-6)
    assert [(report.step, report.loss) for report in reports] == list(enumerate(losses))
    assert trainer.finish() == []
    assert all(max(report.peak_bytes.values()) > 0 for report in reports)


def test_ending_again_keeps_nothing_more() -> None:
    """Repeated interrupts of training keep no additional programs."""
    task = TASKS["perceptrons"]()
    trainer = Trainer(task, plan_of(task, [3, 3], microbatches=2, schedule="pipedream"))
    known = []
    for _ in range(3):
        trainer.step(task.batch(4))
        trainer.step(task.batch(4))
        trainer.finish()
        known.append(len(trainer.runners[0]._instructions_of))
    assert known == [3, 3, 3]


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ENDLESS)
def test_looking_at_the_model_ends_what_is_in_flight(schedule: str) -> None:
    """`state_dict`, `state` and `evaluate` drain the pipeline, so that they see a model trained on all
    batches; no loss is dropped.
    """
    task = TASKS["perceptrons"]()
    plan = plan_of(task, [2, 2, 2], microbatches=3, schedule=schedule)
    given = batches_of(task, [6] * 3)
    plain = replayed(task, plan, given, seed=SEED, drains=[2])
    looks: list[Callable[[Trainer], object]] = [
        Trainer.state_dict,
        lambda t: t.state,
        lambda t: t.evaluate(given[0]),
    ]
    for look in looks:
        trainer = Trainer(task, plan, seed=SEED)
        told = [trainer.step(batch) for batch in given]
        look(trainer)
        for stage in trainer.stages:
            for layer in stage.layers:
                for local, tensor in layer.module.state_dict().items():
                    assert torch.equal(tensor, plain.state[layer.originals[local]])
        assert [*told[trainer.late :], *trainer.finish()] == pytest.approx(means(plan, plain), rel=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "inside", [torch.no_grad, torch.inference_mode, partial(torch.autocast, "cpu", dtype=torch.bfloat16)]
)
def test_what_is_in_flight_is_trained_whatever_the_caller_is_in(inside: Callable[[], Any]) -> None:
    """In-flight microbatches are trained with the same numbers in a caller's no-grad, inference or autocast
    mode, recomputed layers included.
    """
    task = TASKS["perceptrons"]()
    plan = plan_of(task, [2, 2, 2], microbatches=3, schedule="pipedream", recompute="always")
    given = batches_of(task, [6] * 3)
    plain = replayed(task, plan, given, seed=SEED, drains=[2])
    trainer = Trainer(task, plan, seed=SEED)
    for batch in given:
        trainer.step(batch)
    with inside():
        trainer.finish()
    ours = trainer.state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in plain.state.items())


def test_worker_processes_compute_the_same() -> None:
    """Three worker processes return the same losses and hold the same bytes as one process."""
    task = workers_task()
    plan = plan_of(task, [2, 2, 2], microbatches=2, schedule="pipedream")
    trainer = Trainer(task, plan, seed=SEED)
    here = []
    for step in range(4):
        torch.manual_seed(SEED + step)
        here.append(trainer.step(task.batch(plan.training.batch_size)))
    heard: list[tuple[int, float]] = []
    losses, trace = train(
        workers_task, plan, steps=4, seed=SEED, on_step=lambda told: heard.append((told.step, told.loss))
    )
    assert losses == [*here[trainer.late :], *trainer.finish()]
    assert heard == list(enumerate(losses))
    assert trace.peak_bytes == trainer.trace.peak_bytes


def workers_task() -> Task:
    """Return a task that workers can build."""
    return TASKS["perceptrons"]()


def test_a_failed_step_leaves_nothing_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a batch that a layer refuses in mid-pipeline, training continues from an empty pipeline."""
    task = task_of(lambda: [nn.Linear(8, 8), Moody(), nn.Linear(8, 4)])
    plan = plan_of(task, [1, 1, 1], microbatches=2, schedule="pipedream")
    trainer = Trainer(task, plan)
    (batch,) = batches_of(task, [4])
    for _ in range(3):
        trainer.step(batch)
    monkeypatch.setattr(Moody, "willing", False)
    with pytest.raises(RuntimeError, match="not in the mood"):
        trainer.step(batch)
    monkeypatch.setattr(Moody, "willing", True)
    assert isnan(trainer.step(batch))
    assert len(trainer.finish()) == 1
    assert all(
        isinstance(p, nn.Parameter) for stage in trainer.stages for p in stage.layers[0].module.parameters()
    )
    assert all(runner.meter.bytes[4] == 0 for runner in trainer.runners)  # weight versions


class Moody(nn.Module):
    """A module that raises."""

    willing = True

    def forward(self, x: Tensor) -> Tensor:
        if not Moody.willing:
            raise RuntimeError("not in the mood")
        return torch.tanh(x)


def test_versions_count_against_a_device() -> None:
    """A device with room for one copy of the weights runs out of memory with the versions of three
    microbatches.
    """
    task = task_of(lambda: [nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)], inputs=64)
    plan = plan_of(task, [1, 1, 1], microbatches=2, schedule="pipedream")
    peak = simulate(plan).peak_bytes[0]
    assert peak > simulate(replace(plan, training=replace(plan.training, schedule="1f1b"))).peak_bytes[0]
    tight = replace(plan, cluster=Cluster.emulated((1, peak - 1), (2, 1 << 30)))
    trainer = Trainer(task, tight)
    *first, last = batches_of(task, [4] * distinct_steps(plan))
    for batch in first:
        trainer.step(batch)
    with pytest.raises(OutOfMemory, match=r"held by weight versions 32\.50 KiB"):
        trainer.step(last)


# -------------------------------------------------------------------- folding


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ENDLESS)
@pytest.mark.parametrize(
    ("split", "microbatches", "recompute"),
    [([2, 2, 2], 9, "never"), ([3, 3], 6, "runs")],
)
def test_a_folded_dry_run_is_a_whole_one(
    schedule: str, split: list[int], microbatches: int, recompute: str
) -> None:
    """A folded dry run equals a whole one in every sample of every step, with any recomputation."""
    task = TASKS["perceptrons"]()
    plan = plan_of(task, split, microbatches=microbatches, schedule=schedule)
    plan = replace(plan, decisions=decisions(plan, recompute))
    assert certify(task, plan) == certify(task, plan, fold=False)


def test_a_dry_run_executes_few_of_many_microbatches() -> None:
    """A dry run executes few of many microbatches: a step of forty has the labels of a few, and small
    schedules run in full.
    """
    task = TASKS["perceptrons"]()
    for schedule in ENDLESS:
        plan = plan_of(task, [2, 2, 2], microbatches=40, schedule=schedule)
        executed = fewer(plan, step_programs(plan))
        assert sum(program.microbatches for program in executed) <= 15


class Follows(nn.Module):
    """A layer without parameters that subtracts a running mean, which it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean + 0.1 * (x.detach().mean(0) - self.mean)
        return x - self.mean


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", ["1f1b", *ENDLESS])
def test_a_buffer_that_a_forward_replaces_is_a_buffer(schedule: str) -> None:
    """A buffer that a forward replaces counts as a buffer after every forward, and a folded dry run equals a
    whole one.
    """
    task = task_of(lambda: [nn.Linear(8, 4), *(Follows() for _ in range(3))])
    plan = plan_of(task, [1, 3], microbatches=4, schedule=schedule)
    folded, trainer = certify(task, plan, steps=3), Trainer(task, plan)
    assert folded == certify(task, plan, steps=3, fold=False)
    trainer.step(task.batch(plan.training.batch_size))
    held = CATEGORIES.index(Category.PARAMETERS)
    for trace in (folded, trainer.trace):
        behind = (sample for sample in trace.devices[1].memory if "1B" in sample.action)
        assert {sample.bytes[held] for sample in behind} == {3 * 4 * 4}
