"""Configurations of other tools as models: `megatron:FILE` and `torchtitan:llama3.llama3_8b`.

A file of Megatron-LM's arguments, or a named configuration of torchtitan, gives the shape of a decoder. It
becomes our model of the same shape: `zoo:gpt`, or Hugging Face's Llama. The number of parameters is equal,
but another implementation saves other tensors for its backward. Configurations of other models and unknown
arguments are refused by name. (Megatron-LM 0.20, `megatron.training.arguments`; torchtitan 0.3.)
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable
from typing import Any

from pipefit.errors import FileError, UsageError
from pipefit.schema.file_access import content
from pipefit.texts import printable, shortened

# Beginnings of arguments that do not change the model: parallelism, training, saving, data and logging
_SILENT = (
    "adam-", "async-", "attention-backend", "attention-softmax-in-fp32", "bf16", "calculate-", "ckpt-", "clip-grad",
    "context-parallel-size", "data-", "dataloader-", "ddp-", "dist-", "distributed-", "eod-", "eval-", "exit-",
    "finetune", "fp16", "global-batch-size", "hysteresis", "init-method-std", "initial-loss-scale", "load", "log-",
    "loss-scale", "lr", "manual-gc", "merge-file", "micro-batch-size", "min-loss-scale", "min-lr", "mock-data",
    "no-async-", "no-bias-", "no-create-attention-mask", "no-gradient-accumulation-fusion", "no-load-",
    "no-masked-softmax-fusion", "no-mmap", "no-rope-fusion", "no-save-", "num-workers", "optimizer-", "overlap-",
    "override-opt", "pipeline-model-parallel-", "profile", "rampup-batch-size", "recompute-", "rerun-", "save", "seed",
    "sequence-parallel", "sgd-", "split", "start-", "tensor-model-parallel-size", "tensorboard-", "timing-",
    "tokenizer-", "tp-comm-", "train-", "transformer-impl", "use-checkpoint-", "use-dist-", "use-distributed-optimizer",
    "use-flash-attn", "use-mcore-models", "valid-", "virtual-pipeline-", "vocab-file", "wandb-", "weight-decay",
)  # fmt: skip
_LLAMA = {
    "swiglu": True,
    "disable-bias-linear": True,
    "normalization": "RMSNorm",
    "position-embedding-type": "rope",
}
_GPT = {"swiglu": False, "disable-bias-linear": False, "normalization": "LayerNorm",
        "position-embedding-type": "learned_absolute"}  # fmt: skip
_SHARES = {"hidden-dropout": 0.1, "attention-dropout": 0.1}
_PADDED = {"make-vocab-size-divisible-by": 128, "tensor-model-parallel-size": 1}
_COUNTS = *_PADDED, "ffn-hidden-size", "num-query-groups"
_NEEDED = (
    "num-layers",
    "hidden-size",
    "num-attention-heads",
    "seq-length",
    "max-position-embeddings",
    "vocab-size",
)
_LARGEST_BYTES = 1 << 20  # of a file of arguments
_OPTIMIZERS = {"adam": "adamw", "sgd": "sgd"}  # Megatron's Adam decays weights as AdamW does
_MORE = ("optimizer", "ffn-hidden-size", "group-query-attention", "num-query-groups", "rotary-base", "rotary-percent",
         "untie-embeddings-and-output-weights", "use-rotary-position-embeddings", "norm-epsilon")  # fmt: skip


def megatron(file: str) -> tuple[str, dict[str, Any]]:
    """Return the model, and its settings, that a file of Megatron's arguments describes.

    Raises:
        FileError: the file cannot be read.
        UsageError: it lacks an argument, has an unknown one, or describes a decoder without counterpart here.
    """
    result = arguments(file)
    known = {*_LLAMA, *_SHARES, *_PADDED, *_NEEDED, *_MORE}
    for name in result:
        if name not in known and not name.startswith(_SILENT):
            raise UsageError(f"{file}: the effect of --{name} on a model is unknown: omit it if it has none")
    if missing := [name for name in _NEEDED if name not in result]:
        raise UsageError(f"{file} lacks --{missing[0]}, which is needed for the shape of the model")
    return _decoder({**_SHARES, **_PADDED, **result}, file)


def arguments(file: str) -> dict[str, Any]:
    """Parse a file of arguments: names without dashes, values as numbers if possible; True without a value.

    Raises:
        FileError: the file cannot be read.
        UsageError: it does not consist of arguments.
    """
    try:
        text = content(file, printable(file), _LARGEST_BYTES, "files of arguments have").decode()
    except UnicodeDecodeError as error:
        raise FileError(f"{printable(file)} is not text: byte {error.start} is not UTF-8") from None
    try:
        words = shlex.split(text.replace("\\\r\n", " ").replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UsageError(f"{file} is not a file of arguments: {error}") from error
    result: dict[str, Any] = {}
    name = ""
    for word in (part for one in words for part in (one.split("=", 1) if one.startswith("--") else [one])):
        if word.startswith("--"):
            name = word.removeprefix("--")
            result[name] = True
        elif not name:
            raise UsageError(
                f"{file} starts with {word!r}, but arguments start with --, such as --num-layers 32"
            )
        elif result[name] is True:
            result[name] = _number(word)
    return result


def _number(word: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _decoder(found: dict[str, Any], file: str) -> tuple[str, dict[str, Any]]:
    """Return GPT with Megatron's defaults, or a Llama; no mixtures."""
    for name in (*_NEEDED, *_COUNTS):
        if name in found and (type(found[name]) is not int or found[name] < 1):
            raise UsageError(
                f"{file}: --{name} must be a whole number, 1 or more, not {shortened(repr(found[name]))}"
            )
    for name in _SHARES:
        if isinstance(found[name], str | bool) or not 0 <= found[name] <= 1:
            raise UsageError(
                f"{file}: --{name} must be a number from 0 to 1, not {shortened(repr(found[name]))}"
            )
    if found.get("use-rotary-position-embeddings"):
        found["position-embedding-type"] = "rope"
    chosen = {name: found.get(name, default) for name, default in _GPT.items()}
    if chosen not in (_LLAMA, _GPT):
        raise UsageError(
            f"{file} describes neither a GPT nor a Llama: it has "
            + ", ".join(f"{name} {value}" for name, value in chosen.items())
        )
    step = found["make-vocab-size-divisible-by"] * found["tensor-model-parallel-size"]
    words = -(-found["vocab-size"] // step) * step  # as Megatron pads it
    tied = not found.get("untie-embeddings-and-output-weights", False)
    if (optimizer := found.get("optimizer", "adam")) not in _OPTIMIZERS:
        raise UsageError(
            f"{file}: --optimizer {optimizer} is not supported here: use {' or '.join(_OPTIMIZERS)}"
        )
    ours, settings = (_llama if chosen == _LLAMA else _gpt)(found, file, words, tied=tied)
    return ours, settings | {"optimizer": _OPTIMIZERS[optimizer]}


def _gpt(found: dict[str, Any], file: str, words: int, *, tied: bool) -> tuple[str, dict[str, Any]]:
    if found["max-position-embeddings"] != found["seq-length"]:
        raise UsageError(
            f"{file}: zoo:gpt needs equal numbers of positions and tokens: --max-position-embeddings and "
            "--seq-length"
        )
    if found["hidden-dropout"] != found["attention-dropout"] or found.get("group-query-attention"):
        raise UsageError(
            f"{file}: zoo:gpt uses one dropout for attention and hidden states, and does not support query "
            "groups"
        )
    settings = {
        "layers": found["num-layers"], "hidden": found["hidden-size"], "heads": found["num-attention-heads"],
        "vocabulary": words, "sequence": found["seq-length"], "dropout": float(found["hidden-dropout"]), "tied": tied,
    }  # fmt: skip
    if "ffn-hidden-size" in found:
        settings["intermediate"] = found["ffn-hidden-size"]
    return "zoo:gpt", settings


def _llama(found: dict[str, Any], file: str, words: int, *, tied: bool) -> tuple[str, dict[str, Any]]:
    if found["hidden-dropout"]:
        raise UsageError(f"{file}: a Llama does not use dropout on hidden states: write --hidden-dropout 0")
    heads = found["num-attention-heads"]
    groups = found.get("num-query-groups", 1) if found.get("group-query-attention") else heads
    return "hf:llama", {
        "num_hidden_layers": found["num-layers"], "hidden_size": found["hidden-size"], "num_attention_heads": heads,
        "num_key_value_heads": groups, "vocab_size": words, "sequence": found["seq-length"],
        "intermediate_size": found.get("ffn-hidden-size", int(found["hidden-size"] * 4 * 2 / 3 / 64) * 64),
        "max_position_embeddings": found["max-position-embeddings"], "tie_word_embeddings": tied,
        "attention_dropout": float(found["attention-dropout"]),
    }  # fmt: skip


def torchtitan(name: str) -> tuple[str, dict[str, Any]]:
    """Return the Llama with the shape of a torchtitan configuration, such as `llama3.llama3_8b`.

    Raises:
        UsageError: torchtitan is not installed, has no such configuration, or it is not a Llama.
    """
    module, _, function = name.rpartition(".")
    try:
        registry = importlib.import_module(f"torchtitan.models.{module}.config_registry")
    except ImportError as error:
        raise UsageError(f"torchtitan:{name} needs a torchtitan with this model: {error}") from error
    make = getattr(registry, function, None)
    if not callable(make):
        raise UsageError(f"torchtitan:{name}: {registry.__name__} does not define {function!r}")
    asked = make()
    shape = asked.model_spec.model
    if type(shape).__qualname__ != "Llama3Model.Config":
        raise UsageError(
            f"torchtitan:{name} is a {type(shape).__qualname__}: only torchtitan's Llama 3 is supported here"
        )
    attention, forward = shape.layers[0].attention, shape.layers[0].feed_forward
    return "hf:llama", {
        "num_hidden_layers": len(shape.layers), "hidden_size": shape.dim, "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads, "vocab_size": shape.vocab_size,
        "intermediate_size": forward.w1.out_features, "sequence": asked.training.seq_len,
        "max_position_embeddings": max(asked.training.seq_len, shape.max_seq_len),
        "tie_word_embeddings": shape.enable_weight_tying,
    }  # fmt: skip


CONFIGURATIONS: dict[str, Callable[[str], tuple[str, dict[str, Any]]]] = {
    "megatron": megatron,
    "torchtitan": torchtitan,
}
