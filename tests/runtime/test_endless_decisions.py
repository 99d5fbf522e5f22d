"""Memory decisions under asynchronous schedules: numbers are those of a replay, and bytes those predicted."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, combinations, pairwise
from math import isnan
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.errors import OutOfMemory, UsageError
from pipefit.lowering import ENDLESS, distinct_steps, step_programs, whole_run
from pipefit.lowering.asynchronous import period
from pipefit.memory.arenas import arenas_of, lent_bytes
from pipefit.runtime import Trainer, certify, train
from pipefit.runtime.dry_run.asynchronous import fewer
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Run, SavedTensors, State, What
from pipefit.schema.devices import Host, Member
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.simulator import Simulation, simulate
from support.allocator_events import measured_peaks
from support.asynchronous_decisions import mixed, moved
from support.asynchronous_replay import replayed
from support.asynchronous_training import MOMENTUM, SEED, TASKS, batches_of, differences, skipping, trained
from support.gallery_samples import sampled
from support.known_profiles import profile
from support.memory_samples import samples, step_peaks_of
from support.random_decisions import compacted
from support.random_offloads import make_chain, movable
from support.small_tasks import batch_of, plan_of, task_of


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread; several threads may sum in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def found(name: str) -> ModelProfile:
    """Return the model's profile."""
    return profile(TASKS[name](), microbatch_size=2, threads=1)


def random_plan(name: str, schedule: str, rng: Random) -> tuple[Task, Plan]:
    """Return a model in one to four stages, with random decisions."""
    task, layers = TASKS[name](), len(found(name).layers)
    free = range(3 if name == "tied" else 1, layers)  # layers that share a weight stay together
    stages = rng.randint(1, 4)
    cuts = [0, *sorted(rng.sample(free, stages - 1)), layers]
    split = [stop - start for start, stop in pairwise(cuts)]
    microbatches = rng.randint(stages if schedule == "pipedream-2bw" else 1, 6)
    plan = plan_of(
        task,
        split,
        microbatches=microbatches,
        schedule=schedule,
        profiled=found(name),
        devices=max(stages, 2),
    )
    plan = replace(
        plan, training=replace(plan.training, versions=rng.choice(["weights", "weights", "everything"]))
    )
    return task, compacted(plan, rng)


def assert_replayed(name: str, schedule: str, seed: int, patch: pytest.MonkeyPatch) -> None:
    """Check a random plan's numbers against the replay, with random drains and sometimes a smaller last
    batch.
    """
    rng = Random(f"{name} {schedule} {seed}")
    task, plan = random_plan(name, schedule, rng)
    count, turn, least = (
        plan.training.microbatches,
        period(plan),
        len(plan.stages) if "2bw" in schedule else 1,
    )
    smaller = [n for n in range(least, count + 1) if n % turn == 0]
    sizes = [2 * rng.choice([count, *smaller]) for _ in range(rng.randint(2, 7))]
    sizes[-1] = rng.randint(2 * least - 1, 2 * count)
    if name == "attention":  # over one sample it keeps other tensors, which are refused if they move
        sizes[-1] += sizes[-1] % 2
    drains = [step for step in range(len(sizes)) if rng.random() < 0.2 or step == len(sizes) - 1]
    given = batches_of(task, sizes)
    ours = trained(task, plan, given, drains, patch)
    assert differences(ours, replayed(task, plan, given, seed=SEED, drains=drains)) == []


def assert_foretold(name: str, schedule: str, seed: int) -> None:
    """Check a random plan's bytes against the dry run, folded or not, in every sample, and the simulator."""
    rng = Random(f"{name} {schedule} {seed}")
    task, plan = random_plan(name, schedule, rng)
    steps = distinct_steps(plan) + 1
    trainer = Trainer(task, plan)
    for step in range(steps):
        trainer.step(batch_of(task, plan, step))
    dry = certify(task, plan, steps=steps)
    assert samples(trainer.trace) == samples(dry) == samples(certify(task, plan, steps=steps, fold=False))
    told = step_peaks_of(simulate(plan, steps=steps))
    if name == "tied":  # the simulator's is an upper bound there, as under any schedule
        pairs = zip(step_peaks_of(dry), told, strict=True)
        assert all(
            real <= bound for reals, bounds in pairs for real, bound in zip(reals, bounds, strict=True)
        )
    else:
        assert step_peaks_of(dry) == told
    trainer.finish()
    assert not any(runner.mover.borrowed.in_use for runner in trainer.runners)
    assert trainer.trace.peak_bytes == dry.peak_bytes, "the end takes more than the steps before it"


