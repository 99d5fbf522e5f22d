"""Comparing a model with its chain before training: by `certify_numbers`, and at a trainer's start."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipefit
from pipefit.capture import Task, capture, rows_of, traced
from pipefit.capture.model import built
from pipefit.capture.sample import sample
from pipefit.errors import FileError, PipefitWarning, UsageError
from pipefit.models import build
from pipefit.models.hugging_face import hf
from pipefit.runtime import Trainer, certify_numbers, train
from pipefit.runtime.checks import comparison
from pipefit.runtime.checks.comparison import comparable, compare_at_start, host_bytes, host_seconds
from pipefit.runtime.hardware import free_bytes
from pipefit.runtime.launch import launch
from pipefit.schema.plan import Plan
from support import untraceable_models
from support.gallery_samples import sampled
from support.huggingface_models import TINY
from support.known_profiles import profile
from support.local_batches import sliced_plan
from support.small_tasks import batch_of, plan_of
from support.untraceable_models import task_of

SMALL: dict[str, dict[str, Any]] = {
    "mlp": {"widths": (16, 8), "inputs": 6},
    "unet": {"width": 2, "image_size": 16, "depth": 2, "convolutions": 1},
}


def planned(task: Task, devices: int = 1, **options: Any) -> Plan:
    """Return a plan with about equal numbers of layers on each device."""
    profiled = profile(task, microbatch_size=2)
    share, rest = divmod(len(profiled.layers), devices)
    return plan_of(task, [share] * (devices - 1) + [share + rest], profiled=profiled, **options)


def in_precision(task: Task) -> Plan:
    """Return a plan in the task's precision."""
    training = pipefit.Training(batch_size=4, microbatches=2, precision=task.precision or "float32")
    cluster = pipefit.Cluster.emulated((1, 1 << 30))
    return pipefit.plan(profile(task, microbatch_size=2), cluster, training, recompute="never")


def counted(task: Task) -> tuple[Task, list[int]]:
    """Return the task with a batch function that records the requested sizes."""
    sizes: list[int] = []

    def batch(size: int) -> Any:
        sizes.append(size)
        return task.batch(size)

    return replace(task, batch=batch), sizes


# -------------------------------------------------------------------- certify_numbers


def test_a_certificate_tells_what_was_compared() -> None:
    """A certificate reports the plan's microbatches, their losses, and the number of equal gradients and
    buffers.
    """
    task = task_of(untraceable_models.Dropping)
    found = certify_numbers(task, planned(task))
    assert (found.microbatch_size, found.gradients, found.buffers, found.differences) == (2, 6, 0, ())
    assert f"2 microbatches of 2, losses {found.losses[0]:.6g} and {found.losses[1]:.6g}, 6 gradients" in str(
        found
    )
    assert found.losses[0] != found.losses[1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", [None, "bfloat16"])
def test_a_certificate_leaves_an_existing_module_as_it_was(precision: Any) -> None:
    """A certificate leaves an existing module's weights, dtypes, gradients and random generators unchanged."""
    module = untraceable_models.Dropping()
    task = task_of(module, precision=precision)  # type: ignore[arg-type]
    plan = in_precision(task)
    module.last.bias.grad = torch.ones(3)
    before = {name: (id(p), p.dtype, p.tolist()) for name, p in module.named_parameters()}
    states = random.getstate(), torch.get_rng_state().tolist()
    assert not certify_numbers(task, plan).differences
    assert {name: (id(p), p.dtype, p.tolist()) for name, p in module.named_parameters()} == before
    assert (random.getstate(), torch.get_rng_state().tolist()) == states
    assert module.last.bias.grad.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["mlp", "unet"])
def test_a_chain_by_hand_can_be_certified_too(name: str) -> None:
    """An explicit chain can be certified too, without a trace."""
    task = build(name, **SMALL[name])
    assert not certify_numbers(task, planned(task)).differences


def test_a_plan_of_another_task_is_not_certified() -> None:
    """A certificate for a plan of another task says so instead of reporting a difference."""
    with pytest.raises(FileError, match="does not belong to this task"):
        certify_numbers(task_of(untraceable_models.Layered), planned(task_of(untraceable_models.Dropping)))


