"""Input of tracing, profiling and training: a batch that the task makes, and its module in training mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.capture.caller import refuse_gradients
from pipefit.capture.copying import real
from pipefit.capture.storages import laid_out, sample_order
from pipefit.capture.structure import named_tensors, opened
from pipefit.capture.task import Task
from pipefit.errors import PipefitError, UsageError, in_one_line
from pipefit.texts import counted, kind_of
from pipefit.torch_internals import pytree

Sample = tuple[Any, Any]


def samples_of(batch: Sample) -> int:
    """Return the number of samples of a batch."""
    return len(next(leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)))


def rows(batch: Sample, first: int, end: int) -> Sample:
    """Return samples `first` to `end - 1` of a batch."""
    result: Sample = pytree.tree_map_only(Tensor, lambda tensor: tensor[first:end], batch)
    return result


def joined(*batches: Sample) -> Sample:
    """Return a batch of the samples of all `batches`; other leaves are those of the first."""

    def together(*leaves: Any) -> Any:
        return torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0]

    result: Sample = pytree.tree_map(together, *batches)
    return result


def in_mode(module: nn.Module, training: bool) -> nn.Module:
    """Return `module` in its current mode for training, otherwise in evaluation mode."""
    return module if training else module.eval()


def sample(task: Task, size: int, *, seed: int = 0) -> Sample:
    """Return a real batch of `size` samples, (inputs, targets), laid out sample by sample in memory.

    The caller's random state does not change. A fake mode is suspended: samples of real data could not be
    taken in it.

    Raises:
        UsageError: the task's batch function fails or does not return a pair, or a tensor requires a
            gradient, is sparse, nested or without values.
    """
    with real(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        batch = _made(task, size)
    if isinstance(batch, Mapping) and task.loss is not None:
        raise UsageError(
            f"a batch of {task.name} is only a dictionary, but the task's loss takes targets: return "
            "(inputs, targets), or give loss=None if the module computes its own loss"
        )
    inputs, targets = pair(batch, f"the batch function of {task.name} must return")
    refuse_gradients((inputs, targets), task.name)
    _refuse_strange((inputs, targets), task.name)
    with real():
        inputs, targets = pytree.tree_map_only(Tensor, task.cast, (inputs, targets))
        inputs, targets = pytree.tree_map_only(
            Tensor, lambda one: laid_out(one, sample_order(one)), (inputs, targets)
        )
        return inputs, targets


def _refuse_strange(batch: Sample, name: str) -> None:
    """Check that the tensors of a batch are dense, and have values.

    Raises:
        UsageError: one is sparse, nested or on the meta device. The message names it.
    """
    for what, tensor in named_tensors(batch):
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
            kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else "sparse"
            raise UsageError(
                f"{what} of a batch of {name} is a {kind} tensor: return dense tensors that hold values"
            )


def _made(task: Task, size: int) -> Any:
    """Return the result of the task's batch function.

    Raises:
        UsageError: the function fails.
    """
    try:
        return task.batch(size)
    except PipefitError:
        raise
    except Exception as error:
        raise UsageError(
            f"the batch function of {task.name} fails for {counted(size, 'sample')} ({in_one_line(error)}): "
            "it is called with the number of samples, and must return (inputs, targets)"
        ) from error


def check_samples(batch: Sample, size: int, name: str) -> None:
    """Check that every tensor of a batch of `size` samples holds them along dimension 0.

    Raises:
        UsageError: one does not. The message names it.
    """
    for what, tensor in named_tensors(batch):
        if tensor.ndim == 0 or tensor.shape[0] != size:
            raise UsageError(
                f"{what} of a batch of {name} has shape {tuple(tensor.shape)}, but dimension 0 must be the "
                f"{counted(size, 'sample')} of the batch: put tensors that are the same for all samples "
                "into the module"
            )


def pair(batch: Any, who: str) -> Sample:
    """Return `batch` as trees (inputs, targets); a dictionary alone is inputs without targets.

    Raises:
        UsageError: `batch` is something else. The message begins with `who`.
    """
    if isinstance(batch, Mapping):
        return opened(batch), None
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise UsageError(f"{who} a pair (inputs, targets), not {_describe(batch)}")
    return opened(batch[0]), opened(batch[1])


def _describe(batch: Any) -> str:
    if isinstance(batch, (tuple, list)):
        return counted(len(batch), "value")
    return kind_of(batch)
