"""A plan as arguments of Megatron-LM: the pipeline's layout, tensor shards, the batch, and recomputation.

One argument per line, quoted for a shell: `xargs torchrun ... pretrain_gpt.py < FILE`. Megatron derives the
number of replicas from the number of processes, which is stages times replicas times shards. In the layout, E
is the embedding, t a decoder block and L the head with the loss; | divides stages. Megatron recomputes
the same number of blocks on every stage: that of the stage with the most. Its half precisions have master
weights, and embedding and head share their weights by default. (Megatron Core, "Custom Pipeline Model
Parallel Layout", and `PipelineParallelLayerLayout`, which reads the layout.)
"""

from __future__ import annotations

import shlex

from pipefit.export.decoders import Abilities, Decoder, check_tokens, decoder_of
from pipefit.schema.plan import Plan

_PRECISIONS = {"float32": (), "master-bfloat16": (("--bf16",),), "master-float16": (("--fp16",),)}
_ABLE = Abilities(
    tool="Megatron", schedules=("1f1b",), precisions=_PRECISIONS, shards=("none", "optimizer"), tensor=True
)


def megatron_arguments(plan: Plan) -> str:
    """Return the file's text.

    Raises:
        UsageError: Megatron does not support the plan; says why, and what to plan instead.
    """
    result, training = decoder_of(plan, _ABLE), plan.training
    check_tokens(plan, "Megatron")
    lines: list[tuple[str, ...]] = [
        ("--num-layers", str(result.layers)),
        ("--pipeline-model-parallel-size", str(len(plan.stages))),
        ("--pipeline-model-parallel-layout", layout(result)),
        ("--micro-batch-size", str(result.each(training.microbatch_size))),
        ("--global-batch-size", str(training.batch_size)),
        ("--clip-grad", str(training.clip_norm or 0.0)),  # 0 disables clipping; Megatron's default clips
    ]
    if result.grid.tensor > 1:
        lines.append(("--tensor-model-parallel-size", str(result.grid.tensor)))
    if result.grid.shard == "optimizer":
        lines.append(("--use-distributed-optimizer",))
    if result.sequence:
        lines.append(("--seq-length", str(result.sequence)))
    if not result.tied:
        lines.append(("--untie-embeddings-and-output-weights",))
    lines += _PRECISIONS[training.precision]
    return "".join(f"{shlex.join(words)}\n" for words in (*lines, *_recomputation(result)))


def layout(found: Decoder) -> str:
    """Return the pipeline's layout, such as `Ettt|tttt|tttt|tL`."""
    return f"E{'|'.join('t' * count for count in found.blocks)}L"


def _recomputation(found: Decoder) -> list[tuple[str, ...]]:
    most = max(found.recomputed)
    if not most:
        return []
    method, number = ("uniform", 1) if found.recomputed == found.blocks else ("block", most)
    return [
        ("--recompute-granularity", "full"),
        ("--recompute-method", method),
        ("--recompute-num-layers", str(number)),
    ]
