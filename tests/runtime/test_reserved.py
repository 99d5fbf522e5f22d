"""What a GPU allocates and reserves, as a dry run tells it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode

from moving_plans import moving
from pipefit.allocator import AllocatorSettings
from pipefit.capture import Task
from pipefit.cluster import Cluster
from pipefit.cost.communicators import communicators
from pipefit.devices import Overheads
from pipefit.errors import UsageError
from pipefit.fake.target import FakeTarget
from pipefit.plans import Plan
from pipefit.profiler import profile
from pipefit.profiles import ModelProfile
from pipefit.program import Program
from pipefit.runtime import certify, dry_run, transport
from pipefit.runtime.folding import Folding
from pipefit.runtime.lives import LivesMeter
from pipefit.runtime.reserved import LivesOf, allocator_peaks
from pipefit.schedule import lower
from pipefit.trace import AllocatorPeaks, Trace
from pipefit.zoo import build
from plain_allocator import Pages, Plain
from random_cases import random_plan
from tiny import plan_of, task_of

MIB = 1 << 20
DEFAULT, EXPANDABLE = AllocatorSettings(), AllocatorSettings(expandable=True)


def wide() -> Task:
    """Tensors of both pools, some kept for the backward, dropout, and an optimizer with state on the device alone."""
    return task_of(
        lambda: (
            nn.Linear(600, 700), nn.Tanh(), nn.Dropout(0.3), nn.Linear(700, 900), nn.GELU(), nn.Linear(900, 40)
        ),
        inputs=600,
        outputs=40,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    )  # fmt: skip


def on_gpus(plan: Plan) -> Plan:
    """The same plan for GPUs of as much memory."""
    return replace(plan, cluster=replace(plan.cluster, backend="cuda"))


@pytest.fixture(scope="module")
def found() -> ModelProfile:
    """What the layers of `wide` cost on a GPU."""
    return profile(wide(), microbatch_size=700, target="cuda")


def peaks(trace: Trace) -> list[AllocatorPeaks | None]:
    return [device.allocator for device in trace.devices]


# ---------------------------------------------------------------- the lives of storages


def step_of(parameters: list[Tensor], data: Tensor) -> None:
    """A step of plain training whose kernels take nothing for themselves."""
    for parameter in parameters:
        parameter.grad = None
    hidden = torch.tanh(data * parameters[0])
    other = hidden.exp() + parameters[1]
    del hidden
    (torch.relu(other) * parameters[0]).sum().backward()
    with torch.no_grad():
        for parameter in parameters:
            parameter.sub_(parameter.grad * data[:1])


def test_births_and_deaths_are_those_of_the_allocator() -> None:
    """On the CPU, where its events are seen: the same sizes in the same order, forward, backward and update."""
    parameters = [torch.randn(1, 300, requires_grad=True), torch.randn(50, 300, requires_grad=True)]
    data = torch.randn(50, 300)
    meter = LivesMeter(0, kernels=None, swept={}, place=torch.device("cpu"), workspace_bytes=0)
    gc.collect()
    meter.begin("before")
    with meter:
        step_of(parameters, data)  # what is made once is made
    meter.end(0, 0.0)
    meter.changes()
    meter.take()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as observed:
        meter.begin("step")
        with meter:
            step_of(parameters, data)
        meter.end(0, 0.0)
    meter.changes()
    _, (lives,) = meter.take()
    sizes: dict[int, int] = {}
    seen = []
    for name, nbytes in lives:
        sizes.setdefault(name, nbytes)
        seen.append(nbytes or -sizes[name])
    events = observed.profiler.kineto_results.events()
    memory = sorted(((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda event: event[0])
    told = [nbytes for _, nbytes in memory]
    assert [nbytes for nbytes in seen if nbytes] == [nbytes for nbytes in told if nbytes in seen]
    assert len(seen) > 20


@contextmanager
def captured() -> Iterator[list[Any]]:
    """The events of every device of the dry run inside, in its order."""
    seen: list[Any] = []
    original = dry_run.allocator_peaks

    def capturing(*args: Any) -> AllocatorPeaks:
        seen.append(args[3])
        return original(*args)

    with mock.patch.object(dry_run, "allocator_peaks", capturing):
        yield seen


def highest(events: Any) -> int:
    """The highest sum of what lives."""
    level, most, living = 0, 0, {}
    for name, nbytes in events:
        level += nbytes or -living.pop(name)
        most = max(most, level)
        if nbytes:
            living[name] = nbytes
    return most


@pytest.mark.parametrize("seed", range(3))
def test_what_lives_is_what_the_meter_counts(found: ModelProfile, seed: int) -> None:
    """The highest sum of living storages is the certified peak, to the byte, on every device."""
    plan = random_plan(found, Random(seed))
    with captured() as events:
        trace = certify(wide(), plan, allocator=DEFAULT)
    used = [device for device in trace.devices if device.allocator]
    assert len(used) == len(plan.ranks) == len(events)
    for device, own in zip(used, events, strict=True):
        assert highest(own) == device.peak_bytes == device.allocator.requested_bytes


def test_what_is_on_the_host_has_no_block() -> None:
    """Adam counts its steps there: what lives on the device is less than the meter counts by 4 bytes a parameter."""
    task = task_of(lambda: [nn.Linear(600, 600) for _ in range(3)], inputs=600, outputs=600, optimizer=torch.optim.Adam)
    plan = plan_of(task, [3], size=8, microbatches=1, profiled=profile(task, microbatch_size=8, target="cuda"))
    with captured() as events:
        trace = certify(task, plan, allocator=DEFAULT)
    assert trace.peak_bytes[0] - highest(events[0]) == 6 * 4


# ---------------------------------------------------------------- folding


@pytest.mark.parametrize("seed", range(6))
def test_folded_microbatches_reserve_what_all_do(found: ModelProfile, seed: int) -> None:
    """Any split, schedule and recomputation: all three numbers of three steps are equal, and nothing is run twice."""
    plan = on_gpus(random_plan(found, Random(seed), microbatches=5))
    with mock.patch.object(dry_run._DryRun, "_whole") as again:
        folded = certify(wide(), plan, steps=3, allocator=DEFAULT)
    assert not again.called
    assert folded == certify(wide(), plan, steps=3, allocator=DEFAULT, fold=False)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_moved_away_loses_its_block(found: ModelProfile, seed: int) -> None:
    """With random moves of saved tensors, folded microbatches reserve what all do, and the meter's peak is met: what a
    device lends to others is a tensor there, from the first to the last.
    """
    plan = moving(random_plan(found, Random(seed), microbatches=5), Random(seed))
    with captured() as events:
        folded = certify(wide(), plan, steps=3, allocator=DEFAULT)
    assert folded == certify(wide(), plan, steps=3, allocator=DEFAULT, fold=False)
    used = [device for device in folded.devices if device.allocator]
    for device, own in zip(used, events, strict=True):
        assert highest(own) == device.peak_bytes


def test_of_equal_layers_all_are_run() -> None:
    """A stack that dry runs fold to four layers reserves what all of its layers do."""
    task = task_of(lambda: [nn.Linear(640, 640) for _ in range(9)], inputs=640, outputs=640, optimizer=torch.optim.Adam)
    plan = plan_of(task, [9], size=600, profiled=profile(task, microbatch_size=600, target="cuda"))
    one = certify(task, plan, allocator=DEFAULT)
    assert one == certify(task, plan, allocator=DEFAULT, fold=False)
    assert one.peak_bytes == certify(task, plan).peak_bytes


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_endless_schedules_reserve_too(found: ModelProfile, schedule: str) -> None:
    """Under them all microbatches are run; requested bytes are those of a dry run that folds them."""
    plan = plan_of(wide(), [2, 4], size=700, microbatches=4, schedule=schedule, profiled=found)
    trace = certify(wide(), plan, allocator=DEFAULT)
    assert trace.peak_bytes == certify(wide(), plan).peak_bytes
    assert all(device.allocator.reserved_bytes >= device.peak_bytes for device in trace.devices)


def program_of(found: ModelProfile) -> Program:
    """Three microbatches, of which the second stands for the third."""
    return lower(plan_of(wide(), [6], size=700, microbatches=3, schedule="gpipe", profiled=found))


def seen_in(program: Program, lives: dict[str, tuple[tuple[int, int], ...]]) -> Any:
    """Lives in the actions that are run, by the actions' texts."""
    ran = Folding.of(program).first
    actions = [a for a in program.actions[0] if a.microbatch is None or a.microbatch in ran]
    return (), [lives.get(str(action), ()) for action in actions]


