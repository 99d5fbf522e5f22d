"""Plain training of a module: the reference with which a plan is compared.

A loop as a user would write it: microbatches one after the other, gradients summed in `parameter.grad`,
clipping by `torch.nn.utils.clip_grad_norm_`, one optimizer over all parameters. It shares no code with the
execution of plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.capture.chain import stored_entries
from pipefit.capture.sample import Sample
from pipefit.capture.task import Task
from pipefit.errors import UsageError
from pipefit.torch_internals import TorchDispatchMode, pytree

# ---- Shared random draws of two runs that compute in another order
#
# The draws of a model's first forward are recorded for each microbatch, and replayed when another run reaches
# them: plain training does not know in which layers and local batches a plan draws. If draws cannot be
# recorded, both runs use means in place of draws, under which dropout changes nothing.

_aten = torch.ops.aten
_DROPOUT = _aten.native_dropout.default
_RRELU = {_aten.rrelu_with_noise.default, _aten.rrelu_with_noise_.default}  # write slopes into an argument
_MODES, _SHARES = ("train", "training"), ("p", "dropout_p", "dropout")  # names of arguments


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


class UnknownDraw(UsageError):
    """The draws of an operator cannot be replayed, or no recorded draw is left."""


class Draws:
    """Results of random operators in the order of the forward, by a key for each part of a forward."""

    def __init__(self) -> None:
        self.of: dict[Hashable, list[Tensor]] = {}

    def joined(self, parts: Sequence[Sequence[Hashable]]) -> deque[Tensor]:
        """Return the draws of a whole forward: of `parts` in order, each from one or several local batches.

        Raises:
            UnknownDraw: the local batches of a part drew different numbers of times.
        """
        result = deque[Tensor]()
        for slices in parts:
            drawn = [self.of.get(key, []) for key in slices]
            if len({len(one) for one in drawn}) > 1:
                raise UnknownDraw("local batches of a microbatch draw a different number of times")
            result.extend(_together(list(tensors)) for tensors in zip(*drawn, strict=True))
        return result


def _together(tensors: list[Tensor]) -> Tensor:
    """Concatenate draws of local batches along dimension 0, that of the samples."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


class DrawRecording(_Mode):  # type: ignore[no-untyped-call]
    """A mode that records random draws under `key`."""

    def __init__(self, draws: Draws, key: Hashable) -> None:
        super().__init__()
        self.draws, self.key = draws, key

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if draws(func, args, kwargs or {}):
            drawn = result[1] if func is _DROPOUT else args[1] if func in _RRELU else result
            self.draws.of.setdefault(self.key, []).append(_alone(func, drawn).detach().clone())
        return result


