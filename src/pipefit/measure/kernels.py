"""Memory of each operation's CPU kernel: looked up by the operation and its arguments, or measured.

A look-up takes a microsecond or two. Only operations that are neither in the given profile, nor in the user's
cache, nor already known are measured. An operation that cannot be measured counts with its results alone and
is reported: in the profile, in plans made from it, and in a warning whenever it runs under a meter.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sqlite3
import stat
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from pipefit.errors import PipefitWarning, UsageError, first_line
from pipefit.schema.json_text import adapter
from pipefit.schema.layer_costs import Kernel, KernelMemory, Layout
from pipefit.texts import dtype_name
from pipefit.torch_internals import (
    ExperimentalConfig,
    ProfilerConfig,
    ProfilerState,
    below_autograd,
    negative_view,
    pytree,
    start_profiler,
    stop_profiler,
)
from pipefit.torch_internals.fake_tensors import FakeTensor
from pipefit.units import format_bytes

# ---- The user's cache of kernel memory, so that no operation is measured twice
#
# It is a SQLite file, `pipefit/kernels/kernels.sqlite` below XDG_CACHE_HOME, by default `~/.cache`, which
# several processes read and write at once. Every kernel has a digest, because a changed peak would be wrong.
# A file that is damaged, or a link or pipe in its place, counts as empty and is replaced; nothing is written
# to the target of a link. If no file can be written, nothing is cached.

_TABLE = (
    "CREATE TABLE IF NOT EXISTS kernels "
    "(machine, operation, kernel, digest, PRIMARY KEY (machine, operation))"
)


_READ: dict[tuple[Path, str], dict[str, Kernel]] = {}  # kernels that were read, by file and machine


class Cache:
    """Known kernels of one kind of machine. A process reads the kernel of an operation once."""

    def __init__(self, machine: Machine) -> None:
        self.path = _folder() / "kernels.sqlite"
        self._machine = json.dumps(asdict(machine))
        self._read = _READ.setdefault((self.path, self._machine), {})

    def get(self, operation: str) -> Kernel | None:
        """Return the kernel of an operation; None if it was not measured, or is not as it was written."""
        if operation in self._read:
            return self._read[operation]
        query = "SELECT kernel, digest FROM kernels WHERE machine = ? AND operation = ?"
        with suppress(sqlite3.Error, ValueError), closing(self._opened("ro")) as file:
            row = file.execute(query, (self._machine, operation)).fetchone()
            if row is not None and row[1] == self._digest(operation, row[0]):
                kernel: Kernel = adapter(Kernel).validate_json(row[0], strict=True)
                if kernel.peak_bytes is not None:
                    return self._read.setdefault(operation, kernel)
        return None

    def add(self, kernels: Iterable[Kernel]) -> None:
        """Add these kernels to the file."""
        rows = [
            (self._machine, one.operation, text, self._digest(one.operation, text))
            for one in kernels
            for text in [adapter(Kernel).dump_json(one, exclude_defaults=True)]
        ]
        with suppress(sqlite3.Error, OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._write(rows)
            except sqlite3.OperationalError:  # locked, or on a full disk
                raise
            except sqlite3.DatabaseError:  # damaged, or no file
                self.path.unlink()
                self._write(rows)

    def _write(self, rows: Sequence[tuple[str, str, bytes, str]]) -> None:
        with closing(self._opened("rwc")) as file, file:
            file.execute("PRAGMA synchronous = OFF")
            file.execute(_TABLE)
            file.executemany("INSERT OR REPLACE INTO kernels VALUES (?, ?, ?, ?)", rows)

    def _opened(self, mode: str) -> sqlite3.Connection:
        if os.path.lexists(self.path) and not stat.S_ISREG(self.path.lstat().st_mode):
            raise sqlite3.DatabaseError("it is not a regular file")
        return sqlite3.connect(f"{self.path.as_uri()}?mode={mode}", uri=True)

    def _digest(self, operation: str, kernel: bytes) -> str:
        return hashlib.sha256(repr((self._machine, operation, kernel)).encode()).hexdigest()[:16]


def _folder() -> Path:
    """Return the folder of the files. The XDG specification ignores a path that is not absolute."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = named if named.is_absolute() else Path(os.path.expanduser("~/.cache"))
    if not base.is_absolute():  # a user without a home, as in some containers
        base = Path(os.devnull)  # nothing can be created below it
    return base / "pipefit" / "kernels"