def test_lives_are_repeated_under_other_names(found: ModelProfile) -> None:
    """What microbatch 1 allocates and frees microbatch 2 does too, and what lasts till the update dies there twice."""
    program = program_of(found)
    assert Folding.of(program).like[0, 2] == 1
    lives = LivesOf(Folding.of(program))
    in_run = {"0F1": ((1, 100), (2, 7)), "0B1": ((1, 0),), "0STEP": ((2, 0),)}
    lives.step(0, program.actions[0], seen_in(program, in_run))
    assert lives.consistent
    assert lives.events == [
        (1, 100), (2, 7), ((1, 0, 2), 100), ((2, 0, 2), 7), (1, 0), ((1, 0, 2), 0), (2, 0), ((2, 0, 2), 0)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "in_run",
    [
        {"0F0": ((1, 100),), "0B1": ((1, 0),)},  # what microbatch 0 left dies twice
        {"0F1": ((1, 100),)},  # what microbatch 1 leaves stays twice
    ],
)
def test_a_repetition_that_cannot_be_is_noticed(found: ModelProfile, in_run: Any) -> None:
    """Where a microbatch frees what is another's, or leaves something behind, it cannot stand for others."""
    program = program_of(found)
    lives = LivesOf(Folding.of(program))
    lives.step(0, program.actions[0], seen_in(program, in_run))
    assert not lives.consistent


