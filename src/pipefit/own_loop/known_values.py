"""Values of whole numbers in a dry run: token ids, masks and positions decide what a model computes.

A model of transformers leaves its attention mask out if no token is padding, and builds one for packed
sequences if positions restart. Fake tensors have no values to decide by. So integer and boolean tensors of
the batch and of the module's buffers keep their values beside the fake tensors, and so does every integer or
boolean tensor that is computed from such tensors alone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils.weak import WeakIdKeyDictionary

from pipefit.torch_internals import OpOverload, TorchDispatchMode, pytree, without_dispatch_modes
from pipefit.torch_internals.fake_tensors import FakeTensor

_MOST_ELEMENTS = 2**22  # of a tensor with values: longer ones, such as masks of long sequences, have none
_BY_VALUE = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))
_UNFILLED = "empty", "new_empty", "resize"  # beginnings of functions whose results have any values
_FILLING = frozenset(
    (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
)
_INDEXING = frozenset((torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default))


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that computes with values beside fake tensors. Enter it right after the fake mode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values: Any = WeakIdKeyDictionary()

    def know(self, fake: Tensor, real: Tensor) -> None:
        """Keep a copy of the values of `real` beside `fake`, if they are whole numbers and not too many."""
        if _is_kept(real):
            with without_dispatch_modes():
                self._values[fake] = real.detach().cpu().clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, (Tensor, UntypedStorage))]
        unknown = [tensor for tensor in tensors if self._value(tensor) is None]
        if not _is_repeatable(func) or unknown:
            self._forget(func, args, kwargs)
            made = func(*self._selecting(func, args), **kwargs)
            if func in _FILLING and [id(tensor) for tensor in unknown] == [id(made)] and _is_whole(made):
                with without_dispatch_modes():
                    self._values[made] = _like(made, torch.device("cpu"))
                self._computed(func, args, kwargs)  # which fills it
            return made
        if _BY_VALUE.intersection(func.tags):
            return self._found(self._computed(func, args, kwargs), tensors[0].device)
        made = func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) and _is_kept(leaf) for leaf in pytree.tree_leaves(made)):
            self._know_all(made, self._computed(func, args, kwargs))
        return made

    def _value(self, tensor: Tensor | UntypedStorage) -> Tensor | None:
        """Return the values of a tensor; None if they are unknown, as those of a storage without a dtype."""
        if isinstance(tensor, FakeTensor):
            values: Tensor | None = self._values.get(tensor)
            return values
        return tensor if isinstance(tensor, Tensor) else None

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the real result of a function of known tensors."""

        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            return self._value(leaf) if isinstance(leaf, Tensor) else leaf

        args, kwargs = pytree.tree_map(real, (args, kwargs))
        kwargs.pop("pin_memory", None)
        with without_dispatch_modes():
            return func(*args, **kwargs)

    def _know_all(self, made: Any, real: Any) -> None:
        for fake, value in zip(pytree.tree_leaves(made), pytree.tree_leaves(real), strict=True):
            if isinstance(fake, FakeTensor) and _is_kept(value):
                self._values[fake] = value

    def _found(self, real: Any, device: torch.device) -> Any:
        """Return a function's result for known values: a number, or fake tensors as long as real ones."""
        made = pytree.tree_map_only(Tensor, lambda tensor: _like(tensor, device), real)
        self._know_all(made, real)
        return made

    def _selecting(self, func: Any, args: Any) -> Any:
        """Return the arguments with known masks among indices replaced by the places that they select."""
        if func not in _INDEXING:
            return args
        places: list[Tensor | None] = []
        for index in args[1]:
            value = None if index is None or index.dtype is not torch.bool else self._value(index)
            if value is None:
                places.append(index)
            else:
                with without_dispatch_modes():
                    found = value.nonzero(as_tuple=True)
                places += self._found(found, index.device)
        return args[0], places, *args[2:]

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """Forget the values of storages that a function writes to."""
        arguments = kwargs | dict(enumerate(args))
        targets = pytree.tree_leaves([arguments.get(key) for key in _written(func)])
        written = [leaf for leaf in targets if isinstance(leaf, FakeTensor) and _is_kept(leaf)]
        storages = {fake.untyped_storage()._cdata for fake in written}
        for fake in list(self._values) if storages else ():
            if fake.untyped_storage()._cdata in storages:
                del self._values[fake]


def _is_kept(tensor: Tensor) -> bool:
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    return whole and tensor.layout is torch.strided and tensor.numel() <= _MOST_ELEMENTS


def _is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor of whole numbers is all of its storage."""
    return _is_kept(tensor) and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


@functools.cache
def _is_repeatable(func: Any) -> bool:
    """Return whether a function called twice on equal arguments has equal results."""
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return False
    name = func.overloadpacket.__name__
    return torch.Tag.nondeterministic_seeded not in func.tags and not name.startswith(_UNFILLED)


@functools.cache
def _written(func: Any) -> tuple[int | str, ...]:
    """Return places and names of the arguments that a function writes to."""
    if not isinstance(func, OpOverload):
        return ()
    arguments = enumerate(func._schema.arguments)
    written = [
        (i, argument.name)
        for i, argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tuple(key for keys in written for key in keys)
