"""Plans of one stage in the files of trainers, read back by the trainers themselves and by `pipefit fit`'s reader."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from torch.distributed.fsdp import CPUOffloadPolicy

from export.test_other_tools import on_grids
from pipefit.cli import main
from pipefit.errors import UsageError
from pipefit.export import (
    accelerate_config,
    deepspeed_config,
    lightning_arguments,
    script_lines,
    trainer_arguments,
)
from pipefit.recipes.readers import read
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Run, SavedTensors, State, StateKind, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Grid, Sharding, Stage
from pipefit.schema.json_io import save
from pipefit.schema.plan import Plan


def whole(
    data: int = 2,
    shard: Sharding = "none",
    precision: Any = "float32",
    *,
    tensor: int = 1,
    microbatches: int = 4,
    clip_norm: float | None = None,
    decisions: tuple[Decision, ...] = (),
) -> Plan:
    """Return a plan of one stage on this grid, which need not fit."""
    plan = on_grids(2, tensor)
    grid = Grid(devices=tuple(range(data * tensor)), data=data, tensor=tensor, shard=shard)
    asked = replace(
        plan.training, precision=precision, clip_norm=clip_norm, microbatches=microbatches,
        batch_size=data * microbatches,
    )  # fmt: skip
    return replace(
        plan,
        stages=(Stage(start=0, stop=len(plan.profile.layers), grid=grid),),
        profile=replace(plan.profile, assumptions=replace(plan.profile.assumptions, precision=precision)),
        training=asked,
        decisions=decisions,
        prediction=None,
    )


def state(kind: StateKind, what: What = What.OFFLOAD, place: str = "host") -> Decision:
    """Return a decision that moves a state of the first three layers."""
    return Decision(stage=0, subject=State(start=0, stop=3, kind=kind), what=what, place=parse_place(place))


RECOMPUTED = Decision(stage=0, subject=Run(start=1, stop=3), what=What.RECOMPUTE)
SAVED = Decision(
    stage=0, subject=SavedTensors(tensors=((1, 0),)), what=What.OFFLOAD, place=parse_place("host")
)
UPDATED = state("optimizer", What.UPDATE)
WEIGHTS = state("parameters")


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restore the environment, in which trainers leave their settings."""
    with patch.dict(os.environ):
        yield


def trainer(plan: Plan, folder: Path) -> tuple[Any, Any]:
    """Return what transformers reads, and what `pipefit fit` reads."""
    from transformers import (  # two seconds, in every process that collects
        HfArgumentParser,
        TrainingArguments,
    )

    file = folder / "arguments.json"
    file.write_text(trainer_arguments(plan))
    values = json.loads(file.read_text()) | {"output_dir": str(folder), "use_cpu": True}
    values.pop("deepspeed", None)  # transformers would import it
    (read_back,) = HfArgumentParser(TrainingArguments).parse_dict(values | {"bf16": False, "fp16": False})
    return read_back, read(str(file), "gpt2")


@pytest.mark.sample(2)
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_the_trainer_has_the_plans_batch_and_clipping(
    microbatches: int, clip_norm: float | None, tmp_path: Path
) -> None:
    """A replica's local batch, the accumulated batches and the norm; 0 is Trainer's way to say none."""
    plan = whole(2, microbatches=microbatches, clip_norm=clip_norm)
    arguments, recipe = trainer(plan, tmp_path)
    assert arguments.per_device_train_batch_size * 2 == plan.training.microbatch_size
    assert arguments.gradient_accumulation_steps == microbatches
    assert arguments.max_grad_norm == (clip_norm or 0.0)
    assert (recipe.samples, recipe.accumulation) == (1, microbatches)
    assert not arguments.fsdp and not arguments.gradient_checkpointing


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
@pytest.mark.parametrize("decisions", [(), (RECOMPUTED,), (WEIGHTS, UPDATED)])
def test_the_trainer_divides_with_fsdp(
    shard: Sharding, decisions: tuple[Decision, ...], tmp_path: Path
) -> None:
    """FSDP2 gathers again for the backward if parameters are divided, recomputes and offloads as planned."""
    if shard == "gradients" and WEIGHTS in decisions:
        decisions = ()
    arguments, recipe = trainer(whole(2, shard, "master-bfloat16", decisions=decisions), tmp_path)
    plugin = arguments.fsdp_plugin_args
    assert plugin["fsdp_version"] == 2 and plugin["reshard_after_forward"] == (shard == "parameters")
    assert bool(plugin["activation_checkpointing"]) == (RECOMPUTED in decisions)
    assert bool(plugin.get("cpu_offload")) == (WEIGHTS in decisions)
    assert not arguments.gradient_checkpointing
    assert (recipe.shard, recipe.precision) == (shard, "master-bfloat16")
    assert (recipe.recompute, recipe.offload) == (
        RECOMPUTED in decisions,
        "parameters" if WEIGHTS in decisions else "none",
    )


