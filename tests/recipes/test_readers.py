"""Configuration files of other trainers: what is read from each, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipefit.errors import FileError, UsageError
from pipefit.recipes import Recipe, read
from pipefit.recipes.answers import _changes
from pipefit.recipes.readers import Adapters
from pipefit.recipes.shapes import _SHAPES, shape_of

AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 4
gradient_checkpointing: true
bf16: auto
optimizer: adamw_torch
adapter: lora
lora_r: 32
lora_target_modules: [q_proj, v_proj]
"""
FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
finetuning_type: full
deepspeed: ds_z3.json
cutoff_len: 1024
per_device_train_batch_size: 1
bf16: true
"""
TRL = """
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dtype: bfloat16
max_length: 512
per_device_train_batch_size: 4
"""
TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
"""
AUTOMODEL = """
model:
  pretrained_model_name_or_path: meta-llama/Llama-3.2-1B
step_scheduler: {global_batch_size: 64, local_batch_size: 8}
distributed: {strategy: fsdp2, tp_size: 2}
packed_sequence: {packed_sequence_size: 4096}
optimizer: {_target_: torch.optim.Adam}
"""
TRAINER = {
    "model_name_or_path": "gemma-2b",
    "per_device_train_batch_size": 2,
    "fp16": True,
    "fsdp": "shard_grad_op",
}
MEGATRON = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--vocab-size 500 --micro-batch-size 4 --global-batch-size 32 --bf16 --tensor-model-parallel-size 2 "
    "--sequence-parallel --use-distributed-optimizer --recompute-granularity full"
)


def written(folder: Path, text: str, name: str) -> Recipe:
    """Write a file and read it."""
    (folder / name).write_text(text)
    return read(str(folder / name))


def fields(recipe: Recipe, *names: str) -> tuple[Any, ...]:
    """Return fields of a recipe."""
    return tuple(getattr(recipe, name) for name in names)


def test_axolotl(tmp_path: Path) -> None:
    """Adapters over weights that are cast to half precision."""
    found = written(tmp_path, AXOLOTL, "a.yaml")
    assert fields(found, "tool", "model", "sequence", "samples", "accumulation") == (
        "axolotl",
        "hf:llama",
        4096,
        2,
        4,
    )
    assert fields(found, "precision", "recompute", "shard") == ("bfloat16", True, "none")
    assert found.adapters == Adapters(rank=32, targets=("q_proj", "v_proj"))


def test_llama_factory_with_a_deepspeed_file(tmp_path: Path) -> None:
    """Its DeepSpeed file lies beside it; blocks are recomputed by default."""
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    (tmp_path / "ds_z3.json").write_text(json.dumps(config))
    found = written(tmp_path, FACTORY, "f.yaml")
    assert fields(found, "tool", "shard", "offload", "precision", "recompute", "adapters") == (
        "LLaMA-Factory", "parameters", "optimizer", "master-bfloat16", True, None,
    )  # fmt: skip
    assert found.settings["num_hidden_layers"] == 32


def test_trl(tmp_path: Path) -> None:
    """Weights are loaded in the dtype of the file, and blocks are recomputed by default."""
    found = written(tmp_path, TRL, "t.yaml")
    assert fields(found, "tool", "model", "precision", "recompute", "samples") == (
        "TRL",
        "hf:qwen2",
        "bfloat16",
        True,
        4,
    )
    assert written(tmp_path, TRL.replace("dtype: bfloat16", ""), "t.yaml").precision == "mixed-bfloat16"


def test_torchtitan(tmp_path: Path) -> None:
    """All devices divide state, and two of each replica divide its layers."""
    found = written(tmp_path, TITAN, "t.toml")
    assert fields(found, "tool", "tensor", "shard", "recompute", "precision", "replicas") == (
        "torchtitan", 2, "parameters", True, "master-bfloat16", None,
    )  # fmt: skip
    assert found.edits["samples"].line == "[training] local_batch_size = {}"


def test_automodel(tmp_path: Path) -> None:
    """Nested keys, and an optimizer by its class."""
    found = written(tmp_path, AUTOMODEL, "n.yaml")
    assert fields(found, "tool", "samples", "global_batch", "tensor", "sequence", "optimizer") == (
        "NeMo Automodel", 8, 64, 2, 4096, "adam",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "distributed", "precision"),
    [
        ("float32", "{strategy: fsdp2}", "master-bfloat16"),
        ("float32", "{strategy: fsdp2, mp_policy: {param_dtype: float32}}", "float32"),
        ("torch.float32", "{strategy: ddp}", "float32"),
        ("float16", "{strategy: fsdp2}", "float16"),
        ("bf16", "{strategy: ddp}", "bfloat16"),
    ],
)
def test_automodel_gathers_in_half_precision(
    dtype: str, distributed: str, precision: str, tmp_path: Path
) -> None:
    """FSDP2 computes in bfloat16 unless its policy says otherwise."""
    text = AUTOMODEL.replace("{strategy: fsdp2, tp_size: 2}", distributed)
    text = text.replace("Llama-3.2-1B", f"Llama-3.2-1B\n  torch_dtype: {dtype}")
    assert written(tmp_path, text, "n.yaml").precision == precision


