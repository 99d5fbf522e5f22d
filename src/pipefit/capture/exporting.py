"""`torch.export` of a copy on fake tensors: the whole model as one program, traced for the CPU in the mode it is in.

Nothing of the model's size is allocated, whatever device its parameters are on and whether they are real or fake.
Milliseconds per operation: 10 s for a model of 7 billion parameters. Shapes are those of the sample.
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
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from pipefit.capture.changed_attributes import ChangedAttributes
from pipefit.capture.contiguous_calls import RecordingContiguous
from pipefit.capture.copying import copied
from pipefit.capture.cuda_autocast import casting_for
from pipefit.capture.custom_functions import call_them, kept_whole
from pipefit.capture.eager_masks import eager_masks
from pipefit.capture.endings import everything, the_loss
from pipefit.capture.foreign_draws import refuse_foreign_draws
from pipefit.capture.no_gpu import without_gpus
from pipefit.capture.pretrained import caches_without_copies, configure
from pipefit.capture.random_state import put_back
from pipefit.capture.records import closed
from pipefit.capture.refusals import Refusal, refuse_export
from pipefit.capture.refused_calls import RefusingStrangers, refuse_hooks, refusing
from pipefit.capture.storages import storage_key
from pipefit.capture.unchecked import no_negative_variance, unchecked_arguments
from pipefit.capture.whole_modules import call_the_modules, whole_modules
from pipefit.errors import PipefitError, UsageError
from pipefit.profiles import Target

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
