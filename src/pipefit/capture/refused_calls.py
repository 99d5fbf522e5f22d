"""What a forward may not call, refused while it is called: with the module and the line.

Checkpoints and compiled code inside a layer would hold other memory than the profile says. A traced model, besides,
would lose what works by something other than operations: hooks on tensors, inference mode, gradients of its own. And it
would repeat for ever what Python said while it was traced: a count in an attribute.
"""

from __future__ import annotations

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
_NUMBERS = (bool, int, float, str)
Settings = dict[str, bool | int | float | str]
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


class Memory:
    """What forwards of `module` leave in Python: other numbers and texts in attributes.

    A trace repeats the first call for ever.
    """

    def __init__(self, module: nn.Module) -> None:
        self._before: Settings = {}
        self._changes: dict[str, tuple[object, object]] = {}  # what the last forward has changed, from what to what
        module.register_forward_pre_hook(lambda *_: self._begin(module))
        module.register_forward_hook(lambda *_: self._end(module))

    def refuse(self, again: Callable[[], object]) -> None:
        """Check that a trace has not lost what it left; `again` calls the module.

        Raises:
            Refusal: an attribute changes in every call. One that a forward sets to the same in each call does not.
        """
        if self._changes:
            again()  # the first call once more, because a trace puts attributes back
            again()
        for name, (was, now) in self._changes.items():
            raise Refusal(
                f"its forward changes the attribute {name!r} in every call (the second from {was!r} to {now!r}), and a "
                "trace would repeat the first",
                f"keep it in a buffer and compute with that as a tensor, or {REMEDY}",
            )

    def _begin(self, module: nn.Module) -> None:
        self._before = _settings(module)

    def _end(self, module: nn.Module) -> None:
        now, before = _settings(module), self._before
        both = {name: (was, now[name]) for name, was in before.items() if name in now}
        self._changes = {name: (was, new) for name, (was, new) in both.items() if was is not new and was != new}


def _settings(module: nn.Module) -> Settings:
    """The numbers and texts among the attributes of a module and its parts, and of their classes."""
    found: Settings = {}
    for path, part in module.named_modules():
        classes = [each for each in type(part).__mro__ if issubclass(each, nn.Module) and each is not nn.Module]
        for owner in (*reversed(classes), part):
            numbers = {name: value for name, value in vars(owner).items() if isinstance(value, _NUMBERS)}
            found.update({f"{path}.{name}".removeprefix("."): value for name, value in numbers.items()})
    return found


def _replacements(*, traced: bool) -> Iterator[tuple[Any, str, Any]]:
    """Whose attribute is replaced by what."""
    yield checkpoint, "_checkpoint_without_reentrant_generator", _refuser(*_CHECKPOINT)
    yield checkpoint.CheckpointFunction, "apply", _refuser(*_CHECKPOINT)
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
