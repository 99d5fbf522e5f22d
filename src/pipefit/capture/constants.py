"""Tensors that a module holds as plain attributes: neither parameters nor buffers, such as a table of frequencies.

They stay on a device as long as their layer does, and no recomputation copies them. A forward may not leave others
behind than it found: how long those live depends on more than a plan knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.capture.refusals import Refusal

_REGISTERED = ("_parameters", "_buffers", "_modules")


def constants(module: nn.Module) -> list[Tensor]:
    """The tensors among the attributes of `module` and its parts, in lists and dictionaries too, each once."""
    return list({id(tensor): tensor for tensors in _attributes(module).values() for tensor in tensors}.values())


def named_constants(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The same with the attributes' names; one in a list or dictionary has the attribute's name and a number."""
    return [
        (name if len(tensors) == 1 else f"{name}[{number}]", tensor)
        for name, tensors in _attributes(module).items()
        for number, tensor in enumerate(tensors)
    ]


def held_tensors(module: nn.Module) -> dict[str, Tensor]:
    """All tensors that `module` holds: parameters, buffers under all their names, and those that are attributes."""
    registered = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return dict([*registered, *named_constants(module)])


@contextmanager
def unchanged_constants(module: nn.Module) -> Iterator[None]:
    """Inside, `module` runs forward.

    Raises:
        Refusal: it has put another tensor into an attribute; names it.
    """
    before = _attributes(module)
    yield
    for name, tensors in _attributes(module).items():
        if list(map(id, before.get(name, []))) != list(map(id, tensors)):
            raise Refusal(
                f"its forward puts a tensor into the attribute {name!r}, and what that holds is in no plan",
                "make it a buffer that the forward updates, or let a module call the layers in its own forward, which "
                "is traced; instead of old spectral_norm and weight_norm, use those of torch.nn.utils.parametrizations",
            )


def _attributes(module: nn.Module) -> dict[str, list[Tensor]]:
    """The tensors in each attribute that are not registered anywhere in `module`, by the attribute's name."""
    registered = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    found = {}
    for path, part in module.named_modules():
        for name, item in vars(part).items():
            leaves = pytree.tree_leaves(item) if name not in _REGISTERED else []
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in registered]
            if tensors:
                found[f"{path}.{name}".removeprefix(".")] = tensors
    return found
