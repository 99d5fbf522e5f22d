"""A decoder's plan for other tools: an embedding, equal blocks and a head, in stages of equal grids.

Tools for language models support only this: all stages have the same numbers of replicas and shards, without
offloading and without pipefit's own schedules. Everything that a tool cannot do is refused, in one sentence,
so that a file never trains differently from the plan, except for recomputation: tools recompute whole blocks,
for all microbatches, so a partly recomputed block is recomputed whole.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from pipefit.errors import UsageError
from pipefit.memory import most_receive_buffers
from pipefit.schema.decisions import What
from pipefit.schema.grids import Grid
from pipefit.schema.plan import Plan
from pipefit.texts import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The blocks of each stage, and the recomputed blocks among them."""

    blocks: tuple[int, ...]
    recomputed: tuple[int, ...]
    sequence: int
    bounds: tuple[int, ...]  # of stages, in pipefit's blocks, including embedding and head
    norm: int  # the stage with the first block after the equal ones: the norm before the head, or both
    tied: bool  # whether embedding and head share their weights
    grid: Grid  # of the first stage; all others are equal

    def each(self, samples: int) -> int:
        """Return the local batch of a replica, from `samples`."""
        return samples // self.grid.data

    @property
    def layers(self) -> int:
        """The total number of blocks."""
        return sum(self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """The abilities of a tool: its name, and values of `pipefit plan`'s options."""

    tool: str
    schedules: Collection[str]
    precisions: Collection[str]
    shards: Collection[str]  # state that replicas may divide
    tensor: bool  # whether layers may be divided


def decoder_of(plan: Plan, able: Abilities) -> Decoder:
    """Convert the plan to stages of decoder blocks, for a tool with these abilities.

    Raises:
        UsageError: the tool does not support the plan, or its model is not a decoder of equal blocks; says
            why, and what to plan instead.
    """
    tool = able.tool
    _check(plan, able)
    edges = plan.profile.edges
    if not {stage.start for stage in plan.stages} <= set(edges):
        raise UsageError(
            f"a stage starts inside a block, which {tool} does not split: plan with granularity blocks"
        )
    first, last = _equal(plan, tool)
    bounds = tuple(edges.index(layer) for layer in (*(stage.start for stage in plan.stages), edges[-1]))
    touched = {
        layer for decision in plan.decisions for layer in range(decision.layers[0], decision.layers[-1] + 1)
    }
    whole = [bool(touched & set(range(*pair))) for pair in pairwise(edges)]
    inside = [range(max(start, first), min(stop, last)) for start, stop in pairwise(bounds)]
    return Decoder(
        blocks=tuple(map(len, inside)),
        recomputed=tuple(sum(whole[block] for block in blocks) for blocks in inside),
        sequence=max(plan.profile.fingerprint.lengths, default=0),
        bounds=bounds,
        norm=max(stage for stage, start in enumerate(bounds[:-1]) if start <= last),
        tied=_tied(plan, tool, edges[first], edges[last]),
        grid=plan.stages[0].grid,
    )


def check_tokens(plan: Plan, tool: str) -> None:
    """Check that samples are sequences of tokens, which a tool's own embedding needs.

    Raises:
        UsageError: they are something else, such as pictures.
    """
    if not plan.profile.fingerprint.lengths:
        raise UsageError(
            f"{plan.profile.model} reads {' and '.join(plan.profile.fingerprint.inputs) or 'no tokens'}, "
            f"but {tool} trains only models of token sequences"
        )


def _check(plan: Plan, able: Abilities) -> None:
    """Check that the tool supports the plan outside of the model's layers; reports all obstacles at once.

    Raises:
        UsageError: it does not; names the obstacles, and the options to plan with.
    """
    result = dict(_impossible(plan, able))
    if result:
        raise UsageError(
            f"{able.tool} does not support {', or '.join(result.values())}: plan with {' '.join(result)}"
        )


def _impossible(plan: Plan, able: Abilities) -> Iterator[tuple[str, str]]:
    """Yield the options to plan with, and the description, of each obstacle."""
    if plan.training.schedule not in able.schedules:
        yield f"--schedule {' or '.join(able.schedules)}", f"schedule {plan.training.schedule}"
    if plan.training.precision not in able.precisions:
        yield f"--precision {' or '.join(able.precisions)}", f"precision {plan.training.precision}"
    grids = Counter((stage.grid.data, stage.grid.tensor) for stage in plan.stages)
    ((data, tensor), _), *others = grids.most_common()
    if others or (tensor > 1 and not able.tensor):
        what = (
            "replicas or shards that differ from stage to stage"
            if others
            else "tensor shards in its pipelines"
        )
        yield f"--data {data} --tensor {tensor if able.tensor else 1}", what
    shards = {stage.grid.shard for stage in plan.stages if stage.grid.data > 1}
    if len(shards) > 1 or not shards <= {*able.shards}:
        yield f"--shard {' or '.join(able.shards)}", f"replicas that shard {' or '.join(sorted(shards))}"
    if len(plan.workers) < sum(len(stage.devices) for stage in plan.stages):
        yield "--stages N, one for each device", "several stages on a device"
    if moved := next((decision for decision in plan.decisions if decision.what is not What.RECOMPUTE), None):
        yield "--planner exact (and --recompute always if that does not fit)", f"offloaded tensors ({moved})"


def _tied(plan: Plan, tool: str, first: int, last: int) -> bool:
    """Return whether embedding and head share parameters; the blocks are layers `first` to `last - 1`.

    Raises:
        UsageError: other layers share one.
    """
    for shared in plan.measurement.shared:
        if any(first <= user < last for user in shared.users):
            raise UsageError(
                f"layers share {shared.name}, but {tool} can only share the weights of embedding and head"
            )
    return bool(plan.measurement.shared)


def _equal(plan: Plan, tool: str) -> tuple[int, int]:
    """Return the half-open range of the model's equal blocks.

    Raises:
        UsageError: they are not consecutive, with other blocks before and after them.
    """
    kinds = plan.measurement.layers
    blocks = [kinds[start:stop] for start, stop in pairwise(plan.profile.edges)]
    kind, count = Counter(blocks).most_common(1)[0]
    first = blocks.index(kind)
    if first == 0 or first + count == len(blocks) or set(blocks[first : first + count]) != {kind}:
        raise UsageError(
            f"{plan.profile.model} is not a decoder in the form that {tool} needs: an embedding, "
            "consecutive equal blocks, and a head"
        )
    return first, first + count


# ---- Arguments of Megatron-LM: the pipeline's layout, tensor shards, the batch, and recomputation
#
# One argument per line, quoted for a shell: `xargs torchrun ... pretrain_gpt.py < FILE`. Megatron derives the
# number of replicas from the number of processes, which is stages times replicas times shards. In the layout,
# E is the embedding, t a decoder block and L the head with the loss; | divides stages. Megatron recomputes
# the same number of blocks on every stage: that of the stage with the most. Its half precisions have master
# weights, and embedding and head share their weights by default. (Megatron Core, "Custom Pipeline Model
# Parallel Layout", and `PipelineParallelLayerLayout`, which reads the layout.)


_MEGATRON_PRECISIONS = {"float32": (), "master-bfloat16": (("--bf16",),), "master-float16": (("--fp16",),)}
_MEGATRON = Abilities(
    tool="Megatron",
    schedules=("1f1b",),
    precisions=_MEGATRON_PRECISIONS,
    shards=("none", "optimizer"),
    tensor=True,
)


def megatron_arguments(plan: Plan) -> str:
    """Return the file's text.

    Raises:
        UsageError: Megatron does not support the plan; says why, and what to plan instead.
    """
    result, training = decoder_of(plan, _MEGATRON), plan.training
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
    lines += _MEGATRON_PRECISIONS[training.precision]
    return "".join(f"{shlex.join(words)}\n" for words in (*lines, *_megatron_recomputation(result)))


def layout(decoder: Decoder) -> str:
    """Return the pipeline's layout, such as `Ettt|tttt|tttt|tL`."""
    return f"E{'|'.join('t' * count for count in decoder.blocks)}L"


def _megatron_recomputation(decoder: Decoder) -> list[tuple[str, ...]]:
    most = max(decoder.recomputed)
    if not most:
        return []
    method, number = ("uniform", 1) if decoder.recomputed == decoder.blocks else ("block", most)
    return [
        ("--recompute-granularity", "full"),
        ("--recompute-method", method),
        ("--recompute-num-layers", str(number)),
    ]


# ---- A Python file for torchtitan's configuration: its `parallelism`, `training` and recomputation
#
# Import the three names in a config_registry function of a model: `replace(config, parallelism=parallelism,
# ...)`. Modules have the names of torchtitan's decoders. torchtitan recomputes blocks on all stages or on
# none: on all if a plan recomputes any. CUDA graphs are disabled, since its pipelines refuse them, and so is
# autocast. (torchtitan 0.3, `torchtitan.config.configs` and `torchtitan.trainer`.)


_TORCHTITAN_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe"}
_TORCHTITAN_PRECISIONS = (
    "float32",
    "bfloat16",
)  # torchtitan's autocast supports one device and its replicas only
_TORCHTITAN = Abilities(
    tool="torchtitan",
    schedules=_TORCHTITAN_SCHEDULES,
    precisions=_TORCHTITAN_PRECISIONS,
    shards=("none", "parameters"),
    tensor=False,
)


def torchtitan_config(plan: Plan) -> str:
    """Return the file's text.

    Raises:
        UsageError: torchtitan does not support the plan; says why, and what to plan instead.
    """
    result, training = decoder_of(plan, _TORCHTITAN), plan.training
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
        f'"""A plan of pipefit: {plan.profile.model} in {counted(len(parts), "stage")}.{_held(plan)}"""\n\n'
        "from torchtitan.config import ParallelismConfig, TrainingConfig\n"
        "from torchtitan.distributed.activation_checkpoint import FullAC\n\n"
        "parallelism = ParallelismConfig(\n"
        f"    pipeline_parallel_degree={len(parts)},\n"
        f"    pipeline_parallel_schedule={_TORCHTITAN_SCHEDULES[training.schedule]!r},\n"
        f"    pipeline_parallel_microbatch_size={result.each(training.microbatch_size)},\n"
        f"{_torchtitan_replicas(result)}"
        f"    module_fqns_per_model_part=[\n{rows}    ],\n)\n"
        f"training = TrainingConfig(\n    local_batch_size={local},\n    "
        f"global_batch_size={training.batch_size},\n"
        f"{length}    max_norm={norm},\n    dtype={training.precision!r},\n"
        "    mixed_precision_param='float32',\n    disable_cuda_graphs=True,\n)\n"
        f"activation_checkpoint = {recomputes}\n"
    )