def test_a_model_too_large_for_the_host_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model too large for the host is not built; the message says its size and the remedy."""
    task = task_of(untraceable_models.Layered)
    plan, (asked, sizes) = planned(task), counted(task)
    monkeypatch.setattr(comparison, "free_bytes", lambda: 100)
    with pytest.raises(
        UsageError, match=r"numbers of forgetful needs \d.* which has 100 B free.* fewer layers"
    ):
        certify_numbers(asked, plan)
    assert sizes == []


# -------------------------------------------------------------------- a trainer's start


@pytest.mark.parametrize("devices", [1, 2])
def test_a_trainer_refuses_a_chain_that_forgets_before_it_trains(devices: int) -> None:
    """A trainer refuses a chain that loses state before it trains; an existing module keeps its weights.
    Without the comparison a wrong model is trained.
    """
    module = untraceable_models.Remembering()
    task = task_of(module)  # type: ignore[arg-type]
    plan = planned(task, devices)
    before = {name: parameter.tolist() for name, parameter in module.named_parameters()}
    with pytest.raises(UsageError, match=r"loss of microbatch 2 is .*keeps state between calls"):
        Trainer(task, plan)
    assert {name: parameter.tolist() for name, parameter in module.named_parameters()} == before
    assert module.left is None
    Trainer(task, plan, numbers=False).step(batch_of(task, plan))


class GrowingForFew(untraceable_models.Layered):
    """A layer that multiplies by the length of a list, which grows only with a replica's local batch of two
    samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = [1]

    def between(self, x: Tensor) -> Tensor:
        if self.training and len(x) == 2:
            self.seen.append(1)
        return x * len(self.seen)


def test_a_trainer_compares_the_chain_of_slices_too() -> None:
    """A trainer compares the chain for replicas' local batches too, if only the trace of whole microbatches
    is right.
    """
    task = task_of(GrowingForFew)
    profiled = profile(task, microbatch_size=(4, 2))
    with pytest.raises(UsageError, match=r"loss of microbatch 2 is .*keeps state between calls"):
        Trainer(task, sliced_plan(profiled, [0, len(profiled.layers)], [2]))
    assert not Trainer(task, sliced_plan(profiled, [0, len(profiled.layers)], [1])).not_compared


