"""A plan of one stage in the files of trainers: Hugging Face's Trainer, accelerate, Lightning and DeepSpeed.

Each replica holds the whole model, and accumulates gradients over its local batches. DDP trains replicas that
divide nothing, FSDP2 those that divide gradients or parameters, and DeepSpeed those that divide optimizer
state, or hold half-precision weights or optimizer state that its host updates. Trainers recompute all blocks
or none, and offload a kind of state of all layers or none: all if a plan does so with any. The user's code
gives the model, its dtype, the data and the optimizer.

(transformers 5.23, `TrainingArguments`; accelerate 1.15, `commands.config.config_args`; Lightning 2.6,
`pytorch.strategies`; DeepSpeed 0.19, `runtime.config`.)
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipefit.errors import UsageError
from pipefit.export.decoders import (
    Abilities,
    Offloadable,
    deepspeed_pipeline,
    offloaded,
    recomputes,
    yaml_text,
)
from pipefit.export.launch_script import hosts_of
from pipefit.schema.grids import SHARDINGS
from pipefit.schema.plan import Plan
from pipefit.texts import counted

Engine = Literal["DDP", "FSDP2", "DeepSpeed"]
_ALL: tuple[Engine, ...] = ("DDP", "FSDP2", "DeepSpeed")

_MIXED = ("mixed-bfloat16", "mixed-float16")
_MASTER = ("master-bfloat16", "master-float16")
_STATE: tuple[Offloadable, ...] = ("gradients", "optimizer", "parameters")
_ENGINES: dict[Engine, Abilities] = {
    "DDP": Abilities(tool="DDP", precisions=("float32", "bfloat16", *_MIXED), shards=("none",), stages=False),
    "FSDP2": Abilities(
        tool="FSDP2",
        precisions=("float32", "bfloat16", "mixed-bfloat16", "master-bfloat16"),
        shards=("gradients", "parameters"),
        stages=False,
        offloads=_STATE,
    ),
    "DeepSpeed": Abilities(
        tool="DeepSpeed", precisions=("float32", *_MASTER), shards=SHARDINGS, stages=False, offloads=_STATE
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The replicas of a whole model, in the terms of trainers."""

    plan: Plan
    engine: Engine
    offloads: frozenset[Offloadable]  # what is on the host between its uses

    @property
    def samples(self) -> int:
        """The local batch of a replica."""
        return self.plan.training.microbatch_size // self.plan.stages[0].grid.data

    @property
    def half(self) -> str:
        """Half precision that a trainer switches on, `bf16` or `fp16`; empty if the model has its own."""
        precision = self.plan.training.precision
        return {"bfloat16": "bf16", "float16": "fp16"}[precision.split("-")[1]] if "-" in precision else ""


def _replicas(
    plan: Plan,
    tool: str,
    engines: tuple[Engine, ...] = _ALL,
    offloads_too: tuple[Offloadable, ...] = (),
    **other: Any,
) -> Replicas:
    """Return the plan's replicas, and choose an engine to train them; a tool may have `other` abilities.

    Raises:
        UsageError: no engine of the tool does; says why, and what to plan instead.
    """
    grid = plan.stages[0].grid
    offloads = frozenset(kind for decision in plan.decisions if (kind := offloaded(decision)))
    state = offloads - {"activations"}
    engine: Engine = "DeepSpeed"
    if grid.shard == "none" and not state and plan.training.precision not in _MASTER:
        engine = "DDP"
    elif grid.divides_gradients and plan.training.precision in _ENGINES["FSDP2"].precisions:
        engine = "FSDP2" if "parameters" in state or not state else "DeepSpeed"
    if engine not in engines:
        engine = engines[-1]
    able = _ENGINES[engine]
    named = tool if engine == tool else f"{tool} with {engine}"
    if plan.cluster.backend != "cuda" and (engine == "FSDP2" or tool == "accelerate"):
        raise UsageError(
            f"{named} silently divides nothing between processes on CPUs, and {plan.cluster.name} has "
            "emulated devices: plan for a cluster of GPUs, or train the plan with pipefit"
        )
    replace(able, tool=named, offloads=(*able.offloads, *offloads_too), **other).check(plan)
    if "parameters" in offloads and grid.data > 1 and grid.shard != "parameters":
        raise UsageError(
            f"{named} offloads parameters only of replicas that divide them: plan with --shard parameters"
        )
    return Replicas(plan=plan, engine=engine, offloads=offloads)


