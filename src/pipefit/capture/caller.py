"""What the caller's own contexts and batches may be, and how the caller's module is left as it is.

Training records a graph under `torch.no_grad()` too. What a pipeline cannot do is refused by name: training inside
inference mode, autocast, hooks on saved tensors, fake tensors or another default device; gradients for the tensors of a
batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from pipefit.capture.refused_modules import copy_of, refuse_module
from pipefit.capture.task import Task
from pipefit.errors import UsageError


@contextmanager
def recording(what: str) -> Iterator[None]:
    """Inside, autograd records, whether or not the caller turned it off.

    Raises:
        UsageError: the caller is in a context under which training is another; begins with `what`.
    """
    if torch.is_inference_mode_enabled():
        raise UsageError(
            f"{what} inside torch.inference_mode() is not possible, for no graph can be made there: leave it"
        )
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise UsageError(
            f"{what} inside torch.autocast is not what the plan says: leave it, and use Task(..., "
            "precision='mixed-bfloat16') or 'mixed-float16', which plans know"
        )
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        raise UsageError(
            f"{what} inside hooks on saved tensors (torch.autograd.graph.save_on_cpu, saved_tensors_hooks) is not what "
            "the plan says: leave them, for plans say themselves what is moved and what is computed again"
        )
    refuse_elsewhere(what)
    with torch.enable_grad():
        yield


def refuse_elsewhere(what: str) -> None:
    """Refuse another default device than the CPU, on which numbers of ours would be made that a plan has elsewhere, and
    a mode in which there are no numbers.

    Raises:
        UsageError: there is one; begins with `what`.
    """
    if _is_callers(active_fake_mode()):
        raise UsageError(
            f"{what} inside a FakeTensorMode is not possible, for tensors have no numbers there: leave it; "
            "pipefit.certify is a dry run"
        )
    if torch.get_default_device().type != "cpu":
        raise UsageError(
            f"{what} with another default device than the CPU (torch.set_default_device, torch.device) is not what the "
            "plan says, which has a device for every tensor: put `with torch.device('cpu'):` around it"
        )


def is_callers_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no numbers, and is none of ours."""
    return isinstance(tensor, FakeTensor) and _is_callers(tensor.fake_mode)


def _is_callers(mode: FakeTensorMode | None) -> bool:
    """Whether a mode is one that people enter; ours are of classes of their own."""
    return type(mode) is FakeTensorMode


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, autograd records and nothing is cast, whatever the caller is in: for training that began before."""
    off = [torch.autocast(device, enabled=False) for device in ("cpu", "cuda")]
    with torch.inference_mode(mode=False), off[0], off[1], torch.enable_grad():
        yield


def refuse_gradients(batch: tuple[Any, Any], name: str) -> None:
    """A batch whose tensors wait for a gradient cannot be trained on: none comes back through a pipeline.

    Raises:
        UsageError: one does; says where, and what to do.
    """
    for what, tree in zip(("inputs", "targets"), batch, strict=True):
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise UsageError(
                    f"{what}{pytree.keystr(path)} of a batch of {name} requires a gradient, and a pipeline returns "
                    "none to the caller: pass its detach(), or, if a module that is to be trained made it, make that "
                    "module a part of the task's"
                )


def on_a_copy(task: Task) -> Task:
    """`task` with a copy of its module, without gradients, so that the caller's own module stays as it is.

    A task whose module is a function is returned as it is: every call builds a new module.
    """
    if not isinstance(task.module, nn.Module):
        return task
    refuse_module(task.module, task.name)
    return replace(task, module=copy_of(task.module, task.name, lambda tensor: tensor.detach().clone()))
