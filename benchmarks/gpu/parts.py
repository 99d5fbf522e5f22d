"""The parts of the first hour on a GPU: each compares what is expected with what is found. Not a benchmark itself.

A part is a function from a machine and a scale to rows: the same code on models that fill some GiB of a GPU, on those
of some hundred MiB, and, for a dry run, of a few hundred KiB.
What is expected is worked out before anything is trained: a process that has run a backward cannot work over fake GPUs
without losing the real one (`pipefit.fake_cuda.isolation`).
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from machines import Machine
from torch import Tensor

from pipefit.capture import Task
from pipefit.capture.chain import ChainLayer
from pipefit.capture.model import built, capture
from pipefit.capture.sample import sample
from pipefit.errors import OutOfMemory
from pipefit.memory.cuda_allocator import AllocatorSettings, replay
from pipefit.models import build
from pipefit.profiler import profile
from pipefit.profiler.measured import add_seconds
from pipefit.runtime import Trainer, certify
from pipefit.runtime.optim.half_precision import WeightCopies, using
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.layer_costs import LayerCost
from pipefit.schema.plan import Plan
from pipefit.schema.training import Precision, Training
from pipefit.simulator import simulate

Scale = Literal["full", "small", "dry"]
SMALL_GPT = {"layers": 4, "hidden": 256, "heads": 8, "vocabulary": 5000, "sequence": 256}
DRY_GPT = {"layers": 2, "hidden": 32, "heads": 2, "vocabulary": 50, "sequence": 16}
MODELS: Mapping[
    str, Mapping[Scale, tuple[int, Mapping[str, Any]]]
] = {  # microbatches, and what models are of
    "gpt": {"full": (8, {}), "small": (8, SMALL_GPT), "dry": (2, DRY_GPT)},
    "bert": {"full": (16, {}), "small": (8, SMALL_GPT), "dry": (2, DRY_GPT)},
    "vgg11": {
        "full": (32, {}),
        "small": (8, {"width": 32, "image_size": 96, "num_classes": 100}),
        "dry": (2, {"width": 4, "image_size": 32, "num_classes": 10}),
    },
    "resnet101": {
        "full": (16, {}),
        "small": (8, {"width": 32, "image_size": 96, "num_classes": 100}),
        "dry": (2, {"width": 4, "image_size": 64, "num_classes": 10}),
    },
}
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "mixed-bfloat16")
MICROBATCHES = 2
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A figure: what is expected, what is found, and how far apart they may be, as a part of what is found.

    `within` None says that nothing is claimed, and `found` None that it is not measured here.
    """

    what: str
    expected: float | None
    found: float | None
    unit: str = "bytes"
    within: float | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the claim holds; None where nothing is claimed or measured."""
        if self.expected is None or self.found is None or self.within is None:
            return None
        return abs(self.expected - self.found) <= self.within * abs(self.found)


Part = Callable[[Machine, Scale], Iterator[Row]]


def task_of(name: str, scale: Scale, precision: Precision = "float32") -> tuple[Task, int]:
    """A model of the zoo and its microbatch size."""
    size, settings = MODELS[name][scale]
    return replace(build(name, **settings), precision=precision), size


def plan_on(machine: Machine, task: Task, size: int, memory_bytes: int | None = None) -> Plan:
    """All layers on the one device, in two microbatches."""
    found = profile(task, microbatch_size=size, target=machine.target)
    return Plan(
        profile=found,
        cluster=machine.cluster(memory_bytes),
        training=Training(
            batch_size=MICROBATCHES * size, microbatches=MICROBATCHES, precision=task.precision
        ),
        stages=(Stage(start=0, stop=len(found.layers), grid=Grid.of(0)),),
    )


# ---------------------------------------------------------------- what a process takes


def constants(machine: Machine, scale: Scale) -> Iterator[Row]:
    """The context, and the workspaces of cuBLAS for forwards and backwards: the lines of a device's kind."""
    own = machine.cluster().devices[0].kind.overheads
    total, reserved = (machine.figures()[name] for name in ("process_total", "reserved"))
    context = None if total is None or reserved is None else total - reserved
    machine.clear()
    before = machine.held()
    _multiply(machine.device, 64 if scale == "dry" else 4096)
    after = machine.held()
    workspaces = None if before is None or after is None else after - before
    yield Row(what="context", expected=own.context_bytes, found=context, within=0.5)
    yield Row(
        what="two workspaces of cuBLAS", expected=2 * own.cublas_workspace_bytes, found=workspaces, within=0.0
    )


def _multiply(device: torch.device, side: int) -> None:
    """A product and its backward, of which nothing is left but what libraries keep."""
    weight = torch.zeros(side, side, device=device, requires_grad=True)
    (weight @ weight).sum().backward()


# ---------------------------------------------------------------- peaks