def trainer_arguments(plan: Plan) -> str:
    """Return `transformers.TrainingArguments` as JSON, for `HfArgumentParser.parse_json_file`.

    Raises:
        UsageError: Trainer does not support the plan; says why, and what to plan instead.
    """
    replicas = _replicas(plan, "Trainer")
    fsdp = replicas.engine == "FSDP2"
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": replicas.samples,
        "gradient_accumulation_steps": plan.training.microbatches,
        "max_grad_norm": plan.training.clip_norm or 0.0,  # 0 disables clipping; Trainer's default clips
        "bf16": replicas.half == "bf16",
        "fp16": replicas.half == "fp16",
        "gradient_checkpointing": recomputes(plan) and not fsdp,
        "use_cpu": plan.cluster.backend != "cuda",
    }
    if fsdp:
        arguments["fsdp"] = True
        arguments["fsdp_config"] = {
            "version": 2,
            "reshard_after_forward": plan.stages[0].grid.shard == "parameters",
            "cpu_offload": "parameters" in replicas.offloads,
            "activation_checkpointing": recomputes(plan),
        }
    if replicas.engine == "DeepSpeed":
        arguments["deepspeed"] = _deepspeed(replicas)
    return json.dumps(arguments, indent=2) + "\n"


def accelerate_config(plan: Plan) -> str:
    """Return a configuration for `accelerate launch --config_file`, YAML.

    Raises:
        UsageError: accelerate does not support the plan; says why, and what to plan instead.
    """
    grid = plan.stages[0].grid
    divided = grid.tensor > 1
    # FSDP2 offloads the inputs of recomputed blocks
    inputs: tuple[Offloadable, ...] = ("activations",) if recomputes(plan) and grid.divides_gradients else ()
    if divided:
        replicas = _replicas(plan, "accelerate", ("FSDP2",), inputs, tensor=True)
    else:
        replicas = _replicas(plan, "accelerate", offloads_too=inputs)
    alone = len(plan.workers) == 1
    kinds = {"DDP": "NO" if alone else "MULTI_GPU", "FSDP2": "FSDP", "DeepSpeed": "DEEPSPEED"}
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kinds[replicas.engine],
        "mixed_precision": replicas.half or "no",
        "num_machines": hosts_of(plan)[0],
        "num_processes": len(plan.workers),
        "machine_rank": 0,
    }
    steps, batch = plan.training.microbatches, counted(replicas.samples, "sample")
    code = [f"Accelerator(gradient_accumulation_steps={steps}), with a batch of {batch} a process"]
    if replicas.engine == "FSDP2":
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": grid.shard == "parameters",
            "fsdp_offload_params": "parameters" in replicas.offloads,
            "fsdp_activation_checkpointing": recomputes(plan),
            "fsdp_activation_checkpointing_offload": "activations" in replicas.offloads,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    elif recomputes(plan):
        code.append("model.gradient_checkpointing_enable()")
    if divided:
        config["parallelism_config"] = {
            "parallelism_config_dp_shard_size": grid.data,
            "parallelism_config_tp_size": grid.tensor,
        }
    if replicas.engine == "DeepSpeed":
        config["deepspeed_config"] = {
            "zero_stage": _zero_stage(replicas),
            "offload_optimizer_device": "cpu" if "optimizer" in replicas.offloads else "none",
            "offload_param_device": "cpu" if "parameters" in replicas.offloads else "none",
            "gradient_accumulation_steps": plan.training.microbatches,
            "gradient_clipping": plan.training.clip_norm or 0.0,
        }
    elif plan.training.clip_norm is not None:
        code.append(f"accelerator.clip_grad_norm_(model.parameters(), {plan.training.clip_norm})")
    if "activations" in replicas.offloads:
        code.insert(0, "accelerate 1.15 or newer, which offloads the inputs of recomputed blocks")
    return "# In the script:\n" + "".join(f"#   {line}\n" for line in code) + yaml_text(config)


