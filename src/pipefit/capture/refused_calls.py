"""What a forward may not call, refused while it is called: with the module and the line.

Checkpoints and compiled code inside a layer would hold other memory than the profile says. A traced model, besides,
would lose what works by something other than operations: hooks on tensors, inference mode, gradients of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from pipefit.capture.refusals import REMEDY, Refusal

_CHECKPOINT = (
    "it calls torch.utils.checkpoint, which plans cannot hold yet",
    "turn that off (gradient_checkpointing_disable() of a Hugging Face model) and plan with recompute='always'",
)
_COMPILED = (
    "it calls what torch.compile has compiled, or torch.cond, whose memory is unknown",
    "give pipefit the module or function as it was before, and torch.where for torch.cond",
)
_GENERATOR = (  # the first from torch 2.14 on, where the second only calls it
    "_checkpoint_without_reentrant_generator_impl"
    if hasattr(checkpoint, "_checkpoint_without_reentrant_generator_impl")
    else "_checkpoint_without_reentrant_generator"
)
_INFERENCE = "it runs under torch.inference_mode(), which a trace loses", "use torch.no_grad()"
_BACKWARD = (
    "it computes gradients inside its forward (torch.autograd.grad, .backward()), where a trace loses weights",
    "write that gradient out as operations, or in a torch.autograd.Function",
)
_TENSOR_HOOK = "it registers a hook on a tensor, which a trace loses", f"use a torch.autograd.Function, or {REMEDY}"
_SAVED_HOOKS = (
    "it saves tensors through hooks (saved_tensors_hooks, save_on_cpu), which a trace loses",
    "leave them out, and let the plan recompute",
)
_DATA_SET = (
    "it puts other data into a tensor (x.data = ...), which a trace loses",
    "use x.copy_() under torch.no_grad()",
)
_STRANGER = (
    "it computes with a parameter that none of its modules has, or that it reaches by a name from outside, and a trace "
    "would never train that"
)
_REGISTER = "register it, or freeze it (requires_grad_(False))"
_FORKS = (
    "it forks this process (os.fork, multiprocessing), and what another process does is in no profile",
    "do that in the function that makes batches, or in a torch.library.custom_op with a register_fake",
)
_TORCH, _LAYERS = str(Path(torch.__file__).parent), str(Path(nn.__file__).parent)


@contextmanager
def refusing(*, traced: bool) -> Iterator[None]:
    """Inside, a forward that calls what it may not raises a `Refusal`; `traced` says that it is traced, not run."""
    with ExitStack() as patches:
        for owner, name, replacement in _replacements(traced=traced):
            patches.enter_context(mock.patch.object(owner, name, replacement))
        yield


def refuse_hooks(module: nn.Module) -> None:
    """Check that no part of a module that is to be traced has hooks on its backward.

    Raises:
        Refusal: one has; names it.
    """
    for path, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise Refusal(
                f"{path or 'it'} has hooks on its backward, which a trace loses", f"take them off, or {REMEDY}"
            )


class RefusingStrangers(TorchFunctionMode):
    """Inside, a forward of `module` that computes with a trained parameter of anything else raises a `Refusal`.

    What is traced is a copy of the module. Another parameter would become a constant: one that belongs to nobody, or
    the module's own, reached by a name from outside.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._own: set[int] = set()  # empty until the forward begins: within an export parameters are others
        module.register_forward_pre_hook(lambda *_: self._begin(module))

    def _begin(self, module: nn.Module) -> None:
        self._own = set(map(id, module.parameters()))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in pytree.tree_leaves((args, kwargs)) if self._own else ():
            if isinstance(value, nn.Parameter) and value.requires_grad and id(value) not in self._own:
                raise Refusal(_STRANGER, _REGISTER)
        return func(*args, **(kwargs or {}))


def _replacements(*, traced: bool) -> Iterator[tuple[Any, str, Any]]:
    """Whose attribute is replaced by what."""
    yield checkpoint, _GENERATOR, _refuser(*_CHECKPOINT)
    yield checkpoint.CheckpointFunction, "apply", _refuser(*_CHECKPOINT)
    if hasattr(os, "fork"):
        yield os, "fork", _refuser(*_FORKS)
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None:  # else nothing is compiled
        yield compiler, "set_eval_frame", _unless_compiled(compiler.set_eval_frame)
    if traced:
        yield torch.inference_mode, "__enter__", _refuse_inference
        yield Tensor, "register_hook", _refuser(*_TENSOR_HOOK)
        yield torch.autograd, "_engine_run_backward", _refuser(*_BACKWARD)
        yield torch.autograd.graph.saved_tensors_hooks, "__enter__", _refuser(*_SAVED_HOOKS)
        yield Tensor, "data", property(_data, _set_data)


def _refuser(reason: str, remedy: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise Refusal(reason, remedy)

    return refuse


def _refuse_inference(context: torch.inference_mode) -> None:
    """Enter a context of `torch.inference_mode`, if it is turned off."""
    if context.mode:
        raise Refusal(*_INFERENCE)
    _enter_inference(context)


_enter_inference = torch.inference_mode.__enter__


def _data(tensor: Tensor) -> Tensor:
    """What `tensor.data` is for a model that is traced: an operation, which the trace sees."""
    return tensor.detach() if _asked_by_a_model() else _DATA.__get__(tensor)


def _set_data(tensor: Tensor, data: Tensor) -> None:
    if _asked_by_a_model():
        raise Refusal(*_DATA_SET)
    _DATA.__set__(tensor, data)


_DATA: Any = Tensor.__base__.__dict__["data"]


def _asked_by_a_model() -> bool:
    """Whether whoever asked for an attribute is a model's code, or a layer of torch.nn, and not torch's machinery."""
    file = sys._getframe(2).f_code.co_filename
    return file.startswith(_LAYERS) or not file.startswith(_TORCH)


def _unless_compiled(original: Callable[..., Any]) -> Callable[..., Any]:
    """What compiled functions call first; others call it as well."""

    def set_eval_frame(*args: Any) -> Any:
        if sys._getframe(1).f_code.co_name == "compile_wrapper":
            raise Refusal(*_COMPILED)
        return original(*args)

    return set_eval_frame
