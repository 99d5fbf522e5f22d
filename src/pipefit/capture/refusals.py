"""Models that cannot be captured, planned or trained: all reasons with their remedies, and who raises them.

`refuse_module` checks a module before it is copied. `refusing` replaces functions of torch that a forward may
not call, so that calls raise a `Refusal`. `refuse_export` and `explained` translate errors of a trace and of
a run over fake tensors; `refuse_node` refuses an operation of a trace. Errors name the module, the line of
the user's code, the reason and the remedy.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from pipefit.capture.hugging_face import advice
from pipefit.capture.storages import extent, storage_key
from pipefit.errors import UsageError, in_one_line
from pipefit.torch_internals import HigherOrderOperator, pytree
from pipefit.torch_internals.patches import Call, intercepted

# ---- Reasons and remedies

REMEDY = (
    "give pipefit the parts with pipefit.chain([...]), in the order in which they run, or change that line"
)
VALUES = (
    "compute it without reading values (torch.where), or give pipefit the parts with "
    "pipefit.chain([...]), in the order in which they run: code inside a part may read values"
)
LAZY_REMEDY = (
    "give the sizes explicitly (Linear instead of LazyLinear), or call the module on a small batch and "
    "pass the initialized module"
)
_OUTSIDE = "leave the labels out of the inputs and give Task(..., loss=...)"
_WITHOUT = "check that the module takes such a batch without pipefit"
_PADDED = "give the recurrent layer the padded batch, and mask the padding after the end of each sequence"
_OPERATOR = "wrap it in a torch.library.custom_op with a register_fake, which gives the output shapes"
_OBJECT = "it computes with {}, which is not a tensor, such as its own torch.Generator"


class Reason(NamedTuple):
    """A reason for which a model is refused, and the remedy."""

    reason: str
    remedy: str = REMEDY


# Operations of a trace

TRANSFORM = Reason("it runs under torch.vmap or another transform of torch.func")
SHAPE = Reason("a shape depends on the values of a tensor", VALUES)
SPARSE = Reason("it makes a sparse tensor, whose memory plans cannot predict", "use dense tensors")
SCALAR = Reason("it reads a tensor's value into Python (.item(), int() or float() of a tensor)", VALUES)

# Calls in a forward. Checkpoints and compiled code inside a layer would hold other memory than the profile
# says. A traced model would also lose effects that are not operations.

_CHECKPOINT = Reason(
    "it calls torch.utils.checkpoint, which plans do not support yet",
    "turn it off (gradient_checkpointing_disable() of a Hugging Face model) and plan with recompute='always'",
)
_COMPILED = Reason(
    "it calls a function compiled by torch.compile, or torch.cond, whose memory is unknown",
    "give pipefit the module or function before compilation, and use torch.where instead of torch.cond",
)
_FORKS = Reason(
    "it forks this process (os.fork, multiprocessing), and a profile does not see other processes",
    "fork in the function that makes batches, or in a torch.library.custom_op with a register_fake",
)
_INFERENCE = Reason("it runs under torch.inference_mode(), which a trace loses", "use torch.no_grad()")
_BACKWARD = Reason(
    "it computes gradients inside its forward (torch.autograd.grad, .backward()), and a trace of that "
    "loses weights",
    "write that gradient out as operations, or put it into a torch.autograd.Function",
)
_TENSOR_HOOK = Reason(
    "it registers a hook on a tensor, which a trace loses", f"use a torch.autograd.Function, or {REMEDY}"
)
_SAVED_HOOKS = Reason(
    "it saves tensors through hooks (saved_tensors_hooks, save_on_cpu), which a trace loses",
    "remove them, and let the plan recompute",
)
_DATA_SET = Reason(
    "it replaces the data of a tensor (x.data = ...), which a trace loses",
    "use x.copy_() under torch.no_grad()",
)
DRAWS = Reason(
    "its forward draws random numbers from Python's or numpy's generator, which a trace would freeze and "
    "recomputation would not repeat",
    "draw random numbers with torch (torch.rand), which plans repeat, or turn that part off",
)

# Parameters that the module does not have

_STRANGER = Reason(
    "it computes with a parameter that is not registered in its modules, or that it reaches by an outside "
    "name, and a trace would never train that parameter",
    "register it, or freeze it (requires_grad_(False))",
)
STRANGER = Reason(
    "it computes with a parameter of another module, whose gradient would be lost on this layer's device",
    "register the parameter in this layer too (several layers may share one), or freeze it "
    "(requires_grad_(False)). Make a loss with parameters part of the module, which returns the loss "
    "(loss=None); weight decay is an option of the optimizer",
)

# Errors of torch, by their message

_CAUSAL = Reason(
    "nn.Transformer and its parts compare a mask with a causal mask, which depends on values",
    "pass is_causal=True or False together with the mask (tgt_is_causal, src_is_causal of nn.Transformer)",
)
_PACKED = Reason("it packs sequences (pack_padded_sequence), whose number of rows depends on values", _PADDED)
_GIVE = (
    "pass among the inputs the tensors that it otherwise creates, such as the attention_mask and "
    f"decoder_attention_mask of a transformers model, or {REMEDY}"
)
_OF_TRACES = (
    (r"DynamicOutputShape|data-dependent shape", SHAPE),
    (
        r"[Dd]ata-dependent|DataDependent|guard on|unbacked",
        Reason("its control flow depends on the values of a tensor", VALUES),
    ),
    (r"\.numpy\(\)|numpy", Reason("it turns a tensor into a numpy array")),
    (
        r"[Uu]nsupported ?[Oo]perator|no fake impl|Meta kernel",
        Reason("it uses an operator whose output shapes are unknown"),
    ),
    (r"FakeTensor", Reason("it needs the values of a tensor", VALUES)),
    (r"argument of type: .*Generator", Reason(_OBJECT.format("an argument"))),  # torch 2.11
)
_OF_RUNS = (
    (
        r"SparseTensorImpl|SparseCPU|[Ss]parse layout",
        "plans cannot predict the memory of sparse tensors and gradients: use dense ones (sparse=False)",
    ),
    (
        r"a product of",
        "give the data, the module and all its parts one dtype, as Task(..., precision='float32') does",
    ),
    (
        r"saves nothing has no backward|support saved tensor hooks",
        (
            "plans do not support gradients inside a forward: write them out as operations, or put them "
            "into a torch.autograd.Function"
        ),
    ),
    (r"endlessly", "let the loop make a fixed number of steps"),
    (r"closure", "use an optimizer that steps without a closure, such as AdamW or SGD"),
    (
        r"only supports 2D parameters",
        (
            "write an optimizer class that updates matrices with this optimizer and other parameters with "
            "another, chosen by the options that groups=... returns"
        ),
    ),
    (r"does not support dense gradients", "use Adam or AdamW"),
    (r"capturable=True", "remove capturable, which is only for CUDA graphs"),
    (
        r"differentiated Tensors?",
        (
            "a loss cannot differentiate one output by another: return that gradient from the module, "
            "written as operations"
        ),
    ),
    (r"_pack_padded_sequence", _PADDED),
    (r"_ctc_loss\.default", "give the lengths of ctc_loss as tensors, not as numbers"),
    (
        r"convert all Tensors to FakeTensors",
        (
            "it computes with a tensor that does not belong to the module, so no device would hold it: "
            "make it a buffer or a parameter of the module"
        ),
    ),
    (
        r"DynamicOutputShape|DataDependent",
        f"its output shapes depend on values: {_OPERATOR}",
    ),
    (r"[Uu]nsupported ?[Oo]perator|no fake impl", f"its output shapes are unknown: {_OPERATOR}"),
    (
        r"numpy|FakeTensor|unpack the object",
        f"it reads values, and a profile has none: use torch, or {_OPERATOR}",
    ),
)

# Tensors of a module

_LAZY = f"does not have a shape yet, like lazy modules before their first call: {LAZY_REMEDY}"
_MADE_IN_INFERENCE = (
    "was created inside torch.inference_mode() and cannot be trained: create the model outside"
)
_META = (
    "is on the meta device and holds no numbers: it can be profiled and planned, but not trained. Build "
    "it outside torch.device('meta')"
)
_NO_MEMORY = (
    "lacks memory, because another training in this process shards it between replicas or offloads it: "
    "build a new model for each training (pass Task a function that builds it)"
)


# ---- Exceptions


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


# ---- Modules before a copy


def refuse_module(module: nn.Module, name: str) -> None:
    """Check that `module`, the model `name`, can be planned and trained.

    Raises:
        UsageError: a part cannot. The message names the part, the reason and the remedy.
    """
    for place, part in module.named_modules():
        if reason := _unusable(part):
            raise UsageError(f"{f'{place} of {name}' if place else name} {reason}")
    tensors = named_tensors(module)
    _refuse_tensors(tensors, name, is_lazy, _LAZY)
    _refuse_tensors(tensors, name, torch.is_inference, _MADE_IN_INFERENCE)
    _refuse_shared_memory(tensors, name)


def refuse_meta(module: nn.Module, name: str) -> None:
    """Check that `module`, the model `name`, has values, so that it can run.

    Raises:
        UsageError: a parameter or buffer is on the meta device.
    """
    _refuse_tensors(named_tensors(module), name, lambda tensor: tensor.is_meta, _META)


def refuse_without_memory(module: nn.Module, name: str) -> None:
    """Check that the parameters of `module`, the model `name`, have memory.

    Raises:
        UsageError: another training in this process took the memory of a parameter. The message names it.
    """

    def is_moved(tensor: Tensor) -> bool:
        is_empty = not tensor.untyped_storage().nbytes()
        return isinstance(tensor, nn.Parameter) and is_empty and tensor.numel() > 0

    _refuse_tensors(named_tensors(module), name, is_moved, _NO_MEMORY)


def _unusable(part: nn.Module) -> str:
    """Return why a module itself cannot be planned, or ""."""
    kind = type(part)
    if hasattr(part, "_orig_mod") or part._compiled_call_impl is not None:
        return (
            "is compiled by torch.compile, so its memory is unknown: give pipefit the module before "
            "compilation"
        )
    if isinstance(part, ScriptModule):
        return (
            "is a TorchScript module (torch.jit.script or torch.jit.trace), which cannot be copied or "
            "traced: give pipefit the original module"
        )
    if kind.__module__.startswith(("torch.ao.nn.quantized", "torch.nn.quantized")):
        return (
            f"is a quantised {kind.__name__}, which cannot be trained: train the module before quantisation"
        )
    return ""


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of a module with their first names, each once."""
    return [*module.named_parameters(), *module.named_buffers()]


