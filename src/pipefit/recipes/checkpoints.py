"""The shapes of known checkpoints, by name: what their `config.json` says, for machines without a network.

A checkpoint of another name is read from Hugging Face's cache, or from a folder with a `config.json`.
"""

from __future__ import annotations

import os
import re
from typing import Any

from pipefit.errors import UsageError
from pipefit.texts import meant, printable, shortened

_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "vocab_size")  # fmt: skip
_COUNTS = (*_NAMES, "n_embd", "n_layer", "n_head", "head_dim", "num_local_experts")
_MOST, _MOST_LAYERS = 1 << 24, 10_000
_TIED = {"tie_word_embeddings": True}
_HEADS = {"head_dim": 128}
_SHAPES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "llama-2-7b": ("llama", (4096, 11008, 32, 32, 32, 32000), {}),
    "llama-2-13b": ("llama", (5120, 13824, 40, 40, 40, 32000), {}),
    "llama-2-70b": ("llama", (8192, 28672, 80, 64, 8, 32000), {}),
    "llama-3-8b": ("llama", (4096, 14336, 32, 32, 8, 128256), {}),
    "llama-3-70b": ("llama", (8192, 28672, 80, 64, 8, 128256), {}),
    "llama-3-405b": ("llama", (16384, 53248, 126, 128, 8, 128256), {}),
    "llama-3.2-1b": ("llama", (2048, 8192, 16, 32, 8, 128256), _TIED),
    "llama-3.2-3b": ("llama", (3072, 8192, 28, 24, 8, 128256), _TIED),
    "tinyllama-1.1b": ("llama", (2048, 5632, 22, 32, 4, 32000), {}),
    "smollm2-135m": ("llama", (576, 1536, 30, 9, 3, 49152), _TIED),
    "smollm2-360m": ("llama", (960, 2560, 32, 15, 5, 49152), _TIED),
    "smollm2-1.7b": ("llama", (2048, 8192, 24, 32, 32, 49152), _TIED),
    "mistral-7b": ("mistral", (4096, 14336, 32, 32, 8, 32000), {}),
    "mistral-7b-v0.3": ("mistral", (4096, 14336, 32, 32, 8, 32768), {}),
    "mixtral-8x7b": ("mixtral", (4096, 14336, 32, 32, 8, 32000), {}),
    "qwen2.5-0.5b": ("qwen2", (896, 4864, 24, 14, 2, 151936), _TIED),
    "qwen2.5-1.5b": ("qwen2", (1536, 8960, 28, 12, 2, 151936), _TIED),
    "qwen2.5-3b": ("qwen2", (2048, 11008, 36, 16, 2, 151936), _TIED),
    "qwen2.5-7b": ("qwen2", (3584, 18944, 28, 28, 4, 152064), {}),
    "qwen2.5-14b": ("qwen2", (5120, 13824, 48, 40, 8, 152064), {}),
    "qwen2.5-32b": ("qwen2", (5120, 27648, 64, 40, 8, 152064), {}),
    "qwen2.5-72b": ("qwen2", (8192, 29568, 80, 64, 8, 152064), {}),
    "qwen3-0.6b": ("qwen3", (1024, 3072, 28, 16, 8, 151936), _TIED | _HEADS),
    "qwen3-1.7b": ("qwen3", (2048, 6144, 28, 16, 8, 151936), _TIED | _HEADS),
    "qwen3-4b": ("qwen3", (2560, 9728, 36, 32, 8, 151936), _TIED | _HEADS),
    "qwen3-8b": ("qwen3", (4096, 12288, 36, 32, 8, 151936), _HEADS),
    "qwen3-14b": ("qwen3", (5120, 17408, 40, 40, 8, 151936), _HEADS),
    "qwen3-32b": ("qwen3", (5120, 25600, 64, 64, 8, 151936), _HEADS),
    "gemma-2b": ("gemma", (2048, 16384, 18, 8, 1, 256000), _TIED | {"head_dim": 256}),
    "gemma-7b": ("gemma", (3072, 24576, 28, 16, 16, 256000), _TIED | {"head_dim": 256}),
    "gemma-2-2b": ("gemma2", (2304, 9216, 26, 8, 4, 256000), _TIED | {"head_dim": 256}),
    "gemma-2-9b": ("gemma2", (3584, 14336, 42, 16, 8, 256000), _TIED | {"head_dim": 256}),
    "gpt2": ("gpt2", (), {}),
    "gpt2-medium": ("gpt2", (), {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "gpt2-large": ("gpt2", (), {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "gpt2-xl": ("gpt2", (), {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "phi-3-mini": ("phi3", (3072, 8192, 32, 32, 32, 32064), {}),
}
_VARIANTS = "chat|hf|instruct|base|it|pt|sft|fp16|bf16|bnb|4bit|8bit|4k|128k|2501|2507|v0.1|v0.2|v1.0"
_SAME = {
    r"^meta-": "",
    r"llama(\d)": r"llama-\1",
    r"llama-3\.[13]": "llama-3",  # of equal shapes
    rf"-({_VARIANTS.replace('.', '[.]')})(?=-|$)": "",
}


def shape_of(name: str, tokens: int) -> tuple[str, dict[str, Any]]:
    """Return the architecture and the settings of a checkpoint, with room for samples of `tokens` tokens.

    Raises:
        UsageError: unknown here, and neither a folder nor in Hugging Face's cache.
    """
    local = _local(name)
    if local is not None:
        return local
    last = name.rstrip("/").rpartition("/")[2].lower()
    for pattern, other in _SAME.items():
        last = re.sub(pattern, other, last)
    if last not in _SHAPES:
        near = meant(last, _SHAPES)
        raise UsageError(
            f"checkpoint {printable(name)} is neither a folder, nor in Hugging Face's cache, nor among those known "
            f"here{f'; {near}' if near else ''}; download its config.json into a folder and name that instead"
        )
    architecture, sizes, more = _SHAPES[last]
    if not sizes:
        return architecture, dict(more)
    return architecture, {**dict(zip(_NAMES, sizes, strict=True)), "max_position_embeddings": tokens, **more}


def _local(name: str) -> tuple[str, dict[str, Any]] | None:
    """Return the configuration of a folder or of Hugging Face's cache; None if there is none."""
    from pipefit.models.hugging_face import transformers_offline

    transformers = transformers_offline()
    try:
        config = transformers.AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - validators raise errors of many types
        if not os.path.isdir(name):
            return None
        why = shortened(" ".join(str(error).split()))
        raise UsageError(f"config.json of {printable(name)} cannot be used: {why}") from None
    plain = type(config)()
    given = {
        key: value for key, value in config.to_dict().items() if key in vars(plain) and key in plain.to_dict()
    }
    changed = {
        key: value
        for key, value in given.items()
        if value != plain.to_dict()[key] and not key.startswith("_")
    }
    for silent in (
        "dtype",
        "torch_dtype",
        "architectures",
        "transformers_version",
        "model_type",
        "use_cache",
    ):
        changed.pop(silent, None)
    for key, value in changed.items():
        most = _MOST_LAYERS if key in ("num_hidden_layers", "n_layer") else _MOST
        if key in _COUNTS and (type(value) is not int or not 1 <= value <= most):
            raise UsageError(
                f"config.json of {printable(name)}: {key} must be a whole number from 1 to {most:,}, not "
                f"{shortened(repr(value))}"
            )
    return config.model_type, changed
