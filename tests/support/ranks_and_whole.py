"""A model run by its ranks and as a whole: losses, gradients and buffers of both."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pipefit.capture import Task, capture
from pipefit.capture.exporting import arguments, the_loss
from pipefit.capture.random_state import seed_torch
from pipefit.tensor_parallel import (
    LockstepCollectives,
    Prices,
    ShardedStage,
    assembled,
    in_lockstep,
    shard_stage,
)

CHEAP = Prices(stored=1.0)  # so that tiny models are divided wherever they can be
DEAR = Prices(stored=0.01)


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Results of one microbatch: the loss, and gradients and buffers by name."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A double-precision module, its batch and loss."""

    module: nn.Module
    inputs: Any
    targets: Any
    task: Task

    @staticmethod
    def of(task: Task, size: int = 2) -> Case:
        """Return the case of a task; every run starts from the same weights and draws."""
        seed_torch(0, target="cpu")
        module = task.build().double().train()
        inputs, targets = pytree.tree_map_only(Tensor, _double, task.batch(size))
        return Case(module=module, inputs=inputs, targets=targets, task=task)

    def plain(self, size: int = 2) -> Numbers:
        """Run the module without pipefit."""
        module = copy.deepcopy(self.module)
        seed_torch(1, target="cpu")
        args, kwargs = (
            arguments(self.inputs) if not isinstance(module, nn.Sequential) else ((self.inputs,), {})
        )
        with InDouble():
            outputs = module(*args, **kwargs)
            loss = (
                the_loss(outputs, "plain")
                if self.task.loss is None
                else self.task.loss(outputs, self.targets)
            )
        loss.backward()
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        return Numbers(loss=loss.detach(), gradients=gradients, buffers=dict(module.named_buffers()))

    def sharded(self, ranks: int, prices: Prices = CHEAP, **options: Any) -> tuple[ShardedStage, Any, Any]:
        """Return the whole model as one stage, and its flat inputs and targets."""
        task = Task(
            copy.deepcopy(self.module), batch=self.task.batch, loss=self.task.loss, name=self.task.name
        )
        with InDouble():
            chain = capture(task, self.inputs, self.targets)
            values, targets = chain.flatten(self.inputs), chain.flatten_targets(self.targets)
            given = {"chain": chain, "targets": targets, "is_first": True, "prices": prices, **options}
            stage = shard_stage(chain.layers, ranks, values, **given)
        return stage, values, targets

    def by_ranks(
        self, ranks: int, prices: Prices = CHEAP, **options: Any
    ) -> tuple[ShardedStage, list[Numbers]]:
        """Return the ranks' results, with gradients and buffers concatenated, and the loss of each."""
        stage, values, targets = self.sharded(ranks, prices, **options)

        def run(group: Any) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
            rank = stage.rank(group)
            seed_torch(1, target="cpu")
            (loss,) = rank(values, targets)
            loss.backward()
            tensors = {
                original: tensor
                for layer in rank.layers
                for local, tensor in layer.module.state_dict(keep_vars=True).items()
                if (original := layer.originals.get(local))
            }
            gradients = {name: t.grad for name, t in tensors.items() if t.grad is not None}
            return (
                loss.detach(),
                gradients,
                {n: t for n, t in tensors.items() if not isinstance(t, nn.Parameter)},
            )

        found = in_lockstep(ranks, run)
        shards = [stage.shards(rank) for rank in range(ranks)]

        def together(what: int) -> dict[str, Tensor]:
            names = found[0][what]
            return {
                name: assembled([s[name] for s in shards], [f[what][name] for f in found]) for name in names
            }

        gradients, buffers = together(1), together(2)
        return stage, [Numbers(loss=f[0], gradients=gradients, buffers=buffers) for f in found]


class Listening:
    """A rank that records its collectives."""

    def __init__(self, group: LockstepCollectives) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self.phase, self.layer, self.heard = "forward", 0, Counter[tuple[str, str, int, int]]()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._note("all_reduce", tensor.nbytes)
        return self.group.all_reduce(tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._note("all_gather", tensor.nbytes * self.size)
        return self.group.all_gather(tensor)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        self._note("reduce_scatter", tensor.nbytes)
        return self.group.all_to_all(tensor)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        raise AssertionError("no layer does that")

    def _note(self, kind: str, nbytes: int) -> None:
        self.heard[kind, self.phase, self.layer, nbytes] += 1


class InDouble(TorchFunctionMode):
    """Mode that turns casts to single precision, common for norms and losses, into double precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        kwargs = {name: _wider(item) for name, item in (kwargs or {}).items()}
        return func(*map(_wider, args), **kwargs)


def _wider(item: Any) -> Any:
    return torch.float64 if item is torch.float32 else item


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def differences(ours: Numbers, plain: Numbers, tolerance: float = 1e-12) -> list[str]:
    """Return unequal values, relative to the largest number of each tensor."""
    pairs = [("loss", ours.loss, plain.loss)]
    pairs += [
        (f"gradient of {name}", ours.gradients.get(name), whole) for name, whole in plain.gradients.items()
    ]
    pairs += [
        (name, ours.buffers[name], whole) for name, whole in plain.buffers.items() if name in ours.buffers
    ]
    return [
        f"{name}: {_far(mine, whole)}" for name, mine, whole in pairs if not _far(mine, whole) <= tolerance
    ]


def _far(mine: Tensor | None, whole: Tensor) -> float:
    if mine is None or mine.shape != whole.shape:
        return float("inf")
    return float((mine.double() - whole.double()).abs().max() / max(float(whole.double().abs().max()), 1e-2))
