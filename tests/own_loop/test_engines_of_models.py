"""Twelve models under each engine: the certified peak is the allocator's, and the numbers are the engine's own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import record_function
from torch.utils import _pytree as pytree

from pipefit.own_loop import Handle, LoopPlan, apply
from support.own_loop_models import MODELS, Model
from support.own_loop_oracle import peaks_of

NAMES = (
    "mlp",
    "mlp, dropout",
    "frozen half",
    "language",
    "language, dropout",
    "encoder",
    "encoder, norm first",
    "batch norm",
    "group norm",
    "u-net",
    "pairs",
    "custom function",
)
BY_NAME = {model.name: model for model in MODELS}
STEPS = 3

pytestmark = [pytest.mark.gallery, pytest.mark.usefixtures("one_thread")]


class WithLoss(nn.Module):
    """A model that takes a dictionary, and returns one with its loss."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.body, self.loss = model.build(), model.loss

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        outputs = self.body(x)
        return {"loss": self.loss(outputs, y), "outputs": outputs}


Training = tuple[nn.Module, Callable[[int | None, LoopPlan | None], Handle], Callable[[], list[float]]]


def batches(model: Model) -> list[Any]:
    torch.manual_seed(2)
    return [model.batch() for _ in range(STEPS)]


def plain_loop(model: Model, wrap: Callable[[nn.Module], nn.Module], backward: Any = None) -> Training:
    """Return a plain loop; one that is described to `apply` as a function if it has its own `backward`."""
    torch.manual_seed(0)
    module = wrap(model.build())
    optimizer = model.optimizer([p for p in module.parameters() if p.requires_grad])
    every = batches(model)

    def plan(budget: int | None, saved: LoopPlan | None) -> Handle:
        if saved is not None:
            return apply(module, plan=saved)
        described: dict[str, Any] = {"loss": model.loss} if backward is None else {"step": step}
        return apply(module, budget=budget, batch=every[0], optimizer=optimizer, **described)

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = model.loss(module(batch[0]), batch[1])
        backward(loss)
        optimizer.step()
        return loss

    def train() -> list[float]:
        losses = []
        torch.manual_seed(3)
        for inputs, targets in every:
            with record_function("training"):
                if backward is not None:
                    losses.append(step((inputs, targets)).item())  # the loss is not kept
                else:
                    optimizer.zero_grad()
                    outputs = module(inputs)
                    loss = model.loss(outputs, targets)
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
        return losses

    return module, plan, train


def of_ddp(model: Model, folder: Path) -> Training:
    return plain_loop(model, nn.parallel.DistributedDataParallel)


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


def of_fsdp(model: Model, folder: Path) -> Training:

    def wrap(module: nn.Module) -> nn.Module:
        parts = [*module.children()]
        parts = [one for part in parts for one in (part if isinstance(part, nn.ModuleList) else [part])]
        for part in parts:
            if any(True for _ in part.parameters()):
                fully_shard(part, mesh=mesh())
        return fully_shard(module, mesh=mesh())

    return plain_loop(model, wrap)


@cache
def accelerator() -> Any:
    return pytest.importorskip("accelerate").Accelerator(cpu=True)


def of_accelerate(model: Model, folder: Path) -> Training:
    return plain_loop(model, accelerator().prepare, accelerator().backward)


def of_trainer(model: Model, folder: Path) -> Training:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    module = WithLoss(model)
    every = [dict(zip("xy", one, strict=True)) for one in batches(model)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        max_steps=STEPS,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = transformers.Trainer(
        module,
        arguments,
        train_dataset=list(range(STEPS)),
        data_collator=lambda rows: pytree.tree_map_only(Tensor, Tensor.clone, every[rows[0]]),
    )

    def plan(budget: int | None, saved: LoopPlan | None) -> Handle:
        return apply(module, plan=saved) if saved is not None else apply(module, budget=budget, step=trainer)

    def train() -> list[float]:
        with record_function("training"):
            trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    return module, plan, train


def of_lightning(model: Model, folder: Path) -> Training:
    lightning = pytest.importorskip("lightning.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body, self.losses = model.build(), []

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = model.loss(self.body(batch[0]), batch[1])
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return model.optimizer([p for p in self.parameters() if p.requires_grad])

    torch.manual_seed(0)
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    every = batches(model)

    def plan(budget: int | None, saved: LoopPlan | None) -> Handle:
        if saved is not None:
            return apply(module, plan=saved)
        return apply(module, budget=budget, batch=every[0], step=trainer)

    def train() -> list[float]:
        module.losses.clear()
        torch.manual_seed(3)
        loader = torch.utils.data.DataLoader(
            range(STEPS), batch_size=1, collate_fn=lambda rows: pytree.tree_map(Tensor.clone, every[rows[0]])
        )
        with record_function("training"):
            trainer.fit(module, loader)
        return module.losses

    return module, plan, train


ENGINES = {make.__name__: make for make in (of_ddp, of_fsdp, of_accelerate, of_trainer, of_lightning)}


def measured(make: Any, model: Model, folder: Path, saved: LoopPlan | None) -> tuple[int, list[Any]]:
    """Train from the parameters on; return the peak, and losses and parameters."""
    result: list[Any] = []

    def run() -> None:
        module, plan, train = make(model, folder)
        if saved is not None:
            plan(None, saved)
        result.append(train())
        result.extend(getattr(p, "_local_tensor", p).detach() for p in module.parameters())

    # The batches of which a trainer's loader makes copies do not count, nor do those of other steps
    others = STEPS if make in (of_trainer, of_lightning) else STEPS - 1
    waiting = others * sum(t.untyped_storage().nbytes() for t in pytree.tree_leaves(batches(model)[0]))
    return max(peaks_of(run, 0, "training")) - waiting, result


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_an_engine_keeps_the_budget_of_a_model(engine: str, name: str, tmp_path: Path) -> None:
    """The peak of the whole training is the certified one, and losses and parameters are the engine's own."""
    make, model = ENGINES[engine], BY_NAME[name]
    distributed = engine in ("of_ddp", "of_fsdp")
    if distributed:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _, plan, _ = make(model, tmp_path)
        with plan(1 << 40, None) as handle:
            most = max(handle.plan.plain_bytes)
        _, plan, _ = make(model, tmp_path)
        with plan(int(most * 0.8), None) as handle:
            saved = handle.plan
        _, plain = measured(make, model, tmp_path, None)
        peak, planned = measured(make, model, tmp_path, saved)
    finally:
        if distributed:
            dist.destroy_process_group()
            mesh.cache_clear()
    assert saved.decisions
    certified = max(saved.peak_bytes)
    assert peak <= certified <= saved.budget_bytes
    assert peak == certified
    assert plain[0] == planned[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1:], planned[1:], strict=True))
