"""Sequential replay of asynchronous training that keeps every old version of the weights: the oracle of
numbers.

It shares nothing with pipefit's runtime. Every minibatch goes through all stages in order, each with its
weights from the given number of updates ago, as separate tensors; then all stages are updated. Buffers change
in the order of the minibatches. A stage of several replicas is mapped over its local batches, and the results
are concatenated before the next stage, all in one graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pipefit.capture import Task
from pipefit.runtime.engine.forward_backward import seed_layer
from pipefit.schema.grids import Stage as GridStage
from pipefit.schema.plan import Plan

CPU = torch.device("cpu")


class Numbers(NamedTuple):
    """Losses of all minibatches, gradients of every update of every stage, and all parameters and buffers."""

    losses: list[float]
    gradients: list[list[list[Tensor]]]
    state: dict[str, Tensor]


class Stage:
    """Layers `start` to `stop - 1`, their optimizer, and all versions of their weights."""

    def __init__(self, task: Task, chain: nn.Sequential, stage: GridStage, late: int) -> None:
        self.layers = {number: chain[number] for number in range(stage.start, stage.stop)}
        self.late, self.slices = late, stage.grid.data  # in updates
        named = [p for layer in self.layers.values() for p in layer.parameters() if p.requires_grad]
        self.parameters = list({id(p): p for p in named}.values())
        self.optimizer = task.optimizer(self.parameters) if self.parameters else None
        self.scheduler = task.scheduler(self.optimizer) if task.scheduler and self.optimizer else None
        self.history = [[p.detach().clone() for p in self.parameters]]
        self.gradients: list[list[Tensor]] = []
        self.waiting: dict[int, Tensor] = {}

    def weights(self, updates: int) -> dict[int, Tensor]:
        """Return differentiable weights after this number of updates, by the ids of the parameters."""
        kept = self.history[updates]
        return {id(p): w.clone().requires_grad_() for p, w in zip(self.parameters, kept, strict=True)}

    def add(self, weights: dict[int, Tensor]) -> None:
        """Accumulate the gradients of a backward."""
        for key, weight in weights.items():
            if weight.grad is not None:
                known = self.waiting.get(key)
                self.waiting[key] = weight.grad if known is None else known + weight.grad

    def update(self) -> None:
        """Step the optimizer with all gradients since the last step."""
        for p in self.parameters:
            p.grad = self.waiting.get(id(p))
        self.gradients.append([p.grad.clone() for p in self.parameters if p.grad is not None])
        self.waiting = {}
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        self.history.append([p.detach().clone() for p in self.parameters])


def replayed(
    task: Task, plan: Plan, batches: Sequence[tuple[Any, Any]], *, seed: int, drains: Sequence[int]
) -> Numbers:
    """Train on `batches`; after batches with a number in `drains` the pipeline is drained, and starts
    anew.
    """
    torch.manual_seed(seed)
    chain, alone = task.build(), plan.training.schedule == "pipedream"
    assert isinstance(chain, nn.Sequential)
    count = len(plan.stages)
    stages = [Stage(task, chain, s, count - 1 - n if alone else 1) for n, s in enumerate(plan.stages)]
    losses: list[float] = []
    begun = 0  # updates before the last drain
    for step, batch in enumerate(batches):
        parts = list(_parts(batch, plan.training.microbatch_size))
        for microbatch, (x, y) in enumerate(parts):
            done = len(stages[0].history) - 1
            used = [stage.weights(max(begun, done - stage.late)) for stage in stages]
            with torch.random.fork_rng(devices=[]):
                value = _forward(stages, used, x, (seed, step, microbatch))
                slices = stages[-1].slices
                seed_layer(CPU, seed, step, microbatch * slices, len(chain))
                loss = (
                    sum(task.loss(*one) for one in zip(value.chunk(slices), y.chunk(slices), strict=True))
                    / slices
                )
            share = 1.0 if alone else len(y) / sum(len(other) for _, other in parts)
            loss.backward(torch.full((), share, dtype=loss.dtype))
            losses.append(loss.item())
            for stage, weights in zip(stages, used, strict=True):
                stage.add(weights)
                if alone or microbatch + 1 == len(parts):
                    stage.update()
        if step in drains:
            begun = len(stages[0].history) - 1
    return Numbers(losses, [stage.gradients for stage in stages], dict(chain.state_dict()))


def _parts(batch: tuple[Any, Any], size: int) -> Iterator[tuple[Any, Tensor]]:
    inputs, targets = batch
    if isinstance(inputs, Tensor):
        yield from zip(inputs.split(size), targets.split(size), strict=True)
    else:
        yield from zip(
            zip(*(part.split(size) for part in inputs), strict=True), targets.split(size), strict=True
        )


def _forward(
    stages: Sequence[Stage], used: Sequence[dict[int, Tensor]], value: Any, draws: tuple[int, int, int]
) -> Any:
    """Run a minibatch through all layers, each with the weights of its stage and its own draws."""
    for stage, weights in zip(stages, used, strict=True):
        parts = value.chunk(stage.slices) if stage.slices > 1 else [value]
        found = [
            _through(stage, weights, part, (*draws[:2], draws[2] * stage.slices + n))
            for n, part in enumerate(parts)
        ]
        value = torch.cat(found) if stage.slices > 1 else found[0]
    return value


def _through(stage: Stage, weights: dict[int, Tensor], value: Any, draws: tuple[int, int, int]) -> Any:
    """Run a minibatch, or a local batch of it, through the layers of a stage."""
    for number, layer in stage.layers.items():
        seed_layer(CPU, *draws, number)
        own = {name: weights[id(p)] for name, p in layer.named_parameters() if id(p) in weights}
        value = functional_call(layer, own, (value,))
    return value
