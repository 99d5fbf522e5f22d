"""What a forward keeps: the tensors that autograd saved, which operation saved each, and whose storages those are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor
from torch.utils import _pytree as pytree

from pipefit.capture.storages import storage_key
from pipefit.layer_costs import Origin, SavedTensor
from pipefit.profiler.graph import nodes
from pipefit.profiler.pass_meter import PassMeter
from pipefit.texts import dtype_name


class Packed:
    """A saved tensor as a node of the graph holds it: it ends with the node, if the forward drops the node's result.

    The tensor is detached, because a node that saves its own output would otherwise keep itself alive.
    """

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


class LayerStorages:
    """The storages behind a layer's tensors: of parameters and buffers, of its inputs, and its own.

    `own` has the bytes of its own storages, in the order in which they were first asked about.
    """

    def __init__(self, meter: PassMeter, statics: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self._meter, self.own = meter, list[int]()
        self._origins = {storage_key(t): Origin(kind="parameter") for t in statics}
        self._origins |= {storage_key(t): Origin(kind="input", index=k) for k, t in enumerate(inputs)}

    def origin(self, tensor: Tensor) -> Origin:
        """Whose storage a tensor has. One that a loss holds, as weights of classes, is nobody's, like a parameter."""
        key = storage_key(tensor)
        if key not in self._origins:
            known = self._meter.counts(tensor)
            nbytes = tensor.untyped_storage().nbytes()
            self._origins[key] = self.add(nbytes) if known else Origin(kind="parameter")
        return self._origins[key]

    def add(self, nbytes: int) -> Origin:
        """One more storage of the layer's own."""
        self.own.append(nbytes)
        return Origin(kind="own", index=len(self.own) - 1)


def saved_tensors(
    packed: Sequence[Packed | None], operations: dict[object, list[str]], storages: LayerStorages
) -> list[SavedTensor]:
    """The tensors that autograd still keeps, in the order in which they were saved; None stands for one it dropped."""
    kept = [(index, held.tensor) for index, held in enumerate(packed) if held is not None]
    return [
        SavedTensor(
            index=index,
            operation=names.pop(0) if (names := operations.get(_identity(tensor))) else "",
            shape=tuple(tensor.shape),
            nbytes=tensor.numel() * tensor.element_size(),
            dtype=dtype_name(tensor.dtype),
            origin=storages.origin(tensor),
        )
        for index, tensor in kept
    ]


def lasting_tensors(values: Sequence[Tensor], first: int, storages: LayerStorages) -> list[SavedTensor]:
    """The tensors that custom functions in the graph of `values` keep as attributes of their contexts.

    Autograd knows nothing of them: they end with the graph, not with the backward of their function. They are numbered
    from `first` on.
    """
    kept = [
        (node.name().rpartition("Backward")[0], leaf)
        for node in sorted(nodes(values), key=lambda node: node._sequence_nr())
        for leaf in pytree.tree_leaves(getattr(node, "__dict__", {}))
        if isinstance(leaf, Tensor)
    ]
    return [
        SavedTensor(
            index=first + number,
            operation=operation,
            shape=tuple(tensor.shape),
            nbytes=tensor.numel() * tensor.element_size(),
            dtype=dtype_name(tensor.dtype),
            origin=storages.origin(tensor),
            lasting=True,
        )
        for number, (operation, tensor) in enumerate(kept)
    ]


def savers(values: Sequence[Tensor]) -> dict[object, list[str]]:
    """The operations in the graph of `values` that saved each tensor, in the order in which they ran."""
    found: dict[object, list[str]] = defaultdict(list)
    for node in sorted(nodes(values), key=lambda node: node._sequence_nr()):
        operation = node.name().rpartition("Backward")[0]
        for name in dir(node):
            if name.startswith("_saved_") and isinstance(kept := getattr(node, name), Tensor):
                found[_identity(kept)].append(operation)
    return found


def _identity(tensor: Tensor) -> object:
    """Equal for tensors with the same storage, offset, shape and strides."""
    return storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
