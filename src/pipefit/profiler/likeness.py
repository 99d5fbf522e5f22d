"""When are two layers alike, so that measuring one is enough?

When they have the same class, the same settings, the same parameters and buffers by shape and dtype, and parts that are
alike. A module with hooks, or with a setting that cannot be compared, is like nothing but itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (int, float, str, bool, bytes, complex, type(None), type, torch.dtype, torch.device, torch.Size)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def likeness(module: nn.Module) -> object:
    """A key that is equal for modules that are alike."""
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return id(module)
    settings: list[tuple[str, object]] = []
    for name, value in sorted(vars(module).items()):
        if name in ("_parameters", "_buffers"):
            settings.append((name, tuple((key, _shape(tensor)) for key, tensor in value.items())))
        elif name == "_modules":
            settings.append(
                (name, tuple((key, None if part is None else likeness(part)) for key, part in value.items()))
            )
        elif not name.startswith("_"):
            settings.append((name, _setting(value)))
    return type(module), tuple(settings)


def _shape(tensor: Tensor | None) -> object:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)


def _setting(value: Any) -> object:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_setting, value))
    return id(value)
