"""Steps of Hugging Face's Trainer and of Lightning's, for a dry run: what each of them holds, in its order.

Hugging Face's loads all microbatches of a step and one batch ahead, on the host, which count if the device is
the host. Lightning's loads one microbatch at a time.
"""

from __future__ import annotations

import math
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipefit.errors import UsageError
from pipefit.schema.profile import Target
from pipefit.texts import kind_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStep:
    """A trainer's step, the batches that it holds, its optimizers, and other objects that it changes."""

    step: Any
    batch: Any
    optimizers: tuple[Optimizer, ...]
    state: tuple[Any, ...]


def trainer_step(
    trainer: Any, module: nn.Module, batch: Any, optimizers: Sequence[Optimizer], target: Target
) -> TrainerStep:
    """Return the step of a trainer.

    Args:
        trainer: a Trainer of transformers (or TRL), or of Lightning.
        batch: a batch of its loader; None for the first ones of a Hugging Face Trainer's own loader.
        optimizers: none for those that the trainer makes.

    Raises:
        UsageError: it is another object, or its step cannot run over fake tensors.
    """
    if _is_a(trainer, "transformers", "Trainer"):
        return _of_hugging_face(trainer, module, batch, optimizers, target)
    if _is_a(trainer, "lightning.pytorch", "Trainer") or _is_a(trainer, "pytorch_lightning", "Trainer"):
        return _of_lightning(trainer, module, batch, optimizers, target)
    raise UsageError(f"step is a function of a batch, or a Trainer, not {kind_of(trainer)}")


def _check_alone(ranks: int) -> None:
    """Check that a trainer trains on one rank.

    Raises:
        UsageError: it wraps or shards the model later, which its dry run would not count.
    """
    if ranks > 1:
        raise UsageError(
            f"the Trainer trains on {ranks} ranks, and wraps the model only when it starts: describe the "
            "loop as a function of a batch, "
            "with the model wrapped by DistributedDataParallel or sharded by fully_shard"
        )


def _is_a(value: Any, module: str, name: str) -> bool:
    """Return whether `value` is of a class of a package, which need not be installed."""
    package = sys.modules.get(module)
    return package is not None and isinstance(value, getattr(package, name))


# ---- Hugging Face


def _of_hugging_face(
    trainer: Any, module: nn.Module, batch: Any, optimizers: Sequence[Optimizer], target: Target
) -> TrainerStep:
    if trainer.model is not module:
        raise UsageError("the Trainer trains another model: pass its own, trainer.model")
    if trainer.args.fp16:
        raise UsageError(
            "a dry run of a Trainer in float16 is not supported: train in bf16, "
            "or describe the loop as a function"
        )
    _check_alone(trainer.args.world_size)
    settings = ("activation_checkpointing", "gradient_checkpointing")  # by versions of transformers
    for name in settings:
        if getattr(trainer.args, name, False):
            raise UsageError(
                f"the Trainer recomputes every block itself ({name}=True, TRL's default): set it to False, "
                "and the plan recomputes what the budget needs"
            )
    count = trainer.args.gradient_accumulation_steps
    batches = _first_batches(trainer, count) if batch is None else [deepcopy(batch) for _ in range(count)]
    if not optimizers:
        optimizers = (trainer.create_optimizer(),)
    return TrainerStep(
        step=_HuggingFaceStep(trainer, optimizers, count),
        batch=[*batches, deepcopy(batches[0])] if target == "cpu" else batches,
        optimizers=tuple(optimizers),
        state=(trainer, trainer.accelerator),
    )


def _first_batches(trainer: Any, count: int) -> list[Any]:
    """Return the first batches of a Trainer's loader; random states stay as they are."""
    numbers = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        return list(islice(trainer.get_train_dataloader(), count))
    finally:
        random.setstate(numbers[0])
        np.random.set_state(numbers[1])
        torch.set_rng_state(numbers[2])


