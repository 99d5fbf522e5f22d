"""A plan as a configuration of DeepSpeed's pipeline engine: batch, precision, clipping and stages.

`partition` has the first block of every stage and the number of blocks. DeepSpeed divides by its own rule, so
pass these to a `PipelineModule` whose `_partition_layers` sets `self.parts` and `self._local_start`,
`self._local_stop`. `activation_checkpoint_interval` 1 recomputes every block, 0 none: 1 if the plan
recomputes any. Its half precisions have master weights. (DeepSpeed 0.19, `deepspeed.runtime.config`.)
"""

from __future__ import annotations

import json
from typing import Any

from pipefit.export.decoders import Abilities, decoder_of
from pipefit.schema.plan import Plan

_PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "master-bfloat16": {"bf16": {"enabled": True}},
    "master-float16": {"fp16": {"enabled": True}},
}
_ABLE = Abilities(
    tool="DeepSpeed", schedules=("1f1b",), precisions=_PRECISIONS, shards=("none", "optimizer"), tensor=False
)


def deepspeed_config(plan: Plan) -> str:
    """Return the file's text, JSON.

    Raises:
        UsageError: DeepSpeed does not support the plan; says why, and what to plan instead.
    """
    result, training = decoder_of(plan, _ABLE), plan.training
    config: dict[str, Any] = {
        "train_batch_size": training.batch_size,
        "train_micro_batch_size_per_gpu": result.each(training.microbatch_size),
        "gradient_accumulation_steps": training.microbatches,
        "pipeline": {
            "stages": len(plan.stages),
            "partition": list(result.bounds),
            "activation_checkpoint_interval": 1 if any(result.recomputed) else 0,
        },
        "gradient_clipping": training.clip_norm or 0.0,  # 0 disables clipping; DeepSpeed's default clips
    }
    if result.grid.shard == "optimizer":
        config["zero_optimization"] = {"stage": 1}
    return json.dumps(config | _PRECISIONS[training.precision], indent=2) + "\n"