# ---- Layouts of results, and fake results with these layouts
#
# Torch has rules for the shapes, strides and dtypes of fake results. The real kernel may return other
# strides, another dtype (the statistics of norms under autocast), a storage larger than the result, or
# another size of workspace, depending on the processor. Later operations then copy or keep other bytes, so
# fake results get the kernel's layouts.


def results_of(out: Any) -> list[Any]:
    """Return the results of an operation one by one, including those in nested lists."""
    if not isinstance(out, (tuple, list)):
        return [out]
    return [result for part in out for result in results_of(part)]


def layouts_of(out: Any, given: Iterable[Tensor]) -> tuple[Layout | None, ...]:
    """Return the layouts of results; None for a non-tensor or a result in the storage of a `given` tensor."""
    theirs = {tensor.untyped_storage()._cdata for tensor in given}
    numbers: dict[int, int] = {}
    return tuple(_layout_of(result, theirs, numbers) for result in results_of(out))


def _layout_of(result: Any, theirs: set[int], numbers: dict[int, int]) -> Layout | None:
    if not isinstance(result, Tensor) or (storage := result.untyped_storage())._cdata in theirs:
        return None
    return Layout(
        shape=tuple(result.shape),
        strides=result.stride(),
        offset=int(result.storage_offset()),
        storage=numbers.setdefault(storage._cdata, len(numbers)),
        storage_bytes=storage.nbytes(),
        dtype=dtype_name(result.dtype),
    )


def agree(out: Any, layouts: tuple[Layout | None, ...]) -> bool:
    """Return whether fake results have these `layouts`. Real results always do, because the kernel made
    them.
    """
    results = results_of(out)
    if len(results) != len(layouts) or not any(isinstance(result, FakeTensor) for result in results):
        return True
    numbers: dict[int, int] = {}
    return all(
        layout is None or _layout_of(result, set(), numbers) == layout
        for result, layout in zip(results, layouts, strict=True)
    )


def relaid(out: Any, layouts: tuple[Layout | None, ...]) -> Any:
    """Return fake results like `out` with these `layouts`, made in the active fake mode."""
    return _relaid(out, iter(layouts), {})


_FLOATS = {"float64", "float32", "float16", "bfloat16"}  # the rules of fake tensors may name another one


def _relaid(out: Any, layouts: Iterator[Layout | None], storages: dict[int, Tensor]) -> Any:
    if isinstance(out, (tuple, list)):
        return type(out)([_relaid(part, layouts, storages) for part in out])
    layout = next(layouts)
    if layout is None or not isinstance(out, Tensor):
        return out
    dtypes = {layout.dtype, dtype_name(out.dtype)}
    has_shape = layout.shape == tuple(out.shape) or not out.numel()  # kernels alone know a workspace's size
    if not has_shape or min(layout.strides, default=0) < 0 or (len(dtypes) > 1 and not dtypes <= _FLOATS):
        made = f"{layout.dtype} {layout.shape} with strides {layout.strides}"
        raise RuntimeError(f"{made} instead of {out.dtype} {tuple(out.shape)}")
    return in_layout(layout, storages, out.device)


