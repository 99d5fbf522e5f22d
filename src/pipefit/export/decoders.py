"""A decoder's plan for other tools: an embedding, equal blocks and a head, in stages of equal grids.

Tools for language models support only this: all stages have the same numbers of replicas and shards, without
offloading and without pipefit's own schedules. Everything in a plan that a tool cannot do is refused at once,
in one sentence, so that a file never trains differently from the plan, except for recomputation: tools
recompute whole blocks, for all microbatches, so a partly recomputed block is recomputed whole.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import Any, Literal

from pipefit.errors import UsageError
from pipefit.memory import most_receive_buffers
from pipefit.schema.decisions import Decision, SavedTensors, State, What
from pipefit.schema.devices import MemberKind
from pipefit.schema.grids import Grid
from pipefit.schema.plan import Plan
from pipefit.texts import counted

Offloadable = Literal["activations", "gradients", "optimizer", "parameters", "versions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """The abilities of a tool: its name, and values of `pipefit plan`'s options."""

    tool: str
    precisions: Collection[str]
    shards: Collection[str]  # state that replicas may divide
    schedules: Collection[str] = ("1f1b", "eager-1f1b")
    stages: bool = True  # whether a model may be divided into stages
    several: bool = (
        False  # whether a device may hold several stages, of which stage s is on device s mod devices
    )
    tensor: bool = False  # whether layers may be divided
    offloads: Collection[Offloadable] = ()  # what may be on a host between its uses

    def check(self, plan: Plan) -> None:
        """Check that the tool supports the plan, apart from the model's layers.

        Raises:
            UsageError: it does not; names all obstacles, and the options to plan with.
        """
        found = dict(self._obstacles(plan))
        if found:
            raise UsageError(
                f"{self.tool} does not support {', or '.join(found.values())}: plan with {' '.join(found)}"
            )

    def _obstacles(self, plan: Plan) -> Iterator[tuple[str, str]]:
        """Yield the options to plan with, and the description, of each obstacle."""
        if not self.stages and len(plan.stages) > 1:
            yield "--stages 1", "several stages"
        if plan.training.schedule not in self.schedules:
            yield f"--schedule {' or '.join(self.schedules)}", f"schedule {plan.training.schedule}"
        if plan.training.precision not in self.precisions:
            yield f"--precision {' or '.join(self.precisions)}", f"precision {plan.training.precision}"
        grids = Counter((stage.grid.data, stage.grid.tensor) for stage in plan.stages)
        ((data, tensor), _), *others = grids.most_common()
        if others or (tensor > 1 and not self.tensor):
            what = "replicas or shards that differ from stage to stage" if others else "tensor shards"
            yield f"--data {data} --tensor {tensor if self.tensor else 1}", what
        shards = {stage.grid.shard for stage in plan.stages if stage.grid.data > 1}
        if len(shards) > 1 or not shards <= {*self.shards}:
            yield f"--shard {' or '.join(self.shards)}", f"replicas that shard {' or '.join(sorted(shards))}"
        ranks = plan.ranks
        in_turn = all(
            [*held] == [*range(rank, len(plan.stages), len(ranks))] for rank, held in enumerate(ranks)
        )
        if len(ranks) < len(plan.stages) and not (self.several and in_turn):
            yield (
                "--stages N, one for each device",
                "several stages on a device" + ", not in turn" * self.several,
            )
        for decision in plan.decisions:
            kind = offloaded(decision)
            if kind is not None and (kind not in self.offloads or not is_on_host(decision)):
                yield (
                    "--planner exact (and --recompute always if that does not fit)",
                    f"offloaded tensors ({decision})",
                )
                break


def offloaded(decision: Decision) -> Offloadable | None:
    """Return what a decision offloads; None if it recomputes."""
    if decision.what is What.RECOMPUTE:
        return None
    return decision.subject.kind if isinstance(decision.subject, State) else "activations"


def is_on_host(decision: Decision) -> bool:
    """Return whether the decision's place is a host."""
    return all(member.kind is MemberKind.HOST for member, _ in decision.place or ())