@pytest.mark.parametrize("key", ["offload_params", "cpu_offload", "fsdp_offload_params"])
def test_fsdp_offloads_by_each_of_its_names(key: str, tmp_path: Path) -> None:
    """transformers and accelerate have different names for it."""
    values = {**TRAINER, "fsdp": True, "fsdp_config": {key: True}}
    assert fields(written(tmp_path, json.dumps(values), "t.json"), "shard", "offload") == (
        "parameters",
        "parameters",
    )


def test_training_arguments(tmp_path: Path) -> None:
    """JSON, whose lines are quoted."""
    found = written(tmp_path, json.dumps(TRAINER), "t.json")
    assert fields(found, "tool", "samples", "shard", "precision") == (
        "TRL", 2, "gradients", "master-float16",
    )  # fmt: skip
    assert found.edits["recompute"].line == '"gradient_checkpointing": true'
    del (plain := dict(TRAINER))["model_name_or_path"]
    (tmp_path / "t.json").write_text(json.dumps(plain))
    with pytest.raises(UsageError, match=r"does not name a model: add --base"):
        read(str(tmp_path / "t.json"))
    assert fields(read(str(tmp_path / "t.json"), "Qwen/Qwen3-8B"), "tool", "model", "precision", "recompute") == (
        "TrainingArguments", "hf:qwen3", "master-float16", False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "shard", "recompute"),
    [
        ("fsdp: no_shard", "none", False),
        ("fsdp: [full_shard, auto_wrap]\nfsdp_config: {activation_checkpointing: true}", "parameters", True),
        ("fsdp: [hybrid_shard_zero2]", "gradients", False),
        ("fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}", "parameters", False),
        ("fsdp_version: 2\nfsdp_config: {reshard_after_forward: false}", "gradients", False),
        ("fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}", "gradients", False),
    ],
)
def test_spellings_of_fsdp(tmp_path: Path, lines: str, shard: str, recompute: bool) -> None:
    """Words in a list, and nested keys with and without a prefix."""
    text = "base_model: smollm2-135m\nmicro_batch_size: 1\nbf16: true\n" + lines
    found = written(tmp_path, text, "a.yaml")
    assert fields(found, "shard", "recompute") == (shard, recompute)
    assert found.precision == ("bfloat16" if shard == "none" else "master-bfloat16")


def test_pure_half_precision_and_the_dtype_of_a_checkpoint(tmp_path: Path) -> None:
    """LLaMA-Factory's `pure_bf16` needs no `bf16`; `auto` is the type in which most checkpoints are saved."""
    text = FACTORY.replace("bf16: true", "pure_bf16: true").replace("deepspeed: ds_z3.json", "")
    assert written(tmp_path, text, "f.yaml").precision == "bfloat16"
    found = written(tmp_path, TRL.replace("dtype: bfloat16", "torch_dtype: auto"), "t.yaml")
    assert found.precision == "bfloat16" and "auto is read as bfloat16" in found.notes[0]


def test_adapters_without_names(tmp_path: Path) -> None:
    """TRL leaves them to peft, and drops some of their inputs; LLaMA-Factory takes all linear layers."""
    assert written(tmp_path, TRL + "use_peft: true\n", "t.yaml").adapters == Adapters(
        rank=16, targets=(), dropout=0.05
    )
    text = FACTORY.replace("full", "lora").replace("deepspeed: ds_z3.json", "")
    assert written(tmp_path, text, "f.yaml").adapters == Adapters(rank=8, targets=("all-linear",))


def test_older_names_of_automodel(tmp_path: Path) -> None:
    """Managers by class, `none` for a number that is left open, and packing to 0 tokens."""
    distributed = (
        "{_target_: nemo_automodel.components.distributed.ddp.DDPManager, dp_size: none, tp_size: none}"
    )
    text = AUTOMODEL.replace("{strategy: fsdp2, tp_size: 2}", distributed).replace("size: 4096", "size: 0")
    found = written(tmp_path, text, "n.yaml")
    assert fields(found, "shard", "tensor", "sequence") == ("none", 1, 2048)


