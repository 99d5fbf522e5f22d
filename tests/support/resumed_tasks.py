"""Small tasks for everything that training depends on, to train with and without a break."""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from pipefit.capture import Task
from pipefit.lowering.passes.recomputation import Recompute, recompute_decisions
from pipefit.runtime import Trainer
from pipefit.runtime.checkpoint import background_saver, checkpointing
from pipefit.runtime.comm.transport import Network
from pipefit.runtime.engine import execution
from pipefit.runtime.engine.runner import DeviceRunner
from pipefit.schema.actions import SENDS, Action, Message
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.trace import Stream
from pipefit.schema.training import Training
from support import counted_sleep
from support.full_disk import fill_disk
from support.known_profiles import profile
from support.small_tasks import task_of

SYNCHRONOUS = ("gpipe", "1f1b", "torchgpipe", "eager-1f1b")
ENDLESS = ("pipedream", "pipedream-2bw")
STEPS, SAVED = 6, 3  # steps of a training, and those before its break
ADAMW = partial(torch.optim.AdamW, lr=0.01)


class Remembering(nn.Module):
    """A moving average of all inputs, in a buffer outside the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x + self.average.clone()


class Counting(torch.optim.Optimizer):
    """Plain descent with a rate that falls with the number of updates, kept as a Python number."""

    def __init__(self, groups: Any, lr: float = 0.1) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kept = self.state[parameter]
                    kept["updates"] = kept.get("updates", 0) + 1
                    parameter.add_(parameter.grad, alpha=-group["lr"] / kept["updates"])


def layers(*extra: Callable[[], nn.Module]) -> list[nn.Module]:
    """Build four linear layers with a module between the second and the third."""
    middle = [make() for make in extra] or [nn.Tanh()]
    return [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), *middle, nn.Linear(16, 16), nn.Linear(16, 4)]


def tied() -> list[nn.Module]:
    """Build six layers; the first and the last share a weight."""
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    last.weight = first.weight
    return [first, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), last]


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    """Build a scheduler that changes both the rate and the momentum of each group."""
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=100)


def several(optimizer: torch.optim.Optimizer) -> Any:
    """Build a warm-up, then milestones, which are counted by number."""
    warm, later = lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.MultiStepLR(optimizer, [1, 2])
    return lr_scheduler.SequentialLR(optimizer, [warm, later], milestones=[2])


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One dependency of training: its task and settings. `sizes` are the samples of every batch."""

    task: Callable[[], Task]
    training: dict[str, Any] = field(default_factory=dict)
    recompute: Recompute = "never"
    accumulate: int = 1
    sizes: tuple[int, ...] = (8,) * STEPS
    endless: bool = True  # whether schedules without end take it


def _task(*extra: Callable[[], nn.Module], **settings: Any) -> Callable[[], Task]:
    optimizer = settings.pop("optimizer", ADAMW)
    return lambda: replace(task_of(lambda: layers(*extra), optimizer=optimizer), **settings)


def _decayed(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    return {"weight_decay": 0.0, "lr": 0.02} if parameter.ndim == 1 else {}


FEATURES: dict[str, Feature] = {
    "adamw": Feature(task=_task()),
    "momentum": Feature(task=_task(optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))),
    "adagrad": Feature(task=_task(optimizer=partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1))),
    "numbers": Feature(task=_task(optimizer=Counting)),
    "dropout": Feature(task=_task(lambda: nn.Dropout(0.3))),
    "norm": Feature(task=_task(lambda: nn.BatchNorm1d(16))),
    "held": Feature(task=_task(Remembering)),
    "groups": Feature(task=_task(groups=_decayed, scheduler=lambda o: lr_scheduler.CosineAnnealingLR(o, 9))),
    "cycle": Feature(task=_task(optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9), scheduler=one_cycle)),
    "several": Feature(task=_task(scheduler=several)),
    "clipping": Feature(task=_task(), training={"clip_norm": 0.05}, endless=False),
    "scaling": Feature(task=_task(precision="mixed-float16"), training={"precision": "mixed-float16"}, endless=False),
    "masters": Feature(task=_task(precision="master-bfloat16"), training={"precision": "master-bfloat16"}),
    "accumulation": Feature(task=_task(lambda: nn.Dropout(0.3)), accumulate=SAVED, endless=False),
    "smaller": Feature(task=_task(lambda: nn.Dropout(0.3)), sizes=(8, 8, 5, 8, 8, 3), endless=False),
    "recomputed": Feature(task=_task(lambda: nn.Dropout(0.3)), recompute="always"),
}  # fmt: skip

