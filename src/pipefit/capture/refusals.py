"""Errors for models that cannot be captured: which module, which line of code, why, and the remedy."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.nn.utils.rnn import PackedSequence

from pipefit.capture.hugging_face import advice
from pipefit.errors import UsageError
from pipefit.torch_internals import HigherOrderOperator

REMEDY = "give pipefit the parts instead, pipefit.chain([...]) in the order they run, or change that line"
VALUES = (
    "compute it without looking at values (torch.where), or give pipefit the parts instead, "
    "pipefit.chain([...]) in "
    "the order they run: what is inside a part may look at values"
)
_OUTSIDE = "leave the labels out of the inputs and give Task(..., loss=...)"
_WITHOUT = "see whether the module takes such a batch without pipefit"
_CAUSAL = (
    "nn.Transformer and its parts compare a mask with a causal one, which depends on values",
    (
        "say what it is, with is_causal=True or False beside the mask (tgt_is_causal, src_is_causal of "
        "nn.Transformer)"
    ),
)
PADDED = "give the recurrent layer the padded batch, and mask what lies behind the end of each sequence"
_PACKED = "it packs sequences (pack_padded_sequence), and values alone tell how many rows that are", PADDED
_ASKING = {"is_compiling", "is_torchdynamo_compiling", "is_exporting", "is_torchdynamo_exporting"}
_GIVE = (
    "give it among the inputs what it otherwise makes by itself, as a model of transformers may make its "
    f"attention_mask and decoder_attention_mask, or {REMEDY}"
)
_LONGEST = 200  # characters of a foreign exception that are quoted
_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)
_OBJECT = "it computes with {}, which is no tensor, such as a torch.Generator of its own"
_REASONS = (
    (r"DynamicOutputShape|data-dependent shape", "a shape depends on the values of a tensor", VALUES),
    (
        r"[Dd]ata-dependent|DataDependent|guard on|unbacked",
        "what runs next depends on the values of a tensor",
        VALUES,
    ),
    (r"\.numpy\(\)|numpy", "it turns a tensor into a numpy array", REMEDY),
    (
        r"[Uu]nsupported ?[Oo]perator|no fake impl|Meta kernel",
        "it uses an operator of unknown shapes",
        REMEDY,
    ),
    (r"FakeTensor", "it needs the values of a tensor", VALUES),
    (
        r"argument of type: .*Generator",
        _OBJECT.format("an argument"),
        REMEDY,
    ),  # torch 2.11 raises this before the program exists
)


class Refusal(Exception):
    """Raised in the middle of a forward that cannot be followed, with the reason and the remedy.

    `module` is the part at fault, if it is not the running one. `in_a_whole_module` says that the part can be
    captured if it stays whole.
    """

    def __init__(
        self,
        reason: str,
        remedy: str = REMEDY,
        *,
        module: nn.Module | None = None,
        in_a_whole_module: bool = False,
    ) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason, self.module, self.in_a_whole_module = reason, module, in_a_whole_module


class LooksAtValues(UsageError):
    """The behavior of the part at `path` depends on the values of tensors, so a trace cannot follow it.

    `why` gives the line, and the setting that turns it off, if any; `whole` says that the part was to stay
    whole and cannot.
    """

    def __init__(self, sentence: str, path: str, why: str = "", *, whole: bool = False) -> None:
        super().__init__(sentence)
        self.path, self.why, self.whole = path, why, whole


def refuse_export(error: BaseException, name: str, root: nn.Module, *, own_loss: bool) -> NoReturn:
    """Raise an error that says why `torch.export` failed on `root`, a copy of model `name`.

    `own_loss` says that the copy was to return its loss.
    """
    paths = {part: path for path, part in root.named_modules()}
    where, line = _innermost(error.__traceback__, paths)
    if isinstance(error, Refusal):
        if error.module is not None:
            where, line = paths[error.module], _definition(error.module)
        setting = f", or {advice(root)}" if advice(root) else ""
        line = line or (_definition(root) if _has_run(error) else "")
        sentence = _sentence(name, where, line, f"{error}{setting}")
        if error.in_a_whole_module:
            raise LooksAtValues(sentence, where, _why(line, error.reason)) from error
        raise UsageError(sentence) from error
    reason, remedy = _reason(error)
    ways = [advice(root), _OUTSIDE if own_loss and not where and remedy == VALUES else "", remedy]
    text = f"{reason}; {', or '.join(way for way in ways if way)}"
    sentence = _sentence(name, where, line or _definition(root), text)
    if remedy == VALUES:
        raise LooksAtValues(sentence, where, _why(line, reason, advice(root))) from error
    raise UsageError(sentence) from error


def _reason(error: BaseException) -> tuple[str, str]:
    """Return why torch.export failed, and the remedy."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if any(frame.f_code.co_name == "_detect_is_causal_mask" for frame, _ in frames):
        return _CAUSAL
    if any(isinstance(frame.f_locals.get("orig_input"), PackedSequence) for frame, _ in frames):
        return _PACKED
    text = " ".join(str(error).split("\n\n")[0].split())[:_LONGEST]
    for pattern, reason, remedy in _REASONS:
        if re.search(pattern, f"{type(error).__name__}: {error}"):
            return reason, remedy
    if type(error).__module__.startswith("torch"):
        return f"torch.export cannot follow it ({type(error).__name__}: {text})", REMEDY
    raised = f"raises {type(error).__name__}: {text}"
    codes = (frame.f_code for frame, _ in frames)
    if any(
        _ASKING & set(code.co_names) for code in codes if not code.co_filename.startswith((_TORCH, _OURS))
    ):
        return (
            f"it asks whether it is being compiled, takes another way while it is traced, and {raised}",
            _GIVE,
        )
    return f"it {raised}", f"{_WITHOUT}; if it does, {REMEDY}"


