"""Plain training of a module: the oracle to which a plan is held.

A loop as its owner would write it: microbatches one after the other, gradients added up in `parameter.grad`, clipping
by `torch.nn.utils.clip_grad_norm_`, one optimizer over all parameters. It shares no code with what executes plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipefit.capture.sample import Sample
from pipefit.capture.task import Task
from pipefit.errors import UsageError

# ----------------------------------------------------------------------------------------------------
# Random draws that two runs of a model have in common, though they compute in another order.
#
# The draws of a model's first forward are recorded, microbatch by microbatch, and handed out again when
# another run comes to them: as plain training, which does not know in which layers and slices a plan draws.
# Where they cannot be recorded, both runs get means in place of draws, under which dropout changes nothing.

_aten = torch.ops.aten
_DROPOUT = _aten.native_dropout.default


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


class UnknownDraw(UsageError):
    """An operator draws whose draws cannot be handed out again, or none is left of those that were recorded."""


class Draws:
    """The results of random operators, in the order of the forward, by whatever names a part of a forward."""

    def __init__(self) -> None:
        self.of: dict[Hashable, list[Tensor]] = {}

    def joined(self, parts: Sequence[Sequence[Hashable]]) -> deque[Tensor]:
        """The draws of a whole forward: of `parts` one after the other, each of which some slices have computed."""
        found = deque[Tensor]()
        for slices in parts:
            drawn = [self.of.get(key, []) for key in slices]
            if len({len(one) for one in drawn}) > 1:
                raise UnknownDraw("slices of a microbatch draw another number of times")
            found.extend(_together(list(tensors)) for tensors in zip(*drawn, strict=True))
        return found


def _together(tensors: list[Tensor]) -> Tensor:
    """Draws of slices as those of all, one after the other in the dimension of the samples, which is the first."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


class Recording(_Mode):  # type: ignore[no-untyped-call]
    """Inside, what is drawn is recorded under `key`."""

    def __init__(self, draws: Draws, key: Hashable) -> None:
        super().__init__()
        self.draws, self.key = draws, key

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_draw(func):
            drawn = result[1] if func is _DROPOUT else result
            self.draws.of.setdefault(self.key, []).append(_alone(func, drawn).detach().clone())
        return result


class Replaying(_Mode):  # type: ignore[no-untyped-call]
    """Inside, random operators take their results from those recorded."""

    def __init__(self, drawn: deque[Tensor]) -> None:
        super().__init__()
        self.drawn = drawn

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_draw(func):
            return func(*args, **(kwargs or {}))
        if not self.drawn:
            raise UnknownDraw(f"it draws more often ({func}) than as planned")
        drawn = self.drawn.popleft()
        if func is _DROPOUT:
            return args[0] * drawn / (1 - args[1]), drawn
        if _is_in_place(func):
            return args[0].copy_(drawn)
        return drawn.clone()


class Means(_Mode):  # type: ignore[no-untyped-call]
    """Inside, random operators give the mean of what they would draw."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_draw(func):
            return func(*args, **kwargs)
        if func is _DROPOUT:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        result = _alone(func, func(*args, **kwargs))
        match func.overloadpacket:
            case _aten.bernoulli_ if isinstance(args[1] if len(args) > 1 else 0.5, float):
                return result.fill_(args[1] if len(args) > 1 else 0.5)
            case _aten.uniform_:
                low, high = args[1:3] if len(args) > 2 else (0.0, 1.0)
                return result.fill_((low + high) / 2)
            case _aten.rand | _aten.rand_like:
                return result.fill_(0.5)
            case _aten.normal_ | _aten.randn | _aten.randn_like:
                return result.fill_(args[1] if func.overloadpacket is _aten.normal_ and len(args) > 1 else 0.0)
        raise UnknownDraw(f"it draws by {func}, which has no mean that could stand for it")


def _is_draw(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _is_in_place(func: Any) -> bool:
    return bool(func._schema.name.endswith("_"))


def _alone(func: Any, result: Any) -> Tensor:
    if not isinstance(result, Tensor):
        raise UnknownDraw(f"it draws by {func}, which gives more than its draws")
    return result


# ----------------------------------------------------------------------------------------------------

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
