"""Readers of other trainers' configuration files: `read` finds out whose file it is, and what it says.

| tool | file |
|---|---|
| axolotl, LLaMA-Factory, TRL | YAML |
| `transformers.TrainingArguments` | JSON or YAML; it does not name the model |
| NeMo Automodel | YAML |
| torchtitan | TOML |
| Megatron-LM | command-line arguments, in a file of any other name |

A `Recipe` is what a file asks for, in pipefit's terms, and how the file says it. Keys are those of the tools'
documentation in November 2026. A technique that pipefit does not model is refused by its
key. What makes a prediction approximate is a note of the recipe, and so are keys that are neither read nor
known to change neither memory nor time.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

from pipefit.errors import FileError, UsageError
from pipefit.recipes.shapes import arguments, megatron, shape_of
from pipefit.schema.file_access import content
from pipefit.schema.grids import Sharding
from pipefit.schema.training import Precision
from pipefit.texts import printable, shortened

Offload = Literal["none", "optimizer", "parameters"]  # parameters: these and the optimizer state
Change = Literal["samples", "accumulation", "global_batch", "recompute", "shard", "offload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Low-rank adapters (LoRA) of a rank on the linear layers of these names.

    `all-linear` is all but the head; without a name, `peft` chooses by the architecture.
    """

    rank: int
    targets: tuple[str, ...]
    dropout: float = 0.0


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of a file: a key, its new value (None for a number to choose), and the line that says so."""

    key: str
    value: Any
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A training as a configuration file describes it.

    `model` is a name as on the command line, such as `hf:llama`, and `settings` are its settings. A
    forward of a device has `samples` samples of `sequence` tokens. A step accumulates `accumulation` of
    them, or has `global_batch` samples on all devices. `replicas` is the number of data-parallel replicas,
    None for as many as the devices allow; they divide `shard`. `copies` is the number of such groups of
    replicas, None for one on every host. `edits` are the changes that the file can express, and `reread`
    returns the recipe of the file with other values of some keys. `notes` say how the file was read where
    it leaves something open.
    """

    tool: str
    model: str
    settings: Mapping[str, Any]
    sequence: int
    samples: int  # in a forward of a device
    accumulation: int | None = None
    global_batch: int | None = None
    precision: Precision
    unshared: Precision | None = None  # of a replica without others, if it differs
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    adapters: Adapters | None = None
    recompute: bool = False
    shard: Sharding = "none"
    sequences: bool = False  # whether tensor-parallel ranks divide positions too
    offload: Offload = "none"
    replicas: int | None = None
    copies: int | None = 1
    tensor: int = 1
    stages: int = 1
    schedule: str = "1f1b"
    edits: Mapping[Change, Edit] = field(default_factory=dict)
    reread: Callable[[Mapping[str, Any]], Recipe] = field(compare=False, repr=False)
    notes: tuple[str, ...] = ()