class _HuggingFaceStep:
    """Microbatches, clipping and update in a Trainer's order; keeps the last loss, their sum and the norm."""

    def __init__(self, trainer: Any, optimizers: Sequence[Optimizer], count: int) -> None:
        self._trainer, self._optimizers, self._count = trainer, optimizers, count
        self._sum: Tensor | None = None
        self._last: Tensor | None = None
        self._norm: Tensor | None = None

    def __call__(self, batches: list[Any]) -> None:
        trainer, model = self._trainer, self._trainer.model
        samples = batches[: self._count]
        items = trainer._get_num_items_in_batch(samples, None)
        trainer.current_gradient_accumulation_steps = len(samples)
        trainer._prepare_inputs = lambda inputs: inputs  # they are on the device
        for inputs in samples:
            with self._precision():
                self._last = trainer.training_step(model, inputs, items)
            self._sum = torch.zeros_like(self._last) if self._sum is None else self._sum
            self._sum += self._last
        limit = trainer.args.max_grad_norm or math.inf  # the norm is logged in any case
        self._norm = None
        self._norm = trainer.accelerator.clip_grad_norm_(model.parameters(), limit)
        for optimizer in self._optimizers:
            optimizer.step()
        model.zero_grad()

    @contextmanager
    def _precision(self) -> Iterator[None]:
        """Let the model compute in the Trainer's precision, with float32 outputs, as accelerate lets it."""
        model, accelerator = self._trainer.model, self._trainer.accelerator
        if not accelerator.native_amp:
            yield
            return
        utils = sys.modules["accelerate.utils"]
        autocast = utils.get_mixed_precision_context_manager(True, accelerator.autocast_handler)
        attributes, before = vars(model), dict(vars(model))
        attributes["forward"] = utils.convert_outputs_to_fp32(autocast(model.forward))
        try:
            yield
        finally:
            del attributes["forward"]
            if "forward" in before:
                attributes["forward"] = before["forward"]


# ---- Lightning


def _of_lightning(
    trainer: Any, module: Any, batch: Any, optimizers: Sequence[Optimizer], target: Target
) -> TrainerStep:
    if not hasattr(module, "training_step"):
        raise UsageError("Lightning's Trainer trains a LightningModule: pass that one")
    _check_alone(trainer.world_size)
    if not module.automatic_optimization:
        raise UsageError(
            "Lightning's Trainer does not define the step of manual optimization: "
            "describe it as a function of a batch"
        )
    if batch is None:
        raise UsageError("pass a batch: Lightning's Trainer makes its loader only in fit")
    if not optimizers:
        optimizers = _configured(module)
    if len(optimizers) != 1:
        raise UsageError(f"automatic optimization takes one optimizer, not {len(optimizers)}")
    count = trainer.accumulate_grad_batches
    return TrainerStep(
        step=_LightningStep(trainer, module, optimizers[0], count),
        batch=batch,
        optimizers=tuple(optimizers),
        state=(),
    )


def _configured(module: Any) -> list[Optimizer]:
    """Return the optimizers that a LightningModule configures, in any of its forms."""
    configured = module.configure_optimizers()
    if isinstance(configured, tuple) and isinstance(configured[0], (list, tuple)):
        configured = configured[0]  # beside it the schedulers
    several = configured if isinstance(configured, (list, tuple)) else [configured]
    return [one["optimizer"] if isinstance(one, dict) else one for one in several]


class _LightningStep:
    """Microbatches inside the optimizer's closure: gradients are freed between forward and backward."""

    def __init__(self, trainer: Any, module: Any, optimizer: Optimizer, count: int) -> None:
        self._trainer, self._module, self._optimizer, self._count = trainer, module, optimizer, count

    def __call__(self, batch: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*self.trainer.*")  # `log` has no trainer to log to
            for index in range(self._count - 1):
                self._closure(batch, index)
            self._optimizer.step(lambda: self._last(batch))  # type: ignore[arg-type, return-value]

    def _last(self, batch: Any) -> Tensor:
        """Run the last microbatch, and clip."""
        loss = self._closure(batch, self._count - 1)
        limit, plugin = self._trainer.gradient_clip_val, self._trainer.precision_plugin
        if limit:
            algorithm = self._trainer.gradient_clip_algorithm
            plugin.clip_gradients(self._optimizer, limit, *([algorithm] if algorithm else []))
        return loss

    def _closure(self, batch: Any, index: int) -> Tensor:
        """Run a microbatch; return its loss for the logs."""
        loss = self._loss(batch, index)
        logged = loss.detach().clone()
        if index == 0:
            self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        return logged

    def _loss(self, batch: Any, index: int) -> Tensor:
        with self._trainer.precision_plugin.train_step_context():
            output = self._module.training_step(batch, index)
        loss: Tensor = output["loss"] if isinstance(output, dict) else output
        return loss / self._count