def test_older_names_and_pipelines_of_torchtitan(tmp_path: Path) -> None:
    """A pipeline cuts the local batch, and keeps gathered parameters; weights may be half precision."""
    assert written(tmp_path, TITAN.replace("local_batch_size", "batch_size"), "t.toml").samples == 2
    text = TITAN.replace("tensor_parallel_degree", "pipeline_parallel_degree").replace("size = 2", "size = 8")
    found = written(tmp_path, text, "t.toml")
    assert fields(found, "stages", "samples", "accumulation", "shard") == (2, 1, 8, "gradients")
    text = TITAN.replace("[parallelism]", 'dtype = "bfloat16"\n[parallelism]')
    assert written(tmp_path, text, "t.toml").precision == "bfloat16"
    text = TITAN.replace("[parallelism]", "[parallelism]\ndata_parallel_shard_degree = 1")
    assert fields(written(tmp_path, text, "t.toml"), "precision", "shard") == ("float32", "none")
    alone = text.replace("tensor_parallel_degree = 2", "tensor_parallel_degree = 1")
    assert fields(written(tmp_path, alone, "t.toml"), "precision", "shard") == ("mixed-bfloat16", "none")
    with pytest.raises(UsageError, match=r"shard_degree must be a whole number"):
        written(tmp_path, text.replace("shard_degree = 1", "shard_degree = 1.5"), "t.toml")


def test_arguments_of_megatron_as_a_shell_script_writes_them(tmp_path: Path) -> None:
    """Lines end with a backslash; layers that are recomputed in part count as none."""
    lines = MEGATRON.replace(" --", " \\\n    --") + " --recompute-method block \\\n"
    found = written(tmp_path, lines, "gpt.sh")
    assert fields(found, "samples", "sequences", "recompute") == (4, True, False)
    assert "--recompute-method block" in found.notes[0]


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("t.toml", TITAN, "[training] global_batch_size = 8"),
        ("gpt.args", MEGATRON.replace("--global-batch-size 32", ""), "--global-batch-size 16"),
    ],
)
def test_smaller_microbatches_keep_the_samples_of_a_step(
    tmp_path: Path, name: str, text: str, line: str
) -> None:
    """Also if the file leaves them to the trainer, which takes one microbatch a device."""
    found = written(tmp_path, text, name)
    for lines, other in _changes(found, 4):
        assert (
            (other.global_batch == found.samples * 4) == (other.samples != found.samples) == (line in lines)
        )


def test_megatron(tmp_path: Path) -> None:
    """Arguments on a command line."""
    found = written(tmp_path, MEGATRON, "gpt.args")
    assert fields(found, "tool", "model", "samples", "global_batch", "tensor", "sequences", "shard", "recompute") == (
        "Megatron-LM", "zoo:gpt", 4, 32, 2, True, "optimizer", True,
    )  # fmt: skip
    assert found.precision == "master-bfloat16" and found.settings["vocabulary"] == 512


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AXOLOTL + "load_in_4bit: true\n", r"load_in_4bit needs 4-bit weights"),
        (AXOLOTL.replace("adapter: lora", "adapter: qlora"), r"adapter qlora has 4-bit weights"),
        (
            AXOLOTL.replace("adamw_torch", "adamw_bnb_8bit"),
            r"optimizer adamw_bnb_8bit has state of another size",
        ),
        (
            AXOLOTL.replace("micro_batch_size: 2", "micro_batch_size: two"),
            r"micro_batch_size must be a whole number",
        ),
        (
            AXOLOTL.replace("NousResearch/Llama-3.2-1B", "someone/secret-9b"),
            r"someone/secret-9b is neither a folder",
        ),
        (
            AXOLOTL.replace("sequence_len: 4096", "sequence_len: 10000000000"),
            r"sequence_len must be a whole number",
        ),
        (AXOLOTL.replace("[q_proj, v_proj]", "5"), r"adapters are on layers by name, not on 5"),
        ("learning_rate: 1e-4\n", r"not a configuration of a known trainer"),
        (AXOLOTL + "lora_modules_to_save: [embed_tokens]\n", r"lora_modules_to_save needs whole modules"),
        (AXOLOTL + "tensor_parallel_size: 2\n", r"tensor_parallel_size needs axolotl's tensor parallelism"),
        (AXOLOTL + "rl: dpo\n", r"rl needs preference training"),
        (TRL + "beta: 0.1\n", r"beta needs preference training"),
        (TRL + "beta: 0.1\nnum_generations: 8\n", r"num_generations needs reinforcement learning"),
        (AXOLOTL + "unfrozen_parameters: [lm_head]\n", r"unfrozen_parameters needs training of single"),
        (AXOLOTL + "lora_dropout: 2\n", r"lora_dropout must be a number from 0 to 1, not 2"),
        (
            FACTORY.replace("ds_z3.json", "{zero_optimization: {offload_param: {device: nvme}}}"),
            r'offloading to NVMe is not planned here: write "device": "cpu" under deepspeed',
        ),
        (
            FACTORY.replace("ds_z3.json", "{train_micro_batch_size_per_gpu: 4}"),
            r'train_micro_batch_size_per_gpu under deepspeed is another number than its own: write "auto"',
        ),
        ("distributed_type: FSDP\n", r"a configuration of accelerate's launcher, which names no model"),
        ("zero_optimization: {stage: 2}\n", r"a configuration of DeepSpeed, which names no model"),
        (FACTORY.replace("stage: sft", "stage: dpo"), r"stage dpo is not planned here"),
        (FACTORY.replace("ds_z3.json", "{zero_optimization: {stage: 1.0}}"), r"stage 1.0 of ZeRO does not"),
        (
            AUTOMODEL + "quantization: {load_in_4bit: true}\n",
            r"quantization.load_in_4bit needs 4-bit weights",
        ),
        (AUTOMODEL.replace("tp_size: 2", "pp_size: 2"), r"distributed.pp_size needs Automodel's pipelines"),
        (AUTOMODEL + "peft: {target_modules: '*_proj'}\n", r"list the layers of adapters by name"),
        (FACTORY.replace("ds_z3", "z" * 5000), r"which is neither in its folder"),
        (FACTORY, r"ds_z3.json, which is neither in its folder"),
        (AUTOMODEL.replace("tp_size: 2", "cp_size: 2"), r"distributed.cp_size needs context parallelism"),
    ],
)
def test_what_is_not_planned_is_refused_by_its_key(tmp_path: Path, text: str, message: str) -> None:
    """Never read as something else."""
    with pytest.raises(UsageError, match=message):
        written(tmp_path, text, "a.yaml")


