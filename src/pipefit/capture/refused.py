"""Modules and operations that cannot be captured: clear errors before or during a copy or a trace.

Modules that were made in inference mode, compiled, scripted or quantized, that have no shapes yet, or that
cannot be copied.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from pipefit.capture.copying import copied
from pipefit.capture.refusals import PADDED, REMEDY, Refusal
from pipefit.capture.storages import extent, storage_key
from pipefit.errors import UsageError, in_one_line
from pipefit.torch_internals import pytree

# ---- Calls that a forward may not make, which raise with the module and the line
#
# Checkpoints and compiled code inside a layer would hold other memory than the profile says. A traced model
# would also lose effects that are not operations: hooks on tensors, inference mode, gradients computed inside
# it.

_CHECKPOINT = (
    "it calls torch.utils.checkpoint, which plans cannot hold yet",
    (
        "turn that off (gradient_checkpointing_disable() of a Hugging Face model) and plan with "
        "recompute='always'"
    ),
)
_COMPILED = (
    "it calls what torch.compile has compiled, or torch.cond, whose memory is unknown",
    "give pipefit the module or function as it was before, and torch.where for torch.cond",
)
_GENERATOR = (  # the first from torch 2.14 on; the second only calls it there
    "_checkpoint_without_reentrant_generator_impl"
    if hasattr(checkpoint, "_checkpoint_without_reentrant_generator_impl")
    else "_checkpoint_without_reentrant_generator"
)
_INFERENCE = "it runs under torch.inference_mode(), which a trace loses", "use torch.no_grad()"
_BACKWARD = (
    (
        "it computes gradients inside its forward (torch.autograd.grad, .backward()), where a trace loses "
        "weights"
    ),
    "write that gradient out as operations, or in a torch.autograd.Function",
)
_TENSOR_HOOK = (
    "it registers a hook on a tensor, which a trace loses",
    f"use a torch.autograd.Function, or {REMEDY}",
)
_SAVED_HOOKS = (
    "it saves tensors through hooks (saved_tensors_hooks, save_on_cpu), which a trace loses",
    "leave them out, and let the plan recompute",
)
_DATA_SET = (
    "it puts other data into a tensor (x.data = ...), which a trace loses",
    "use x.copy_() under torch.no_grad()",
)
_STRANGER = (
    "it computes with a parameter that none of its modules has, or that it reaches by a name from outside, "
    "and a trace "
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
    """Let a forward in the body raise a `Refusal` at forbidden calls; `traced` adds those that a trace
    loses.
    """
    with ExitStack() as patches:
        for owner, name, replacement in _replacements(traced=traced):
            patches.enter_context(mock.patch.object(owner, name, replacement))
        yield


def refuse_hooks(module: nn.Module) -> None:
    """Check that no part of a module to be traced has hooks on its backward.

    Raises:
        Refusal: one has. The message names it.
    """
    for path, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise Refusal(
                f"{path or 'it'} has hooks on its backward, which a trace loses",
                f"take them off, or {REMEDY}",
            )


class RefusingStrangers(TorchFunctionMode):
    """A mode in which a forward of `module` raises a `Refusal` if it uses a foreign trained parameter.

    The trace runs a copy of the module. A parameter that is not the copy's would become a constant: a
    parameter of no module, or one of the original module, reached by a name from outside.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._own: set[int] = set()  # empty until the forward begins: an export replaces parameters
        module.register_forward_pre_hook(lambda *_: self._begin(module))

    def _begin(self, module: nn.Module) -> None:
        self._own = set(map(id, module.parameters()))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in pytree.tree_leaves((args, kwargs)) if self._own else ():
            if isinstance(value, nn.Parameter) and value.requires_grad and id(value) not in self._own:
                raise Refusal(_STRANGER, _REGISTER)
        return func(*args, **(kwargs or {}))


def _replacements(*, traced: bool) -> Iterator[tuple[Any, str, Any]]:
    """Yield (owner, attribute name, replacement) for every patch."""
    yield checkpoint, _GENERATOR, _refuser(*_CHECKPOINT)
    yield checkpoint.CheckpointFunction, "apply", _refuser(*_CHECKPOINT)
    if hasattr(os, "fork"):
        yield os, "fork", _refuser(*_FORKS)
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None:  # otherwise nothing is compiled
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
    """Refuse `torch.inference_mode`, unless it is turned off."""
    if context.mode:
        raise Refusal(*_INFERENCE)
    _enter_inference(context)


_enter_inference = torch.inference_mode.__enter__


