"""`torch.export` of a copy on fake tensors: the whole model as one program, traced for the CPU in the mode it is in.

Nothing of the model's size is allocated, whatever device its parameters are on and whether they are real or fake.
Milliseconds per operation: 10 s for a model of 7 billion parameters. Shapes are those of the sample.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import logging
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributions import Distribution
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from pipefit.capture.copying import copied
from pipefit.capture.cuda_autocast import casting_for
from pipefit.capture.flat import draws, mutated_arguments
from pipefit.capture.hugging_face import cache_class, caches_without_copies, configure
from pipefit.capture.random_state import put_back, refuse_foreign_draws
from pipefit.capture.refusals import REMEDY, Refusal, refuse_export
from pipefit.capture.refused import RefusingStrangers, refuse_hooks, refusing
from pipefit.capture.storages import storage_key
from pipefit.capture.structure import closed, opened
from pipefit.capture.whole_modules import call_the_modules, call_them, kept_whole, whole_modules
from pipefit.errors import PipefitError, UsageError
from pipefit.schema.profile import Target
from pipefit.texts import kind_of

# ----------------------------------------------------------------------------------------------------
# Hugging Face models traced as they run eagerly: without attention masks that mask nothing.
#
# When it is traced, transformers builds an attention mask of sequence x sequence even where every token may
# see all, or all before it; when it runs eagerly it leaves the mask out and attention takes its fast path. A
# captured model should compute, and hold, what the eager one does. Where no padding mask is given, that is
# known without looking at any values. So it is where positions depend on no input, as those that a model
# counts by itself: whether they restart, as in packed sequences, is then the same for every batch.

_MASKS = "transformers.masking_utils"


@contextmanager
def eager_masks() -> Iterator[None]:
    """A context in which a transformers model that is traced builds the masks it would build eagerly."""
    masks = sys.modules.get(_MASKS)
    with ExitStack() as patches:
        if masks is not None and hasattr(masks, "is_torchdynamo_exporting"):
            patches.enter_context(mock.patch.object(masks, "is_torchdynamo_exporting", return_value=False))
        if masks is not None and hasattr(masks, "find_packed_sequence_indices"):
            find = _unless_known(masks.find_packed_sequence_indices)
            patches.enter_context(mock.patch.object(masks, "find_packed_sequence_indices", find))
        yield


def _unless_known(find: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    """`find`, which returns None for positions that are known to count up by one."""

    def found(position_ids: Tensor) -> Tensor | None:
        known = _constant(position_ids)
        with _disable_current_modes():
            counts_up = known is not None and bool((known.diff(dim=-1) == 1).all())
        return None if counts_up else find(position_ids)

    return found


def _constant(tensor: Tensor) -> Tensor | None:
    """The values of a tensor that is being traced, if they depend on no input, parameter, buffer or random draw."""
    end = _node_of(tensor)
    if end is None:
        return None
    needed = _needed_by(end)
    changed = {
        source for node in end.graph.nodes for target in mutated_arguments(node) for source in _needed_by(target)
    }
    if changed & needed or not all(node.op == "call_function" and not draws(node) for node in needed):
        return None
    values: dict[fx.Node, Any] = {}
    with _disable_current_modes():
        for node in end.graph.nodes:
            if node in needed:
                args, keywords = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **keywords)
    found: Tensor = values[end]
    return found


def _node_of(tensor: Tensor) -> fx.Node | None:
    """The operation of the trace that is going on that made `tensor`."""
    mode: Any = get_proxy_mode()
    slot: Any = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def _needed_by(node: fx.Node) -> set[fx.Node]:
    """A node, and all that it is computed from."""
    found, pending = set[fx.Node](), [node]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


# ----------------------------------------------------------------------------------------------------
# Attributes that a forward changes in every call, such as a count or a temperature, refused in a traced
# model.
#
# A trace would repeat the first call for ever. Changes are seen by comparing the numbers and texts among the
# attributes of all modules, and of their classes, before and after a call. Where one has changed, the module
# is called twice more.

_PLAIN = (bool, int, float, str)
Attributes = dict[str, bool | int | float | str]


class ChangedAttributes:
    """The numbers and texts in attributes that the last forward of `module` has changed."""

    def __init__(self, module: nn.Module) -> None:
        self._before: Attributes = {}
        self._changes: dict[str, tuple[object, object]] = {}  # what the last forward has changed, from what to what
        module.register_forward_pre_hook(lambda *_: self._begin(module))
        module.register_forward_hook(lambda *_: self._end(module))

    def refuse(self, again: Callable[[], object]) -> None:
        """Check that a trace loses none of these changes; `again` calls the module.

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
        self._before = _numbers_and_texts(module)

    def _end(self, module: nn.Module) -> None:
        now, before = _numbers_and_texts(module), self._before
        both = {name: (was, now[name]) for name, was in before.items() if name in now}
        self._changes = {name: (was, new) for name, (was, new) in both.items() if was is not new and was != new}


