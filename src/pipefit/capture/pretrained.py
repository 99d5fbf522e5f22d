"""Hugging Face models as they are: what is set while one is traced, and what its configuration says of a refusal.

All of it is done to a copy, so that the owner's model and its configuration stay as they are. transformers need not be
installed: where nobody has imported it, no model is one of its own.

Training needs no cache of keys and values, which `config.use_cache` asks for by default, and a model that is asked for
its own loss has to name it (`config.return_dict`). Neither changes a number. What would, such as layers that are left
out at random, stays as it is and is refused with the setting that turns it off.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

_FOLLOWED = (None, "eager", "sdpa")  # kinds of attention
_AT_RANDOM = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def configure(module: nn.Module, *, own_loss: bool) -> None:
    """Let `module`, a copy that is going to be traced, compute what its training needs, and name its loss."""
    found = configurations(module)
    for config in found:
        if getattr(config, "use_cache", None):
            config.use_cache = False
    if own_loss and any(config is getattr(module, "config", None) for config in found):
        module.config.return_dict = True  # type: ignore[union-attr]


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