def _data(tensor: Tensor) -> Tensor:
    """Return `tensor.data`; for a traced model's code as an operation, which the trace sees."""
    return tensor.detach() if _asked_by_a_model() else _DATA.__get__(tensor)


def _set_data(tensor: Tensor, data: Tensor) -> None:
    if _asked_by_a_model():
        raise Refusal(*_DATA_SET)
    _DATA.__set__(tensor, data)


_DATA: Any = Tensor.__base__.__dict__["data"]


def _asked_by_a_model() -> bool:
    """Return whether a model's code or a layer of torch.nn reads the attribute, not torch's internals."""
    file = sys._getframe(2).f_code.co_filename
    return file.startswith(_LAYERS) or not file.startswith(_TORCH)


def _unless_compiled(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `set_eval_frame` that refuses calls from compiled functions, but not from others."""

    def set_eval_frame(*args: Any) -> Any:
        if sys._getframe(1).f_code.co_name == "compile_wrapper":
            raise Refusal(*_COMPILED)
        return original(*args)

    return set_eval_frame


# ---- Errors over fake tensors in a layer, the loss or the optimizer, with remedies by message

_NOT_THE_USERS = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent.parent),
    contextlib.__file__,
    "<",
)
_OPERATOR = "make that a torch.library.custom_op with a register_fake, which says what shapes it returns"
_REMEDIES = (
    (
        r"SparseTensorImpl|SparseCPU|[Ss]parse layout",
        "no plan knows the memory of sparse tensors and gradients: use dense ones (sparse=False)",
    ),
    (
        r"a product of",
        "give the data, the module and all its parts one dtype, as Task(..., precision='float32') does",
    ),
    (
        r"saves nothing has no backward|support saved tensor hooks",
        (
            "no plan holds gradients inside a forward: write them out as operations, or in a "
            "torch.autograd.Function"
        ),
    ),
    (r"without an end", "let the loop make a fixed number of steps"),
    (r"closure", "use an optimizer that steps without a closure, such as AdamW or SGD"),
    (
        r"only supports 2D parameters",
        (
            "let a class of your own step matrices with it and the rest with another, by options that groups=... "
            "gives"
        ),
    ),
    (r"does not support dense gradients", "use Adam or AdamW"),
    (r"capturable=True", "leave capturable out: it is for steps that a GPU records"),
    (
        r"differentiated Tensors?",
        (
            "a loss cannot differentiate one output by another: let the module return that gradient, written as "
            "operations"
        ),
    ),
    (r"_pack_padded_sequence", PADDED),
    (r"_ctc_loss\.default", "give the lengths of ctc_loss as tensors, not as numbers"),
    (
        r"convert all Tensors to FakeTensors",
        (
            "it computes with a tensor from outside, which no device would have: make that a buffer or a "
            "parameter of it"
        ),
    ),
    (
        r"DynamicOutputShape|DataDependent",
        f"what it returns depends on values, and nothing can be assumed of it: {_OPERATOR}",
    ),
    (r"[Uu]nsupported ?[Oo]perator|no fake impl", f"its shapes are not known: {_OPERATOR}"),
    (
        r"numpy|FakeTensor|unpack the object",
        f"it needs values, and a profile has none: use torch, or {_OPERATOR}",
    ),
)


def why(error: BaseException) -> str:
    """Return the line of the user's code that raised `error`, its message, and the remedy, if one is
    known.
    """
    said = in_one_line(error)
    remedy = next((words for pattern, words in _REMEDIES if re.search(pattern, said)), "")
    line = own_line(error)
    return f"{f'({line}) ' if line else ''}{said}{f'; {remedy}' if remedy else ''}"


def own_line(error: BaseException) -> str:
    """Return the innermost line of the user's code that raised `error`; empty if there is none."""
    lines = [
        f"{frame.f_code.co_filename}:{number}"
        for frame, number in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS)
    ]
    return lines[-1] if lines else ""


# ---- Modules that cannot be planned or trained


def refuse_module(module: nn.Module, name: str) -> None:
    """Check that `module`, the model `name`, can be planned and trained.

    Raises:
        UsageError: a part cannot. The message names the part, the reason and the remedy.
    """
    for place, part in module.named_modules():
        for reason in filter(None, (refused(part) for refused in _REASONS)):
            raise UsageError(f"{f'{place} of {name}' if place else name} {reason}")
    for place, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise UsageError(
                f"{place} of {name} has no shape yet, as in lazy modules before their first call: "
                f"{LAZY_REMEDY}"
            )
        if tensor.is_inference():
            raise UsageError(
                f"{place} of {name} was made inside torch.inference_mode(), where no tensor can be trained: "
                "make the "
                "model outside of it"
            )
    _refuse_shared_memory(module, name)