def test_microbatches_that_differ_are_all_run(found: ModelProfile) -> None:
    """A dry run whose repetitions turn out to be wrong is made again with every microbatch."""
    plan = plan_of(wide(), [6], size=700, microbatches=3, profiled=found)
    whole, original = dry_run._DryRun._whole, LivesOf.step

    def doubtful(self: LivesOf, *args: Any) -> None:
        original(self, *args)
        self.consistent &= not any(isinstance(name, tuple) for name, _ in self.events)

    with (
        mock.patch.object(LivesOf, "step", doubtful),
        mock.patch.object(dry_run._DryRun, "_whole", autospec=True) as run,
    ):
        run.side_effect = whole
        trace = certify(wide(), plan, allocator=DEFAULT)
    assert run.call_count == 1
    assert trace == certify(wide(), plan, allocator=DEFAULT, fold=False)


# ---------------------------------------------------------------- beside plain training


class Watched(TorchDispatchMode):
    """Allocates and frees in an allocator what operations make and drop."""

    def __init__(self, allocator: Plain | Pages) -> None:
        super().__init__()
        self.allocator, self.known, self.count = allocator, {}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in [out] if isinstance(out, Tensor) else out if isinstance(out, (tuple, list)) else []:
            if isinstance(tensor, Tensor) and tensor.device.type != "cpu":
                self.see(tensor.untyped_storage())
        return out

    def see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.known and storage.nbytes():
            self.known[key] = self.count, weakref.ref(storage, partial(self.died, key))
            self.allocator.allocate(self.count, storage.nbytes(), 0)
            self.count += 1

    def died(self, key: int, _: object) -> None:
        self.allocator.free(self.known.pop(key)[0])


def trained_plainly(task: Task, size: int, allocator: Plain | Pages) -> None:
    """Two steps of a plain loop over fake tensors of a GPU."""
    with FakeTarget("cuda") as fake:
        model = task.build().to(fake.device)
        optimizer = task.optimizer(
            [{"params": list(layer.parameters())} for layer in model if list(layer.parameters())]
        )
        watched = Watched(allocator)
        for parameter in model.parameters():
            watched.see(parameter.untyped_storage())
        batch = [fake.fake(tensor) for tensor in task.batch(size)]
        for _ in range(2):
            with watched:
                inputs, targets = (tensor.to(fake.device, copy=True) for tensor in batch)
                loss = task.loss(model(inputs), targets)
                del inputs, targets
                loss.backward()
                del loss
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("settings", [DEFAULT, EXPANDABLE])
def test_one_device_reserves_what_plain_training_does(found: ModelProfile, settings: AllocatorSettings) -> None:
    """A plain loop's storages in a plain allocator: reserved bytes are equal, allocated ones but for the loss."""
    plan = plan_of(wide(), [6], size=700, microbatches=1, profiled=found)
    (certified,) = peaks(certify(wide(), plan, allocator=settings))
    model = Pages() if settings.expandable else Plain()
    trained_plainly(wide(), 700, model)
    assert certified is not None
    assert certified.reserved_bytes == model.peak


