"""Fake tensors with cached results: an operation that has run on equal arguments returns the cached result.

The fake result of an operation follows from the shapes, strides, dtypes, devices and storages of its
arguments, and a model repeats the same few thousand operations. `FakeTensorMode` has such a cache too, but it
takes three times as long, does not cover operations on lists of tensors, and returns two tensors for an
operation that returned one twice; so it is turned off.

Cached are operations of torch itself, over plain fake tensors, whose results do not depend on values, and
that do not change the form of an argument. At least one tensor lacks a known value. Each result is an
argument, a view of the only tensor among the arguments, or a tensor in a new storage. All other
operations run in torch each time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipefit.torch_internals import OpOverload
from pipefit.torch_internals.fake_tensors import (
    FakeTensor,
    FakeTensorMode,
    default_device,
    fake_tensor_like,
    in_kernel_invocation_manager,
    without_torch_dispatch,
)

_DEVICE = torch.ops.prim.device.default  # torch's C++ code calls it more often than all other operations
_PLAIN = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_BY_VALUE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_META, _CPU = torch.device("meta"), torch.device("cpu")
_LIFT = torch.ops.aten.lift_fresh.default
_ITEM = torch.ops.aten._local_scalar_dense.default
_ADD = torch.ops.aten.add_.Tensor
_COUNTING = frozenset({_LIFT, _ITEM, _ADD})

Key = tuple[object, ...]
Known = dict[Any, dict[Key, Any]]  # results by operation and key


class _Fresh(NamedTuple):
    """A result in a new storage."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _View(NamedTuple):
    """A result in the storage of the only tensor among the arguments."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class _Argument(NamedTuple):
    """A result that is one of the tensors among the arguments."""

    number: int


class _Nothing(NamedTuple):
    """No result."""


class _Several(NamedTuple):
    """A tuple or a list of results. Named tuples lose their names in torch's dispatcher, and have none
    here.
    """

    kind: type[tuple[Any, ...] | list[Any]]
    results: tuple[Any, ...]


_NOTHING = _Nothing()


class QuickFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """`FakeTensorMode` with a cache of the results of operations.

    `known` is the cache, which modes with equal results may share.
    """

    def __init__(self, known: Known, **options: Any) -> None:
        super().__init__(**options)
        self._known = known
        self._attributes: dict[torch.device, dict[str, Any]] = {}  # of new fake tensors
        self.cache_enabled = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch.compile is refused inside; the check would cost time in every operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return args[0].device
        kwargs = kwargs or {}
        if not _follows_from_forms(func):
            return self._run(func, types, args, kwargs)
        known = self._known.setdefault(func, {})
        tensors: list[FakeTensor] = []
        key = self._key(func, args, kwargs, tensors)
        result = None if key is None else known.get(key)
        if result is not None:
            return self._made(result, tensors)
        out = self._run(func, types, args, kwargs)
        if key is not None and self._key(func, args, kwargs, []) == key:
            result = _found(out, tensors, set())
            if result is not None:
                known[key] = result
        return out

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run torch's own fake mode."""
        if func.namespace == "profiler":
            with without_torch_dispatch():
                return func(*args, **kwargs)
        result = self._counted(func, args) if func in _COUNTING and not kwargs else None
        return self.dispatch(func, types, args, kwargs) if result is None else result

    def _counted(self, func: Any, args: Any) -> Any:
        """Return the result of an operation by which optimizers count steps, in a tenth of torch's time.

        It makes a tensor of a number, reads it or adds a number to it. The result is None for other
        arguments.
        """
        number = args[0]
        if func is _LIFT:
            if type(number) is not Tensor or number.dim() or number.device != _CPU or number.requires_grad:
                return None
            with without_torch_dispatch():
                known, empty = number.clone(), torch.empty((), dtype=number.dtype, device=_META)
            made = self._new(empty, _CPU)
            self.know(made, known)
            return made
        if type(number) is not FakeTensor or number.constant is None:
            return None
        with without_torch_dispatch():
            if func is _ITEM:
                return number.constant.item()
            if type(args[1]) not in {int, float}:
                return None
            number.constant.add_(*args[1:])
            return number

    def know(self, tensor: Tensor, known: Tensor) -> None:
        """Give a fake number a value."""
        assert isinstance(tensor, FakeTensor)
        tensor.constant = known
        self.fake_tensor_converter.add_constant_storage_mapping(tensor)

    def _key(self, func: Any, args: Any, kwargs: Any, tensors: list[FakeTensor]) -> Key | None:
        """Return a key of everything that determines the results; None if it is incomplete.

        Known values matter if all tensors have one, or if the operation changes a tensor.

        The tensors among the arguments are added to `tensors`.
        """
        if torch.is_inference_mode_enabled():
            return None
        result: list[object] = [torch.get_default_dtype(), default_device()]
        if not self._describe(args, result, tensors):
            return None
        if kwargs:
            result += kwargs
            if not self._describe(kwargs.values(), result, tensors):
                return None
        known = sum(tensor.constant is not None for tensor in tensors)
        return None if known and (known == len(tensors) or func._schema.is_mutable) else tuple(result)

    def _describe(self, items: Iterable[Any], found: list[object], tensors: list[FakeTensor]) -> bool:
        """Add the description of these arguments to `found`; return whether it is complete."""
        for item in items:
            kind = type(item)
            if kind is FakeTensor:
                if not self._is_plain(item):
                    return False
                found += (
                    item.dtype,
                    item.shape,
                    item.stride(),
                    item.storage_offset(),
                    item.fake_device,
                    item.requires_grad,
                )
                tensors.append(item)
            elif kind in _PLAIN:
                found += (kind, item)
            elif kind is list or kind is tuple:
                found += (kind, len(item))
                if not self._describe(item, found, tensors):
                    return False
            else:
                return False
        return True

    def _is_plain(self, tensor: FakeTensor) -> bool:
        """Return whether a tensor of this mode is determined by form and value, unlike a lazy view."""
        return (
            tensor.fake_mode is self
            and tensor.layout is torch.strided
            and not tensor._has_symbolic_sizes_strides
            and not (tensor.is_inference() or tensor.is_neg() or tensor.is_conj())
        )

    def _made(self, known: Any, tensors: list[FakeTensor]) -> Any:
        """Return the cached results for these tensors among the arguments."""
        if isinstance(known, _Fresh):
            with without_torch_dispatch():  # sufficient without fake arguments, at a third of the cost
                empty = torch.empty_strided(known.shape, known.strides, dtype=known.dtype, device=_META)
            return self._new(empty, known.device)
        if isinstance(known, _View):
            with in_kernel_invocation_manager(self):
                view = torch.as_strided(tensors[0], known.shape, known.strides, known.offset)
            return self._new(view, tensors[0].fake_device)
        if isinstance(known, _Several):
            return known.kind(self._made(result, tensors) for result in known.results)
        return tensors[known.number] if isinstance(known, _Argument) else None

    def _new(self, meta: Tensor, device: torch.device) -> FakeTensor:
        """Return the fake tensor of this mode on a device, over a tensor on torch's meta device."""
        attributes = self._attributes.get(device)
        if attributes is not None:
            return fake_tensor_like(attributes, meta, device)
        made = FakeTensor(self, meta, device)
        self._attributes[device] = dict(vars(made))
        return made