def _has_run(error: BaseException) -> bool:
    """Return whether the error was raised while a module ran."""
    return any(frame.f_code.co_name == "_call_impl" for frame, _ in traceback.walk_tb(error.__traceback__))


def _definition(module: nn.Module) -> str:
    """Return the file and line of a module's forward."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


def refuse_transform(name: str, node: fx.Node) -> NoReturn:
    """Raise an error: the operation `node` of model `name` runs under a function transform."""
    _refuse_node(name, node, "it runs under torch.vmap or another transform of torch.func", REMEDY)


def refuse_shape(name: str, node: fx.Node) -> NoReturn:
    """Raise an error: the shape of the result of `node` in model `name` depends on values."""
    _refuse_node(name, node, "a shape depends on the values of a tensor", VALUES)


def refuse_sparse(name: str, node: fx.Node) -> NoReturn:
    """Raise an error: the operation `node` of model `name` makes a sparse tensor."""
    _refuse_node(name, node, "it makes a sparse tensor, whose memory no plan knows", "use dense tensors")


def refuse_object(name: str, what: str) -> NoReturn:
    """Raise an error: model `name` computes with an object that is not a tensor, such as a
    `torch.Generator`.
    """
    raise UsageError(_sentence(name, "", "", f"{_OBJECT.format(what)}; {REMEDY}"))


def refuse_operation(name: str, node: fx.Node) -> NoReturn:
    """Raise an error: the operation `node` of model `name` cannot be part of a layer."""
    reason, remedy = "it reads a tensor's value into Python (.item(), int() or float() of a tensor)", VALUES
    if isinstance(node.target, HigherOrderOperator):
        reason, remedy = f"{node.target} holds a function of its own", REMEDY
    _refuse_node(name, node, reason, remedy)


def _refuse_node(name: str, node: fx.Node, reason: str, remedy: str) -> NoReturn:
    where, line = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()][-1:], line_of(node)
    sentence = _sentence(name, "".join(where), line, f"{reason}; {remedy}")
    raise (
        LooksAtValues(sentence, "".join(where), _why(line, reason))
        if remedy == VALUES
        else UsageError(sentence)
    )


def refuse_value(name: str, node: fx.Node, reason: str) -> NoReturn:
    """Raise an error: `node` of model `name` does something that layers may not, for this reason."""
    path = node.meta.get("stack") or ("",)
    raise UsageError(_sentence(name, path[-1], line_of(node), f"{reason}; {REMEDY}"))


def line_of(node: fx.Node) -> str:
    """Return the innermost line of the user's code that a node comes from."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [f"{file}:{number}" for file, number in lines if not file.startswith(_TORCH)]
    return own[-1] if own else ""


def _innermost(trace: TracebackType | None, paths: Mapping[nn.Module, str]) -> tuple[str, str]:
    """Return the path of the innermost running module, and the innermost line of the user's code."""
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
    """Return the first argument of a frame: a method's self."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return frame.f_locals.get(names[0]) if names else None


def _why(line: str, reason: str, setting: str = "") -> str:
    """Return the line and the reason for which a module stays whole, and the setting that turns it off."""
    return f"{f' ({line})' if line else ''}: {reason}{f': {setting}, if it need not' if setting else ''}"


def _sentence(name: str, path: str, line: str, reason: str) -> str:
    where = f"{name}, module {path}" if path else name
    return f"{where} cannot be cut into layers{f' ({line})' if line else ''}: {reason}"
