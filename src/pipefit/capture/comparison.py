"""Compares a module with its chain: the net under every trace.

Two real microbatches, one after the other, go through a copy of the module as a plain loop would send them. They go
through a copy of the chain as a pipeline sends them, with the same random draws: both forward, then both backward, so
that a backward that meets what a later forward has changed is found out, whatever it was changed by. Their losses, the
gradient of every parameter and all buffers are compared. The second microbatch shows what is kept from one call to the
next: an update of a buffer, a count, a tensor in an attribute. The module, its gradients and all random generators stay
as they are.

Parameters that are zero throughout, such as the last layer of a residual branch, would hide whatever is behind them:
both copies have the same small numbers there. Costs, on the host, three times the bytes of the module and the
activations of two microbatches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.capture.caller import recording
from pipefit.capture.chain import Chain, autocasting
from pipefit.capture.copying import copied
from pipefit.capture.cuda_autocast import casting_for
from pipefit.capture.exporting import arguments
from pipefit.capture.numbers import Numbers, Run, compared, same
from pipefit.capture.random_state import put_back, seed_all
from pipefit.capture.refusals import REMEDY
from pipefit.capture.sample import Sample
from pipefit.capture.structure import Values
from pipefit.capture.task import Task
from pipefit.errors import PipefitError, UsageError, in_one_line
from pipefit.profiles import Target

_REVEALING = 0.02  # what stands, at most, where a parameter is zero throughout


def compare(task: Task, chain: Chain, batches: Sequence[Sample], *, target: Target = "cpu") -> Numbers:
    """Compare `task.module`, a module, with `chain`, which was made of it and holds its tensors, on `batches`.

    Both run on the CPU, under the casts of the target for which the chain was made.

    Raises:
        NotComparable: the module itself fails on a batch.
        UsageError: a layer of the chain fails where the module does not.
    """
    module = task.module
    assert isinstance(module, nn.Module)
    with put_back(), recording("comparing numbers"), casting_for(target):
        with tensors_put_back(module):
            plain = _plain_run(task, module, chain, batches)
        with tensors_put_back(module):
            ours = _chain_run(module, chain, batches, in_flight=True)
        if ours is None:
            with tensors_put_back(module):
                ours = _chain_run(module, chain, batches, in_flight=False)
        assert ours is not None
        return compared(
            plain,
            ours,
            name=task.name,
            microbatch_size=len(next(leaf for leaf in pytree.tree_leaves(batches[0]) if isinstance(leaf, Tensor))),
            untouched={name: buffer.cpu() for name, buffer in module.named_buffers()},
            precisions={
                *(parameter.dtype for parameter in module.parameters()),
                *([task.autocast] if task.autocast else []),
            },
        )


def evaluated(
    task: Task, batches: Sequence[Sample], *, traced: bool, target: Target = "cpu", training: bool = False
) -> list[float]:
    """The losses of `task.module` on `batches`, without gradients, in evaluation or in `training`; each with draws of
    its own. `traced` says that the module takes inputs as `torch.export` does, not as an `nn.Sequential`.

    Raises:
        NotComparable: the module fails on a batch.
    """
    module = task.module
    assert isinstance(module, nn.Module)
    with put_back(), recording("comparing numbers"), casting_for(target), tensors_put_back(module), torch.no_grad():
        (own,), loss_of = copies_of([module], task.loss)
        with plainly(task, "evaluation"):
            forward = plain_forward(task, own if training else own.eval(), loss_of, traced=traced)
            return [loss.item() for loss in _losses(forward, batches)]


def values_before(
    layers: Sequence[int], task: Task, chain: Chain, batch: Sample, *, target: Target = "cpu"
) -> list[Values]:
    """The values that come into some layers of a chain of modules for `batch`, in evaluation and without gradients."""
    module = task.module
    assert isinstance(module, nn.Module)
    with put_back(), recording("comparing numbers"), casting_for(target), tensors_put_back(module), torch.no_grad():
        own, _ = copies_of([layer.module for layer in chain.layers], None)
        seed_all(0)
        values = chain.flatten(pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), batch[0]))
        found = []
        for number, (layer, copy) in enumerate(zip(chain.layers, own, strict=True)):
            if number in layers:
                found.append(tuple(value.clone() for value in values))
            values = replace(layer, module=copy.eval())(values)
        return found


class NotComparable(UsageError):
    """The module itself cannot be trained here, such as one whose kernels are those of a GPU alone."""


# -------------------------------------------------------------------- two runs


def _plain_run(task: Task, module: nn.Module, chain: Chain, batches: Sequence[Sample]) -> Run:
    """A copy of the module, trained as a plain loop does, without an update."""
    (own,), loss_of = copies_of([module], task.loss)
    with plainly(task, "training"):
        losses = _losses(plain_forward(task, own, loss_of, traced=chain.traced), batches)
    return Run(losses, _gradients(own.named_parameters(), module), dict(own.named_buffers()))


def plain_forward(task: Task, own: nn.Module, loss_of: Any, *, traced: bool) -> Callable[[Any, Any], Tensor]:
    """The loss of a plain module for inputs and targets."""

    def forward(inputs: Any, targets: Any) -> Tensor:
        leaves = tuple(leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))
        args, keywords = arguments(inputs) if traced else ((inputs,), {})
        with autocasting(task.autocast, leaves):
            outputs = own(*args, **keywords)
            loss: Tensor = _own_loss(outputs) if loss_of is None else loss_of(outputs, targets)
        return loss

    return forward


@contextmanager
def plainly(task: Task, doing: str) -> Iterator[None]:
    """Inside, a plain module runs.

    Raises:
        NotComparable: it fails.
    """
    try:
        yield
    except PipefitError:
        raise
    except Exception as error:
        raise NotComparable(
            f"{task.name} itself, as a plain module on the CPU, fails in {doing} ({in_one_line(error)})"
        ) from error


def _chain_run(module: nn.Module, chain: Chain, batches: Sequence[Sample], *, in_flight: bool) -> Run | None:
    """A copy of the chain, trained in the same way or with all microbatches `in_flight`.

    Its tensors have the names that they have in the module. None if autograd sees that a later forward has changed
    what a backward needs: training says so where it happens, and a plan may recompute.
    """
    own, loss_of = copies_of([layer.module for layer in chain.layers], chain.criterion)
    layers = tuple(replace(layer, module=copy) for layer, copy in zip(chain.layers, own, strict=True))
    copy = replace(chain, layers=layers, criterion=loss_of)

    def forward(inputs: Any, targets: Any) -> Tensor:
        values = copy.flatten(inputs)
        for layer in copy.layers:
            values = layer(values)
        return copy.loss(values, copy.flatten_targets(targets))

    try:
        losses = _losses(forward, batches, in_flight=in_flight)
    except PipefitError:
        raise
    except Exception as error:
        if in_flight and "modified by an inplace operation" in str(error):
            return None
        raise UsageError(
            f"{chain.name} fails as a chain, and as a module it does not ({in_one_line(error)}): {REMEDY}"
        ) from error
    parameters, buffers = _by_names_of(module, chain, own)
    return Run(losses, _gradients(parameters.items(), module), buffers)


def _by_names_of(
    module: nn.Module, chain: Chain, own: Sequence[nn.Module]
) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """Parameters and buffers of `own`, copies of the layers, by the names that the originals have in the module."""
    names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, Tensor] = {}
    for layer, made in zip(chain.layers, own, strict=True):
        for local, parameter in layer.module.named_parameters(remove_duplicate=False):
            parameters[names[id(parameter)]] = made.get_parameter(local)
        for local, tensor in layer.module.named_buffers(remove_duplicate=False):
            if id(tensor) in names:  # else a constant of the trace
                buffers[names[id(tensor)]] = made.get_buffer(local)
    return parameters, buffers


def _losses(
    forward: Callable[[Any, Any], Tensor], batches: Sequence[Sample], *, in_flight: bool = False
) -> list[Tensor]:
    """The loss of each microbatch, which has gone backward too: before the next one goes forward, unless all are
    `in_flight`. Random draws depend on its number alone.
    """
    losses, waiting = [], deque[tuple[Tensor, Tensor]]()
    for number, batch in enumerate(batches):
        seed_all(number)
        inputs, targets = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), batch)
        loss = forward(inputs, targets)
        losses.append(loss.detach().reshape(()))
        if loss.requires_grad:
            waiting.append((loss.reshape(()), torch.get_rng_state()))
        del loss  # and with it, soon, its graph
        while waiting and (not in_flight or number + 1 == len(batches)):
            _go_backward(*waiting.popleft())
    return losses


def _go_backward(loss: Tensor, draws: Tensor) -> None:
    """The backward of a microbatch, with the `draws` that follow those of its forward."""
    torch.set_rng_state(draws)
    torch.autograd.backward(loss)


def _own_loss(outputs: Any) -> Tensor:
    """The loss among what a module returns that computes it itself."""
    if isinstance(outputs, Tensor):
        return outputs
    loss: Tensor | None = getattr(outputs, "loss", None)
    if loss is None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    return loss


def _gradients(parameters: Iterable[tuple[str, nn.Parameter]], module: nn.Module) -> dict[str, Tensor | None]:
    """The gradients of copies of the module's parameters, by name.

    A function that holds the module itself (a closure) reaches the originals instead.
    """
    leaked = {name: original.grad.cpu() for name, original in module.named_parameters() if original.grad is not None}
    return {name: leaked.get(name, parameter.grad) for name, parameter in parameters}


@contextmanager
def tensors_put_back(module: nn.Module) -> Iterator[None]:
    """Inside, parameters have no gradients; afterwards they have their own again, and buffers their values.

    A run does not touch the module, unless a function in it holds the original.
    """
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                if not same(buffer, value):
                    buffer.copy_(value)


# -------------------------------------------------------------------- copies


class _Clones:
    """Makes copies on the CPU; tensors that share memory have copies that share it too.

    In copies of `trained` parameters no zeros hide what is behind them.
    """

    def __init__(self, trained: Iterable[nn.Parameter]) -> None:
        self._trained = {id(parameter) for parameter in trained if parameter.requires_grad}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:
            return tensor.detach().cpu().clone()
        storage = tensor.untyped_storage()
        own = self._storages.get(storage.data_ptr())
        if own is None or not storage.nbytes():
            own = self._storages[storage.data_ptr()] = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
            own.copy_(storage)
        made = torch.empty(0, dtype=tensor.dtype)
        made.set_(own, tensor.storage_offset(), tensor.shape, tensor.stride())
        if id(tensor) in self._trained and not made.any():
            made.copy_((torch.arange(made.numel()) + 1).sin().mul(_REVEALING).reshape(made.shape))
        return made


def copies_of(modules: Sequence[nn.Module], loss: Any) -> tuple[list[nn.Module], Any]:
    """Copies of modules, and of the loss where it is one, which share what the originals share."""
    whole = nn.ModuleList([*modules, *([loss] if isinstance(loss, nn.Module) else [])])
    own = list(copied(whole, _Clones(whole.parameters())).children())
    return own[: len(modules)], own[-1] if isinstance(loss, nn.Module) else loss