def peaks(name: str, machine: Machine, scale: Scale) -> Iterator[Row]:
    """Requested, allocated and reserved bytes of a model's training beside its certificate, in each precision."""
    asked = []
    for precision in PRECISIONS:
        task, size = task_of(name, scale, precision)
        plan = plan_on(machine, task, size)
        asked.append((task, plan, certify(task, plan, target=machine.target, allocator=machine.allocator)))
    for task, plan, trace in asked:
        expected, what = trace.devices[0], f"{name}, {task.precision}"
        machine.clear()
        trainer = Trainer(task, plan, numbers=False)
        for step in range(2):
            torch.manual_seed(step)
            trainer.step(task.batch(plan.training.batch_size))
        found, own = machine.figures(trainer), expected.allocator
        workspaces = own.workspaces * own.workspace_bytes if own else 0
        yield Row(
            what=f"{what}: requested",
            expected=expected.peak_bytes + workspaces,
            found=found["requested"],
            within=0.01,
        )
        yield from _actions(what, trace.devices[0].memory, trainer.trace.devices[0].memory, workspaces)
        if own:
            yield Row(
                what=f"{what}: allocated", expected=own.allocated_bytes, found=found["allocated"], within=0.02
            )
            yield Row(
                what=f"{what}: reserved", expected=own.reserved_bytes, found=found["reserved"], within=0.05
            )
            yield Row(
                what=f"{what}: process", expected=own.process_bytes, found=found["process_total"], within=0.1
            )
        del trainer


def _actions(what: str, expected: Any, found: Any, workspaces: int) -> Iterator[Row]:
    """Of the second step's actions, the one whose peak differs most."""
    pairs = [(e, f) for e, f in zip(expected, found, strict=True) if e.step == 1]
    one, other = max(pairs, key=lambda pair: abs(pair[0].total_bytes + workspaces - pair[1].total_bytes))
    name = f"{what}: {other.action}, of all actions"
    yield Row(what=name, expected=one.total_bytes + workspaces, found=other.total_bytes, within=0.02)


# ---------------------------------------------------------------- what layers keep


def saved(machine: Machine, scale: Scale) -> Iterator[Row]:
    """What each kind of layer keeps for its backward, beside its profile."""
    precision: Precision = "mixed-bfloat16" if machine.target == "cuda" else "float32"
    for name in MODELS:
        task, size = task_of(name, scale, precision)
        (costs,) = profile(task, microbatch_size=size, target=machine.target).measurements
        chain = capture(
            built(task, seed=0, target=machine.target), *sample(task, size), target=machine.target
        )
        values = tuple(value.to(machine.device) for value in chain.flatten(sample(task, size)[0]))
        met = set[int]()
        for layer, kind in zip(chain.layers, costs.layers, strict=True):
            layer.module.to(machine.device)
            values = tuple(
                value.detach().requires_grad_(flag).clone()  # for layers that work in place
                for value, flag in zip(
                    values, (v.requires_grad for v in costs.kinds[kind].inputs), strict=True
                )
            )
            kept, values = _kept(layer, costs.kinds[kind], values)
            if kind not in met:
                met.add(kind)
                yield Row(
                    what=f"{name}: {layer.name}", expected=_keeps(costs.kinds[kind]), found=kept, within=0.0
                )


def _keeps(cost: LayerCost) -> int:
    """Bytes of the storages that a layer's profile says it keeps: its own and its inputs, each once."""
    held = {(one.origin.kind, one.origin.index) for one in cost.saved}
    own = sum(nbytes for number, nbytes in enumerate(cost.storages) if ("own", number) in held)
    return own + sum(value.nbytes for number, value in enumerate(cost.inputs) if ("input", number) in held)


def _kept(layer: ChainLayer, cost: LayerCost, values: tuple[Tensor, ...]) -> tuple[int, tuple[Tensor, ...]]:
    """Bytes that the layer's forward really keeps, without parameters, buffers and the copies that autocast makes of
    parameters; and what it returns.
    """
    copies = WeightCopies([layer], [cost], 0)
    own = (*layer.module.parameters(), *layer.module.buffers(), *copies.tensors)
    known = {tensor.untyped_storage().data_ptr() for tensor in own}
    kept = dict[int, int]()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, using(copies.of(0), layer.autocast, values):
        outputs = layer(values)
    return sum(kept.values()), outputs


# ---------------------------------------------------------------- the largest that fits


def largest(machine: Machine, scale: Scale) -> Iterator[Row]:
    """The largest microbatch that a certificate allows in so much memory trains, and one of a quarter more does not."""
    task, first = task_of("gpt", scale)

    def lacks(size: int, memory: int | None) -> bool:
        plan = plan_on(machine, task, size, memory)
        return bool(
            certify(task, plan, target=machine.target, allocator=machine.allocator).devices[0].lack_bytes
        )

    memory = 12 << 30 if scale == "full" else _taken(machine, task, first + 2)
    sizes = range(first, 64)
    allowed = first - 1 + bisect_left(sizes, True, key=lambda size: lacks(size, memory))
    claims = ((allowed, "allowed", 1), (max(allowed + 1, round(1.25 * allowed)), "refused", 0))
    asked = [(size, what, fits, plan_on(machine, task, size, memory)) for size, what, fits in claims if size]
    for size, what, fits, plan in asked:
        found = _trains(machine, task, plan)
        yield Row(what=f"{size} samples, {what}", expected=fits, found=found, unit="trains", within=0)