def lightning_arguments(plan: Plan) -> str:
    """Return a Python file whose `arguments` are for `lightning.pytorch.Trainer(**arguments)`.

    Lightning's DeepSpeed also trains replicas that divide parameters, and clips gradients, which its FSDP
    does not.

    Raises:
        UsageError: Lightning does not support the plan; says why, and what to plan instead.
    """
    replicas = _replicas(plan, "Lightning", ("DDP", "DeepSpeed"))
    ddp = replicas.engine == "DDP"
    hosts, each = hosts_of(plan)
    precision = {
        "float32": "32-true",
        "bfloat16": "bf16-true",
        "mixed-bfloat16": "bf16-mixed",
        "mixed-float16": "16-mixed",
        "master-bfloat16": "bf16-true",
        "master-float16": "16-true",
    }
    config = {key: value for key, value in _deepspeed(replicas).items() if key.startswith("zero")}
    strategy = (
        repr("ddp" if len(plan.workers) > 1 else "auto") if ddp else f"DeepSpeedStrategy(config={config})"
    )
    imported = "" if ddp else "from lightning.pytorch.strategies import DeepSpeedStrategy\n\n"
    recomputed = "Recompute every block: model.gradient_checkpointing_enable() in configure_model.\n"
    return (
        f'"""A plan of pipefit: {plan.profile.model}, '
        f"local batches of {counted(replicas.samples, 'sample')}.\n"
        f'{recomputed if recomputes(plan) else ""}"""\n\n{imported}'
        "arguments = dict(\n"
        f"    accelerator={'gpu' if plan.cluster.backend == 'cuda' else 'cpu'!r},\n"
        f"    devices={each},\n    num_nodes={hosts},\n"
        f"    precision={precision[plan.training.precision]!r},\n    strategy={strategy},\n"
        f"    accumulate_grad_batches={plan.training.microbatches},\n"
        f"    gradient_clip_val={plan.training.clip_norm},\n)\n"
    )


def deepspeed_config(plan: Plan) -> str:
    """Return DeepSpeed's configuration in JSON: for ZeRO, or for pipelines if the plan has several stages.

    Raises:
        UsageError: DeepSpeed does not support the plan; says why, and what to plan instead.
    """
    if len(plan.stages) > 1:
        return deepspeed_pipeline(plan)
    moved: tuple[Offloadable, ...] = ("activations",) if plan.stages[0].grid.shard == "parameters" else ()
    return json.dumps(_deepspeed(_replicas(plan, "DeepSpeed", ("DeepSpeed",), moved)), indent=2) + "\n"


def script_lines(plan: Plan) -> list[str]:
    """Return what a script must do itself besides DeepSpeed's configuration of a plan of one stage."""
    compiled = any(offloaded(decision) == "activations" for decision in plan.decisions)
    lines = [(recomputes(plan), "model.gradient_checkpointing_enable()"), (compiled, "engine.compile()")]
    return [line for needed, line in lines if needed and len(plan.stages) == 1]


def _deepspeed(replicas: Replicas) -> dict[str, Any]:
    """Return DeepSpeed's configuration of batch, precision, clipping and ZeRO."""
    training = replicas.plan.training
    away = {"optimizer": "offload_optimizer", "parameters": "offload_param"}
    flags: dict[str, Any] = {}
    if "activations" in replicas.offloads:
        flags["compile"] = {"deepcompile": True, "offload_activation": True}
    zero: dict[str, Any] = {"stage": _zero_stage(replicas)}
    zero |= {key: {"device": "cpu"} for what, key in away.items() if what in replicas.offloads}
    if replicas.offloads & {"optimizer", "parameters"}:  # the user's own optimizer, not one of DeepSpeed's
        flags |= {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
    halves = {replicas.half: {"enabled": True}} if replicas.half else {}
    return {
        "train_batch_size": training.batch_size,
        "train_micro_batch_size_per_gpu": replicas.samples,
        "gradient_accumulation_steps": training.microbatches,
        "gradient_clipping": training.clip_norm or 0.0,  # 0 disables clipping; DeepSpeed's default clips
        "zero_optimization": zero,
        **halves,
        **flags,
    }


def _zero_stage(replicas: Replicas) -> int:
    """Return DeepSpeed's stage of ZeRO, at least 1 to offload optimizer state and 3 to offload parameters."""
    least = 3 if "parameters" in replicas.offloads else 1 if replicas.offloads else 0
    return max(SHARDINGS.index(replicas.plan.stages[0].grid.shard), least)
