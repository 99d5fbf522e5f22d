"""Certified memory and the allocator's on a CUDA device. Skipped without one.

Two differences are not pipefit's. Libraries (cuBLAS, cuDNN) keep workspaces inside the caching allocator from
their first call on: a small step on the same device comes first, and its remaining memory is subtracted. And
the allocator rounds every block up to 512 bytes: hence models with much larger tensors, and a tolerance of
one per cent.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from pipefit.capture import Task
from pipefit.errors import OutOfMemory
from pipefit.measure.cuda import CudaMeter, memory_figures
from pipefit.models import build
from pipefit.profiler.training_runs.profilers import LoneStages
from pipefit.runtime import Trainer, certify, train
from pipefit.schema.plan import Plan
from pipefit.schema.trace import Category
from support.separate_process import elsewhere
from support.small_tasks import batch_of, plan_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODELS: Mapping[str, Mapping[str, Any]] = {
    "vgg11": {"width": 32, "image_size": 96, "num_classes": 100},
    "gpt": {"layers": 4, "hidden": 256, "heads": 8, "vocabulary": 5000, "sequence": 256},
    "bert": {"layers": 4, "hidden": 256, "heads": 8, "vocabulary": 5000, "sequence": 256},
}
SIZE, MICROBATCHES = 8, 2


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Return the first GPU, after freeing the memory of earlier tests."""
    gc.collect()
    torch.cuda.empty_cache()
    yield torch.device("cuda", 0)
    gc.collect()
    torch.cuda.empty_cache()


def on_gpu(task: Task) -> Plan:
    """Place all layers on the one GPU."""
    layers = len(list(task.build().children()))
    plan = plan_of(task, [layers], size=SIZE, microbatches=MICROBATCHES, memory_bytes=1 << 34)
    return replace(plan, cluster=replace(plan.cluster, backend="cuda"))


def warmed(task: Task, plan: Plan, device: torch.device) -> int:
    """Return the requested bytes that libraries keep once they have run: the remainder of a whole training."""
    first = Trainer(task, plan)
    first.step(batch_of(task, plan))
    del first
    gc.collect()
    torch.cuda.synchronize(device)
    return int(torch.cuda.memory_stats(device).get("requested_bytes.all.current", 0))


@pytest.mark.parametrize("name", MODELS)
def test_certified_peaks_are_the_allocators(name: str, device: torch.device) -> None:
    """In the first step and in a steady one, requested bytes peak within one per cent of the certificate."""
    task = build(name, **MODELS[name])
    plan = on_gpu(task)
    predicted = elsewhere(certify, task, plan, target="cuda")
    base = warmed(task, plan, device)
    trainer = Trainer(task, plan)
    for step in range(2):
        trainer.step(batch_of(task, plan, step))
        measured = (
            trainer.trace.devices[0].step_peak_bytes(step) - base
        )  # the meter restarts torch's peak every action
        assert predicted.devices[0].step_peak_bytes(step) == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("stage", range(3))
def test_a_stage_alone_needs_what_was_certified(stage: int, device: torch.device) -> None:
    """One stage of three, trained alone on the GPU, peaks within one per cent of its peak in the dry run."""
    task = build("gpt", **MODELS["gpt"])
    plan = plan_of(
        task, [2, 3, 2], size=SIZE, microbatches=MICROBATCHES, schedule="gpipe", memory_bytes=1 << 34
    )
    predicted = elsewhere(certify, task, plan, target="cuda").peak_bytes[stage]
    base = warmed(task, on_gpu(task), device)
    lone = LoneStages(task, SIZE)
    measured = lone.train(plan, stage, device=device, meter=CudaMeter(device)) - base
    assert predicted == pytest.approx(measured, rel=0.01)


def test_the_meter_reads_the_allocator(device: torch.device) -> None:
    """The meter's samples add up to the allocator's peak of each action; parameters and optimizer state are
    known.
    """
    task = build("gpt", **MODELS["gpt"])
    plan = on_gpu(task)
    trainer = Trainer(task, plan)
    trainer.step(batch_of(task, plan))
    torch.cuda.reset_peak_memory_stats(device)
    trainer.step(batch_of(task, plan, 1))
    samples = [sample for sample in trainer.trace.devices[0].memory if sample.step == 1]
    parameters = sum(tensor.nbytes for tensor in trainer.state_dict().values())
    assert {sample.by_category[Category.PARAMETERS] for sample in samples} == {parameters}
    assert min(sample.by_category[Category.OPTIMIZER] for sample in samples) >= 2 * parameters
    assert max(sample.total_bytes for sample in samples) >= torch.cuda.memory_allocated(device)


def test_an_actions_peak_starts_anew(device: torch.device) -> None:
    """`CudaMeter` reports the highest level of its current action, not of an earlier one."""
    meter = CudaMeter(device)
    meter.begin("large")
    large = torch.empty(1 << 22, device=device)
    del large
    high = meter.end(0, 0.0).total_bytes
    meter.begin("small")
    kept = torch.empty(1 << 20, device=device)
    low = meter.end(0, 0.0).total_bytes
    assert high - low == (1 << 24) - (1 << 22)
    assert low == torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    assert kept.is_cuda


