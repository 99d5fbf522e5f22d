"""Plain training of a module: the oracle to which a plan is held.

A loop as its owner would write it: microbatches one after the other, gradients added up in `parameter.grad`, clipping
by `torch.nn.utils.clip_grad_norm_`, one optimizer over all parameters. It shares no code with what executes plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.capture.sample import Sample
from pipefit.capture.task import Task

Forward = Callable[[Any, Any], Tensor]  # the loss for inputs and targets
Around = Callable[[int, int, int], AbstractContextManager[object]]  # of a step, a microbatch and a slice
_FIRST_SCALE = 2.0**16


class DrawingOptimizer(Exception):
    """The optimizer draws random numbers."""


@dataclass(slots=True, kw_only=True)
class Trained:
    """What plain training made of a module: by names, its `tensors` (parameters and buffers), what the optimizer keeps
    for parameters, and float32 copies; the losses, and the gradients of every step as the optimizer got them.

    `buffers` has those of every replica, by name.
    """

    tensors: Mapping[str, Tensor]
    optimizer: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    masters: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Sequence[Mapping[str, Tensor]] = ()
    losses: Sequence[float] = ()
    gradients: Sequence[Mapping[str, Tensor]] = ()

    def of_replica(self, name: str, replica: int) -> Tensor:
        """A parameter or buffer, as that replica has it."""
        of_replica = self.buffers[replica] if len(self.buffers) > 1 else {}
        return of_replica.get(name, self.tensors[name])


def train_plainly(
    task: Task,
    module: nn.Module,
    forward: Forward,
    steps: Sequence[Sequence[Sample]],
    *,
    clip_norm: float | None,
    slices: int = 1,
    around: Around,
) -> Trained:
    """Train `module`, in the task's precision, for some steps, each of some microbatches.

    With `slices`, each microbatch is trained in so many slices of its samples, by replicas of which each has buffers of
    its own. `around` is entered around each forward.

    Raises:
        DrawingOptimizer: the optimizer draws random numbers.
    """
    loop = _Loop(task, module, forward, clip_norm, slices, around)
    losses = [loop.step(number, microbatches) for number, microbatches in enumerate(steps)]
    return loop.trained(losses)


class _Loop:
    """A training loop."""

    def __init__(
        self, task: Task, module: nn.Module, forward: Forward, clip_norm: float | None, slices: int, around: Around
    ) -> None:
        self._module, self._forward, self._clip_norm, self._around = module, forward, clip_norm, around
        self._named = dict(module.named_parameters())
        self._trained = {name: parameter for name, parameter in self._named.items() if parameter.requires_grad}
        copies = {name: nn.Parameter(_wide(parameter)) for name, parameter in self._trained.items()}
        self._masters = copies if task.master_weights else {}
        self._worked_on = self._masters or self._trained
        self._optimizer = task.optimizer(_groups(task, self._trained, self._worked_on))
        self._scheduler = None if task.scheduler is None else task.scheduler(self._optimizer)
        self._scale = _FIRST_SCALE if task.precision in ("mixed-float16", "master-float16") else 1.0
        self._slices, self._buffers = slices, _Buffers(module, slices)
        self._gradients: list[Mapping[str, Tensor]] = []

    def step(self, step: int, microbatches: Sequence[Sample]) -> float:
        """One step; its mean loss."""
        for parameter in self._named.values():
            parameter.grad = None
        share, total = 1 / (len(microbatches) * self._slices), 0.0
        for number, batch in enumerate(microbatches):
            for replica, part in enumerate(in_slices(batch, self._slices)):
                with self._buffers.of(replica):
                    with self._around(step, number, replica):
                        loss = self._forward(*part)
                    torch.autograd.backward(loss * (share * self._scale))
                total += loss.item() * share
        if self._take_gradients():
            self._update()
        return total

    def _take_gradients(self) -> bool:
        """Give the optimizer gradients without the loss scale; whether all are finite, or nothing is scaled."""
        for name, parameter in self._trained.items():
            one = self._worked_on[name]
            if parameter.grad is not None:
                one.grad = (
                    parameter.grad.to(one.dtype).div(self._scale) if self._scale != 1 else parameter.grad.to(one.dtype)
                )
            elif one is not parameter:
                one.grad = None
        given = [one.grad for one in self._worked_on.values() if one.grad is not None]
        if self._scale != 1 and not all(bool(gradient.isfinite().all()) for gradient in given):
            self._scale /= 2
            return False
        return True

    def _update(self) -> None:
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._worked_on.values(), self._clip_norm)
        given = ((name, one.grad) for name, one in self._worked_on.items() if one.grad is not None)
        self._gradients.append({name: gradient.detach().clone() for name, gradient in given})
        state = torch.get_rng_state()
        self._optimizer.step()
        if not torch.equal(state, torch.get_rng_state()):
            raise DrawingOptimizer
        if self._scheduler is not None:
            self._scheduler.step()
        with torch.no_grad():
            for name, copy in self._masters.items():
                self._named[name].copy_(copy)

    def trained(self, losses: Sequence[float]) -> Trained:
        """What training has made, under all names of the module's state dict."""
        every = {k: t for k, t in self._module.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
        names = {id(parameter): name for name, parameter in self._trained.items()}
        known = {name: names[id(tensor)] for name, tensor in every.items() if id(tensor) in names}
        return Trained(
            tensors={name: tensor.detach().clone() for name, tensor in every.items()},
            optimizer={name: self._kept(self._worked_on[own]) for name, own in known.items()},
            masters={name: self._masters[own].detach().clone() for name, own in known.items() if own in self._masters},
            buffers=self._buffers.of_all,
            losses=losses,
            gradients=self._gradients,
        )

    def _kept(self, parameter: Tensor) -> dict[str, Tensor]:
        """The optimizer's tensors for what it works on."""
        kept = self._optimizer.state.get(parameter, {})
        return {key: value.detach().clone() for key, value in kept.items() if isinstance(value, Tensor)}


def in_slices(batch: Sample, count: int) -> list[Sample]:
    """A microbatch in so many equal parts of its samples."""
    if count == 1:
        return [batch]
    leaves, spec = pytree.tree_flatten(batch)
    parts = [leaf.chunk(count) if isinstance(leaf, Tensor) else (leaf,) * count for leaf in leaves]
    return [pytree.tree_unflatten([part[number] for part in parts], spec) for number in range(count)]


def _wide(parameter: Tensor) -> Tensor:
    dtype = parameter.dtype if parameter.is_complex() else torch.float32
    return parameter.detach().to(dtype, copy=True)


def _groups(
    task: Task, trained: Mapping[str, nn.Parameter], worked_on: Mapping[str, nn.Parameter]
) -> list[dict[str, Any]]:
    """The groups of the optimizer: one for each parameter, if the task has options for it."""
    if task.groups is None:
        return [{"params": list(worked_on.values())}]
    return [{"params": [worked_on[name]], **task.groups(name, parameter)} for name, parameter in trained.items()]


class _Buffers:
    """The buffers of replicas, of which the module has those of one at a time."""

    def __init__(self, module: nn.Module, replicas: int) -> None:
        self._own = dict(module.named_buffers(remove_duplicate=False))
        self._of = [self._copies() for _ in range(replicas)] if replicas > 1 else []

    @property
    def of_all(self) -> list[dict[str, Tensor]]:
        """Those of every replica, by name; none where there is one alone."""
        return self._of

    @contextmanager
    def of(self, replica: int) -> Iterator[None]:
        """Inside, the module has the buffers of that replica."""
        with torch.no_grad():
            for name, value in self._of[replica].items() if self._of else ():
                self._own[name].data.copy_(value)  # unseen by graphs that have saved it
        yield
        if self._of:
            self._of[replica] = self._copies()

    def _copies(self) -> dict[str, Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self._own.items()}
