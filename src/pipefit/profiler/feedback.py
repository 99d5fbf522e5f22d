"""Whether a forward computes with a buffer that it updates, as spectral norm and moving averages that feed back do.

Run a second time, such a forward sees what the first one left, and computes something else. Batch norm in training is
not of this kind: it updates its statistics and computes with those of the batch. It is found in one forward over fake
tensors, in which every value is followed back to the buffers that it was computed from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_STATISTICS = ("running_mean", "running_var")
_TRAINING = ("training", "train", "use_input_stats")


def feeds_back(call: Callable[[Any], Sequence[Tensor]], module: nn.Module, inputs: Any) -> bool:
    """Whether an output of `call(inputs)` depends on a buffer of `module` that the call changes."""
    before = [(p, name, b) for p in module.modules() for name, b in p._buffers.items() if b is not None]
    versions = [buffer._version for _, _, buffer in before]
    if not before:
        return False
    with _Sources([buffer for _, _, buffer in before]) as sources:
        outputs = call(inputs)
    read = frozenset[int]().union(*map(sources.of, outputs))
    changed = [
        buffer
        for (part, name, buffer), version in zip(before, versions, strict=True)
        if part._buffers.get(name) is not buffer or buffer._version != version
    ]
    for part, name, buffer in before:
        part._buffers[name] = buffer
    return any(id(buffer) in read for buffer in changed)


class _Sources(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows, for every storage, the buffers from which its content was computed."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._met: list[Any] = [
            buffer.untyped_storage() for buffer in buffers
        ]  # kept, so that no address is used twice
        self._known = {buffer.untyped_storage()._cdata: frozenset((id(buffer),)) for buffer in buffers}

    def of(self, tensor: Tensor) -> frozenset[int]:
        """The identities of the buffers."""
        return self._known.get(tensor.untyped_storage()._cdata, frozenset())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        if any(given.get(name) for name in _TRAINING) or "with_update" in str(func):
            given = {name: item for name, item in given.items() if name not in _STATISTICS}
        sources = frozenset[int]().union(*map(self.of, _tensors(given)))
        out = func(*args, **(kwargs or {}))
        written = (a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
        for tensor in (*_tensors(out), *_tensors([given.get(name) for name in written])):
            storage = tensor.untyped_storage()
            self._met.append(storage)
            self._known[storage._cdata] = self._known.get(storage._cdata, frozenset()) | sources
        return out


def _tensors(items: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(items) if isinstance(leaf, Tensor)]
