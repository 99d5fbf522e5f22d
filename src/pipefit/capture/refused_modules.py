"""Modules that cannot be captured, whatever their forward does: refused by name before anything is copied or traced.

Made in inference mode, compiled, scripted, quantised, or without shapes yet. And modules that cannot be copied.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from pipefit.capture.copying import copied
from pipefit.capture.storages import extent, storage_key
from pipefit.errors import UsageError, in_one_line


def refuse_module(module: nn.Module, name: str) -> None:
    """Check that `module`, the model `name`, is one that can be planned and trained.

    Raises:
        UsageError: a part of it is not; names the part, the reason and the way out.
    """
    for place, part in module.named_modules():
        for reason in filter(None, (refused(part) for refused in _REASONS)):
            raise UsageError(f"{f'{place} of {name}' if place else name} {reason}")
    for place, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise UsageError(
                f"{place} of {name} has no shape yet, as in lazy modules before their first call: {LAZY_REMEDY}"
            )
        if tensor.is_inference():
            raise UsageError(
                f"{place} of {name} was made inside torch.inference_mode(), where no tensor can be trained: make the "
                "model outside of it"
            )
    _refuse_shared_memory(module, name)


def _refuse_shared_memory(module: nn.Module, name: str) -> None:
    """Check that no parameters or buffers of two submodules lie in the same memory if one is trained: layers of two
    stages have memory of their own. One tensor may have several names.

    Raises:
        UsageError: two do; names them.
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
                f"{run[0][0]} and {apart[0][0]} of {name} are two tensors in the same memory, which two stages would "
                "train apart: make them one parameter (b.weight = a.weight), or give one of them a copy"
            )


def refuse_meta(module: nn.Module, name: str) -> None:
    """Check that `module`, the model `name`, has numbers, so that it can be run.

    Raises:
        UsageError: a parameter or buffer is on the meta device.
    """
    for place, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise UsageError(
                f"{place} of {name} is on the meta device and has no numbers: it can be profiled and planned, but "
                'not run; build it outside of torch.device("meta")'
            )


def refuse_without_memory(module: nn.Module, name: str) -> None:
    """Check that what is to be trained has its memory.

    Raises:
        UsageError: another training in this process has taken it away; names the first tensor.
    """
    for place, tensor in module.named_parameters():
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            raise UsageError(
                f"{place} of {name} has no memory, since another training in this process divides it between replicas "
                "or has moved it away: make a model of its own for each training (Task of a function that builds it)"
            )


LAZY_REMEDY = (
    "write the sizes out (Linear for LazyLinear), or call the module on a small batch and pass the module itself"
)


def copy_of(module: nn.Module, name: str, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of `module`, the model `name`, with each tensor replaced by what `convert` makes of it.

    Raises:
        UsageError: it cannot be copied; names the innermost part that cannot.
    """
    try:
        return copied(module, convert)
    except Exception as error:
        place, part = _innermost(module, convert)
        raise UsageError(
            f"{f'{place} of {name}' if place else name} ({type(part).__name__}) cannot be copied "
            f"({in_one_line(error)}), and a profile is made of a copy: give it a __deepcopy__, or pass a function that "
            "builds the module"
        ) from error


def _innermost(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> tuple[str, nn.Module]:
    """The last part, from outside to inside, that cannot be copied."""
    found = "", module
    for place, part in module.named_modules():
        try:
            copied(part, convert)
        except Exception:  # noqa: BLE001 -- whatever a copy of the user's part raises
            found = place, part
    return found


def _compiled(part: nn.Module) -> str:
    if hasattr(part, "_orig_mod") or part._compiled_call_impl is not None:
        return "is compiled by torch.compile, so that its memory is unknown: give pipefit the module as it was before"
    return ""


def _scripted(part: nn.Module) -> str:
    if isinstance(part, ScriptModule):
        return (
            "is a TorchScript module (torch.jit.script or torch.jit.trace), which can be neither copied nor followed: "
            "give pipefit the module as it was before"
        )
    return ""


def _quantised(part: nn.Module) -> str:
    if type(part).__module__.startswith(("torch.ao.nn.quantized", "torch.nn.quantized")):
        return f"is a quantised {type(part).__name__}, which cannot be trained: train the module as it was before"
    return ""


_REASONS = (_compiled, _scripted, _quantised)