def _numbers_and_texts(module: nn.Module) -> Attributes:
    """The numbers and texts among the attributes of a module and its parts, and of their classes."""
    found: Attributes = {}
    for path, part in module.named_modules():
        classes = [each for each in type(part).__mro__ if issubclass(each, nn.Module) and each is not nn.Module]
        for owner in (*reversed(classes), part):
            numbers = {name: value for name, value in vars(owner).items() if isinstance(value, _PLAIN)}
            found.update({f"{path}.{name}".removeprefix("."): value for name, value in numbers.items()})
    return found


# ----------------------------------------------------------------------------------------------------
# Calls of `contiguous` in a traced model, recorded where they have nothing to do.
#
# Python's `Tensor.contiguous` returns a contiguous tensor before torch sees an operation, and of one sample
# much is contiguous that is not of several, as a slice of each. A trace should have the same operations for
# any number of samples. The operation itself returns such a tensor too, so that a layer that has it computes
# and holds nothing more.


class RecordingContiguous(TorchFunctionMode):
    """Inside, every call of `contiguous` is an operation, which a trace sees."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = torch.ops.aten.contiguous.default if func is Tensor.contiguous else func
        return called(*args, **(kwargs or {}))


# ----------------------------------------------------------------------------------------------------
# What the trace of a forward ends in: the loss, if the module computes it, or all that the module returns.
#
# Taken where the forward returns, so that a trace never meets what its caller does not need: beside its loss
# a module may return anything.

_CACHE = "the cache of keys and values, which training does not fill"
_ENDINGS_PLAIN = (Tensor, int, float, str, type(None))


def the_loss(outputs: Any, name: str) -> Tensor:
    """The loss of model `name`, which it returns alone, or as `loss` among its outputs.

    Raises:
        UsageError: it returns none.
    """
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", outputs)
    if isinstance(found, Tensor) and found.numel() == 1:
        return found
    what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else kind_of(outputs)
    raise UsageError(
        f"{name} has no loss of its own: its module returned {what}, no scalar and nothing with a scalar 'loss': "
        "give the labels among the inputs, or Task(..., loss=...), which is called with what the module returns"
    )


def everything(outputs: Any, name: str) -> Any:
    """All that model `name` returns, as a tree that torch knows, with a text in the place of a cache of transformers.

    Raises:
        UsageError: there is no tensor in it.
        Refusal: a part is neither tensor, number, text nor None, in tuples, lists, dictionaries or dataclasses.
    """
    kind = cache_class()
    tree = pytree.tree_map(
        lambda part: _CACHE if isinstance(part, kind) else opened(part),
        outputs,
        is_leaf=lambda part: isinstance(part, kind),
    )
    leaves = pytree.tree_flatten_with_path(tree)[0]
    for path, leaf in leaves:
        if not isinstance(leaf, _ENDINGS_PLAIN):
            raise Refusal(
                f"it returns a {type(leaf).__name__}{f' as {pytree.keystr(path)}' if path else ''}, which is neither a "
                "tensor nor a structure of tensors",
                "return tensors, or tuples, dictionaries or dataclasses of them; use_cache=False for a cache",
            )
    if not any(isinstance(leaf, Tensor) for _, leaf in leaves):
        raise UsageError(
            f"{name} returns no tensor but {kind_of(outputs)}: there is nothing to take a loss of; return one"
        )
    return tree


# ----------------------------------------------------------------------------------------------------
# What torch checks of values that a trace and fake tensors do not have.
#
# Distributions check their arguments, and the Gaussian likelihood that no variance is negative. A trace
# leaves these out; over fake tensors nothing is known, and every condition would hold, this one too.

_any, _likelihood = torch.any, F.gaussian_nll_loss


@contextlib.contextmanager
def unchecked_arguments() -> Iterator[None]:
    """Inside, torch's distributions do not check the values of what they are given, unless they are told to."""
    with mock.patch.object(Distribution, "_validate_args", False):
        yield


@contextlib.contextmanager
def no_negative_variance() -> Iterator[None]:
    """Inside, `gaussian_nll_loss` looks for negative variances, and finds none."""
    resolve_name(_any)  # torch keeps the names of its functions as they are when it is first asked
    with mock.patch.object(F, "gaussian_nll_loss", _unchecked):
        yield


@functools.wraps(_likelihood)
def _unchecked(*args: Any, **options: Any) -> Tensor:
    with mock.patch.object(torch, "any", _found_nothing):
        return _likelihood(*args, **options)


def _found_nothing(*args: Any, **options: Any) -> bool:
    _any(*args, **options)
    return False