def test_a_comparison_changes_nothing_of_the_training() -> None:
    """Losses, parameters, random draws, traces and peaks are those of a trainer without the comparison."""
    task = task_of(untraceable_models.Dropping)
    plan, runs = planned(task, 2), []
    for numbers in (True, False):
        torch.manual_seed(1)
        random.seed(1)
        trainer = Trainer(task, plan, numbers=numbers)
        losses = [trainer.step(task.batch(4)) for _ in range(2)]
        state = {name: tensor.tolist() for name, tensor in trainer.state_dict().items()}
        memory = [
            (sample.action, sample.bytes) for device in trainer.trace.devices for sample in device.memory
        ]
        runs.append((losses, state, memory, torch.rand(1).item(), random.random()))
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("free_bytes", lambda: 1000, r"it needs \d.* on the host, which has 1000 B free"),
        ("LONGEST_SECONDS", 0.0, r"it takes about 0 s"),
    ],
)
def test_what_is_not_compared_is_said(
    name: str, value: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A skipped comparison, for lack of host memory or time, gives one warning with the reason and the
    remedies. The batch function is called equally often, so that all workers of a training draw the same.
    Turned off, there is no warning.
    """
    task = task_of(untraceable_models.Remembering)
    plan = planned(task)
    monkeypatch.setattr(comparison, name, value)
    asked, sizes = counted(task)
    with pytest.warns(
        PipefitWarning,
        match=rf"forgetful as a chain was not compared .*{reason}, and it does not have a list of .*pipefit certify",
    ):
        trainer = Trainer(asked, plan)
    assert "numbers=False" in trainer.not_compared
    assert sizes == [2, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Trainer(task, plan, numbers=False).not_compared == ""


# -------------------------------------------------------------------- a model over the limit


class Block(nn.Module):
    """A residual branch, as in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Deep(nn.Module):
    """An embedding, `depth` equal blocks in a list, and a head."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.h = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for number in range(self.depth):
            x = self.h[number](x)
        return F.cross_entropy(self.head(x).flatten(0, -2), words.flatten())


def deep(depth: int) -> Task:
    return Task(
        partial(Deep, depth),
        batch=lambda size: ({"words": torch.randint(11, (size, 4))}, None),
        loss=None,
        name="deep",
    )


def limited_to(share: float, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit a comparison to a share of the seconds that one for the plan's model takes."""
    monkeypatch.setattr(comparison, "LONGEST_SECONDS", share * host_seconds(plan.measurement))


def without_branches(traced: Any) -> Any:
    """Return a trace in which residual branches are multiplied by zero."""

    def broken(*args: Any, **options: Any) -> Any:
        graph = traced(*args, **options)
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
            node.kwargs = {"alpha": 0}
        return graph

    return broken


def test_a_deep_model_is_compared_by_two_of_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the limit, a state loss in every block is found in a copy with two of forty blocks."""
    monkeypatch.setattr(traced, "flatten", without_branches(traced.flatten))
    task = deep(40)
    plan = planned(task)
    limited_to(0.1, plan, monkeypatch)
    with pytest.raises(UsageError, match=r"deep with 2 of 40 blocks of h computes different numbers"):
        Trainer(task, plan)


def test_of_a_deep_model_that_is_right_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A correct deep model gives no warning. A copy leaves an existing module as it is; a copy still over the
    limit is not compared.
    """
    module = Deep(8)
    task = replace(deep(8), module=module)
    plan, before = planned(task), {name: (id(p), p.tolist()) for name, p in module.named_parameters()}
    limited_to(0.7, plan, monkeypatch)
    assert not Trainer(task, plan).not_compared
    assert {name: (id(p), p.tolist()) for name, p in module.named_parameters()} == before
    assert (module.depth, len(module.h)) == (8, 8)
    limited_to(0.1, plan, monkeypatch)
    with pytest.warns(
        PipefitWarning, match=r"deep .* not compared .*: it takes about 0 s, and for deep with 2 of 8 .* it"
    ):
        Trainer(task, plan)


def test_a_certificate_of_a_model_beyond_the_hosts_memory_is_of_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For a model larger than the host's memory the certificate is of a smaller copy, and says that the plan
    was not compared.
    """
    task = deep(20)
    plan = planned(task)
    monkeypatch.setattr(comparison, "free_bytes", lambda: host_bytes(plan.measurement) // 2)
    found = str(certify_numbers(task, plan))
    assert found.startswith(
        "deep with 2 of 20 blocks of h computes the same numbers as a chain and as a module: "
    )
    assert "; training by the plan was not compared: it needs" in found


class Windowed(Block):
    """A block with its number, and a window or none, as models with some layers of local attention have."""

    def __init__(self, number: int, window: int | None) -> None:
        super().__init__()
        self.layer_idx, self.window = number, window


@pytest.mark.parametrize(
    ("windows", "kept"),
    [([None] * 8, "01"), ([None, None, 4, 4, 4, 4, 4, 4], "0123"), ([4, 4, 4, None] * 4, "0123456")],
)
def test_a_copy_keeps_two_blocks_of_every_setting(windows: list[int | None], kept: str) -> None:
    """Blocks with other integers or None compute otherwise; their own numbers make no difference."""
    blocks = [Windowed(number, window) for number, window in enumerate(windows)]
    (row,) = rows_of(nn.Sequential(nn.ModuleList(blocks)))
    left = {*map(str, range(len(windows)))} - {*row.left_out}
    assert {*kept} <= left and all(
        sum(windows[int(number)] == window for number in left) >= 2 for window in {*windows}
    )


@pytest.mark.parametrize(
    ("name", "field", "kept"),
    sampled(
        [("llama", "num_hidden_layers", 2), ("t5", "num_layers", 3)],
        often=[],
    ),
)
def test_models_of_transformers_are_compared_by_fewer_layers(
    name: str, field: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers are compared with fewer layers, in the copy's configuration too. T5's larger first block
    is kept as well.
    """
    whole = built(hf(name, **{**TINY[name], field: 6}))
    plan, batch = planned(whole), sample(whole, 2)
    limited_to(0.8, plan, monkeypatch)
    fewer, own = comparable(whole, plan, capture(whole, *batch), batch, comparison._too_much)
    assert f" with {kept} of 6 blocks of " in fewer.name
    stacks = [getattr(one, "encoder", one) for one in (fewer.module, whole.module)]
    assert [getattr(stack.config, field) for stack in stacks] == [kept, 6]
    assert len(own.layers) < len(plan.profile.layers)
    assert not compare_at_start(fewer, plan, own, (batch, sample(whole, 2, seed=1)))


def test_a_module_that_the_host_cannot_run_is_trained_uncompared() -> None:
    """A module with GPU-only kernels is trained without the comparison: the warning has the error."""
    task = task_of(untraceable_models.Elsewhere)
    with pytest.warns(PipefitWarning, match=r"not compared .*no kernel for the CPU"):
        Trainer(task, planned(task))


@pytest.mark.parametrize("numbers", [True, pytest.param(False, marks=pytest.mark.gallery)])
def test_workers_refuse_a_chain_that_forgets(numbers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 0 compares while the others wait; the parent raises the difference. Turned off, all train."""
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 0.1)  # for other failures, which must not occur
    factory = partial(task_of, untraceable_models.Remembering)
    run = partial(train, factory, planned(factory(), 2), steps=1, numbers=numbers)
    if not numbers:
        assert len(run()[0]) == 1
        return
    with pytest.raises(UsageError, match="loss of microbatch 2"):
        run()


def test_a_worker_that_does_not_compare_tells_its_parent() -> None:
    """A worker that skips the comparison reports it to its parent, which warns."""
    factory = partial(task_of, untraceable_models.Elsewhere)
    with pytest.warns(PipefitWarning, match=r"not compared .*no kernel for the CPU"):
        train(factory, planned(factory(), 2), steps=1)


# -------------------------------------------------------------------- its cost


def test_the_memory_that_is_asked_for_is_three_times_the_module_and_its_activations() -> None:
    """The estimated memory is three times the module plus its activations, for a chain of two linear layers."""
    task = task_of(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)))
    found = host_bytes(planned(task).measurement)
    module, outputs = 4 * (6 * 6 + 6 + 3 * 6 + 3), 4 * 2 * (6 + 3)
    assert 3 * module + outputs <= found <= 3 * module + 4 * outputs


@pytest.mark.parametrize("seconds", [None, 100.0])
def test_the_time_is_guessed_from_operations_whatever_was_timed(seconds: float | None) -> None:
    """The estimated time depends on operations; GPU seconds in a profile do not count for the host."""
    measurement = planned(task_of(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)))).measurement
    kinds = tuple(replace(kind, forward=replace(kind.forward, seconds=seconds)) for kind in measurement.kinds)
    assert host_seconds(replace(measurement, kinds=kinds)) == host_seconds(measurement) < 1e-3


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"meminfo": "MemTotal: 9 kB\nMemAvailable:    8 kB\n"}, 8192),
        ({"meminfo": "MemAvailable: 8 kB\n", "memory.max": "max\n", "memory.current": "5\n"}, 8192),
        ({"meminfo": "MemAvailable: 8 kB\n", "memory.max": "5000\n", "memory.current": "3000\n"}, 2000),
        (
            {
                "meminfo": "MemAvailable: 8 kB\n",
                "memory.max": "5000",
                "memory.current": "3000",
                "memory.stat": "anon 5\ninactive_file 1000\n",
            },
            3000,
        ),
    ],
)
def test_free_memory_is_the_machines_and_the_containers(
    files: dict[str, str], free: int, tmp_path: Path
) -> None:
    """Free memory is the smaller of the machine's and the container's, whose cached files are reclaimable."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert free_bytes(tmp_path / "meminfo", tmp_path) == free


def test_free_memory_is_known_everywhere(tmp_path: Path) -> None:
    """Free memory has a fallback if the system does not report it: half of the machine's; here it is
    reported.
    """
    assert free_bytes(tmp_path / "none", tmp_path) > 1 << 20
    assert free_bytes() > 1 << 20