_SUFFIXES = (".yaml", ".yml", ".json", ".toml")
_MOST = 1 << 24  # samples, tokens, ranks
_NAMED = 8  # keys that are not read
_MOST_BYTES, _MOST_KEYS, _MOST_VALUES, _DEEPEST = 1 << 20, 10_000, 100_000, 6
_ZERO: tuple[Sharding, ...] = ("none", "optimizer", "gradients", "parameters")  # by DeepSpeed's stage
_OPTIMIZERS: dict[str, Literal["adamw", "adam", "sgd"]] = {
    **dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "torch.optim.adamw"), "adamw"),
    **dict.fromkeys(("adam", "torch.optim.adam"), "adam"),
    **dict.fromkeys(("sgd", "torch.optim.sgd"), "sgd"),
}
_REFUSED = {
    "load_in_4bit": "4-bit weights",
    "load_in_8bit": "8-bit weights",
    "quantization_bit": "quantised weights",
    "use_galore": "GaLore",
    "use_badam": "BAdam",
    "parallelism.context_parallel_degree": "context parallelism",
    "context_parallel_size": "context parallelism",
    "distributed.cp_size": "context parallelism",
    "distributed.ep_size": "expert parallelism",
    "distributed.pp_size": "Automodel's pipelines",
    "tensor_parallel_size": "axolotl's tensor parallelism",
    "quantization.load_in_4bit": "4-bit weights",
    "quantization.load_in_8bit": "8-bit weights",
    "use_apollo": "APOLLO",
    "use_adam_mini": "Adam-mini",
    "use_muon": "Muon",
    "rl": "preference training",
    "unfrozen_parameters": "training of single parameters",
    **dict.fromkeys(
        (
            "num_generations",
            "max_completion_length",
            "reward_model_path",
            "reward_funcs",
            "use_vllm",
            "response_length",
        ),
        "reinforcement learning",
    ),
    **dict.fromkeys(
        (
            "beta",
            "max_prompt_length",
            "precompute_ref_log_probs",
            "ref_model",
            "sync_ref_model",
            "desirable_weight",
        ),
        "preference training (a reference model and pairs of answers)",
    ),
    "teacher_model_name_or_path": "distillation",
    "parallelism.expert_parallel_degree": "expert parallelism",
}
_REFUSED_WITH_ADAPTERS = {
    "lora_modules_to_save": "whole modules trained with adapters",
    "additional_target": "whole modules trained with adapters",
    "use_dora": "DoRA",
    "peft_use_dora": "DoRA",
    "peft.use_dora": "DoRA",
}
_APPROXIMATE = {
    **dict.fromkeys(
        ("use_liger_kernel", "enable_liger_kernel", "use_unsloth", "liger_rope", "liger_rms_norm",
         "liger_layer_norm", "liger_glu_activation", "liger_swiglu"),
        "its fused kernels need less memory than predicted here",
    ),
    **dict.fromkeys(
        ("liger_fused_linear_cross_entropy", "liger_cross_entropy", "cut_cross_entropy"),
        "its fused loss needs less memory than predicted here",
    ),
    **dict.fromkeys(
        ("torch_compile", "compile.enable", "training.compile"),
        "compiled code saves other tensors than predicted here",
    ),
    "model.converters": "converted layers save other tensors than predicted here",
    "activation_offloading": "offloaded tensors are read as kept, so the peak is an upper bound",
}  # fmt: skip
# Keys that change neither memory nor time: with a word for rates, durations, data, files or logs; others by
# name; and what most FSDP and DeepSpeed files have
_SILENT = re.compile(
    r"(.*[._])?(alpha|assets|attention|attn|betas|chat|checkpoint|ckpt|clipping|comet|dataloader|datasets?|"
    r"decay|dir|do|dump|epochs?|eps|epsilon|evals?|folder|freq|hub|interval|job|label|learning|log|logger|"
    r"logging|loss|lr|metrics?|mlflow|momentum|norm|outputs?|overwrite|pad|padding|plot|preprocessing|"
    r"profiling|push|report|resume|rng|run|samples|saves?|scheduler|seed|shuffle|special|steps|streaming|"
    r"swanlab|template|tensorboard|tf32|timeout|tokenizer|trust|val|validation|wandb|warmup|workers|"
    r"xla)([._].*)?|"
    r"model_type|model_revision|type_of_model|is_\w+_derived_model|strict|(sample_|neat_)?packing|bf16|fp16|"
    r"ddp_\w+|plugins|group_by_length|use_cache|local_rank|remove_unused_columns|train_on_\w+|roles\w*|"
    r"mask_\w+|lora_target_linear|(gradient|activation)_checkpointing_kwargs.*|"
    r"activation_checkpoint.selective_ac_option|dist_env.*|(completion|assistant)_only_loss|(.*\.)?_target_|"
    r"double_quantization|quantiz.*|compile\..*|training.gc_freq|training.mixed_precision_reduce|"
    r"parallelism.enable_async_tensor_parallel|auto_wrap_policy|transformer_layer_cls_to_wrap|"
    r"(final_)?state_dict_type|cpu_ram_efficient_loading|use_orig_params|sync_module_states|"
    r"(backward|forward)_prefetch|limit_all_gathers|min_num_params|(fsdp_)?version|(fp16|bf16|optimizer)\..*|"
    r"zero_force_ds_cpu_optimizer|zero_allow_untested_optimizer|wall_clock_breakdown|"
    r"zero_optimization\.(overlap_comm|contiguous_gradients|sub_group_size|\w*bucket_size|\w*prefetch\w*|"
    r"stage3_\w+|round_robin_gradients|\w+partitions|reduce_scatter|offload_\w+\..+)"
)
_LAUNCHERS = {
    "compute_environment": "accelerate's launcher",
    "distributed_type": "accelerate's launcher",
    "zero_optimization": "DeepSpeed",
    "train_micro_batch_size_per_gpu": "DeepSpeed",
}


