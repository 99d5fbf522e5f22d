"""Documents in the formats of other tools."""

from collections.abc import Callable

from pipefit.export.decoders import automodel_recipe, megatron_arguments, torchtitan_config
from pipefit.export.launch_script import kubernetes_job, slurm_script
from pipefit.export.pipelining import pipelining_csv, split_points
from pipefit.export.traces import memory_snapshot, perfetto
from pipefit.export.trainers import (
    accelerate_config,
    deepspeed_config,
    lightning_arguments,
    script_lines,
    trainer_arguments,
)
from pipefit.schema.plan import Plan

__all__ = [
    "PLANS",
    "accelerate_config",
    "automodel_recipe",
    "deepspeed_config",
    "kubernetes_job",
    "lightning_arguments",
    "megatron_arguments",
    "memory_snapshot",
    "perfetto",
    "pipelining_csv",
    "script_lines",
    "slurm_script",
    "split_points",
    "torchtitan_config",
    "trainer_arguments",
]

PLANS: dict[str, tuple[Callable[[Plan], str], str]] = {  # how to write a plan, and what is written
    "pipelining": (pipelining_csv, "torch's schedules"),
    "split-points": (split_points, "torch's split points"),
    "megatron": (megatron_arguments, "Megatron's arguments"),
    "torchtitan": (torchtitan_config, "torchtitan's configurations"),
    "automodel": (automodel_recipe, "Automodel's recipes"),
    "deepspeed": (deepspeed_config, "DeepSpeed's configurations"),
    "trainer": (trainer_arguments, "TrainingArguments"),
    "accelerate": (accelerate_config, "accelerate's configurations"),
    "lightning": (lightning_arguments, "Lightning's arguments"),
}
