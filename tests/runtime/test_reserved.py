"""Allocated and reserved bytes of a GPU in a dry run."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.fake_cuda.target import FakeTarget
from pipefit.lowering import lower
from pipefit.memory.cuda_allocator import AllocatorSettings, Lifetimes
from pipefit.models import build
from pipefit.runtime import certify
from pipefit.runtime.dry_run.reserved import allocator_peaks
from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import Overheads
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.trace import AllocatorPeaks, DeviceTrace, Trace
from pipefit.schema.training import Training
from support.known_profiles import profile
from support.plain_caching_allocator import Pages, Plain
from support.small_tasks import plan_of, task_of
from support.two_pool_model import on_gpus, wide, wide_profile

MIB = 1 << 20
DEFAULT, EXPANDABLE = AllocatorSettings(), AllocatorSettings(expandable=True)


@pytest.fixture(scope="module")
def found() -> ModelProfile:
    """Profile the layers of `wide` for a GPU."""
    return wide_profile()


def peaks(trace: Trace) -> list[AllocatorPeaks | None]:
    return [device.allocator for device in trace.devices]


# ---------------------------------------------------------------- against plain training


class Watched(TorchDispatchMode):
    """A mode that allocates and frees the storages of operations in a simulated allocator."""

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
    """Train two steps of a plain loop over fake GPU tensors."""
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
def test_one_device_reserves_what_plain_training_does(
    found: ModelProfile, settings: AllocatorSettings
) -> None:
    """One device reserves the bytes of a plain loop in a plain allocator; allocated bytes differ by the loss
    only.
    """
    plan = plan_of(wide(), [6], size=700, microbatches=1, profiled=found)
    (certified,) = peaks(certify(wide(), plan, allocator=settings))
    model = Pages() if settings.expandable else Plain()
    trained_plainly(wide(), 700, model)
    assert certified is not None
    assert certified.reserved_bytes == model.peak


# ---------------------------------------------------------------- reports


def test_without_settings_no_allocator_is_told(found: ModelProfile) -> None:
    """Allocator figures appear only if requested, and only for devices with such an allocator."""
    plan = plan_of(wide(), [6], size=700, profiled=found)
    assert peaks(certify(wide(), plan)) == [None]
    with pytest.raises(UsageError, match="target cpu does not have a caching allocator"):
        certify(wide(), plan, target="cpu", allocator=DEFAULT)


def test_workspaces_are_among_allocated_bytes(found: ModelProfile) -> None:
    """Allocated bytes include one cuBLAS workspace for each of the two threads with products; emulated
    devices have neither workspace nor context.
    """
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
    """A model of convolutions and sums has no workspace."""
    task = task_of(lambda: (nn.Tanh(), nn.LayerNorm(8), nn.Tanh()), outputs=8)
    plan = plan_of(task, [3], profiled=profile(task, microbatch_size=2, target="cuda"))
    (found,) = peaks(certify(task, on_gpus(plan), allocator=DEFAULT))
    assert found is not None
    assert found.workspaces == 0


class Dotted(nn.Module):
    """A row's dot product with weights, which torch computes with cuBLAS too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.dot(x[0], self.weight)


def test_products_of_rows_have_a_workspace() -> None:
    """`dot` creates a cuBLAS handle in the forward; its backward, a sum and a multiple, does not."""
    task = task_of(lambda: (nn.Tanh(), Dotted(), nn.Tanh()), outputs=8)
    plan = plan_of(task, [3], profiled=profile(task, microbatch_size=2, target="cuda"))
    (found,) = peaks(certify(task, on_gpus(plan), allocator=DEFAULT))
    assert found is not None
    assert found.workspaces == 1


def with_memory(plan: Plan, nbytes: int) -> Plan:
    """Return the plan on devices with this much memory, none of it used by other processes."""
    device = plan.cluster.devices[0]
    kind = replace(
        device.kind, overheads=Overheads(context_bytes=0, communicator_bytes=0, cublas_workspace_bytes=0)
    )
    devices = tuple(replace(device, kind=kind, memory_bytes=nbytes) for _ in plan.cluster.devices)
    return replace(plan, cluster=replace(plan.cluster, backend="cuda", devices=devices))


def test_a_device_of_less_memory_empties_its_cache_or_runs_out(found: ModelProfile) -> None:
    """A smaller device empties its cache or runs out of memory.

    With 50 MiB, 30 MiB of cache are returned to get 40 more; with 39 MiB, memory runs out, and the figures
    are those of a device that has just enough.
    """
    plan = plan_of(wide(), [6], size=700, profiled=found)
    events = [(1, 30 * MIB), (1, 0), (2, 40 * MIB), (2, 0)]

    def told(nbytes: int) -> tuple[int, int, bool]:
        held = with_memory(plan, nbytes)
        one = allocator_peaks(held, lower(held), 0, Lifetimes(events), DEFAULT, 40 * MIB)
        return one.reserved_bytes // MIB, one.retries, one.fits

    assert told(70 * MIB) == (70, 0, True)
    assert told(50 * MIB) == (40, 1, True)
    assert told(39 * MIB) == (40, 1, False)