def in_layout(layout: Layout, storages: dict[int, Tensor], device: torch.device) -> Tensor:
    """Return a tensor of this layout in its storage of `storages`, which is made if it is missing."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    if layout.storage not in storages:
        count, odd = divmod(layout.storage_bytes, dtype.itemsize)
        storages[layout.storage] = (
            torch.empty(layout.storage_bytes, dtype=torch.uint8, device=device)
            if odd
            else torch.empty(count, dtype=dtype, device=device)
        )
    elements = storages[layout.storage]
    elements = elements if elements.dtype == dtype else elements.view(dtype)
    return elements.as_strided(layout.shape, layout.strides, layout.offset)


# ---- Synthetic arguments for a call: equal to its arguments in shapes, strides and dtypes, with other data
#
# Conjugated or negated views, which some kernels copy, are reproduced too. The data are valid for nearly
# every operation. Floating-point numbers are 0.5, which is a probability, positive and far from overflow.
# Integers are 0, which is a valid index. Masks are true everywhere or nowhere. The call's own data are not
# read, so its tensors may be fake.

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_MASKS = (torch.bool, torch.uint8)


class ArgumentRecipe:
    """A description from which arguments like those of a call can be made later and on another thread."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], grad: bool) -> None:
        self._described = pytree.tree_map(
            lambda arg: _Description(arg, grad) if isinstance(arg, Tensor) else arg, (args, dict(kwargs))
        )
        self.has_masks = any(tensor.dtype in _MASKS for tensor in tensors((args, kwargs)))

    def make(self, mask: bool) -> Arguments:
        """Return the arguments; masks are true everywhere, or nowhere."""
        return pytree.tree_map(partial(_made, mask), self._described)  # type: ignore[no-any-return]