# ---------------------------------------------------------------- what is told


def test_without_settings_no_allocator_is_told(found: ModelProfile) -> None:
    """The figures are there only where they are asked for, and asked for only where there is such an allocator."""
    plan = plan_of(wide(), [6], size=700, profiled=found)
    assert peaks(certify(wide(), plan)) == [None]
    with pytest.raises(UsageError, match="target cpu has no caching allocator"):
        certify(wide(), plan, target="cpu", allocator=DEFAULT)


def test_workspaces_are_among_allocated_bytes(found: ModelProfile) -> None:
    """One for each of the two threads that multiply matrices; emulated devices have none, nor context."""
    plan = plan_of(wide(), [6], size=700, profiled=found)
    (plain,) = peaks(certify(wide(), plan, allocator=EXPANDABLE))
    (gpu,) = peaks(certify(wide(), on_gpus(plan), allocator=EXPANDABLE))
    assert plain is not None
    assert gpu is not None
    assert (plain.workspaces, plain.outside_bytes, plain.process_bytes) == (0, 0, plain.reserved_bytes)
    assert (gpu.workspaces, gpu.workspace_bytes, gpu.communicators) == (2, 8_519_680, 0)
    assert gpu.allocated_bytes == plain.allocated_bytes + 2 * gpu.workspace_bytes
    assert gpu.requested_bytes == plain.requested_bytes
    assert gpu.process_bytes == gpu.reserved_bytes + 512 * MIB


def test_a_model_without_products_has_no_workspace() -> None:
    """Convolutions and sums do not make torch allocate one."""
    task = task_of(lambda: (nn.Tanh(), nn.LayerNorm(8), nn.Tanh()), outputs=8)
    plan = plan_of(task, [3], profiled=profile(task, microbatch_size=2, target="cuda"))
    (found,) = peaks(certify(task, on_gpus(plan), allocator=DEFAULT))
    assert found is not None
    assert found.workspaces == 0


def with_memory(plan: Plan, nbytes: int) -> Plan:
    """The plan on devices of so many bytes, of which nobody else takes any."""
    device = plan.cluster.devices[0]
    kind = replace(device.kind, overheads=Overheads(context_bytes=0, communicator_bytes=0, cublas_workspace_bytes=0))
    devices = tuple(replace(device, kind=kind, memory_bytes=nbytes) for _ in plan.cluster.devices)
    return replace(plan, cluster=replace(plan.cluster, backend="cuda", devices=devices))


def test_a_device_of_less_memory_empties_its_cache_or_runs_out(found: ModelProfile) -> None:
    """30 MiB that were freed are given back for 40 more in a device of 50; in one of 39 the memory runs out, and the
    figures are those of a device with enough.
    """
    plan = plan_of(wide(), [6], size=700, profiled=found)
    events = [(1, 30 * MIB), (1, 0), (2, 40 * MIB), (2, 0)]

    def told(nbytes: int) -> tuple[int, int, bool]:
        held = with_memory(plan, nbytes)
        one = allocator_peaks(held, lower(held), 0, events, DEFAULT, 40 * MIB)
        return one.reserved_bytes // MIB, one.retries, one.fits

    assert told(70 * MIB) == (70, 0, True)
    assert told(50 * MIB) == (40, 1, True)
    assert told(39 * MIB) == (70, 0, False)


