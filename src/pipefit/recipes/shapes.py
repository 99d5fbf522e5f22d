"""Shapes of models: configurations of other tools, and what known checkpoints say by their names.

A file of Megatron-LM's arguments, or a named configuration of torchtitan, gives the shape of a decoder. It
becomes our model of the same shape: `zoo:gpt`, or Hugging Face's Llama. The number of parameters is equal,
but another implementation saves other tensors for its backward. Configurations of other models and unknown
arguments are refused by name. (Megatron-LM 0.20, `megatron.training.arguments`; torchtitan 0.3.)
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
from collections.abc import Callable
from typing import Any

from pipefit.errors import FileError, UsageError
from pipefit.schema.file_access import content
from pipefit.texts import meant, printable, shortened

# Beginnings of arguments that do not change the model: parallelism, training, saving, data and logging
_SILENT = (
    "adam-", "async-", "attention-backend", "attention-softmax-in-fp32", "bf16", "calculate-", "ckpt-",
    "clip-grad", "context-parallel-size", "data-", "dataloader-", "ddp-", "dist-", "distributed-", "eod-",
    "eval-", "exit-", "finetune", "fp16", "global-batch-size", "hysteresis", "init-method-std",
    "initial-loss-scale", "load", "log-", "loss-scale", "lr", "manual-gc", "merge-file", "micro-batch-size",
    "min-loss-scale", "min-lr", "mock-data", "no-async-", "no-bias-", "no-create-attention-mask",
    "no-gradient-accumulation-fusion", "no-load-", "no-masked-softmax-fusion", "no-mmap", "no-rope-fusion",
    "no-save-", "num-workers", "optimizer-", "overlap-", "override-opt", "pipeline-model-parallel-",
    "profile", "rampup-batch-size", "recompute-", "rerun-", "save", "seed", "sequence-parallel", "sgd-",
    "split", "start-", "tensor-model-parallel-size", "tensorboard-", "timing-", "tokenizer-", "tp-comm-",
    "train-", "transformer-impl", "use-checkpoint-", "use-dist-", "use-distributed-optimizer",
    "use-flash-attn", "use-mcore-models", "valid-", "virtual-pipeline-", "vocab-file", "wandb-",
    "weight-decay",
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
_MORE = ("optimizer", "ffn-hidden-size", "group-query-attention", "num-query-groups", "rotary-base",
         "rotary-percent", "untie-embeddings-and-output-weights", "use-rotary-position-embeddings",
         "norm-epsilon")  # fmt: skip


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
        words = _words(text.replace("\\\r\n", " ").replace("\\\n", " "))
    except ValueError as error:
        raise UsageError(f"{file} is not a file of arguments: {error}") from error
    result: dict[str, Any] = {}
    name = ""
    for word in (part for one in words for part in (one.split("=", 1) if one.startswith("--") else [one])):
        if word.startswith("--"):
            name = word.removeprefix("--")
            result[name] = True
        elif word == ")":
            name = ""
        elif name and word != "\n" and result[name] is True:
            result[name] = _number(word)
    if not result:
        raise UsageError(f"{file} has no arguments: they start with --, such as --num-layers 32")
    return {name: value for name, value in result.items() if not _TORCHRUN.fullmatch(name)}


_TORCHRUN = re.compile(
    r"nnodes|(nproc.per|node|master|rdzv|local|max)[_-](node|rank|addr|port|id|backend|endpoint|restarts)"
)


def _words(text: str) -> list[str]:
    """Return the words of a file of arguments or of a shell script, with the values of its variables.

    Arguments stand in the file, in arrays or strings that variables hold, or behind a command.
    """
    lexer = shlex.shlex(text.replace("\n", " \n "), posix=True, punctuation_chars=False)
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    variables, words = dict[str, str](), list[str]()
    for raw in lexer:
        word = re.sub(r"\$\{?(\w+)\}?(?!\[)", lambda name: variables.get(name[1], name[0]), raw)
        if assigned := re.fullmatch(r"(\w+)\+?=(.*)", word, re.DOTALL):
            name, value = assigned.groups()
            if value.startswith("("):
                words += value.removeprefix("(").split()
            elif "--" in value:
                words += [*value.split(), ")"]
            else:
                variables[name] = value
        elif not word.startswith("${") or "[" not in word:
            words.append(word)
    return words


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
        "vocabulary": words, "sequence": found["seq-length"], "dropout": float(found["hidden-dropout"]),
        "tied": tied,
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
        "num_hidden_layers": found["num-layers"], "hidden_size": found["hidden-size"],
        "num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": words,
        "sequence": found["seq-length"],
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
        "num_hidden_layers": len(shape.layers), "hidden_size": shape.dim,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads, "vocab_size": shape.vocab_size,
        "intermediate_size": forward.w1.out_features, "sequence": asked.training.seq_len,
        "max_position_embeddings": max(asked.training.seq_len, shape.max_seq_len),
        "tie_word_embeddings": shape.enable_weight_tying,
    }  # fmt: skip


CONFIGURATIONS: dict[str, Callable[[str], tuple[str, dict[str, Any]]]] = {
    "megatron": megatron,
    "torchtitan": torchtitan,
}


_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "vocab_size")  # fmt: skip
_WHOLE_NUMBERS = (*_NAMES, "n_embd", "n_layer", "n_head", "head_dim", "num_local_experts")
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
            f"checkpoint {printable(name)} is neither a folder, nor in Hugging Face's cache, nor among those "
            f"known here{f'; {near}' if near else ''}; "
            "download its config.json into a folder and name that instead"
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
        if key in _WHOLE_NUMBERS and (type(value) is not int or not 1 <= value <= most):
            raise UsageError(
                f"config.json of {printable(name)}: {key} must be a whole number from 1 to {most:,}, not "
                f"{shortened(repr(value))}"
            )
    return config.model_type, changed