class Keys:
    """The keys of a file, nested ones joined by dots, and how the file's syntax writes one."""

    def __init__(self, file: str, values: Mapping[str, Any]) -> None:
        self.file, self.values = file, dict(values)
        self.asked = set[str]()  # keys that somebody has read

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key; the default if it is missing or null."""
        self.asked.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def under(self, key: str) -> dict[str, Any]:
        """Return the values of a nested key, all of which are then read."""
        self.asked |= {name for name in self.values if name.startswith(key + ".")}
        return {name[len(key) + 1 :]: one for name, one in self.values.items() if name.startswith(key + ".")}

    def unread(self) -> list[str]:
        """Return keys that are on, that nobody has read, and that may change memory or time."""
        return [
            key
            for key, value in self.values.items()
            if _is_on(value)
            and not isinstance(value, dict)
            and not (key in self.asked or _SILENT.fullmatch(key))
        ]

    def count(self, key: str, default: int) -> int:
        """Return a whole number from 1 to 16,777,216.

        Raises:
            UsageError: it is none.
        """
        value = self.get(key, default)
        if type(value) is not int or not 1 <= value <= _MOST:
            raise UsageError(
                f"{self.file}: {key} must be a whole number from 1 to {_MOST:,}, not {shortened(repr(value))}"
            )
        return value

    def edit(self, key: str, value: Any = None) -> Edit:
        """Return the change of a key to a value, or to a number that is chosen later."""
        text = "{}" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        quoted = f'"{text}"' if isinstance(value, str) else text
        if self.file.endswith(".json"):
            return Edit(key, value, f'"{key}": {quoted}')
        if self.file.endswith(".toml"):
            section, _, name = key.rpartition(".")
            return Edit(key, value, f"[{section}] {name} = {quoted}")
        return Edit(key, value, f"{key}: {text}")


Reread = Callable[[Mapping[str, Any]], Recipe]


@dataclass(frozen=True, slots=True)
class Tool:
    """A trainer: its name, keys of which each of its files has one, and its reader."""

    name: str
    marks: tuple[str, ...]
    reader: Callable[[Keys, str | None, Reread], Recipe]


def read(file: str, model: str | None = None) -> Recipe:
    """Return what a configuration file asks for.

    `model` replaces the checkpoint that the file names: another checkpoint, or a folder with a `config.json`.

    Raises:
        FileError: the file cannot be read.
        UsageError: no known tool's, or a technique, value or checkpoint that is not known here.
    """
    if Path(file).suffix.lower() not in _SUFFIXES:
        return _megatron(file, {})
    keys = Keys(printable(file), dict(_flat(_parsed(file))))
    tool = next((one for one in TOOLS if any(mark in keys for mark in one.marks)), None)
    if tool is None:
        for mark, what in _LAUNCHERS.items():
            if mark in keys:
                raise UsageError(
                    f"{keys.file} is a configuration of {what}, which names no model: "
                    "give the file of the training"
                )
        names = ", ".join(one.name for one in TOOLS)
        raise UsageError(f"{keys.file} is not a configuration of a known trainer: those of {names} are read")
    _refuse(keys, _REFUSED)

    def reread(values: Mapping[str, Any]) -> Recipe:
        changed = Keys(keys.file, {**keys.values, **values})
        changed.asked |= {*_REFUSED, *_REFUSED_WITH_ADAPTERS}
        result = tool.reader(changed, model, reread)
        return replace(result, notes=result.notes + _not_read(changed))

    recipe = reread({})
    if recipe.adapters is not None:
        _refuse(keys, _REFUSED_WITH_ADAPTERS)
    return recipe


def _refuse(keys: Keys, techniques: Mapping[str, str]) -> None:
    """Raise an error if a key turns on one of these techniques."""
    for key, technique in techniques.items():
        value = keys.get(key, False)
        if value is True or (value and value not in (1, "none", "None")):  # a degree of 1 changes nothing
            raise UsageError(
                f"{keys.file}: {key} needs {technique}, which pipefit does not plan: remove it to see what "
                "the training needs without"
            )


def _parsed(file: str) -> object:
    """Parse a file by the end of its name."""
    text = content(file, printable(file), _MOST_BYTES, "configurations have")
    kind = Path(file).suffix.lower()
    try:
        if kind == ".json":
            return json.loads(text)
        if kind == ".toml":
            return tomllib.loads(text.decode())
        yaml = _yaml()
        try:
            return _bounded(yaml.safe_load(text))
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{printable(file)} is not valid {kind[1:]}: {shortened(str(error))}") from None


def _bounded(found: object) -> object:
    """Return values of YAML, whose aliases may repeat them without bound.

    Raises:
        ValueError: they are more than 100,000.
    """
    pending, count = [found], 0
    while pending:
        one = pending.pop()
        count += 1
        if count > _MOST_VALUES:
            raise ValueError(f"it has more than {_MOST_VALUES:,} values")
        if isinstance(one, dict | list):
            pending.extend(one.values() if isinstance(one, dict) else one)
    return found


def _yaml() -> Any:
    """Import PyYAML, which transformers brings.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module("yaml")
    except ModuleNotFoundError:
        raise UsageError("YAML files need PyYAML: pip install pipefit[hf]") from None