def test_what_a_process_takes_besides_is_not_there(found: ModelProfile) -> None:
    """A context and a communicator for each end of a channel leave so much less for tensors."""
    plan = with_memory(plan_of(wide(), [3, 3], size=700, profiled=found), 100 * MIB)
    kind = replace(
        plan.cluster.devices[0].kind,
        overheads=Overheads(context_bytes=10 * MIB, communicator_bytes=MIB, cublas_workspace_bytes=0),
    )
    devices = tuple(replace(device, kind=kind) for device in plan.cluster.devices)
    plan = replace(plan, cluster=replace(plan.cluster, devices=devices))
    for size, fits in ((86 * MIB, True), (88 * MIB, False)):
        one = allocator_peaks(plan, lower(plan), 0, [(1, size)], DEFAULT, size)
        assert (one.outside_bytes, one.process_bytes, one.fits) == (13 * MIB, 13 * MIB + size, fits)


# ---------------------------------------------------------------- communicators


def made(plan: Plan, device: int) -> int:
    """The groups of `torch.distributed` that the worker of a device makes and is in, and the one of all workers."""
    groups: list[list[int]] = []
    rank = [plan.stages[stages[0]].device for stages in plan.ranks].index(device)
    with (
        mock.patch.object(transport.dist, "new_group", lambda members, **_: groups.append(members)),
        mock.patch.object(transport.dist, "get_rank", return_value=rank),
        mock.patch.object(transport.Network, "warm_up"),
    ):
        transport.connect(plan, lower(plan), torch.device("cpu"), timedelta(seconds=1))
    return sum(rank in members for members in groups) + 1


@pytest.mark.parametrize("split", [(2, 2, 2), (3, 3), (1, 4, 1), (1, 1, 1, 3)])
def test_communicators_are_those_that_a_worker_makes(found: ModelProfile, split: tuple[int, ...]) -> None:
    """Two for each neighbour and one for all; ends have one neighbour."""
    plan = plan_of(wide(), split, size=700, microbatches=2, profiled=found)
    counted = [communicators(plan, lower(plan), device) for device in range(len(split))]
    assert counted == [made(plan, device) for device in range(len(split))]
    assert counted == [2 * (device > 0) + 2 * (device + 1 < len(split)) + 1 for device in range(len(split))]


def test_a_norm_of_all_gradients_takes_one_more(found: ModelProfile) -> None:
    """Stages that agree before an update add up over a communicator of their own."""
    plan = plan_of(wide(), [3, 3], size=700, microbatches=2, profiled=found)
    clipped = replace(plan, training=replace(plan.training, clip_norm=1.0))
    assert communicators(clipped, lower(clipped), 0) == communicators(plan, lower(plan), 0) + 1 == made(clipped, 0)


def test_a_parameter_on_two_stages_takes_one_more() -> None:
    """Its gradients are added up over a communicator of the stages that hold it, and of no others."""
    task = build("gpt", layers=2, hidden=16, heads=2, vocabulary=20, sequence=8, tied=True)
    plan = plan_of(task, [2, 1, 2], profiled=profile(task, microbatch_size=2, target="cuda"))
    counted = [communicators(plan, lower(plan), device) for device in range(3)]
    assert counted == [made(plan, device) for device in range(3)] == [2 + 1 + 1, 4 + 1, 2 + 1 + 1]


def test_one_device_needs_none(found: ModelProfile) -> None:
    """Without another worker there is nobody to talk to."""
    plan = plan_of(wide(), [6], size=700, profiled=found)
    assert communicators(plan, lower(plan), 0) == 0


def test_the_three_numbers_are_ordered() -> None:
    """Requested, allocated, reserved, on every device of a GPT under 1F1B; a preset's lines are its own, and settings
    are told as they can be read again.
    """
    task = build("gpt", layers=3, hidden=128, heads=4, vocabulary=1000, sequence=64)
    found = profile(task, microbatch_size=8, target="cuda")
    plan = plan_of(task, [2, 2, 2], size=8, microbatches=3, profiled=found)
    for settings in (DEFAULT, EXPANDABLE, AllocatorSettings.parse("max_split_size_mb:32")):
        trace = certify(task, replace(plan, cluster=Cluster.preset("hgx-h100")), allocator=settings)
        for one in peaks(trace)[:3]:
            assert one is not None
            assert one.requested_bytes <= one.allocated_bytes <= one.reserved_bytes < one.process_bytes
            assert one.workspace_bytes == 32 * MIB
            assert AllocatorSettings.parse(one.settings) == settings
