"""A plan as a Python file for torchtitan's configuration: its `parallelism`, `training` and what it recomputes.

Import the three names in a config_registry function of a model: `replace(config, parallelism=parallelism, ...)`. Its
modules are named as torchtitan's decoders name theirs. It recomputes blocks on all stages or on none: on all if a plan
recomputes any. (torchtitan 0.3, `torchtitan.config.configs`.)
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from pipefit.export.decoders import decoder_of
from pipefit.plans import Plan

_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe"}


def torchtitan_config(plan: Plan) -> str:
    """The file's text.

    Raises:
        UsageError: the plan does what torchtitan cannot; says what, and what to plan instead.
    """
    found, training = decoder_of(plan, "torchtitan", tuple(_SCHEDULES)), plan.training
    parts = [[f"layers.{n}" for n in range(*pair)] for pair in pairwise(accumulate(found.blocks, initial=0))]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    rows = "".join(f"        {part!r},\n" for part in parts)
    length = f"    seq_len={found.sequence},\n" if found.sequence else ""
    norm = 'float("inf")' if training.clip_norm is None else repr(training.clip_norm)
    dtype = "bfloat16" if training.precision == "bfloat16" else "float32"
    recomputes = "FullAC.Config()" if any(found.recomputed) else "None"
    return (
        f'"""A plan of pipefit: {plan.profile.model} in {len(parts)} stages."""\n\n'
        "from torchtitan.config import ParallelismConfig, TrainingConfig\n"
        "from torchtitan.distributed.activation_checkpoint import FullAC\n\n"
        "parallelism = ParallelismConfig(\n"
        f"    pipeline_parallel_degree={len(parts)},\n"
        f"    pipeline_parallel_schedule={_SCHEDULES[training.schedule]!r},\n"
        f"    pipeline_parallel_microbatch_size={training.microbatch_size},\n"
        f"    module_fqns_per_model_part=[\n{rows}    ],\n)\n"
        f"training = TrainingConfig(\n    local_batch_size={training.batch_size},\n"
        f"{length}    max_norm={norm},\n    dtype={dtype!r},\n)\n"
        f"activation_checkpoint = {recomputes}\n"
    )
