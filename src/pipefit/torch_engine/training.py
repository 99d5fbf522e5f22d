"""`pipeline`: a plan trained by `torch.distributed.pipelining`, in each of its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from pipefit.capture import Task, Values, pair, recording, refuse_gradients
from pipefit.capture.sample import sample
from pipefit.errors import UsageError
from pipefit.measure import Kernels
from pipefit.own_loop import HostTensors
from pipefit.runtime import (
    Hardware,
    MasterWeights,
    Together,
    check_casts,
    check_model,
    cut_batch,
    joins_workers,
    start_of,
    trained_sources,
)
from pipefit.schema.plan import Plan
from pipefit.schema.trace import Category
from pipefit.schema.validation import instance
from pipefit.texts import counted
from pipefit.torch_engine.order import check_plan
from pipefit.torch_engine.rank import EngineRank, Groups
from pipefit.torch_internals.pipelining import join_alone


class Pipeline:
    """The stages of this worker on torch's engine. Made by `pipeline`."""

    def __init__(self, task: Task, plan: Plan, *, seed: int = 0, timeout_seconds: float = 60.0) -> None:
        self.task, self.plan = instance("task", task, Task), instance("plan", plan, Plan)
        check_plan(plan)
        hardware = Hardware(plan)
        _join(hardware, timeout_seconds)
        number = plan.workers[dist.get_rank()]
        self.device = hardware.device(number)
        check_casts(plan, task)
        with recording("training"):
            first = sample(task, plan.training.microbatch_size)
            trained, chain = start_of(task, plan, seed, first, lambda waits: None)
        check_model(plan, task, chain)
        self._rank = EngineRank(
            task,
            plan,
            trained_sources(plan, trained, chain, Together(plan), copies=False, held=lambda *_: None),
            number,
            device=self.device,
            groups=Groups.of(plan),
            host=HostTensors.of(self.device),
            seed=seed,
        )
        self._chain = replace(chain, layers=())  # without layers, so that other workers' layers can be freed
        self._meter = hardware.meter(number, self.device, Kernels(torch.get_num_threads()))
        if self._meter is not None:
            self._meter.tag(self._rank.held, Category.PARAMETERS)

    def __repr__(self) -> str:
        """Return one line: the plan and the worker."""
        return f"<Pipeline: {self.plan.headline}, worker {dist.get_rank()}>"

    @property
    def schedule(self) -> Any:
        """torch's schedule object."""
        return self._rank.schedule

    @property
    def stages(self) -> list[Any]:
        """The `PipelineStage`s of this worker."""
        return list(self._rank.stages)

    @property
    def optimizers(self) -> list[Optimizer | MasterWeights]:
        """The optimizers of this worker, one for each stage with trained parameters."""
        return [updates.optimizer for updates in self._rank.updates.values() if updates.optimizer is not None]

    def step(self, inputs: Any, *, target: Any = None) -> float:
        """Train one step; return the mean loss, on every worker.

        All workers pass the same batch, as large as the plan's. The task's optimizer and scheduler step after
        the schedule. torch's random generators are restored.

        Raises:
            UsageError: the batch has another number of samples than the plan's, or is unlike those that the
                model was captured with.
            OutOfMemory: an emulated device passed its cap.
        """
        with recording("training"):
            batch = pair((inputs, target), "a step takes")
            refuse_gradients(batch, self.task.name)
            devices = [self.device] if self.device.type == "cuda" else []
            with torch.random.fork_rng(devices, device_type="cuda"), self._meter or nullcontext():
                self._rank.step(lambda: self._local_batches(batch))
            return float(self._rank.mean_loss().item())

    def state_dict(self) -> dict[str, Tensor]:
        """Return parameters and buffers of this worker's stages under their names in the original module.

        The tensors are those that are trained, so `torch.distributed.checkpoint.load` restores them in place.
        """
        return {
            layer.originals[local]: tensor.detach()
            for module in self._rank.modules.values()
            for layer in module.chain_layers
            for local, tensor in layer.module.state_dict(keep_vars=True).items()
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load parameters and buffers by the names of `state_dict`; other names are ignored.

        Raises:
            UsageError: one of this worker's tensors is missing, or has another shape.
        """
        own = self.state_dict()
        for name, tensor in own.items():
            if name not in tensors or tensors[name].shape != tensor.shape:
                shape = tuple(tensors[name].shape) if name in tensors else None
                raise UsageError(
                    f"{name} of shape {tuple(tensor.shape)} is "
                    + ("missing in the loaded state" if shape is None else f"{shape} in the loaded state")
                )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])

    def _local_batches(self, batch: tuple[Any, Any]) -> tuple[Sequence[Values], Sequence[Values]]:
        """Return inputs and targets of this worker's local batches, on its device if a stage needs them."""
        given, wanted = batch
        cut = cut_batch(self.plan, self._chain.flatten(given), self._chain.flatten_targets(wanted))
        training = self.plan.training
        if sum(cut.sizes) != training.batch_size:
            raise UsageError(
                f"the batch holds {counted(sum(cut.sizes), 'sample')}, but torch's engine runs batches of exactly "
                f"{training.batch_size}: drop the last batch of an epoch (drop_last=True)"
            )
        return local_batches(self.plan, self._rank, cut.inputs, cut.targets, self.device)


def local_batches(
    plan: Plan,
    rank: EngineRank,
    inputs: Sequence[Sequence[Tensor]],
    targets: Sequence[Sequence[Tensor]],
    device: torch.device,
) -> tuple[Sequence[Values], Sequence[Values]]:
    """Return the rank's rows of every microbatch as copies on the device; none for stages that need none."""
    first, last = plan.measured(0), plan.measured(len(plan.stages) - 1)
    samples = first.microbatch_size
    rows = slice(rank.replica * samples, (rank.replica + 1) * samples)
    values = first.costs[0].inputs
    wanted = last.loss.inputs[len(last.costs[-1].outputs) :]

    def copies(tensors: Sequence[Tensor], dtypes: Sequence[str]) -> Values:
        return tuple(
            tensor[rows].to(device, getattr(torch, dtype), non_blocking=True, copy=True)
            for tensor, dtype in zip(tensors, dtypes, strict=True)
        )

    return (
        [copies(own, [v.dtype for v in values]) if 0 in rank.modules else () for own in inputs],
        [copies(own, [v.dtype for v in wanted]) if rank.loss is not None else () for own in targets],
    )


def _join(hardware: Hardware, timeout_seconds: float) -> None:
    """Join the plan's workers, or become the only one of a plan for one device.

    Raises:
        UsageError: the plan has several devices, and no launcher has started workers.
    """
    if joins_workers(hardware, timeout_seconds):
        return
    count = len(hardware.plan.workers)
    if count > 1:
        raise UsageError(
            f"the plan uses {counted(count, 'device')}, and torch's engine runs one worker for each: start this "
            f"script with torchrun --nproc-per-node {count}"
        )
    join_alone(hardware.backend)


def pipeline(task: Task, plan: Plan, *, seed: int = 0, timeout_seconds: float = 60.0) -> Pipeline:
    """Return this worker's part of a plan on `torch.distributed.pipelining`. All workers must call it.

    Start one worker for each device of the plan, such as with torchrun. A script then trains as with
    `pipefit.Trainer`:

        pipeline = pipefit.pipeline(task, plan)
        for inputs, targets in data:
            loss = pipeline.step(inputs, target=targets)

    Args:
        task: the task to train. A factory is called after `torch.manual_seed(seed)`; all workers train the
            weights of the first one.
        plan: a plan for this task.
        seed: seed of weights and dropout.
        timeout_seconds: limit for messages between workers.

    Raises:
        FileError: the plan was made for another model.
        UsageError: torch's engine lacks what the plan needs, or the number of workers is not the plan's.
    """
    return Pipeline(task, plan, seed=seed, timeout_seconds=timeout_seconds)
