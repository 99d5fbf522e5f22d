"""Measures what a kernel takes: it runs once on made-up data, while the allocator's events are read.

The data have the shapes, strides and dtypes of the call in question. Meters, modes and the random state of the caller
are not touched. An operation is not run, and what it takes stays unknown, if it would need more than 1 GiB, or more
than two seconds of a processor that does 100 GFLOPS a thread, if its arguments cannot be made up, if what it takes
depends on their values, or if it does not come with torch. No clock is asked: what is known of a model would depend on
how busy the machine was.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from pipefit.kernels import Kernel, Layout
from pipefit.meter import made_up
from pipefit.meter.allocator import apart, peak_of
from pipefit.meter.layouts import layouts_of
from pipefit.meter.threads import threads_of
from pipefit.units import format_bytes

aten = torch.ops.aten

_OWN = frozenset({"aten", "mkldnn", "mkldnn_rnn", "prims", "quantized"})  # operations that come with torch
_MOST_BYTES, _MOST_FLOPS = 1 << 30, 2e11  # floating-point operations of a thread
_RECURRENT = {aten.mkldnn_rnn_layer.default: 1, aten.mkldnn_rnn_layer_backward.default: 2}  # products with each weight
_BY_VALUE = "it depends on the values of its arguments"
_BAG_MODE, _MAXIMUM = 8, 2  # the backward of a bag's maximum works on the bags that are not empty

Taken = tuple[int, tuple[Layout | None, ...]]


def measured(
    operation: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, *, threads: int
) -> Kernel:
    """What the kernel of `func(*args, **kwargs)` takes. `out` is what the call returned, real or fake."""
    if why := _refused(func, args):
        return Kernel(operation=operation, peak_bytes=None, reason=why)
    recipe = made_up.Recipe(args, kwargs, torch.is_grad_enabled())
    if why := _too_much(_size(args, kwargs, out), _flops(func, args, kwargs, out), threads):
        return Kernel(operation=operation, peak_bytes=None, reason=why)
    found = apart(partial(_run, func, recipe, threads))
    if isinstance(found, str):
        return Kernel(operation=operation, peak_bytes=None, reason=found)
    peak, results = found
    return Kernel(operation=operation, peak_bytes=peak, results=results)


def _refused(func: Any, args: tuple[Any, ...]) -> str:
    """Why the operation must not be run on made-up data; empty if it may be."""
    if func.namespace not in _OWN:
        return "it does not come with torch, so it is not run on made-up data"
    by_value = torch.Tag.dynamic_output_shape in func.tags and func is not aten.index.Tensor  # it is run with all masks
    if by_value or (func is aten._embedding_bag_backward.default and args[_BAG_MODE] == _MAXIMUM):
        return _BY_VALUE
    if any(tensor.layout is not torch.strided for tensor in made_up.tensors(args)):
        return "only dense arguments are made up"
    return ""


def _too_much(nbytes: int, flops: int, threads: int) -> str:
    """Why an operation with so many bytes of arguments and results takes more than is spent; empty if it does not."""
    if nbytes > _MOST_BYTES:
        return f"to run it takes {format_bytes(nbytes)}, more than is spent on measuring"
    if flops > _MOST_FLOPS * threads:
        return f"to run it takes {flops / 1e9:,.0f} GFLOP, more than is spent on measuring"
    return ""


def _run(func: Any, recipe: made_up.Recipe, threads: int) -> Taken | str:
    """What the kernel takes, or why that cannot be measured. Called on a thread of its own.

    It raises nothing. The frames of an exception would keep the arguments of the call alive until the next garbage
    collection, and a meter would count them until then.
    """
    with threads_of(threads) if torch.get_num_threads() != threads else nullcontext():
        try:
            found = {_once(func, recipe, mask) for mask in ((False, True) if recipe.has_masks else (False,))}
        except Exception as error:  # noqa: BLE001 - whatever torch raises for made-up data
            said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            return f"it cannot be run on made-up data ({said})"
        return found.pop() if len(found) == 1 else _BY_VALUE


def _once(func: Any, recipe: made_up.Recipe, mask: bool) -> Taken:
    args, kwargs = recipe.make(mask)
    peak, out = peak_of(lambda: func(*args, **kwargs))
    return peak, layouts_of(out, made_up.tensors((args, kwargs)))


def _flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """By torch's own counter, and of recurrent layers, which it does not know, by the products with their weights."""
    if func in _RECURRENT:
        steps, samples = args[0].shape[:2]
        return int(2 * _RECURRENT[func] * steps * samples * (args[1].numel() + args[2].numel()))
    count = flop_registry.get(func._overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


def _size(*trees: Any) -> int:
    """Bytes of the storages of made-up tensors that are like those in `trees`."""
    return sum(
        t.element_size() * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)))
        for t in made_up.tensors(trees)
        if t.numel()
    )