@pytest.mark.parametrize(
    ("data", "shard", "decisions", "stage", "offload"),
    [
        (2, "none", (), 0, "none"),
        (2, "optimizer", (), 1, "none"),
        (2, "gradients", (UPDATED,), 2, "optimizer"),
        (2, "parameters", (UPDATED, RECOMPUTED), 3, "optimizer"),
        (1, "none", (UPDATED,), 1, "optimizer"),
        (1, "none", (WEIGHTS, UPDATED, RECOMPUTED), 3, "parameters"),
    ],
)
def test_deepspeed_divides_and_offloads_what_the_plan_does(
    data: int, shard: Sharding, decisions: tuple[Decision, ...], stage: int, offload: str, tmp_path: Path
) -> None:
    """In its own file and inside TrainingArguments: ZeRO's stage, what is on the host, batch and precision."""
    plan = whole(data, shard, "master-bfloat16", clip_norm=1.5, decisions=decisions)
    config = json.loads(deepspeed_config(plan))
    assert config["zero_optimization"]["stage"] == stage
    assert ("offload_optimizer" in config["zero_optimization"]) == (UPDATED in decisions)
    assert ("offload_param" in config["zero_optimization"]) == (WEIGHTS in decisions)
    assert config["train_batch_size"] == plan.training.batch_size
    assert config["train_batch_size"] == data * config["train_micro_batch_size_per_gpu"] * 4
    assert config["gradient_clipping"] == 1.5 and config["bf16"] == {"enabled": True}
    lines = script_lines(plan)
    assert lines == (["model.gradient_checkpointing_enable()"] if RECOMPUTED in decisions else [])
    arguments, recipe = trainer(plan, tmp_path)
    assert json.loads((tmp_path / "arguments.json").read_text())["deepspeed"] == config
    assert arguments.gradient_checkpointing == (RECOMPUTED in decisions)
    order = ("none", "optimizer", "gradients", "parameters")
    assert (order.index(recipe.shard), recipe.offload) == (stage, offload)


def test_activations_go_where_a_trainer_can_send_them(tmp_path: Path) -> None:
    """DeepSpeed's compiler moves them if parameters are divided; FSDP2 moves the inputs of recomputed blocks."""
    plan = whole(2, "parameters", "master-bfloat16", decisions=(SAVED,))
    assert json.loads(deepspeed_config(plan))["compile"] == {"deepcompile": True, "offload_activation": True}
    assert script_lines(plan) == ["engine.compile()"]
    with pytest.raises(UsageError, match="accelerate with FSDP2 does not support offloaded tensors"):
        accelerate_config(plan)
    both = replace(plan, decisions=(RECOMPUTED, SAVED))
    assert "#   accelerate 1.15 or newer, which offloads" in accelerate_config(both)
    if version("accelerate") >= "1.15":
        assert accelerated(both, tmp_path)["FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"] == "true"
    with pytest.raises(UsageError, match="Trainer with FSDP2 does not support offloaded tensors"):
        trainer_arguments(both)


def accelerated(plan: Plan, folder: Path) -> dict[str, str]:
    """Return the environment that `accelerate launch` gives its processes."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    file = folder / "accelerate.yaml"
    file.write_text(accelerate_config(plan))
    args = launch_command_parser().parse_args(["--config_file", str(file), "script.py"])
    args, _, _ = _validate_launch_command(args)
    args.main_process_port = 0
    return prepare_multi_gpu_env(args)


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
@pytest.mark.parametrize("precision", ["float32", "mixed-bfloat16", "master-bfloat16"])
def test_accelerate_launches_the_plans_fsdp(shard: Sharding, precision: str, tmp_path: Path) -> None:
    """The plugin that its processes build from the environment divides and recomputes as planned."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    plan = whole(2, shard, precision, clip_norm=0.5, decisions=(RECOMPUTED,))
    os.environ |= accelerated(plan, tmp_path)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward == (shard == "parameters")
    assert plugin.activation_checkpointing and not isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    half = "no" if precision == "float32" else "bf16"
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == half
    text = (tmp_path / "accelerate.yaml").read_text()
    assert "gradient_accumulation_steps=4), with a batch of 1 sample a" in text
    assert "accelerator.clip_grad_norm_(model.parameters(), 0.5)" in text
    assert yaml.safe_load(text)["num_processes"] == 2


def test_accelerate_has_tensor_shards_beside_fsdp(tmp_path: Path) -> None:
    """Its parallelism configuration has divided replicas and shards; other trainers have no shards."""
    from accelerate.utils import ParallelismConfig

    plan = whole(2, "parameters", tensor=2)
    os.environ |= accelerated(plan, tmp_path)
    found = ParallelismConfig()
    assert (found.dp_replicate_size, found.dp_shard_size, found.tp_size) == (1, 2, 2)
    with pytest.raises(UsageError, match="does not support tensor shards: plan with --data 2 --tensor 1"):
        trainer_arguments(plan)
    with pytest.raises(
        UsageError, match="replicas that shard none: plan with --shard gradients or parameters"
    ):
        accelerate_config(whole(2, tensor=2))