# ----------------------------------------------------------------------------------------------------
# Without GPUs: what is traced and counted is the same on every machine, and asks nothing of a GPU where there
# is one.
#
# Torch's tracer saves and restores the random state of a GPU, which makes a context there; and a model may
# compute something else where there is one. Both ask `torch.cuda.is_available()` first.


@contextmanager
def without_gpus() -> Iterator[None]:
    """Inside, torch says that this machine has no GPU."""
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        mock.patch.object(torch.cuda, "device_count", return_value=0),
    ):
        yield


# ----------------------------------------------------------------------------------------------------

_IN_INIT = "register it in __init__, with a tensor of the shape that it is going to have"


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
    """The program of `module` on `inputs` (one tensor, a tuple of positional arguments, a dictionary of keywords).

    It returns the loss that the module computes, if `own_loss` says so, else all that the module returns. Under
    `autocast` tensors have the types that they will have on the target; its casts are no part of the program. The parts
    at the paths `whole` are called, and not traced.

    Raises:
        LooksAtValues: what a part does depends on values.
        UsageError: it cannot be exported; says which part, where and why.
    """
    with (
        _disable_current_modes(),
        torch.enable_grad(),
        put_back(),
        without_gpus(),
        casting_for(target),
        _autocasting(autocast),
    ):
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        own = _fake_copy(module, mode)
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
                eager_masks(),
                caches_without_copies(),
                refusing(traced=True),
                unchecked_arguments(),
                no_negative_variance(),
                RefusingStrangers(own),
                RecordingContiguous(),
                kept_whole() as calls,
                whole_modules(own, whole) as parts,
            ):
                program = torch.export.export(own, args, kwargs, strict=False)
                changes.refuse(lambda: own(*args, **kwargs))
        except PipefitError:
            raise
        except Exception as error:  # noqa: BLE001 -- whatever the user's forward raised
            refuse_export(error, name, own, own_loss=own_loss)
    call_them(program, calls)
    call_the_modules(program, parts)
    return program


def _check_arguments(module: nn.Module, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check that the forward of `module` takes these arguments.

    Raises:
        UsageError: it takes others; names them.
    """
    taken = inspect.signature(module.forward)
    try:
        taken.bind(*args, **kwargs)
    except TypeError as error:
        given = f"the keyword arguments {', '.join(kwargs)}" if kwargs else f"{len(args)} positional arguments"
        raise UsageError(
            f"{name} cannot be called with the inputs of a batch, {given}: {error}. Its forward takes "
            f"({', '.join(taken.parameters)}); a tuple of inputs is its positional arguments, a dictionary its keywords"
        ) from error


def _close_and_end(module: nn.Module, ending: Callable[[Any, str], Any], name: str) -> None:
    """Let the forward of `module` be given dataclasses where its arguments hold records, and end in `ending`."""

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return closed(args), closed(kwargs)

    def end(_: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
        return ending(outputs, name)

    module.register_forward_pre_hook(begin, with_kwargs=True)
    module.register_forward_hook(end)


def _autocasting(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def _update_replaced_buffers(module: nn.Module) -> None:
    """Let a forward of `module` end with updates, in place, of the buffers that it replaced by other tensors.

    torch.export sees the assignment of a buffer in the root module alone.
    """
    before: list[tuple[nn.Module, str, Tensor | None]] = []

    def begin(*_: Any) -> None:
        before[:] = [(part, name, buffer) for part in module.modules() for name, buffer in part._buffers.items()]

    def end(*_: Any) -> None:
        for part, name, buffer in before:
            made = part._buffers.get(name)
            if made is buffer:
                continue
            if buffer is None or made is None or (made.shape, made.dtype) != (buffer.shape, buffer.dtype):
                raise Refusal(f"it gives buffer {name} of a {type(part).__name__} another shape or type")
            with torch.no_grad():
                buffer.copy_(made)
            part._buffers[name] = buffer
        known = {(part, name) for part, name, _ in before}
        for part in module.modules():
            for name in part._buffers:
                if (part, name) not in known:
                    raise Refusal(f"its forward registers the buffer {name!r}", _IN_INIT, module=part)

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end)


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`inputs` as a module takes them."""
    if isinstance(inputs, dict):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def _fake_copy(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A deep copy of `module` whose tensors are of `mode`, but for constants, which the program takes as they are."""
    varying = {storage_key(tensor) for tensor in (*module.parameters(), *module.buffers())}

    def convert(tensor: Tensor) -> Tensor:
        is_constant = storage_key(tensor) not in varying and tensor.is_leaf and not isinstance(tensor, FakeTensor)
        return tensor.clone() if is_constant else _fake(tensor, mode)

    return copied(module, convert)


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch prints while it fails; the error says it better."""
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
