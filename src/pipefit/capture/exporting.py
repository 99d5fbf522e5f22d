"""`torch.export` of a copy on fake tensors: the whole model as one program, traced for the CPU in its mode.

Nothing of the model's size is allocated, whatever the device of its parameters, real or fake. Tracing takes
milliseconds an operation, 10 s for a model of 7 billion parameters. Shapes are those of the sample.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from pipefit.capture.copying import copied
from pipefit.capture.cuda_autocast import casting_for
from pipefit.capture.flat_graph import draws, mutated_arguments
from pipefit.capture.hugging_face import cache_class, configure
from pipefit.capture.random_state import put_back, refuse_foreign_draws
from pipefit.capture.refusals import (
    REMEDY,
    Refusal,
    RefusingStrangers,
    named_tensors,
    refuse_export,
    refuse_hooks,
    refusing,
)
from pipefit.capture.storages import storage_key
from pipefit.capture.structure import closed, opened
from pipefit.capture.whole_modules import call_whole_parts, whole_parts
from pipefit.errors import PipefitError, UsageError
from pipefit.schema.profile import Target
from pipefit.texts import kind_of
from pipefit.torch_internals import pytree, without_dispatch_modes
from pipefit.torch_internals.fake_tensors import FakeTensor, FakeTensorMode
from pipefit.torch_internals.patches import (
    caches_without_copies,
    eager_masks,
    no_negative_variance,
    recompiled_once,
    unchecked_arguments,
    without_gpus,
)

# ---- Attention masks of Hugging Face models, as in eager runs
#
# While it is traced, transformers builds an attention mask of sequence x sequence even if every token may
# attend to all tokens, or to all before it; in eager runs it leaves the mask out, and attention takes its
# fast path. A captured model should compute and hold what the eager one does. Without a padding mask, that is
# known without looking at values. The same holds if positions do not depend on inputs, as when the model
# counts them: whether they restart, as in packed sequences, is then equal for every batch.


def _unless_known(find: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    """Wrap `find`: return None for positions that are known to count up by one."""

    def found(position_ids: Tensor) -> Tensor | None:
        known = _constant(position_ids)
        with without_dispatch_modes():
            counts_up = known is not None and bool((known.diff(dim=-1) == 1).all())
        return None if counts_up else find(position_ids)

    return found


def _constant(tensor: Tensor) -> Tensor | None:
    """Return the values of a traced tensor if they depend on no input, parameter, buffer or random draw."""
    end = _node_of(tensor)
    if end is None:
        return None
    needed = _needed_by(end)
    changed = {
        source
        for node in end.graph.nodes
        for target in mutated_arguments(node)
        for source in _needed_by(target)
    }
    if changed & needed or not all(node.op == "call_function" and not draws(node) for node in needed):
        return None
    values: dict[fx.Node, Any] = {}
    with without_dispatch_modes():
        for node in end.graph.nodes:
            if node in needed:
                args, keywords = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **keywords)
    result: Tensor = values[end]
    return result


def _node_of(tensor: Tensor) -> fx.Node | None:
    """Return the operation of the running trace that made `tensor`."""
    mode: Any = get_proxy_mode()
    slot: Any = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def _needed_by(node: fx.Node) -> set[fx.Node]:
    """Return a node and all the nodes that it is computed from."""
    result, pending = set[fx.Node](), [node]
    while pending:
        node = pending.pop()
        if node not in result:
            result.add(node)
            pending += node.all_input_nodes
    return result


# ---- Attributes that a forward changes in every call, such as a count or a temperature
#
# A trace would repeat the first call forever, so they are refused. The numbers and strings among the
# attributes of all modules and their classes are compared before and after a call. If one has changed, the
# module is called twice more.

_PLAIN = (bool, int, float, str)
Attributes = dict[str, bool | int | float | str]


class ChangedAttributes:
    """Numbers and strings in attributes that the last forward of `module` changed."""

    def __init__(self, module: nn.Module) -> None:
        self._before: Attributes = {}
        self._changes: dict[str, tuple[object, object]] = {}  # values before and after the last forward
        module.register_forward_pre_hook(lambda *_: self._begin(module))
        module.register_forward_hook(lambda *_: self._end(module))

    def refuse(self, again: Callable[[], object]) -> None:
        """Check that a trace loses none of these changes; `again` calls the module.

        Raises:
            Refusal: an attribute changes in every call. An attribute that each call sets to the same value is
                accepted.
        """
        if self._changes:
            again()  # the first call once more, because a trace puts attributes back
            again()
        for name, (was, now) in self._changes.items():
            raise Refusal(
                f"its forward changes the attribute {name!r} in every call (the second call from {was!r} to "
                f"{now!r}), and a trace would repeat the first call",
                f"keep it in a buffer and compute with the buffer as a tensor, or {REMEDY}",
            )

    def _begin(self, module: nn.Module) -> None:
        self._before = _numbers_and_texts(module)

    def _end(self, module: nn.Module) -> None:
        now, before = _numbers_and_texts(module), self._before
        both = {name: (was, now[name]) for name, was in before.items() if name in now}
        self._changes = {
            name: (was, new) for name, (was, new) in both.items() if was is not new and was != new
        }


def _numbers_and_texts(module: nn.Module) -> Attributes:
    """Return the numbers and strings among the attributes of a module, its parts, and their classes."""
    result: Attributes = {}
    for path, part in module.named_modules():
        classes = [
            each for each in type(part).__mro__ if issubclass(each, nn.Module) and each is not nn.Module
        ]
        for owner in (*reversed(classes), part):
            numbers = {name: value for name, value in vars(owner).items() if isinstance(value, _PLAIN)}
            result.update({f"{path}.{name}".removeprefix("."): value for name, value in numbers.items()})
    return result


# ---- Calls of `contiguous`, recorded even if they do nothing
#
# Python's `Tensor.contiguous` returns a contiguous tensor before torch sees an operation, and many tensors
# are contiguous for one sample but not for several, such as a slice of each sample. A trace should have the
# same operations for every number of samples. The recorded operation returns a contiguous tensor itself, so a
# layer computes and holds nothing more.


class RecordingContiguous(TorchFunctionMode):
    """A mode in which every call of `contiguous` is an operation, which a trace records."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = torch.ops.aten.contiguous.default if func is Tensor.contiguous else func
        return called(*args, **(kwargs or {}))


