"""Hugging Face models: settings during a trace, and settings that an error recommends.

All changes are made to a copy; the user's model and its configuration stay as they are. transformers need not
be installed: if it has not been imported, the functions here do nothing.

A model that computes its own loss must return it by name (`config.return_dict`), which changes no number. The
cache of keys and values, on by default (`config.use_cache`), does change numbers: with a cache, transformers
ignores that `position_ids` restart. So a model keeps its cache during a trace; only the copies that would
fill the cache are left out. Layers that are skipped at random stay, and the error names the setting that
turns the skipping off.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

_FOLLOWED = (None, "eager", "sdpa")  # attention implementations that can be traced
_AT_RANDOM = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def configure(module: nn.Module, *, own_loss: bool) -> None:
    """Let `module`, a copy to be traced, return its loss by name, if it computes one."""
    if own_loss and any(config is getattr(module, "config", None) for config in configurations(module)):
        module.config.return_dict = True  # type: ignore[union-attr]


def cache_class() -> type[Any] | tuple[()]:
    """Return the class of transformers' caches of keys and values; () if transformers has not been
    imported.
    """
    result: type[Any] | tuple[()] = getattr(sys.modules.get("transformers.cache_utils"), "Cache", ())
    return result


def advice(module: nn.Module) -> str:
    """Return how to turn off settings of a Hugging Face model that often break a trace, or ""."""
    configs = configurations(module)
    result = dict.fromkeys(setting for config in configs for setting in _settings(config))
    ways = [f"set {' and '.join(result)} in the model's config"] if result else []
    if any(getattr(config, "_attn_implementation", None) not in _FOLLOWED for config in configs):
        ways.append("call the model's set_attn_implementation('sdpa')")
    return ", and ".join(ways)


def configurations(module: nn.Module) -> list[Any]:
    """Return the configurations of the transformers models in `module`, nested ones included, each once."""
    kind = getattr(sys.modules.get("transformers.configuration_utils"), "PreTrainedConfig", None)
    pending = [
        part.config for part in module.modules() if isinstance(getattr(part, "config", None), kind or ())
    ]
    result: dict[int, Any] = {}
    while pending:
        config = pending.pop()
        if id(config) not in result:
            result[id(config)] = config
            pending += [inner for inner in vars(config).values() if isinstance(inner, kind or ())]
    return list(result.values())


def _settings(config: Any) -> Iterator[str]:
    """Yield settings that make a training step depend on numbers that a trace does not see."""
    for name in _AT_RANDOM:
        if getattr(config, name, 0.0):
            yield f"{name}=0.0"
    if getattr(config, "apply_spec_augment", False):
        yield "apply_spec_augment=False"
