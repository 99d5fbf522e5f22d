"""The settings of a module as plain values: what tells one layer of a class from another, besides its weights.

Kernel sizes, probabilities, flags, activation functions: the public attributes of a module and of its parts, with the
shapes of its parameters and buffers. The profiler measures layers of equal settings once (`profiler.cost_key`), and
settings are part of a task's fingerprint (`fake.fingerprint`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.capture.copying import hooks_of

_PLAIN = (int, float, str, bool, bytes, complex, type(None), type, torch.dtype, torch.device, torch.Size)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def module_settings(module: nn.Module, other: Callable[[Any], object]) -> object:
    """The class and the settings of `module` and its parts, as nested tuples.

    `other` says what stands for a value that is not plain, such as a function, for a hook, and for a module with hooks
    of its own or on one of its parameters.
    """
    settings: list[tuple[str, object]] = []
    hooked = [hook for hooks in _HOOKS for hook in getattr(module, hooks).values()]
    hooked += [hook for parameter in module.parameters(recurse=False) for hook in hooks_of(parameter)]
    if hooked:
        settings.append(("hooks", (other(module), *map(other, hooked))))
    for name, value in sorted(vars(module).items()):
        if name in ("_parameters", "_buffers"):
            settings.append((name, tuple((key, layout(tensor)) for key, tensor in value.items())))
        elif name == "_modules":
            parts = ((key, None if part is None else module_settings(part, other)) for key, part in value.items())
            settings.append((name, tuple(parts)))
        elif not name.startswith("_"):
            settings.append((name, _setting(value, other)))
    return type(module), tuple(settings)


def layout(tensor: Tensor | None) -> object:
    """Shape, strides, dtype and need for a gradient."""
    return None if tensor is None else (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)


def _setting(value: Any, other: Callable[[Any], object]) -> object:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_setting(item, other) for item in value)
    return other(value)