def _held(plan: Plan) -> str:
    """Return a further paragraph about receive buffers; empty for one stage."""
    sentence = most_receive_buffers(plan)
    return f"\n\n{sentence[0].upper()}{sentence[1:]}.\n" if sentence else ""


def _torchtitan_replicas(decoder: Decoder) -> str:
    """Return lines for replicas that hold a whole stage, or divide its parameters, which is torchtitan's
    default.
    """
    if decoder.grid.shard == "parameters":
        return (
            f"    data_parallel_shard_degree={decoder.grid.data},\n    fsdp_reshard_after_forward='always',\n"
        )
    return f"    data_parallel_replicate_degree={decoder.grid.data},\n    data_parallel_shard_degree=1,\n"


# ---- A configuration of DeepSpeed's pipeline engine: batch, precision, clipping and stages
#
# `partition` has the first block of every stage and the number of blocks. DeepSpeed divides by its own rule,
# so pass these to a `PipelineModule` whose `_partition_layers` sets `self.parts` and `self._local_start`,
# `self._local_stop`. `activation_checkpoint_interval` 1 recomputes every block, 0 none: 1 if the plan
# recomputes any. Its half precisions have master weights. (DeepSpeed 0.19, `deepspeed.runtime.config`.)


_DEEPSPEED_PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "master-bfloat16": {"bf16": {"enabled": True}},
    "master-float16": {"fp16": {"enabled": True}},
}
_DEEPSPEED = Abilities(
    tool="DeepSpeed",
    schedules=("1f1b",),
    precisions=_DEEPSPEED_PRECISIONS,
    shards=("none", "optimizer"),
    tensor=False,
)


def deepspeed_config(plan: Plan) -> str:
    """Return the file's text, JSON.

    Raises:
        UsageError: DeepSpeed does not support the plan; says why, and what to plan instead.
    """
    result, training = decoder_of(plan, _DEEPSPEED), plan.training
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
    return json.dumps(config | _DEEPSPEED_PRECISIONS[training.precision], indent=2) + "\n"