def _refuse_tensors(
    tensors: Iterable[tuple[str, Tensor]], name: str, is_refused: Callable[[Tensor], bool], reason: str
) -> None:
    for place, tensor in tensors:
        if is_refused(tensor):
            raise UsageError(f"{place} of {name} {reason}")


def _refuse_shared_memory(named: Iterable[tuple[str, Tensor]], name: str) -> None:
    """Check that trained tensors of different submodules do not overlap in memory.

    Layers of two stages have separate memory. One tensor may have several names.

    Raises:
        UsageError: two tensors overlap. The message names them.
    """
    tensors = dict[int, tuple[str, Tensor]]()
    for place, tensor in named:
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
                "stages would train separately: make them one parameter (b.weight = a.weight), or give one "
                "of them a copy"
            )


# ---- Calls that a forward may not make, which raise with the module and the line

_TORCH, _LAYERS = str(Path(torch.__file__).parent), str(Path(nn.__file__).parent)


@contextmanager
def refusing(*, traced: bool) -> Iterator[None]:
    """Let a forward in the body raise a `Refusal` at forbidden calls; `traced` adds those that a trace
    loses.
    """
    with intercepted(_EVERYWHERE | _IN_TRACES if traced else _EVERYWHERE):
        yield


def refusing_compiled() -> AbstractContextManager[None]:
    """Let a call of a compiled function in the body raise a `Refusal`.

    Under a mode such as a meter, the compiler would give the function up for good.
    """
    return intercepted({"compiled": _unless_compiled})