def tensors(tree: Any) -> list[Tensor]:
    """Return all tensors in `tree`."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class _Description:
    """Everything about a tensor except its data."""

    def __init__(self, tensor: Tensor, grad: bool) -> None:
        self.shape, self.strides, self.dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
        self.differentiable = grad and tensor.requires_grad
        self.conjugated, self.negated = tensor.is_conj(), tensor.is_neg()

    def make(self, mask: bool) -> Tensor:
        tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype)
        everything = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,))
        floating = self.dtype.is_floating_point or self.dtype.is_complex
        everything.fill_(0.5 if floating else mask if self.dtype in _MASKS else 0)
        tensor = negative_view(tensor) if self.negated else tensor
        return (tensor.conj() if self.conjugated else tensor).requires_grad_(self.differentiable)


def _made(mask: bool, arg: Any) -> Any:
    if isinstance(arg, _Description):
        return arg.make(mask)
    return torch.Generator() if isinstance(arg, torch.Generator) else arg


# ---- Keys of calls: equal for calls whose kernels need equal memory; and their texts
#
# Two calls have equal keys if they call the same operation on tensors of the same shapes, strides and dtypes,
# with the same tensors requiring a gradient or being conjugated or negated views, and with the same other
# arguments. For numbers that are not sizes, such as a learning rate, only the type counts, because they
# change from step to step, and no kernel needs more memory for 0.3 than for 0.4. Values for which some
# kernels have another path, such as 0 and 1, do count.
#
# A key is made for every operation of a metered run, in a microsecond or two, and its text only for a new
# key.

_ANOTHER_PATH = frozenset({-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, float("inf"), float("-inf")})
_SIZES = frozenset({"start", "end", "step", "scales", "scale_factors", "scales_h", "scales_w", "scales_d"})
_AS_THEY_ARE = (str, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format)

Key = tuple[Any, ...]


class Named(NamedTuple):
    """An argument given by name."""

    name: str
    part: Any


def key_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], flags: str) -> Key | None:
    """Return the key of this call among those of `func`; None if an argument's type cannot be part of a
    key.
    """
    grad = torch.is_grad_enabled()
    try:
        parts: list[Any] = [
            (
                arg.shape,
                arg.stride(),
                arg.dtype,
                arg.layout,
                grad and arg.requires_grad,
                arg.is_conj(),
                arg.is_neg(),
            )
            if isinstance(arg, Tensor)
            else _part(func, arg, grad)
            for arg in args
        ]
        if kwargs:
            parts += [Named(name, _part(func, arg, grad)) for name, arg in kwargs.items()]
    except (TypeError, RuntimeError, NotImplementedError):  # some layouts have no strides
        return None
    return (flags, *parts)


def _part(func: Any, arg: Any, grad: bool) -> Any:
    kind = type(arg)
    if kind is int or arg is None:
        return arg
    if kind is float:
        return str(arg) if arg in _ANOTHER_PATH or takes_sizes(func) else "float"
    if kind is bool:
        return str(arg)  # True == 1, but the two calls differ
    if isinstance(arg, Tensor):
        return (
            arg.shape,
            arg.stride(),
            arg.dtype,
            arg.layout,
            grad and arg.requires_grad,
            arg.is_conj(),
            arg.is_neg(),
        )
    if kind is list or kind is tuple:
        return tuple([_part(func, item, grad) for item in arg])
    if kind is complex or kind is torch.Generator:
        return kind.__name__
    if isinstance(arg, _AS_THEY_ARE):
        return arg
    raise TypeError


@cache
def takes_sizes(func: Any) -> bool:
    """Return whether the size of a tensor follows from a number that the operation takes."""
    return any(arg.name in _SIZES and str(arg.type) != "Tensor" for arg in func._schema.arguments)


def text_of(func: Any, key: Key) -> str:
    """Return the operation with its arguments as readable text, as stored in files."""
    flags, *parts = key
    return f"{flags}{func}({', '.join(map(_text, parts))})"


def name_of(func: Any, args: tuple[Any, ...]) -> str:
    """Return the operation with the types of its arguments, for a call without a key."""
    return f"{func}({', '.join(type(arg).__name__ for arg in args)})"


def _text(part: Any) -> str:
    if isinstance(part, Named):
        return f"{part.name}={_text(part.part)}"
    if not isinstance(part, tuple):
        return str(part)
    if len(part) == 7 and type(part[0]) is torch.Size:
        return _tensor_text(*part)
    return f"[{', '.join(map(_text, part))}]"


def _tensor_text(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    layout: torch.layout,
    differentiable: bool,
    conjugated: bool,
    negated: bool,
) -> str:
    by = f" by {','.join(map(str, strides))}" if strides != _dense(shape) else ""
    if layout is not torch.strided:
        by = f" {str(layout).removeprefix('torch.')}"
    text = f"{dtype_name(dtype)}[{'x'.join(map(str, shape))}{by}]"
    text += " conjugated" * conjugated + " negated" * negated
    return f"{text} with gradient" if differentiable else text


def _dense(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


# ---- The peak of one call, from the CPU allocator's events
#
# `torch.profiler` shows the same events with `profile_memory`. They are read through torch's older profiler,
# because it starts in 0.1 ms while the newer one takes a second the first time, prints nothing, uses no GPU
# and works while another profiler is running. Only events of the calling thread are visible: allocations of
# other threads of a parallel region are not counted, here or by `torch.profiler`.
#
# The call runs on a separate thread (`apart`), because dispatch modes, fake tensors, autocast and profilers
# are active per thread. It runs below autograd, as calls inside a dispatch mode do, and torch's random state
# is restored afterwards. Torch's private interfaces for this are used only here.

T = TypeVar("T")


def apart(call: Callable[[], T]) -> T:
    """Return the result of `call`, or raise its exception, from a separate thread."""
    result: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again on the calling thread
            raised.append(error)

    thread = threading.Thread(target=run, name="pipefit-measuring")
    thread.start()
    thread.join()
    if raised:
        raise raised.pop()  # pop: its frames must not keep it alive
    return result.pop()


def peak_of(call: Callable[[], T]) -> tuple[int, T]:
    """Return the most bytes that `call` held at once, and its result. Call it inside `apart`."""
    state = torch.get_rng_state()
    start_profiler(_memory_only())
    try:
        with below_autograd():
            out = call()
    finally:
        threads = stop_profiler()
        torch.set_rng_state(state)
    changes = [
        event.cpu_memory_usage()
        for events in threads
        for event in events
        if str(event.kind()) == "memory_alloc"
    ]
    return max(accumulate(changes), default=0), out


def _memory_only() -> ProfilerConfig:
    """Return a profiler configuration for memory only, without shapes, stacks, FLOPs or modules."""
    return ProfilerConfig(
        ProfilerState.CPU,
        False,
        True,
        False,
        False,
        False,
        ExperimentalConfig(),
    )


# ---- Measurement of a kernel: one run on synthetic data, while the allocator's events are read
#
# The data have the shapes, strides and dtypes of the call. Meters, modes and the random state of the caller
# are not changed. An operation is not run, and its memory stays unknown, if it would need more than 1 GiB, or
# more than two seconds on a processor with 100 GFLOPS a thread, if its arguments cannot be synthesized, if
# its memory depends on their values, or if it does not come with torch. No clock is used: results would
# depend on the machine's load.

aten = torch.ops.aten

_OWN = frozenset({"aten", "mkldnn", "mkldnn_rnn", "prims", "quantized"})  # namespaces that come with torch
_MOST_BYTES, _MOST_FLOPS = 1 << 30, 2e11  # floating-point operations per thread
_RECURRENT = {
    aten.mkldnn_rnn_layer.default: 1,
    aten.mkldnn_rnn_layer_backward.default: 2,
}  # products with each weight
_BY_VALUE = "it depends on the values of its arguments"
_SELECTING = frozenset(
    {aten.index.Tensor, aten.masked_select.default, aten.nonzero.default}
)  # counted as if they selected everything
_BAG_MODE, _MAXIMUM = 8, 2  # the backward of a maximum works on the bags that are not empty

Taken = tuple[int, tuple[Layout | None, ...]]


def measured(
    operation: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, *, threads: int
) -> Kernel:
    """Measure the kernel of `func(*args, **kwargs)`. `out` is the call's result, real or fake."""
    if why := _refused(func, args):
        return Kernel(operation=operation, peak_bytes=None, reason=why)
    recipe = ArgumentRecipe(args, kwargs, torch.is_grad_enabled())
    if why := _too_much(_size(args, kwargs, out), _flops(func, args, kwargs, out), threads):
        return Kernel(operation=operation, peak_bytes=None, reason=why)
    result = apart(partial(_run, func, recipe, threads))
    if isinstance(result, str):
        return Kernel(operation=operation, peak_bytes=None, reason=result)
    peak, results = result
    return Kernel(operation=operation, peak_bytes=peak, results=results)