@pytest.mark.parametrize(
    ("name", "text"), [("a.yaml", "a: [1"), ("a.json", "{"), ("a.toml", "a = = 1"), ("a.toml", "\0")]
)
def test_a_damaged_file_is_said_to_be_one(tmp_path: Path, name: str, text: str) -> None:
    """In one sentence."""
    with pytest.raises(FileError, match=r"a\.\w+ is not valid"):
        written(tmp_path, text, name)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
        + "".join(
            f"{b}: &{b} [{', '.join(['*' + a] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        "a: &a {x: 1}\n"
        + "".join(
            f"{b}: &{b} {{{', '.join(f'k{n}: *{a}' for n in range(20))}}}\n"
            for a, b in zip("abcdef", "bcdefg", strict=True)
        ),
        "a: &a {b: *a}\n",
    ],
)
def test_aliases_that_grow_without_bound_are_refused(tmp_path: Path, text: str) -> None:
    """In lists, in mappings, and of themselves."""
    with pytest.raises(FileError, match=r"more than 100,000 values"):
        written(tmp_path, text + "base_model: smollm2-135m\nmicro_batch_size: *a\n", "a.yaml")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": "abc"}, r"cannot be used: .*hidden_size"),
        ({"num_attention_heads": 0}, r"cannot be used: "),
        ({"num_hidden_layers": 100_000_000}, r"num_hidden_layers .* 10,000"),
        ({"hidden_size": 10**12}, r"hidden_size .* 16,777,216"),
        ({"hidden_size": -64, "num_attention_heads": 4}, r"hidden_size .* 16,777,216"),
        ({"model_type": "secret", "auto_map": {"AutoConfig": "own.Config"}}, r"cannot be used: "),
    ],
)
def test_a_checkpoint_of_a_folder_is_not_trusted(
    tmp_path: Path, config: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers are bounded, and its code neither runs nor is asked about."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked a question"))
    (tmp_path / "own.py").write_text("raise SystemExit\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    with pytest.raises(UsageError, match=message):
        shape_of(str(tmp_path), 128)


# Parameters of the checkpoints, as their model pages and safetensors files count them
PARAMETERS = {
    "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496, "llama-3-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824, "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120, "smollm2-1.7b": 1_711_376_384,
    "mistral-7b": 7_241_732_096, "mistral-7b-v0.3": 7_248_023_552, "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648, "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264, "gemma-2b": 2_506_172_416, "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984, "phi-3-mini": 3_821_079_552,
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(_SHAPES))
def test_a_known_shape_has_the_parameters_of_its_checkpoint(name: str) -> None:
    """To the parameter; one block counts for all, and embeddings once where they are tied."""
    import transformers

    architecture, settings = shape_of(name, 4096)
    key = "n_layer" if architecture == "gpt2" else "num_hidden_layers"
    layers = settings.get(key, 12)
    counts = []
    for number in (1, 2):
        config = transformers.AutoConfig.for_model(architecture, **(settings | {key: number}))
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        counts.append(sum(one.numel() for one in model.parameters()))
    assert counts[0] + (layers - 1) * (counts[1] - counts[0]) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3-8b"),
        ("NousResearch/Llama-2-13b-chat-hf", "llama-2-13b"),
        ("unsloth/Llama-3.2-3B-Instruct-bnb-4bit", "llama-3.2-3b"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3-70b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini"),
        ("HuggingFaceTB/SmolLM2-360M-Instruct", "smollm2-360m"),
    ],
)
def test_variants_of_a_checkpoint_have_its_shape(name: str, known: str) -> None:
    """Tuned, quantised and copied checkpoints have the shape of their base."""
    assert shape_of(name, 128) == shape_of(known, 128)