@functools.cache
def _follows_from_forms(func: Any) -> bool:
    """Return whether the form of an operation's result may follow from the forms of its arguments."""
    return (
        isinstance(func, OpOverload)
        and func.namespace == "aten"
        and not any(tag in func.tags for tag in _BY_VALUE)
        and func not in FakeTensorMode.lift_fns
    )


def _found(out: Any, tensors: list[FakeTensor], fresh: set[int]) -> Any:
    """Return the cache entry of results for these tensors among the arguments; None if they cannot be cached.

    `fresh` are the storages of the results so far; those of `out` are added.
    """
    if out is None:
        return _NOTHING
    if isinstance(out, list | tuple):
        results = tuple(_found(one, tensors, fresh) for one in out)
        return None if None in results else _Several(list if isinstance(out, list) else tuple, results)
    if type(out) is not FakeTensor or out.constant is not None:
        return None
    same = [number for number, tensor in enumerate(tensors) if tensor is out]
    if same:
        return _Argument(same[0]) if len(same) == 1 else None
    if out.layout is not torch.strided or out.is_neg() or out.is_conj() or out.requires_grad:
        return None
    storage, shape, offset = out.untyped_storage(), tuple(out.shape), int(out.storage_offset())
    if any(tensor.untyped_storage()._cdata == storage._cdata for tensor in tensors):
        alike = len(tensors) == 1 and (out.dtype, out.fake_device) == (
            tensors[0].dtype,
            tensors[0].fake_device,
        )
        return _View(shape, out.stride(), offset) if alike else None
    made = _Fresh(shape, out.stride(), out.dtype, out.fake_device)
    if storage._cdata in fresh or offset or storage.nbytes() != _nbytes(made):
        return None
    fresh.add(storage._cdata)
    return made


def _nbytes(fresh: _Fresh) -> int:
    """Return the storage size of a fresh tensor of this form."""
    if 0 in fresh.shape:
        return 0
    last = sum((length - 1) * stride for length, stride in zip(fresh.shape, fresh.strides, strict=True))
    return (last + 1) * fresh.dtype.itemsize