def _refused(func: Any, args: tuple[Any, ...]) -> str:
    """Return why the operation must not run on synthetic data; empty if it may."""
    if func.namespace not in _OWN:
        return "it does not belong to torch, so it is not run on synthetic data"
    by_value = _has_dynamic_shape(func) and func not in _SELECTING
    counts_zeros = func is aten.nonzero.default and not _selects_all(args[0])
    bags = func is aten._embedding_bag_backward.default and args[_BAG_MODE] == _MAXIMUM
    if by_value or counts_zeros or bags:
        return _BY_VALUE
    if any(tensor.layout is not torch.strided for tensor in tensors(args)):
        return "only dense arguments can be synthesised"
    return ""


def _has_dynamic_shape(func: Any) -> bool:
    """Return whether the shape of the result depends on values."""
    return torch.Tag.dynamic_output_shape in func.tags


def _selects_all(tensor: Tensor) -> bool:
    """Return whether synthetic data like `tensor` have no zero if masks are true everywhere."""
    return tensor.dtype in _MASKS or tensor.is_floating_point() or tensor.is_complex()


def _too_much(nbytes: int, flops: int, threads: int) -> str:
    """Return why an operation of this size is too expensive to run; empty if it is not."""
    if nbytes > _MOST_BYTES:
        return f"running it needs {format_bytes(nbytes)}, above the limit for measuring"
    if flops > _MOST_FLOPS * threads:
        return f"running it needs {flops / 1e9:,.0f} GFLOP, above the limit for measuring"
    return ""


def _run(func: Any, recipe: ArgumentRecipe, threads: int) -> Taken | str:
    """Return the kernel's memory, or why it cannot be measured. Called on a separate thread.

    Never raises: the frames of an exception would keep the arguments of the call alive until the next garbage
    collection, and a meter would count them.
    """
    with threads_of(threads) if torch.get_num_threads() != threads else nullcontext():
        try:
            peak, results = _once(func, recipe, mask=True)
        except Exception as error:  # noqa: BLE001 - whatever torch raises for synthetic data
            said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            return f"it cannot run on synthetic data ({said})"
        unselected = [(peak, results)]
        if recipe.has_masks:
            with suppress(Exception):  # the other arguments may be those of a mask that selects everything
                unselected = [_once(func, recipe, mask=False)]
        if unselected[0][0] > peak:
            return _BY_VALUE
        if unselected[0][1] == results and func is not aten.nonzero.default:
            return peak, results
        made = {result.storage: result.storage_bytes for result in results if result is not None}
        return peak - sum(made.values()), ()  # the results have as many bytes as values select