_PROFILES: dict[str, ModelProfile] = {}


def plan_for(name: str, schedule: str, split: tuple[int, ...], *, memory_bytes: int = 1 << 30) -> Plan:
    """Return a plan for a feature's task in four microbatches of two, with a device for every stage."""
    feature, cuts = FEATURES[name], [0, *itertools.accumulate(split)]
    if name not in _PROFILES:
        _PROFILES[name] = profile(feature.task(), microbatch_size=2, threads=torch.get_num_threads())
    stages = tuple(
        Stage(start=start, stop=stop, grid=Grid.of(number))
        for number, (start, stop) in enumerate(itertools.pairwise(cuts))
    )
    return Plan(
        profile=_PROFILES[name],
        cluster=Cluster.emulated((len(split), memory_bytes)),
        training=Training(batch_size=8, microbatches=4, schedule=schedule, **feature.training),
        stages=stages,
        decisions=recompute_decisions(stages, _PROFILES[name].edges, feature.recompute, schedule, 4),
    )


def batches_of(name: str) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of a feature's training."""
    torch.manual_seed(11)
    batches = [FEATURES[name].task().batch(size) for size in FEATURES[name].sizes]
    if name == "scaling":  # gradients of the second step overflow
        batches[1] = batches[1][0], batches[1][1] * 1e4
    return batches


def trainer_for(name: str, plan: Plan, seed: int = 3) -> Trainer:
    """Return a trainer of a feature's task."""
    return Trainer(
        FEATURES[name].task(), plan, seed=seed, accumulate=FEATURES[name].accumulate, numbers=False
    )


def kept(trainer: Trainer) -> dict[str, Tensor]:
    """Return copies of all tensors that training has changed."""
    return {name: tensor.clone() for name, tensor in trainer.state_dict(optimizer=True).items()}


def broken(
    name: str, before: Plan, after: Plan, directory: Path
) -> tuple[list[float], dict[str, Tensor], Trainer]:
    """Train with a break: half of the steps under one plan, and the rest by a new trainer under another
    plan.
    """
    batches, first = batches_of(name), trainer_for(name, before)
    losses = [first.step(batch) for batch in batches[:SAVED]]
    first.save(directory)
    losses += first.finish()
    second = trainer_for(name, after, seed=99)
    assert second.load(directory) == SAVED
    losses += [second.step(batch) for batch in batches[SAVED:]]
    losses += second.finish()
    return [loss for loss in losses if loss == loss], kept(second), second


def unbroken(
    name: str, plan: Plan, directory: Path | None = None
) -> tuple[list[float], dict[str, Tensor], Trainer]:
    """Train the same without a break; save at the same step if `directory` is given."""
    trainer, losses = trainer_for(name, plan), []
    for step, batch in enumerate(batches_of(name)):
        losses.append(trainer.step(batch))
        if step + 1 == SAVED and directory is not None:
            trainer.save(directory)
    losses += trainer.finish()
    return [loss for loss in losses if loss == loss], kept(trainer), trainer


# -------------------------------------------------------------------- tasks that workers can build

SEED = 1000  # for trainings by workers: a batch can tell its step from the seed before it


def named(name: str) -> Task:
    """Return a feature's task."""
    return FEATURES[name].task()


def undisturbed(steps: int, seed: int = SEED) -> list[float]:
    """Return the losses of a training in one process without checkpoints."""
    trainer = Trainer(named("dropout"), plan_for("dropout", "1f1b", (3, 3)), seed=seed)
    losses = []
    for step in range(steps):
        torch.manual_seed(seed + step)
        losses.append(trainer.step(trainer.task.batch(8)))
    return losses


def killed(worker: int, step: int) -> Task:
    """Return a task with dropout; one worker is killed as it makes the batch of a step."""

    def batch(size: int) -> tuple[Tensor, Tensor]:
        if mp.current_process().name == f"pipefit-worker-{worker}" and torch.initial_seed() == SEED + step:
            os.kill(os.getpid(), signal.SIGKILL)
        return FEATURES["dropout"].task().batch(size)

    return replace(FEATURES["dropout"].task(), batch=batch)