EVERY = [(name, schedule) for name in TASKS for schedule in ENDLESS]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "schedule"), sampled(EVERY, often=(*EVERY[1::4], *EVERY[2::4]))
)  # each name once
def test_whatever_is_decided_numbers_and_bytes_are_as_told(
    name: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, gradients of every update, parameters and buffers are bitwise the replay's; all samples are
    predicted.
    """
    assert_foretold(name, schedule, 0)
    assert_replayed(name, schedule, 0, monkeypatch)


@pytest.mark.gallery
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("schedule", ENDLESS)
@pytest.mark.parametrize("name", TASKS)
def test_more_decisions_are_as_told(
    name: str, schedule: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many more random plans have exact numbers and bytes."""
    assert_foretold(name, schedule, seed)
    assert_replayed(name, schedule, seed, monkeypatch)


@pytest.mark.gallery
@pytest.mark.parametrize("schedule", sampled(ENDLESS, often=["pipedream"]))
def test_a_traced_model_learns_what_it_does_without_decisions(schedule: str) -> None:
    """A traced model with recomputed and offloaded blocks, optimizer state and PipeDream's older weights
    trains unchanged numbers.
    """
    task, rng = skipping(), Random(schedule)
    still = plan_of(task, [2, ..., 2], microbatches=4, schedule=schedule)
    plan = compacted(still, rng)
    assert {decision.what for decision in plan.decisions} >= {What.RECOMPUTE, What.OFFLOAD}
    one, other = (Trainer(task, each, seed=SEED) for each in (plan, still))
    steps = distinct_steps(plan)
    for step in range(steps):
        batch = batch_of(task, plan, step)
        first, second = one.step(batch), other.step(batch)
        assert first == second or isnan(first)
    assert samples(one.trace) == samples(certify(task, plan, steps=steps))
    assert one.finish() == other.finish()
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


# -------------------------------------------------------------------- one plan with everything


@pytest.mark.parametrize("schedule", sampled(ENDLESS, often=["pipedream-2bw"]))
def test_workers_do_what_one_process_does(schedule: str) -> None:
    """Workers, over shared memory and during computation, have the losses and memory samples of one process,
    also in the drain.
    """
    task, plan = make_chain(), mixed(schedule)
    trainer, steps = Trainer(task, plan), distinct_steps(plan)
    expected = [trainer.step(batch_of(task, plan, step)) for step in range(steps)]
    losses, trace = train(make_chain, plan, steps=steps)
    assert losses == [*expected[trainer.late :], *trainer.finish()]
    assert samples(trace) == samples(trainer.trace)


@pytest.mark.gallery
@pytest.mark.parametrize("schedule", ENDLESS)
def test_the_allocator_sees_what_leaves_and_comes_back(schedule: str) -> None:
    """The allocator's events have the dry run's peaks in every step, except for memory lent by a device."""
    task, plan = make_chain(), mixed(schedule)
    steps = distinct_steps(plan)
    dry, allocated = certify(task, plan, steps=steps), measured_peaks(task, plan, steps=steps)
    lent = [lent_bytes(arenas_of(plan, whole_run(plan)), Member.device(stage)) for stage in range(3)]
    assert lent[0] + lent[2] > 0 or schedule != "pipedream"
    for stage, peaks in enumerate(allocated):
        told = dry.devices[stage].step_peak_bytes
        assert peaks == [told(step) - lent[stage] for step in range(steps)]


def test_a_host_has_room_for_a_full_pipeline() -> None:
    """A host must have room for a full pipeline: a plan whose first step fits and later ones do not is
    refused before it runs, also by the simulator of a single step.
    """
    task, plan = make_chain(), mixed("pipedream", microbatches=2)
    lent = arenas_of(plan, whole_run(plan))
    needed = lent_bytes(lent, Member.host(0))
    assert needed > lent_bytes(arenas_of(plan, step_programs(plan)[0]), Member.host(0))
    assert Simulation(plan, steps=1).arenas == lent
    for less in (0, 1):
        tight = replace(plan, cluster=replace(plan.cluster, hosts=(Host(memory_bytes=needed - less),)))
        if less:
            with pytest.raises(OutOfMemory, match=r"host0 has .*, but would need"):
                Trainer(task, tight)
        else:
            trainer = Trainer(task, tight)
            for step in range(distinct_steps(plan) + 1):
                trainer.step(batch_of(task, plan, step))


def test_after_a_failed_step_everything_is_where_it_was() -> None:
    """After a failed step no slot is in use and no memory held; training continues as from these weights."""
    task, plan = make_chain(), mixed("pipedream")
    trainer = Trainer(task, plan)
    levels = [runner.meter.total for runner in trainer.runners if runner.meter]
    for step in range(2):
        trainer.step(batch_of(task, plan, step))
    trainer.finish()
    settled = [runner.meter.total for runner in trainer.runners if runner.meter]
    layer = trainer.runners[1].stages[1].layers[0].module
    forward, calls = layer.forward, Counter[str]()

    def failing(x: Tensor) -> Tensor:
        calls["forward"] += 1
        if calls["forward"] == 7:
            raise RuntimeError("it failed")
        return forward(x)

    layer.forward = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="it failed"):
        all(trainer.step(batch_of(task, plan, step)) for step in range(4))
    layer.forward = forward  # type: ignore[method-assign]
    gc.collect()
    assert [runner.meter.total for runner in trainer.runners if runner.meter] == settled > levels
    assert not any(runner.mover.borrowed.in_use for runner in trainer.runners)
    assert isnan(trainer.step(batch_of(task, plan, 5)))
    assert len(trainer.finish()) == 1


