"""What cannot be captured, said in one sentence: which module, which line of whose code, why, and the way out."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import fx, nn

from pipefit.errors import UsageError

REMEDY = "give pipefit the parts instead, pipefit.chain([...]) in the order they run, or change that line"
_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)
_REASONS = (
    (r"data-dependent|DataDependent|guard on|unbacked", "what runs next depends on the values of a tensor"),
    (r"\.numpy\(\)|numpy", "it turns a tensor into a numpy array"),
    (r"not a known type|Unsupported output type|Unsupported input type", "it returns a type that export does not know"),
    (r"[Uu]nsupported operator|no fake impl|Meta kernel", "it uses an operator of unknown shapes"),
)  # fmt: skip


def refuse_export(error: BaseException, name: str, paths: Mapping[nn.Module, str]) -> NoReturn:
    """Say why `torch.export` failed on model `name`; `paths` names the modules it ran."""
    where, line = _culprit(error.__traceback__, paths)
    text = " ".join(str(error).split("\n\n")[0].split())
    reason = next((words for pattern, words in _REASONS if re.search(pattern, f"{type(error).__name__}: {error}")), "")
    if not reason:
        reason = f"torch.export cannot follow it ({type(error).__name__}: {text[:200]})"
    raise UsageError(_sentence(name, where, line, reason)) from error


def refuse_operation(node: fx.Node) -> NoReturn:
    """Say why the operation `node` cannot be part of a layer."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [(file, number) for file, number in lines if not file.startswith(_TORCH)]
    reason = (
        "it reads a tensor's value into Python (.item(), int() or float() of a tensor)"
        if not isinstance(node.target, torch._ops.HigherOrderOperator)
        else f"{node.target} holds a function of its own"
    )
    line = f"{own[-1][0]}:{own[-1][1]}" if own else ""
    raise UsageError(_sentence("the model", modules[-1][0] if modules else "", line, reason))


def refuse_value(what: str, node: fx.Node, reason: str) -> NoReturn:
    """Say why a value of the model named `what` cannot be dealt with."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [(file, number) for file, number in lines if not file.startswith(_TORCH)]
    path = node.meta.get("stack", ("",))[-1]
    raise UsageError(_sentence(what, path, f"{own[-1][0]}:{own[-1][1]}" if own else "", reason))


def _culprit(trace: TracebackType | None, paths: Mapping[nn.Module, str]) -> tuple[str, str]:
    """The innermost module that was running, and the innermost line of the user's own code."""
    where = line = ""
    for frame, number in traceback.walk_tb(trace):
        file, running = frame.f_code.co_filename, frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(running, nn.Module) and running in paths:
            where = paths[running]
            if not file.startswith(_TORCH):
                line = f"{file}:{number}"
        elif line and not file.startswith((_TORCH, _OURS, "<")):
            line = f"{file}:{number}"
    return where, line


def _sentence(name: str, path: str, line: str, reason: str) -> str:
    where = f"{name}, module {path}" if path else name
    return f"{where} cannot be cut into layers{f' ({line})' if line else ''}: {reason}; {REMEDY}"


def told(value: Any) -> str:
    """A value's type, for people."""
    return f"a {type(value).__name__}"
