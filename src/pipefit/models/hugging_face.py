"""Any architecture of Hugging Face transformers by name, such as `hf:llama`, with random weights.

Nothing is downloaded: a name is a model type (`gpt2`, `bert`, `t5`, `vit`, `whisper`, ...), settings are
those of its configuration, and batches are generated. The model computes its own loss. For pretrained weights
pass the module itself to `pipefit.Task`. Needs the extra: `pip install pipefit[hf]`. (Wolf et al.,
"Transformers: State-of-the-Art Natural Language Processing", 2020.)
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.errors import UsageError, in_one_line
from pipefit.models.settings import OptimizerName, Rate, Setting, optimizer_of, rule_of
from pipefit.texts import meant

_MOST = 1 << 20  # tokens, for a model without limit
_LONGEST = 512  # tokens of a generated sample by default; fewer if the model has fewer positions
_EVERY = 7  # a masked language model predicts every seventh token
_OWN = ("sequence", "attention", "optimizer", "lr")
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
_SHAPE = {"hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"}
_POSITIONS = ("max_position_embeddings", "max_target_positions", "n_positions")
_IGNORED = -100  # transformers' label of an ignored token


def hf(
    name: str,
    *,
    sequence: int | None = None,
    attention: str | None = None,
    optimizer: Any = "adamw",
    lr: float | None = None,
    **settings: Any,
) -> Task:
    """Return the architecture `name` with these settings of its configuration.

    Args:
        name: the architecture, a model type of transformers.
        sequence: tokens in a sample; default: 512, or fewer if the model has fewer positions.
        attention: `sdpa` (the default, if the model has it) or `eager`.
        optimizer: `adamw`, `adam` or `sgd`.
        lr: its rate; None means its usual rate.
        settings: of the configuration.

    Raises:
        UsageError: transformers is not installed; no such architecture or setting; an invalid value.
    """
    transformers = transformers_offline()
    config = _config(transformers, name, settings)
    kind, architecture = _kind(name)
    for setting, value, hint in (("optimizer", optimizer, OptimizerName), ("lr", lr, Rate | None)):
        if not (rule := rule_of(hint)).accepts(value):
            raise UsageError(f"hf:{name}: {setting} must be {rule.words}, not {value!r}")
    batch = partial(_BATCHES[kind], config=config, length=_length(name, config, sequence))
    _check_batch(name, batch)
    return Task(
        partial(_build, getattr(transformers, architecture), config, attention),
        batch=batch,
        loss=None,
        optimizer=optimizer_of(optimizer, lr),
        name=f"hf:{name}",
    )


def transformers_offline() -> Any:
    """Import transformers, without a network.

    Raises:
        UsageError: it is not installed.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise UsageError("hf: needs Hugging Face transformers: pip install pipefit[hf]") from error
    transformers.logging.set_verbosity_error()
    return transformers


def _config(transformers: Any, name: str, settings: dict[str, Any]) -> Any:
    """Return the configuration, its settings checked by name and by transformers' own rules."""
    known = list(transformers.CONFIG_MAPPING.keys())
    if name not in known:
        raise UsageError(
            f"hf:{name} is unknown: transformers has no such architecture{_architecture(name, known)}"
        )
    plain = _configured(transformers, name)
    names = {*vars(plain), *plain.attribute_map, "num_labels"}
    for key in settings:
        if key.startswith("_") or key not in names:
            raise UsageError(f"hf:{name} does not have a setting {key!r}{_closest(key, [*names, *_OWN])}")
    config = _configured(transformers, name, **settings)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    words = getattr(config, "vocab_size", None)
    for key in _TOKENS:
        number = getattr(config, key, None)
        if isinstance(words, int) and isinstance(number, int) and number >= words and key not in settings:
            setattr(config, key, words - 1)
    return config


def _configured(transformers: Any, name: str, **settings: Any) -> Any:
    try:
        return transformers.AutoConfig.for_model(name, **settings)
    except Exception as error:
        raise UsageError(f"hf:{name}: {' '.join(str(error).split())[:300]}") from error


def architectures() -> dict[str, str]:
    """Return the architectures that `hf` knows, each with its training task.

    Training tasks are `causal`, `masked`, `seq2seq`, `speech` and `image`.

    Raises:
        UsageError: transformers is not installed.
    """
    known = transformers_offline().CONFIG_MAPPING.keys()
    return {
        name: kind
        for kind, classes in reversed(_classes().items())
        for name in sorted(classes)
        if name in known
    }


def settings_of_architecture(name: str) -> tuple[Setting, ...]:
    """Return the settings of an architecture: those of `hf`, then those of its configuration.

    Settings that are common to all configurations are left out.

    Raises:
        UsageError: transformers is not installed, or has no such architecture.
    """
    transformers = transformers_offline()
    plain = _config(transformers, name, {})
    common = vars(transformers.PreTrainedConfig()).keys() - _SHAPE
    own = (
        Setting("sequence", _length(name, plain, None), "a whole number"),
        Setting("attention", "sdpa", "'sdpa' or 'eager'"),
        Setting("optimizer", "adamw", rule_of(OptimizerName).words),
        Setting("lr", None, rule_of(Rate | None).words),
    )
    configured = {
        key: value for key, value in vars(plain).items() if key not in common and not key.startswith("_")
    }
    return (*own, *(Setting(key, value, "") for key, value in configured.items()))