def _flat(found: object, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield keys and values; nested keys are joined by dots."""
    if not isinstance(found, dict) or depth > _DEEPEST:
        return
    for key, value in list(found.items())[:_MOST_KEYS]:
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.", depth + 1)
        yield f"{prefix}{key}", value


# ---- Parts that tools share


def _model(keys: Keys, key: str, model: str | None, tokens: int) -> tuple[str, dict[str, Any]]:
    """Return the architecture and settings of the checkpoint that a file, or `model`, names."""
    name = model or keys.get(key)
    if not isinstance(name, str):
        raise UsageError(
            f"{keys.file} does not name a model: add --base NAME, such as --base Qwen/Qwen2.5-7B"
        )
    architecture, settings = shape_of(name, tokens)
    return f"hf:{architecture}", settings


def _optimizer(keys: Keys, key: str, default: str = "adamw_torch") -> Literal["adamw", "adam", "sgd"]:
    name = str(keys.get(key, default)).lower()
    if name not in _OPTIMIZERS:
        raise UsageError(
            f"{keys.file}: {key} {shortened(name)} has state of another size than AdamW's, which pipefit "
            f"does not plan: write {keys.edit(key, default).line} to see what that needs"
        )
    return _OPTIMIZERS[name]


def _notes(keys: Keys) -> tuple[str, ...]:
    notes = tuple(f"{key}: {why}" for key, why in _APPROXIMATE.items() if keys.get(key) not in (None, False))
    if keys.get("attn_implementation") == "eager":
        notes += ("attn_implementation: eager attention needs more memory than predicted here",)
    return notes


def _offloads(recomputation: object) -> bool:
    """Return whether a file's recomputation has a word such as `offload` or `offload_disk`."""
    return isinstance(recomputation, str) and "offload" in recomputation


def _not_read(keys: Keys, named: str = "") -> tuple[str, ...]:
    """Return a note of the keys that are not read, of this file or of one that it names."""
    unread = [printable(key) for key in keys.unread()]
    if not unread:
        return ()
    more = f" and {len(unread) - _NAMED} more" if len(unread) > _NAMED else ""
    return (f"not read{f' in {printable(named)}' if named else ''}: {', '.join(unread[:_NAMED])}{more}",)


def _is_on(value: object) -> bool:
    """Return whether a value of YAML turns something on; `auto` does."""
    return value not in (None, False, "false", "no", "none", "")


@dataclass(frozen=True, slots=True)
class _Division:
    """What replicas divide and hosts hold, and the changes of that."""

    shard: Sharding
    offload: Offload
    edits: dict[Change, Edit]
    recompute: bool = False
    copies: int | None = 1  # groups that divide state each; None for one on every host
    notes: tuple[str, ...] = ()


def _division(keys: Keys) -> _Division:
    """Return how the files of transformers' Trainer divide state: `deepspeed` or `fsdp`."""
    named = keys.get("deepspeed")
    if _is_on(named):
        return _zero(keys, named)
    asked = keys.get("fsdp", "")
    words = (" ".join(map(str, asked)) if isinstance(asked, list) else str(asked)).split()
    full: dict[Change, Edit] = {"shard": keys.edit("fsdp", "full_shard auto_wrap")}
    section = keys.under("fsdp_config")
    if not _is_on(asked) or words in (["False"], []):
        return _Division("none", "none", full)
    named = keys.get("fsdp_config")
    if named is not None and not isinstance(named, dict):
        section = dict(_flat(_named(keys, "fsdp_config", named)))
    config = Keys(keys.file, {key.removeprefix("fsdp_"): value for key, value in section.items()})
    words += str(config.get("sharding_strategy", "")).split()
    words += str(config.get("reshard_after_forward", "")).split()  # a strategy or a truth value
    kinds = {word.lower() for word in words}
    moves = "offload" in kinds or any(_is_on(config.get(key)) for key in ("offload_params", "cpu_offload"))
    shards: Sharding = "parameters"
    if "no_shard" in kinds:
        shards = "none"
    elif kinds & {"shard_grad_op", "hybrid_shard_zero2"} or config.get("reshard_after_forward") is False:
        shards = "gradients"
    return _Division(
        shards,
        "parameters" if moves else "none",
        full,
        recompute=_is_on(config.get("activation_checkpointing")),
        copies=None if kinds & {"hybrid_shard", "hybrid_shard_zero2"} else 1,
        notes=_not_read(config, "fsdp_config"),
    )


def _zero(keys: Keys, named: object) -> _Division:
    """Return how a DeepSpeed configuration, by its name or as a section, divides state.

    Raises:
        UsageError: it offloads to a disk, or differs from the file that names it.
    """
    section = {} if isinstance(named, dict) else dict(_flat(_named(keys, "deepspeed", named)))
    inside = Keys(named if isinstance(named, str) else keys.file, section | keys.under("deepspeed"))
    where = f"in {named}" if isinstance(named, str) else "under deepspeed"
    stage = inside.get("zero_optimization.stage", 0)
    if type(stage) is not int or stage not in range(4):
        raise UsageError(f"{keys.file}: stage {shortened(repr(stage))} of ZeRO does not exist")
    places = [inside.get(f"zero_optimization.offload_{part}.device") for part in ("optimizer", "param")]
    if "nvme" in places:
        raise UsageError(
            f'{keys.file}: offloading to NVMe is not planned here: write "device": "cpu" {where}'
        )
    for key, ours in (
        ("train_micro_batch_size_per_gpu", ("per_device_train_batch_size", "micro_batch_size")),
        ("gradient_accumulation_steps", ("gradient_accumulation_steps",)),
    ):
        given = {keys.get(name) for name in ours} - {None}
        if inside.get(key, "auto") != "auto" and given and inside.get(key) not in given:
            raise UsageError(f'{keys.file}: {key} {where} is another number than its own: write "auto" there')
    kind = str(inside.get("optimizer.type", "auto")).lower()
    if kind != "auto" and kind not in _OPTIMIZERS:
        raise UsageError(
            f'{keys.file}: optimizer {shortened(kind)} {where} is not planned here: write "AdamW"'
        )
    inside.asked |= {"train_batch_size"}
    prefix, stages = "deepspeed.zero_optimization", '"zero_optimization": {{"stage": 3}}'
    offloads = '"zero_optimization": {{"offload_optimizer": {{"device": "cpu"}}}}'
    edits: dict[Change, Edit] = {
        "shard": Edit(f"{prefix}.stage", 3, f"{stages} {where}"),
        "offload": Edit(f"{prefix}.offload_optimizer.device", "cpu", f"{offloads} {where}"),
    }
    held: Offload = "parameters" if _is_on(places[1]) else "optimizer" if _is_on(places[0]) else "none"
    return _Division(
        _ZERO[stage], held, edits, notes=_not_read(inside, named if isinstance(named, str) else "deepspeed")
    )


def _named(keys: Keys, key: str, named: object) -> object:
    """Return the content of a DeepSpeed or FSDP configuration that a file names."""
    if not isinstance(named, str):
        raise UsageError(f"{keys.file}: {key} must name a file, not {shortened(repr(named))}")
    beside = Path(os.path.dirname(keys.file), named)
    path = beside if os.path.exists(beside) else Path(named)
    if not os.path.exists(path):
        raise UsageError(
            f"{keys.file} names the {key} file {printable(named)}, which is neither in its folder nor in the "
            "current one: run from the folder of the training"
        )
    return _parsed(str(path))


def _trainer(
    keys: Keys, base: str | None, reread: Reread, *, tool: str, model: str, tokens: int,
    samples: tuple[str, int], recompute: bool, weights: Precision | None, adapters: Adapters | None,
    optimizer: str = "optim", replicas: int | None = None, copies: int = 1,
    edits: Mapping[Change, Edit] = MappingProxyType({}), notes: tuple[str, ...] = (),
) -> Recipe:  # fmt: skip
    """Return the recipe of a file that becomes `transformers.TrainingArguments`.

    `weights` is the precision of all weights if the tool casts them; None for float32 ones.
    `recompute` is the tool's default.
    """
    division = _division(keys)
    half = "float16" if _is_on(keys.get("fp16")) else "bfloat16" if _is_on(keys.get("bf16")) else None
    if half is None or weights == half:
        precision: Precision = weights or "float32"
    else:
        precision = cast("Precision", f"mixed-{half}")
    if half and adapters is None and (division.shard != "none" or "deepspeed" in keys):
        precision = cast("Precision", f"master-{half}")  # sharded float32 state, gathered in half precision
    renamed = "activation_checkpointing"  # in transformers 5.23
    recompute_key = renamed if renamed in keys else "gradient_checkpointing"
    if _offloads(keys.get(recompute_key)):
        notes += (f"{recompute_key}: inputs of blocks are read as kept, so the peak is an upper bound",)
    every: dict[Change, Edit] = {
        "samples": keys.edit(samples[0]),
        "accumulation": keys.edit("gradient_accumulation_steps"),
        "recompute": keys.edit(recompute_key, value=True),
        **division.edits,
        **edits,
    }
    architecture, settings = _model(keys, model, base, tokens)
    return Recipe(
        tool=tool,
        model=architecture,
        settings=settings,
        sequence=tokens,
        samples=keys.count(*samples),
        accumulation=keys.count("gradient_accumulation_steps", 1),
        precision=precision,
        optimizer=_optimizer(keys, optimizer),
        adapters=adapters,
        recompute=_is_on(keys.get(recompute_key, recompute)) or division.recompute,
        shard=division.shard,
        offload=division.offload,
        copies=division.copies if copies == 1 else copies,
        replicas=replicas,
        edits=every,
        reread=reread,
        notes=_notes(keys) + notes + division.notes,
    )


def _adapters(keys: Keys, rank: str, default: int, targets: object, dropout: float = 0.0) -> Adapters:
    """Return adapters on layers by name: a list, names separated by commas, or all linear layers.

    Without a name, they are on the layers that `peft` chooses for the architecture.
    """
    names = targets.split(",") if isinstance(targets, str) else [] if targets is None else targets
    if names in (["all"], ["all-linear"], True):
        names = ["all-linear"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{keys.file}: adapters are on layers by name, not on {shortened(repr(targets))}")
    if any("*" in name for name in names):
        raise UsageError(f"{keys.file}: list the layers of adapters by name, without *")
    drops = "peft.dropout" if rank.startswith("peft.") else "lora_dropout"
    share = keys.get(drops, dropout)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise UsageError(f"{keys.file}: {drops} must be a number from 0 to 1, not {shortened(repr(share))}")
    return Adapters(
        rank=keys.count(rank, default), targets=tuple(name.strip() for name in names), dropout=float(share)
    )


# ---- Tools


def _axolotl(keys: Keys, base: str | None, reread: Reread) -> Recipe:
    kind = keys.get("adapter")
    if kind == "qlora":
        raise UsageError(
            f"{keys.file}: adapter qlora has 4-bit weights, which pipefit does not plan: write adapter: lora"
        )
    targets = "all" if keys.get("lora_target_linear") else keys.get("lora_target_modules")
    if "fsdp" not in keys and keys.under("fsdp_config"):  # FSDP 2 has no list of words
        keys.values["fsdp"] = "full_shard"
    return _trainer(
        keys, base, reread, tool="axolotl", model="base_model", tokens=keys.count("sequence_len", 2048),
        samples=("micro_batch_size", 1), recompute=False, weights=_half(keys), optimizer="optimizer",
        replicas=keys.count("dp_shard_size", 1) if "dp_shard_size" in keys else None,
        copies=keys.count("dp_replicate_size", 1),
        adapters=_adapters(keys, "lora_r", 8, targets) if kind == "lora" else None,
    )  # fmt: skip


def _half(keys: Keys) -> Precision | None:
    """Return the half precision to which a tool casts the weights it loads."""
    return "float16" if _is_on(keys.get("fp16")) else "bfloat16" if _is_on(keys.get("bf16")) else None


def _llama_factory(keys: Keys, base: str | None, reread: Reread) -> Recipe:
    kind = keys.get("finetuning_type", "lora")
    if kind not in ("lora", "full"):
        raise UsageError(
            f"{keys.file}: finetuning_type {shortened(str(kind))} is not planned here: use lora or full"
        )
    if keys.get("stage", "sft") not in ("sft", "pt"):
        raise UsageError(
            f"{keys.file}: stage {shortened(str(keys.get('stage')))} is not planned here: use sft or pt"
        )
    if _is_on(keys.get("pure_bf16")):
        keys.values["bf16"] = True
    lora = _adapters(keys, "lora_rank", 8, keys.get("lora_target", "all"))
    return _trainer(
        keys, base, reread, tool="LLaMA-Factory", model="model_name_or_path",
        tokens=keys.count("cutoff_len", 2048), samples=("per_device_train_batch_size", 8),
        recompute=not keys.get("disable_gradient_checkpointing", False),
        weights=_half(keys) if kind == "lora" or keys.get("pure_bf16") else None,
        adapters=lora if kind == "lora" else None,
        edits={"recompute": keys.edit("disable_gradient_checkpointing", value=False)},
    )  # fmt: skip


def _trl(keys: Keys, base: str | None, reread: Reread) -> Recipe:
    lora = _adapters(keys, "lora_r", 16, keys.get("lora_target_modules"), 0.05)
    dtype = str(keys.get("dtype", keys.get("torch_dtype", "float32"))).removeprefix("torch.")
    notes = tuple[str, ...]()
    if dtype == "auto":
        dtype, notes = "bfloat16", ("dtype: auto is read as bfloat16, as most checkpoints are saved",)
    tokens = keys.count("max_length" if "max_length" in keys else "max_seq_length", 1024)
    keys.values.setdefault("bf16", not _is_on(keys.get("fp16")))  # its default
    return _trainer(
        keys, base, reread, tool="TRL", model="model_name_or_path", tokens=tokens,
        samples=("per_device_train_batch_size", 8), recompute=True,
        weights=cast("Precision", dtype) if dtype in ("float16", "bfloat16") else None,
        adapters=lora if keys.get("use_peft") else None, notes=notes,
    )  # fmt: skip


def _arguments(keys: Keys, base: str | None, reread: Reread) -> Recipe:
    return _trainer(
        keys, base, reread, tool="TrainingArguments", model="model_name_or_path",
        tokens=keys.count("max_length", 512), samples=("per_device_train_batch_size", 8), recompute=False,
        weights=None, adapters=None,
    )  # fmt: skip


def _automodel_precision(keys: Keys, dtype: str, *, divides: bool) -> Precision:
    """Return the precision of a model loaded in a dtype; FSDP2 gathers in half precision by default."""
    half: Precision = "float16" if dtype in ("fp16", "float16", "half") else "bfloat16"
    if dtype not in ("fp32", "float32", "float"):
        return half
    gathered = str(keys.get("distributed.mp_policy.param_dtype", "bfloat16")).removeprefix("torch.")
    return "master-bfloat16" if divides and gathered in ("bf16", "bfloat16") else "float32"


def _automodel(keys: Keys, base: str | None, reread: Reread) -> Recipe:
    keys.values = {key: None if value in ("none", "None") else value for key, value in keys.values.items()}
    packed = keys.get("packed_sequence.packed_sequence_size") not in (None, 0)  # 0 packs nothing
    tokens = keys.count("packed_sequence.packed_sequence_size" if packed else "dataset.seq_length", 2048)
    architecture, settings = _model(keys, "model.pretrained_model_name_or_path", base, tokens)
    dtype = str(keys.get("model.torch_dtype", "bfloat16")).removeprefix("torch.")
    targets = "all" if keys.get("peft.match_all_linear") else keys.get("peft.target_modules")
    manager = str(keys.get("distributed.strategy", keys.get("distributed._target_", "fsdp2"))).lower()
    divides = not manager.rpartition(".")[2].startswith("ddp")
    return Recipe(
        tool="NeMo Automodel",
        model=architecture,
        settings=settings,
        sequence=tokens,
        samples=keys.count("step_scheduler.local_batch_size", 1),
        global_batch=keys.count("step_scheduler.global_batch_size", 8),
        precision=_automodel_precision(keys, dtype, divides=divides),
        optimizer=_optimizer(keys, "optimizer._target_", "torch.optim.AdamW"),
        adapters=_adapters(keys, "peft.dim", 8, targets) if keys.get("peft") else None,
        recompute=_is_on(keys.get("distributed.activation_checkpointing")),
        shard="parameters" if divides else "none",
        copies=keys.count("distributed.dp_replicate_size", 1),
        tensor=keys.count("distributed.tp_size", 1),
        edits={
            "samples": keys.edit("step_scheduler.local_batch_size"),
            "recompute": keys.edit("distributed.activation_checkpointing", value=True),
            "shard": keys.edit("distributed.strategy", "fsdp2"),
        },
        reread=reread,
        notes=_notes(keys),
    )


# Shapes of torchtitan's names of Llama 3
_TITAN = {"8b": "llama-3-8b", "70b": "llama-3-70b", "405b": "llama-3-405b"}


def _torchtitan(keys: Keys, base: str | None, reread: Reread) -> Recipe:
    tokens = keys.count("training.seq_len", 2048)
    flavor = str(keys.get("model.flavor", "")).lower()
    if base is None and (keys.get("model.name") != "llama3" or flavor not in _TITAN):
        raise UsageError(
            f"{keys.file}: {keys.get('model.name')} {flavor} has no known shape here: add --base with a "
            "checkpoint of this shape"
        )
    architecture, settings = _model(keys, "", base or _TITAN[flavor], tokens)
    copies = keys.count("parallelism.data_parallel_replicate_degree", 1)
    degree = "parallelism.data_parallel_shard_degree"
    shards = -1 if keys.get(degree, -1) == -1 else keys.count(degree, 1)
    mode = str(keys.get("activation_checkpoint.mode", "selective")).lower()
    notes = _notes(keys)
    if mode == "selective":
        notes += (
            (
                "activation_checkpoint.mode: selective recomputation is read as none, "
                "so the peak is an upper bound"
            ),
        )
    schedule = str(keys.get("parallelism.pipeline_parallel_schedule", "1F1B")).lower()
    if schedule not in ("1f1b", "gpipe"):
        raise UsageError(f"{keys.file}: schedule {shortened(schedule)} is not read here: use 1F1B or GPipe")
    batch = keys.get("training.global_batch_size", -1)
    half = keys.get("training.mixed_precision_param", "bfloat16")
    precision: Precision = "float32"
    if keys.get("training.dtype") == "bfloat16":
        precision = "bfloat16"
    elif half == "bfloat16" and shards != 1:
        precision = "master-bfloat16"
    stages = keys.count("parallelism.pipeline_parallel_degree", 1)
    tensor = keys.count("parallelism.tensor_parallel_degree", 1)
    unshared = precision  # without shards: autocast, but in single precision if a replica has several devices
    if precision != "bfloat16":
        unshared = "mixed-bfloat16" if half == "bfloat16" and stages == tensor == 1 else "float32"
    older = "training.batch_size"
    size = older if older in keys else "training.local_batch_size"
    local = keys.count(size, 8)
    samples, count = local, None
    if stages > 1:  # a pipeline cuts the local batch
        size = "parallelism.pipeline_parallel_microbatch_size"
        samples = min(local, keys.count(size, 1))
        count = local // samples
    held = str(keys.get("parallelism.fsdp_reshard_after_forward", "default")).lower()
    keeps = held == "never" or (held == "default" and stages > 1)  # gathered parameters until the backward
    if mode == "memory_budget":
        notes += ("activation_checkpoint.mode: memory_budget is read as none, so the peak is an upper bound",)
    return Recipe(
        tool="torchtitan",
        model=architecture,
        settings=settings,
        sequence=tokens,
        samples=samples,
        accumulation=count if batch == -1 else None,
        global_batch=None if batch == -1 else keys.count("training.global_batch_size", 1),
        precision=unshared if shards == 1 else precision,
        unshared=unshared,
        optimizer=_optimizer(keys, "optimizer.name", "AdamW"),
        recompute=mode == "full",
        shard="none" if shards == 1 else "gradients" if keeps else "parameters",
        offload="parameters" if keys.get("training.enable_cpu_offload") else "none",
        replicas=copies if shards == 1 else None if shards == -1 else shards,
        copies=1 if shards == 1 else copies,
        tensor=tensor,
        stages=stages,
        schedule="torchgpipe" if schedule == "gpipe" else "1f1b",
        edits={
            "samples": keys.edit(size),
            "global_batch": keys.edit("training.global_batch_size"),
            "recompute": keys.edit("activation_checkpoint.mode", "full"),
            "offload": keys.edit("training.enable_cpu_offload", value=True),
        },
        reread=reread,
        notes=notes,
    )


def _megatron(file: str, values: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a file of Megatron's arguments, some with other values."""
    model, settings = megatron(file)
    shown = printable(file)
    given = Keys(shown, {**arguments(file), **values})
    for key, technique in {"context-parallel-size": "context parallelism", "num-experts": "experts"}.items():
        if given.get(key, 1) not in (0, 1):
            raise UsageError(f"{shown}: --{key} needs {technique}, which pipefit does not plan: remove it")
    if given.get("num-layers-per-virtual-pipeline-stage") or given.get(
        "virtual-pipeline-model-parallel-size"
    ):
        raise UsageError(f"{shown}: interleaved stages are not planned here: remove the --virtual arguments")
    half = "bfloat16" if "bf16" in given else "float16" if "fp16" in given else None
    granularity, notes = given.get("recompute-granularity"), tuple[str, ...]()
    if granularity == "selective":
        notes += (
            "--recompute-granularity selective is read as no recomputation, so the peak is an upper bound",
        )
    partly = granularity == "full" and given.get("recompute-method") == "block"
    if "pipeline-model-parallel-layout" in given:
        notes += ("--pipeline-model-parallel-layout is read as stages of equal numbers of blocks",)
    if partly:
        notes += ("--recompute-method block is read as no recomputation, so the peak is an upper bound",)
    if half:
        notes += (
            (
                "gradients are counted in half precision; Megatron keeps them in float32, "
                "2 bytes a parameter more"
            ),
        )
    optimizer = settings.pop("optimizer")
    whole = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    edits: dict[Change, Edit] = {
        "samples": Edit("micro-batch-size", None, "--micro-batch-size {}"),
        "global_batch": Edit("global-batch-size", None, "--global-batch-size {}"),
        "recompute": Edit("recompute-granularity", "full", whole),
        "offload": Edit("optimizer-cpu-offload", True, "--optimizer-cpu-offload"),
    }
    if "use-distributed-optimizer" not in given:
        edits["shard"] = Edit("use-distributed-optimizer", True, "--use-distributed-optimizer")
    return Recipe(
        tool="Megatron-LM",
        model=model,
        settings=settings,
        sequence=settings.pop("sequence"),
        samples=given.count("micro-batch-size", 1),
        global_batch=given.count("global-batch-size", 1) if "global-batch-size" in given else None,
        precision=cast("Precision", f"master-{half}" if half else "float32"),
        optimizer=optimizer,
        recompute=granularity == "full" and not partly,
        shard="optimizer" if "use-distributed-optimizer" in given else "none",
        offload="optimizer" if "optimizer-cpu-offload" in given else "none",
        tensor=given.count("tensor-model-parallel-size", 1),
        stages=given.count("pipeline-model-parallel-size", 1),
        sequences="sequence-parallel" in given,
        edits=edits,
        reread=lambda values: _megatron(file, values),
        notes=notes,
    )


TOOLS = (
    Tool("axolotl", ("base_model",), _axolotl),
    Tool("LLaMA-Factory", ("finetuning_type", "cutoff_len", "lora_rank"), _llama_factory),
    Tool("NeMo Automodel", ("step_scheduler",), _automodel),
    Tool("torchtitan", ("training.local_batch_size", "training.seq_len", "model.flavor"), _torchtitan),
    Tool("TRL", ("model_name_or_path",), _trl),
    Tool("TrainingArguments", ("per_device_train_batch_size", "output_dir", "num_train_epochs"), _arguments),
)