# ---- End of a trace: the loss if the module computes it, or all outputs
#
# The output is taken when the forward returns, so a trace never meets outputs that its caller does not need:
# a module may return anything in addition to its loss.

_CACHE = "the key-value cache, which training does not fill"
_PLAIN_OUTPUTS = (Tensor, int, float, str, type(None))


def the_loss(outputs: Any, name: str) -> Tensor:
    """Return the loss of model `name`: its only output, or `loss` among its outputs.

    Raises:
        UsageError: the model returns none.
    """
    result = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", outputs)
    if isinstance(result, Tensor) and result.numel() == 1:
        return result
    what = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else kind_of(outputs)
    raise UsageError(
        f"{name} does not return a loss: its module returned {what}, not a scalar or an output with a "
        "scalar 'loss'. Give the labels among the inputs, or pass Task(..., loss=...), a function of the "
        "module's output"
    )


def everything(outputs: Any, name: str) -> Any:
    """Return all outputs of model `name` as a tree of torch, with a string in place of a transformers cache.

    Raises:
        UsageError: the outputs hold no tensor.
        Refusal: an output is neither tensor, number, string nor None, in tuples, lists, dictionaries or
            dataclasses.
    """
    kind = cache_class()
    tree = pytree.tree_map(
        lambda part: _CACHE if isinstance(part, kind) else opened(part),
        outputs,
        is_leaf=lambda part: isinstance(part, kind),
    )
    leaves = pytree.tree_flatten_with_path(tree)[0]
    for path, leaf in leaves:
        if not isinstance(leaf, _PLAIN_OUTPUTS):
            raise Refusal(
                f"it returns a {type(leaf).__name__}{f' as {pytree.keystr(path)}' if path else ''}, not a "
                "tensor or a structure of tensors",
                "return tensors, or tuples, dictionaries or dataclasses of tensors; set use_cache=False "
                "for a cache",
            )
    if not any(isinstance(leaf, Tensor) for _, leaf in leaves):
        raise UsageError(
            f"{name} returns {kind_of(outputs)} and no tensor, so a loss cannot be computed: return a tensor"
        )
    return tree


# ---- The export

_IN_INIT = "register it in __init__, with a tensor of its final shape"


