"""Features of a training loop, each against a plain loop over the same microbatches."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.models import build
from pipefit.runtime import Trainer
from pipefit.runtime.hardware import Hardware
from pipefit.runtime.options import JsonLines, StepReport
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from support.allocator_events import measured_peaks
from support.known_profiles import profile
from support.small_tasks import plan_of

MICROBATCH = 4


# The same reduction order everywhere
pytestmark = pytest.mark.usefixtures("one_thread")


def network() -> nn.Sequential:
    """Build linear layers and a batch norm, without dropout."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(12, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    )


def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random regression data."""
    return torch.randn(samples, 12), torch.randn(samples, 4)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of every test."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def make(
    split: tuple[int, ...] = (2, 2, 2), clip_norm: float | None = None, **settings: Any
) -> tuple[Task, Plan]:
    """Return a task and a plan for batches of eight in two microbatches."""
    task = Task(network, batch=batch, loss=F.mse_loss, optimizer=sgd, **settings)
    costs = profile(task, microbatch_size=MICROBATCH)
    edges = [sum(split[:k]) for k in range(len(split) + 1)]
    stages = tuple(Stage(start=a, stop=b, grid=Grid.of(k)) for k, (a, b) in enumerate(pairwise(edges)))
    training = Training(
        batch_size=8, microbatches=2, clip_norm=clip_norm, precision=costs.assumptions.precision
    )
    return task, Plan(
        profile=costs, cluster=Cluster.emulated((len(split), 1 << 30)), training=training, stages=stages
    )


class Plain:
    """The plain loop: torch's own classes, in the order of torch's documentation."""

    def __init__(
        self,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda m: sgd(m.parameters()),
    ) -> None:
        self.module, self.clip_norm, self.autocast = network(), clip_norm, autocast
        self.optimizer = optimizer(self.module)
        self.scaler = torch.amp.GradScaler("cpu", enabled=autocast is torch.float16)
        self.skipped = False

    def backward(self, given: tuple[torch.Tensor, torch.Tensor], share: float = 1.0) -> float:
        """Run forward and backward of all microbatches; return the mean loss."""
        total, samples = 0.0, len(given[0])
        for x, y in zip(given[0].split(MICROBATCH), given[1].split(MICROBATCH), strict=True):
            with torch.autocast("cpu", self.autocast or torch.bfloat16, enabled=self.autocast is not None):
                loss = F.mse_loss(self.module(x), y)
            self.scaler.scale(loss * (len(x) / samples * share)).backward()
            total += loss.item() * len(x) / samples
        return total

    def update(self) -> None:
        """Unscale, clip, step."""
        before = self.scaler.get_scale()
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.skipped = self.scaler.get_scale() < before


def data(seed: int, samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return batch number `seed`."""
    torch.manual_seed(seed)
    return batch(samples)


def same_state(trainer: Trainer, plain: Plain, tolerance: float = 0.0) -> bool:
    """Assert that parameters and buffers equal the plain module's, under its names."""
    ours, theirs = trainer.state_dict(), plain.module.state_dict()
    return ours.keys() == theirs.keys() and all(
        torch.allclose(ours[name], tensor, rtol=0, atol=tolerance) for name, tensor in theirs.items()
    )


def test_a_trainer_is_a_line() -> None:
    """A trainer's repr is one line with its plan and its number of steps, for the end of a notebook cell."""
    task, plan = make()
    trainer = Trainer(task, plan)
    whole = "<Trainer: model: 6 layers in 3 stages on emulated:3x1GiB: 3 x emulated-cpu 1.00 GiB, after "
    assert repr(trainer) == f"{whole}0 steps>"
    trainer.step(data(0))
    assert repr(trainer) == f"{whole}1 step>"


def test_a_smaller_last_batch_counts_every_sample_once() -> None:
    """Batches of 8, 6 (4 + 2) and 3 train as in a plain loop that weighs microbatches by their samples."""
    task, plan = make()
    trainer, plain = Trainer(task, plan), Plain()
    for step, samples in enumerate((8, 6, 3, 8)):
        assert trainer.step(data(step, samples)) == pytest.approx(
            plain.backward(data(step, samples)), abs=1e-6
        )
        plain.update()
    assert same_state(trainer, plain, 1e-7)