class Replaying(_Mode):  # type: ignore[no-untyped-call]
    """A mode in which random operators return the recorded draws."""

    def __init__(self, drawn: deque[Tensor]) -> None:
        super().__init__()
        self.drawn = drawn

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not draws(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        if not self.drawn:
            raise UnknownDraw(f"it draws more often ({func}) than recorded")
        drawn = self.drawn.popleft()
        if func is _DROPOUT:
            return args[0] * drawn / (1 - args[1]), drawn
        if func in _RRELU:
            drawn = args[0] * args[1].copy_(drawn)
        if _is_in_place(func):
            return args[0].copy_(drawn)
        return drawn.clone()


class MeanDraws(_Mode):  # type: ignore[no-untyped-call]
    """A mode in which random operators return the mean of their distribution."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        if func is _DROPOUT:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if func in _RRELU:
            slopes = torch.where(args[0] > 0, 1.0, (args[2] + args[3]) / 2)
            return Replaying(deque([slopes])).__torch_dispatch__(func, types, args, kwargs)
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
                return result.fill_(
                    args[1] if func.overloadpacket is _aten.normal_ and len(args) > 1 else 0.0
                )
        raise UnknownDraw(f"it draws with {func}, whose mean is not known")


def draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator's call draws random numbers: not for dropout of nothing or in evaluation."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    arguments = func._schema.arguments
    given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    given |= dict(zip((a.name for a in arguments), args, strict=False)) | dict(kwargs)
    if any(given.get(share) == 0.0 for share in _SHARES if isinstance(given.get(share), float)):
        return False
    modes = [given[mode] for mode in _MODES if mode in given]
    return not modes or True in modes


def _is_in_place(func: Any) -> bool:
    return bool(func._schema.name.endswith("_"))


def _alone(func: Any, result: Any) -> Tensor:
    if not isinstance(result, Tensor):
        raise UnknownDraw(f"it draws with {func}, which returns more than its draws")
    return result


# ---- The training loop

Forward = Callable[[Any, Any], Tensor]  # the loss for inputs and targets
Around = Callable[
    [int, int, int], AbstractContextManager[object]
]  # of a step, a microbatch and a local batch
_FIRST_SCALE = 2.0**16


class DrawingOptimizer(Exception):
    """The optimizer draws random numbers."""


@dataclass(slots=True, kw_only=True)
class Trained:
    """Results of plain training, by name: tensors, optimizer state, losses and gradients.

    - `tensors` are parameters and buffers; `optimizer` has the optimizer's tensors for each parameter.
    - `masters` are the float32 copies of parameters; `buffers` has the buffers of every replica.
    - `losses` has the loss and `gradients` the gradients of each step, as the optimizer received them.
    """

    tensors: Mapping[str, Tensor]
    optimizer: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    masters: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Sequence[Mapping[str, Tensor]] = ()
    losses: Sequence[float] = ()
    gradients: Sequence[Mapping[str, Tensor]] = ()

    def of_replica(self, name: str, replica: int) -> Tensor:
        """Return a parameter or buffer of a replica."""
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

    Each microbatch is split into `slices` local batches, one for each replica; each replica has its own
    buffers. `around` is entered around each forward.

    Raises:
        DrawingOptimizer: the optimizer draws random numbers.
    """
    loop = _Loop(task, module, forward, clip_norm, slices, around)
    losses = [loop.step(number, microbatches) for number, microbatches in enumerate(steps)]
    return loop.trained(losses)


class _Loop:
    """A training loop."""

    def __init__(
        self,
        task: Task,
        module: nn.Module,
        forward: Forward,
        clip_norm: float | None,
        slices: int,
        around: Around,
    ) -> None:
        self._module, self._forward, self._clip_norm, self._around = module, forward, clip_norm, around
        self._named = dict(module.named_parameters())
        self._trained = {
            name: parameter for name, parameter in self._named.items() if parameter.requires_grad
        }
        copies = {name: nn.Parameter(_wide(parameter)) for name, parameter in self._trained.items()}
        self._masters = copies if task.master_weights else {}
        self._worked_on = self._masters or self._trained
        self._optimizer = task.optimizer(_groups(task, self._trained, self._worked_on))
        self._scheduler = None if task.scheduler is None else task.scheduler(self._optimizer)
        self._scale = _FIRST_SCALE if task.precision in ("mixed-float16", "master-float16") else 1.0
        self._slices, self._buffers = slices, _Buffers(module, slices)
        self._gradients: list[Mapping[str, Tensor]] = []

    def step(self, step: int, microbatches: Sequence[Sample]) -> float:
        """Run one step; return its mean loss."""
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
        """Give the optimizer unscaled gradients; return False if a gradient is not finite under loss
        scaling.
        """
        for name, parameter in self._trained.items():
            one = self._worked_on[name]
            if parameter.grad is not None:
                one.grad = (
                    parameter.grad.to(one.dtype).div(self._scale)
                    if self._scale != 1
                    else parameter.grad.to(one.dtype)
                )
            elif one is not parameter:
                one.grad = None
        given = [value.grad for value in self._worked_on.values() if value.grad is not None]
        if self._scale != 1 and not all(bool(gradient.isfinite().all()) for gradient in given):
            self._scale /= 2
            return False
        return True

    def _update(self) -> None:
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._worked_on.values(), self._clip_norm)
        given = (
            (name, parameter.grad)
            for name, parameter in self._worked_on.items()
            if parameter.grad is not None
        )
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
        """Return the results of training, under all names of the module's stored tensors."""
        every = {k: t for k, t in stored_entries(self._module).items() if isinstance(t, Tensor)}
        names = {id(parameter): name for name, parameter in self._trained.items()}
        known = {name: names[id(tensor)] for name, tensor in every.items() if id(tensor) in names}
        return Trained(
            tensors={name: tensor.detach().clone() for name, tensor in every.items()},
            optimizer={name: self._kept(self._worked_on[own]) for name, own in known.items()},
            masters={
                name: self._masters[own].detach().clone()
                for name, own in known.items()
                if own in self._masters
            },
            buffers=self._buffers.of_all,
            losses=losses,
            gradients=self._gradients,
        )

    def _kept(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the optimizer's tensors for the parameter, or for its float32 copy."""
        kept = self._optimizer.state.get(parameter, {})
        return {key: value.detach().clone() for key, value in kept.items() if isinstance(value, Tensor)}


def in_slices(batch: Sample, count: int) -> list[Sample]:
    """Split a microbatch into `count` local batches of equal size."""
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
    """Return the optimizer's groups: one for each parameter if the task has `groups`, otherwise one."""
    if task.groups is None:
        return [{"params": list(worked_on.values())}]
    return [
        {"params": [worked_on[name]], **task.groups(name, parameter)} for name, parameter in trained.items()
    ]


class _Buffers:
    """The buffers of replicas; the module holds those of one replica at a time."""

    def __init__(self, module: nn.Module, replicas: int) -> None:
        self._own = dict(module.named_buffers(remove_duplicate=False))
        self._of = [self._copies() for _ in range(replicas)] if replicas > 1 else []

    @property
    def of_all(self) -> list[dict[str, Tensor]]:
        """The buffers of every replica, by name; empty for a single replica."""
        return self._of

    @contextmanager
    def of(self, replica: int) -> Iterator[None]:
        """Put the buffers of a replica into the module in the body, and save them afterwards."""
        with torch.no_grad():
            for name, value in self._of[replica].items() if self._of else ():
                self._own[name].data.copy_(value)  # invisible to graphs that saved the buffer
        yield
        if self._of:
            self._of[replica] = self._copies()

    def _copies(self) -> dict[str, Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self._own.items()}
