"""What the caller's own contexts, batches and modules may be, and how the caller's module is left as it is.

Training records a graph under `torch.no_grad()` too. What a pipeline cannot do is refused by name: training inside
inference mode or autocast, gradients for the tensors of a batch, modules that were made in inference mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.capture.copying import copied
from pipefit.capture.task import Task
from pipefit.errors import UsageError


@contextmanager
def recording(what: str) -> Iterator[None]:
    """Inside, autograd records, whether or not the caller turned it off.

    Raises:
        UsageError: the caller is in inference mode or under autocast; begins with `what`.
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
    with torch.enable_grad():
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


def refuse_inference(module: nn.Module, name: str) -> None:
    """Tensors that were made in inference mode cannot be trained.

    Raises:
        UsageError: a parameter or buffer is one; names it.
    """
    for place, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_inference():
            raise UsageError(
                f"{place} of {name} was made inside torch.inference_mode(), where no tensor can be trained: make the "
                "model outside of it"
            )


def refuse_compiled(module: nn.Module, name: str) -> None:
    """Compiled modules cannot be planned: what their code saves and needs is unknown.

    Raises:
        UsageError: a part of the module is compiled; names it.
    """
    for place, part in module.named_modules():
        if hasattr(part, "_orig_mod") or part._compiled_call_impl is not None:
            raise UsageError(
                f"{f'{place} of {name}' if place else name} is compiled by torch.compile, so that its memory is "
                "unknown: give pipefit the module as it was before"
            )


def on_a_copy(task: Task) -> Task:
    """`task` with a copy of its module, without gradients, so that the caller's own module stays as it is.

    A task whose module is a function is returned as it is: every call builds a new module.
    """
    if not isinstance(task.module, nn.Module):
        return task
    return replace(task, module=copied(task.module, lambda tensor: tensor.detach().clone()))
