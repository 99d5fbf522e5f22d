"""Hugging Face models as they are: what is set while one is traced, and what its configuration says of a refusal.

All of it is done to a copy, so that the owner's model and its configuration stay as they are. transformers need not be
installed: where nobody has imported it, no model is one of its own.

A model that is asked for its own loss has to name it (`config.return_dict`), which changes no number. The cache of keys
and values, which `config.use_cache` asks for by default, does change numbers: with one, transformers ignores that
`position_ids` restart. So a model has its cache while it is traced; only the copies that would fill it are left out.
Layers that are left out at random also stay as they are, and are refused with the setting that turns that off.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

_FOLLOWED = (None, "eager", "sdpa")  # kinds of attention
_AT_RANDOM = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def configure(module: nn.Module, *, own_loss: bool) -> None:
    """Let `module`, a copy that is going to be traced, name its loss, if it has one."""
    if own_loss and any(config is getattr(module, "config", None) for config in configurations(module)):
        module.config.return_dict = True  # type: ignore[union-attr]


def caches_without_copies() -> AbstractContextManager[object]:
    """A context in which an empty cache keeps keys and values as they are, where it would keep copies."""
    caches = sys.modules.get("transformers.cache_utils")
    return nullcontext() if caches is None else mock.patch.object(caches, "torch", _TorchWithoutCopies())


class _TorchWithoutCopies:
    """The module `torch`, but that a tensor joined to empty ones is that tensor."""

    @staticmethod
    def cat(tensors: Sequence[Tensor], *args: Any, **options: Any) -> Tensor:
        filled = [tensor for tensor in tensors if tensor.numel()]
        return filled[0] if len(filled) == 1 else torch.cat(list(tensors), *args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def cache_class() -> type[Any] | tuple[()]:
    """The class of transformers' caches of keys and values; nothing where nobody has imported it."""
    found: type[Any] | tuple[()] = getattr(sys.modules.get("transformers.cache_utils"), "Cache", ())
    return found


def advice(module: nn.Module) -> str:
    """Settings of a Hugging Face model that a trace often fails on, and how to turn them off; nothing of others."""
    configs = configurations(module)
    found = dict.fromkeys(setting for config in configs for setting in _settings(config))
    ways = [f"set {' and '.join(found)} in the model's config"] if found else []
    if any(getattr(config, "_attn_implementation", None) not in _FOLLOWED for config in configs):
        ways.append("call the model's set_attn_implementation('sdpa')")
    return ", and ".join(ways)


def configurations(module: nn.Module) -> list[Any]:
    """The configurations of the transformers models in `module`, with those inside them, each once."""
    kind = getattr(sys.modules.get("transformers.configuration_utils"), "PreTrainedConfig", None)
    pending = [part.config for part in module.modules() if isinstance(getattr(part, "config", None), kind or ())]
    found: dict[int, Any] = {}
    while pending:
        config = pending.pop()
        if id(config) not in found:
            found[id(config)] = config
            pending += [inner for inner in vars(config).values() if isinstance(inner, kind or ())]
    return list(found.values())


def _settings(config: Any) -> Iterator[str]:
    """The settings that make a training step of this model depend on numbers that no trace sees."""
    for name in _AT_RANDOM:
        if getattr(config, name, 0.0):
            yield f"{name}=0.0"
    if getattr(config, "apply_spec_augment", False):
        yield "apply_spec_augment=False"