@pytest.mark.parametrize("settings", [DEFAULT, EXPANDABLE], ids=["fixed", "expandable"])
def test_a_device_with_too_little_lacks_no_more_than_it_must(
    settings: AllocatorSettings, found: ModelProfile
) -> None:
    """For random lifetimes, a device with the reported memory has room, and one with 20 MiB less does not."""
    plan, draw = plan_of(wide(), [6], size=700, profiled=found), Random(7)
    for _ in range(5):
        events, living = list[tuple[int, int]](), list[int]()
        for name in range(40):
            events.append((name, draw.choice([3, 30, 60, 200]) * MIB + draw.randrange(MIB)))
            living.append(name)
            while len(living) > draw.randint(1, 6):
                events.append((living.pop(draw.randrange(len(living))), 0))
        held = with_memory(plan, 100 * MIB)
        told = allocator_peaks(held, lower(held), 0, Lifetimes(events), settings, 0)
        assert not told.fits and told.process_bytes > 100 * MIB
        for nbytes, fits in ((told.process_bytes, True), (told.process_bytes - 20 * MIB - 1, False)):
            again = with_memory(plan, nbytes)
            assert allocator_peaks(again, lower(again), 0, Lifetimes(events), settings, 0).fits is fits


def test_of_ranks_that_lack_memory_one_is_simulated() -> None:
    """A dry run without `each` tells how much the ZeRO rank with the most tensors lacks, and stops there."""
    task = task_of(lambda: [nn.Linear(1600, 1600) for _ in range(5)], inputs=1600, outputs=1600)
    grid = Grid(devices=(0, 1, 2), data=3, shard="parameters")
    plan = Plan(
        profile=profile(task, microbatch_size=(3, 1), target="cuda"),
        cluster=Cluster.emulated((3, 1 << 30)),
        training=Training(batch_size=6, microbatches=2),
        stages=(Stage(start=0, stop=5, grid=grid),),
    )
    small = with_memory(plan, MIB)
    each, quick = (certify(task, small, allocator=DEFAULT, each=each).devices for each in (True, False))
    fullest = max(each, key=lambda device: device.peak_bytes)
    assert all(device.allocator and not device.allocator.fits for device in each)
    assert fullest.allocator and fullest.allocator.planned_bytes >= fullest.peak_bytes
    found = [device.allocator for device in quick if device.allocator]
    assert found == [replace(fullest.allocator, planned_bytes=0)]


def test_a_refusal_names_the_setting_that_would_fit(found: ModelProfile) -> None:
    """Where only fixed segments do not fit, because tensors pin them, expandable ones are told."""
    plan = plan_of(wide(), [6], size=700, profiled=found)
    events = [one for n in range(6) for one in ((2 * n, 30 * MIB), (2 * n, 0), (2 * n + 1, 18 * MIB))]
    for nbytes, told in ((180 * MIB, 0), (150 * MIB, 120 * MIB), (70 * MIB, 0)):
        held = with_memory(plan, nbytes)
        one = allocator_peaks(held, lower(held), 0, Lifetimes(events), DEFAULT, 84 * MIB)
        device = DeviceTrace(device=0, budget_bytes=nbytes, events=(), memory=(), allocator=one)
        assert one.expandable_bytes == told and one.fits is (nbytes == 180 * MIB)
        assert ("expandable_segments:True" in device.shortage) is bool(told)


def test_what_a_process_takes_besides_is_not_there(found: ModelProfile) -> None:
    """A context, and a communicator for each end of a channel, reduce the memory for tensors."""
    plan = with_memory(plan_of(wide(), [3, 3], size=700, profiled=found), 100 * MIB)
    kind = replace(
        plan.cluster.devices[0].kind,
        overheads=Overheads(context_bytes=10 * MIB, communicator_bytes=MIB, cublas_workspace_bytes=0),
    )
    devices = tuple(replace(device, kind=kind) for device in plan.cluster.devices)
    plan = replace(plan, cluster=replace(plan.cluster, devices=devices))
    for size, fits in ((86 * MIB, True), (88 * MIB, False)):
        one = allocator_peaks(plan, lower(plan), 0, Lifetimes([(1, size)]), DEFAULT, size)
        assert (one.outside_bytes, one.process_bytes, one.fits) == (13 * MIB, 13 * MIB + size, fits)


def test_an_allocator_goes_by_bytes_and_not_by_names() -> None:
    """Random lifetimes are equal under other names, and differ in size or in order of death."""
    draw = Random(4)
    for _ in range(200):
        events: list[tuple[int, int]] = []
        living: list[int] = []
        for name in range(30):
            events.append((name, draw.randint(1, 4) * 512))
            living.append(name)
            if draw.random() < 0.7:
                events.append((living.pop(draw.randrange(len(living))), 0))
        assert (
            Lifetimes(events).digest
            == Lifetimes([(f"other {name}", nbytes) for name, nbytes in events]).digest
        )
        at = draw.randrange(60)
        changed = [
            (name, nbytes + 512 * (number == at)) for number, (name, nbytes) in enumerate(events) if nbytes
        ]
        assert (Lifetimes(changed).digest == Lifetimes([one for one in events if one[1]]).digest) == (
            changed == [e for e in events if e[1]]
        )
        last = next(number for number, (_, nbytes) in reversed([*enumerate(events)]) if not nbytes)
        for other in set(living) - {name for name, _ in events[last:]}:
            assert (
                Lifetimes([*events[:last], (other, 0), *events[last + 1 :]]).digest
                != Lifetimes(events).digest
            )


def test_the_three_numbers_are_ordered() -> None:
    """Requested, allocated and reserved bytes are ordered on every device of a GPT under 1F1B; a preset
    prints its own lines, and settings print in a form that can be parsed again.
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