def recomputes(plan: Plan) -> bool:
    """Return whether the plan recomputes any layer."""
    return any(decision.what is What.RECOMPUTE for decision in plan.decisions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The blocks of each stage, and the recomputed blocks among them."""

    blocks: tuple[int, ...]
    layers: range  # of the blocks, in pipefit's layers
    recomputed: tuple[int, ...]
    sequence: int
    bounds: tuple[int, ...]  # of stages, in pipefit's blocks, including embedding and head
    norm: int  # the stage with the first block after the equal ones: the norm before the head, or both
    tied: bool  # whether embedding and head share their weights
    grid: Grid  # of the first stage; all others are equal

    def each(self, samples: int) -> int:
        """Return the local batch of a replica, from `samples`."""
        return samples // self.grid.data

    def modules(self, embedding: str, block: str, norm: str, head: str) -> list[list[str]]:
        """Return the modules of each stage by a tool's names, of which `block` precedes a block's number."""
        numbers = pairwise(accumulate(self.blocks, initial=0))
        parts = [[f"{block}{number}" for number in range(*pair)] for pair in numbers]
        parts[0].insert(0, embedding)
        parts[self.norm].append(norm)
        parts[-1].append(head)
        return parts


def decoder_of(plan: Plan, able: Abilities) -> Decoder:
    """Convert the plan to stages of decoder blocks, for a tool with these abilities.

    Raises:
        UsageError: the tool does not support the plan, or its model is not a decoder of equal blocks; says
            why, and what to plan instead.
    """
    tool = able.tool
    able.check(plan)
    edges = plan.profile.edges
    if not {stage.start for stage in plan.stages} <= set(edges):
        raise UsageError(
            f"a stage starts inside a block, which {tool} does not split: plan with granularity blocks"
        )
    first, last = _equal(plan, tool)
    bounds = tuple(edges.index(layer) for layer in (*(stage.start for stage in plan.stages), edges[-1]))
    recomputed = _touched(plan, None)
    whole = [bool(recomputed & set(range(*pair))) for pair in pairwise(edges)]
    inside = [range(max(start, first), min(stop, last)) for start, stop in pairwise(bounds)]
    return Decoder(
        blocks=tuple(map(len, inside)),
        layers=range(edges[first], edges[last]),
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
# the same number of blocks on every stage: that of the stage with the most; or, if a plan recomputes only
# norms, attention or MLPs, and some in every block, those of all blocks. It offloads the inputs of the same
# modules in all blocks, and the optimizer state of all. Its half precisions have master weights, and
# embedding and head share their weights by default. (Megatron Core, "Custom Pipeline Model Parallel Layout",
# `PipelineParallelLayerLayout`, which reads the layout, and `TransformerConfig`.)


_MEGATRON_PRECISIONS = {"float32": (), "master-bfloat16": (("--bf16",),), "master-float16": (("--fp16",),)}
_MEGATRON = Abilities(
    tool="Megatron",
    schedules=("1f1b",),
    precisions=_MEGATRON_PRECISIONS,
    shards=("none", "optimizer"),
    tensor=True,
    offloads=("activations", "optimizer"),
)
_NORM, _ATTENTION, _MLP, _PROJECTION = (
    re.compile(pattern)
    for pattern in (
        r"(^|_)(layer)?norm|^ln_",
        r"^(self_)?attn$|^(self_)?attention$",
        r"^mlp$|^feed_forward$|^ffn$",
        r"^(o|c|out)_proj$|^wo$|^dense$",
    )
)


def megatron_arguments(plan: Plan) -> str:
    """Return the file's text.

    Raises:
        UsageError: Megatron does not support the plan; says why, and what to plan instead.
    """
    result, training = decoder_of(plan, _MEGATRON), plan.training
    check_tokens(plan, "Megatron")
    kinds = set(map(offloaded, plan.decisions))
    if "optimizer" in kinds and result.grid.data > 1 and result.grid.shard == "none":
        raise UsageError(
            "Megatron offloads optimizer state only of replicas that divide it: plan with --shard optimizer"
        )
    lines: list[tuple[str, ...]] = [
        ("--num-layers", str(sum(result.blocks))),
        ("--pipeline-model-parallel-size", str(len(plan.stages))),
        ("--pipeline-model-parallel-layout", layout(result)),
        ("--micro-batch-size", str(result.each(training.microbatch_size))),
        ("--global-batch-size", str(training.batch_size)),
        ("--clip-grad", str(training.clip_norm or 0.0)),  # 0 disables clipping; Megatron's default clips
    ]
    if result.grid.tensor > 1:
        lines.append(("--tensor-model-parallel-size", str(result.grid.tensor)))
    if result.grid.shard == "optimizer" or "optimizer" in kinds:
        lines.append(("--use-distributed-optimizer",))
    if "optimizer" in kinds:
        lines += [("--use-precision-aware-optimizer",), ("--optimizer-cpu-offload",)]
    if result.sequence:
        lines.append(("--seq-length", str(result.sequence)))
    if not result.tied:
        lines.append(("--untie-embeddings-and-output-weights",))
    if result.grid.sequences:
        lines.append(("--sequence-parallel",))
    lines += _MEGATRON_PRECISIONS[training.precision]
    lines += _megatron_recomputation(plan, result)
    lines += _megatron_offloading(plan, result)
    return "".join(f"{shlex.join(words)}\n" for words in lines)


def layout(decoder: Decoder) -> str:
    """Return the pipeline's layout, such as `Ettt|tttt|tttt|tL`."""
    return f"E{'|'.join('t' * count for count in decoder.blocks)}L"


def _megatron_recomputation(plan: Plan, decoder: Decoder) -> list[tuple[str, ...]]:
    most = max(decoder.recomputed)
    if not most:
        return []
    uniform = decoder.recomputed == decoder.blocks
    modules = {_module(plan, layer) for layer in _touched(plan, None) if layer in decoder.layers}
    if uniform and modules <= {"layernorm", "core_attn", "mlp"}:
        return [("--recompute-granularity", "selective"), ("--recompute-modules", *sorted(modules))]
    method, number = ("uniform", 1) if uniform else ("block", most)
    return [
        ("--recompute-granularity", "full"),
        ("--recompute-method", method),
        ("--recompute-num-layers", str(number)),
    ]


def _megatron_offloading(plan: Plan, decoder: Decoder) -> list[tuple[str, ...]]:
    """Return the arguments that offload the inputs of modules.

    Raises:
        UsageError: a plan offloads tensors of other modules.
    """
    names = {
        "layernorm": "attn_norm",
        "core_attn": "core_attn",
        "attn_proj": "attn_proj",
        "qkv_linear": "qkv_linear",
    }
    modules = set[str]()
    for layer in sorted(_touched(plan, "activations")):
        name = names.get(_module(plan, layer) if layer in decoder.layers else "")
        if name is None:
            raise UsageError(
                f"Megatron does not offload tensors that {plan.profile.layers[layer]} saves, only inputs of "
                "norms, projections and attention: "
                "plan with --planner exact (and --recompute always if that does not fit)"
            )
        block = max(edge for edge in plan.profile.edges if edge <= layer)
        after = any(_module(plan, before) == "core_attn" for before in range(block, layer))
        modules.add("mlp_norm" if name == "attn_norm" and after else name)
    if not modules:
        return []
    modules |= {"core_attn"} if "attn_proj" in modules else set()  # which needs the same tensor
    return [("--fine-grained-activation-offloading",), ("--offload-modules", *sorted(modules))]


def _touched(plan: Plan, what: Offloadable | None) -> set[int]:
    """Return the layers that are recomputed, for None, or of which something is offloaded."""
    layers = set[int]()
    for decision in plan.decisions:
        if offloaded(decision) == what:
            saved = isinstance(decision.subject, SavedTensors)
            layers |= {*(decision.layers if saved else range(decision.layers[0], decision.layers[-1] + 1))}
    return layers


def _module(plan: Plan, layer: int) -> str:
    """Return Megatron's module of a layer, by usual names of decoders' modules; empty if there is none."""
    *path, last = plan.profile.layers[layer].partition("@")[0].split(".")
    if _NORM.search(last):
        return "layernorm"
    if any(map(_MLP.search, (*path, last))):
        return "mlp"
    if _ATTENTION.search(last):
        return "core_attn"
    if any(map(_ATTENTION.search, path)):
        return "attn_proj" if _PROJECTION.search(last) else "qkv_linear"
    return ""


# ---- A Python file for torchtitan's configuration: its `parallelism`, `training` and recomputation
#
# Import the three names in a config_registry function of a model: `replace(config, parallelism=parallelism,
# ...)`. Modules have the names of torchtitan's decoders. Orders other than 1F1B and GPipe, and several stages
# on a device, are read from schedule.csv beside the file. torchtitan recomputes blocks on all stages or on
# none: on all if a plan recomputes any. CUDA graphs are disabled, since its pipelines refuse them. Autocast
# supports one device and its replicas only, so half precision is that of FSDP. (torchtitan 0.3 and its main
# branch of August 2026, `torchtitan.config.configs`, `torchtitan.distributed.pipeline_parallel`.)


_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe"}  # by torch's names
_ORDERS = (*_SCHEDULES, "eager-1f1b", "torchgpipe")
_PATH = "from pathlib import Path\n\n"
_FSDP_PRECISIONS = ("float32", "bfloat16", "mixed-bfloat16", "master-bfloat16")


def torchtitan_config(plan: Plan) -> str:
    """Return the file's text.

    Raises:
        UsageError: torchtitan does not support the plan; says why, and what to plan instead.
    """
    able = Abilities(
        tool="torchtitan",
        schedules=_ORDERS,
        precisions=_FSDP_PRECISIONS if plan.stages[0].grid.shard == "parameters" else _FSDP_PRECISIONS[:2],
        shards=("none", "parameters"),
        several=True,
        offloads=fsdp_offloads(plan),
    )
    result, training = _pipelined_decoder(plan, able), plan.training
    parts = result.modules("tok_embeddings", "layers.", "norm", "lm_head")
    # A single stage accumulates gradients
    local = result.each(training.batch_size if len(parts) > 1 else training.microbatch_size)
    rows = "".join(f"        {part!r},\n" for part in parts)
    norm = 'float("inf")' if training.clip_norm is None else repr(training.clip_norm)
    recomputed = "FullAC.Config()" if any(result.recomputed) else "None"
    dtype = "bfloat16" if training.precision == "bfloat16" else "float32"
    gathered = "float32" if training.precision == "float32" else "bfloat16"
    tokens = result.each(training.microbatch_size) * result.sequence
    return (
        f'"""A plan of pipefit: {plan.profile.model} in {counted(len(parts), "stage")}.{_notes(plan)}"""\n\n'
        f"{_PATH if needs_csv(plan) else ''}"
        "from torchtitan.config import ParallelismConfig, TrainingConfig\n"
        "from torchtitan.distributed.activation_checkpoint import FullAC\n\n"
        'if hasattr(ParallelismConfig, "num_pp_microbatches"):  # after torchtitan 0.3\n'
        f"    microbatches = dict(num_pp_microbatches={training.microbatches})\n"
        f"    batch = dict(num_tokens_per_microbatch_per_dp_rank={tokens}, "
        f"num_tokens_per_train_step={training.batch_size * result.sequence}, "
        f"max_context_length={result.sequence})\n"
        "else:\n"
        "    microbatches = dict("
        f"pipeline_parallel_microbatch_size={result.each(training.microbatch_size)})\n"
        f"    batch = dict(local_batch_size={local}, global_batch_size={training.batch_size}, "
        f"seq_len={result.sequence})\n\n"
        "parallelism = ParallelismConfig(\n"
        f"    pipeline_parallel_degree={len(plan.ranks)},\n"
        f"{_torchtitan_order(plan)}"
        "    **microbatches,\n"
        f"{_torchtitan_replicas(result)}"
        f"    module_fqns_per_model_part=[\n{rows}    ],\n)\n"
        f"training = TrainingConfig(\n    **batch,\n    max_norm={norm},\n    dtype={dtype!r},\n"
        f"    mixed_precision_param={gathered!r},\n    enable_cpu_offload={bool(fsdp_offloads(plan))},\n"
        "    disable_cuda_graphs=True,\n)\n"
        f"activation_checkpoint = {recomputed}\n"
    )


def _pipelined_decoder(plan: Plan, able: Abilities) -> Decoder:
    """Return the decoder of a tool that builds its stages from copies of its own model.

    Raises:
        UsageError: the tool does not support it.
    """
    result = decoder_of(plan, able)
    check_tokens(plan, able.tool)
    if result.tied and len(plan.stages) > 1:
        raise UsageError(
            f"{able.tool}'s pipelines do not support shared weights of embedding and head: "
            "plan with --stages 1"
        )
    return result


def fsdp_offloads(plan: Plan) -> tuple[Offloadable, ...]:
    """Return what FSDP keeps on hosts: all state of replicas that divide parameters, or nothing."""
    everything: tuple[Offloadable, ...] = ("gradients", "optimizer", "parameters")
    divides = plan.stages[0].grid.shard == "parameters" and "parameters" in map(offloaded, plan.decisions)
    return everything if divides else ()


def needs_csv(plan: Plan) -> bool:
    """Return whether torch has no name for the plan's order, so that a tool reads it from a file."""
    return len(plan.stages) > 1 and (
        plan.training.schedule not in _SCHEDULES or len(plan.ranks) < len(plan.stages)
    )


def _notes(plan: Plan) -> str:
    """Return further paragraphs: how to write the order, and receive buffers; empty for one stage."""
    sentence = most_receive_buffers(plan)
    notes = [f"{sentence[0].upper()}{sentence[1:]}."] if sentence else []
    if needs_csv(plan):
        notes.insert(
            0, "Write schedule.csv beside this file: pipefit export PLAN --to pipelining -o schedule.csv"
        )
    return "".join(f"\n\n{note}" for note in notes) + "\n" * bool(notes)


def _torchtitan_order(plan: Plan) -> str:
    """Return lines for the schedule; torchtitan places the stages of a device by its name, as looped ones."""
    if not needs_csv(plan):
        return f"    pipeline_parallel_schedule={_SCHEDULES.get(plan.training.schedule, '1F1B')!r},\n"
    name = "1F1B" if len(plan.ranks) == len(plan.stages) else "Interleaved1F1B"
    return (
        f"    pipeline_parallel_schedule={name!r},\n"
        '    pipeline_parallel_schedule_csv=str(Path(__file__).with_name("schedule.csv")),\n'
    )


def _torchtitan_replicas(decoder: Decoder) -> str:
    """Return lines for replicas that hold a whole stage, or divide its parameters, which is torchtitan's
    default.
    """
    if decoder.grid.shard == "parameters":
        return (
            f"    data_parallel_shard_degree={decoder.grid.data},\n    fsdp_reshard_after_forward='always',\n"
        )
    return f"    data_parallel_replicate_degree={decoder.grid.data},\n    data_parallel_shard_degree=1,\n"


# ---- Sections of a NeMo Automodel recipe: `distributed`, `step_scheduler` and `clip_grad_norm`
#
# Modules have the names of Hugging Face's decoders. Stages but the first keep the rotary embedding, which has
# no parameters. FSDP2 computes in half precision unless a policy says otherwise, so the file has one.
# (Automodel 0.6 and 0.7, `recipes._dist_utils`, `components.distributed`.)


def automodel_recipe(plan: Plan) -> str:
    """Return the file's text, YAML.

    Raises:
        UsageError: Automodel does not support the plan; says why, and what to plan instead.
    """
    able = Abilities(
        tool="Automodel",
        schedules=_ORDERS,
        precisions=_FSDP_PRECISIONS,
        shards=("parameters",),
        several=True,
        tensor=True,
        offloads=fsdp_offloads(plan),
    )
    result, training = _pipelined_decoder(plan, able), plan.training
    if training.microbatches < len(plan.ranks) > 1:
        raise UsageError(
            f"Automodel needs {counted(len(plan.ranks), 'microbatch')} for as many devices of a pipeline, "
            f"not {training.microbatches}: plan with --microbatches {len(plan.ranks)} or more"
        )
    grid, samples = result.grid, result.each(training.microbatch_size)
    gathered = "float32" if training.precision == "float32" else "bfloat16"
    parts = result.modules("model.embed_tokens", "model.layers.", "model.norm", "lm_head")
    distributed: dict[str, Any] = {
        "strategy": "fsdp2",
        "dp_size": grid.data,
        "tp_size": grid.tensor,
        "sequence_parallel": grid.sequences,
        "pp_size": len(plan.ranks),
        "activation_checkpointing": any(result.recomputed),
        "reshard_after_forward": True,
        "defer_fsdp_grad_sync": False,
        "mp_policy": {"param_dtype": gathered, "reduce_dtype": "float32"},
    }
    if fsdp_offloads(plan):
        distributed["offload_policy"] = {}  # FSDP's defaults
    if len(parts) > 1:
        distributed["pipeline"] = {
            "pp_schedule": _SCHEDULES.get(training.schedule, "1f1b").lower(),
            "pp_microbatch_size": samples,
            "module_fqns_per_model_part": [[*part, "model.rotary_emb"] for part in parts],
        }
        if needs_csv(plan):
            distributed["pipeline"]["pp_schedule_csv"] = "schedule.csv"
    config: dict[str, Any] = {
        "distributed": distributed,
        "step_scheduler": {
            "global_batch_size": training.batch_size,
            "local_batch_size": samples * (training.microbatches if len(parts) > 1 else 1),
        },
        "clip_grad_norm": {"max_norm": training.clip_norm or inf},  # Automodel's default clips
    }
    comments = "".join(f"# {line}\n" for line in _notes(plan).splitlines() if line)
    return comments + yaml_text(config)


def yaml_text(values: dict[str, Any], indent: str = "") -> str:
    """Return a mapping as YAML: nested mappings as blocks, everything else in YAML's flow style, as JSON."""
    lines = []
    for name, value in values.items():
        if isinstance(value, dict) and value:
            lines.append(f"{indent}{name}:\n{yaml_text(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{name}: {'.inf' if value == inf else json.dumps(value)}\n")
    return "".join(lines)


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
    tool="DeepSpeed's pipeline engine",
    schedules=("1f1b",),
    precisions=_DEEPSPEED_PRECISIONS,
    shards=("none", "optimizer"),
)


def deepspeed_pipeline(plan: Plan) -> str:
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