def patient(seconds: float) -> Task:
    """Return a task with dropout that makes every batch slowly."""

    def batch(size: int) -> tuple[Tensor, Tensor]:
        time.sleep(seconds)
        return FEATURES["dropout"].task().batch(size)

    return replace(FEATURES["dropout"].task(), batch=batch)


def poisoned(step: int) -> Task:
    """Return a task with dropout; the batch of one step contains nan."""

    def batch(size: int) -> tuple[Tensor, Tensor]:
        inputs, targets = FEATURES["dropout"].task().batch(size)
        return inputs * (float("nan") if torch.initial_seed() == SEED + step else 1), targets

    return replace(FEATURES["dropout"].task(), batch=batch)


def mortal(folder: str, name: str = "dropout", seed: int = SEED) -> Task:
    """Return a feature's task whose workers die once for each file `WORKER-STEP-ACTION` in `folder`. They
    wait before the batch of a step while a file `wait-STEP` exists, and leave `at-STEP` there.
    """
    worker = mp.current_process().name.rpartition("-")[2]
    deaths = {name for name in os.listdir(folder) if name.startswith(f"{worker}-")}
    step, original = 0, DeviceRunner._timed

    def batch(size: int) -> tuple[Tensor, Tensor]:
        nonlocal step
        step = torch.initial_seed() - seed
        if (wait := Path(folder, f"wait-{step}")).exists():
            Path(folder, f"at-{step}").touch()
            while wait.exists():
                time.sleep(0.02)
        return FEATURES[name].task().batch(size)

    def timed(self: DeviceRunner, done: Action, text: str, stream: Stream) -> None:
        if (name := f"{worker}-{step}-{text}") in deaths:
            Path(folder, name).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, done, text, stream)

    if deaths:
        mock.patch.object(DeviceRunner, "_timed", timed).start()
    return replace(FEATURES[name].task(), batch=batch)


def leaving(folder: str, seed: int = SEED, left: str = "a fork") -> Task:
    """Return the task of `mortal` whose workers leave a process that outlives them, and whose number is a
    file `left-PID` in `folder`.
    """
    if mp.current_process().name.startswith("pipefit-worker"):
        if left == "a program":
            pid = subprocess.Popen(["sleep", "300"], close_fds=False).pid
        elif not (pid := os.fork()):
            time.sleep(300)
            os._exit(0)
        Path(folder, f"left-{pid}").touch()
    return mortal(folder, seed=seed)


def elsewhere(name: str) -> Task:
    """Return a feature's task that changes its workers' working directory, as some configuration tools do."""
    if mp.current_process().name.startswith("pipefit-worker"):
        os.chdir("/")
    return FEATURES[name].task()


def faulty(fault: str, place: str, worker: int, step: int, once: str = "") -> Task:
    """Return a task with dropout and a fault in one worker: at its `start`, or in a step, at `batch` or an
    action, at its `end`, during the exchange of losses, during the `save` after a step, or during `finish`;
    with `once` only if that file exists, which is then removed.
    """
    here, now, original = mp.current_process().name == f"pipefit-worker-{worker}", -1, DeviceRunner._timed
    here = here and (not once or Path(once).exists())

    def at(where: str) -> None:
        if here and place == where and (now == step or where in ("start", "finish")):
            if once:
                Path(once).unlink()
            happen(fault)

    def before(where: str, holder: Any, name: str) -> None:
        usual = getattr(holder, name)

        def patched(*arguments: Any, **options: Any) -> Any:
            at(where)
            return usual(*arguments, **options)

        mock.patch.object(holder, name, patched).start()

    def batch(size: int) -> tuple[Tensor, Tensor]:
        nonlocal now
        now = torch.initial_seed() - SEED
        at("batch")
        return FEATURES["dropout"].task().batch(size)

    def timed(self: DeviceRunner, done: Action, text: str, stream: Stream) -> None:
        at(text)
        original(self, done, text, stream)

    at("start")
    if here:
        mock.patch.object(DeviceRunner, "_timed", timed).start()
        before("save", background_saver, "copied")
        before("end", execution, "tell")
        before("finish", Trainer, "finish")
    return replace(FEATURES["dropout"].task(), batch=batch)


