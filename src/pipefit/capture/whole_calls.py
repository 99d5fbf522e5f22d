"""Calls that stay whole in a trace: what each is given, and the operations that stand for them in the program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree


class Given(NamedTuple):
    """The arguments of a call, flat: tensors, which the program hands on, and all else, which it does not know."""

    leaves: list[Any]
    spec: pytree.TreeSpec

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """These arguments."""
        return Given(*pytree.tree_flatten((args, kwargs)))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among them."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def other_than(self, kinds: tuple[type, ...]) -> Any:
        """The first that is neither a tensor nor of these kinds; None if there is none."""
        return next((leaf for leaf in self.leaves if not isinstance(leaf, (Tensor, *kinds))), None)

    def with_tensors(self, tensors: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with others in the place of the tensors."""
        others = iter(tensors)
        leaves = [next(others) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


def nodes_of(program: ExportedProgram, operator: Any) -> Iterator[Any]:
    """The operations of a program, nested ones too, that call an operator."""
    for part in program.graph_module.modules():
        if isinstance(part, fx.GraphModule):
            yield from (node for node in part.graph.nodes if node.target is operator)