def test_the_figures_are_ordered(device: torch.device) -> None:
    """Requested bytes are at most allocated, allocated at most reserved, and reserved at most the process's
    bytes.
    """
    torch.cuda.reset_peak_memory_stats(device)
    kept = torch.empty(1 << 20, device=device)
    figures = memory_figures(device)
    sizes = [
        kept.nbytes,
        *(figures[name] for name in ("requested", "allocated", "reserved", "process_total")),
    ]
    assert sizes == sorted(sizes)


def test_a_gpu_is_held_to_the_memory_of_the_plans_device(device: torch.device) -> None:
    """A GPU is limited to the plan's device: an action beyond its memory fails; without a cap the GPU's
    memory counts.
    """
    task = build("gpt", **MODELS["gpt"])
    plan = on_gpu(task)
    try:
        Trainer(task, plan, cap=False).step(batch_of(task, plan))
        gc.collect()
        torch.cuda.empty_cache()
        own = plan.cluster.devices[0].kind.overheads
        small = own.context_bytes + 2 * own.cublas_workspace_bytes + (100 << 20)
        devices = tuple(replace(one, memory_bytes=small) for one in plan.cluster.devices)
        tight = replace(plan, cluster=replace(plan.cluster, devices=devices))
        with pytest.raises(OutOfMemory, match=r"out of memory.*stage 0"):
            Trainer(task, tight).step(batch_of(task, plan))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def test_times_of_a_trace_are_the_gpus(device: torch.device) -> None:
    """The trace's computation on one GPU takes most of the step; the host's launches do not."""
    task = build("gpt", **MODELS["gpt"])
    plan = on_gpu(task)
    trainer = Trainer(task, plan)
    trainer.step(batch_of(task, plan))
    torch.cuda.synchronize(device)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    trainer.step(batch_of(task, plan, 1))
    last.record()
    torch.cuda.synchronize(device)
    events = [event for event in trainer.trace.devices[0].events if event.step == 1]
    seconds = sum(event.end_seconds - event.start_seconds for event in events)
    assert seconds == pytest.approx(first.elapsed_time(last) / 1e3, rel=0.2)
    assert all(a.end_seconds <= b.start_seconds + 1e-5 for a, b in pairwise(events))


def test_stages_share_a_gpu() -> None:
    """Three workers on the one GPU, with messages through the host, have the losses of one process."""
    task = build("gpt", **MODELS["gpt"], dropout=0.0)
    plan = plan_of(task, [2, 3, 2], size=SIZE, microbatches=MICROBATCHES, memory_bytes=1 << 34)
    plan = replace(plan, cluster=replace(plan.cluster, backend="cuda"))
    make = partial(build, "gpt", **MODELS["gpt"], dropout=0.0)
    losses, trace = train(make, plan, steps=2, share_device=True)
    assert train(make, plan_on_cpu(plan), steps=2)[0] == pytest.approx(losses, rel=1e-3)
    assert all(trace.peak_bytes)


def plan_on_cpu(plan: Plan) -> Plan:
    """Return the same plan for workers of the CPU."""
    return replace(plan, cluster=replace(plan.cluster, backend="cpu"))


@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_the_cpu(name: str, device: torch.device) -> None:
    """Without dropout, a step's loss on the GPU equals the CPU's to the precision of their kernels."""
    task = build(name, **MODELS[name], dropout=0.0)
    plan = on_gpu(task)
    here = replace(plan, cluster=replace(plan.cluster, backend="cpu"))
    batch = batch_of(task, plan)
    assert Trainer(task, plan).step(batch) == pytest.approx(Trainer(task, here).step(batch), rel=1e-3)
    assert device.type == "cuda"


RECORDED = """
import torch
from pipefit.memory.cuda_allocator import AllocatorSettings, replay

torch.cuda.memory._set_allocator_settings(SETTINGS)
torch.cuda.memory._record_memory_history(max_entries=1_000_000)
layers = [torch.nn.Linear(1500, 1500) for _ in range(6)]
model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.GELU()))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for size in (64, 200, 128):
    model(torch.randn(size, 1500, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
(history,) = torch.cuda.memory._snapshot()["device_traces"][:1]
found = replay(history, AllocatorSettings.parse(SETTINGS))
assert not found.differences, str(found)
assert found.peak.reserved_bytes == torch.cuda.max_memory_reserved()
assert found.peak.allocated_bytes == torch.cuda.max_memory_allocated()
assert found.peak.requested_bytes == torch.cuda.memory_stats()["requested_bytes.all.peak"]
"""


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_the_simulated_allocator_does_what_the_gpus_does(settings: str) -> None:
    """The simulated allocator replays the GPU's history of three steps from a separate process: every block
    at its place, three equal peaks.
    """
    script = f"SETTINGS = {settings!r}\n{RECORDED}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
