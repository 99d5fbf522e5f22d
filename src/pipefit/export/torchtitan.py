"""A plan as a Python file for torchtitan's configuration: its `parallelism`, `training` and recomputation.

Import the three names in a config_registry function of a model: `replace(config, parallelism=parallelism,
...)`. Modules have the names of torchtitan's decoders. torchtitan recomputes blocks on all stages or on none:
on all if a plan recomputes any. CUDA graphs are disabled, since its pipelines refuse them, and so is
autocast. (torchtitan 0.3, `torchtitan.config.configs` and `torchtitan.trainer`.)
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from pipefit.errors import UsageError
from pipefit.export.decoders import Abilities, Decoder, check_tokens, decoder_of
from pipefit.schema.plan import Plan
from pipefit.texts import counted

_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe"}
_PRECISIONS = ("float32", "bfloat16")  # torchtitan's autocast supports one device and its replicas only
_ABLE = Abilities(
    tool="torchtitan",
    schedules=_SCHEDULES,
    precisions=_PRECISIONS,
    shards=("none", "parameters"),
    tensor=False,
)


def torchtitan_config(plan: Plan) -> str:
    """Return the file's text.

    Raises:
        UsageError: torchtitan does not support the plan; says why, and what to plan instead.
    """
    result, training = decoder_of(plan, _ABLE), plan.training
    check_tokens(plan, "torchtitan")
    if result.tied and len(plan.stages) > 1:
        raise UsageError(
            "torchtitan's pipelines do not support shared weights of embedding and head: plan with --stages 1"
        )
    parts = [[f"layers.{n}" for n in range(*pair)] for pair in pairwise(accumulate(result.blocks, initial=0))]
    parts[0].insert(0, "tok_embeddings")
    parts[result.norm].append("norm")
    parts[-1].append("lm_head")
    # A single stage accumulates gradients
    local = result.each(training.batch_size if len(parts) > 1 else training.microbatch_size)
    rows = "".join(f"        {part!r},\n" for part in parts)
    length = f"    seq_len={result.sequence},\n" if result.sequence else ""
    norm = 'float("inf")' if training.clip_norm is None else repr(training.clip_norm)
    recomputes = "FullAC.Config()" if any(result.recomputed) else "None"
    return (
        f'"""A plan of pipefit: {plan.profile.model} in {counted(len(parts), "stage")}."""\n\n'
        "from torchtitan.config import ParallelismConfig, TrainingConfig\n"
        "from torchtitan.distributed.activation_checkpoint import FullAC\n\n"
        "parallelism = ParallelismConfig(\n"
        f"    pipeline_parallel_degree={len(parts)},\n"
        f"    pipeline_parallel_schedule={_SCHEDULES[training.schedule]!r},\n"
        f"    pipeline_parallel_microbatch_size={result.each(training.microbatch_size)},\n{_replicas(result)}"
        f"    module_fqns_per_model_part=[\n{rows}    ],\n)\n"
        f"training = TrainingConfig(\n    local_batch_size={local},\n    "
        f"global_batch_size={training.batch_size},\n"
        f"{length}    max_norm={norm},\n    dtype={training.precision!r},\n"
        "    mixed_precision_param='float32',\n    disable_cuda_graphs=True,\n)\n"
        f"activation_checkpoint = {recomputes}\n"
    )


def _replicas(found: Decoder) -> str:
    """Return lines for replicas that hold a whole stage, or divide its parameters, which is torchtitan's
    default.
    """
    if found.grid.shard == "parameters":
        return (
            f"    data_parallel_shard_degree={found.grid.data},\n    fsdp_reshard_after_forward='always',\n"
        )
    return f"    data_parallel_replicate_degree={found.grid.data},\n    data_parallel_shard_degree=1,\n"