@pytest.mark.parametrize(
    ("split", "precision", "tolerance"),
    [((6,), None, 1e-6), ((1, 5), None, 1e-6), ((2, 2, 2), "float64", 1e-14)],
)
def test_gradients_are_clipped_by_their_global_norm(
    split: tuple[int, ...], precision: str | None, tolerance: float
) -> None:
    """Gradients are clipped by the global norm over all stages, under any split, in double precision too."""
    task, plan = make(split, clip_norm=0.05, precision=precision)
    reports: list[StepReport] = []
    trainer, plain = Trainer(task, plan, callbacks=[reports.append]), Plain(clip_norm=0.05)
    if task.dtype is not None:
        plain.module.to(task.dtype)
    for step in range(3):
        x, y = map(task.cast, data(step))
        trainer.step((x, y))
        plain.backward((x, y))
        plain.update()
    assert same_state(trainer, plain, tolerance)
    assert all(report.gradient_norm is not None and report.gradient_norm > 0.05 for report in reports)


def test_the_split_cannot_change_the_norm() -> None:
    """The norm is summed in the order of parameter names: equal bit by bit for every split."""
    norms = set()
    for split in ((6,), (1, 5), (3, 3), (1, 2, 3)):
        reports: list[StepReport] = []
        task, plan = make(split, clip_norm=0.05)
        Trainer(task, plan, callbacks=[reports.append]).step(data(0))
        norms.add(reports[0].gradient_norm)
    assert len(norms) == 1


@pytest.mark.parametrize(
    ("precision", "dtype"), [("mixed-bfloat16", torch.bfloat16), ("mixed-float16", torch.float16)]
)
def test_mixed_precision_is_that_of_torch_amp(precision: str, dtype: torch.dtype) -> None:
    """Mixed precision has the losses and skipped steps of torch.autocast and GradScaler; an overflow in one
    stage skips the step in all.
    """
    task, plan = make(precision=precision)
    reports: list[StepReport] = []
    trainer, plain = Trainer(task, plan, callbacks=[reports.append]), Plain(autocast=dtype)
    for step in range(4):
        x, y = data(step)
        x = x * 1e4 if step == 1 else x  # overflows float16 gradients
        assert trainer.step((x, y)) == pytest.approx(plain.backward((x, y)), rel=1e-6)
        plain.update()
        assert reports[-1].skipped == plain.skipped
        assert reports[-1].loss_scale == (plain.scaler.get_scale() if plain.scaler.is_enabled() else None)
    assert [report.skipped for report in reports] == [False, dtype is torch.float16, False, False]
    assert same_state(trainer, plain, 1e-7)


def test_parameter_groups_and_schedulers() -> None:
    """Parameter groups and schedulers work: weight decay for matrices only, and a rate that halves after
    every update.
    """

    def options(name: str, parameter: nn.Parameter) -> dict[str, Any]:
        return {"weight_decay": 0.1} if name.endswith("weight") and parameter.ndim > 1 else {}

    def grouped(module: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in module.parameters() if p.ndim > 1]
        others = [p for p in module.parameters() if p.ndim <= 1]
        return sgd([{"params": matrices, "weight_decay": 0.1}, {"params": others}])

    def halve(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    task, plan = make(groups=options, scheduler=halve)
    plain = Plain(optimizer=grouped)
    scheduler, reports = halve(plain.optimizer), list[StepReport]()
    trainer = Trainer(task, plan, callbacks=[reports.append])
    for step in range(3):
        trainer.step(data(step))
        plain.backward(data(step))
        plain.update()
        scheduler.step()
    assert same_state(trainer, plain)
    assert [report.learning_rate for report in reports] == [0.05, 0.025, 0.0125]


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        (
            torch.optim.lr_scheduler.ReduceLROnPlateau,
            "ReduceLROnPlateau.* stepped after every update, without arg",
        ),
        (lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, [float, float]), "not a list"),
        (lambda optimizer: None, "None.* stepped after every update"),
    ],
)
def test_schedulers_that_cannot_be_stepped_are_refused(scheduler: Any, words: str) -> None:
    """A scheduler that cannot be stepped is refused by name and with a fix in the trainer's constructor, not
    after the first update.
    """
    with pytest.raises(UsageError, match=rf"the scheduler of .*{words}"):
        Trainer(*make(scheduler=scheduler))


def test_gradients_accumulate_over_batches() -> None:
    """With accumulate=2 every second batch updates, with the mean of both."""
    task, plan = make()
    trainer, plain = Trainer(task, plan, accumulate=2), Plain()
    for step in range(4):
        assert trainer.step(data(step)) == pytest.approx(plain.backward(data(step), share=0.5), abs=1e-6)
        if step % 2:
            plain.update()
    assert same_state(trainer, plain, 1e-7)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_gradients_of_earlier_batches_are_predicted(schedule: str, microbatches: int) -> None:
    """Predicted peaks equal the allocator's events; a trainer warns of a device that has a byte less."""
    task = build("mlp", widths=(64, 64, 64, 64))
    plan = plan_of(task, (3, ...), schedule=schedule, microbatches=microbatches)
    peaks = Simulation(plan).accumulated_peaks()
    assert peaks == tuple(map(max, measured_peaks(task, plan, steps=4, accumulate=2)))
    for lack in (0, 1):
        devices = tuple(
            replace(device, memory_bytes=peak - lack)
            for device, peak in zip(plan.cluster.devices, peaks, strict=True)
        )
        tight = replace(plan, cluster=replace(plan.cluster, devices=devices))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Trainer(task, tight, accumulate=2, numbers=False)
        said = [str(one.message) for one in caught if "with accumulate=2, device 0 needs" in str(one.message)]
        assert len(said) == lack


