"""The tensors that an optimizer makes as it is made, besides its state: slow copies of weights, a rate in a tensor.

with MadeTensors() as made:
    optimizer = task.optimizer(groups)
made.alive                      # of all that was made inside, what somebody still holds
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import TensorWeakRef


class MadeTensors(TorchDispatchMode):
    """Inside, notes the results of all operations, without holding them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self._results += [TensorWeakRef(leaf) for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]
        return found

    @property
    def alive(self) -> list[Tensor]:
        """Those results that exist still."""
        found = [result() for result in self._results]
        return [tensor for tensor in found if tensor is not None]