def test_accelerate_offloads_with_deepspeed(tmp_path: Path) -> None:
    """Its configuration has ZeRO's stage, what is on the host, and the accumulation that DeepSpeed does itself."""
    from accelerate.commands.config.config_args import load_config_from_file

    (tmp_path / "accelerate.yaml").write_text(
        accelerate_config(whole(1, precision="master-bfloat16", decisions=(UPDATED, RECOMPUTED)))
    )
    config = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert config.distributed_type == "DEEPSPEED" and config.mixed_precision == "bf16"
    assert config.deepspeed_config == {
        "zero_stage": 1, "offload_optimizer_device": "cpu", "offload_param_device": "none",
        "gradient_accumulation_steps": 4, "gradient_clipping": 0.0,
    }  # fmt: skip
    assert "#   model.gradient_checkpointing_enable()\n" in (tmp_path / "accelerate.yaml").read_text()


@pytest.mark.sample(3)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "mixed-bfloat16"])
@pytest.mark.parametrize("data", [1, 2])
def test_lightning_takes_the_arguments(precision: str, data: int) -> None:
    """Its Trainer has the plan's devices, precision, accumulation and clipping."""
    found = dict[str, Any]()
    exec(lightning_arguments(whole(data, precision=precision, clip_norm=0.5)), found)
    arguments = {**found["arguments"], "accelerator": "cpu"}
    assert found["arguments"]["accelerator"] == "gpu"
    lightning = importlib.import_module("lightning.pytorch")  # its import takes seconds
    made = lightning.Trainer(logger=False, enable_checkpointing=False, **arguments)
    assert made.num_devices * made.num_nodes == data
    assert made.accumulate_grad_batches == 4 and made.gradient_clip_val == 0.5
    names = {"float32": "32-true", "bfloat16": "bf16-true", "mixed-bfloat16": "bf16-mixed"}
    assert made.precision == names[precision]


def test_emulated_devices_are_processes_on_cpus(tmp_path: Path) -> None:
    """They train copies of the model; state that is divided there would silently not be."""
    plan = replace(whole(2), cluster=Cluster.emulated((2, 1 << 30)))
    assert trainer(plan, tmp_path)[0].use_cpu
    assert json.loads(trainer_arguments(plan))["use_cpu"]
    assert not json.loads(trainer_arguments(whole(2)))["use_cpu"]
    assert "accelerator='cpu'" in lightning_arguments(plan)
    divided = replace(whole(2, "parameters"), cluster=plan.cluster)
    for write, other in ((accelerate_config, plan), (trainer_arguments, divided)):
        with pytest.raises(UsageError, match="silently divides nothing between processes on CPUs"):
            write(other)


def test_lightning_divides_with_deepspeed() -> None:
    """The strategy has ZeRO's stage and the offloaded state; batch and clipping are Lightning's."""
    text = lightning_arguments(whole(2, "parameters", "master-bfloat16", decisions=(UPDATED, RECOMPUTED)))
    assert "'stage': 3, 'offload_optimizer': {'device': 'cpu'}" in text and "train_batch_size" not in text
    assert "model.gradient_checkpointing_enable() in configure_model" in text
    assert "precision='bf16-true'" in text and "accumulate_grad_batches=4" in text


@pytest.mark.parametrize("write", [trainer_arguments, accelerate_config, lightning_arguments])
@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (lambda: on_grids(2), "does not support several stages: plan with --stages 1"),
        (
            lambda: whole(2, "optimizer", "mixed-bfloat16"),
            "does not support precision mixed-bfloat16: plan with",
        ),
        (
            lambda: whole(2, decisions=(state("optimizer", place="device3"),)),
            "does not support offloaded tensors",
        ),
        (
            lambda: whole(2, "gradients", "master-bfloat16", decisions=(WEIGHTS,)),
            "plan with --shard parameters",
        ),
        (lambda: whole(2, decisions=(SAVED,)), "does not support offloaded tensors"),
    ],
)
def test_what_a_trainer_cannot_do_is_refused(write: Any, plan: Callable[[], Plan], words: str) -> None:
    """By name, with the options of a plan that it can train."""
    with pytest.raises(UsageError, match=words):
        write(plan())


def test_the_command_says_what_the_script_must_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSpeed's JSON has no place for it, so it goes to stderr."""
    monkeypatch.chdir(tmp_path)
    save(whole(2, "parameters", decisions=(RECOMPUTED,)), "plan.json")
    for name in ("trainer", "accelerate", "lightning", "deepspeed"):
        assert main(["export", "plan.json", "--to", name]) == 0
        told = capsys.readouterr().err
        assert ("must call model.gradient_checkpointing_enable()" in told) == (name == "deepspeed")
