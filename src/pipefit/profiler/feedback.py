"""Which buffers a forward changes, and whether it computes with one of them, as spectral norm does.

Moving averages that feed back do so too. Run a second time, such a forward sees what the first one left, and computes
something else. Batch norm in training is not of this kind: it updates its statistics and computes with those of the
batch. It is found in one forward over fake tensors, in which every value is followed back to the buffers that it was
computed from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_STATISTICS = ("running_mean", "running_var")
_TRAINING = ("training", "train", "use_input_stats")


class BufferUse(NamedTuple):
    """The names of the buffers that a forward changes, and whether an output depends on one of them."""

    changed: frozenset[str]
    feeds_back: bool


def buffer_use(call: Callable[[Any], Sequence[Tensor]], module: nn.Module, inputs: Any) -> BufferUse:
    """What `call(inputs)` does to the buffers of `module`; they are left as they were."""
    before = [
        (f"{path}.{name}".removeprefix("."), part, name, buffer)
        for path, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    versions = [buffer._version for *_, buffer in before]
    if not before:
        return BufferUse(frozenset(), feeds_back=False)
    with _Sources([buffer for *_, buffer in before]) as sources:
        outputs = call(inputs)
    read = frozenset[int]().union(*map(sources.of, outputs))
    changed = {
        full: buffer
        for (full, part, name, buffer), version in zip(before, versions, strict=True)
        if part._buffers.get(name) is not buffer or buffer._version != version
    }
    for _, part, name, buffer in before:
        part._buffers[name] = buffer
    return BufferUse(frozenset(changed), feeds_back=any(id(buffer) in read for buffer in changed.values()))


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
