"""A model's own parameters and buffers, under the names its layers give them.

The layer `transformer.h.3` calls its weight `attn.c_attn.weight`, without its own prefix, so that equal blocks have
equal names and are profiled once. A parameter of another module, such as a tied embedding, keeps its full name; the
layers that use it hold the same object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pipefit.capture.chain import ChainLayer
from pipefit.capture.flat import Role, plain
from pipefit.capture.shared import own_module


class Binding:
    """Gives layers what they need of `module`; `constants` are tensors that the program itself holds."""

    def __init__(self, module: nn.Module, constants: Mapping[str, Any]) -> None:
        self.module, self.constants = module, constants
        self.tensors: dict[str, Tensor] = dict(
            (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        )
        self.kept = module.state_dict(keep_vars=True)
        self.aliases: dict[int, list[str]] = {}
        self._met = set[int]()  # the modules that stay whole in layers, and their parameters
        self._of_constants: dict[int, Tensor] = {}  # layers that use one constant hold the same tensor
        for name, tensor in self.tensors.items():
            self.aliases.setdefault(id(tensor), []).append(name)

    def names(self, layer: str, needed: Sequence[Role]) -> dict[str, str]:
        """Local names for what a layer needs."""
        prefix = f"{plain(layer)}."
        found = {role.name: _local(role.name, layer) for role in needed if role.kind == "module"}
        prefixes = [*((f"{path}.", f"{local}.") for path, local in found.items()), (prefix, "")]
        for role in needed:
            if role.kind == "module":
                continue
            if role.name not in self.tensors:
                found[role.name] = f"constant{len(found)}"
                continue
            names = self.aliases[id(self.tensors[role.name])]
            local = (own + name.removeprefix(p) for p, own in prefixes for name in names if name.startswith(p))
            found[role.name] = next(local, role.name)
        if len(set(found.values())) < len(found):
            return {role.name: role.name for role in needed}
        return found

    def fill(self, layer: nn.Module, needed: Sequence[Role], names: Mapping[str, str]) -> dict[str, str]:
        """Registers in `layer` what it needs; returns the original name of everything that its state dict holds."""
        originals = {}
        for role in needed:
            if role.kind == "module":
                originals.update(self._give_module(layer, role.name, names[role.name]))
        for role in needed:
            if role.kind == "module":
                continue
            tensor, local = self.tensor(role.name), names[role.name]
            original = self._original(tensor, local, role.name)
            register(layer, local, tensor, persistent=original in self.kept)
            if original in self.kept:
                originals[local] = original
        return originals

    def _give_module(self, layer: nn.Module, path: str, local: str) -> dict[str, str]:
        """Puts a module that stays whole into a layer; the original names of what its state dict holds."""
        part = own_module(self.module.get_submodule(path), self._met)
        *owners, last = local.split(".")
        _owner(layer, owners).add_module(last, part)
        return {f"{local}.{name}": f"{path}.{name}" for name in part.state_dict() if f"{path}.{name}" in self.kept}

    def with_the_rest(self, layers: Sequence[ChainLayer]) -> list[ChainLayer]:
        """Gives the layer nearest by name what no layer holds: unused parameters, and other names of tied ones."""
        unread: dict[str, list[str]] = {layer.name: [] for layer in layers}
        held = {
            id(t): layer for layer in reversed(layers) for t in (*layer.module.parameters(), *layer.module.buffers())
        }
        named = {original for layer in layers for original in layer.originals.values()}
        for name, tensor in self.tensors.items():
            if name in named or name not in self.kept:
                continue
            layer = held.get(id(tensor)) or max(layers, key=lambda layer: _nearness(layer.name, name))
            held[id(tensor)] = layer
            local = _free(layer.module, name)
            register(layer.module, local, tensor, persistent=True)
            layer.originals[local] = name  # type: ignore[index]
            unread[layer.name].append(local)
        return [replace(layer, unread=frozenset(unread[layer.name])) for layer in layers]

    def tensor(self, name: str) -> Tensor:
        """The parameter, buffer or constant of that name in the program."""
        if name in self.tensors:
            return self.tensors[name]
        owner, _, attribute = name.rpartition(".")
        found = getattr(self._part(owner), attribute, None)
        found = found if isinstance(found, Tensor) else self.constants[name]
        if id(found) not in self._of_constants:
            self._of_constants[id(found)] = self._constant(found)
        return self._of_constants[id(found)]

    def _constant(self, found: Tensor) -> Tensor:
        """A constant of the program where the model's own tensors are."""
        place = next(iter(self.tensors.values()), torch.empty(0))
        if isinstance(place, FakeTensor) and not (isinstance(found, FakeTensor) and found.fake_mode is place.fake_mode):
            return torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device=place.device)
        return found if isinstance(found, FakeTensor) else found.detach().to(place.device)

    def _part(self, path: str) -> nn.Module | None:
        return dict(self.module.named_modules()).get(path)

    def _original(self, tensor: Tensor, local: str, name: str) -> str:
        """The name, of those a tensor has, that fits the local one."""
        names = self.aliases.get(id(tensor), [name])
        return next((alias for alias in names if alias == local or alias.endswith(f".{local}")), name)


def register(layer: nn.Module, name: str, tensor: Tensor, *, persistent: bool) -> None:
    """Put `tensor` into `layer` under a dotted name; the modules on the way are made."""
    *path, last = name.split(".")
    layer = _owner(layer, path)
    if isinstance(tensor, nn.Parameter):
        layer.register_parameter(last, tensor)
    else:
        layer.register_buffer(last, tensor, persistent=persistent)


def _free(layer: nn.Module, name: str) -> str:
    """`name`, or one like it, under which `layer` can hold a tensor: parts of its own may have begun with that name."""
    at: Any = layer
    for part in name.split("."):
        if not hasattr(at, part):
            return name
        at = getattr(at, part)
        if not isinstance(at, nn.Module):
            break
    return _free(layer, f"_{name}")


def _owner(layer: nn.Module, path: Sequence[str]) -> nn.Module:
    """The part of `layer` at a path; the modules on the way are made."""
    for part in path:
        if part not in layer._modules:
            layer.add_module(part, nn.Module())
        layer = layer._modules[part]  # type: ignore[assignment]
    return layer


def _local(path: str, layer: str) -> str:
    """What a layer calls the module at a path: alike in all layers that are one."""
    return "whole" if path == plain(layer) else path.removeprefix(f"{plain(layer)}.")


def _nearness(layer: str, name: str) -> int:
    """How many leading parts two paths share; if one path begins with the whole of the other, a very large number."""
    pairs = zip(layer.split("."), name.split("."), strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), 1 << 30)