def refuse_hooks(module: nn.Module) -> None:
    """Check that no part of a module to be traced has hooks on its backward.

    Raises:
        Refusal: one has. The message names it.
    """
    for path, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise Refusal(
                f"{path or 'it'} has hooks on its backward, which a trace loses",
                f"remove them, or {REMEDY}",
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
                raise Refusal(*_STRANGER)
        return func(*args, **(kwargs or {}))


def _refuser(reason: Reason) -> Callable[[Any], Callable[..., NoReturn]]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise Refusal(*reason)

    return lambda _: refuse


def _refuse_inference(enter: Callable[[torch.inference_mode], None]) -> Callable[..., None]:
    """Refuse `torch.inference_mode`, unless it is turned off."""

    def entered(context: torch.inference_mode) -> None:
        if context.mode:
            raise Refusal(*_INFERENCE)
        enter(context)

    return entered


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


_EVERYWHERE: dict[Call, Callable[[Any], Any]] = {
    "checkpoint": _refuser(_CHECKPOINT),
    "reentrant checkpoint": _refuser(_CHECKPOINT),
    "fork": _refuser(_FORKS),
    "compiled": _unless_compiled,
}
_IN_TRACES: dict[Call, Callable[[Any], Any]] = {
    "inference_mode": _refuse_inference,
    "tensor hook": _refuser(_TENSOR_HOOK),
    "backward": _refuser(_BACKWARD),
    "saved_tensors_hooks": _refuser(_SAVED_HOOKS),
    "data": lambda _: property(_data, _set_data),
}


# ---- Errors of a trace, and of a run over fake tensors

_LONGEST = 200  # characters of a foreign exception that are quoted
_NOT_THE_USERS = (_TORCH, str(Path(__file__).parent.parent), contextlib.__file__, "<")
_ASKING = {"is_compiling", "is_torchdynamo_compiling", "is_exporting", "is_torchdynamo_exporting"}


def explained(error: BaseException) -> str:
    """Return the line of the user's code that raised `error`, its message, and the remedy, if one is
    known.
    """
    message = in_one_line(error)
    remedy = next((words for pattern, words in _OF_RUNS if re.search(pattern, message)), "")
    line = _own_line(error)
    return f"{f'({line}) ' if line else ''}{message}{f'; {remedy}' if remedy else ''}"


def refuse_export(error: BaseException, name: str, root: nn.Module, *, own_loss: bool) -> NoReturn:
    """Raise an error that says why `torch.export` failed on `root`, a copy of model `name`.

    `own_loss` says that the copy was to return its loss.
    """
    paths = {part: path for path, part in root.named_modules()}
    where, line = _innermost(error, paths), _own_line(error)
    settings = advice(root)
    if isinstance(error, Refusal):
        if error.module is not None:
            where, line = paths[error.module], _definition(error.module)
        has_run = any(
            frame.f_code.co_name == "_call_impl" for frame, _ in traceback.walk_tb(error.__traceback__)
        )
        line = line or (_definition(root) if has_run else "")
        sentence = _sentence(name, where, line, f"{error}{f', or {settings}' if settings else ''}")
        if error.in_a_whole_module:
            raise LooksAtValues(sentence, where, _why(line, error.reason)) from error
        raise UsageError(sentence) from error
    reason, remedy = _reason(error)
    ways = [settings, _OUTSIDE if own_loss and not where and remedy == VALUES else "", remedy]
    text = f"{reason}; {', or '.join(way for way in ways if way)}"
    sentence = _sentence(name, where, line or _definition(root), text)
    if remedy == VALUES:
        raise LooksAtValues(sentence, where, _why(line, reason, settings)) from error
    raise UsageError(sentence) from error


def _reason(error: BaseException) -> Reason:
    """Return why torch.export failed, and the remedy."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(frame.f_code.co_name == "_detect_is_causal_mask" for frame in frames):
        return _CAUSAL
    if any(isinstance(frame.f_locals.get("orig_input"), PackedSequence) for frame in frames):
        return _PACKED
    for pattern, reason in _OF_TRACES:
        if re.search(pattern, f"{type(error).__name__}: {error}"):
            return reason
    text = " ".join(str(error).split("\n\n")[0].split())[:_LONGEST]
    if type(error).__module__.startswith("torch"):
        return Reason(f"torch.export cannot follow it ({type(error).__name__}: {text})")
    raised = f"raises {type(error).__name__}: {text}"
    codes = (frame.f_code for frame in frames if not frame.f_code.co_filename.startswith(_NOT_THE_USERS))
    if any(_ASKING & set(code.co_names) for code in codes):
        return Reason(
            f"it checks whether it is being compiled, takes another path in a trace, and {raised}", _GIVE
        )
    return Reason(f"it {raised}", f"{_WITHOUT}; if it does, {REMEDY}")


def _own_line(error: BaseException) -> str:
    """Return the innermost line of the user's code that raised `error`; empty if there is none."""
    lines = [
        f"{frame.f_code.co_filename}:{number}"
        for frame, number in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS)
    ]
    return lines[-1] if lines else ""