def slow_link(worker: int, message: str, step: int, arrives: str) -> Task:
    """Return a task with dropout; one link delivers the message of a step when a file appears."""
    now, original, sender = -1, Network.start, ThreadPoolExecutor(1)

    def batch(size: int) -> tuple[Tensor, Tensor]:
        nonlocal now
        now = torch.initial_seed() - SEED
        return FEATURES["dropout"].task().batch(size)

    def send(network: Network, action: Action, tensors: list[Tensor], to: Message) -> None:
        if (str(action), now) == (message, step):
            counted_sleep.sleep_until(Path(arrives).exists)
        network.join(action.join, original(network, action, tensors, to))

    def start(self: Network, action: Action, tensors: list[Tensor], to: Message) -> Any:
        if action.kind not in SENDS:
            return original(self, action, tensors, to)
        sending = sender.submit(send, self, action, tensors, to)
        return [mock.Mock(wait=lambda timeout: sending.result())]

    if mp.current_process().name == f"pipefit-worker-{worker}":
        mock.patch.object(Network, "start", start).start()
    return replace(FEATURES["dropout"].task(), batch=batch)


HAPPENED = "PIPEFIT_TEST_HAPPENED"  # of the environment: a file that is made as a fault happens


def happen(fault: str) -> None:
    """Trigger a fault of this process."""
    if HAPPENED in os.environ:
        Path(os.environ[HAPPENED]).touch()
    match fault:
        case "raises":
            raise ValueError("enough")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stopped":
            counted_sleep.stop()
        case "ends":
            os._exit(3)


def limited(worker: int, nbytes: int) -> Task:
    """Return a task with dropout; one worker cannot write files beyond this many bytes."""
    if mp.current_process().name == f"pipefit-worker-{worker}":
        fill_disk(nbytes)
    return FEATURES["dropout"].task()


def limited_all(nbytes: int) -> Task:
    """Return a task with dropout; no worker can write files beyond this many bytes."""
    if mp.current_process().name.startswith("pipefit-worker"):
        fill_disk(nbytes)
    return FEATURES["dropout"].task()


def full_for_a_while(step: int) -> Task:
    """Return a task with dropout; the disk is full for the checkpoint of one step."""
    usual = background_saver.write_shard

    def write(path: Path, *arguments: Any) -> Any:
        if path.parent.name == f"step-{step:08d}.partial":
            raise OSError(28, "No space left on device")
        return usual(path, *arguments)

    if mp.current_process().name == "pipefit-worker-0":
        mock.patch.object(background_saver, "write_shard", write).start()
    return FEATURES["dropout"].task()


def unwritable(worker: int, error: BaseException) -> Task:
    """Return a task with dropout; one worker fails with `error` on every write of its part of a
    checkpoint.
    """
    if mp.current_process().name == f"pipefit-worker-{worker}":
        mock.patch.object(background_saver, "write_shard", side_effect=error).start()
    return FEATURES["dropout"].task()


def crowded(worker: int) -> Task:
    """Return a task with dropout; one worker's host has insufficient memory for copies."""
    if mp.current_process().name == f"pipefit-worker-{worker}":
        checkpointing.free_bytes = lambda: 0
    return FEATURES["dropout"].task()


class Remembered(lr_scheduler.LRScheduler):
    """A scheduler that keeps a set."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.history = {1, 2}
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [0.1 for _ in self.optimizer.param_groups]


def remembered() -> Task:
    """Return a task whose scheduler cannot be saved in a checkpoint."""
    return replace(FEATURES["dropout"].task(), scheduler=Remembered)


def killed_while_it_writes(directory: Path) -> None:
    """Save one checkpoint; the process is killed after half of a shard of the next one."""

    def half(path: Path, *arguments: Any) -> Any:
        path.write_bytes(b"half of it")
        os.kill(os.getpid(), signal.SIGKILL)

    trainer, batches = trainer_for("dropout", plan_for("dropout", "1f1b", (3, 3))), batches_of("dropout")
    trainer.step(batches[0])
    trainer.save(directory, background=False)
    background_saver.write_shard = half
    trainer.step(batches[1])
    trainer.save(directory)
    trainer.finish()