def test_keys_that_are_not_read_are_named(tmp_path: Path) -> None:
    """Of the file and of those that it names; rates, files and data are passed over."""
    config = {"zero_optimization": {"stage": 2, "zero_quantized_weights": True}, "train_batch_size": "auto"}
    (tmp_path / "ds_z3.json").write_text(json.dumps(config))
    more = "learning_rate: 1e-5\noutput_dir: out\ndataset: alpaca\nneftune: 5\nmixture_of_depths: convert\n"
    found = written(tmp_path, FACTORY + more, "f.yaml").notes
    assert found == ("not read in ds_z3.json: zero_optimization.zero_quantized_weights",
                     "not read: neftune, mixture_of_depths")  # fmt: skip
    text = AXOLOTL + "gradient_checkpointing: offload\nattn_implementation: eager\n"
    found = written(tmp_path, text, "a.yaml").notes
    assert [note.partition(":")[0] for note in found] == ["attn_implementation", "gradient_checkpointing"]


def test_recomputation_by_its_name_in_transformers_5(tmp_path: Path) -> None:
    """The changed file has the same name."""
    found = written(tmp_path, json.dumps({**TRAINER, "activation_checkpointing": False}), "t.json")
    assert not found.recompute and found.edits["recompute"].line == '"activation_checkpointing": true'
    assert written(tmp_path, json.dumps({**TRAINER, "activation_checkpointing": True}), "t.json").recompute


@pytest.mark.parametrize(
    ("name", "text", "copies", "replicas"),
    [
        ("a.yaml", AXOLOTL + "dp_replicate_size: 2\ndp_shard_size: 4\n", 2, 4),
        ("a.yaml", AXOLOTL + "fsdp: hybrid_shard\n", None, None),
        ("t.toml", TITAN.replace("[activation", "data_parallel_replicate_degree = 2\n[activation"), 2, None),
        ("n.yaml", AUTOMODEL.replace("tp_size: 2", "dp_replicate_size: 2"), 2, None),
    ],
)
def test_replicas_of_shards(
    name: str, text: str, copies: int | None, replicas: int | None, tmp_path: Path
) -> None:
    """Each group of replicas divides state for itself."""
    assert fields(written(tmp_path, text, name), "copies", "replicas") == (copies, replicas)


def test_a_shell_script_of_megatron(tmp_path: Path) -> None:
    """Arguments stand in arrays or strings, with variables; torchrun's own are passed over."""
    words = MEGATRON.split(" --")
    text = (
        "#!/bin/bash\nexport TP=2\nGPUS=8\nDISTRIBUTED=(--nproc_per_node $GPUS --nnodes 1)\nMODEL=(\n"
        + "\n".join(f"  --{word.removeprefix('--')}" for word in words[:6]).replace("size 2", "size ${TP}")
        + "\n)\nTRAINING=\" \\\n" + " \\\n".join(f"--{word}" for word in words[6:]).replace("size 2", "size ${TP}")
        + '"\ntorchrun ${DISTRIBUTED[@]} pretrain_gpt.py ${MODEL[@]} $TRAINING\n'
    )  # fmt: skip
    assert written(tmp_path, text, "run.sh") == written(tmp_path, MEGATRON, "gpt.args")
    with pytest.raises(UsageError, match=r"micro-batch-size must be a whole number .* not '\$MBS'"):
        written(tmp_path, text.replace("micro-batch-size 4", "micro-batch-size $MBS"), "run.sh")