def export(
    module: nn.Module,
    name: str,
    inputs: Any,
    *,
    own_loss: bool,
    autocast: torch.dtype | None = None,
    target: Target = "cpu",
    whole: Collection[str] = (),
) -> ExportedProgram:
    """Return the program of `module` on `inputs`: a tensor, a tuple of positional arguments or keywords.

    The program returns the loss that the module computes if `own_loss`, else all outputs. Under `autocast`,
    tensors have the dtypes that they have on the target; the casts are not part of the program. Modules at
    the paths `whole` are called, not traced.

    Raises:
        LooksAtValues: a part's behavior depends on the values of tensors.
        UsageError: the module cannot be exported. The message names the part, the line and the reason.
    """
    with (
        without_dispatch_modes(),
        torch.enable_grad(),
        put_back(),
        without_gpus(),
        casting_for(target),
        _autocasting(autocast),
    ):
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        own = _fake_copy(module, mode)
        registered = named_tensors(own)
        configure(own, own_loss=own_loss)
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: _fake(tensor, mode), arguments(inputs))
        _check_arguments(own, name, args, kwargs)
        refuse_foreign_draws(own)
        _update_replaced_buffers(own)
        changes = ChangedAttributes(own)
        _close_and_end(own, the_loss if own_loss else everything, name)
        try:
            refuse_hooks(module)
            with (
                _quiet(),
                eager_masks(_unless_known),
                caches_without_copies(),
                refusing(traced=True),
                unchecked_arguments(),
                no_negative_variance(),
                recompiled_once(),
                RefusingStrangers(own),
                RecordingContiguous(),
                whole_parts(own, whole) as calls,
            ):
                program = torch.export.export(own, args, kwargs, strict=False)
                changes.refuse(lambda: own(*args, **kwargs))
        except PipefitError:
            raise
        except Exception as error:  # noqa: BLE001 -- whatever the user's forward raised
            refuse_export(error, name, own, own_loss=own_loss)
    call_whole_parts(program, calls)
    names, originals = {id(tensor): name for name, tensor in registered}, dict(named_tensors(module))
    for constant, tensor in program.constants.items():  # an attribute may hold a registered tensor too
        if id(tensor) in names:
            program.constants[constant] = originals[names[id(tensor)]]
    return program


def _check_arguments(module: nn.Module, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check that the forward of `module` takes these arguments.

    Raises:
        UsageError: it takes others. The message names them.
    """
    taken = inspect.signature(module.forward)
    try:
        taken.bind(*args, **kwargs)
    except TypeError as error:
        given = (
            f"the keyword arguments {', '.join(kwargs)}" if kwargs else f"{len(args)} positional arguments"
        )
        raise UsageError(
            f"{name} cannot be called with the inputs of a batch, {given}: {error}. Its forward takes "
            f"({', '.join(taken.parameters)}); a tuple of inputs becomes positional arguments, a dictionary "
            "becomes keywords"
        ) from error


def _close_and_end(module: nn.Module, ending: Callable[[Any, str], Any], name: str) -> None:
    """Let the forward of `module` take dataclasses in place of records, and return `ending(outputs,
    name)`.
    """

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return closed(args), closed(kwargs)

    def end(_: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
        return ending(outputs, name)

    module.register_forward_pre_hook(begin, with_kwargs=True)
    module.register_forward_hook(end)


def _autocasting(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def _update_replaced_buffers(module: nn.Module) -> None:
    """Let a forward of `module` end with in-place updates of the buffers that it replaced by other tensors.

    torch.export sees the assignment of a buffer only in the root module.
    """
    before: list[tuple[nn.Module, str, Tensor | None]] = []

    def begin(*_: Any) -> None:
        before[:] = [
            (part, name, buffer) for part in module.modules() for name, buffer in part._buffers.items()
        ]

    def end(*_: Any) -> None:
        for part, name, buffer in before:
            tensor = part._buffers.get(name)
            if tensor is buffer:
                continue
            if (
                buffer is None
                or tensor is None
                or (tensor.shape, tensor.dtype) != (buffer.shape, buffer.dtype)
            ):
                raise Refusal(f"it changes the shape or dtype of buffer {name} of a {type(part).__name__}")
            with torch.no_grad():
                buffer.copy_(tensor)
            part._buffers[name] = buffer
        known = {(part, name) for part, name, _ in before}
        for part in module.modules():
            for name in part._buffers:
                if (part, name) not in known:
                    raise Refusal(f"its forward registers the buffer {name!r}", _IN_INIT, module=part)

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end)


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return `inputs` as a module's positional and keyword arguments."""
    if isinstance(inputs, dict):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def _fake_copy(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a deep copy of `module` with tensors of `mode`; constants stay real, as the program takes
    them.
    """
    varying = {storage_key(tensor) for tensor in (*module.parameters(), *module.buffers())}

    def convert(tensor: Tensor) -> Tensor:
        is_constant = (
            storage_key(tensor) not in varying and tensor.is_leaf and not isinstance(tensor, FakeTensor)
        )
        return tensor.clone() if is_constant else _fake(tensor, mode)

    return copied(module, convert)


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what torch prints in the body while it fails; pipefit's error replaces it."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