def _taken(machine: Machine, task: Task, size: int) -> int:
    """Bytes in which microbatches of this size just fit."""
    trace = certify(task, plan_on(machine, task, size), target=machine.target, allocator=machine.allocator)
    own = trace.devices[0].allocator
    return 1 + (own.process_bytes if own else trace.devices[0].peak_bytes)


def _trains(machine: Machine, task: Task, plan: Plan) -> int:
    """1 if two steps have room."""
    machine.clear()
    try:
        trainer = Trainer(task, plan, numbers=False)
        for _ in range(2):
            trainer.step(task.batch(plan.training.batch_size))
    except OutOfMemory:
        return 0
    return 1


# ---------------------------------------------------------------- seconds


def seconds(machine: Machine, scale: Scale) -> Iterator[Row]:
    """A step's time: by estimates, by a measured profile, and as it was."""
    asked = [(name, *task_of(name, scale)) for name in MODELS]
    plans = [plan_on(machine, task, size) for _, task, size in asked]
    for (name, task, _), plan in zip(asked, plans, strict=True):
        measured = replace(plan, profile=add_seconds(plan.profile, task, device=machine.device, threads=1))
        machine.clear()
        trainer, times = Trainer(task, plan, numbers=False), []
        batch = task.batch(plan.training.batch_size)
        for _ in range(20 if scale == "full" else 3):
            began = time.perf_counter()
            trainer.step(batch)
            times.append(time.perf_counter() - began)
        found, close = statistics.median(times[1:]), 0.25 if scale == "full" else None
        claims = ((f"{name}: estimated", plan, None), (f"{name}: measured profile", measured, close))
        for what, one, within in claims:
            yield Row(
                what=what, expected=simulate(one).step_seconds[-1], found=found, unit="seconds", within=within
            )


# ---------------------------------------------------------------- the allocator itself


def history(machine: Machine, scale: Scale) -> Iterator[Row]:
    """A recorded history of the allocator, replayed in the simulated one: every block where it was."""
    task, size = task_of("resnet101", scale)
    record = machine.target == "cuda"
    machine.clear()
    if record:
        torch.cuda.memory._record_memory_history(max_entries=1 << 22, stacks="python")
    trainer = Trainer(task, plan_on(machine, task, size), numbers=False)
    for _ in range(2):
        trainer.step(task.batch(MICROBATCHES * size))
    entries = torch.cuda.memory._snapshot()["device_traces"][0] if record else _made_up()
    if record:
        torch.cuda.memory._record_memory_history(enabled=None)
    found = replay(entries, machine.allocator or AllocatorSettings())
    told = f": {found.differences[0]}" if found.differences else ""
    yield Row(
        what=f"{found.allocations} allocations replayed{told}",
        expected=found.peak.reserved_bytes,
        found=found.recorded_reserved_bytes,
        within=0.0,
    )
    yield Row(what="differences", expected=0, found=len(found.differences), unit="blocks", within=0.0)


def _made_up() -> list[dict[str, Any]]:
    """A history of one block, as torch records it."""
    sizes = {"segment_alloc": 2 << 20, "alloc": 512, "free_requested": 512, "free_completed": 512}
    return [{"action": action, "addr": 1 << 40, "size": size, "stream": 0} for action, size in sizes.items()]


# ---------------------------------------------------------------- tests


def marked() -> list[Path]:
    """The files of tests marked `gpu`, but for those of the emulation itself."""
    files = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if file.parent.name != "emulated"]
    return [file for file in files if "mark.gpu" in file.read_text(encoding="utf-8")]


def tests(file: Path, machine: Machine, scale: Scale) -> Iterator[Row]:
    """The tests of a file that are marked `gpu`; in a dry run they are collected."""
    wanted = ["--collect-only"] if scale == "dry" else []
    line = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *wanted, str(file)]
    ended = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    print("\n".join((ended.stdout + ended.stderr).splitlines()[-15:]))
    yield Row(
        what=f"pytest -m gpu {file.name}", expected=0, found=ended.returncode, unit="exit code", within=0.0
    )


TESTS: Mapping[str, Part] = {
    file.stem.replace("test_", "tests-", 1): partial(tests, file) for file in marked()
}
PARTS: Mapping[str, Part] = {  # in the order of their value
    "constants": constants,
    "tests-gpu": TESTS["tests-gpu"],
    **{f"peaks-{name}": partial(peaks, name) for name in MODELS},
    "saved": saved,
    "history": history,
    "largest": largest,
    **TESTS,
    "seconds": seconds,
}