def _refuse_shared_memory(module: nn.Module, name: str) -> None:
    """Check that trained tensors of different submodules do not overlap in memory.

    Layers of two stages have separate memory. One tensor may have several names.

    Raises:
        UsageError: two tensors overlap. The message names them.
    """
    tensors = dict[int, tuple[str, Tensor]]()
    for place, tensor in (*module.named_parameters(), *module.named_buffers()):
        tensors.setdefault(id(tensor), (place, tensor))
    dense = [(place, tensor) for place, tensor in tensors.values() if tensor.layout is torch.strided]
    run, storage, reached = list[tuple[str, Tensor]](), 0, 0
    for place, tensor in sorted(dense, key=lambda named: (storage_key(named[1]), *extent(named[1]))):
        begin, end = extent(tensor)
        if storage_key(tensor) != storage or begin >= reached:
            run, storage, reached = [], storage_key(tensor), 0
        run.append((place, tensor))
        reached = max(reached, end)
        apart = [one for one in run if one[0].rpartition(".")[0] != run[0][0].rpartition(".")[0]]
        if apart and any(isinstance(one, nn.Parameter) and one.requires_grad for _, one in run):
            raise UsageError(
                f"{run[0][0]} and {apart[0][0]} of {name} are two tensors in the same memory, which two "
                "stages would "
                "train apart: make them one parameter (b.weight = a.weight), or give one of them a copy"
            )


def refuse_meta(module: nn.Module, name: str) -> None:
    """Check that `module`, the model `name`, has values, so that it can run.

    Raises:
        UsageError: a parameter or buffer is on the meta device.
    """
    for place, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise UsageError(
                f"{place} of {name} is on the meta device and has no numbers: it can be profiled and "
                "planned, but "
                'not run; build it outside of torch.device("meta")'
            )


def refuse_without_memory(module: nn.Module, name: str) -> None:
    """Check that the parameters of `module`, the model `name`, have memory.

    Raises:
        UsageError: another training in this process took the memory of a parameter. The message names it.
    """
    for place, tensor in module.named_parameters():
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            raise UsageError(
                f"{place} of {name} has no memory, since another training in this process divides it between "
                "replicas "
                "or has moved it away: make a model of its own for each training (Task of a function that "
                "builds it)"
            )


LAZY_REMEDY = (
    "write the sizes out (Linear for LazyLinear), or call the module on a small batch and pass the module "
    "itself"
)


def copy_of(module: nn.Module, name: str, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy of `module`, the model `name`, with each tensor replaced by `convert(tensor)`.

    Raises:
        UsageError: the module cannot be copied. The message names the innermost part that cannot.
    """
    try:
        return copied(module, convert)
    except Exception as error:
        place, part = _innermost(module, convert)
        raise UsageError(
            f"{f'{place} of {name}' if place else name} ({type(part).__name__}) cannot be copied "
            f"({in_one_line(error)}), and a profile is made of a copy: give it a __deepcopy__, or pass a "
            "function that "
            "builds the module"
        ) from error


def _innermost(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> tuple[str, nn.Module]:
    """Return path and module of the last part, from outside to inside, that cannot be copied."""
    result = "", module
    for place, part in module.named_modules():
        try:
            copied(part, convert)
        except Exception:  # noqa: BLE001 -- whatever a copy of the user's part raises
            result = place, part
    return result


def _compiled(part: nn.Module) -> str:
    if hasattr(part, "_orig_mod") or part._compiled_call_impl is not None:
        return (
            "is compiled by torch.compile, so that its memory is unknown: give pipefit the module as it was "
            "before"
        )
    return ""


def _scripted(part: nn.Module) -> str:
    if isinstance(part, ScriptModule):
        return (
            "is a TorchScript module (torch.jit.script or torch.jit.trace), which can be neither copied nor "
            "followed: "
            "give pipefit the module as it was before"
        )
    return ""


def _quantised(part: nn.Module) -> str:
    if type(part).__module__.startswith(("torch.ao.nn.quantized", "torch.nn.quantized")):
        return (
            f"is a quantised {type(part).__name__}, which cannot be trained: train the module as it was "
            "before"
        )
    return ""


_REASONS = (_compiled, _scripted, _quantised)