def _once(func: Any, recipe: ArgumentRecipe, mask: bool) -> Taken:
    args, kwargs = recipe.make(mask)
    peak, out = peak_of(lambda: func(*args, **kwargs))
    return peak, layouts_of(out, tensors((args, kwargs)))


def _flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the FLOPs by torch's counter; for recurrent layers, by the products with their weights."""
    if func in _RECURRENT:
        steps, samples = args[0].shape[:2]
        return int(2 * _RECURRENT[func] * steps * samples * (args[1].numel() + args[2].numel()))
    return counted_flops(func, args, kwargs, out)


def counted_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the FLOPs by torch's counter; 0 without a formula, or for a gradient that is None."""
    count = flop_registry.get(func._overloadpacket)
    with suppress(TypeError):  # the formula wants a shape of every tensor
        return 0 if count is None else int(count(*args, **kwargs, out_val=out))
    return 0


def _size(*trees: Any) -> int:
    """Return the bytes of storages for synthetic tensors like those in `trees`."""
    return sum(
        t.element_size() * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)))
        for t in tensors(trees)
        if t.numel()
    )


# ---- Kernels, as meters look them up


# These allocate only their results on any machine, as views do
_KNOWN_EVERYWHERE = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.resize_.default,
        aten.set_.source_Storage,
        aten.set_.source_Storage_storage_offset,
        aten.set_.source_Tensor,
        aten._local_scalar_dense.default,
        aten._unsafe_view.default,
    }
)
_NO_KERNELS = ("c10d", "_c10d", "prim", "profiler")  # communication, tensor metadata, profiler marks


class Known:
    """A kernel in the form that a meter needs."""

    __slots__ = ("_agrees", "_operation", "_peak_bytes", "_results", "_selects")

    def __init__(self, kernel: Kernel, func: Any) -> None:
        self._peak_bytes, self._results = kernel.peak_bytes or 0, kernel.results
        self._operation = kernel.operation
        self._selects = bool(kernel.peak_bytes) and not kernel.results and _has_dynamic_shape(func)
        self._agrees: bool | None = (
            None  # whether fake results have the kernel's layouts; None until compared
        )

    def peak_bytes(self, out: Any) -> int:
        """Return the kernel's peak; `out` are its results, whose bytes may depend on values."""
        return self._peak_bytes + (out.untyped_storage().nbytes() if self._selects else 0)

    def laid_out(self, out: Any) -> Any:
        """Return fake results with the kernel's layouts; real ones are returned unchanged.

        Raises:
            UsageError: the layouts are not of these results, as in a damaged profile.
        """
        if self._agrees or type(out) is Tensor:
            return out
        if self._agrees is None and agree(out, self._results):
            self._agrees = True
            return out
        self._agrees = False
        try:
            return relaid(out, self._results)
        except RuntimeError as error:
            raise UsageError(
                f"by its profile, {self._operation} has impossible results ({first_line(error)}): "
                "profile again"
            ) from error


