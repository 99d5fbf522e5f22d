"""What a forward computes with and changes: where a second forward would not be like the first.

Some layers compute with a buffer that they change: spectral norm, moving averages that feed back, observers that
quantise by what they have observed. Their second forward starts from copies of these buffers, made before the first.
Batch norm in training is not of this kind: it changes its statistics, and computes with those of the batch. A layer may
also change what no copy is made of (a plain attribute, a parameter), or draw from a generator of its own. It is named,
so that it is not recomputed.

This is found in one forward over fake tensors, in which every value is followed back to the buffers that it was
computed from. Tensors in one storage count as one. A forward that reads a number, as every condition on a tensor does,
may do something else when the number is another: an observer takes its first microbatch as it is and averages over the
later ones. Nothing is known of what it would compute with then, so all of its buffers count as those that feed back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipefit.capture.by_value import reads_a_number
from pipefit.capture.constants import named_constants
from pipefit.capture.storages import storage_key
from pipefit.profiler.coupling import coupling, draws
from pipefit.profiler.graph import nodes
from pipefit.profiler.plain import Plain, changed_name, plain_attributes
from pipefit.profiler.writes import changed_arguments

_STATISTICS = ("running_mean", "running_var")
_TRAINING = ("training", "train", "use_input_stats")


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """What makes a second forward of a layer differ from its first: buffers by name, and what no copy helps against."""

    changed: frozenset[str]  # buffers that it changes
    fed_back: tuple[
        str, ...
    ]  # those of them with which it computes; all that it has, where what it does depends on values
    fed_back_bytes: int
    unrepeatable: str  # in words; empty if there is nothing else
    parameters: frozenset[str]  # that it changes
    unseen: tuple[str, ...]  # tensors that it changes without autograd, as by `x.data`
    in_place: frozenset[str]  # all tensors that it changes and does not replace
    runs_python: bool  # whether its backward does, in a custom function or a hook of a module
    read: frozenset[str]  # all with which it computes
    coupled: str  # why it couples the samples of a microbatch, in words; or empty
    draws: bool  # whether it draws random numbers


def feedback(forward: Callable[[], Sequence[Tensor]], module: nn.Module, owner: object, before: Plain) -> Feedback:
    """What `forward`, which runs `module`, changes and computes with. Buffers that it replaces are put back.

    Args:
        owner: whose plain attributes it may change: the module or, for a loss, the function.
        before: these attributes before any forward, as a first one may differ from the others.
    """
    buffers = [_Seen.now(name, b) for name, b in module.named_buffers(remove_duplicate=False)]
    others = [_Seen.now(name, p) for name, p in module.named_parameters(remove_duplicate=False)]
    others += [_Seen.now(name, constant) for name, constant in named_constants(module)]
    plain = plain_attributes(owner)
    with Sources([seen.tensor for seen in (*buffers, *others)]) as sources:
        outputs = forward()
        read = frozenset[int]().union(*map(sources.of, (*outputs, *_kept_by_custom_functions(outputs))))
    now = dict(module.named_buffers(remove_duplicate=False))
    changed = [b for b in buffers if now.get(b.name) is not b.tensor or b.is_changed(sources.written)]
    _put_back(module, buffers)
    after = plain_attributes(owner)
    written = sources.in_place | (sources.written & read)
    written |= {b.storage for b in buffers} if _toggles(plain, after) else set()
    held = [*(b for b in buffers if now.get(b.name) is b.tensor), *others]
    fed_back = [b for b in buffers if b.storage in read and b.storage in {one.storage for one in changed}]
    fed_back = buffers if sources.reads_numbers else fed_back
    names = [other.name for other in others if other.is_changed(sources.written)]
    parameters = frozenset(names) & {name for name, _ in module.named_parameters()}
    names += filter(None, (changed_name(before, plain), changed_name(plain, after)))
    return Feedback(
        changed=frozenset(buffer.name for buffer in changed),
        fed_back=tuple(buffer.name for buffer in fed_back),
        fed_back_bytes=sum({b.storage: b.tensor.untyped_storage().nbytes() for b in fed_back}.values()),
        unrepeatable=_unrepeatable(names, draws=sources.draws),
        parameters=parameters,
        unseen=tuple(one.name for one in held if one.is_unseen(written)),
        in_place=frozenset(one.name for one in held if one.is_in_place(written)),
        runs_python=any(map(_is_of_a_layer, nodes(outputs))),
        read=frozenset(one.name for one in (*buffers, *others) if one.storage in read),
        coupled=sources.coupled,
        draws=sources.draws_any,
    )


def _toggles(before: Plain, after: Plain) -> bool:
    """Whether the next forward is in another mode, in which it may change statistics with which this one computes."""
    return any(before[name] != after.get(name) for name in before if name.rpartition(".")[2] == "training")


def _unrepeatable(changed: Sequence[str], *, draws: bool) -> str:
    if changed:
        return f"changes {changed[0]!r}, which is no buffer"
    return "draws from a generator of its own" if draws else ""


class _Seen(NamedTuple):
    """A tensor as it is before a forward."""

    name: str
    tensor: Tensor
    storage: int
    version: int

    @staticmethod
    def now(name: str, tensor: Tensor) -> _Seen:
        """What the tensor is now."""
        return _Seen(name, tensor, storage_key(tensor), tensor._version)

    def is_changed(self, written: Set[int]) -> bool:
        """Whether it is another since, given the storages that were written to."""
        now = storage_key(self.tensor), self.tensor._version
        return self.storage in written or now != (self.storage, self.version)

    def is_in_place(self, written: Set[int]) -> bool:
        """Whether its numbers are others since, or it has been given others (`x.data = ...`)."""
        return self.storage in written or storage_key(self.tensor) != self.storage

    def is_unseen(self, written: Set[int]) -> bool:
        """The same, if autograd does not know it."""
        return self.is_in_place(written) and self.tensor._version == self.version


def _put_back(module: nn.Module, buffers: Iterable[_Seen]) -> None:
    for buffer in buffers:
        path, _, name = buffer.name.rpartition(".")
        module.get_submodule(path)._buffers[name] = buffer.tensor


class Sources(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows, for every storage, the storages of the buffers from which its content was computed.

    `written` are the storages that were written to, `in_place` those of them that are no norm's statistics; `draws` is
    whether random numbers came from another generator than torch's default; `reads_numbers` whether a number was
    read whose value is unknown; `coupled` is why samples are coupled and
    `draws_any` whether there are random numbers at all (`profiler.coupling`).
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._met: list[Any] = [t.untyped_storage() for t in tensors]  # kept, so that no address is used twice
        self._known = {storage._cdata: frozenset((storage._cdata,)) for storage in self._met}
        self.written: set[int] = set()
        self.in_place: set[int] = set()
        self.draws = self.reads_numbers = False
        self.coupled, self.draws_any = "", False

    def of(self, tensor: Tensor) -> frozenset[int]:
        """The storages of the buffers."""
        return self._known.get(storage_key(tensor), frozenset())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        changed = changed_arguments(func)
        read = given
        if any(given.get(name) for name in _TRAINING) or "with_update" in str(func):
            changed |= set(_STATISTICS)
            read = {name: item for name, item in given.items() if name not in _STATISTICS}
        self.reads_numbers |= reads_a_number(func, args)
        self.coupled = self.coupled or coupling(func, given)
        self.draws_any |= draws(func, given)
        self.draws |= given.get("generator") not in (None, torch.default_generator)
        sources = frozenset[int]().union(*map(self.of, _tensors(read)))
        out = func(*args, **(kwargs or {}))
        written = _tensors([given.get(name) for name in changed])
        self.written |= set(map(storage_key, written))
        self.in_place |= set(map(storage_key, _tensors([given.get(name) for name in changed.difference(_STATISTICS)])))
        for tensor in (*_tensors(out), *written):
            storage = tensor.untyped_storage()
            self._met.append(storage)
            self._known[storage._cdata] = self._known.get(storage._cdata, frozenset()) | sources
        return out


def _is_of_a_layer(node: object) -> bool:
    """Whether a node of a graph is a custom function, and none of our own."""
    return isinstance(node, BackwardCFunction) and not type(node)._forward_cls.__module__.startswith("pipefit.")  # type: ignore[attr-defined]


def _kept_by_custom_functions(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """What custom functions keep for a backward, which their results may not show."""
    for node in nodes(outputs):
        if isinstance(node, BackwardCFunction):
            yield from _tensors([node.saved_tensors, list(vars(node).values())])


def _tensors(items: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(items) if isinstance(leaf, Tensor)]