def running_place() -> str:
    """Return the innermost place in the user's code that is running; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}:{frame.f_lasti}"


def _innermost(error: BaseException, paths: Mapping[nn.Module, str]) -> str:
    """Return the path of the innermost module whose forward raised `error`."""
    where = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        running = frame.f_locals.get(names[0]) if names else None
        if frame.f_code.co_name == "forward" and isinstance(running, nn.Module) and running in paths:
            where = paths[running]
    return where


def _definition(module: nn.Module) -> str:
    """Return the file and line of a module's forward."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


# ---- Operations of a trace


def refuse_operation(name: str, node: fx.Node) -> NoReturn:
    """Raise an error: `node` of model `name` reads a number, or holds a function of its own."""
    if isinstance(node.target, HigherOrderOperator):
        refuse_node(name, node, f"{node.target} contains another function")
    refuse_node(name, node, *SCALAR)


def refuse_object(name: str, what: str) -> NoReturn:
    """Raise an error: model `name` computes with an object that is not a tensor, such as a
    `torch.Generator`.
    """
    raise UsageError(_sentence(name, "", "", f"{_OBJECT.format(what)}; {REMEDY}"))


def refuse_node(name: str, node: fx.Node, reason: str, remedy: str = REMEDY) -> NoReturn:
    """Raise an error: the operation `node` of model `name` cannot be part of a layer, for this reason."""
    stack = node.meta.get("stack") or [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    where, line = "".join(stack[-1:]), line_of(node)
    sentence = _sentence(name, where, line, f"{reason}; {remedy}")
    if remedy == VALUES:
        raise LooksAtValues(sentence, where, _why(line, reason))
    raise UsageError(sentence)


def line_of(node: fx.Node) -> str:
    """Return the innermost line of the user's code that a node comes from."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [f"{file}:{number}" for file, number in lines if not file.startswith(_TORCH)]
    return own[-1] if own else ""


def _why(line: str, reason: str, setting: str = "") -> str:
    """Return the line and the reason for which a module stays whole, and the setting that turns it off."""
    return f"{f' ({line})' if line else ''}: {reason}{f': {setting}, if it need not' if setting else ''}"


def _sentence(name: str, path: str, line: str, reason: str) -> str:
    where = f"{name}, module {path}" if path else name
    return f"{where} cannot be cut into layers{f' ({line})' if line else ''}: {reason}"