@pytest.mark.parametrize("schedule", ENDLESS)
def test_few_of_many_microbatches_stand_for_all(schedule: str) -> None:
    """A dry run of two or three steps of forty microbatches executes a few of them, under any decisions."""
    plan = mixed(schedule, microbatches=40)
    assert sum(program.microbatches for program in fewer(plan, step_programs(plan))) <= 12


def test_behind_a_smaller_batch_shares_begin_anew_after_the_end() -> None:
    """Three of four microbatches leave half a share: the next step is refused until the pipeline has drained."""
    task, plan = make_chain(), mixed("pipedream")
    trainer, (whole, smaller) = Trainer(task, plan), batches_of(task, [8, 6])
    trainer.step(whole)
    trainer.step(smaller)
    with pytest.raises(UsageError, match=r"shares of every 2 microbatches, .*Trainer.finish"):
        trainer.step(whole)
    assert len(trainer.finish()) == 1
    assert isnan(trainer.step(whole))


# -------------------------------------------------------------------- plans that fit only with decisions


def images() -> Task:
    """Return convolutions whose outputs are larger than their weights."""
    layers = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU()) for _ in range(3)]
    return Task(
        lambda: nn.Sequential(*chain(*layers), nn.Flatten(), nn.Linear(512, 3)),
        batch=lambda size: (torch.randn(size, 8, 8, 8), torch.randint(0, 3, (size,))),
        loss=F.cross_entropy,
        optimizer=MOMENTUM,
        name="images",
    )


def rows() -> list[nn.Module]:
    """Return layers whose weights are larger than their outputs."""
    blocks = [(nn.Linear(64, 64), nn.LayerNorm(64), nn.Sigmoid(), nn.Dropout(0.1)) for _ in range(3)]
    return [*chain(*blocks), nn.Linear(64, 4)]


LARGE: dict[str, Callable[[], Task]] = {
    "images": images,
    "rows": lambda: task_of(rows, inputs=64, optimizer=MOMENTUM),
}


HEAVY = [(name, schedule) for name in LARGE for schedule in ENDLESS]


@pytest.mark.gallery
@pytest.mark.parametrize(("name", "schedule"), sampled(HEAVY, often=HEAVY[::3]))
def test_what_fits_under_no_split_trains_with_decisions(name: str, schedule: str) -> None:
    """Every split over three devices exceeds their caps, under which one trains with offloaded tensors,
    recomputation, and all weight versions on the host.
    """
    task = LARGE[name]()
    found = profile(task, microbatch_size=8, threads=1)
    edges = [(0, *cuts, len(found.layers)) for cuts in combinations(range(1, len(found.layers)), 2)]
    splits = [
        plan_of(
            task,
            [b - a for a, b in pairwise(cuts)],
            size=8,
            microbatches=3,
            schedule=schedule,
            profiled=found,
        )
        for cuts in edges
    ]
    peaks = {plan.split: max(Simulation(plan).peak_bytes) for plan in splits}
    plan = next(
        lightened(plan) for plan in splits if plan.split == ((3, 3, 5) if name == "images" else (4, 4, 5))
    )
    cap = max(Simulation(plan).peak_bytes)
    assert all(peak > 1.05 * cap for peak in peaks.values())
    trainer = Trainer(task, replace(plan, cluster=Cluster.emulated((3, cap))))
    for step in range(distinct_steps(plan) + 1):
        trainer.step(batch_of(task, plan, step))
    trainer.finish()
    assert max(trainer.trace.peak_bytes) == cap


def lightened(plan: Plan) -> Plan:
    """Return a plan whose first stage offloads all saved tensors, whose other stages recompute, and whose
    weights go to the host: older versions of whole stages, and the newest of the first stage layer by layer.
    """
    decisions = [moved(0, SavedTensors(tensors=tuple(movable(plan, 0))), "host", behind=0)]
    for number, stage in enumerate(plan.stages[1:], start=1):
        run = Run(start=stage.start, stop=stage.stop)
        decisions.append(Decision(stage=number, subject=run, what=What.RECOMPUTE))
    for number, stage in enumerate(plan.stages[:-1]):
        weights = State(start=stage.start, stop=stage.stop, kind="versions")
        decisions.append(moved(number, weights, "host", behind=0))
    first = plan.stages[0]
    trained = [n for n in range(first.start, first.stop) if plan.measurement.costs[n].trained_bytes]
    newest = (State(start=layer, stop=layer + 1, kind="parameters") for layer in trained)
    decisions += [moved(0, state, "host", behind=0) for state in newest]
    return replace(plan, decisions=tuple(decisions))