def test_evaluation_changes_nothing() -> None:
    """Evaluation returns the loss of a batch of any size in evaluation mode; parameters, statistics and modes
    do not change.
    """
    task, plan = make()
    trainer, plain = Trainer(task, plan), Plain()
    trainer.step(data(0))
    plain.backward(data(0))
    plain.update()
    plain.module.eval()
    x, y = data(9, samples=7)
    with torch.no_grad():
        pieces = zip(x.split(MICROBATCH), y.split(MICROBATCH), strict=True)
        expected = sum(F.mse_loss(plain.module(a), b).item() * len(a) / 7 for a, b in pieces)
    assert trainer.evaluate((x, y)) == pytest.approx(expected, abs=1e-6)
    assert same_state(trainer, plain)
    assert all(layer.module.training for stage in trainer.stages for layer in stage.layers)


def test_a_part_kept_in_evaluation_stays_there() -> None:
    """A batch norm in evaluation mode keeps its mode and statistics through training."""

    def frozen() -> nn.Sequential:
        module = network()
        module[2].eval()
        return module

    task = Task(frozen, batch=batch, loss=F.mse_loss, optimizer=sgd)
    costs = profile(task, microbatch_size=MICROBATCH)
    stages = (Stage(start=0, stop=2, grid=Grid.of(0)), Stage(start=2, stop=6, grid=Grid.of(1)))
    plan = Plan(
        profile=costs,
        cluster=Cluster.emulated((2, 1 << 30)),
        training=Training(batch_size=8, microbatches=2),
        stages=stages,
    )
    trainer = Trainer(task, plan)
    trainer.step(data(0))
    assert trainer.state_dict()["2.running_mean"].eq(0).all()


def test_stages_run_on_the_devices_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, GPU number `n` runs the stages that the plan puts on device `n`, in any order."""
    asked: list[int] = []

    def note(_: Hardware, number: int) -> torch.device:
        asked.append(number)
        return torch.device("cpu")

    monkeypatch.setattr(Hardware, "device", note)
    task, plan = make()
    places = tuple(
        replace(stage, grid=Grid.of(device)) for stage, device in zip(plan.stages, (2, 0, 1), strict=True)
    )
    Trainer(task, replace(plan, stages=places))
    assert asked == [2, 0, 1]


def test_metrics_go_to_a_file_line_by_line(tmp_path: Path) -> None:
    """Metrics are one JSON object a step with loss, speed and each device's memory."""
    task, plan = make()
    trainer = Trainer(task, plan, callbacks=[JsonLines(tmp_path / "metrics.jsonl")])
    losses = [trainer.step(data(step)) for step in range(3)]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == losses
    assert all(row["samples_per_second"] > 0 and set(row["peak_bytes"]) == {"0", "1", "2"} for row in rows)


def test_the_state_loads_into_the_original_module() -> None:
    """state_dict() has the names of the module that the task builds."""
    task, plan = make()
    trainer = Trainer(task, plan)
    trainer.step(data(0))
    module = network()
    module.load_state_dict(trainer.state_dict())
    assert torch.equal(module[5].weight, trainer.state_dict()["5.weight"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((torch.randn(9, 12), torch.randn(9, 4)), "9 samples"),
        ((torch.randn(8, 12), torch.randn(7, 4)), "the same number"),
        ((torch.randn(0, 12), torch.randn(0, 4)), "0 samples"),
    ],
)
def test_batches_that_cannot_be(given: tuple[torch.Tensor, torch.Tensor], words: str) -> None:
    """Batches with too many samples, none, or different numbers are refused in one sentence."""
    task, plan = make()
    with pytest.raises(UsageError, match=words):
        Trainer(task, plan).step(given)


def test_tensorboard_gets_losses_and_memory(tmp_path: Path) -> None:
    """With the extra installed, every number of a report becomes a scalar in TensorBoard."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from pipefit.runtime.options import TensorBoard

    task, plan = make()
    loss = Trainer(task, plan, callbacks=[TensorBoard(tmp_path)]).step(data(0))
    written = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert written.Scalars("train/loss")[0].value == pytest.approx(loss)
    assert {"memory/device0", "memory/device2", "train/samples_per_second"} <= set(written.Tags()["scalars"])
