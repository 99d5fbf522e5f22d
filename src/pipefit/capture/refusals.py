"""What cannot be captured, said in one sentence: which module, which line of whose code, why, and the way out."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
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


class Refusal(Exception):
    """Raised in the middle of a forward that cannot be followed: the reason, and the way out."""

    def __init__(self, reason: str, remedy: str = REMEDY) -> None:
        super().__init__(f"{reason}; {remedy}")


def refuse_export(error: BaseException, name: str, paths: Mapping[nn.Module, str]) -> NoReturn:
    """Say why `torch.export` failed on model `name`; `paths` names the modules it ran."""
    where, line = _innermost(error.__traceback__, paths)
    reason = str(error) if isinstance(error, Refusal) else f"{_reason(error)}; {REMEDY}"
    raise UsageError(_sentence(name, where, line, reason)) from error


def _reason(error: BaseException) -> str:
    """Why torch.export failed."""
    known = next((words for pattern, words in _REASONS if re.search(pattern, f"{type(error).__name__}: {error}")), "")
    text = " ".join(str(error).split("\n\n")[0].split())
    return known or f"torch.export cannot follow it ({type(error).__name__}: {text[:200]})"


def refuse_transform(name: str, node: fx.Node) -> NoReturn:
    """Say that the operation `node` of model `name` runs under a transform of functions."""
    _refuse_node(name, node, "it runs under torch.vmap or another transform of torch.func")


def refuse_object(name: str, what: str) -> NoReturn:
    """Say that model `name` computes with an object that is no tensor, such as a `torch.Generator`."""
    reason = f"it computes with {what}, which is no tensor, such as a torch.Generator of its own"
    raise UsageError(_sentence(name, "", "", f"{reason}; {REMEDY}"))


def refuse_operation(name: str, node: fx.Node) -> NoReturn:
    """Say why the operation `node` of model `name` cannot be part of a layer."""
    reason = "it reads a tensor's value into Python (.item(), int() or float() of a tensor)"
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        reason = f"{node.target} holds a function of its own"
    _refuse_node(name, node, reason)


def _refuse_node(name: str, node: fx.Node, reason: str) -> NoReturn:
    path = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    raise UsageError(_sentence(name, path[-1] if path else "", _line(node), f"{reason}; {REMEDY}"))


def refuse_value(name: str, node: fx.Node, reason: str) -> NoReturn:
    """Say that `node` of model `name` does what no layer may."""
    path = node.meta.get("stack") or ("",)
    raise UsageError(_sentence(name, path[-1], _line(node), f"{reason}; {REMEDY}"))


def _line(node: fx.Node) -> str:
    """The innermost line of the user's own code that a node comes from."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [f"{file}:{number}" for file, number in lines if not file.startswith(_TORCH)]
    return own[-1] if own else ""


def _innermost(trace: TracebackType | None, paths: Mapping[nn.Module, str]) -> tuple[str, str]:
    """The innermost module that was running, and the innermost line of the user's own code."""
    where = line = ""
    for frame, number in traceback.walk_tb(trace):
        file, running = frame.f_code.co_filename, _first_argument(frame)
        if frame.f_code.co_name == "forward" and isinstance(running, nn.Module) and running in paths:
            where = paths[running]
            if not file.startswith(_TORCH):
                line = f"{file}:{number}"
        elif line and not file.startswith((_TORCH, _OURS, "<")):
            line = f"{file}:{number}"
    return where, line


def _first_argument(frame: FrameType) -> Any:
    """What a method calls self."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return frame.f_locals.get(names[0]) if names else None


def _sentence(name: str, path: str, line: str, reason: str) -> str:
    where = f"{name}, module {path}" if path else name
    return f"{where} cannot be cut into layers{f' ({line})' if line else ''}: {reason}"