def _classes() -> dict[str, Any]:
    """Return the classes of every architecture, by training task, the likeliest first."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    return {
        "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "speech": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "image": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    }


def _kind(name: str) -> tuple[str, str]:
    """Return the natural training task of an architecture, and its class.

    Raises:
        UsageError: it is neither a language model, nor speech to text, nor an image classifier.
    """
    for kind, classes in _classes().items():
        if name in classes:
            result = classes[name]
            return kind, result if isinstance(result, str) else result[0]
    raise UsageError(
        f"hf:{name} is not a language model, speech-to-text model or image classifier; build it in Python "
        "and pass the module to pipefit.Task"
    )


def _length(name: str, config: Any, sequence: int | None) -> int:
    """Return the tokens in a sample: `sequence`, or the model's number of positions limited to the
    default.
    """
    result = [getattr(config, key, None) for key in _POSITIONS]
    lengths = [
        length for length in result if isinstance(length, int) and length > 0
    ]  # XLNet's -1 means unlimited
    longest = min(lengths or [_MOST])
    length = min(longest, _LONGEST) if sequence is None else sequence
    if not isinstance(length, int) or not 1 <= length <= longest:
        raise UsageError(f"hf:{name}: sequence must be a whole number from 1 to {longest}, not {sequence!r}")
    return length


def _closest(name: str, known: Iterable[str]) -> str:
    guess = meant(name, known, 3)
    return f"; {guess}" if guess else ""


def _architecture(name: str, known: Sequence[str]) -> str:
    """Return the architectures nearest to a name, which may be a checkpoint's, such as
    `openai-community/gpt2-xl`.
    """
    last = name.rpartition("/")[2].lower()
    begun = max((one for one in known if last.startswith(one)), key=len, default="")
    guess = f"; did you mean {begun}?" if begun else _closest(last, known)
    of_checkpoint = (
        " Names of checkpoints are not supported: write the architecture, and its shape with --set, from "
        f"the settings that pipefit models hf:{begun or 'gpt2'} lists."
    )
    return guess + (of_checkpoint if begun or "/" in name else "")


def _build(architecture: Any, config: Any, attention: str | None) -> nn.Module:
    """Build the model with random weights."""
    try:
        model: nn.Module = architecture._from_config(config, attn_implementation=attention or "sdpa")
    except (ValueError, ImportError) as error:
        if attention is not None:
            raise UsageError(f"{architecture.__name__}: {' '.join(str(error).split())[:300]}") from error
        model = architecture._from_config(config, attn_implementation="eager")
    return model


def _check_batch(name: str, batch: Callable[[int], Any]) -> None:
    """Check that a sample can be generated from the configuration.

    Raises:
        UsageError: it cannot, because the configuration does not describe a sample.
    """
    with torch.random.fork_rng([]):
        try:
            batch(1)
        except (AttributeError, TypeError, RuntimeError) as error:
            raise UsageError(
                f"hf:{name}: its samples cannot be generated from its configuration ({in_one_line(error)}); "
                "set the missing values, or build it in Python and pass the module and your own batch "
                "function to pipefit.Task"
            ) from error


def _words(config: Any) -> int:
    """Return the size of the vocabulary, which a configuration of several models has for its text."""
    result: int = getattr(config, "vocab_size", None) or config.get_text_config(decoder=True).vocab_size
    return result


def _causal(size: int, *, config: Any, length: int) -> tuple[dict[str, Tensor], None]:
    tokens = torch.randint(_words(config), (size, length))
    return {"input_ids": tokens, "labels": tokens.clone()}, None


def _masked(size: int, *, config: Any, length: int) -> tuple[dict[str, Tensor], None]:
    tokens = torch.randint(_words(config), (size, length))
    labels = torch.full_like(tokens, _IGNORED)
    labels[:, ::_EVERY] = tokens[:, ::_EVERY]
    return {"input_ids": tokens, "labels": labels}, None


def _speech(size: int, *, config: Any, length: int) -> tuple[dict[str, Tensor], None]:
    frames = 2 * config.max_source_positions
    sound = torch.randn(size, config.num_mel_bins, frames)
    return {"input_features": sound, "labels": torch.randint(_words(config), (size, length))}, None


def _image(size: int, *, config: Any, length: int) -> tuple[dict[str, Tensor], None]:
    del length
    side = getattr(config, "image_size", 224)
    height, width = side if isinstance(side, tuple | list) else (side, side)
    images = torch.randn(size, getattr(config, "num_channels", 3), height, width)
    return {"pixel_values": images, "labels": torch.randint(config.num_labels, (size,))}, None


_BATCHES: dict[str, Callable[..., tuple[Any, Any]]] = {
    "causal": _causal,
    "masked": _masked,
    "seq2seq": _causal,
    "speech": _speech,
    "image": _image,
}