class Kernels:
    """The kernels of this machine on `threads` threads.

    Args:
        threads: threads of the kernels, whatever this process uses otherwise.
        given: kernels in a profile. They take precedence, even if this machine's kernels differ.
    """

    def __init__(self, threads: int, given: KernelMemory | None = None) -> None:
        self.threads = threads
        self._given = {kernel.operation: kernel for kernel in given.kernels} if given is not None else {}
        self._cache = Cache(this_machine(threads))
        self._flags = flags()
        self._known: dict[Any, dict[Key | None, Known] | None] = {}
        self._met: dict[str, Kernel] = {}
        self._new: dict[str, Kernel] = {}
        self._told: set[str] = set()

    @property
    def memory(self) -> KernelMemory:
        """Every operation met so far."""
        return KernelMemory(kernels=tuple(self._met.values()))

    def refresh(self) -> None:
        """Read again the settings of this process that kernels depend on."""
        self._flags = flags()

    def of(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Known | None:
        """Return the memory of the kernel of `func(*args, **kwargs)`; None if it is only its result `out`."""
        try:
            calls = self._known[func]
        except KeyError:
            calls = self._known[func] = {} if _may_take(func) else None
        if calls is None:
            return None
        key = key_of(func, args, kwargs, self._flags)
        known = calls.get(key)
        if known is None:
            known = Known(self._meet(key, func, args, kwargs, out), func)
            if key is not None:
                calls[key] = known
        return known

    def keep(self) -> None:
        """Add new measurements to the user's cache."""
        if self._new:
            self._cache.add(self._new.values())
            self._new.clear()

    def tell_unknown(self) -> None:
        """Warn, once for each, about operations that ran and could not be measured."""
        unknown = tuple(kernel for kernel in self.memory.unknown if kernel.operation not in self._told)
        self._told |= {kernel.operation for kernel in unknown}
        if unknown:
            warnings.warn(KernelMemory(kernels=unknown).gap, PipefitWarning, stacklevel=3)

    def _meet(
        self, key: Key | None, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> Kernel:
        """Look up or measure a call that has not been met before."""
        operation = name_of(func, args) if key is None else text_of(func, key)
        kernel = self._met.get(operation) or self._given.get(operation) or self._cache.get(operation)
        if kernel is None:
            kernel = measured(operation, func, args, kwargs, out, threads=self.threads)
            if kernel.peak_bytes is not None:
                self._new[operation] = kernel
        self._met[operation] = kernel
        return kernel


def _may_take(func: Any) -> bool:
    """Return whether the kernel may need workspace on some machine."""
    return not (func.is_view or func in _KNOWN_EVERYWHERE or func.namespace.startswith(_NO_KERNELS))


# ---- The number of CPU threads during a measurement for a worker


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    """Let torch's kernels use `count` threads in the body."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- The machine

_CHOOSING = (
    "ATEN_",
    "ONEDNN_",
    "DNNL_",
    "MKLDNN_",
    "TORCH_MKLDNN_",
)  # variables that affect the choice of kernels
_FACTS = ("model name", "cpu family", "model", "stepping", "flags", "Features", "CPU implementer", "CPU part")
_SYSTEM = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Facts on which the memory of kernels depends, in addition to the operation."""

    cpu: str  # name of the processor, with the sizes of its caches
    capability: str  # widest instructions that torch uses, and the environment variables that limit them
    details: str  # digest of all facts that the system reports about the processor
    torch: str
    threads: int


def this_machine(threads: int) -> Machine:
    """Return the machine that runs this, with kernels on `threads` threads."""
    cpu, details = _processor()
    return Machine(
        cpu=cpu, capability=_capability(), details=details, torch=torch.__version__, threads=threads
    )


def flags() -> str:
    """Return settings that kernels depend on, as a prefix of an operation's text; empty by default."""
    result = []
    if torch.are_deterministic_algorithms_enabled() or torch.backends.mkldnn.deterministic:
        result.append("deterministic")
    if not torch.backends.mkldnn.enabled:
        result.append("without oneDNN")
    if (precision := torch.get_float32_matmul_precision()) != "highest":
        result.append(f"{precision} precision")
    return "".join(f"{flag}: " for flag in result)


@cache
def _capability() -> str:
    """Return the processor capability that torch uses. Cached, because libraries read the environment
    once.
    """
    said = (f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_CHOOSING))
    return " ".join(
        (torch.backends.cpu.get_cpu_capability(), *(word for word in said if "VERBOSE" not in word))
    )


@cache
def _processor() -> tuple[str, str]:
    """Return the processor's name with its caches, and a digest of all facts."""
    facts = _facts()
    caches = [_read(index / "size") for index in sorted(_SYSTEM.glob("index*"))]
    name = facts.get("model name") or platform.processor() or platform.machine()
    numbers = "/".join(facts[key] for key in ("cpu family", "model", "stepping") if key in facts)
    known = ", ".join(filter(None, (numbers, " ".join(caches))))
    digest = hashlib.sha256(repr((platform.machine(), sorted(facts.items()), caches)).encode()).hexdigest()
    return f"{name} ({known})" if known else name, digest[:16]


def _facts() -> dict[str, str]:
    """Return what Linux reports about the first processor; empty on other systems."""
    first = _read(Path("/proc/cpuinfo")).partition("\n\n")[0]
    pairs = re.findall(r"^([^\t:]+)\t*: ?(.*)$", first, re.MULTILINE)
    return {name: value for name, value in pairs if name in _FACTS}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
